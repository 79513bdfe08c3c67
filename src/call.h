// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Everything that can be wrong with a call, before it does anything: used by every exported operation, and by the
// layer for all its stages before the first of them writes.
#pragma once
#include <string>

#include "backend_table.h"
#include "validate.h"

namespace topkey {

template <class Args>
struct Operation;
#define X(op_, Args)                                \
  template <>                                       \
  struct Operation<Args> {                          \
    static constexpr Op op = Op::op_;               \
    static constexpr auto function = &Backend::op_; \
  };
TOPKEY_OPERATIONS(X)
#undef X

/// Validates, chooses the backend, checks the workspace. Throws; else the backend that runs it.
template <class Args>
const Backend& check_call(const Args& args, const Exec& exec) {
  constexpr Op op = Operation<Args>::op;
  validate_exec(op_name(op), exec);
  const Shape shape = validate(args, Mode::call);
  const Backend& b = choose_backend(op, shape, exec);
  const size_t needed = b.workspace_bytes(op, shape);
  if (needed > exec.workspace_bytes || (needed > 0 && exec.workspace == nullptr)) {
    throw Error(Status::workspace_too_small, std::string(op_name(op)) + ": exec.workspace_bytes must be at least " +
                                                 std::to_string(needed) + ", got " +
                                                 std::to_string(exec.workspace == nullptr ? 0 : exec.workspace_bytes));
  }
  return b;
}

/// Under a caller's team a one-thread backend works on rank 0; the others wait, so that all return after the work is
/// done.
template <class Work>
void run_on_rank_0(const Team& team, Work&& work) {
  const auto wait = [&team] {
    if (team.size > 1) team.barrier(team.ctx);
  };
  if (team.rank == 0) {
    try {
      work();
    } catch (...) {
      wait();
      throw;
    }
  }
  wait();
}

/// Runs the operation on a backend that check_call has found.
template <class Args>
void run_checked(const Backend& b, const Args& args, const Exec& exec) {
  const auto work = [&] { (b.*Operation<Args>::function)(args, exec); };
  if (exec.team != nullptr && b.one_thread) {
    run_on_rank_0(*exec.team, work);
  } else {
    work();
  }
}

}  // namespace topkey
