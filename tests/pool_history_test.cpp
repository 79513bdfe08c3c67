// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Histories of pool_k: requests that are prefilled in chunks which start anywhere and then decode with drafts of which
// some are rejected, batched together, padded or not. What stands in the cache for every pool of accepted tokens is,
// byte for byte, what one call over the whole sequence makes.
#include <algorithm>

#include "tests/backend_test.h"
#include "tests/pools.h"

namespace topkey::testing {
namespace {

constexpr int32_t kDim = 32;
using Token = std::vector<uint16_t>;  // k, then gate

/// How a step's rows say whose they are.
enum class Addressing { indptr, request, uniform };

struct History {
  int32_t pool_size;
  int64_t speculative;  ///< drafts of a step at most
  KeyFormat format;
  Addressing addressing;
  int64_t requests;
  /// Engines': a pool, and room for the drafts, in powers of two of pools.
  int64_t ring() const {
    int64_t ring = pool_size;
    while (ring < pool_size + speculative) ring *= 2;
    return ring;
  }
};

TEST(PoolRing, RingSizesAreTheEngines) {
  const auto ring = [](int32_t pool, int64_t speculative) {
    return History{pool, speculative, KeyFormat::fp8, Addressing::indptr, 1}.ring();
  };
  EXPECT_EQ(ring(4, 0), 4);
  for (int64_t speculative = 1; speculative <= 4; ++speculative) EXPECT_EQ(ring(4, speculative), 8);
  EXPECT_EQ(ring(16, 3), 32);
  EXPECT_EQ(ring(16, 7), 32);
}

class Serving {
 public:
  Serving(const History& h, std::string backend, uint64_t seed)
      : h_(h),
        backend_(std::move(backend)),
        random_(seed),
        ape_(normals(DType::f32, {h.pool_size, kDim}, random_)),
        tail_(normals(DType::bf16, {h.requests, 2, h.ring(), kDim}, random_)),
        accepted_(static_cast<size_t>(h.requests)) {
    const int64_t page = 8, pages = h.requests * kPools / page;
    cache_ = cache_of(pages_, h.format, static_cast<int32_t>(page), kDim, pages);
    for (size_t b = 0; b < accepted_.size(); ++b) prompt_.push_back(random_.between(1, 5 * h.pool_size + 3));
  }

  /// Every request gets some rows; a decode's drafts are cut at what is accepted.
  void step() {
    std::vector<std::vector<Token>> rows(accepted_.size());
    for (size_t b = 0; b < rows.size(); ++b) {
      const int64_t left = prompt_[b] - static_cast<int64_t>(accepted_[b].size());
      int64_t count = left > 0 ? random_.between(1, left) : random_.between(1, 1 + h_.speculative);
      if (h_.addressing == Addressing::uniform) count = std::min(count, 1 + h_.speculative);
      if (random_.chance(0.1)) count = 0;
      for (int64_t i = 0; i < count; ++i) rows[b].push_back(draw_token());
    }
    call(rows);
    for (size_t b = 0; b < rows.size(); ++b) {
      const bool decodes = static_cast<int64_t>(accepted_[b].size()) >= prompt_[b];
      const int64_t count = static_cast<int64_t>(rows[b].size());
      const int64_t kept = decodes && count > 0 ? random_.between(1, count) : count;
      accepted_[b].insert(accepted_[b].end(), rows[b].begin(), rows[b].begin() + kept);
      rejected += count - kept;
    }
  }
  /// The first accepted pool whose bytes are not those of a single call, or -1.
  int64_t first_difference() {
    for (size_t b = 0; b < accepted_.size(); ++b) {
      const int64_t whole = static_cast<int64_t>(accepted_[b].size()) / h_.pool_size;
      Array pages;
      PoolK a = arguments();
      a.cache = cache_of(pages, h_.format, 8, kDim, (whole + 7) / 8 + 1);
      std::vector<int64_t> positions, slots;
      for (int64_t i = 0; i < whole * h_.pool_size; ++i) {
        positions.push_back(i);
        slots.push_back((i + 1) % h_.pool_size == 0 ? i / h_.pool_size : -1);
      }
      const Memory m(accepted_[b], positions, slots, {});
      const Array starts = Array::of({0, static_cast<int32_t>(positions.size())});
      m.give(a);
      a.q_indptr = starts.view();
      if (whole > 0) run(a, on(backend_));
      for (int64_t g = 0; g < whole; ++g, ++compared) {
        if (row_of(a.cache, g) != row_of(cache_, static_cast<int64_t>(b) * kPools + g)) return g;
      }
    }
    return -1;
  }
  bool supported() {
    PoolK a = arguments();
    const Memory m({}, {}, {}, {});
    m.give(a);
    return unsupported(a, on(backend_)) == nullptr;
  }
  int64_t rejected = 0, compared = 0;

 private:
  static constexpr int64_t kPools = 400;  // slots of a request

  /// The tensors of a call's rows.
  struct Memory {
    Array k, gate, positions, slots, tails;
    Memory(const std::vector<Token>& rows, const std::vector<int64_t>& at, const std::vector<int64_t>& to,
           const std::vector<int64_t>& tail) {
      const auto count = static_cast<int64_t>(at.size());
      k = Array(DType::bf16, {count, kDim}), gate = Array(DType::bf16, {count, kDim});
      for (int64_t r = 0; r < count; ++r) {
        std::copy_n(rows[static_cast<size_t>(r)].data(), kDim, k.as<uint16_t>() + r * kDim);
        std::copy_n(rows[static_cast<size_t>(r)].data() + kDim, kDim, gate.as<uint16_t>() + r * kDim);
      }
      positions = longs_of(at), slots = longs_of(to);
      if (!tail.empty()) tails = longs_of(tail);
    }
    void give(PoolK& a) const {
      a.k = k.view(), a.gate = gate.view(), a.positions = positions.view(), a.slot_mapping = slots.view();
      a.tail_slots = tails.view();
    }
  };

  Token draw_token() {
    Token t;
    for (int64_t i = 0; i < 2 * kDim; ++i) t.push_back(float_to_bf16(random_.normal()));
    return t;
  }
  PoolK arguments() const {
    PoolK a{};
    a.ape = ape_.view(), a.pool_size = h_.pool_size, a.cache = cache_;
    return a;
  }
  std::string row_of(const KeyCache& cache, int64_t slot) const {
    const PageLayout layout = page_layout(cache.format, cache.layout, cache.page_size, cache.head_dim);
    const auto* page = reinterpret_cast<const char*>(element(cache.pages, slot / cache.page_size));
    return std::string(page + layout.value_offset(slot % cache.page_size), static_cast<size_t>(layout.value)) +
           std::string(page + layout.scale_offset(slot % cache.page_size), static_cast<size_t>(layout.scale));
  }
  void call(const std::vector<std::vector<Token>>& rows) {
    std::vector<Token> all;
    std::vector<int64_t> positions, slots, tails;
    std::vector<int32_t> starts{0}, requests;
    const auto add = [&](const Token& token, int64_t position, int64_t slot, int64_t tail, int32_t request) {
      all.push_back(token), positions.push_back(position), slots.push_back(slot), tails.push_back(tail);
      requests.push_back(request);
    };
    for (size_t b = 0; b < rows.size(); ++b) {
      const auto before = static_cast<int64_t>(accepted_[b].size()), request = static_cast<int64_t>(b);
      for (size_t i = 0; i < rows[b].size(); ++i) {
        const int64_t p = before + static_cast<int64_t>(i);
        const bool completes = (p + 1) % h_.pool_size == 0;
        add(rows[b][i], p, completes ? request * kPools + p / h_.pool_size : -1, request * h_.ring() + p % h_.ring(),
            static_cast<int32_t>(b));
      }
      if (h_.addressing == Addressing::uniform) {
        for (auto i = static_cast<int64_t>(rows[b].size()); i < 1 + h_.speculative; ++i)
          add(draw_token(), -1, -1, -1, static_cast<int32_t>(b));
      }
      starts.push_back(static_cast<int32_t>(all.size()));
    }
    if (h_.addressing == Addressing::request) add(draw_token(), 0, -1, 0, -1);  // graph padding
    const Memory m(all, positions, slots, tails);
    const Array indptr = Array::of(starts), request = Array::of(requests);
    PoolK a = arguments();
    m.give(a);
    if (h_.addressing == Addressing::indptr) a.q_indptr = indptr.view();
    if (h_.addressing == Addressing::request) a.request = request.view();
    if (h_.addressing == Addressing::uniform) a.next_n = static_cast<int32_t>(1 + h_.speculative);
    a.tail = tail_.view();
    Exec exec = on(backend_);
    exec.strict = random_.chance(0.5) && exec.device == Device::cpu;  // nothing is wild
    exec.threads = static_cast<int32_t>(random_.between(1, 3));
    if (!all.empty()) run(a, exec);
  }

  History h_;
  std::string backend_;
  Random random_;
  Array ape_, tail_, pages_;
  KeyCache cache_{};
  std::vector<std::vector<Token>> accepted_;
  std::vector<int64_t> prompt_;
};

class PoolHistory : public BackendTest {};

TEST_P(PoolHistory, EveryAcceptedPoolIsThatOfOneCall) {
  int64_t rejected = 0, compared = 0;
  property("a history of pool_k", 120, [&] {
    const History h{static_cast<int32_t>(draw_of({4, 1, 2, 16, 64})), draw(0, 7),
                    draw_of({KeyFormat::fp8, KeyFormat::mxfp4, KeyFormat::bf16}),
                    draw_of({Addressing::indptr, Addressing::request, Addressing::uniform}), draw(1, 4)};
    Serving serving(h, GetParam(), static_cast<uint64_t>(draw(1, 1000000)));
    if (!serving.supported()) return;
    for (int64_t i = draw(1, 40); i > 0; --i) serving.step();
    RC_ASSERT(serving.first_difference() == -1);
    rejected += serving.rejected, compared += serving.compared;
  });
  EXPECT_GT(rejected, 500);
  EXPECT_GT(compared, 2000);
}

TOPKEY_ON_EVERY_BACKEND(PoolHistory);

}  // namespace
}  // namespace topkey::testing
