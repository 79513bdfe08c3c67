// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What every exported function does at the border: take a caller's struct in, whatever version of the header it was
// compiled against, and let no exception out.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <string>

#include "check.h"
#include "topkey/topkey.h"

namespace topkey {

/// The sentence of this thread's last error.
const char* kept_error() noexcept;
/// Returns the status, so that it can be returned.
topkey_status keep_error(topkey_status status, const char* sentence) noexcept;

/// What struct_size 0 means. A struct that grows keeps the size it had in ABI 1: specialise it here.
template <class C>
constexpr size_t kFirstSize = sizeof(C);
template <>
inline constexpr size_t kFirstSize<topkey_paged_mqa_topk_args> = offsetof(topkey_paged_mqa_topk_args, whole_start);
template <>
inline constexpr size_t kFirstSize<topkey_merge_topk_args> = offsetof(topkey_merge_topk_args, force_first);
template <>
inline constexpr size_t kFirstSize<topkey_shard_step> = offsetof(topkey_shard_step, token_order);

/// The C++ twin of a caller's struct, whatever version of the header it was compiled against: fields that it did not
/// know are zero; fields that this library does not know must be.
template <class Cpp, class C>
Cpp from_c(const char* op, const char* name, const C* given) {
  static_assert(sizeof(Cpp) == sizeof(C) && alignof(Cpp) == alignof(C), "C and C++ twins must have one layout");
  const Check c(op, Mode::call);
  TOPKEY_REQUIRE(c, given != nullptr, name, "a struct", "null");
  Cpp value{};
  const size_t size = given->struct_size == 0 ? kFirstSize<C> : given->struct_size;
  TOPKEY_REQUIRE(c, size >= sizeof(uint32_t), name, "a struct with struct_size", std::to_string(size));
  std::memcpy(&value, given, std::min(size, sizeof(C)));
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = sizeof(C); i < size; ++i) {
    TOPKEY_REQUIRE(c, bytes[i] == 0, name, "of this library's version (" TOPKEY_VERSION ")",
                   "newer fields that it does not know");
  }
  return value;
}

/// Runs `body`, turning whatever it throws into a status and a sentence.
template <class Body>
topkey_status guard(Body&& body) noexcept {
  try {
    body();
    return TOPKEY_OK;
  } catch (const Error& e) {
    return keep_error(static_cast<topkey_status>(e.status()), e.what());
  } catch (const std::bad_alloc&) {
    return keep_error(TOPKEY_DEVICE_ERROR, "out of memory");
  } catch (const std::exception& e) {
    return keep_error(TOPKEY_DEVICE_ERROR, e.what());
  }
}

}  // namespace topkey
