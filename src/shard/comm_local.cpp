// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Ranks as threads of one process. A collective is: post where your bytes are, meet, copy everyone's, meet again (so
// that no one's bytes go away while they are read). The meeting ends early, on every rank, when one has failed, has
// left, or does not come in time.
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <vector>

#include "shard/comm.h"

namespace topkey::shard {
namespace {

struct Group {
  std::mutex mutex;
  std::condition_variable moved;
  int32_t size = 0;
  double seconds = 0;
  // All under the mutex.
  int64_t round = 0;
  int32_t arrived = 0;
  std::vector<char> here;
  std::vector<const void*> sent;
  std::vector<std::vector<size_t>> bytes;
  std::string broken;  ///< why this group is of no more use

  std::string absent() const {
    std::string ranks;
    for (size_t r = 0; r < here.size(); ++r) {
      if (!here[r]) ranks += (ranks.empty() ? "rank " : ", ") + std::to_string(r);
    }
    return ranks;
  }
  void check() const {
    if (!broken.empty()) throw Error(Status::peer_error, broken);
  }
  /// The first reason stays. With the mutex held.
  void give_up(const std::string& why) {
    if (broken.empty()) broken = why;
    moved.notify_all();
  }

  /// Returns when all have come. With the mutex held.
  void meet(std::unique_lock<std::mutex>& lock, int32_t rank) {
    check();
    here[static_cast<size_t>(rank)] = 1;
    if (++arrived == size) {
      arrived = 0;
      std::fill(here.begin(), here.end(), 0);
      ++round;
      moved.notify_all();
      return;
    }
    const int64_t own = round;
    const auto until =
        std::chrono::steady_clock::now() +
        std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
    moved.wait_until(lock, until, [&] { return round != own || !broken.empty(); });
    if (round != own) return;
    if (broken.empty()) give_up(absent() + " did not come within " + std::to_string(seconds) + " s");
    check();
  }

  /// Every rank must have posted the same sizes: rank 0's are the measure, so that all find the same fault.
  void check_sizes() const {
    for (size_t r = 1; r < bytes.size(); ++r) {
      for (size_t of = 0; of < bytes.size(); ++of) {
        if (bytes[r][of] == bytes[0][of]) continue;
        throw Error(Status::peer_error, "bytes of rank " + std::to_string(of) +
                                            " must be the same to every rank, got " + std::to_string(bytes[0][of]) +
                                            " on rank 0 and " + std::to_string(bytes[r][of]) + " on rank " +
                                            std::to_string(r));
      }
    }
  }
};

/// One rank's place in the group.
struct Seat : Failing {
  Seat(std::shared_ptr<Group> g, int32_t r) : group(std::move(g)), rank(r) {}
  Seat(const Seat&) = delete;
  Seat& operator=(const Seat&) = delete;
  ~Seat() {
    const std::lock_guard<std::mutex> lock(group->mutex);
    group->give_up("rank " + std::to_string(rank) + " has left");
  }

  void all_gather(const void* send, void* receive, size_t bytes, void* stream) {
    const std::vector<size_t> all(static_cast<size_t>(group->size), bytes);
    all_gatherv(send, receive, all.data(), stream);
  }

  void all_gatherv(const void* send, void* receive, const size_t* bytes, void*) {
    Group& g = *group;
    std::unique_lock<std::mutex> lock(g.mutex);
    g.sent[static_cast<size_t>(rank)] = send;
    g.bytes[static_cast<size_t>(rank)].assign(bytes, bytes + g.size);
    g.meet(lock, rank);
    g.check_sizes();
    const std::vector<const void*> from = g.sent;
    lock.unlock();
    char* to = static_cast<char*>(receive);
    for (size_t r = 0; r < from.size(); to += bytes[r++]) {
      if (bytes[r] > 0 && to != from[r]) std::memcpy(to, from[r], bytes[r]);
    }
    lock.lock();
    g.meet(lock, rank);
  }

  void fail(const char* why) {
    const std::lock_guard<std::mutex> lock(group->mutex);
    group->give_up("rank " + std::to_string(rank) + " failed: " + why);
  }

  std::shared_ptr<Group> group;
  int32_t rank;
};

}  // namespace

void make_local(int32_t size, double seconds, topkey_communicator* comms) {
  const auto group = std::make_shared<Group>();
  group->size = size;
  group->seconds = seconds;
  group->here.resize(static_cast<size_t>(size));
  group->sent.resize(static_cast<size_t>(size));
  group->bytes.resize(static_cast<size_t>(size));
  std::vector<std::unique_ptr<Seat>> seats;
  for (int32_t r = 0; r < size; ++r) seats.push_back(std::make_unique<Seat>(group, r));
  for (int32_t r = 0; r < size; ++r) {
    comms[r] = filled(seats[static_cast<size_t>(r)].release(), r, size, TOPKEY_COMM_BLOCKS);
  }
}

}  // namespace topkey::shard
