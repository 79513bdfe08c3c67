// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The smallest whole call: one query row, six keys as an f32 matrix, the three best positions. README.md shows this
// file.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "topkey/topkey.h"

int main() {
  using namespace topkey;
  std::vector<float> q{1, 0, 0, 1}, weights{1, 0.5};            // q [1 row, 2 heads, 2 dims], one weight a head
  std::vector<float> k{3, 1, -2, 4, 0, 0, 1, 5, 6, -1, -7, 0};  // k [6 keys, 2 dims]
  std::vector<int32_t> best(3);

  MqaTopk search{};  // zero is the default of every field
  search.q.values = tensor(q.data(), DType::f32, {1, 2, 2});
  search.q.weights = tensor(weights.data(), DType::f32, {1, 2});
  search.keys = {tensor(k.data(), DType::f32, {6, 2}), Tensor{}, KeyFormat::f32};
  search.rows.count = 1;  // no window given: the row sees all keys
  search.topk = 3;
  search.out.indices = tensor(best.data(), DType::i32, {1, 3});

  Exec exec{};  // the best backend that can run this, on the CPU
  exec.workspace_bytes = (mqa_topk_workspace_bytes(search, exec) + 255) / 256 * 256;
  exec.workspace = std::aligned_alloc(256, exec.workspace_bytes);
  mqa_topk(search, exec);  // throws topkey::Error on a wrong argument
  std::printf("best keys: %d %d %d\n", best[0], best[1], best[2]);
  std::free(exec.workspace);
}
