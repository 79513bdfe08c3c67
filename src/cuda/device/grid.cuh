// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// All threads of all blocks of a cooperative launch meet.
#pragma once
#include <cooperative_groups.h>

#include <utility>

namespace topkey::cuda {

__device__ __forceinline__ void meet_grid() { cooperative_groups::this_grid().sync(); }

/// The same in two steps, between which there is other work to do. What was written before the first is visible behind the
/// second, to all.
class GridMeeting {
 public:
  __device__ __forceinline__ GridMeeting() : grid_(cooperative_groups::this_grid()), arrival_(grid_.barrier_arrive()) {}
  __device__ __forceinline__ void wait() { grid_.barrier_wait(std::move(arrival_)); }

 private:
  cooperative_groups::grid_group grid_;
  cooperative_groups::grid_group::arrival_token arrival_;
};

}  // namespace topkey::cuda
