// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Memory of a call, for every operation: a workspace smaller than the query says is refused; backend `cpu` allocates
// nothing from the second call on, on any threads; the search's workspace stays under 64 MiB (CASES B50) and never
// shrinks when a size grows.
#include "tests/pools.h"
#include "tests/work.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TOPKEY_TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define TOPKEY_TEST_SANITIZED 1
#endif
#endif
#if defined(__GLIBC__) && !defined(TOPKEY_TEST_SANITIZED)
#define TOPKEY_TEST_COUNTS_ALLOCATIONS 1
#endif

namespace {
std::atomic<bool> counting{false};
std::atomic<int64_t> allocations{0};
}  // namespace

#if defined(TOPKEY_TEST_COUNTS_ALLOCATIONS)
// glibc's own functions stand behind these, so that free() takes what they give; operator new ends here too.
extern "C" {
void* __libc_malloc(size_t size);                      // NOLINT
void* __libc_calloc(size_t count, size_t size);        // NOLINT
void* __libc_realloc(void* old, size_t size);          // NOLINT
void* __libc_memalign(size_t alignment, size_t size);  // NOLINT
static void count_allocation() {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
}
void* malloc(size_t size) noexcept {
  count_allocation();
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) noexcept {
  count_allocation();
  return __libc_calloc(count, size);
}
void* realloc(void* old, size_t size) noexcept {
  count_allocation();
  return __libc_realloc(old, size);
}
void* aligned_alloc(size_t alignment, size_t size) noexcept {
  count_allocation();
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** out, size_t alignment, size_t size) noexcept {
  count_allocation();
  *out = __libc_memalign(alignment, size);
  return *out == nullptr;
}
}
#endif

namespace topkey::testing {
namespace {

TEST(Memory, SmallerWorkspaceIsRefused) {
  int refused = 0;
  for (const std::string& backend : host_backends()) {
    for (const Work& w : all_work()) {
      Exec exec = on(backend);
      const size_t bytes = workspace_of(w, exec);
      if (bytes == 0) continue;
      const Room room(bytes);
      for (const bool absent : {false, true}) {
        room.give(exec);
        if (absent) exec.workspace = nullptr;
        exec.workspace_bytes -= absent ? 0 : 1;
        poison(w);
        EXPECT_EQ(thrown_by([&] { launch_work(w, exec); }).status, Status::workspace_too_small) << w.name;
        EXPECT_TRUE(poisoned(w)) << w.name;
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 0);
}

int64_t allocations_of(const std::function<void()>& call) {
  allocations = 0;
  counting = true;
  call();
  counting = false;
  return allocations;
}

TEST(Memory, CpuAllocatesNothingFromTheSecondCallOn) {
#if !defined(TOPKEY_TEST_COUNTS_ALLOCATIONS)
  GTEST_SKIP() << "malloc cannot be counted here";
#else
  std::vector<int> grown;
  ASSERT_GE(allocations_of([&] { grown.resize(1000); }), 1) << "a test that counts nothing proves nothing";
  for (const Work& w : all_work()) {
    for (const int32_t threads : {1, 2, 4}) {
      Exec exec = on("cpu");
      const Room room(workspace_of(w, exec));
      room.give(exec);
      exec.threads = threads;
      launch_work(w, exec);
      EXPECT_EQ(allocations_of([&] { launch_work(w, exec); }), 0) << w.name << ", " << threads << " threads";
    }
  }
#endif
}

#if defined(TOPKEY_TEST_COUNTS_ALLOCATIONS)
/// A step of either layer over 256 keys of one request, 64 of them this step's, and all its memory.
struct LayerStep {
  static constexpr int64_t kRows = 64, kKeys = 256, kDim = 64;
  Array k, gate, ape, positions, slots, tail, pages, q, weights, request, ends, table, indices;
  IndexerConfig config{};
  IndexerStep args{};

  explicit LayerStep(int32_t pool_size) {
    Random random(1);
    config.heads = 32, config.head_dim = kDim, config.topk = 32, config.pool_size = pool_size;
    const int64_t group = std::max(pool_size, 1);
    std::vector<int64_t> at, to;
    std::vector<int32_t> seen;
    for (int64_t r = 0; r < kRows; ++r) {
      const int64_t p = group * kKeys - kRows + r;
      at.push_back(p), to.push_back((p + 1) % group == 0 ? p / group : -1);
      seen.push_back(static_cast<int32_t>((p + 1) / group));
    }
    args.keys.cache = cache_of(pages, KeyFormat::fp8, 16, kDim, kKeys / 16);
    std::memset(pages.as<uint8_t>(), 0x38, pages.bytes());
    table = Array(DType::i32, {1, kKeys / 16});
    for (int32_t i = 0; i < table.size(); ++i) table.as<int32_t>()[i] = i;
    k = normals(DType::bf16, {kRows, kDim}, random);
    positions = longs_of(at), slots = longs_of(to), ends = Array::of(seen), request = Array(DType::i32, {kRows});
    q = Array(DType::u8, {kRows, 32, kDim}), weights = normals(DType::f32, {kRows, 32}, random);
    std::memset(q.as<uint8_t>(), 0x38, q.bytes());
    indices = Array(DType::i32, {kRows, 32 + group - 1});
    args.q = {q.view(), {}, weights.view()}, args.k = k.view(), args.slot_mapping = slots.view();
    args.keys.block_table = table.view(), args.rows.count = kRows, args.rows.end = ends.view();
    args.rows.request = request.view(), args.num_decode_rows = kRows, args.out.indices = indices.view();
    if (pool_size == 0) return;
    gate = normals(DType::bf16, {kRows, kDim}, random), ape = normals(DType::f32, {pool_size, kDim}, random);
    args.gate = gate.view(), args.ape = ape.view(), args.positions = positions.view();
  }
};

template <class Layer>
void expect_no_allocation(int32_t pool_size) {
  const LayerStep step(pool_size);
  const Layer layer(step.config);
  for (const int32_t threads : {1, 2, 4}) {
    for (const bool strict : {false, true}) {
      Exec exec = on("cpu");
      exec.threads = threads, exec.strict = strict;
      const Room room(layer.workspace_bytes({0, LayerStep::kRows, 1, LayerStep::kKeys, 1}, exec));
      room.give(exec);
      layer.forward(step.args, exec);
      EXPECT_EQ(allocations_of([&] { layer.forward(step.args, exec); }), 0)
          << "pools of " << pool_size << ", " << threads << " threads" << (strict ? ", strict" : "");
      EXPECT_GE(int_at(step.indices.view(), LayerStep::kRows - 1, 31), 0) << "a step that answered nothing";
    }
  }
}
#endif

TEST(Memory, LayersAllocateNothingFromTheSecondStepOn) {
#if !defined(TOPKEY_TEST_COUNTS_ALLOCATIONS)
  GTEST_SKIP() << "malloc cannot be counted here";
#else
  expect_no_allocation<SparseAttnIndexer>(0);
  expect_no_allocation<SparseAttnIndexerKpool>(1);
  expect_no_allocation<SparseAttnIndexerKpool>(4);
#endif
}

/// A team's second call, counted between two barriers of its own.
TEST(Memory, CallersTeamAllocatesNothingEither) {
#if !defined(TOPKEY_TEST_COUNTS_ALLOCATIONS)
  GTEST_SKIP() << "malloc cannot be counted here";
#else
  for (const Work& w : all_work()) {
    Exec exec = on("cpu");
    const Room room(workspace_of(w, exec));
    room.give(exec);
    Crew crew(3);
    const auto twice = [&](const Exec& e) {
      launch_work(w, e);
      Crew::wait(&crew);
      if (e.team->rank == 0) allocations = 0, counting = true;
      Crew::wait(&crew);
      launch_work(w, e);
      Crew::wait(&crew);
      counting = false;
    };
    run_crew(crew, twice, exec);
    EXPECT_EQ(allocations, 0) << w.name;
  }
#endif
}

// ---- sizes ---------------------------------------------------------------------------------------------------------

struct Sizes {
  int64_t rows, keys;
  int32_t topk, heads, head_dim, blocks, candidates;
  KeyFormat format;
  bool paged;
};

/// Shapes without memory, as an engine asks at its start.
size_t search_bytes(const Sizes& s) {
  const bool fp8 = s.format == KeyFormat::fp8;
  const DType values = fp8 ? DType::f8_e4m3fn : s.format == KeyFormat::bf16 ? DType::bf16 : DType::u8;
  Query q{};
  q.values = tensor(nullptr, fp8 ? DType::f8_e4m3fn : DType::bf16, {s.rows, s.heads, s.head_dim});
  q.weights = tensor(nullptr, DType::f32, {s.rows, s.heads});
  Rows rows{};
  rows.count = s.rows;
  rows.end = tensor(nullptr, DType::i32, {s.rows});
  Selection out{};
  out.indices = tensor(nullptr, DType::i32, {s.rows, s.topk});
  if (s.blocks > 0) out.blocks = tensor(nullptr, DType::i32, {s.rows, s.blocks}), out.block_size = 64;
  Admit admit{};
  if (s.candidates > 0) {
    admit.candidates = tensor(nullptr, DType::i32, {s.rows, s.candidates}), admit.candidate_block_size = 64;
  }
  if (s.paged) {
    rows.request = tensor(nullptr, DType::i32, {s.rows});
    PagedMqaTopk a{};
    a.q = q, a.rows = rows, a.admit = admit, a.topk = s.topk, a.out = out;
    PagedKeys& keys = a.keys;
    keys.cache = {tensor(nullptr, DType::u8, {9, 64 * row_bytes(s.format, s.head_dim)}), s.format, Layout::planar, 64,
                  s.head_dim};
    keys.block_table = tensor(nullptr, DType::i32, {std::max<int64_t>(s.rows, 1), s.keys / 64});
    return paged_mqa_topk_workspace_bytes(a, on("cpu"));
  }
  const int64_t width = s.format == KeyFormat::q8_0 ? s.head_dim / 32 * 34 : s.head_dim;
  DenseKeys keys{tensor(nullptr, values, {s.keys, width}), {}, s.format};
  if (fp8) keys.scales = tensor(nullptr, DType::f32, {s.keys});
  return mqa_topk_workspace_bytes({0, q, keys, rows, admit, s.topk, out}, on("cpu"));
}

Sizes draw_sizes() {
  const auto extent = [](int64_t most) { return draw_flag() ? draw(0, 200) : draw(0, most); };
  Sizes s{};
  s.rows = extent(1 << 20), s.keys = extent(2147483647),
  s.topk = static_cast<int32_t>(draw_flag() ? draw(1, 100) : draw(1, 8192));
  s.heads = draw_of({1, 4, 64, 128}), s.head_dim = draw_of({32, 128, 256});
  s.blocks = static_cast<int32_t>(draw_flag() ? 0 : draw(1, 1024)),
  s.candidates = static_cast<int32_t>(draw_flag() ? 0 : draw(1, 1024));
  s.format = draw_of({KeyFormat::fp8, KeyFormat::bf16, KeyFormat::q8_0}), s.paged = draw_flag();
  return s;
}

std::string text(const Sizes& s) {
  return std::string(format_name(s.format)) + (s.paged ? " paged" : " dense") + " rows " + std::to_string(s.rows) +
         " keys " + std::to_string(s.keys) + " topk " + std::to_string(s.topk) + " H " + std::to_string(s.heads) +
         " D " + std::to_string(s.head_dim) + " blocks " + std::to_string(s.blocks) + " candidates " +
         std::to_string(s.candidates);
}

/// SPEC 5: at most 64 MiB for topk <= 8192, any rows and context.
TEST(Memory, SearchAsksForAtMost64MiB) {
  property("workspace of a search", 2000, [] {
    const Sizes s = draw_sizes();
    RC_LOG() << text(s);
    RC_ASSERT(search_bytes(s) <= size_t{64} << 20);
  });
  for (const bool paged : {false, true}) {
    for (const int32_t topk : {2048, 8192}) {
      // CASES B50 in full: 4096 rows over a million keys, 64 heads of 128; and the largest that there is.
      EXPECT_LE(search_bytes({4096, 1 << 20, topk, 64, 128, 64, 0, KeyFormat::fp8, paged}), size_t{64} << 20);
      EXPECT_LE(search_bytes({1 << 20, 2147483647, topk, 128, 128, 1024, 1024, KeyFormat::fp8, paged}),
                size_t{64} << 20);
    }
  }
}

TEST(Memory, WorkspaceNeverShrinksWhenASizeGrows) {
  property("workspace of a search, grown", 2000, [] {
    Sizes s = draw_sizes();
    RC_LOG() << text(s);
    const size_t before = search_bytes(s);
    const int64_t which = draw(0, 2), more = draw(1, 70);
    if (which == 0) s.rows += more;
    if (which == 1) s.keys = std::min<int64_t>(s.keys + 64 * more, 2147483647);
    if (which == 2) s.topk += static_cast<int32_t>(more);
    RC_LOG() << "then " << text(s);
    RC_ASSERT(search_bytes(s) >= before);
  });
}

}  // namespace
}  // namespace topkey::testing
