// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The caller's own transport, called.
#include "shard/comm.h"

namespace topkey::shard {

void Comm::check(const char* call, topkey_status status) const {
  if (status == TOPKEY_OK) return;
  const char* why = twin_.failure == nullptr ? nullptr : twin_.failure(twin_.ctx);
  std::string sentence = std::string(op_) + ": " + call + " of rank " + std::to_string(twin_.rank) + " failed";
  if (why != nullptr && *why != '\0') sentence += std::string(": ") + why;
  throw Error(Status::peer_error, sentence);
}

void Comm::all_gather(const void* send, void* receive, size_t bytes) {
  check("all_gather", twin_.all_gather(twin_.ctx, send, receive, bytes, stream_));
  twin_.received_bytes += bytes * static_cast<size_t>(twin_.size - 1);
}

void Comm::all_gatherv(const void* send, void* receive, const size_t* bytes) {
  check("all_gatherv", twin_.all_gatherv(twin_.ctx, send, receive, bytes, stream_));
  for (int32_t r = 0; r < twin_.size; ++r) twin_.received_bytes += r == twin_.rank ? 0 : bytes[r];
}

}  // namespace topkey::shard
