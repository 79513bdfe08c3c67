// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `score`, reference backend: S_ref of docs/numerics.md, the definition that every other arithmetic is compared
// with.
#pragma once
#include <vector>

#include "ref/keys.h"

namespace topkey::ref {

/// One query row, decoded: values [H*D] and weights [H] as doubles (exact).
struct QueryRow {
  QueryRow(const Query& q, int64_t row, KeyFormat format, int64_t head_dim);
  std::vector<double> values, weights;
};

/// S_ref: per head a dot over d in double, d ascending; ReLU (x <= 0 ? 0 : x, so NaN stays); products with the
/// weights and their sum rounded apart in double, h ascending from +0; times kscale; rounded once to f32. Canonical:
/// NaN is 0x7FC00000, -0 is +0.
float score_of(const QueryRow& q, const std::vector<double>& key, double kscale);
float canonical(float score);

/// Scores key after key for one query row.
class Scorer {
 public:
  Scorer(const Query& q, const Keys& keys, int64_t row)
      : q_(q, row, keys.format(), keys.head_dim()), keys_(keys), key_(static_cast<size_t>(keys.head_dim())) {}
  float operator()(const KeyBytes& bytes) {
    const double kscale = decode_key(keys_.format(), bytes, key_);
    return score_of(q_, key_, kscale);
  }

 private:
  QueryRow q_;
  const Keys& keys_;
  std::vector<double> key_;
};

void mqa_logits(const MqaLogits&, const Exec&);
void paged_mqa_logits(const PagedMqaLogits&, const Exec&);

}  // namespace topkey::ref
