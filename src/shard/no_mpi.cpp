// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Twin of comm_mpi.cpp for builds without MPI.
#include "shard.h"

namespace topkey::shard {

const char* mpi_unusable() noexcept { return "this build has no MPI (CMake: TOPKEY_MPI)"; }

void make_mpi(const void*, double, topkey_communicator&) {
  throw Error(Status::unsupported, std::string("mpi_communicator: ") + mpi_unusable());
}

}  // namespace topkey::shard
