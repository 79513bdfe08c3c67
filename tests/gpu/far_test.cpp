// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Large addresses on the device (CASES B01): pages, dense keys and rows of scores behind 2^31 and 2^32 bytes give what
// the same bytes give in front. The memory between them is never copied.
#include "tests/gpu/on_gpu.h"

namespace topkey::testing {
namespace {

constexpr int64_t kDim = 128, kRow = kDim + 4, kHeads = 64;
constexpr size_t kFar = size_t{5} << 30;

class FarOnGpu : public ::testing::TestWithParam<std::string> {};

/// Runs the call and waits for it.
template <class Args>
void run_here(const Args& args, const std::string& backend) {
  Exec exec = on(backend);
  const GpuRoom room(args, exec);
  call_op(args, exec);
  must(cudaDeviceSynchronize());
}

std::vector<uint8_t> random_codes(size_t count, uint64_t seed) {
  Random random(seed);
  std::vector<uint8_t> codes(count);
  for (uint8_t& code : codes) code = float_to_e4m3(random.normal());
  return codes;
}

/// Queries of `rows` rows, all the same one.
struct Queries {
  explicit Queries(int64_t rows)
      : codes(static_cast<size_t>(rows * kHeads * kDim)), weights(static_cast<size_t>(rows * kHeads * 4)) {
    const std::vector<uint8_t> one = random_codes(kHeads * kDim, 3);
    std::vector<float> w;
    Random random(4);
    for (int64_t h = 0; h < kHeads; ++h) w.push_back(random.normal());
    for (int64_t r = 0; r < rows; ++r) {
      codes.put(one.data(), one.size(), static_cast<size_t>(r) * one.size());
      weights.put(w.data(), w.size() * 4, static_cast<size_t>(r) * w.size() * 4);
    }
    query = {tensor(codes.data(), DType::f8_e4m3fn, {rows, kHeads, kDim}),
             {},
             tensor(weights.data(), DType::f32, {rows, kHeads})};
  }
  GpuBytes codes, weights;
  Query query{};
};

TEST_P(FarOnGpu, PagesAcross2GiBAnd4GiBOfCaseB01) {
  constexpr int64_t kPages = 4287, kStride = 1002240, kPage = 64;
  // On both sides of 2^31 and of 2^32, the same keys in each.
  const std::vector<int32_t> list = {0, 2142, 2143, 4285, 4286};
  const auto rows = static_cast<int64_t>(list.size());
  const GpuBytes pool(static_cast<size_t>(kPages * kStride));
  const KeyCache cache{tensor(pool.data(), DType::u8, {kPages, kPage * kRow}, {kStride, 1}), KeyFormat::fp8,
                       Layout::planar, kPage, kDim};
  Tally tally("pages across 2 and 4 GiB");

  std::vector<uint16_t> raw;
  std::vector<int64_t> slots;
  Random random(95);
  for (int64_t i = 0; i < kPage * kDim; ++i) raw.push_back(float_to_bf16(random.normal()));
  const size_t part = raw.size();
  for (size_t b = 0; b < list.size(); ++b) {
    if (b > 0) raw.insert(raw.end(), raw.begin(), raw.begin() + static_cast<ptrdiff_t>(part));
    for (int64_t t = 0; t < kPage; ++t) slots.push_back(int64_t{list[b]} * kPage + t);
  }
  const GpuBytes k(raw.size() * 2), mapping(slots.size() * 8), table(list.size() * 4), ends(list.size() * 4);
  k.put(raw.data(), k.size()), mapping.put(slots.data(), mapping.size()), table.put(list.data(), table.size());
  const std::vector<int32_t> full(list.size(), kPage);
  ends.put(full.data(), ends.size());
  StoreK store{};
  store.k = tensor(k.data(), DType::bf16, {rows * kPage, kDim}), store.cache = cache;
  store.slot_mapping = tensor(mapping.data(), DType::i64, {rows * kPage});
  // A backend that only scores is given the keys by another one; the bytes are the same.
  const std::string storer = unsupported(store, on(GetParam())) == nullptr ? GetParam() : "cuda.portable";
  run_here(store, storer);
  const std::vector<uint8_t> first = pool.get<uint8_t>(kPage * kRow);
  for (const int32_t page : list) {
    EXPECT_EQ(pool.get<uint8_t>(kPage * kRow, static_cast<size_t>(page * kStride)), first) << "page " << page;
  }
  // A product of 32 bits for page 4286 would land here.
  const auto wrapped = pool.get<uint8_t>(kPage * kRow, static_cast<size_t>(4286 * kStride - (int64_t{1} << 32)));
  EXPECT_EQ(std::count(wrapped.begin(), wrapped.end(), 0xA5), kPage * kRow);

  PagedKeys keys{};
  keys.cache = cache, keys.block_table = tensor(table.data(), DType::i32, {rows, 1});
  std::vector<int32_t> indptr;
  for (int32_t b = 0; b <= rows; ++b) indptr.push_back(b * static_cast<int32_t>(kPage));
  const GpuBytes starts(indptr.size() * 4), values(static_cast<size_t>(rows * kPage * kDim)),
      scales(static_cast<size_t>(rows * kPage * 4));
  starts.put(indptr.data(), starts.size());
  GatherK gather{};
  gather.keys = keys, gather.indptr = tensor(starts.data(), DType::i32, {rows + 1}), gather.total = rows * kPage;
  gather.out = {tensor(values.data(), DType::f8_e4m3fn, {rows * kPage, kDim}),
                tensor(scales.data(), DType::f32, {rows * kPage}), KeyFormat::fp8};
  if (tally.runs(gather, on(GetParam()), GetParam())) {
    run_here(gather, GetParam());
    for (int64_t b = 0; b < rows; ++b)
      EXPECT_EQ(values.get<uint8_t>(kPage * kDim, static_cast<size_t>(b * kPage * kDim)),
                std::vector<uint8_t>(first.begin(), first.begin() + kPage * kDim));
  }

  const Queries queries(rows);
  const GpuBytes logits(static_cast<size_t>(rows * kPage * 4)), indices(static_cast<size_t>(rows * 20 * 4));
  PagedMqaLogits score{};
  score.q = queries.query, score.keys = keys, score.rows.count = rows,
  score.rows.end = tensor(ends.data(), DType::i32, {rows});
  score.logits = tensor(logits.data(), DType::f32, {rows, kPage});
  ASSERT_TRUE(tally.runs(score, on(GetParam()), GetParam()));
  run_here(score, GetParam());
  PagedMqaTopk search{};
  search.q = score.q, search.keys = keys, search.rows = score.rows, search.topk = 20;
  search.out.indices = tensor(indices.data(), DType::i32, {rows, 20});
  run_here(search, GetParam());
  for (int64_t r = 1; r < rows; ++r) {
    EXPECT_EQ(logits.get<uint32_t>(kPage, static_cast<size_t>(r * kPage * 4)), logits.get<uint32_t>(kPage))
        << list[static_cast<size_t>(r)];
    EXPECT_EQ(indices.get<int32_t>(20, static_cast<size_t>(r * 80)), indices.get<int32_t>(20))
        << list[static_cast<size_t>(r)];
  }
  const std::vector<int32_t> row = indices.get<int32_t>(20);
  EXPECT_TRUE(std::is_sorted(row.begin(), row.end()) && row.front() >= 0 && row.back() < kPage);
}

/// Dense keys: the window of a row lies behind 4 GiB of others.
TEST_P(FarOnGpu, DenseKeysAcross2GiBAnd4GiB) {
  constexpr int64_t kKeys = int64_t{40} << 20, kLen = 3000;
  constexpr int32_t kTopk = 100;
  const GpuBytes values(static_cast<size_t>(kKeys * kDim)), scales(static_cast<size_t>(kKeys * 4));
  const std::vector<uint8_t> codes = random_codes(kLen * kDim, 8);
  std::vector<float> factors;
  Random random(9);
  for (int64_t i = 0; i < kLen; ++i) factors.push_back(1 + random.normal() / 8);
  // Straight across 2^31 and 2^32, in front of both, and the last ones.
  const std::vector<int32_t> starts = {0, (1 << 24) - 1500, (1 << 25) - 1500, static_cast<int32_t>(kKeys - kLen)};
  std::vector<int32_t> ends;
  const auto rows = static_cast<int64_t>(starts.size());
  for (const int32_t start : starts) {
    values.put(codes.data(), codes.size(), static_cast<size_t>(start) * kDim);
    scales.put(factors.data(), factors.size() * 4, static_cast<size_t>(start) * 4);
    ends.push_back(start + static_cast<int32_t>(kLen));
  }
  const GpuBytes start(starts.size() * 4), end(starts.size() * 4), indices(static_cast<size_t>(rows * kTopk * 4)),
      scores(static_cast<size_t>(rows * kTopk * 4));
  start.put(starts.data(), start.size()), end.put(ends.data(), end.size());
  const Queries queries(rows);
  MqaTopk search{};
  search.q = queries.query, search.topk = kTopk, search.rows.count = rows;
  search.keys = {tensor(values.data(), DType::f8_e4m3fn, {kKeys, kDim}), tensor(scales.data(), DType::f32, {kKeys}),
                 KeyFormat::fp8};
  search.rows.start = tensor(start.data(), DType::i32, {rows}),
  search.rows.end = tensor(end.data(), DType::i32, {rows});
  search.rows.max_len = kLen;
  search.out.indices = tensor(indices.data(), DType::i32, {rows, kTopk});
  search.out.scores = tensor(scores.data(), DType::f32, {rows, kTopk});
  run_here(search, GetParam());
  const std::vector<int32_t> row = indices.get<int32_t>(kTopk);
  EXPECT_TRUE(std::is_sorted(row.begin(), row.end()) && row.front() >= 0 && row.back() < kLen);
  for (int64_t r = 1; r < rows; ++r) {
    EXPECT_EQ(indices.get<int32_t>(kTopk, static_cast<size_t>(r * kTopk * 4)), row) << starts[static_cast<size_t>(r)];
    EXPECT_EQ(scores.get<uint32_t>(kTopk, static_cast<size_t>(r * kTopk * 4)), scores.get<uint32_t>(kTopk))
        << starts[static_cast<size_t>(r)];
  }
}

/// A matrix of given scores whose last rows lie behind 2^32 bytes.
TEST_P(FarOnGpu, ScoresAcross2GiBAnd4GiB) {
  constexpr int64_t kKeys = 131072, kRows = static_cast<int64_t>(kFar / (kKeys * 4));
  constexpr int32_t kTopk = 2048;
  const GpuBytes matrix(static_cast<size_t>(kRows * kKeys * 4));
  std::vector<float> row(static_cast<size_t>(kKeys));
  fill_scores(Pattern::ties_at_cut, row.data(), kKeys, kTopk, 4);
  // Row 4095 ends at 2^31, row 8191 at 2^32.
  const std::vector<int64_t> filled = {0, 4095, 4096, 8191, 8192, kRows - 1};
  for (const int64_t r : filled) matrix.put(row.data(), row.size() * 4, static_cast<size_t>(r * kKeys * 4));
  std::vector<int32_t> lens(static_cast<size_t>(kRows), 0);
  for (const int64_t r : filled) lens[static_cast<size_t>(r)] = static_cast<int32_t>(kKeys);
  const GpuBytes ends(lens.size() * 4), indices(static_cast<size_t>(kRows) * kTopk * 4);
  ends.put(lens.data(), ends.size());
  Topk select{};
  select.scores = tensor(matrix.data(), DType::f32, {kRows, kKeys}), select.topk = kTopk, select.rows.count = kRows;
  select.rows.end = tensor(ends.data(), DType::i32, {kRows});
  select.out.indices = tensor(indices.data(), DType::i32, {kRows, kTopk});
  Tally tally("scores across 2 and 4 GiB");
  if (!tally.runs(select, on(GetParam()), GetParam())) {
    tally.ran(GetParam() + " refuses to select alone");
    return;
  }
  run_here(select, GetParam());
  const std::vector<int32_t> first = indices.get<int32_t>(kTopk);
  EXPECT_TRUE(std::is_sorted(first.begin(), first.end()) && first.front() >= 0 && first.back() < kKeys);
  for (const int64_t r : filled)
    EXPECT_EQ(indices.get<int32_t>(kTopk, static_cast<size_t>(r) * kTopk * 4), first) << "row " << r;
  EXPECT_EQ(indices.get<int32_t>(1, static_cast<size_t>(4097) * kTopk * 4)[0], -1);
}

INSTANTIATE_TEST_SUITE_P(Backends, FarOnGpu, ::testing::ValuesIn(gpu_backends()), backend_label);

}  // namespace
}  // namespace topkey::testing
