// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The words of every argument error, and the tensor checks they belong to. validate_*.cpp say what each operation
// wants; this says it in one voice: "operation: argument must be ..., got ...".
#pragma once
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "topkey/topkey.h"

namespace topkey {

/// call: data is read, so a tensor without data is absent. query: shapes only, so a tensor is present when its dtype
/// is set.
enum class Mode { call, query };

using DTypes = uint32_t;
constexpr DTypes set_of(std::initializer_list<DType> list) {
  DTypes set = 0;
  for (DType d : list) set |= DTypes{1} << static_cast<int>(d);
  return set;
}
constexpr DTypes kFloats = set_of({DType::f32, DType::bf16, DType::f16});
constexpr DTypes kWeights = set_of({DType::f32, DType::bf16});
constexpr DTypes kInts = set_of({DType::i32, DType::i64});
constexpr DTypes kI32 = set_of({DType::i32});
constexpr DTypes kF32 = set_of({DType::f32});
constexpr DTypes kE4m3 = set_of({DType::f8_e4m3fn, DType::u8});
constexpr DTypes kE8m0 = set_of({DType::e8m0, DType::u8});
constexpr DTypes kU8 = set_of({DType::u8});

/// One wanted extent: exactly n, at least n, or any.
struct Extent {
  int64_t n;
  bool exact;
};
constexpr Extent exactly(int64_t n) { return {n, true}; }
constexpr Extent at_least(int64_t n) { return {n, false}; }
constexpr Extent any() { return {0, false}; }

enum TensorFlag : unsigned {
  kUnit = 1,      ///< last dimension contiguous
  kOptional = 2,  ///< may be absent
  kOutput = 4,    ///< written: elements must not share memory
};

class Check {
 public:
  Check(const char* op, Mode mode) : op_(op), mode_(mode) {}

  bool has(const Tensor& t) const noexcept;
  /// Throws unless `t` is of one of `dtypes` with these extents. False where it is absent (and may be).
  bool tensor(const char* name, const Tensor& t, DTypes dtypes, std::initializer_list<Extent> extents,
              unsigned flags) const;
  /// Throws where two outputs (absent ones aside) certainly share memory in their first `rows` rows. Rows of one
  /// allocation may lie between each other, as columns of one buffer do.
  struct Named {
    const char* name;
    const Tensor* t;
  };
  void apart(int64_t rows, std::initializer_list<Named> outputs) const;
  void apart(int64_t rows, const Named& output, std::span<const Named> others) const;
  void absent(const char* name, const Tensor& t, const char* why) const;
  void number(const char* name, int64_t value, int64_t low, int64_t high) const;
  [[noreturn]] void fail(const char* name, const std::string& must, const std::string& got) const;
  Mode mode() const noexcept { return mode_; }
  const char* op() const noexcept { return op_; }

 private:
  const char* op_;
  Mode mode_;
};

/// Fails unless `ok`. A macro, so that the sentences are made only when they are needed: a call that is right
/// allocates nothing.
#define TOPKEY_REQUIRE(check, ok, name, must, got) \
  do {                                             \
    if (!(ok)) (check).fail(name, must, got);      \
  } while (false)

std::string describe(const Tensor& t);
std::string list_of(DTypes dtypes);
int64_t dtype_bytes(DType dtype) noexcept;
/// The largest index an int32 output can carry, and so the most keys a row can have.
constexpr int64_t kMaxKeys = 2147483647;

}  // namespace topkey
