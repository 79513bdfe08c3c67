// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// How the blocks of the decode kernel that share a row wait for each other, and what they carry between their steps.
#pragma once
#include "cuda/device/decode_plan.cuh"
#include "cuda/device/grid.cuh"

namespace topkey::cuda {

/// A row's meeting place. Steps only count up, so nothing is ever cleared.
class Meeting {
 public:
  Meeting() = default;
  __device__ Meeting(RowExchange* row, uint32_t blocks) : row_(row), blocks_(blocks), steps_(0) {}
  __device__ bool alone() const { return blocks_ == 1; }
  /// What this block wrote before is visible to all that have waited.
  __device__ void arrive() {
    ++steps_;
    sync_scorers();
    if (threadIdx.x == 0 && !alone()) add_one_released(&row_->arrived);
  }
  /// For all arrivals of the steps so far. All blocks of the grid are resident (the launch is cooperative).
  __device__ void wait() const {
    if (threadIdx.x == 0 && !alone()) {
      const uint32_t target = steps_ * blocks_;
      while (load_acquired(&row_->arrived) < target) {
      }
    }
    sync_scorers();
  }
  __device__ void meet() {
    arrive();
    wait();
  }
  __device__ RowExchange* row() const { return row_; }

 private:
  RowExchange* row_;
  uint32_t blocks_, steps_;
};

/// Where the k-th best of a row lies: in a bin, or, if that holds too many keys, in an interval of keys of the order.
struct Interval {
  int32_t bin;         ///< < 0: all live keys win
  uint32_t low, high;  ///< of keys, if by_keys
  bool by_keys;
  uint32_t above, inside, need;  ///< keys above, inside; of the latter that win
  uint32_t wanted, live;         ///< winners and live keys of the whole row
  uint32_t dropped;              ///< the best key that a list of any block has dropped
  __device__ bool many() const { return inside > kDecodeCandidates; }
  /// All keys inside are equal, and some of them win.
  __device__ bool ties() const { return many() && need < inside; }
};

/// A row that other blocks share, between the steps.
struct OpenRow {
  Meeting meeting;
  Interval in;
  uint2 own;  ///< this block's share of the interval
  uint32_t above_of_warp[kDecodeThreads / 32];
  uint32_t index;  ///< of this block among those that share the row
};

}  // namespace topkey::cuda
