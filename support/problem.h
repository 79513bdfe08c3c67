// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A whole indexer call with its data: from a short description (format, geometry, rows, paging, pattern, seed) to
// owned tensors and ready argument structs. What tests, `topkey check --random`, `make-trace`, benchmarks and fuzzers
// run; the backend comes later, by exec.backend. All data lives in the Arrays below and is reached only through their
// view(), so that a device copy of a Problem is a Problem.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "support/array.h"
#include "support/patterns.h"
#include "topkey/topkey.h"

namespace topkey::support {

/// What each row may see of its keys.
enum class Windows : int32_t {
  full,    ///< all keys: dense: no end given; paged: the request's length
  causal,  ///< the last rows of each request: row j of n ends at len - n + 1 + j
  random,  ///< start and end anywhere inside, some empty (paged: start too)
  wild,    ///< random, and some negative, reversed, far beyond the keys
};
/// How a row of a paged problem finds its request.
enum class Addressing : int32_t { request, q_indptr, next_n };

struct ProblemSpec {
  KeyFormat format = KeyFormat::fp8;
  DType q_dtype = DType::none;  ///< none: f8 (fp8), u8 (mxfp4, fp8_fnuz), the keys' own (bf16, f16, f32), f32 (q8_0)
  DType weights_dtype = DType::f32;  ///< or bf16
  int32_t heads = 4, head_dim = 32;
  int64_t rows = 8;
  int64_t keys = 100;  ///< dense: N. paged: the longest request's length (the others: random, up to it)
  Pattern pattern = Pattern::normal;
  bool exact = false;                  ///< exact inputs (exact.h)
  ScaleRule scale = ScaleRule::ue8m0;  ///< fp8 and fp8_fnuz keys, inexact problems
  Windows windows = Windows::full;
  bool length_not_end = false;  ///< give `length` instead of `end`
  uint64_t seed = 1;
  int64_t max_len = 0;  ///< rows.max_len
  // paged
  bool paged = false;
  int32_t requests = 1, page_size = 16;
  Addressing addressing = Addressing::request;
  int32_t next_n = 1;            ///< Addressing::next_n: rows = requests * next_n (`rows` is ignored)
  bool end_per_request = false;  ///< with next_n: end [B] (windows are then causal)
  bool table_per_row = false;
  Layout layout = Layout::planar;
  int64_t page_stride = 0;     ///< bytes; 0 = the page's own size rounded up to 4
  int64_t storage_offset = 0;  ///< bytes from a 256-byte boundary to page 0; multiple of 4
  int32_t table_step = 1;      ///< element stride of the block table's columns
};

struct Problem {
  ProblemSpec spec;
  Array q, q_scales, weights;
  Array keys, key_scales;                       ///< dense
  Array pages, block_table;                     ///< paged; bytes outside keys are NaN bytes, unused table entries 10^9
  Array start, end, length, request, q_indptr;  ///< of Rows; absent where not used
  std::vector<int64_t> lens;                    ///< key rows of each request (dense: one request of N)
  std::vector<int32_t> row_request;             ///< of each row, however the arguments say it
  std::vector<std::vector<int32_t>> page_ids;   ///< of each request, in order, whatever the table looks like
  Shard shard{};                                ///< set by shard_of
  Array whole_start, whole_end;                 ///< set by shard_of: i32 [R], each row's window before the cut
  /// What the codes were made from, where they were quantised (normal data, not exact): q bf16 [R,H,D], keys bf16
  /// [B,T,D] (dense B = 1), weights f32 [R,H] before the fp8 q scale was folded in. Else absent.
  Array q_truth, keys_truth, weights_truth;

  int64_t count() const { return static_cast<int64_t>(row_request.size()); }
  int64_t width() const;  ///< columns of its logits: N; the table's width in keys, or max_len (without start)
  /// Bytes of key `position` of request `b`, values and scales (null: left out), out of its row and into it.
  void read_key(int64_t b, int64_t position, uint8_t* values, uint8_t* scales) const;
  void write_key(int64_t b, int64_t position, const uint8_t* values, const uint8_t* scales) const;
  /// Where they lie: values, and scales where the format has separate ones. Not for tiled pages.
  uint8_t* values_at(int64_t b, int64_t position) const;
  uint8_t* scales_at(int64_t b, int64_t position) const;
  Query query() const;
  DenseKeys dense_keys() const;
  PagedKeys paged_keys() const;
  Rows rows() const;
  MqaLogits dense_logits(const Tensor& logits, bool clean = true) const;
  PagedMqaLogits paged_logits(const Tensor& logits, bool clean = true) const;
  MqaTopk dense_search(int32_t topk, const Selection& out) const;
  PagedMqaTopk paged_search(int32_t topk, const Selection& out) const;
  std::string text() const;  ///< one line: what it is, for messages
};

Problem make_problem(const ProblemSpec& spec);
/// Dtype of q that `spec` stands for.
DType query_dtype(const ProblemSpec& spec);

/// Rows r and keys of request b as a dense problem: the keys of positions 0..lens[b]-1 side by side, the rows of that
/// request with their windows. `rows_of` receives the row numbers in `paged`.
Problem dense_of(const Problem& paged, int32_t b, std::vector<int64_t>* rows_of);
/// The part of a paged problem (windows not wild) that one rank holds: own pages, own table, windows of its own keys.
Problem shard_of(const Problem& whole, Shard shard);
/// The same call for these rows only (request addressing, end or length per row).
Problem rows_of(const Problem& whole, const std::vector<int64_t>& rows);
/// The same call with `extra` more heads whose weight is 0 and whose q codes repeat real ones.
Problem with_zero_heads(const Problem& whole, int32_t extra);

}  // namespace topkey::support
