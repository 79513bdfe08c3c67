// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// CASES chapter 9, sharding, as far as single operations express it: keys interleaved over ranks (whose positions are
// global), rows dealt out to ranks that share an output buffer; and the layer on ranks that are threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "tests/cases/requests.h"
#include "tests/cluster.h"

namespace topkey::cases {
namespace {

// ---- B40: keys over ranks
// -------------------------------------------------------------------------------------------------

/// Slots of one row of positions; `pages`: the request's table.
Ints slots_of(const Ints& positions, const Ints& pages, int32_t page_size, Shard shard, const Exec& exec) {
  const Array indices = ints({positions}), table = ints({pages});
  const Guarded slots(DType::i32, 1, static_cast<int64_t>(positions.size()));
  ToSlots a{};
  a.indices = indices.view(), a.block_table = table.view(), a.page_size = page_size, a.shard = shard;
  a.slots = slots.view();
  support::run(a, exec);
  EXPECT_EQ(slots.touched_outside(), "");
  return row_of<int32_t>(slots.view(), 0);
}

// vllm PR #54541 (#46514): positions of other ranks are translated with the local table. A rank keeps its own, made
// local, and no other.
TEST_P(Cases, B40_global_positions_become_local_slots) {
  const auto local = [&](const Ints& positions, Shard shard) {
    return slots_of(positions, {0}, 4096, shard,
                    exec());  // one page that starts at slot 0: the slot is the local position
  };
  EXPECT_EQ(local({0, 5, 6, 7, 12, 13}, {1, 4, 1}), (Ints{-1, 1, -1, -1, -1, 3}));
  EXPECT_EQ(local({64, 128, 130, 192}, {0, 2, 64}), (Ints{-1, 64, 66, -1}));
  EXPECT_EQ(local({64, 128, 130, 192}, {1, 2, 64}), (Ints{0, -1, -1, 64}));
}

// The same over all ranks: each position has one owner, and no slot of a rank is used twice.
TEST_P(Cases, B40_every_position_has_one_owner) {
  Ints positions = progression(0, 1000);
  Random(140).shuffle(positions);
  for (Shard cut : {Shard{0, 4, 1}, Shard{0, 2, 64}, Shard{0, 3, 16}, Shard{0, 8, 5}}) {
    Ints owners(positions.size(), 0);
    for (cut.rank = 0; cut.rank < cut.world_size; ++cut.rank) {
      std::set<int32_t> used;
      const Ints slots = slots_of(positions, {0}, 4096, cut, exec());
      for (size_t i = 0; i < slots.size(); ++i) {
        if (slots[i] < 0) continue;
        ++owners[i];
        EXPECT_TRUE(used.insert(slots[i]).second) << "slot " << slots[i] << " twice";
      }
    }
    EXPECT_EQ(owners, Ints(positions.size(), 1)) << "world " << cut.world_size << ", interleave " << cut.interleave;
  }
}

/// The parts' selections merged: [W, R, topk].
Picked merged(const std::vector<Picked>& parts, int32_t topk, const Exec& exec) {
  const auto world = static_cast<int64_t>(parts.size()), rows = static_cast<int64_t>(parts[0].indices.size());
  const Array scores(DType::f32, {world, rows, topk}), indices(DType::i32, {world, rows, topk});
  float* score = scores.as<float>();
  int32_t* index = indices.as<int32_t>();
  for (const Picked& part : parts) {
    for (const Floats& row : part.scores) score = std::copy(row.begin(), row.end(), score);
    for (const Ints& row : part.indices) index = std::copy(row.begin(), row.end(), index);
  }
  MergeTopk a{};
  a.scores = scores.view(), a.indices = indices.view(), a.topk = topk, a.rows.count = rows;
  return pick<MergeTopk>(a, exec, true, [](const MergeTopk& written) {
    EXPECT_TRUE(topkey::testing::good(support::compare_selection(written)));
  });
}

/// The key behind a slot of rank `part` is the key of that position in the whole.
void expect_same_keys(const Problem& whole, const Problem& part, const Ints& positions, const Exec& exec) {
  const Ints slots = slots_of(positions, part.page_ids[0], part.spec.page_size, part.shard, exec);
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] < 0 || slots[i] < 0) continue;
    const uint8_t* page = support::element(part.pages.view(), slots[i] / part.spec.page_size);
    const auto bytes = static_cast<size_t>(part.spec.head_dim);
    const uint8_t* own = page + slots[i] % part.spec.page_size * part.spec.head_dim;
    ASSERT_EQ(std::memcmp(own, whole.values_at(0, positions[i]), bytes), 0) << "position " << positions[i];
  }
}

// The same end to end: local searches, merged, equal the single-rank run bit for bit, and their slots hold the same
// keys.
TEST_P(Cases, B40_sharded_searches_equal_a_single_rank) {
  constexpr int32_t kTopk = 96;
  for (bool exact : {false, true}) {
    ProblemSpec spec;
    spec.exact = exact, spec.page_size = 64, spec.seed = 141;
    const Problem whole = requests_of(spec, {700, 90}, {0, 0, 1}, {650, 700, 90});
    const Picked want = expect_right(whole, kTopk, exec());
    for (Shard cut : {Shard{0, 4, 1}, Shard{0, 2, 64}}) {
      std::vector<Picked> parts;
      for (cut.rank = 0; cut.rank < cut.world_size; ++cut.rank) {
        const Problem part = support::shard_of(whole, cut);
        parts.push_back(expect_right(part, kTopk, exec()));
        expect_same_keys(whole, part, want.indices[1], exec());
      }
      const Picked all = merged(parts, kTopk, exec());
      EXPECT_EQ(all.indices, want.indices) << "world " << cut.world_size;
      EXPECT_EQ(all.scores, want.scores) << "world " << cut.world_size;
      EXPECT_EQ(all.counts, want.counts) << "world " << cut.world_size;
    }
  }
}

/// A prompt of `tokens`, then `drafts` rows behind it, under a cut of the spec: what differs from one rank, if anything.
std::string layer_difference(testing::ClusterSpec spec, int64_t tokens, int64_t drafts, const Exec& exec) {
  std::vector<uint64_t> seeds;
  for (int64_t t = 0; t < spec.max_tokens; ++t) seeds.push_back(static_cast<uint64_t>(t + 1));
  testing::Replica alone(spec, Shard{}, 1);
  std::vector<testing::Replica> replicas;
  const auto comms = local_communicators(spec.world), prefill = local_communicators(spec.world);
  for (int32_t r = 0; r < spec.world; ++r) replicas.push_back(testing::replica_of(spec, r));
  std::string found;
  for (const bool decodes : {false, true}) {
    const testing::Turn turn{1, decodes ? tokens : 0, decodes ? drafts : tokens, decodes, &seeds};
    const testing::StepData data = testing::step_data(spec, {turn}, 7);
    EXPECT_TRUE(alone.make_room(data));
    const testing::Answer want = testing::answer_alone(spec, alone, data, exec);
    std::vector<std::string> differences(replicas.size());
    const auto thrown = testing::run_ranks(spec.world, [&](int32_t rank) {
      const auto r = static_cast<size_t>(rank);
      replicas[r].make_room(data);
      Exec own = exec;
      own.threads = 1;
      differences[r] = testing::difference(
          want, testing::answer_rank(spec, replicas[r], data, rank, {comms[r].get(), prefill[r].get()}, own));
    });
    for (size_t r = 0; r < replicas.size(); ++r) found += thrown[r].sentence + differences[r];
  }
  return found;
}

/// Ranks that hold their steps in host memory (tests/cluster.h).
class LayerCases : public Cases {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LayerCases);

// Through the layer: each rank stores its own keys and answers drafts over them; all ranks hold the answer of one rank.
TEST_P(LayerCases, B40_the_layer_on_ranks_equals_a_single_rank) {
  for (const auto& [world, interleave] : {std::pair{4, 1}, std::pair{2, 64}}) {
    testing::ClusterSpec spec;
    spec.world = world, spec.interleave = interleave, spec.topk = 24;
    EXPECT_EQ(layer_difference(spec, 150, 4, exec()), "") << "world " << world << ", interleave " << interleave;
  }
}

// sglang PR #27276: ranks of a context-parallel prefill hold rows r, r+W, ...: 37 rows are 10, 9, 9 and 9.
TEST_P(LayerCases, B32_round_robin_ranks_of_the_layer) {
  for (const testing::Kind kind : {testing::Kind::prefill, testing::Kind::prefill_context}) {
    testing::ClusterSpec spec;
    spec.kind = kind, spec.world = 4, spec.topk = 8;
    EXPECT_EQ(layer_difference(spec, 37, 2, exec()), "") << testing::kind_name(kind);
  }
}

// ---- B42: rows over ranks
// ---------------------------------------------------------------------------------------------------

constexpr int32_t kRequests = 4, kContext = 9000, kWorld = 8, kSelected = 64;

/// Four prompts whose first key is a needle that every row must find.
Problem four_prompts(int32_t rows, int32_t context, bool exact) {
  ProblemSpec spec;
  spec.exact = exact, spec.page_size = 64, spec.seed = 142;
  Ints request, ends;
  for (int32_t r = 0; r < rows; ++r) {
    request.push_back(r * kRequests / rows);
    ends.push_back(context - (rows - 1 - r) % 7);
  }
  Problem p = requests_of(spec, Ints(kRequests, context), request, ends);
  // The needle alone answers the first eight dims of the queries, at full strength; and no head subtracts.
  const uint8_t strong = float_to_e4m3(exact ? 4.F : 448.F);
  const float eight = 8.F;
  for (int64_t i = 0; i < p.q.size(); ++i) {
    if (i % spec.head_dim < 8) p.q.as<uint8_t>()[i] = strong;
  }
  for (int64_t i = 0; i < p.weights.size(); ++i) p.weights.as<float>()[i] = std::abs(p.weights.as<float>()[i]);
  for (int64_t b = 0; b < kRequests; ++b) {
    for (int64_t t = 0; t < context; ++t) std::memset(p.values_at(b, t), t == 0 ? strong : 0, 8);
    std::memset(p.values_at(b, 0) + 8, 0, static_cast<size_t>(spec.head_dim - 8));
    std::memcpy(p.scales_at(b, 0), &eight, sizeof eight);
  }
  return p;
}

/// Rows [first, last) of a chunk that rank `rank` owns: contiguous slices of about equal cost (visible keys).
struct Slice {
  int64_t first, last;
};
Slice slice_of(const Problem& p, Slice chunk, int64_t rank) {
  const int32_t* ends = p.end.as<int32_t>();
  int64_t total = 0, before = 0;
  for (int64_t r = chunk.first; r < chunk.last; ++r) total += ends[r];
  Slice own{chunk.last, chunk.last};
  for (int64_t r = chunk.first; r < chunk.last; ++r) {
    const int64_t owner = (2 * before + ends[r]) * kWorld / (2 * total);  // where the row's middle falls
    if (owner >= rank) own.first = std::min(own.first, r);
    if (owner > rank) own.last = std::min(own.last, r);
    before += ends[r];
  }
  own.first = std::min(own.first, own.last);
  return own;
}

/// One rank's step: for each chunk, gathers the keys of the chunk's requests into a workspace that stays dirty
/// between chunks (also where it owns no row), then searches its own rows into the shared buffer.
void run_rank(const Problem& p, int64_t rank, int64_t chunk_rows, const Tensor& buffer, const Exec& exec) {
  const int64_t dim = p.spec.head_dim;
  const Array values(DType::f8_e4m3fn, {kRequests * kContext, dim}), scales(DType::f32, {kRequests * kContext});
  std::memset(values.as<uint8_t>(), 0xFF, values.bytes());
  const DenseKeys keys{values.view(), scales.view(), KeyFormat::fp8};
  for (int64_t first = 0; first < p.count(); first += chunk_rows) {
    const Slice chunk{first, std::min(first + chunk_rows, p.count())};
    const int64_t low = p.row_request[static_cast<size_t>(chunk.first)];
    const int64_t high = p.row_request[static_cast<size_t>(chunk.last - 1)] + 1, context = p.lens[0];
    const Array indptr = Array::of(progression(0, static_cast<int32_t>(high - low + 1), static_cast<int32_t>(context)));
    GatherK gather{};
    gather.keys = p.paged_keys();
    gather.keys.block_table.data = support::element(gather.keys.block_table, low);
    gather.keys.block_table.shape[0] = high - low;
    gather.indptr = indptr.view(), gather.total = (high - low) * context, gather.out = keys;
    support::run(gather, exec);
    const Slice own = slice_of(p, chunk, rank);
    Ints starts;
    for (int64_t r = own.first; r < own.last; ++r) {
      starts.push_back(static_cast<int32_t>((p.row_request[static_cast<size_t>(r)] - low) * context));
    }
    const Array start = Array::of(starts);
    MqaTopk a{};
    a.q = p.query(), a.keys = keys, a.topk = kSelected;
    a.q.values.data = support::element(a.q.values, own.first);
    a.q.weights.data = support::element(a.q.weights, own.first);
    a.rows.count = own.last - own.first, a.rows.start = start.view();
    a.rows.length = tensor(p.end.as<int32_t>() + own.first, DType::i32, {own.last - own.first});
    a.out.indices = buffer;
    a.out.indices.data = support::element(buffer, own.first);
    a.out.indices.shape[0] = a.rows.count;  // other ranks write the other rows meanwhile
    support::run(a, exec);
  }
}

void run_all_ranks(const Problem& p, int64_t chunk_rows, const Tensor& buffer, const Exec& exec) {
  std::vector<std::thread> ranks;
  for (int64_t rank = 0; rank < kWorld; ++rank) {
    ranks.emplace_back([&p, &exec, &buffer, rank, chunk_rows] { run_rank(p, rank, chunk_rows, buffer, exec); });
  }
  for (std::thread& rank : ranks) rank.join();
}

// vllm #53691, PR #54394, sglang PR #39527: early tokens are lost when four prompts run at once over row shards.
// Equal to one rank; the needle at position 0 is always found; a second, shorter step leaves no index of the first.
TEST_P(Cases, B42_row_shards_equal_a_single_rank) {
  const int32_t rows = full() ? 1000 : 40;
  const int64_t chunk_rows = full() ? 300 : 12;
  for (bool exact : {false, true}) {
    const Problem p = four_prompts(rows, kContext, exact);
    const Picked want = expect_right(p, kSelected, exec());
    const Guarded buffer(DType::i32, rows, kSelected);
    run_all_ranks(p, chunk_rows, buffer.view(), exec());
    EXPECT_EQ(buffer.touched_outside(), "");
    for (int64_t r = 0; r < rows; ++r) {
      const Ints row = row_of<int32_t>(buffer.view(), r);
      EXPECT_EQ(row, want.indices[static_cast<size_t>(r)]) << "row " << r;
      EXPECT_EQ(row[0], 0) << "the needle of row " << r;
    }
    const Problem fewer = four_prompts(rows / 2, 40, exact);
    const Picked then = expect_right(fewer, kSelected, exec());
    run_all_ranks(fewer, chunk_rows, buffer.view(), exec());
    for (int64_t r = 0; r < rows; ++r) {
      const auto i = static_cast<size_t>(r);
      EXPECT_EQ(row_of<int32_t>(buffer.view(), r), r < rows / 2 ? then.indices[i] : want.indices[i]) << "row " << r;
    }
  }
}

/// The same through the layer: every rank has all keys and a buffer of its own, and each chunk ends with the exchange.
void layer_rank(const Problem& p, int64_t chunk_rows, const Tensor& buffer, Communicator& comm, const Exec& given) {
  IndexerConfig config{};
  config.heads = p.spec.heads, config.head_dim = p.spec.head_dim, config.topk = kSelected;
  const SparseAttnIndexer indexer(config);
  const ShardSpec spec{0, {}, comm.rank(), comm.size(), 0, 0, false, 0};
  Exec exec = given;
  exec.threads = 1;
  exec.workspace_bytes = sharded_workspace_bytes(indexer, {0, chunk_rows, kRequests, kContext, 1}, spec, exec);
  const std::shared_ptr<uint8_t> workspace = support::aligned_bytes(exec.workspace_bytes + 1);
  exec.workspace = workspace.get();
  for (int64_t first = 0; first < p.count(); first += chunk_rows) {
    const Slice chunk{first, std::min(first + chunk_rows, p.count())};
    const auto rows_from = [&](Tensor t) {
      t.data = support::element(t, chunk.first);
      t.shape[0] = chunk.last - chunk.first;
      return t;
    };
    std::vector<int64_t> sizes;
    for (int32_t rank = 0; rank < comm.size(); ++rank) {
      const Slice own = slice_of(p, chunk, rank);
      sizes.push_back(own.last - own.first);
    }
    IndexerStep step{};
    step.q = {rows_from(p.q.view()), {}, rows_from(p.weights.view())};
    step.keys = p.paged_keys();
    step.rows.count = chunk.last - chunk.first;
    step.rows.request = rows_from(p.request.view()), step.rows.end = rows_from(p.end.view());
    step.out.indices = rows_from(buffer);
    ShardStep shard{};
    shard.comm = &comm, shard.row_shard_sizes = sizes.data();
    forward_sharded(indexer, step, spec, shard, exec);
  }
}

// All rows on every rank, equal to one rank's, also where some ranks own no rows of a chunk; then fewer rows.
TEST_P(LayerCases, B42_the_exchange_gives_every_rank_all_rows) {
  const int32_t rows = full() ? 1000 : 40;
  const int64_t chunk_rows = full() ? 300 : 12;
  const auto comms = local_communicators(kWorld);
  std::vector<Guarded> buffers;
  for (int32_t rank = 0; rank < kWorld; ++rank) buffers.emplace_back(DType::i32, rows, kSelected);
  Picked before;
  for (const int32_t count : {rows, rows / 2}) {
    const Problem p = four_prompts(count, count == rows ? kContext : 40, true);
    const Picked want = expect_right(p, kSelected, exec());
    const auto thrown = testing::run_ranks(kWorld, [&](int32_t rank) {
      layer_rank(p, chunk_rows, buffers[static_cast<size_t>(rank)].view(), *comms[static_cast<size_t>(rank)], exec());
    });
    for (int32_t rank = 0; rank < kWorld; ++rank) {
      const Guarded& buffer = buffers[static_cast<size_t>(rank)];
      ASSERT_EQ(thrown[static_cast<size_t>(rank)].status, Status::ok) << thrown[static_cast<size_t>(rank)].sentence;
      EXPECT_EQ(buffer.touched_outside(), "");
      for (int64_t r = 0; r < rows; ++r) {
        const auto& expected = r < count ? want : before;
        ASSERT_EQ(row_of<int32_t>(buffer.view(), r), expected.indices[static_cast<size_t>(r)]) << "row " << r;
      }
    }
    before = want;
  }
}

// The premise of the case: with so few rows a chunk some ranks own none, and every row has exactly one owner.
TEST_P(Cases, B42_some_ranks_own_no_rows) {
  const Problem p = four_prompts(40, 40, true);
  int empty = 0;
  for (int64_t first = 0; first < 40; first += 12) {
    const Slice chunk{first, std::min<int64_t>(first + 12, 40)};
    int64_t next = chunk.first;
    for (int64_t rank = 0; rank < kWorld; ++rank) {
      const Slice own = slice_of(p, chunk, rank);
      empty += own.first == own.last;
      EXPECT_TRUE(own.first == own.last || own.first == next) << "rank " << rank;
      next = std::max(next, own.last);
    }
    EXPECT_EQ(next, chunk.last);
  }
  EXPECT_GT(empty, 0);
}

TOPKEY_CASES_OF_GENERAL_BACKENDS();
INSTANTIATE_TEST_SUITE_P(, LayerCases, ::testing::ValuesIn([] {
                           std::vector<std::string> names = topkey::testing::every_backend();
                           std::erase_if(names, [](const std::string& name) {
                             return topkey::testing::on(name).device != Device::cpu;
                           });
                           return names;
                         }()),
                         topkey::testing::backend_label);

}  // namespace
}  // namespace topkey::cases
