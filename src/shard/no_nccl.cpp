// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Twin of comm_nccl.cpp for builds without NCCL.
#include "shard.h"

namespace topkey::shard {

const char* nccl_unusable() noexcept { return "this build has no NCCL (CMake: TOPKEY_NCCL)"; }

void make_nccl(void*, double, topkey_communicator&) {
  throw Error(Status::unsupported, std::string("nccl_communicator: ") + nccl_unusable());
}

}  // namespace topkey::shard
