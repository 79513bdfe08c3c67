// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See decode_call.h.
#include "tests/gpu/decode_call.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

namespace topkey::testing {

using namespace topkey::support;

namespace {

constexpr int32_t kDim = 128;
constexpr const char* kNames[] = {"two_values", "bimodal", "outlier", "few_nans", "all_nans",
                                  "tie_run",    "tiny",    "huge",    "steps",    "odd_blocks"};
constexpr const char* kCodes[] = {"equal", "exact", "normal"};
constexpr const char* kLengths[] = {"equal", "ragged", "edges", "one_long"};
constexpr const char* kHoles[] = {"none", "some", "first", "last", "most", "rows"};
constexpr const char* kFills[] = {"minus_one", "repeat", "value"};
constexpr int64_t kSparePages = 3;  ///< that no table names

int64_t pages_of(int64_t keys, const DecodeCase& c) { return (keys + c.page_size - 1) / c.page_size; }
int64_t page_bytes(const DecodeCase& c) { return int64_t{c.page_size} * (kDim + 4); }
int64_t page_stride(const DecodeCase& c) { return page_bytes(c) + (c.padded ? 48 : 0) + c.page_gap; }

/// Fewer than topk winners at random places, a run of equals that all others are under.
void fill_tie_run(float* scores, int64_t count, int64_t topk, Random& random) {
  for (int64_t i = 0; i < count; ++i) scores[i] = -std::abs(random.normal());
  const int64_t run = random.between(1, count), first = random.between(0, count - run);
  std::fill_n(scores + first, run, 0.75F);
  const int64_t winners = random.between(0, std::min(topk, count));
  for (int64_t i = 0; i < winners; ++i) scores[random.below(static_cast<uint64_t>(count))] = 2.F + random.normal() / 16;
}

/// What stands far off has one value a run of 64 keys.
float block_value(int64_t i, uint64_t seed, int32_t scales) {
  Random random(seed * 1000003 + static_cast<uint64_t>(i / 64));
  if (scales == kSteps) return 1.F + static_cast<float>(random.below(13));
  const uint64_t pick = random.below(20);
  return pick == 0 ? 1e6F : pick == 1 ? -1e6F : 0.F;
}

void fill_more(const DecodeCase& c, float* scores, int64_t count) {
  Random random(c.seed);
  if (c.scales == kTieRun) return fill_tie_run(scores, count, c.topk, random);
  const auto special = static_cast<int64_t>(random.below(static_cast<uint64_t>(count)));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i < count; ++i) {
    const float x = random.normal();
    const bool rare = random.chance(0.001);
    switch (c.scales) {
      case kTwoValues: scores[i] = rare || x > 1 ? 2.F : 1.F; break;
      case kBimodal: scores[i] = x + (random.chance(0.3) ? 1000.F : -1000.F); break;
      case kOutlier: scores[i] = i == special ? 1e25F : x * 1e-3F; break;
      case kFewNans: scores[i] = rare || i == special ? nan : x; break;
      case kAllNans: scores[i] = rare ? x : nan; break;
      case kTiny: scores[i] = x * 1e-41F; break;
      case kHuge: scores[i] = x * 1e37F; break;
      case kSteps: scores[i] = block_value(i, c.seed, kSteps); break;
      default: scores[i] = x + block_value(i, c.seed, kOddBlocks); break;
    }
  }
}

/// 256 codes to draw from.
std::vector<uint8_t> palette(Codes codes, bool positive, Random& random) {
  std::vector<uint8_t> all;
  for (int i = 0; i < 256; ++i) {
    const float value = codes == Codes::normal ? random.normal() * 60 : static_cast<float>(random.between(-4, 4));
    all.push_back(float_to_e4m3(positive ? std::abs(value) : value));
  }
  return all;
}
void fill_codes(const std::vector<uint8_t>& from, uint8_t* to, int64_t count, Random& random) {
  for (int64_t i = 0; i < count; i += 8) {
    uint64_t bits = random.next();
    for (int64_t j = i; j < std::min(i + 8, count); ++j, bits >>= 8) to[j] = from[bits & 0xFF];
  }
}

void fill_query(const DecodeCase& c, const DecodeData& d, Random& random) {
  for (int64_t r = 0; r < c.rows; ++r) {
    // Most rows see the pattern as it is, some turned over or all zeros.
    const bool plain = c.codes == Codes::equal && r % 5 != 4;
    const std::vector<uint8_t> codes = palette(c.codes, plain, random);
    fill_codes(codes, element(d.q.view(), r), int64_t{c.heads} * kDim, random);
    for (int64_t h = 0; h < c.heads; ++h) {
      const float weight = std::ldexp(1.F, static_cast<int>(random.between(-3, 3)));
      *reinterpret_cast<float*>(element(d.weights.view(), r, h)) = plain || random.chance(0.5) ? weight : -weight;
    }
  }
}

/// Keys past the context are NaN bytes. Page j of the keys lies at order[j].
void fill_pages(const DecodeCase& c, const DecodeData& d, const std::vector<int32_t>& order, Random& random) {
  std::vector<float> scales(static_cast<size_t>(c.context));
  if (c.scales < kNumPatterns) {
    fill_scores(static_cast<Pattern>(c.scales), scales.data(), c.context, c.topk, c.seed);
  } else {
    fill_more(c, scales.data(), c.context);
  }
  std::memset(d.pages.as<uint8_t>(), 0xFF, d.pages.bytes());
  const std::vector<uint8_t> codes = palette(c.codes, false, random), ones(256, float_to_e4m3(1.F));
  for (int64_t j = 0; j * c.page_size < c.context; ++j) {
    uint8_t* page = d.pages.as<uint8_t>() + order[static_cast<size_t>(j)] * page_stride(c);
    const int64_t first = j * c.page_size, count = std::min<int64_t>(c.page_size, c.context - first);
    fill_codes(c.codes == Codes::equal ? ones : codes, page, count * kDim, random);
    std::memcpy(page + int64_t{c.page_size} * kDim, scales.data() + first, static_cast<size_t>(count) * 4);
  }
}

int32_t absent_id(int64_t pages, Random& random) {
  const int32_t ids[] = {-1,
                         -1,
                         static_cast<int32_t>(pages),
                         1000000000,
                         std::numeric_limits<int32_t>::max(),
                         std::numeric_limits<int32_t>::min()};
  return ids[random.below(6)];
}
/// Whether column j of `columns` that row r uses has no page.
bool is_hole(const DecodeCase& c, int64_t r, int64_t j, int64_t columns, Random& random) {
  switch (c.holes) {
    case Holes::none: return false;
    case Holes::some: return random.chance(0.15);
    case Holes::first: return j <= columns / 3;
    case Holes::last: return j >= columns * 2 / 3;
    case Holes::most: return !random.chance(0.1);
    case Holes::rows: return r % 2 == 0;
  }
  return false;
}
int64_t requests_of(const DecodeCase& c) { return c.rows / std::max(c.next_n, 1); }
void fill_table(const DecodeCase& c, const DecodeData& d, const std::vector<int32_t>& order, Random& random) {
  const int64_t used = pages_of(c.context, c), all = d.table.view().shape[1], pages = used + kSparePages;
  std::fill_n(d.table.as<int32_t>(), d.table.bytes() / 4, 1000000000);
  for (int64_t r = 0; r < requests_of(c); ++r) {
    // All rows have the same pages; some begin elsewhere.
    const int64_t turn = r % 4 == 3 ? random.between(0, used - 1) : 0;
    for (int64_t j = 0; j < all; ++j) {
      const bool hole = j >= used || is_hole(c, r, j, used, random);
      *reinterpret_cast<int32_t*>(element(d.table.view(), r, j)) =
          hole ? absent_id(pages, random) : order[static_cast<size_t>((j + turn) % used)];
    }
  }
}

}  // namespace

std::string scales_name(int32_t scales) {
  return scales < kNumPatterns ? pattern_name(static_cast<Pattern>(scales)) : kNames[scales - kNumPatterns];
}

std::string DecodeCase::text() const {
  std::ostringstream s;
  s << rows << " rows (next_n " << next_n << (of_requests ? ", ends of requests" : "") << ") x " << context << " (+"
    << spare << ") topk " << topk << " heads " << heads << " page " << page_size << " scales " << scales_name(scales)
    << " codes " << kCodes[static_cast<int>(codes)] << " lengths " << kLengths[static_cast<int>(lengths)] << " holes "
    << kHoles[static_cast<int>(holes)] << " max_len " << max_len << (length_form ? " length" : " end")
    << (padded ? " padded" : "") << " gap " << page_gap << (scored ? " scored" : "") << " fill "
    << kFills[static_cast<int>(fill)] << " SMs " << max_sms << " seed " << seed;
  return s.str();
}

void draw_ends(const DecodeCase& c, uint64_t turn, int32_t* ends) {
  Random random(c.seed * 31 + turn);
  const int64_t most = turn == 0 ? c.context : random.between(0, c.context);
  const int64_t edges[] = {0,          1,          63,        64,       65,   c.topk - 1, c.topk,
                           c.topk + 1, c.topk * 2, c.context, most - 1, most, -5,         c.context + c.spare + 700};
  const int64_t longest = random.between(0, ends_in(c) - 1);
  for (int64_t r = 0; r < ends_in(c); ++r) {
    int64_t end = most;
    switch (c.lengths) {
      case Lengths::equal: break;
      case Lengths::ragged: end = random.between(0, most); break;
      case Lengths::edges: end = edges[random.below(std::size(edges))]; break;
      case Lengths::one_long: end = r == longest ? most : random.between(0, most / 100); break;
    }
    ends[r] = static_cast<int32_t>(end);
  }
}

DecodeData make_data(const DecodeCase& c) {
  Random random(c.seed);
  const int64_t used = pages_of(c.context, c), pages = used + kSparePages, pad = c.padded ? 1 : 0;
  const int64_t heads = c.heads + pad * 4, columns = pages_of(c.context + c.spare, c), width = columns + pad * 5;
  DecodeData d;
  const Array q(DType::f8_e4m3fn, {c.rows, heads, kDim}), weights(DType::f32, {c.rows, heads});
  const Array table(DType::i32, {requests_of(c), width}), memory(DType::u8, {pages, page_stride(c)});
  d.q = q.seen_as(tensor(q.as<uint8_t>(), DType::f8_e4m3fn, {c.rows, c.heads, kDim}, {heads * kDim, kDim, 1}));
  d.weights = weights.seen_as(tensor(weights.as<uint8_t>(), DType::f32, {c.rows, c.heads}, {heads, 1}));
  d.table = table.seen_as(tensor(table.as<uint8_t>(), DType::i32, {requests_of(c), columns}, {width, 1}));
  d.pages = memory.seen_as(tensor(memory.as<uint8_t>(), DType::u8, {pages, page_bytes(c)}, {page_stride(c), 1}));
  d.ends = Array(DType::i32, {ends_in(c)});
  std::vector<int32_t> order(static_cast<size_t>(pages));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  random.shuffle(order);
  fill_query(c, d, random);
  fill_pages(c, d, order, random);
  fill_table(c, d, order, random);
  draw_ends(c, 0, d.ends.as<int32_t>());
  return d;
}

int64_t ends_in(const DecodeCase& c) {
  // Only lengths may be of more rows than the call has.
  return c.of_requests ? requests_of(c) : c.rows + (c.length_form && c.padded ? 5 : 0);
}
int64_t end_of(const DecodeCase& c, int64_t row) { return c.of_requests ? row / c.next_n : row; }
int64_t step_of(const DecodeCase& c) { return c.topk + (c.padded ? 3 : 0); }
size_t outputs_of(const DecodeCase& c) { return static_cast<size_t>(c.rows * step_of(c) * (c.scored ? 2 : 1)); }

PagedMqaTopk call_over(const DecodeCase& c, const DecodeViews& views, void* indices) {
  PagedMqaTopk args{};
  args.q.values = views.q, args.q.weights = views.weights;
  args.keys.cache = {views.pages, KeyFormat::fp8, Layout::planar, c.page_size, kDim};
  args.keys.block_table = views.table;
  args.rows.count = c.rows, args.rows.max_len = c.max_len, args.rows.next_n = c.next_n;
  (c.length_form ? args.rows.length : args.rows.end) = views.ends;
  args.topk = c.topk;
  args.out.indices = tensor(indices, DType::i32, {c.rows, c.topk}, {step_of(c), 1});
  auto* scores = static_cast<int32_t*>(indices) + c.rows * step_of(c);
  if (c.scored) args.out.scores = tensor(scores, DType::f32, {c.rows, c.topk}, {step_of(c), 1});
  args.out.fill = c.fill, args.out.fill_value = 77;
  return args;
}

}  // namespace topkey::testing
