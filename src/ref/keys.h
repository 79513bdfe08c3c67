// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Where a row's keys are, dense or paged, and which of them are live: the one place of this backend that does page
// arithmetic.
#pragma once
#include <cstdint>
#include <vector>

#include "ref/rows.h"
#include "ref/view.h"

namespace topkey::ref {

/// Bytes of one key row; null values = the key cannot be read (wild page id).
struct KeyBytes {
  const uint8_t* values;
  const uint8_t* scale;
};

/// Dense or paged keys behind one face.
class Keys {
 public:
  explicit Keys(const DenseKeys& dense);
  explicit Keys(const PagedKeys& paged);

  KeyFormat format() const { return format_; }
  int64_t head_dim() const { return head_dim_; }
  /// Positions [0, count) exist: N, or the table's width in keys.
  int64_t count() const { return count_; }
  /// The keys' own table row for a query row; < 0: padding or a wild request id (counted in counts).
  int64_t table_row(int64_t row, int64_t request, Counts& counts) const;
  /// Of a tiled page: a copy of the row, good until the next call.
  KeyBytes find(int64_t table_row, int64_t position) const;
  int64_t page_of(int64_t table_row, int64_t position) const;

 private:
  const DenseKeys* dense_ = nullptr;
  const PagedKeys* paged_ = nullptr;
  KeyFormat format_;
  int64_t head_dim_, count_;
  PageLayout layout_{};
  mutable std::vector<uint8_t> row_;
};

/// Code d of a row of e4m3, e4m3fnuz or e2m1 codes, times the scale of its block of 32 (mxfp4).
double code_value(KeyFormat format, const uint8_t* values, const uint8_t* scales, size_t d);
/// One key row as real numbers (exact); returns its outer scale (1 where the format has none).
double decode_key(KeyFormat format, const KeyBytes& key, std::vector<double>& out);

}  // namespace topkey::ref
