// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A random serving day through quantize_q, plan_step, expand_rows and SparseAttnIndexer. Requests arrive, are prefilled
// in chunks, decode with drafts that are partly rejected, are preempted and give their pages to others, finish. Every
// answer equals one computed from scratch: all keys of the request quantised anew into one matrix, and mqa_topk of the
// same backend over it. A new feature joins by a field of Geometry.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/backend_test.h"

namespace topkey::testing {

/// What a day is like. All of it but the name may grow with later issues.
struct Geometry {
  const char* name;
  KeyFormat format = KeyFormat::fp8;
  Layout layout = Layout::planar;
  int32_t page_size = 16;
  int32_t ratio = 1;     ///< tokens a key row
  int32_t next_n = 3;    ///< most rows of a decode request
  bool rope = false;     ///< norm and rope on the way into the cache
  bool uniform = false;  ///< plans that want decode requests alike
  int32_t heads = 4, head_dim = 32, topk = 24;
  int32_t block_size = 0, blocks = 0;  ///< two-level selection: this layer is the source, one more reads its blocks
  bool reuse = false;                  ///< a later layer is told to leave this one's selection in the buffer
  int64_t requests = 7;                ///< in a batch
  int64_t columns = 0;                 ///< of the block table; 0: enough for max_tokens
  int64_t max_tokens = 320, step_rows = 40;
  int64_t pool_keys = 700;  ///< fewer than all requests can want, so that some are preempted
  uint64_t seed = 1;
  int64_t max_pages() const { return (max_tokens / ratio + page_size - 1) / page_size; }
};

/// One request's life. Its token vectors are drawn once and kept: what a preempted request must store again is the
/// same.
struct Request {
  uint64_t id = 0;
  int64_t prompt = 0, finish = 0;  ///< tokens at which it decodes, and is done
  int64_t cached = 0;              ///< tokens whose keys are stored
  std::vector<std::vector<float>> tokens;
  std::vector<int32_t> pages;
  int64_t rows = 0;  ///< of this step
  bool decodes() const { return cached + 1 >= prompt; }
};

/// A step of the day's layers: the first one, and the one that reads its blocks, where there is one.
struct LayerCall {
  const SparseAttnIndexer* indexer;
  IndexerStep step;
};
/// Runs them one after the other, on host memory.
using Forward = std::function<void(const std::vector<LayerCall>&, const Exec&)>;
/// At once, on copies where the backend is a GPU's.
void forward_eager(const std::vector<LayerCall>& calls, const Exec& exec);

class Day {
 public:
  /// fixed_rows: every step has all rows that a step may have, as a graph does, the last ones padding.
  Day(const Geometry& geometry, std::string backend, Forward forward = forward_eager, bool fixed_rows = false)
      : g_(geometry),
        backend_(std::move(backend)),
        forward_(std::move(forward)),
        fixed_rows_(fixed_rows),
        random_(geometry.seed),
        rope_table_(DType::f32, {g_.max_tokens, 16}),
        norm_weight_(DType::f32, {g_.head_dim}),
        indexer_(config(g_.blocks > 0 ? CandidateRole::source : CandidateRole::none)),
        consumer_(config(g_.blocks > 0 ? CandidateRole::consumer : CandidateRole::none)) {
    const int64_t pages = g_.pool_keys / g_.page_size, bytes = g_.page_size * row_bytes(g_.format, g_.head_dim) + 64;
    pool_ = Array(DType::u8, {pages, bytes});
    std::memset(pool_.as<uint8_t>(), 0xFF, pool_.bytes());  // NaN in every format
    for (int32_t p = 0; p < pages; ++p) free_.push_back(p);
    random_.shuffle(free_);
    for (int64_t i = 0; i < rope_table_.size(); ++i) rope_table_.as<float>()[i] = random_.normal();
    for (int64_t i = 0; i < g_.head_dim; ++i) norm_weight_.as<float>()[i] = 1 + random_.normal() / 4;
    const IndexerLimits limits{0, g_.step_rows, g_.requests, g_.max_pages() * g_.page_size, g_.next_n};
    workspace_bytes_ =
        std::max(indexer_.workspace_bytes(limits, on(backend_)), consumer_.workspace_bytes(limits, on(backend_)));
    workspace_ = aligned_bytes(workspace_bytes_);
  }

  void step();
  int64_t answered = 0, preempted = 0, finished = 0, mixed_steps = 0, padded_rows = 0, rejected = 0;

 private:
  struct Inputs {
    Array query_start, seq_lens, table, k, q, q_scales, weights, row_request, lens, positions, slots;
    Array candidates;
    StepPlan plan{};
    int64_t rows = 0, capacity = 0;
  };

  IndexerConfig config(CandidateRole role) const {
    IndexerConfig c{};
    c.heads = g_.heads, c.head_dim = g_.head_dim, c.topk = g_.topk, c.ratio = g_.ratio, c.format = g_.format;
    c.role = role, c.candidate_block_size = g_.block_size, c.candidate_topk_blocks = g_.blocks;
    return c;
  }
  Norm norm() const {
    Norm n{};
    if (g_.rope) n.kind = NormKind::layer, n.weight = norm_weight_.view(), n.eps = 1e-6F;
    return n;
  }
  Rope rope(const Tensor& positions) const {
    Rope r{};
    if (g_.rope) r.positions = positions, r.cos_sin = rope_table_.view(), r.dim = 16;
    return r;
  }

  // ---- the scheduler
  void arrive();
  void schedule();
  bool make_room(size_t at);
  void preempt(size_t at);
  void advance();
  void draw_tokens(Request& request, int64_t count);

  // ---- a step
  Inputs inputs();
  void quantize(Inputs& in);
  void set_keys(Inputs& in);
  StepPlan plan(const Inputs& in) const;
  void answer(const Inputs& in, const Outputs& out);
  void check(const Inputs& in, const Outputs& out);
  void check_request(const Inputs& in, const Outputs& out, size_t b, int64_t first);
  void check_consumer(const Inputs& in, MqaTopk search, int64_t first);

  Geometry g_;
  std::string backend_;
  Forward forward_;
  bool fixed_rows_;
  Random random_;
  Array rope_table_, norm_weight_;
  SparseAttnIndexer indexer_, consumer_;
  const Outputs* consumed_ = nullptr;  // what the second layer answers in this step
  Array pool_;
  std::vector<int32_t> free_;
  std::vector<Request> running_, waiting_;
  std::shared_ptr<uint8_t> workspace_;
  size_t workspace_bytes_ = 0;
  uint64_t next_id_ = 0;
  int64_t number_ = 0;
};

/// The days of the serving tests: formats, pages, ratios, two levels.
const std::vector<Geometry>& geometries();

/// 200 steps of a day; false where the backend refuses the geometry, which must be because it is unsupported.
bool live_through(const Geometry& geometry, const std::string& backend, const Forward& forward, bool fixed_rows);

}  // namespace topkey::testing
