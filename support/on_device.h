// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A call on a GPU with arguments in host memory, for tests and tools: every tensor's bytes are copied to the device, the
// call runs on the copies, outputs are copied back. Whatever lies between a tensor's elements travels along, so that
// guards inside a buffer work; around each buffer lie walls of poison on the device, and inputs are compared. In a build
// without CUDA there is no such backend, and nothing here is called.
#pragma once
#include <cstddef>
#include <mutex>
#include <vector>

#include "support/call_fields.h"
#include "topkey/topkey.h"

namespace topkey::support {

/// Memory of one call: added, uploaded (pointers change), downloaded. Throws std::logic_error when a wall or an input was
/// written to, std::runtime_error when the device fails.
class DeviceCopy {
 public:
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
  std::unique_lock<std::mutex> alone_;  ///< of the device's memory, from upload on
};

/// Calls f(tensor) for all inputs of `args`.
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

template <class F>
void each_output(Selection& a, const F& f) {
  f(a.indices), f(a.slots), f(a.scores), f(a.counts), f(a.blocks);
}
template <class F>
void each_output(DenseKeys& a, const F& f) {
  f(a.values), f(a.scales);
}
template <class F>
void each_output(ExpandRows& a, const F& f) {
  f(a.row_request), f(a.lens), f(a.positions), f(a.slots);
}
template <class F>
void each_output(ToSlots& a, const F& f) {
  f(a.slots), f(a.counts);
}
template <class F>
void each_output(QuantizeQ& a, const F& f) {
  f(a.q_out), f(a.q_scales_out), f(a.weights_out);
}
template <class F>
void each_output(StoreK& a, const F& f) {
  f(a.cache.pages);
}
template <class F>
void each_output(PoolK& a, const F& f) {
  f(a.cache.pages), f(a.tail);
}
template <class F>
void each_output(CompressK& a, const F& f) {
  f(a.cache.pages), f(a.state);
}
template <class F>
void each_output(SelectBlocks& a, const F& f) {
  f(a.blocks);
}
template <class Args, class F>
void each_output(Args& a, const F& f) {
  if constexpr (requires { a.logits; }) {
    f(a.logits);
  } else {
    each_output(a.out, f);
  }
}

/// Runs call(args, exec) on copies; `runs` false: it will be refused, so that nothing needs to be copied (and a wrong
/// shape may say more than there is).
template <class Args, class Call>
void on_device(Args args, Exec exec, const Call& call, bool runs) {
  if (!runs) return call(args, exec);
  using Role = DeviceCopy::Role;
  DeviceCopy copy;
  EachTensor each{[&](Tensor& t) { copy.add(t, Role::input); }};
  fields(each, args);
  each_output(args, [&](Tensor& t) { copy.add(t, Role::output); });
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
void forward_on_device(const SparseAttnIndexer& indexer, IndexerStep step, Exec exec);

}  // namespace topkey::support
