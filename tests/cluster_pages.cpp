// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Pages and tails of one rank, see cluster.h.
#include <algorithm>
#include <cstring>

#include "tests/cluster.h"

namespace topkey::testing {

Replica::Replica(const ClusterSpec& spec, Shard shard, uint64_t seed) : spec_(spec), shard_(shard) {
  pages_ = Array(DType::u8, {spec.pool_pages, (spec.page_size * row_bytes(spec.format, spec.head_dim) + 15) / 4 * 4});
  std::memset(pages_.as<uint8_t>(), 0xFF, pages_.bytes());  // NaN in every format
  if (spec.pools) {
    tail_ = Array(DType::bf16, {8, 2, spec.ring(), spec.head_dim});
    std::memset(tail_.as<uint8_t>(), 0xFF, tail_.bytes());
  }
  for (int32_t p = 0; p < spec.pool_pages; ++p) free_.push_back(p);
  Random(seed).shuffle(free_);
}

Replica replica_of(const ClusterSpec& spec, int32_t rank) {
  const bool context = spec.kind == Kind::context || spec.kind == Kind::prefill_context;
  const Shard shard = context ? Shard{rank, spec.world, spec.interleave} : Shard{};
  return {spec, shard, spec.seed * 100 + static_cast<uint64_t>(rank)};
}

bool Replica::make_room(const StepData& data) {
  for (const Turn& t : data.turns) {
    std::vector<int32_t>& own = owned_[t.id];
    // The lowest block of the tail that no one has.
    for (int64_t block = 0; blocks_.count(t.id) == 0; ++block) {
      const auto has = [block](const auto& other) { return other.second == block; };
      if (std::none_of(blocks_.begin(), blocks_.end(), has)) blocks_[t.id] = block;
    }
    const int64_t keys = shard_.local_length((t.cached + t.rows) / spec_.ratio);
    while (static_cast<int64_t>(own.size()) * spec_.page_size < keys) {
      if (free_.empty()) return false;
      own.push_back(free_.back());
      free_.pop_back();
    }
  }
  return true;
}

void Replica::forget(uint64_t id) {
  free_.insert(free_.begin(), owned_[id].begin(), owned_[id].end());
  owned_.erase(id), blocks_.erase(id);
}

int64_t Replica::slot(uint64_t id, int64_t token) const {
  if ((token + 1) % spec_.ratio != 0) return -1;
  const int64_t key = token / spec_.ratio, world = std::max(1, shard_.world_size), run = std::max(1, shard_.interleave);
  if (shard_.world_size > 1 && key / run % world != shard_.rank) return -1;
  const int64_t local = shard_.world_size > 1 ? key / (run * world) * run + key % run : key;
  return int64_t{owned_.at(id)[static_cast<size_t>(local / spec_.page_size)]} * spec_.page_size +
         local % spec_.page_size;
}

Array Replica::table(const StepData& data) const {
  const int64_t columns = spec_.max_tokens / spec_.page_size + 2;
  const Array table(DType::i32, {static_cast<int64_t>(std::max<size_t>(1, data.turns.size())), columns});
  std::fill_n(table.as<int32_t>(), table.size(), 1000000000);
  for (size_t b = 0; b < data.turns.size(); ++b) {
    const std::vector<int32_t>& own = owned_.at(data.turns[b].id);
    std::copy(own.begin(), own.end(), table.as<int32_t>() + static_cast<int64_t>(b) * columns);
  }
  return table;
}

KeyCache Replica::cache() const {
  return {pages_.view(), spec_.format, Layout::planar, spec_.page_size, spec_.head_dim};
}

}  // namespace topkey::testing
