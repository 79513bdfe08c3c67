// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The twin of on_device.cpp in a build without CUDA, which has no backend that could ask for it.
#include <stdexcept>

#include "support/on_device.h"

namespace topkey::support {
namespace {

[[noreturn]] void no_cuda() { throw std::logic_error("this build has no CUDA"); }

}  // namespace

DeviceCopy::~DeviceCopy() = default;
void DeviceCopy::add(Tensor&, Role) {}
void DeviceCopy::add(void**, size_t, Role) {}
void DeviceCopy::upload() { no_cuda(); }
void DeviceCopy::download() { no_cuda(); }
uint64_t calls_on_device() { return 0; }
void forward_on_device(const SparseAttnIndexer& indexer, const IndexerStep& step, const Exec& exec) {
  if (exec.device != Device::cpu) no_cuda();
  indexer.forward(step, exec);
}
void forward_on_device(const SparseAttnIndexerKpool& indexer, const IndexerStep& step, const Exec& exec) {
  if (exec.device != Device::cpu) no_cuda();
  indexer.forward(step, exec);
}
void forward_on_device(const SparseAttnIndexer& indexer, const IndexerStep& step, const RankCall& rank,
                       const Exec& exec) {
  if (exec.device != Device::cpu) no_cuda();
  forward_sharded(indexer, step, rank.spec, rank.shard, exec);
}
void forward_on_device(const SparseAttnIndexerKpool& indexer, const IndexerStep& step, const RankCall& rank,
                       const Exec& exec) {
  if (exec.device != Device::cpu) no_cuda();
  forward_sharded(indexer, step, rank.spec, rank.shard, exec);
}

}  // namespace topkey::support
