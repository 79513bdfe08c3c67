// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What ranks compare before a step writes anything: the lines of what they are (cut, format, geometry, arithmetic) and of
// this step (rows, keys, what is stored). Lines are exchanged when a communicator meets them first. Agreed ones are
// remembered in it by their hash, and what led to them by another, so that later steps do not even write them. Where
// calls block the host anyway, every step begins with the hashes of both: ranks that differ all see it, exchange the
// lines, and throw. A transport that does not block compares a step only beside new lines: a later one has no moment at
// which the host could look.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "shard/comm.h"

namespace topkey::shard {
namespace {

constexpr size_t kRecord = 2048;  // bytes of a rank's lines; the longest today are some 500

// Of topkey_communicator::agreed: hashes of the lines last agreed on; and those of the questions that led to them.
constexpr int kLines = 0, kQuestions = 8, kEach = 8;

bool knows(const topkey_communicator& comm, int first, uint64_t hash) {
  return std::find(comm.agreed + first, comm.agreed + first + kEach, hash) != comm.agreed + first + kEach;
}
void remember(topkey_communicator& comm, int first, uint64_t hash) {
  if (knows(comm, first, hash)) return;
  std::rotate(comm.agreed + first, comm.agreed + first + kEach - 1, comm.agreed + first + kEach);
  comm.agreed[first] = hash;
}
uint64_t led_to(uint64_t question, uint64_t lines) { return hash_of(&lines, sizeof lines, question); }

/// Hash of the lines that this question led to; 0 where that is not known.
uint64_t lines_of_question(const topkey_communicator& comm, uint64_t question) {
  for (int i = kLines; i < kLines + kEach; ++i) {
    if (comm.agreed[i] != 0 && knows(comm, kQuestions, led_to(question, comm.agreed[i]))) return comm.agreed[i];
  }
  return 0;
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

/// The lines of all ranks; throws where two differ.
void compare(Comm& comm, const std::string& own_lines) {
  std::vector<char> own(kRecord), records(kRecord * static_cast<size_t>(comm.size()));
  std::memcpy(own.data(), own_lines.data(), std::min(own_lines.size(), kRecord - 1));
  comm.all_gather_on_host(own.data(), records.data(), kRecord);
  const std::vector<std::string> first = lines_of(records.data());
  for (int32_t r = 1; r < comm.size(); ++r) {
    const std::vector<std::string> other = lines_of(records.data() + static_cast<size_t>(r) * kRecord);
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const std::string a = i < first.size() ? first[i] : "", b = i < other.size() ? other[i] : "";
      if (a == b) continue;
      const std::string name = name_of(a.empty() ? b : a);
      throw Error(Status::peer_error, std::string(comm.op()) + ": " + name + " must be the same on every rank, got " +
                                          value_of(a) + " on rank 0 and " +
                                          (name_of(b) == name ? value_of(b) : "nothing") + " on rank " +
                                          std::to_string(r));
    }
  }
}

/// Whether all ranks have these lines, know them, and have this step. Every rank comes to the same.
bool same_everywhere(Comm& comm, uint64_t known_lines, uint64_t step) {
  using Record = std::array<uint64_t, 2>;
  const Record own{known_lines, step};
  std::vector<Record> all(static_cast<size_t>(comm.size()));
  comm.all_gather_on_host(own.data(), all.data(), sizeof own);
  return all[0][0] != 0 && std::all_of(all.begin(), all.end(), [&](const Record& one) { return one == all[0]; });
}

}  // namespace

uint64_t hash_of(const void* data, size_t bytes, uint64_t h) {
  for (size_t i = 0; i < bytes; ++i) h = (h ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211u;  // FNV-1a
  return h == 0 ? 1 : h;
}

void agree(Comm& comm, const Question& q) {
  topkey_communicator& twin = comm.twin();
  uint64_t hash = lines_of_question(twin, q.hash);
  if (hash != 0 && !comm.blocks()) return;
  std::string lines;
  if (hash == 0) {
    lines = q.lines();
    hash = hash_of(lines.data(), lines.size());
  }
  const std::string step = q.step();
  bool known = knows(twin, kLines, hash);
  if (comm.blocks()) known = same_everywhere(comm, known ? hash : 0, hash_of(step.data(), step.size()));
  if (!known) compare(comm, (lines.empty() ? q.lines() : lines) + step);
  remember(twin, kLines, hash);
  remember(twin, kQuestions, led_to(q.hash, hash));
}

}  // namespace topkey::shard
