// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See validate_parts.h.
#include "validate_parts.h"

namespace topkey {
namespace {

DTypes value_dtypes(KeyFormat format) {
  switch (format) {
    case KeyFormat::fp8: return kE4m3;
    case KeyFormat::bf16: return set_of({DType::bf16});
    case KeyFormat::f16: return set_of({DType::f16});
    case KeyFormat::f32: return kF32;
    case KeyFormat::mxfp4:
    case KeyFormat::fp8_fnuz:
    case KeyFormat::q8_0: break;
  }
  return kU8;
}

/// Elements of a row of values (bytes, where they are packed).
int64_t row_elements(KeyFormat format, int64_t head_dim) {
  return is_packed(format) ? value_bytes(format, head_dim) : head_dim;
}

/// What a tiled page asks of its format, head_dim and page_size.
void check_tiles(const Check& c, const KeyCache& cache) {
  const int64_t tile = tile_rows(cache.layout);
  if (tile == 0) return;
  const std::string name = layout_name(cache.layout), format = format_name(cache.format);
  const bool fp4 = cache.format == KeyFormat::mxfp4;
  TOPKEY_REQUIRE(c, fp4 || (is_fp8(cache.format) && tile == 16), "cache.layout",
                 is_fp8(cache.format) ? "planar, interleaved or tiled16 for " + format + " keys"
                                      : "planar or interleaved for " + format + " keys",
                 name);
  TOPKEY_REQUIRE(c, fp4 ? cache.head_dim == 128 : cache.head_dim % 16 == 0, "cache.head_dim",
                 (fp4 ? "128 for mxfp4 keys in " : "a multiple of 16 in ") + name + " pages",
                 std::to_string(cache.head_dim));
  TOPKEY_REQUIRE(c, cache.page_size % tile == 0, "cache.page_size",
                 "a multiple of " + std::to_string(tile) + " in " + name + " pages", std::to_string(cache.page_size));
}

}  // namespace

void check_format(const Check& c, const char* name, KeyFormat format) {
  const int f = static_cast<int>(format);
  TOPKEY_REQUIRE(c, f >= 0 && f <= static_cast<int>(KeyFormat::fp8_fnuz), name, "a KeyFormat (0 to 6)",
                 std::to_string(f));
}

void check_dim(const Check& c, const char* name, KeyFormat format, int64_t head_dim) {
  c.number(name, head_dim, 1, kMaxDim);
  const int64_t multiple = dim_multiple(format);
  TOPKEY_REQUIRE(c, head_dim % multiple == 0, name,
                 "a multiple of " + std::to_string(multiple) + " for " + format_name(format) + " keys",
                 std::to_string(head_dim));
}

int64_t check_dense(const Check& c, DenseNames names, const DenseKeys& keys, Extent rows, int64_t head_dim,
                    unsigned flags) {
  const KeyFormat format = keys.format;
  if (head_dim < 0) {
    c.tensor(names.values, keys.values, value_dtypes(format), {rows, any()}, kUnit);
    head_dim = dim_of_elements(format, keys.values.shape[1]);
    check_dim(c, (std::string(names.values) + " row").c_str(), format, head_dim);
  }
  c.tensor(names.values, keys.values, value_dtypes(format), {rows, exactly(row_elements(format, head_dim))},
           flags | kUnit);
  if (is_fp8(format)) {
    c.tensor(names.scales, keys.scales, kF32, {rows}, flags);
  } else if (format == KeyFormat::mxfp4) {
    if (keys.scales.dtype == DType::i32) {
      TOPKEY_REQUIRE(c, head_dim == 128, names.scales, "u8|e8m0 [N, D/32] where D is not 128", describe(keys.scales));
      c.tensor(names.scales, keys.scales, kI32, {rows}, flags);
    } else {
      c.tensor(names.scales, keys.scales, kE8m0, {rows, exactly(head_dim / 32)}, flags | kUnit);
    }
  } else {
    c.absent(names.scales, keys.scales, "for keys without scales of their own");
  }
  return head_dim;
}

DTypes query_dtypes(KeyFormat format) {
  if (format == KeyFormat::fp8) return kE4m3;
  return format == KeyFormat::mxfp4 || format == KeyFormat::fp8_fnuz ? kU8 : kFloats;
}

void check_query_scales(const Check& c, const char* name, const Tensor& scales, KeyFormat format,
                        const QueryExtents& extents, unsigned flags) {
  const auto& [rows, heads, head_dim] = extents;
  if (format != KeyFormat::mxfp4) {
    c.absent(name, scales, "but for mxfp4 keys");
  } else if (scales.dtype == DType::i32) {
    TOPKEY_REQUIRE(c, head_dim == 128, name, "u8|e8m0 [R, H, D/32] where D is not 128", describe(scales));
    c.tensor(name, scales, kI32, {rows, exactly(heads)}, flags | kUnit);
  } else {
    c.tensor(name, scales, kE8m0, {rows, exactly(heads), exactly(head_dim / 32)}, flags | kUnit);
  }
}

void check_cache(const Check& c, const KeyCache& cache) {
  check_format(c, "cache.format", cache.format);
  const int layout = static_cast<int>(cache.layout);
  TOPKEY_REQUIRE(c, layout >= 0 && layout <= static_cast<int>(Layout::tiled64), "cache.layout", "a Layout (0 to 4)",
                 std::to_string(layout));
  c.number("cache.page_size", cache.page_size, 1, kMaxKeys);
  check_dim(c, "cache.head_dim", cache.format, cache.head_dim);
  check_tiles(c, cache);
  const int64_t bytes = page_layout(cache.format, cache.layout, cache.page_size, cache.head_dim).page_bytes;
  c.tensor("cache.pages", cache.pages, kE4m3, {any(), at_least(bytes)}, kUnit);
  const int64_t stride = cache.pages.stride[0];
  const auto got = [&] { return "a page stride of " + std::to_string(stride) + " bytes"; };
  if (cache.pages.shape[0] > 1) {
    TOPKEY_REQUIRE(c, stride >= bytes, "cache.pages", "pages at least " + std::to_string(bytes) + " bytes apart",
                   got());
    TOPKEY_REQUIRE(c, stride % 4 == 0, "cache.pages", "pages a multiple of 4 bytes apart", got());
  }
  TOPKEY_REQUIRE(c, reinterpret_cast<uintptr_t>(cache.pages.data) % 4 == 0, "cache.pages", "4-byte aligned",
                 "a misaligned address");
}

Shape cache_shape(const KeyCache& cache, int64_t rows) {
  Shape s{};
  s.format = cache.format;
  s.rows = rows;
  s.head_dim = cache.head_dim;
  s.tiled = tile_rows(cache.layout) > 0;
  return s;
}

void check_shard(const Check& c, const Shard& shard) {
  c.number("shard.world_size", shard.world_size, 0, 1 << 20);
  c.number("shard.interleave", shard.interleave, 0, kMaxKeys);
  c.number("shard.rank", shard.rank, 0, shard.world_size > 1 ? shard.world_size - 1 : 0);
}

void check_block_table(const Check& c, const char* name, const Tensor& table, int64_t at_least_rows) {
  c.tensor(name, table, kI32, {at_least(at_least_rows), any()}, 0);
}

void check_rope(const Check& c, const Rope& rope, int64_t rows, int64_t head_dim) {
  if (rope.dim == 0) {
    c.absent("rope.cos_sin", rope.cos_sin, "where rope.dim is 0");
    return;
  }
  c.number("rope.dim", rope.dim, 2, head_dim);
  TOPKEY_REQUIRE(c, rope.dim % 2 == 0, "rope.dim", "even", std::to_string(rope.dim));
  c.tensor("rope.positions", rope.positions, kInts, {at_least(rows)}, 0);
  c.tensor("rope.cos_sin", rope.cos_sin, kFloats, {any(), exactly(rope.dim)}, kUnit);
}

void check_norm(const Check& c, const Norm& norm, int64_t head_dim) {
  const int kind = static_cast<int>(norm.kind);
  TOPKEY_REQUIRE(c, kind >= 0 && kind <= 2, "norm.kind", "a NormKind (0 to 2)", std::to_string(kind));
  if (norm.kind == NormKind::none) {
    c.absent("norm.weight", norm.weight, "where norm.kind is none");
    c.absent("norm.bias", norm.bias, "where norm.kind is none");
    return;
  }
  c.tensor("norm.weight", norm.weight, kWeights, {exactly(head_dim)}, kUnit | kOptional);
  if (norm.kind == NormKind::rms) c.absent("norm.bias", norm.bias, "for an rms norm");
  c.tensor("norm.bias", norm.bias, kWeights, {exactly(head_dim)}, kUnit | kOptional);
  TOPKEY_REQUIRE(c, norm.eps >= 0 && norm.eps < 1e30f, "norm.eps", "finite and not negative", std::to_string(norm.eps));
}

void check_hadamard(const Check& c, bool hadamard, int64_t head_dim) {
  TOPKEY_REQUIRE(c, !hadamard || (head_dim & (head_dim - 1)) == 0, "hadamard",
                 "false where head_dim is no power of two", "true for " + std::to_string(head_dim));
}

void check_rule(const Check& c, QuantRule rule, ScaleRule scale, KeyFormat format, bool query) {
  const int r = static_cast<int>(rule), s = static_cast<int>(scale);
  TOPKEY_REQUIRE(c, r >= 0 && r <= static_cast<int>(QuantRule::q8_0), "rule", "a QuantRule (0 to 9)",
                 std::to_string(r));
  TOPKEY_REQUIRE(c, s == 0 || s == 1, "scale", "ue8m0 (0) or f32 (1)", std::to_string(s));
  const auto among = [&](std::initializer_list<QuantRule> rules) {
    bool found = rule == QuantRule::automatic;
    for (QuantRule one : rules) found = found || rule == one;
    return found;
  };
  bool suits = false;
  if (format == KeyFormat::fp8 && query) {
    suits = among({QuantRule::v32_query, QuantRule::v4_query, QuantRule::kpool_query, QuantRule::cpu_query});
  } else if (format == KeyFormat::fp8) {
    suits = among({QuantRule::v32_key, QuantRule::v4_key, QuantRule::kpool_key});
  } else if (format == KeyFormat::fp8_fnuz) {
    suits = query ? among({QuantRule::v32_query, QuantRule::v4_query}) : among({QuantRule::v32_key, QuantRule::v4_key});
  } else if (format == KeyFormat::mxfp4) {
    suits = among({QuantRule::mxfp4});
  } else {
    suits = among({!query && format == KeyFormat::q8_0 ? QuantRule::q8_0 : QuantRule::automatic});
  }
  const std::string side = std::string(format_name(format)) + (query ? " queries" : " keys");
  TOPKEY_REQUIRE(c, suits, "rule", "automatic or a rule of " + side, "rule " + std::to_string(r));
  TOPKEY_REQUIRE(c, scale == ScaleRule::ue8m0 || is_fp8(format), "scale",
                 "ue8m0 (the default) but for fp8 and fp8_fnuz keys", "f32");
  TOPKEY_REQUIRE(c, scale == ScaleRule::ue8m0 || rule != QuantRule::v4_key, "scale", "ue8m0 under rule v4_key", "f32");
}

RowFacts check_rows(const Check& c, const Rows& rows, bool has_default_end) {
  c.number("rows.count", rows.count, 0, kMaxKeys);
  c.number("rows.next_n", rows.next_n, 0, kMaxKeys);
  c.number("rows.max_len", rows.max_len, 0, kMaxKeys);
  const int64_t n = rows.next_n > 1 ? rows.next_n : 1;
  const Extent every_row = at_least(rows.count);
  const bool by_request = c.tensor("rows.request", rows.request, kI32, {every_row}, kOptional);
  const bool by_indptr = c.tensor("rows.q_indptr", rows.q_indptr, kI32, {at_least(1)}, kOptional);
  TOPKEY_REQUIRE(c, !by_request || !by_indptr, "rows.q_indptr", "absent where rows.request is given",
                 describe(rows.q_indptr));
  TOPKEY_REQUIRE(c, n == 1 || rows.count % n == 0, "rows.count", "a multiple of next_n " + std::to_string(n),
                 std::to_string(rows.count));
  c.tensor("rows.start", rows.start, kI32, {every_row}, kOptional);
  const bool by_length = c.tensor("rows.length", rows.length, kI32, {every_row}, kOptional);
  if (c.has(rows.end)) {
    TOPKEY_REQUIRE(c, !by_length, "rows.length", "absent where rows.end is given", describe(rows.length));
    c.tensor("rows.end", rows.end, kI32, {any()}, 0);
    TOPKEY_REQUIRE(
        c, rows.end.shape[0] == rows.count || (n > 1 && rows.end.shape[0] == rows.count / n), "rows.end",
        "i32 [" + std::to_string(rows.count) + "]" + (n > 1 ? " or [" + std::to_string(rows.count / n) + "]" : ""),
        describe(rows.end));
  } else if (!by_length && !has_default_end && rows.count > 0) {
    c.fail("rows.end", "given (or rows.length) for paged keys", describe(rows.end));
  }
  if (by_request) return {rows.count, 0};
  if (by_indptr) return {rows.count, rows.q_indptr.shape[0] - 1};
  return {rows.count, rows.count / n};
}

}  // namespace topkey
