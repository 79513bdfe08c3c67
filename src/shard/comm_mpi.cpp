// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// MPI. Every rank sends to each peer and receives from each: as many bytes as any all-gather moves, and it is known
// who has not answered. While it waits it also looks for a peer's word that it has failed, which travels under a tag of
// its own. Counts of MPI are int: longer messages go in pieces.
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "shard/comm.h"

namespace topkey::shard {
namespace {

constexpr int kData = 1, kFailed = 2;
constexpr size_t kPiece = size_t{1} << 30;
constexpr size_t kSentence = 512;

/// Communicators in use where the library has started MPI; the last one ends it.
std::atomic<int> owners{0};

void require(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(Status::peer_error, std::string(what) + ": " + text);
}

struct Peer : Failing {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0, size = 1;
  double seconds = 0;
  bool owns = false, silent_peer = false;
  std::string broken;
  std::vector<char> last_words;

  Peer() = default;
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  ~Peer() {
    const bool last = owns && owners.fetch_sub(1) == 1;
    // Ending MPI takes every rank: one that does not answer would be waited for again. Then the process ends without,
    // and mpirun ends the others.
    if (silent_peer) return;
    if (broken.empty()) MPI_Comm_free(&comm);
    if (last) MPI_Finalize();
  }

  void all_gather(const void* send, void* receive, size_t bytes, void* stream) {
    const std::vector<size_t> all(static_cast<size_t>(size), bytes);
    all_gatherv(send, receive, all.data(), stream);
  }

  void all_gatherv(const void* send, void* receive, const size_t* bytes, void*) {
    if (!broken.empty()) throw Error(Status::peer_error, broken);
    std::vector<Message> messages;
    try {
      start(send, static_cast<char*>(receive), bytes, messages);
      finish(messages);
    } catch (const Error& e) {
      broken = e.what();
      // What has not come is not wanted any more; what was not sent stays with MPI.
      for (Message& m : messages) {
        if (m.request == MPI_REQUEST_NULL) continue;
        if (m.receives) MPI_Cancel(&m.request);
        MPI_Request_free(&m.request);
      }
      throw;
    }
  }

  void fail(const char* why) {
    if (!broken.empty()) return;
    broken = std::string("rank ") + std::to_string(rank) + " failed: " + why;
    last_words.assign(kSentence, '\0');
    std::strncpy(last_words.data(), broken.c_str(), kSentence - 1);
    for (int r = 0; r < size; ++r) {
      MPI_Request request = MPI_REQUEST_NULL;
      if (r != rank) MPI_Isend(last_words.data(), static_cast<int>(kSentence), MPI_CHAR, r, kFailed, comm, &request);
      if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
    }
  }

 private:
  struct Message {
    MPI_Request request;
    int peer, count;
    bool receives;
  };

  void start(const void* send, char* receive, const size_t* bytes, std::vector<Message>& messages) {
    const auto own = static_cast<size_t>(rank);
    for (int peer = 0; peer < size; receive += bytes[peer++]) {
      if (peer == rank) {
        if (bytes[own] > 0 && receive != send) std::memcpy(receive, send, bytes[own]);
        continue;
      }
      for (const bool receives : {true, false}) {
        const size_t all = receives ? bytes[peer] : bytes[own];
        for (size_t at = 0; at == 0 || at < all; at += kPiece) {  // an empty part is a message too: it says so
          Message m{MPI_REQUEST_NULL, peer, static_cast<int>(std::min(kPiece, all - at)), receives};
          if (receives) {
            require(MPI_Irecv(receive + at, m.count, MPI_BYTE, peer, kData, comm, &m.request), "MPI_Irecv");
          } else {
            const char* from = static_cast<const char*>(send) + at;
            require(MPI_Isend(from, m.count, MPI_BYTE, peer, kData, comm, &m.request), "MPI_Isend");
          }
          messages.push_back(m);
        }
      }
    }
  }

  void finish(std::vector<Message>& messages) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (;;) {
      bool waits = false;
      for (Message& m : messages) {
        if (m.request == MPI_REQUEST_NULL) continue;
        int done = 0;
        MPI_Status status;
        const int code = MPI_Test(&m.request, &done, &status);
        check(m, code, done, status);
        waits = waits || !done;
      }
      if (!waits) return;
      listen();
      if (std::chrono::steady_clock::now() > until) {
        silent_peer = true;
        throw Error(Status::peer_error, absent(messages) + " did not answer within " + std::to_string(seconds) + " s");
      }
      std::this_thread::yield();
    }
  }

  void check(const Message& m, int code, int done, const MPI_Status& status) const {
    const std::string who = "rank " + std::to_string(m.peer);
    if (code != MPI_SUCCESS) require(code, (who + " sends another number of bytes, or is gone").c_str());
    if (!done || !m.receives) return;
    int count = 0;
    MPI_Get_count(&status, MPI_BYTE, &count);
    if (count != m.count) {
      throw Error(Status::peer_error, "bytes of " + who + " must be the same to every rank, got " +
                                          std::to_string(count) + " there and " + std::to_string(m.count) +
                                          " on rank " + std::to_string(rank));
    }
  }

  /// A peer's word that it has failed.
  void listen() const {
    int there = 0;
    MPI_Status status;
    require(MPI_Iprobe(MPI_ANY_SOURCE, kFailed, comm, &there, &status), "MPI_Iprobe");
    if (!there) return;
    char words[kSentence] = "";
    require(MPI_Recv(words, static_cast<int>(kSentence), MPI_CHAR, status.MPI_SOURCE, kFailed, comm, MPI_STATUS_IGNORE),
            "MPI_Recv");
    words[kSentence - 1] = '\0';
    throw Error(Status::peer_error, words);
  }

  std::string absent(const std::vector<Message>& messages) const {
    std::string ranks;
    int named = -1;
    for (const Message& m : messages) {
      if (m.request == MPI_REQUEST_NULL || m.peer == named) continue;
      ranks += (ranks.empty() ? "rank " : ", ") + std::to_string(m.peer);
      named = m.peer;
    }
    return ranks;
  }
};

}  // namespace

const char* mpi_unusable() noexcept { return nullptr; }

void make_mpi(const void* mpi_comm, double seconds, topkey_communicator& comm) {
  int started = 0, ended = 0;
  MPI_Finalized(&ended);
  if (ended) throw Error(Status::unsupported, "mpi_communicator: MPI must not have been ended, got a finalized MPI");
  MPI_Initialized(&started);
  auto peer = std::make_unique<Peer>();
  peer->silent_peer = true;  // until it has started: the destructor then leaves MPI alone
  if (!started) {
    int level = 0;
    require(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level), "MPI_Init_thread");
  }
  if (!started || owners.load() > 0) {
    owners.fetch_add(1);
    peer->owns = true;
  }
  const MPI_Comm from = mpi_comm == nullptr ? MPI_COMM_WORLD : *static_cast<const MPI_Comm*>(mpi_comm);
  require(MPI_Comm_dup(from, &peer->comm), "MPI_Comm_dup");
  require(MPI_Comm_set_errhandler(peer->comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_Comm_rank(peer->comm, &peer->rank);
  MPI_Comm_size(peer->comm, &peer->size);
  peer->seconds = seconds;
  peer->silent_peer = false;
  const int rank = peer->rank, size = peer->size;
  comm = filled(peer.release(), rank, size, TOPKEY_COMM_BLOCKS);
}

}  // namespace topkey::shard
