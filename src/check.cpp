// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See check.h. Nothing here reads tensor contents.
#include "check.h"

#include <algorithm>
#include <cstdint>

namespace topkey {
namespace {

struct DTypeFact {
  const char* name;
  int64_t bytes;
};
constexpr DTypeFact kDTypes[] = {{"none", 0}, {"f32", 4}, {"f16", 2}, {"bf16", 2}, {"f8_e4m3fn", 1},
                                 {"e8m0", 1}, {"u8", 1},  {"b8", 1},  {"i32", 4},  {"i64", 8}};
constexpr int kNumDTypes = 10;
constexpr int64_t kMaxSpan = int64_t{1} << 56;  // elements; four of them times 8 bytes still fit

std::string shape_words(DTypes dtypes, std::initializer_list<Extent> extents, unsigned flags) {
  std::string words = list_of(dtypes) + " [";
  const char* comma = "";
  for (const Extent& e : extents) {
    words += comma;
    words += e.exact ? std::to_string(e.n) : e.n > 0 ? ">=" + std::to_string(e.n) : "*";
    comma = ", ";
  }
  return words + (flags & kUnit ? "] with unit last stride" : "]");
}

/// True if every address of the tensor is within reach of 64-bit arithmetic.
bool strides_in_reach(const Tensor& t) {
  for (int d = 0; d < t.ndim; ++d) {
    int64_t span = 0;
    if (t.shape[d] > 1 && __builtin_mul_overflow(t.shape[d] - 1, t.stride[d], &span)) return false;
    if (span > kMaxSpan || span < -kMaxSpan) return false;
  }
  return true;
}

/// True if no two elements of the wanted extents share an address: outer strides must step over all that is inside
/// them.
bool elements_apart(const Tensor& t, std::initializer_list<Extent> extents) {
  struct Dim {
    int64_t step, extent;
  } dims[4];
  int n = 0;
  for (const Extent& e : extents) {
    const int64_t used = e.exact || e.n > 0 ? e.n : t.shape[n];
    dims[n] = {t.stride[n] < 0 ? -t.stride[n] : t.stride[n], used};
    ++n;
  }
  std::sort(dims, dims + n, [](const Dim& a, const Dim& b) { return a.step < b.step; });
  int64_t inside = 1;
  for (int i = 0; i < n; ++i) {
    if (dims[i].extent <= 1) continue;
    if (dims[i].step < inside) return false;
    inside = dims[i].step * (dims[i].extent - 1) + inside;
  }
  return true;
}

/// Rows of bytes: where they begin, how far apart, how wide, how many.
struct Bytes {
  uintptr_t at;
  int64_t step, width, rows;
  uintptr_t end() const { return at + static_cast<uintptr_t>((rows - 1) * step + width); }
};
/// Of the first `used` rows. rows 0: nothing is known to be written (no elements, or strides of another kind than rows of
/// whole bytes).
Bytes bytes_of(const Tensor& t, int64_t used) {
  const int64_t element = dtype_bytes(t.dtype);
  int64_t inner = element, rows = t.ndim > 0 ? std::min(t.shape[0], used) : 0;
  for (int d = t.ndim - 1; d > 0; --d) {
    if (t.shape[d] > 1 && t.stride[d] * element != inner) rows = 0;
    inner *= t.shape[d];
  }
  if (t.data == nullptr || inner <= 0 || rows <= 0) return {};
  const int64_t step = rows > 1 ? t.stride[0] * element : inner, upwards = step < 0 ? -step : step;
  if (upwards < inner) return {};
  const auto at = reinterpret_cast<uintptr_t>(t.data);
  return {step < 0 ? at - static_cast<uintptr_t>((rows - 1) * upwards) : at, upwards, inner, rows};
}

bool share_memory(const Bytes& a, const Bytes& b) {
  if (a.rows == 0 || b.rows == 0 || a.end() <= b.at || b.end() <= a.at) return false;
  if (a.step == b.step) {
    // The first row of the later one lies in a row of the earlier one, or reaches into its next.
    const Bytes &low = a.at <= b.at ? a : b, &high = a.at <= b.at ? b : a;
    const auto offset = static_cast<int64_t>(high.at - low.at);
    const int64_t row = offset / low.step, inside = offset % low.step;
    return inside < low.width || (row + 1 < low.rows && inside + high.width > low.step);
  }
  // Both go upwards: of two rows apart, the one that ends first meets none of the other's later rows.
  for (int64_t i = 0, j = 0; i < a.rows && j < b.rows;) {
    const uintptr_t in_a = a.at + static_cast<uintptr_t>(i * a.step), in_b = b.at + static_cast<uintptr_t>(j * b.step);
    const uintptr_t end_a = in_a + static_cast<uintptr_t>(a.width), end_b = in_b + static_cast<uintptr_t>(b.width);
    if (in_a < end_b && in_b < end_a) return true;
    end_a <= in_b ? ++i : ++j;
  }
  return false;
}

}  // namespace

int64_t dtype_bytes(DType dtype) noexcept {
  const int i = static_cast<int>(dtype);
  return i >= 0 && i < kNumDTypes ? kDTypes[i].bytes : 0;
}

std::string list_of(DTypes dtypes) {
  std::string names;
  for (int i = 0; i < kNumDTypes; ++i) {
    if (!(dtypes >> i & 1u)) continue;
    if (!names.empty()) names += "|";
    names += kDTypes[i].name;
  }
  return names;
}

std::string describe(const Tensor& t) {
  const int i = static_cast<int>(t.dtype);
  std::string words = i >= 0 && i < kNumDTypes ? kDTypes[i].name : "dtype " + std::to_string(i);
  if (t.dtype == DType::none && t.data == nullptr) return "an absent tensor";
  words += " [";
  for (int d = 0; d < t.ndim && d < 4; ++d) words += (d ? ", " : "") + std::to_string(t.shape[d]);
  words += "]";
  if (t.data == nullptr) words += " without data";
  return words;
}

bool Check::has(const Tensor& t) const noexcept {
  return present(t) || (mode_ == Mode::query && t.dtype != DType::none);
}

void Check::fail(const char* name, const std::string& must, const std::string& got) const {
  throw Error(Status::invalid_argument, std::string(op_) + ": " + name + " must be " + must + ", got " + got);
}

void Check::number(const char* name, int64_t value, int64_t low, int64_t high) const {
  if (value >= low && value <= high) return;
  fail(name, "from " + std::to_string(low) + " to " + std::to_string(high), std::to_string(value));
}

void Check::absent(const char* name, const Tensor& t, const char* why) const {
  if (has(t)) fail(name, std::string("absent ") + why, describe(t));
}

void Check::apart(int64_t rows, const Named& output, std::span<const Named> others) const {
  for (const Named& other : others) {
    if (share_memory(bytes_of(*output.t, rows), bytes_of(*other.t, rows))) {
      fail(output.name, std::string("in other memory than ") + other.name, "memory that both would write");
    }
  }
}

void Check::apart(int64_t rows, std::initializer_list<Named> outputs) const {
  const std::span<const Named> all(outputs.begin(), outputs.size());
  for (size_t i = 0; i < all.size(); ++i) apart(rows, all[i], all.first(i));
}

bool Check::tensor(const char* name, const Tensor& t, DTypes dtypes, std::initializer_list<Extent> extents,
                   unsigned flags) const {
  if (!has(t)) {
    if (flags & kOptional) return false;
    fail(name, shape_words(dtypes, extents, flags), describe(t));
  }
  const auto refuse = [&](const std::string& got) { fail(name, shape_words(dtypes, extents, flags), got); };
  const int dtype = static_cast<int>(t.dtype);
  if (dtype <= 0 || dtype >= kNumDTypes || !(dtypes >> dtype & 1u)) refuse(describe(t));
  if (t.ndim != static_cast<int32_t>(extents.size())) refuse(describe(t));
  bool empty = false;
  int d = 0;
  for (const Extent& e : extents) {
    if (t.shape[d] < 0 || (e.exact ? t.shape[d] != e.n : t.shape[d] < e.n)) refuse(describe(t));
    empty = empty || t.shape[d] == 0;
    ++d;
  }
  if (empty) return true;
  if (!strides_in_reach(t)) fail(name, "strides within 2^56 elements", describe(t) + " with wilder ones");
  const int last = t.ndim - 1;
  if ((flags & kUnit) && t.shape[last] > 1 && t.stride[last] != 1) {
    refuse(describe(t) + " with last stride " + std::to_string(t.stride[last]));
  }
  if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(dtype_bytes(t.dtype)) != 0) {
    fail(name, "aligned to its element size", describe(t) + " at a misaligned address");
  }
  if ((flags & kOutput) && !elements_apart(t, extents)) {
    fail(name, "an output whose elements have an address each", describe(t) + " with overlapping strides");
  }
  return true;
}

}  // namespace topkey
