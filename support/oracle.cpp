// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// First half of the oracle: windows, where a key's bytes lie, what they are worth, what they score.
#include "support/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace topkey::support {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

int64_t request_of(const Rows& rows, int64_t row) {
  if (rows.request.data != nullptr) return int_at(rows.request, row);
  if (rows.q_indptr.data != nullptr) {
    for (int64_t b = 0; b + 1 < rows.q_indptr.shape[0]; ++b) {
      if (int_at(rows.q_indptr, b) <= row && row < int_at(rows.q_indptr, b + 1)) return b;
    }
    return -1;
  }
  return row / std::max(1, rows.next_n);
}

int64_t end_of(const Rows& rows, int64_t row, int64_t start, int64_t default_end) {
  if (rows.length.data != nullptr) return start + int_at(rows.length, row);
  if (rows.end.data == nullptr) return default_end;
  const int64_t n = std::max(1, rows.next_n);
  if (n > 1 && rows.end.shape[0] * n == rows.count) return int_at(rows.end, row / n) - n + 1 + row % n;
  return int_at(rows.end, row);
}

/// Sign, exponent and fraction fields of a small float without infinities.
double small_float(int negative, int exponent, int fraction, int fraction_bits, int bias) {
  const int hidden = exponent == 0 ? 0 : 1 << fraction_bits;
  const double magnitude = std::ldexp(hidden + fraction, std::max(exponent, 1) - bias - fraction_bits);
  return negative != 0 ? -magnitude : magnitude;
}

/// One row of codes, D values, block scales multiplied in.
void decode_values(KeyFormat format, DType dtype, int64_t head_dim, const uint8_t* at, const uint8_t* scales,
                   double* out) {
  for (int64_t d = 0; d < head_dim; ++d) {
    uint16_t half;
    float single;
    switch (format) {
      case KeyFormat::fp8: out[d] = e4m3_value(at[d]); break;
      case KeyFormat::fp8_fnuz: out[d] = e4m3fnuz_value(at[d]); break;
      case KeyFormat::mxfp4: {
        const int code = d % 2 == 0 ? at[d / 2] & 15 : at[d / 2] >> 4;
        out[d] = e2m1_value(static_cast<uint8_t>(code)) * e8m0_value(scales[d / 32]);
        break;
      }
      case KeyFormat::q8_0: {
        const uint8_t* block = at + d / 32 * 34;
        std::memcpy(&half, block, sizeof half);
        out[d] = f16_value(half) * static_cast<int8_t>(block[2 + d % 32]);
        break;
      }
      default:
        if (dtype == DType::f32) {
          std::memcpy(&single, at + 4 * d, sizeof single);
          out[d] = static_cast<double>(single);
        } else {
          std::memcpy(&half, at + 2 * d, sizeof half);
          const uint32_t bits = static_cast<uint32_t>(half) << 16;
          std::memcpy(&single, &bits, sizeof single);
          out[d] = dtype == DType::bf16 ? static_cast<double>(single) : f16_value(half);
        }
    }
  }
}

/// Row `row` of a tiled page put together, by walking through its group in the order of storage: pieces of 16 bytes,
/// rows inside a piece. The four scales of an mxfp4 row fall into N/16 that lie side by side and 64/N steps between
/// them.
KeyBytes whole_row(const KeyCache& cache, const uint8_t* page, int64_t row) {
  const int64_t n = tile_rows(cache.layout), group = row / n, v = value_bytes(cache.format, cache.head_dim),
                g = scale_bytes(cache.format, cache.head_dim);
  auto bytes = std::make_shared<std::vector<uint8_t>>(static_cast<size_t>(v + g));
  const uint8_t* at = page + group * n * v;
  for (int64_t piece = 0; piece < v / 16; ++piece) {
    for (int64_t lane = 0; lane < n; ++lane, at += 16) {
      if (lane == row % n) std::memcpy(bytes->data() + piece * 16, at, 16);
    }
  }
  uint8_t* scales = bytes->data() + v;
  at = page + cache.page_size * v + group * n * g;
  if (cache.format != KeyFormat::mxfp4) {
    std::memcpy(scales, at + row % n * g, static_cast<size_t>(g));
  } else {
    const int64_t steps = 64 / n;
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t lane = 0; lane < n; ++lane) {
        for (int64_t side = 0; side < n / 16; ++side, ++at) {
          if (lane == row % n) scales[side * steps + step] = *at;
        }
      }
    }
  }
  return {bytes->data(), scales, bytes};
}

double relu(double x) { return x < 0 ? 0 : x; }  // NaN stays

}  // namespace

RowRange row_range(const Rows& rows, int64_t row, int64_t default_end, int64_t tables) {
  RowRange range;
  range.start = rows.start.data != nullptr ? int_at(rows.start, row) : 0;
  range.end = end_of(rows, row, range.start, default_end);
  range.request = request_of(rows, row);
  range.wild_request = tables >= 0 && range.request >= tables;
  range.fill_only = range.request < 0 || range.end <= range.start || range.wild_request;
  return range;
}

std::optional<KeyBytes> key_at(const DenseKeys& keys, int64_t column) {
  if (column < 0 || column >= keys.values.shape[0]) return {};
  const uint8_t* scales = keys.scales.data != nullptr ? element(keys.scales, column) : nullptr;
  return KeyBytes{element(keys.values, column), scales, {}};
}

std::optional<KeyBytes> key_at(const PagedKeys& keys, int64_t line, int64_t position) {
  const KeyCache& cache = keys.cache;
  const int64_t column = position / cache.page_size, offset = position % cache.page_size;
  if (position < 0 || line < 0 || line >= keys.block_table.shape[0] || column >= keys.block_table.shape[1]) return {};
  const int64_t page = int_at(keys.block_table, line, column);
  if (page < 0 || page >= cache.pages.shape[0]) return {};
  const uint8_t* base = static_cast<const uint8_t*>(cache.pages.data) + page * cache.pages.stride[0];
  if (tile_rows(cache.layout) > 0) return whole_row(cache, base, offset);
  const int64_t values = value_bytes(cache.format, cache.head_dim), scales = scale_bytes(cache.format, cache.head_dim);
  const bool planar = cache.layout == Layout::planar;
  const uint8_t* value = base + offset * (planar ? values : values + scales);
  const uint8_t* scale = planar ? base + cache.page_size * values + offset * scales : value + values;
  return KeyBytes{value, scales > 0 ? scale : nullptr, {}};
}

double e4m3_value(uint8_t code) {
  if ((code & 0x7F) == 0x7F) return kNaN;
  return small_float(code & 0x80, code >> 3 & 15, code & 7, 3, 7);
}

double e4m3fnuz_value(uint8_t code) {
  return code == 0x80 ? kNaN : small_float(code & 0x80, code >> 3 & 15, code & 7, 3, 8);
}

double f16_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent < 31) return small_float(bits & 0x8000, exponent, fraction, 10, 15);
  if (fraction != 0) return kNaN;
  return (bits & 0x8000) != 0 ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity();
}

double e2m1_value(uint8_t code) { return small_float(code & 8, code >> 1 & 3, code & 1, 1, 1); }

double e8m0_value(uint8_t byte) { return byte == 255 ? kNaN : std::ldexp(1.0, byte - 127); }

double decode_key(KeyFormat format, int64_t head_dim, const KeyBytes& key, double* values) {
  const DType dtype = format == KeyFormat::f32 ? DType::f32 : format == KeyFormat::f16 ? DType::f16 : DType::bf16;
  decode_values(format, dtype, head_dim, key.values, key.scales, values);
  if (format != KeyFormat::fp8 && format != KeyFormat::fp8_fnuz) return 1;
  float scale;
  std::memcpy(&scale, key.scales, sizeof scale);
  return static_cast<double>(scale);
}

Scorer::Scorer(const Query& q, KeyFormat format, int64_t head_dim)
    : format_(format), rows_(q.values.shape[0]), heads_(q.values.shape[1]), head_dim_(head_dim) {
  q_.resize(static_cast<size_t>(rows_ * heads_ * head_dim_));
  weights_.resize(static_cast<size_t>(rows_ * heads_));
  const bool coded = format == KeyFormat::fp8 || format == KeyFormat::mxfp4 || format == KeyFormat::fp8_fnuz;
  const KeyFormat q_format = coded ? format : KeyFormat::f32;  // f32 stands for "by dtype" below
  for (int64_t r = 0; r < rows_; ++r) {
    for (int64_t h = 0; h < heads_; ++h) {
      const uint8_t* scales = format == KeyFormat::mxfp4 ? element(q.scales, r, h) : nullptr;
      decode_values(q_format, q.values.dtype, head_dim_, element(q.values, r, h), scales,
                    &q_[(r * heads_ + h) * head_dim_]);
      weights_[r * heads_ + h] = static_cast<double>(float_at(q.weights, r, h));
    }
  }
}

Score Scorer::score(int64_t row, const KeyBytes& key) const {
  std::vector<double> values(static_cast<size_t>(head_dim_));
  const double outer = decode_key(format_, head_dim_, key, values.data());
  double sum = 0, a = 0, weight_sum = 0;
  for (int64_t h = 0; h < heads_; ++h) {
    const double* q = &q_[static_cast<size_t>((row * heads_ + h) * head_dim_)];
    const double weight = weights_[static_cast<size_t>(row * heads_ + h)];
    double dot = 0, absolute = 0;
    for (int64_t d = 0; d < head_dim_; ++d) {
      const double term = q[d] * values[static_cast<size_t>(d)];
      dot += term;
      absolute += std::abs(term);
    }
    sum += weight * relu(dot);
    a += std::abs(weight) * absolute;
    weight_sum += std::abs(weight);
  }
  const double last = format_ == KeyFormat::mxfp4 ? 16 : std::abs(outer);
  const double tiny = (static_cast<double>(head_dim_) * weight_sum + static_cast<double>(heads_)) * last + 2;
  const bool decided = !std::isfinite(a) || (std::isinf(outer) && std::abs(sum) > 0x1p-6 * a);
  return {canonical(static_cast<float>(sum * outer)), decided ? 0 : a * std::abs(outer),
          std::isfinite(tiny) ? tiny : 0};
}

template <class Real>
Real Scorer::descending(int64_t row, const KeyBytes& key) const {
  std::vector<double> values(static_cast<size_t>(head_dim_));
  const double outer = decode_key(format_, head_dim_, key, values.data());
  Real sum = 0;
  for (int64_t h = heads_ - 1; h >= 0; --h) {
    const double* q = &q_[static_cast<size_t>((row * heads_ + h) * head_dim_)];
    Real dot = 0;
    for (int64_t d = head_dim_ - 1; d >= 0; --d)
      dot += static_cast<Real>(q[d]) * static_cast<Real>(values[static_cast<size_t>(d)]);
    sum += static_cast<Real>(weights_[static_cast<size_t>(row * heads_ + h)]) * (dot < 0 ? 0 : dot);
  }
  return sum * static_cast<Real>(outer);
}
template long double Scorer::descending<long double>(int64_t, const KeyBytes&) const;
template float Scorer::descending<float>(int64_t, const KeyBytes&) const;

namespace {

void size_truth(Truth& truth, int64_t rows, int64_t width, bool wide, const Scorer& scorer) {
  truth.rows = rows;
  truth.width = width;
  truth.heads = scorer.heads();
  truth.head_dim = scorer.head_dim();
  truth.ref = Array(DType::f32, {rows, width});
  std::fill_n(truth.ref.as<float>(), rows * width, kMinusInf);
  truth.a.assign(static_cast<size_t>(rows * width), -1.0);
  truth.tiny.assign(static_cast<size_t>(rows * width), 0);
  if (wide) truth.wide.assign(static_cast<size_t>(rows * width), 0);
}

/// Readable keys of one row into its cells. `find` gives the bytes of a column.
template <class Find>
void score_row(Truth& truth, const Scorer& scorer, int64_t row, const RowRange& range, int64_t max_len,
               const Find& find) {
  if (range.visible() == 0) return;
  const int64_t last = std::min({range.end, truth.width, max_len > 0 ? range.start + max_len : range.end});
  for (int64_t column = std::max<int64_t>(0, range.start); column < last; ++column) {
    const std::optional<KeyBytes> key = find(column);
    if (!key) continue;
    const Score score = scorer.score(row, *key);
    const size_t cell = static_cast<size_t>(row * truth.width + column);
    truth.ref.as<float>()[cell] = score.ref;
    truth.a[cell] = std::isnan(score.a) ? 0 : score.a;
    truth.tiny[cell] = score.tiny;
    if (!truth.wide.empty()) truth.wide[cell] = scorer.score_wide(row, *key);
  }
}

}  // namespace

Truth truth_of(const Query& q, const DenseKeys& keys, const Rows& rows, bool wide) {
  const int64_t elements = keys.values.shape[1];
  const int64_t head_dim = keys.format == KeyFormat::mxfp4  ? elements * 2
                           : keys.format == KeyFormat::q8_0 ? elements / 34 * 32
                                                            : elements;
  const Scorer scorer(q, keys.format, head_dim);
  Truth truth;
  size_truth(truth, rows.count, keys.values.shape[0], wide, scorer);
  for (int64_t r = 0; r < rows.count; ++r) {
    const RowRange range = row_range(rows, r, truth.width, -1);
    score_row(truth, scorer, r, range, rows.max_len, [&](int64_t column) { return key_at(keys, column); });
  }
  return truth;
}

Truth truth_of(const Query& q, const PagedKeys& keys, const Rows& rows, bool wide) {
  const Scorer scorer(q, keys.cache.format, keys.cache.head_dim);
  int64_t width = keys.block_table.shape[1] * keys.cache.page_size;
  if (rows.max_len > 0 && !present(rows.start)) width = std::min(width, rows.max_len);
  Truth truth;
  size_truth(truth, rows.count, width, wide, scorer);
  for (int64_t r = 0; r < rows.count; ++r) {
    const RowRange range = row_range(rows, r, 0, keys.table_per_row ? -1 : keys.block_table.shape[0]);
    const int64_t line = table_line(keys.table_per_row, r, range);
    score_row(truth, scorer, r, range, rows.max_len, [&](int64_t position) { return key_at(keys, line, position); });
  }
  return truth;
}

}  // namespace topkey::support
