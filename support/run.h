// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// One name for running any operation, by the type of its arguments, with the workspace it asks for: exactly sized,
// 256-byte aligned, filled with rubbish and followed by canaries. Throws topkey::Error as the operation does, and
// std::logic_error when the operation wrote past its workspace.
#pragma once
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "support/array.h"
#include "support/on_device.h"
#include "topkey/topkey.h"

namespace topkey::support {

#define TOPKEY_SUPPORT_OP(Args, name)                                                                              \
  inline const char* op_name(const Args&) { return #name; }                                                        \
  inline void call_op(const Args& args, const Exec& exec) { name(args, exec); }                                    \
  inline size_t workspace_bytes(const Args& args, const Exec& exec) { return name##_workspace_bytes(args, exec); } \
  inline const char* unsupported(const Args& args, const Exec& exec) { return name##_unsupported(args, exec); }
TOPKEY_SUPPORT_OP(ExpandRows, expand_rows)
TOPKEY_SUPPORT_OP(ToSlots, to_slots)
TOPKEY_SUPPORT_OP(QuantizeQ, quantize_q)
TOPKEY_SUPPORT_OP(QuantizeK, quantize_k)
TOPKEY_SUPPORT_OP(StoreK, store_k)
TOPKEY_SUPPORT_OP(GatherK, gather_k)
TOPKEY_SUPPORT_OP(MqaLogits, mqa_logits)
TOPKEY_SUPPORT_OP(PagedMqaLogits, paged_mqa_logits)
TOPKEY_SUPPORT_OP(Topk, topk)
TOPKEY_SUPPORT_OP(SelectBlocks, select_blocks)
TOPKEY_SUPPORT_OP(MqaTopk, mqa_topk)
TOPKEY_SUPPORT_OP(PagedMqaTopk, paged_mqa_topk)
TOPKEY_SUPPORT_OP(MergeTopk, merge_topk)
TOPKEY_SUPPORT_OP(PoolK, pool_k)
TOPKEY_SUPPORT_OP(CompressK, compress_k)
TOPKEY_SUPPORT_OP(ExpandPools, expand_pools)
#undef TOPKEY_SUPPORT_OP

/// Calls that another backend ran, see below.
inline std::atomic<uint64_t> stood_in{0};

/// For tests of a backend that takes few shapes, and those whole: TOPKEY_TEST_STAND_IN names the backend that runs the
/// calls which it refuses. All that a test does with such a shape then runs there, and is judged by that arithmetic.
template <class Args>
Exec runner_of(const Args& args, const Exec& exec) {
  const char* other = std::getenv("TOPKEY_TEST_STAND_IN");
  if (other == nullptr || exec.backend == nullptr || unsupported(args, exec) == nullptr) return exec;
  Exec instead = exec;
  instead.backend = other;
  return unsupported(args, instead) == nullptr ? instead : exec;
}
template <class Args>
Exec or_stand_in(const Args& args, const Exec& exec) {
  const Exec runner = runner_of(args, exec);
  if (runner.backend != exec.backend) ++stood_in;
  return runner;
}

/// Runs `args`, whose memory is the host's: a GPU gets copies of it (on_device.h).
template <class Args>
void launch(const Args& args, const Exec& given) {
  const Exec exec = or_stand_in(args, given);
  if (exec.device == Device::cpu) {
    call_op(args, exec);
    return;
  }
  on_device(
      args, exec, [](const Args& a, const Exec& e) { call_op(a, e); }, unsupported(args, exec) == nullptr);
}

/// Runs `args` on exec.backend (null = the library's choice) in a workspace of its own. Host memory; copies of it on a
/// GPU.
template <class Args>
void run(const Args& args, Exec exec) {
  exec = or_stand_in(args, exec);
  const Workspace workspace(workspace_bytes(args, exec), exec.device == Device::cpu);
  exec.workspace = workspace.data();
  exec.workspace_bytes = workspace.bytes();
  launch(args, exec);
  if (!workspace.kept_inside()) throw std::logic_error(std::string(op_name(args)) + " wrote past its workspace");
}

}  // namespace topkey::support
