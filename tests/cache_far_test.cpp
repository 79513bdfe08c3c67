// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Large addresses (CASES B01): a page id times a page stride passes 2^31 and 2^32, and slots pass 2^31. The mappings
// are sparse, so a few pages of memory stand for tens of gigabytes of cache. A machine that refuses the mapping skips,
// and says so.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "support/array.h"
#include "support/patterns.h"
#include "support/run.h"
#include "tests/backend_test.h"
#include "tests/cache_pool.h"
#include "topkey/topkey.h"

namespace {

using topkey::DType;
using topkey::KeyFormat;
using topkey::Layout;
using topkey::support::Array;
using topkey::testing::Dense;
using topkey::testing::KeyRow;
using topkey::testing::poison_row;

/// `bytes` of zeros that take memory only where they are written. An inaccessible page before and after.
class Sparse {
 public:
  explicit Sparse(int64_t bytes) : bytes_(static_cast<size_t>((bytes + kPage - 1) / kPage * kPage)) {
    void* whole = mmap(nullptr, bytes_ + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (whole == MAP_FAILED) return;
    whole_ = static_cast<uint8_t*>(whole);
    if (mprotect(whole_ + kPage, bytes_, PROT_READ | PROT_WRITE) != 0) unmap();
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  ~Sparse() { unmap(); }
  uint8_t* data() const { return whole_ == nullptr ? nullptr : whole_ + kPage; }

 private:
  static constexpr int64_t kPage = 4096;
  void unmap() {
    if (whole_ != nullptr) munmap(whole_, bytes_ + 2 * kPage);
    whole_ = nullptr;
  }
  size_t bytes_;
  uint8_t* whole_ = nullptr;
};
#define SKIP_WITHOUT(memory)      \
  if ((memory).data() == nullptr) \
  GTEST_SKIP() << "NOT RUN: this machine refuses a sparse mapping (" << std::strerror(errno) << ")"

Array normal_keys(int64_t rows, int64_t dim) {
  topkey::support::Random random(95);
  Array k(DType::f32, {rows, dim});
  for (int64_t i = 0; i < rows * dim; ++i) k.as<float>()[i] = random.normal();
  return k;
}

class FarTest : public topkey::testing::BackendTest {
 protected:
  void store(const Array& k, const std::vector<int64_t>& slots, const topkey::KeyCache& cache) {
    Array mapping(DType::i64, {static_cast<int64_t>(slots.size())});
    std::copy(slots.begin(), slots.end(), mapping.as<int64_t>());
    topkey::StoreK a{};
    a.k = k.view();
    a.slot_mapping = mapping.view();
    a.cache = cache;
    topkey::support::run(a, exec());
  }
  /// The first `rows` keys behind each one-row table of `pages`, gathered.
  Dense gather(const std::vector<int32_t>& pages, int32_t rows, const topkey::KeyCache& cache) {
    const auto requests = static_cast<int64_t>(pages.size());
    const Array list = Array::of(pages);
    std::vector<int32_t> indptr;
    for (int32_t b = 0; b <= requests; ++b) indptr.push_back(b * rows);
    const Array starts = Array::of(indptr);
    Dense out(cache.format, requests * rows, cache.head_dim);
    topkey::GatherK a{};
    a.keys.cache = cache;
    a.keys.block_table = topkey::tensor(list.view().data, DType::i32, {requests, 1});
    a.indptr = starts.view();
    a.total = requests * rows;
    a.out = out.view();
    topkey::support::run(a, exec());
    return out;
  }
};

TEST_P(FarTest, PagesAcross2GiBAnd4GiBOfCaseB01) {
  constexpr int64_t kPages = 4287, kStride = 1002240;
  const Sparse pool(kPages * kStride);
  SKIP_WITHOUT(pool);
  const topkey::KeyCache cache{topkey::tensor(pool.data(), DType::u8, {kPages, 8448}, {kStride, 1}), KeyFormat::fp8,
                               Layout::planar, 64, 128};
  // Pages on both sides of 2^31 (2142: 2,146,798,080; 2143: 2,147,800,320) and of 2^32 (4285, 4286), the same keys in
  // each.
  const std::vector<int32_t> pages = {2142, 2143, 4285, 4286};
  const Array k = normal_keys(64, 128);
  for (int32_t page : pages) {
    std::vector<int64_t> slots;
    for (int64_t t = 0; t < 64; ++t) slots.push_back(int64_t{page} * 64 + t);
    store(k, slots, cache);
  }
  const Dense out = gather(pages, 64, cache);
  for (int64_t i = 64; i < 256; ++i)
    ASSERT_TRUE(out.row(i) == out.row(i % 64)) << "page " << pages[static_cast<size_t>(i / 64)];
  for (int32_t page : pages) {
    const KeyRow first = out.row(0);
    EXPECT_EQ(std::memcmp(pool.data() + page * kStride, first.values.data(), 128), 0) << "value bytes of page " << page;
    EXPECT_EQ(std::memcmp(pool.data() + page * kStride + 8192, first.scales.data(), 4), 0)
        << "scale bytes of page " << page;
  }
  // A 32-bit product for page 4286 would land here; one for page 2143 in the inaccessible page before the pool.
  const uint8_t* wrapped = pool.data() + 4286 * kStride - (int64_t{1} << 32);
  EXPECT_TRUE(std::all_of(wrapped, wrapped + 8448, [](uint8_t b) { return b == 0; }));
}

TEST_P(FarTest, ScoresAcross2GiBAnd4GiBOfCaseB01) {
  constexpr int64_t kPages = 4287, kStride = 1002240, kHeads = 4;
  const Sparse pool(kPages * kStride);
  SKIP_WITHOUT(pool);
  const topkey::KeyCache cache{topkey::tensor(pool.data(), DType::u8, {kPages, 8448}, {kStride, 1}), KeyFormat::fp8,
                               Layout::planar, 64, 128};
  const std::vector<int32_t> pages = {0, 2142, 2143, 4285, 4286};
  const Array k = normal_keys(64, 128);
  for (int32_t page : pages) {
    std::vector<int64_t> slots;
    for (int64_t t = 0; t < 64; ++t) slots.push_back(int64_t{page} * 64 + t);
    store(k, slots, cache);
  }
  const Array codes(DType::u8, {5, kHeads, 128}), weights(DType::f32, {5, kHeads}), logits(DType::f32, {5, 64}),
      list = Array::of(pages);
  for (int64_t i = 0; i < 5 * kHeads * 128; ++i)
    codes.as<uint8_t>()[i] = topkey::float_to_e4m3(static_cast<float>(i * 37 % 128 % 9 - 4));
  for (int64_t i = 0; i < 5 * kHeads; ++i) weights.as<float>()[i] = 0.5f;
  const Array ends = Array::of({64, 64, 64, 64, 64});
  topkey::PagedMqaLogits a{};
  a.q = {codes.view(), {}, weights.view()};
  a.keys.cache = cache;
  a.keys.block_table = topkey::tensor(list.view().data, DType::i32, {5, 1});
  a.rows.count = 5;
  a.rows.end = ends.view();
  a.logits = logits.view();
  topkey::support::run(a, exec());
  int positive = 0;
  for (int64_t r = 0; r < 5; ++r) {
    for (int64_t n = 0; n < 64; ++n) {
      positive += logits.as<float>()[n] > 0;
      ASSERT_EQ(logits.as<float>()[r * 64 + n], logits.as<float>()[n])
          << "page " << pages[static_cast<size_t>(r)] << " key " << n;
    }
  }
  EXPECT_GT(positive, 5 * 16);
}

TEST_P(FarTest, HighestPageIds) {
  // One f32 key of one element a page: 2^31 - 1 pages are 8 GiB of addresses, page ids use every bit of an int32.
  constexpr int64_t kPages = INT32_MAX;
  const Sparse pool(kPages * 4);
  SKIP_WITHOUT(pool);
  const topkey::KeyCache cache{topkey::tensor(pool.data(), DType::u8, {kPages, 4}, {4, 1}), KeyFormat::f32,
                               Layout::planar, 1, 1};
  const std::vector<int64_t> slots = {kPages - 1, 0, 1073741823, 1073741824, 536870912};
  const Array k = normal_keys(5, 1);
  store(k, slots, cache);
  for (size_t t = 0; t < slots.size(); ++t) {
    float held;
    std::memcpy(&held, pool.data() + slots[t] * 4, 4);
    EXPECT_EQ(held, k.as<float>()[t]) << slots[t];
  }
  const Dense out = gather(std::vector<int32_t>(slots.begin(), slots.end()), 1, cache);
  for (int64_t t = 0; t < 5; ++t) EXPECT_EQ(std::memcmp(out.values.as<float>() + t, k.as<float>() + t, 4), 0) << t;
}

TEST_P(FarTest, SlotsPast31Bits) {
  // 2^24 pages of 256 one-element keys: slots up to 2^32, 16 GiB of addresses.
  constexpr int64_t kPages = 1 << 24, kStride = 1024;
  const Sparse pool(kPages * kStride);
  SKIP_WITHOUT(pool);
  const topkey::KeyCache cache{topkey::tensor(pool.data(), DType::u8, {kPages, kStride}), KeyFormat::f32,
                               Layout::planar, 256, 1};
  const std::vector<int64_t> slots = {INT32_MAX, int64_t{INT32_MAX} + 1, (int64_t{1} << 32) - 1, int64_t{3} << 30};
  const Array k = normal_keys(5, 1);
  std::vector<int64_t> with_wild = slots;
  with_wild.push_back(int64_t{1} << 32);  // one past the last slot
  store(k, with_wild, cache);
  for (size_t t = 0; t < slots.size(); ++t) {
    float held;
    std::memcpy(&held, pool.data() + slots[t] * 4, 4);
    EXPECT_EQ(held, k.as<float>()[t]) << slots[t];
  }
  float first;
  std::memcpy(&first, pool.data(), 4);
  EXPECT_EQ(first, 0.0f) << "slot 2^32 wrapped to slot 0";
}

TOPKEY_ON_EVERY_BACKEND(FarTest);

}  // namespace
