// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The contract written a second time: which keys a row may see, what they score, which are selected. From the text of
// docs/numerics.md and API rules alone, sharing no code with the library, and slow. compare.h holds a backend's
// outputs against it. Everything here reads host memory.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "support/array.h"
#include "topkey/topkey.h"

namespace topkey::support {

// ---- rows and keys
// ---------------------------------------------------------------------------------------------------------

/// One query row: its window in 64 bits, its request.
struct RowRange {
  int64_t start = 0, end = 0, request = 0;
  bool fill_only = false;     ///< padding, empty, or a request beyond the tables
  bool wild_request = false;  ///< the last of these
  int64_t visible() const { return fill_only || end <= start ? 0 : end - start; }
};
/// `default_end`: where neither end nor length is given. `tables`: rows of the table that requests index; < 0 = there
/// is none.
RowRange row_range(const Rows& rows, int64_t row, int64_t default_end, int64_t tables);
/// The row's own line of a request-wise or row-wise table.
inline int64_t table_line(bool table_per_row, int64_t row, const RowRange& range) {
  return table_per_row ? row : range.request;
}

/// Where one key's bytes lie.
struct KeyBytes {
  const uint8_t* values;
  const uint8_t* scales;                                ///< fp8: its f32; mxfp4: its D/32 bytes; else null
  std::shared_ptr<const std::vector<uint8_t>> whole{};  ///< what both point into, where a tiled page has no whole row
};
/// Column `column` of a key matrix; position `position` behind line `line` of the table. Empty: cannot be read.
std::optional<KeyBytes> key_at(const DenseKeys& keys, int64_t column);
std::optional<KeyBytes> key_at(const PagedKeys& keys, int64_t line, int64_t position);

// ---- scores
// ----------------------------------------------------------------------------------------------------------------

/// Values of codes, one at a time, by formula.
double e4m3_value(uint8_t code);
double e4m3fnuz_value(uint8_t code);
double f16_value(uint16_t bits);
double e2m1_value(uint8_t code);
double e8m0_value(uint8_t byte);

struct Score {
  /// S_ref: doubles in the order of arithmetic `ref`, rounded once to f32, canonical.
  float ref;
  /// A, which the error bounds multiply. 0 where infinities in q or k decide; infinite where nothing does: an
  /// infinite key scale on a sum within 2^-6 A of 0, whose sign is rounding's.
  double a;
  /// Roundings that may happen below 2^-126, each of 2^-150: (D * sum |w| + H) * |kscale| + 2. mxfp4: 16 for kscale,
  /// as arithmetic `f32` holds q and k as a quarter of themselves.
  double tiny;
};
/// Scores keys against the rows of one Query, decoded once.
class Scorer {
 public:
  Scorer(const Query& q, KeyFormat format, int64_t head_dim);
  Score score(int64_t row, const KeyBytes& key) const;
  /// Second formulations, in another order: the sum in long double, and in plain f32 (equal to S_ref for exact inputs
  /// only).
  long double score_wide(int64_t row, const KeyBytes& key) const { return descending<long double>(row, key); }
  float score_f32_descending(int64_t row, const KeyBytes& key) const { return descending<float>(row, key); }
  int64_t heads() const { return heads_; }
  int64_t head_dim() const { return head_dim_; }

 private:
  KeyFormat format_;
  int64_t rows_, heads_, head_dim_;
  template <class Real>
  Real descending(int64_t row, const KeyBytes& key) const;
  std::vector<double> q_, weights_;  // [R,H,D], [R,H]; mxfp4 with block scales multiplied in
};
/// Values of one key, [D], block scales multiplied in, and its outer scale (1 where the format has none).
double decode_key(KeyFormat format, int64_t head_dim, const KeyBytes& key, double* values);

/// All visible, readable scores of a call, [rows, width]; mask not added. Where there is none: ref -inf, a < 0.
struct Truth {
  int64_t rows = 0, width = 0, heads = 0, head_dim = 0;
  Array ref;                      ///< f32 [rows, width]
  std::vector<double> a, tiny;    ///< [rows, width]
  std::vector<long double> wide;  ///< [rows, width] score_wide, if asked for: it doubles the cost
  bool live(int64_t row, int64_t column) const { return a[static_cast<size_t>(row * width + column)] >= 0; }
};
Truth truth_of(const Query& q, const DenseKeys& keys, const Rows& rows, bool wide = true);
/// width: the table's width in keys, or rows.max_len where that is less and no start is given.
Truth truth_of(const Query& q, const PagedKeys& keys, const Rows& rows, bool wide = true);

// ---- selection
// -------------------------------------------------------------------------------------------------------------

/// Canonical score: -0 as +0, any NaN as 0x7FC00000.
float canonical(float score);
/// "score descending, position ascending; NaN last": true if (a, i) comes before (b, j).
bool comes_before(float a, int64_t i, float b, int64_t j);

struct Key {
  int64_t position;  ///< relative to the row's start; merge: the index
  float score;       ///< mask added, canonical
};
/// What is asked of one row, with every argument resolved.
struct RowQuestion {
  RowRange range;
  int64_t topk = 0;       ///< the row's own
  std::vector<Key> live;  ///< ascending position
  int64_t wild = 0;       ///< admitted keys that cannot be read, and 1 for a wild request
  int64_t force_first = 0, force_last = 0;
  int64_t block_size = 0, blocks = 0;  ///< published blocks, 0 = none
  bool must_score = false;             ///< scores, score order or blocks are asked for
};
struct RowAnswer {
  std::vector<Key> chosen;      ///< in the order of the selection: forced by position, then score, then position
  std::vector<int32_t> blocks;  ///< ascending ids
  std::vector<float> block_scores;
  bool scored = false;    ///< more live keys than topk, or scores needed
  bool tied_cut = false;  ///< the topk-th and the next key are both unforced and score alike
};
/// `logits` of the search forms: what mqa_logits (without mask) or paged_mqa_logits gave, f32 [R, >= width]; NULL
/// data where no live key needs scoring.
RowQuestion question(const Topk& args, int64_t row);
RowQuestion question(const SelectBlocks& args, int64_t row);
RowQuestion question(const MqaTopk& args, const Tensor& logits, int64_t row);
RowQuestion question(const PagedMqaTopk& args, const Tensor& logits, int64_t row);
RowQuestion question(const MergeTopk& args, int64_t row);
/// What a sort of all live keys puts first.
RowAnswer answer(const RowQuestion& question);
/// The blocks of a merge with their scores: those of the parts, each with the best that any part gives it. Ascending.
std::vector<std::pair<int64_t, float>> merged_blocks(const MergeTopk& args, int64_t row);

}  // namespace topkey::support
