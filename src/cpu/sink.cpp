// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See sink.h.
#include "cpu/sink.h"

#include <algorithm>

#include "cpu/kernels.h"

namespace topkey::cpu {

Forced forced_keys(const Admit& admit, const RowFact& fact) {
  Forced f;
  if (admit.force_first > 0) f.first = fact.position_at(admit.force_first);
  if (admit.force_last > 0) f.last = fact.position_at(fact.whole_end - fact.whole_start - admit.force_last);
  return f;
}

Forced forced_block(const RowFact& fact, int64_t block_size) {
  Forced f;
  f.last = (fact.whole_end - 1 - fact.whole_start) / block_size;
  return f;
}

void RowSink::start(const RowFact& fact, int64_t row, const Wanted& wanted, const SinkBuffers& buffers) {
  fact_ = &fact;
  admit_ = wanted.admit;
  row_ = row;
  count_all_ = wanted.count_all;
  winners_.reset(buffers.score, buffers.position, buffers.capacity,
                 {wanted.topk, forced_keys(*admit_, fact), count_all_, wanted.gate});
  const Selection& out = *wanted.out;
  block_size_ = out.blocks.data != nullptr ? out.block_size : 0;
  in_block_ = false;
  block_id_ = -1;
  if (block_size_ > 0) {
    blocks_.reset(buffers.block_score, buffers.block_id, buffers.block_capacity,
                  {out.blocks.shape[1], forced_block(fact, block_size_), false, nullptr});
  }
}

void RowSink::close_block() {
  if (!in_block_) return;
  in_block_ = false;
  const float score = score_of_key(block_key_);
  if (blocks_.open() || score >= blocks_.gate() || blocks_.forced().has(block_id_)) blocks_.append(score, block_id_);
}

/// The block of `position` becomes the current one.
void RowSink::turn_to_block(int64_t position) {
  if (in_block_ && position < block_end_) return;
  close_block();
  block_id_ = static_cast<int32_t>(fact_->distance(position) / block_size_);
  block_end_ = fact_->position_at((block_id_ + int64_t{1}) * block_size_);
  block_key_ = 0;
  in_block_ = true;
}

void RowSink::see_blocks(const float* scores, const int32_t* positions, int64_t n) {
  constexpr int64_t kAtOnce = 64;
  uint32_t keys[kAtOnce];
  for (int64_t first = 0; first < n; first += kAtOnce) {
    const int64_t m = std::min(kAtOnce, n - first);
    for (int64_t i = 0; i < m; ++i) keys[i] = key_of(scores[first + i]);
    for (int64_t i = 0; i < m;) {
      turn_to_block(positions[first + i]);
      uint32_t best = block_key_;
      do {
        best = std::max(best, keys[i]);
      } while (++i < m && positions[first + i] < block_end_);
      block_key_ = best;
    }
  }
}

void RowSink::take_one(float score, int32_t position, Counts& counts) {
  float addend = 0.0f;
  if (masked(admit_->mask, row_, position, &addend)) return;
  const float s = score + addend;
  counts.add(kScoredKeys);
  counts.add(kNanScores, std::isnan(s));
  if (block_size_ > 0) see_blocks(&s, &position, 1);
  if (winners_.open() || s >= winners_.gate() || winners_.forced().has(position)) winners_.append(s, position);
}

void RowSink::take(const float* scores, const int32_t* positions, int64_t n, int32_t* accepted, Counts& counts) {
  if (n <= 0) return;
  const Forced& forced = winners_.forced();
  winners_.listen();
  if (admit_->mask.data != nullptr || forced.has(positions[0]) || forced.has(positions[n - 1])) {
    for (int64_t i = 0; i < n; ++i) take_one(scores[i], positions[i], counts);
    return;
  }
  counts.add(kScoredKeys, n);
  for (int64_t i = 0; count_all_ && i < n; ++i) counts.add(kNanScores, std::isnan(scores[i]));
  if (block_size_ > 0) see_blocks(scores, positions, n);
  if (winners_.open()) {
    winners_.append_all(scores, positions, n);
    return;
  }
  const int64_t passed = kernels().gate(scores, n, winners_.gate(), accepted);
  for (int64_t i = 0; i < passed; ++i) winners_.append(scores[accepted[i]], positions[accepted[i]]);
}

void RowSink::finish(bool newest, bool merged) {
  if (!merged) winners_.finish();
  if (block_size_ == 0) return;
  close_block();
  const int64_t last = blocks_.forced().last;
  if (newest && fact_->whole_size() > 0 && block_id_ != last)
    blocks_.append(canonical_nan(), static_cast<int32_t>(last));
  if (!merged) blocks_.finish();
}

}  // namespace topkey::cpu
