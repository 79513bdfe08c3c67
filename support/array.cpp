// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See array.h.
#include "support/array.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "topkey/number.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1  // as g++ says it
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
extern "C" {
void __asan_poison_memory_region(void const volatile* first, size_t bytes);    // NOLINT
void __asan_unpoison_memory_region(void const volatile* first, size_t bytes);  // NOLINT
}
#define TOPKEY_POISON(first, bytes) __asan_poison_memory_region(first, bytes)
#define TOPKEY_UNPOISON(first, bytes) __asan_unpoison_memory_region(first, bytes)
#else
#define TOPKEY_POISON(first, bytes) static_cast<void>(0)
#define TOPKEY_UNPOISON(first, bytes) static_cast<void>(0)
#endif

namespace topkey::support {
namespace {
constexpr uint8_t kPoison = 0xA5;
constexpr size_t kLead = 256;
constexpr uint8_t kRubbish = 0xC3;
constexpr size_t kCanary = 64;
/// More than this goes back to the system after each call.
constexpr size_t kKeptBytes = size_t{80} << 20;

std::shared_ptr<uint8_t> raw_bytes(size_t size, size_t offset) {
  // Ends where the data ends, so that AddressSanitizer sees the first byte past it.
  constexpr std::align_val_t kAlign{256};
  auto* raw = static_cast<uint8_t*>(::operator new(size + offset + (size + offset == 0), kAlign));
  return {raw + offset, [raw](uint8_t*) { ::operator delete(raw, kAlign); }};
}

/// Memory for the thread's next Workspace.
struct Spare {
  std::shared_ptr<uint8_t> memory;
  size_t bytes = 0;
};
thread_local Spare spare;

bool is_all(const uint8_t* from, const uint8_t* to, uint8_t byte) {
  return from == to || (*from == byte && std::memcmp(from, from + 1, static_cast<size_t>(to - from) - 1) == 0);
}
}  // namespace

size_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::none: return 0;
    case DType::f8_e4m3fn:
    case DType::e8m0:
    case DType::u8:
    case DType::b8: return 1;
    case DType::f16:
    case DType::bf16: return 2;
    case DType::f32:
    case DType::i32: return 4;
    case DType::i64: return 8;
  }
  return 0;
}

const char* dtype_name(DType dtype) {
  static constexpr const char* kNames[] = {"none", "f32", "f16", "bf16", "f8_e4m3fn", "e8m0", "u8", "b8", "i32", "i64"};
  const auto i = static_cast<size_t>(dtype);
  return i < sizeof kNames / sizeof *kNames ? kNames[i] : "?";
}

std::shared_ptr<uint8_t> aligned_bytes(size_t size, size_t offset) {
  std::shared_ptr<uint8_t> memory = raw_bytes(size, offset);
  std::memset(memory.get() - offset, 0, size + offset);
  return memory;
}

Workspace::Workspace(size_t bytes, bool filled) : bytes_(bytes) {
  memory_ = std::move(spare.memory), room_ = std::exchange(spare.bytes, 0);
  if (room_ < bytes + kCanary) memory_ = raw_bytes(bytes + kCanary, 0), room_ = bytes + kCanary;
  std::memset(memory_.get() + (filled ? 0 : bytes), kRubbish, (filled ? bytes : 0) + kCanary);
  TOPKEY_POISON(memory_.get() + bytes, room_ - bytes);
}

Workspace::~Workspace() {
  TOPKEY_UNPOISON(memory_.get() + bytes_, room_ - bytes_);
  if (room_ <= kKeptBytes) spare = {std::move(memory_), room_};
}

bool Workspace::kept_inside() const {
  TOPKEY_UNPOISON(memory_.get() + bytes_, kCanary);
  return is_all(memory_.get() + bytes_, memory_.get() + bytes_ + kCanary, kRubbish);
}

Array::Array(DType dtype, std::initializer_list<int64_t> shape, size_t offset) {
  view_ = tensor(nullptr, dtype, shape);
  bytes_ = static_cast<size_t>(size()) * dtype_bytes(dtype);
  store_ = aligned_bytes(bytes_, offset);
  view_.data = store_.get();
}

Array Array::of(const std::vector<int32_t>& values) {
  Array array(DType::i32, {static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), array.as<int32_t>());
  return array;
}

Array Array::seen_as(const Tensor& view) const {
  Array other = *this;
  other.view_ = view;
  return other;
}

Array Array::clone() const {
  if (!*this) return {};
  Array copy = *this;
  copy.store_ = raw_bytes(bytes_, reinterpret_cast<uintptr_t>(view_.data) % 256);
  std::memcpy(copy.store_.get(), view_.data, bytes_);
  copy.view_.data = copy.store_.get();
  return copy;
}

int64_t Array::size() const {
  int64_t n = view_.ndim > 0 ? 1 : 0;
  for (int32_t i = 0; i < view_.ndim; ++i) n *= view_.shape[i];
  return n;
}

float float_at(const Tensor& t, int64_t i, int64_t j, int64_t l) {
  const uint8_t* at = element(t, i, j, l);
  uint16_t half;
  float single;
  switch (t.dtype) {
    case DType::f32: std::memcpy(&single, at, sizeof single); return single;
    case DType::bf16: std::memcpy(&half, at, sizeof half); return bf16_to_float(half);
    case DType::f16: std::memcpy(&half, at, sizeof half); return f16_to_float(half);
    default: return static_cast<float>(int_at(t, i, j));
  }
}

int64_t int_at(const Tensor& t, int64_t i, int64_t j) {
  const uint8_t* at = element(t, i, j);
  int32_t word;
  int64_t wide;
  switch (t.dtype) {
    case DType::i32: std::memcpy(&word, at, sizeof word); return word;
    case DType::i64: std::memcpy(&wide, at, sizeof wide); return wide;
    case DType::u8:
    case DType::b8: return *at;
    default: throw std::invalid_argument(std::string("support: no integer in a tensor of ") + dtype_name(t.dtype));
  }
}

Guarded::Guarded(DType dtype, int64_t rows, int64_t cols, int64_t pad, int64_t spare_rows)
    : dtype_(dtype), rows_(rows), cols_(cols < 0 ? 1 : cols), step_(cols < 0 ? 1 : cols + pad), vector_(cols < 0) {
  lead_ = kLead;
  bytes_ = 2 * lead_ + static_cast<size_t>((rows + spare_rows) * step_) * dtype_bytes(dtype);
  store_ = raw_bytes(bytes_, 0);
  reset();
}

Tensor Guarded::view(bool wide) const {
  if (!*this) return {};
  if (vector_) return tensor(store_.get() + lead_, dtype_, {rows_});
  return tensor(store_.get() + lead_, dtype_, {rows_, wide ? step_ : cols_}, {step_, 1});
}

void Guarded::reset() {
  if (*this) std::memset(store_.get(), kPoison, bytes_);
}

bool Guarded::poisoned(int64_t row, int64_t col) const {
  const size_t size = dtype_bytes(dtype_);
  const uint8_t* at = store_.get() + lead_ + static_cast<size_t>(row * step_ + col) * size;
  return std::all_of(at, at + size, [](uint8_t byte) { return byte == kPoison; });
}

std::string Guarded::touched_outside(int64_t rows, int64_t cols) const {
  const uint8_t* base = store_.get();
  const auto size = static_cast<int64_t>(dtype_bytes(dtype_)), row = step_ * size, lead = static_cast<int64_t>(lead_);
  const auto untouched = [&](int64_t from, int64_t to) -> std::string {
    to = std::min(to, static_cast<int64_t>(bytes_));
    if (from >= to || is_all(base + from, base + to, kPoison)) return {};
    const int64_t i = std::find_if(base + from, base + to, [](uint8_t byte) { return byte != kPoison; }) - base;
    const int64_t at = i < lead ? -1 : (i - lead) / size;
    return "byte " + std::to_string(i - lead) + " was written: row " + std::to_string(at < 0 ? -1 : at / step_) +
           ", column " + std::to_string(at < 0 ? -1 : at % step_) + " of [" + std::to_string(rows) + ", " +
           std::to_string(cols) + "]";
  };
  // The wall before, what lies after each row's columns, and all that comes after the rows.
  int64_t from = 0;
  for (int64_t r = 0; r < rows && cols > 0; ++r) {
    if (std::string touched = untouched(from, lead + r * row); !touched.empty()) return touched;
    from = lead + r * row + std::min(cols, step_) * size;
  }
  return untouched(from, static_cast<int64_t>(bytes_));
}

}  // namespace topkey::support
