// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The four comparisons of docs/numerics.md, each a function on argument structs whose outputs a backend has written
// (host memory):
//   1. compare_scores       scores lie within the arithmetic's bound of S_ref, and calc_diff is small
//   2. compare_sets         chosen sets differ from the reference's only among keys within twice the bound of the cut
//   3. compare_selection    given the backend's own scores: set, order, counts, fill, slots, blocks equal a full sort. No band
//   4. compare_unquantised  calc_diff against scores of the vectors before quantisation
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "support/oracle.h"

namespace topkey::support {

/// What one comparison found. `first` describes the first difference, or is empty.
struct Report {
  std::string name;
  int64_t rows = 0, compared = 0,
          differing = 0;  ///< differing: cells, keys or rows that are wrong (2: that differ at all)
  double worst = 0;  ///< 1: largest error as a part of its bound (of A for bound 0). 2: most differing keys of a row
  double calc_diff = 0;  ///< 1 and 4
  std::string first;
  int64_t row = -1, position = -1;
  double got = 0, want = 0, bound = 0;
  bool ok = true;
  std::string text() const;  ///< one line
  void fail(std::string sentence, int64_t at_row = -1, int64_t at_position = -1);
};

/// Largest allowed |S - S_ref| in `arithmetic` ("ref", "f32", "bf16mma", "f16mma", "bf16dp", "fp8mma"); throws
/// std::invalid_argument for a name that is none. `tiny` (Score::tiny) counts the roundings that may happen below
/// 2^-126.
double score_bound(std::string_view arithmetic, int64_t heads, int64_t head_dim, double a, double tiny = 0);
/// 1 - 2<x,y> / (|x|^2 + |y|^2); 0 for two zero vectors. Accumulates.
class CalcDiff {
 public:
  void add(double x, double y) { xy_ += x * y, xx_ += x * x, yy_ += y * y; }
  double value() const { return xx_ + yy_ == 0 ? 0 : 1 - 2 * xy_ / (xx_ + yy_); }

 private:
  double xy_ = 0, xx_ = 0, yy_ = 0;
};

/// Every live cell of args.logits against `truth`; `mask` and bf16 logits as documented; NaN and infinities must
/// agree. Visible cells that are not live must be -inf; with `clean` those outside the window too. calc_limit <= 0:
/// calc_diff is not judged.
Report compare_scores(const MqaLogits& args, const Truth& truth, std::string_view arithmetic, double calc_limit = 5e-6);
Report compare_scores(const PagedMqaLogits& args, const Truth& truth, std::string_view arithmetic,
                      double calc_limit = 5e-6);

/// args.out.indices against the choice by S_ref. judge_count: random or real data, where more than 1 + 0.5 % of topk
/// a row fails.
Report compare_sets(const MqaTopk& args, const Truth& truth, std::string_view arithmetic, bool judge_count = true);
Report compare_sets(const PagedMqaTopk& args, const Truth& truth, std::string_view arithmetic, bool judge_count = true);

/// Every output that args.out asks for. `stats`: the call's own words (from zero), compared too where not null.
Report compare_selection(const Topk& args, const uint64_t* stats = nullptr);
Report compare_selection(const SelectBlocks& args, const uint64_t* stats = nullptr);
Report compare_selection(const MqaTopk& args, const Tensor& logits, const uint64_t* stats = nullptr);
Report compare_selection(const PagedMqaTopk& args, const Tensor& logits, const uint64_t* stats = nullptr);
Report compare_selection(const MergeTopk& args, const uint64_t* stats = nullptr);

/// Fewer scores, or fewer numbers rounded to codes on either side, and calc_diff is no mean yet: it is not judged.
constexpr int64_t kJudgedScores = 1024, kJudgedNumbers = 4096;
/// truth.ref against scores of q [R,H,D], keys [N,D] (dense) or [B,T,D] (by request and position; [T,D]: one request)
/// and weights [R,H] before quantisation, bf16, f16 or f32. Limit: 1e-3 (fp8), 0.02 (mxfp4); other formats and real
/// data: printed only.
struct Unquantised {
  Tensor q, keys, weights;
};
Report compare_unquantised(const Truth& truth, const Unquantised& exact, const Rows& rows, KeyFormat format,
                           bool judge);

}  // namespace topkey::support
