// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The first exchange of a communicator: each rank's lines, compared on every rank. What has been agreed is remembered
// in the communicator by its hash, so that later steps exchange nothing for it; and what led to it by another hash, so
// that they do not even write the lines. Whether ranks exchange lines depends on the lines alone, which are the same on
// all of them (or are found not to be).
#include <algorithm>
#include <cstring>
#include <vector>

#include "shard/comm.h"

namespace topkey::shard {
namespace {

constexpr size_t kRecord = 2048;  // bytes of a rank's lines; the longest today are some 500

// Of topkey_communicator::agreed: the lines last agreed on, and the questions that led to them.
constexpr int kLines = 0, kQuestions = 2, kEach = 2;

bool knows(const topkey_communicator& comm, int first, uint64_t hash) {
  return std::find(comm.agreed + first, comm.agreed + first + kEach, hash) != comm.agreed + first + kEach;
}
void remember(topkey_communicator& comm, int first, uint64_t hash) {
  if (knows(comm, first, hash)) return;
  std::rotate(comm.agreed + first, comm.agreed + first + kEach - 1, comm.agreed + first + kEach);
  comm.agreed[first] = hash;
}

std::vector<std::string> lines_of(const char* record) {
  std::vector<std::string> lines;
  const std::string text(record, strnlen(record, kRecord));
  for (size_t at = 0, end; at < text.size(); at = end + 1) {
    end = std::min(text.find('\n', at), text.size());
    lines.push_back(text.substr(at, end - at));
  }
  return lines;
}

/// "name" and "value" of "name=value".
std::string name_of(const std::string& line) { return line.substr(0, line.find('=')); }
std::string value_of(const std::string& line) {
  const size_t at = line.find('=');
  return at == std::string::npos ? "nothing" : line.substr(at + 1);
}

void compare(const Comm& comm, const std::vector<char>& records) {
  const std::vector<std::string> first = lines_of(records.data());
  for (int32_t r = 1; r < comm.size(); ++r) {
    const std::vector<std::string> other = lines_of(records.data() + static_cast<size_t>(r) * kRecord);
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const std::string a = i < first.size() ? first[i] : "", b = i < other.size() ? other[i] : "";
      if (a == b) continue;
      throw Error(Status::peer_error, std::string(comm.op()) + ": " + name_of(a.empty() ? b : a) +
                                          " must be the same on every rank, got " + value_of(a) + " on rank 0 and " +
                                          value_of(b) + " on rank " + std::to_string(r));
    }
  }
}

}  // namespace

uint64_t hash_of(const void* data, size_t bytes, uint64_t h) {
  for (size_t i = 0; i < bytes; ++i) h = (h ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211u;  // FNV-1a
  return h == 0 ? 1 : h;
}

bool agreed_before(const Comm& comm, uint64_t question) { return knows(comm.twin(), kQuestions, question); }

void agree(Comm& comm, uint64_t question, const std::string& lines) {
  const uint64_t hash = hash_of(lines.data(), lines.size());
  if (!knows(comm.twin(), kLines, hash)) {
    std::vector<char> own(kRecord), all(kRecord * static_cast<size_t>(comm.size()));
    std::memcpy(own.data(), lines.data(), std::min(lines.size(), kRecord - 1));
    comm.all_gather_on_host(own.data(), all.data(), kRecord);
    compare(comm, all);
  }
  remember(comm.twin(), kLines, hash);
  remember(comm.twin(), kQuestions, question);
}

}  // namespace topkey::shard
