// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Steps of the layer on one rank alone and on several, from the same requests: what the tests of sharding share. Keys
// and queries are functions of seeds, so that every process of an MPI run makes the same ones. Page tables, owners and
// lengths are computed here once more, row by row, and not by expand_rows.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/testing.h"

namespace topkey::testing {

enum class Kind { context, rows, prefill, prefill_context };
const char* kind_name(Kind kind);

struct ClusterSpec {
  Kind kind = Kind::context;
  int32_t world = 2, interleave = 1;
  KeyFormat format = KeyFormat::fp8;
  int32_t heads = 2, head_dim = 32, topk = 12, ratio = 1, page_size = 16;
  CandidateRole role = CandidateRole::none;
  int32_t block_size = 4, blocks = 5, force_first = 0, force_last = 0;
  bool rope = false, starts = false, shard_decode = false;
  bool without_workspace = false;
  bool pools = false;   ///< the layer over k-pools of `ratio` tokens; topk counts tokens
  int64_t padding = 0;  ///< context, rows: rows behind those of the data, as a graph has them
  Order order = Order::position;
  int64_t max_tokens = 200, pool_pages = 64;
  size_t exchange_limit = 0;
  uint64_t seed = 1;
  void (*change)(IndexerStep&) = nullptr;     ///< what a test changes in every step, before it is answered
  void (*change_rank)(ShardStep&) = nullptr;  ///< and beside it, on every rank
  std::string text() const;
  /// Entries of a tail: a pool, and as many drafts as a step may reject.
  int64_t ring() const { return int64_t{ratio} * (1 + (3 + ratio - 1) / ratio); }
  int64_t columns() const { return topk + (pools ? ratio - 1 : 0); }
  /// Keys that a backend takes which is not one for all.
  void suit(const std::string& backend);
};

/// One request of a step: `rows` new tokens behind `cached` ones. tokens: a seed for each token's key.
struct Turn {
  uint64_t id;
  int64_t cached, rows;
  bool decodes;
  const std::vector<uint64_t>* tokens;
};

/// What a step is made of, whoever answers it: decode requests first.
struct StepData {
  struct Row {
    int64_t turn, token;
  };
  std::vector<Turn> turns;
  std::vector<Row> rows;
  int64_t decode_rows = 0;
  Array q, q_scales, weights, k, gate, candidates;  ///< of all rows
};
StepData step_data(const ClusterSpec& spec, const std::vector<Turn>& turns, uint64_t seed);

/// A cache and its pages: of the whole, or of one rank's part.
class Replica {
 public:
  Replica(const ClusterSpec& spec, Shard shard, uint64_t seed);
  /// Room for these requests; false where the pool has not enough.
  bool make_room(const StepData& data);
  void forget(uint64_t id);
  /// From now on the cache has one page only: all other ids are wild.
  void lose_pages() { pages_ = Array(DType::u8, {1, pages_.view().shape[1]}); }
  /// Slot of the key row that `token` completes; -1 where it completes none, or another rank owns it.
  int64_t slot(uint64_t id, int64_t token) const;
  int64_t tail_slot(uint64_t id, int64_t token) const { return blocks_.at(id) * spec_.ring() + token % spec_.ring(); }
  const Array& tail() const { return tail_; }
  Array table(const StepData& data) const;
  KeyCache cache() const;
  Shard shard() const { return shard_; }

 private:
  ClusterSpec spec_;
  Shard shard_;
  Array pages_, tail_;
  std::vector<int32_t> free_;
  std::map<uint64_t, int64_t> blocks_;  ///< of the tail
  std::map<uint64_t, std::vector<int32_t>> owned_;
};
/// The part that `rank` has under the spec's cut. Ranks that store by each other's slots have one table.
Replica replica_of(const ClusterSpec& spec, int32_t rank);

/// The outputs of a step, row j of them for row `rows[j]` of the data (-1: padding).
struct Answer {
  std::vector<int64_t> rows;
  Array indices, slots, scores, counts, candidates;
};
Answer answer_alone(const ClusterSpec& spec, const Replica& replica, const StepData& data, const Exec& exec);
struct Group {
  Communicator *comm, *prefill;
};
Answer answer_rank(const ClusterSpec& spec, const Replica& replica, const StepData& data, int32_t rank, Group group,
                   const Exec& exec);
ShardSpec shard_spec(const ClusterSpec& spec, int32_t rank);
IndexerConfig indexer_config(const ClusterSpec& spec);

/// Empty, or where the two differ. Padding rows must hold fill.
std::string difference(const Answer& alone, const Answer& rank);

/// Runs one body a rank, each on a thread of its own; what each threw.
std::vector<Thrown> run_ranks(int32_t world, const std::function<void(int32_t)>& body);

}  // namespace topkey::testing
