// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See draw.h.
#include "tests/draw.h"

#include <algorithm>
#include <limits>

namespace topkey::testing {
namespace {
constexpr int32_t kMaxI32 = std::numeric_limits<int32_t>::max();

/// Tiled pages, where the format and head_dim have them.
void draw_tiles(ProblemSpec& spec) {
  const bool fp4 = spec.format == KeyFormat::mxfp4;
  if (fp4 ? spec.head_dim != 128 : !is_fp8(spec.format) || spec.head_dim % 16 != 0) return;
  spec.layout = fp4 ? draw_of({Layout::tiled16, Layout::tiled32, Layout::tiled64}) : Layout::tiled16;
  spec.page_size = static_cast<int32_t>(tile_rows(spec.layout) * draw(1, 3));
}
}  // namespace

std::vector<Pairing> all_pairings() {
  std::vector<Pairing> all{
      {KeyFormat::fp8, DType::none}, {KeyFormat::mxfp4, DType::none}, {KeyFormat::fp8_fnuz, DType::none}};
  for (const KeyFormat format : {KeyFormat::bf16, KeyFormat::f16, KeyFormat::f32, KeyFormat::q8_0}) {
    for (const DType q : {DType::f32, DType::bf16, DType::f16}) all.push_back({format, q});
  }
  return all;
}

ProblemSpec draw_spec(bool paged) {
  ProblemSpec spec;
  const std::vector<Pairing> pairings = all_pairings();
  // Pairing 0 is fp8, the format of production: every third case.
  const Pairing pairing =
      pairings[draw_flag(3) ? 0 : static_cast<size_t>(draw(0, static_cast<int64_t>(pairings.size()) - 1))];
  spec.format = pairing.format;
  spec.q_dtype = pairing.q;
  spec.weights_dtype = draw_of({DType::f32, DType::bf16});
  spec.heads = draw_of({1, 3, 4, 8});
  spec.head_dim = dim_multiple(spec.format) == 32 ? draw_of({32, 64, 128}) : draw_of({32, 64, 128, 80, 20, 1});
  static const bool gpu = !gpu_backends().empty();
  if (gpu && draw_flag()) {  // what every CUDA backend takes
    spec.format = KeyFormat::fp8, spec.q_dtype = DType::none;
    spec.heads = draw_of({1, 8, 20, 32, 64, 128}), spec.head_dim = draw_of({64, 128});
  }
  spec.rows = draw(0, 7);
  spec.keys = draw(0, 90);
  spec.pattern = static_cast<Pattern>(draw(0, kNumPatterns - 1));
  spec.exact = draw_flag();
  spec.scale = is_fp8(spec.format) ? draw_of({ScaleRule::ue8m0, ScaleRule::f32}) : ScaleRule::ue8m0;
  spec.windows = draw_of({Windows::full, Windows::causal, Windows::random, Windows::wild});
  spec.length_not_end = draw_flag(3);
  spec.seed = static_cast<uint64_t>(draw(1, 1000000));
  spec.paged = paged;
  if (draw_flag(4)) spec.max_len = draw(1, spec.keys + 20);
  if (!paged) return spec;
  spec.requests = static_cast<int32_t>(draw(1, 4));
  spec.page_size = draw_of({16, 1, 2, 48, 64, 256});
  spec.addressing = draw_of({Addressing::request, Addressing::q_indptr, Addressing::next_n});
  spec.next_n = static_cast<int32_t>(draw(1, 3));
  spec.end_per_request = draw_flag();
  spec.table_per_row = draw_flag(4);
  spec.layout = draw_of({Layout::planar, Layout::interleaved});
  if (draw_flag(4)) draw_tiles(spec);
  if (draw_flag(3)) {
    const int64_t bytes = spec.page_size * row_bytes(spec.format, spec.head_dim);
    spec.page_stride = (bytes + 3) / 4 * 4 + 4 * draw(0, 9);
  }
  spec.storage_offset = 4 * draw(0, 5);
  spec.table_step = static_cast<int32_t>(draw(1, 3));
  return spec;
}

int32_t wild_int(Random& random, int64_t columns) {
  switch (random.below(8)) {
    case 0: return -static_cast<int32_t>(random.below(40));
    case 1: return static_cast<int32_t>(columns + static_cast<int64_t>(random.below(40)));
    case 2: return random.chance(0.5) ? kMaxI32 : std::numeric_limits<int32_t>::min();
    default: return static_cast<int32_t>(random.between(0, columns));
  }
}

Array wild_ints(Random& random, int64_t count, int64_t columns) {
  const Array array(DType::i32, {count});
  for (int64_t i = 0; i < count; ++i) array.as<int32_t>()[i] = wild_int(random, columns);
  return array;
}

Admit draw_admit(Borrowed& borrowed, Random& random, int64_t rows, int64_t columns, bool mask) {
  Admit admit{};
  if (draw_flag(3)) {
    admit.candidate_block_size = static_cast<int32_t>(draw(1, std::max<int64_t>(20, columns / 6)));
    borrowed.candidates = Array(DType::i32, {rows, draw(0, 12)});
    for (int64_t i = 0; i < borrowed.candidates.size(); ++i) {
      borrowed.candidates.as<int32_t>()[i] = wild_int(random, columns / admit.candidate_block_size + 1);
    }
    admit.candidates = borrowed.candidates.view();
    if (borrowed.candidates.size() == 0) admit.candidates.data = nullptr;  // as frameworks hand over an empty tensor
  }
  if (mask && draw_flag(3)) {
    const DType dtype = draw_of({DType::b8, DType::f32, DType::f16});
    borrowed.mask = Array(dtype, {rows, columns + draw(0, 3)});
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const float values[] = {0.F, -kInf, 0.5F, -3.F, -kInf, 0.25F, kInf, canonical_nan()};
    for (int64_t i = 0; i < borrowed.mask.size(); ++i) {
      const float value = values[random.below(8)];
      if (dtype == DType::b8) borrowed.mask.as<uint8_t>()[i] = static_cast<uint8_t>(random.below(3));
      if (dtype == DType::f32) borrowed.mask.as<float>()[i] = value;
      if (dtype == DType::f16) borrowed.mask.as<uint16_t>()[i] = float_to_f16(value);
    }
    admit.mask = borrowed.mask.view();
  }
  const int64_t most_forced = columns > 1000 ? 600 : 9;
  if (draw_flag(3)) admit.force_first = static_cast<int32_t>(draw(0, most_forced));
  if (draw_flag(3)) admit.force_last = draw_flag(5) ? kMaxI32 : static_cast<int32_t>(draw(0, most_forced));
  return admit;
}

Want draw_want(Borrowed& borrowed, Random& random, int64_t rows, int64_t columns, int64_t requests) {
  Want want;
  want.order = draw_of({Order::position, Order::score, Order::any});
  want.fill = draw_of({Fill::minus_one, Fill::repeat, Fill::value});
  want.fill_value = static_cast<int32_t>(draw(-7, 7));
  want.scores = draw_flag();
  want.counts = draw_flag();
  want.wide = draw_flag();
  if (draw_flag(3)) {
    want.block_size = static_cast<int32_t>(draw(1, 17));
    want.blocks = draw(1, columns > 1000 ? 400 : 9);
  }
  if (draw_flag(3)) {
    borrowed.base = Array(DType::i32, {rows});
    for (int64_t r = 0; r < rows; ++r)
      borrowed.base.as<int32_t>()[r] = static_cast<int32_t>(random.between(-1000, 100000));
    want.index_base = borrowed.base.view();
  }
  if (draw_flag(3)) {
    want.slots = true;
    want.indices = draw_flag();
    want.slot_map.page_size = static_cast<int32_t>(draw(1, 30));
    want.slot_map.table_per_row = draw_flag();
    // Sometimes too few columns for the keys, negative pages, slots beyond int32: slot -1.
    const int64_t lines = want.slot_map.table_per_row ? rows : requests;
    borrowed.table = Array(DType::i32, {lines, std::max<int64_t>(1, columns / want.slot_map.page_size + draw(-1, 1))});
    for (int64_t i = 0; i < borrowed.table.size(); ++i) {
      borrowed.table.as<int32_t>()[i] =
          random.chance(0.05) ? 1000000000 : static_cast<int32_t>(random.between(-1, 50000));
    }
    want.slot_map.block_table = borrowed.table.view();
  }
  return want;
}

}  // namespace topkey::testing
