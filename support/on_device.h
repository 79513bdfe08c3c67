// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A call on a GPU with arguments in host memory, for tests and tools: every tensor's bytes are copied to the device, the
// call runs on the copies, outputs are copied back. Whatever lies between a tensor's elements travels along, so that
// guards inside a buffer work; around each buffer lie walls of poison on the device, and inputs are compared. In a build
// without CUDA there is no such backend, and nothing here is called.
#pragma once
#include <cstddef>
#include <vector>

#include "support/call_fields.h"
#include "support/output_fields.h"
#include "topkey/topkey.h"

namespace topkey::support {

/// Memory of one call: added, uploaded (pointers change), downloaded. Calls of several threads have memory each. Throws
/// std::logic_error when a wall or an input was written to, std::runtime_error when the device fails.
class DeviceCopy {
 public:
  DeviceCopy() = default;
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;
  ~DeviceCopy();
  /// output: copied back; scratch: only the walls matter.
  enum class Role { input, output, scratch };
  void add(Tensor& tensor, Role role);
  void add(void** pointer, size_t bytes, Role role);
  void upload();
  void download();

 private:
  struct Part {
    void** pointer;         ///< where the call has it
    const Tensor* view;     ///< null: plain bytes
    uint8_t *first, *last;  ///< its bytes on the host
    Role role;
  };
  struct Block {
    uint8_t *first, *last;
    size_t at;  ///< on the device
    bool output, scratch, large;
    std::vector<size_t> parts;
  };
  void make_blocks();
  void copy_rows(const Block& block, bool to_device) const;

  std::vector<Part> parts_;
  std::vector<Block> blocks_;
  std::vector<uint8_t> staging_;
  size_t used_ = 0;
  uint8_t* device_ = nullptr;  ///< from upload on
};

/// A visitor of fields that calls f(tensor) for each tensor.
template <class F>
struct EachTensor {
  F f;
  void operator()(const char*, Tensor& t) { f(t); }
  template <class T>
  void operator()(const char*, T&) {}
  template <class T>
  void operator()(const char*, T&, Names) {}
};
template <class F>
EachTensor(F) -> EachTensor<F>;  // clang 14 does not find it by itself

/// Runs call(args, exec) on copies; `runs` false: it will be refused, so that nothing needs to be copied (and a wrong
/// shape may say more than there is).
template <class Args, class Call>
void on_device(Args args, Exec exec, const Call& call, bool runs) {
  if (!runs) return call(args, exec);
  using Role = DeviceCopy::Role;
  DeviceCopy copy;
  EachTensor inputs{[&](Tensor& t) { copy.add(t, Role::input); }};
  fields(inputs, args);
  EachTensor outputs{[&](Tensor& t) { copy.add(t, Role::output); }};
  output_fields(outputs, args);
  copy.add(reinterpret_cast<void**>(&exec.stats), exec.stats != nullptr ? kNumStats * sizeof(uint64_t) : 0,
           Role::output);
  copy.add(&exec.workspace, exec.workspace_bytes, Role::scratch);
  copy.upload();
  call(args, exec);
  copy.download();
}

/// Calls on a device so far.
uint64_t calls_on_device();

/// The layer's step likewise; on the host as it is.
void forward_on_device(const SparseAttnIndexer& indexer, const IndexerStep& step, const Exec& exec);
void forward_on_device(const SparseAttnIndexerKpool& indexer, const IndexerStep& step, const Exec& exec);

/// What a rank of a sharded step has beside the step.
struct RankCall {
  ShardSpec spec;
  ShardStep shard;
};
/// A sharded step likewise, on a stream of its own.
void forward_on_device(const SparseAttnIndexer& indexer, const IndexerStep& step, const RankCall& rank,
                       const Exec& exec);
void forward_on_device(const SparseAttnIndexerKpool& indexer, const IndexerStep& step, const RankCall& rank,
                       const Exec& exec);

}  // namespace topkey::support
