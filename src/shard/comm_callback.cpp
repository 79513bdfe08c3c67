// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The caller's own transport, called. One that blocks and does not say that it takes device memory gets copies of what
// lies there, in host memory of this call.
#include <numeric>
#include <vector>

#include "shard/comm.h"

namespace topkey::shard {

Comm::Comm(const char* op, topkey_communicator& twin, const Exec& exec)
    : op_(op), twin_(twin), exec_(exec), memory_(memory_of(op, exec)) {
  const bool blocks = (twin.flags & TOPKEY_COMM_BLOCKS) != 0;
  if (!blocks || exec.device == Device::cpu) return;
  staged_ = (twin.flags & TOPKEY_COMM_DEVICE) == 0;
  if (!memory_.captured(exec)) return;
  throw Error(Status::unsupported, std::string(op) +
                                       ": exec.stream must not be captured where a communicator blocks (one over NCCL "
                                       "does not), got a capture");
}

void Comm::check(const char* call, topkey_status status) const {
  if (status == TOPKEY_OK) return;
  const char* why = twin_.failure == nullptr ? nullptr : twin_.failure(twin_.ctx);
  std::string sentence = std::string(op_) + ": " + call + " of rank " + std::to_string(twin_.rank) + " failed";
  if (why != nullptr && *why != '\0') sentence += std::string(": ") + why;
  throw Error(Status::peer_error, sentence);
}

template <class Gather>
void Comm::through_host(const void* send, void* receive, const size_t* bytes, const Gather& gather) {
  const size_t before = std::accumulate(bytes, bytes + twin_.rank, size_t{0});
  const size_t total = std::accumulate(bytes + twin_.rank, bytes + twin_.size, before);
  std::vector<char> all(total);
  char* own = all.data() + before;
  memory_.copy(own, send, bytes[twin_.rank], exec_);
  gather(own, all.data());
  memory_.copy(receive, all.data(), total, exec_);
}

void Comm::all_gather(const void* send, void* receive, size_t bytes) {
  if (!staged_) return all_gather_on_host(send, receive, bytes);
  const std::vector<size_t> each(static_cast<size_t>(twin_.size), bytes);
  through_host(send, receive, each.data(), [&](const void* own, void* all) { all_gather_on_host(own, all, bytes); });
}

void Comm::all_gather_on_host(const void* send, void* receive, size_t bytes) {
  check("all_gather", twin_.all_gather(twin_.ctx, send, receive, bytes, exec_.stream));
  twin_.received_bytes += bytes * static_cast<size_t>(twin_.size - 1);
}

void Comm::all_gatherv(const void* send, void* receive, const size_t* bytes) {
  const auto gather = [&](const void* own, void* all) {
    check("all_gatherv", twin_.all_gatherv(twin_.ctx, own, all, bytes, exec_.stream));
  };
  if (staged_) {
    through_host(send, receive, bytes, gather);
  } else {
    gather(send, receive);
  }
  for (int32_t r = 0; r < twin_.size; ++r) twin_.received_bytes += r == twin_.rank ? 0 : bytes[r];
}

}  // namespace topkey::shard
