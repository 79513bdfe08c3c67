// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A trace: one indexer call in a .safetensors file (named tensors, and metadata strings). What the command line, the
// tests and a bug report exchange. The names are those of docs/formats.md; this file knows none of them, support/call.h
// does. Files come from strangers: whatever their bytes, reading gives a Trace or a TraceError, and allocates no more
// than the file holds.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace topkey::support {

/// what(): one sentence that names the file, the tensor or the metadata key, and what is wrong with it.
class TraceError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Owned elements in row-major order; dtype is safetensors' name (F32, F16, BF16, F8_E4M3, U8, I32, I64, BOOL, ...).
struct TraceTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;  ///< aligned for every dtype

  int64_t count() const;  ///< elements
  /// The elements as T; no conversion: T must be what dtype says. Null when there are none.
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(bytes.data());
  }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(bytes.data());
  }
};

struct Trace {
  std::map<std::string, TraceTensor> tensors;
  std::map<std::string, std::string> metadata;

  const TraceTensor* find(const std::string& name) const;                       ///< null: not there
  std::string text(const std::string& key, const std::string& fallback) const;  ///< metadata
  int64_t number(const std::string& key, int64_t fallback) const;  ///< metadata; TraceError unless a whole number
};

/// `text` of metadata `key` as a whole number; TraceError if it is none.
int64_t whole_number(const std::string& key, const std::string& text);
/// Bits of one element; 0 for a name that safetensors does not have.
int dtype_bits(std::string_view dtype);
/// Zeroed. TraceError for an unknown dtype, a negative extent, or more than `limit` bytes.
TraceTensor make_tensor(std::string_view dtype, std::vector<int64_t> shape, uint64_t limit = UINT64_MAX);
/// `name` in quotes, fit for a sentence: printable and short whatever it holds.
std::string shown(std::string_view name);

Trace read_trace(const std::string& path);
/// The same from memory; `name` stands for the file in sentences.
Trace parse_trace(std::string_view bytes, const std::string& name);
/// Whole or not at all: a temporary file beside `path`, renamed over it. The same trace gives the same bytes: widest
/// dtype first (so that every tensor is aligned in the file), then by name.
void write_trace(const std::string& path, const Trace& trace);

}  // namespace topkey::support
