// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A communicator as the collectives of this folder use it, and what the transports share to fill one.
#pragma once
#include <exception>
#include <functional>
#include <string>

#include "memory.h"
#include "shard.h"

namespace topkey::shard {

/// The caller's callbacks behind one face: counts bytes, gives transports of host memory copies of what lies on a device,
/// and turns a failed call into an Error that says where. Throws where a blocking one meets a captured stream.
class Comm {
 public:
  Comm(const char* op, topkey_communicator& twin, const Exec& exec);

  int32_t rank() const { return twin_.rank; }
  int32_t size() const { return twin_.size; }
  bool blocks() const { return (twin_.flags & TOPKEY_COMM_BLOCKS) != 0; }
  const Memory& memory() const { return memory_; }
  /// In the memory of the call. send may be this rank's part of receive.
  void all_gather(const void* send, void* receive, size_t bytes);
  void all_gatherv(const void* send, void* receive, const size_t* bytes);
  /// In host memory, whatever the call's device.
  void all_gather_on_host(const void* send, void* receive, size_t bytes);
  topkey_communicator& twin() const { return twin_; }
  const char* op() const { return op_; }

 private:
  void check(const char* call, topkey_status status) const;
  /// gather(send, receive) on host copies of what this rank sends and of what all send.
  template <class Gather>
  void through_host(const void* send, void* receive, const size_t* bytes, const Gather& gather);

  const char* op_;
  topkey_communicator& twin_;
  const Exec exec_;
  const Memory& memory_;
  bool staged_ = false;
};

/// What every transport's state begins with: the sentence of its last failure.
struct Failing {
  std::string sentence;
};

/// A callback's body: no exception leaves it.
template <class State, class Body>
topkey_status callback(void* ctx, Body&& body) noexcept {
  auto* state = static_cast<State*>(ctx);
  try {
    body(*state);
    return TOPKEY_OK;
  } catch (const Error& e) {
    try {
      state->sentence = e.what();
    } catch (...) {
      state->sentence.clear();
    }
    return static_cast<topkey_status>(e.status());
  } catch (...) {
    state->sentence.clear();
    return TOPKEY_PEER_ERROR;
  }
}

/// Fills a communicator with the callbacks of `State`, whose members are all_gatherv(send, receive, bytes, stream) and
/// fail(sentence). ctx is owned by the communicator.
template <class State>
topkey_communicator filled(State* state, int32_t rank, int32_t size, uint32_t flags) {
  topkey_communicator c{};
  c.struct_size = sizeof c;
  c.rank = rank;
  c.size = size;
  c.flags = flags;
  c.ctx = state;
  c.all_gather = [](void* ctx, const void* send, void* receive, size_t bytes, void* stream) noexcept {
    return callback<State>(ctx, [&](State& s) { s.all_gather(send, receive, bytes, stream); });
  };
  c.all_gatherv = [](void* ctx, const void* send, void* receive, const size_t* bytes, void* stream) noexcept {
    return callback<State>(ctx, [&](State& s) { s.all_gatherv(send, receive, bytes, stream); });
  };
  c.fail = [](void* ctx, const char* sentence) noexcept { callback<State>(ctx, [&](State& s) { s.fail(sentence); }); };
  c.failure = [](void* ctx) noexcept { return static_cast<State*>(ctx)->sentence.c_str(); };
  c.release = [](void* ctx) noexcept { delete static_cast<State*>(ctx); };
  return c;
}

uint64_t hash_of(const void* data, size_t bytes, uint64_t h = 14695981039346656037u);
/// What ranks compare: "name=value", one under the other. hash: of all that `lines` are made from; `step` are those of
/// this step.
struct Question {
  uint64_t hash;
  std::function<std::string()> lines, step;
};
/// Throws on every rank, naming both, where two ranks have other lines or, of a transport that blocks, another step.
void agree(Comm& comm, const Question& question);

}  // namespace topkey::shard
