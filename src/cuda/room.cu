// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See room.h. Sizes must not shrink when rows, keys or topk grow: each part has an upper bound that does not, and the
// actual cut into groups and chunks stays under it.
#include "cuda/room.h"

#include <algorithm>

#include "cuda/device/select.cuh"
#include "cuda/tuning.h"
#include "cuda/workspace.h"

namespace topkey::cuda {
namespace {

int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<uint8_t*>(base)) {}
  /// `count` elements; where there is no workspace (the query) only the size matters.
  template <class T>
  T* take(int64_t count) {
    T* at = base_ != nullptr && count > 0 ? reinterpret_cast<T*>(base_ + size_) : nullptr;
    size_ += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 256));
    return at;
  }
  size_t size() const { return size_; }

 private:
  uint8_t* base_;
  size_t size_ = 0;
};

bool keeps_scores(Op op) { return op == Op::mqa_topk || op == Op::paged_mqa_topk; }
bool has_windows(Op op) { return op != Op::merge_topk; }

/// Most rows whose lists of `length` may be carried at a time.
int64_t rows_with_lists(int64_t length) {
  return std::clamp<int64_t>(kListEntries / std::max<int64_t>(length, 1), 1, kChunkedRows);
}

}  // namespace

Room make_room(Op op, const Shape& shape, void* workspace) {
  Room r{};
  Arena arena(workspace);
  const int64_t rows = std::max<int64_t>(shape.rows, 1), keys = std::max<int64_t>(shape.keys, 1);
  const int64_t wanted = std::min(shape.topk, keys), wanted_blocks = std::min(shape.blocks, keys);
  const int64_t width = round_up(keys, 32);
  // Under a shard each kept block has the keys before it beside it.
  r.id_stride = shape.candidates > 0 ? power_of_two(shape.candidates) * (shape.whole ? 2 : 1) : 0;
  r.group_rows = std::min(rows, kGroupRows);
  if (r.id_stride > 0) r.group_rows = std::min(r.group_rows, std::max<int64_t>(kIdEntries / r.id_stride, 1));
  r.chunk_keys = keys;
  bool chunked = false;
  if (keeps_scores(op)) {
    r.group_rows = std::min(r.group_rows, std::max<int64_t>(kScoreEntries / width, 1));
    // Rows so long that few fit: more rows at a time, and only some of their keys.
    chunked = rows * width > kScoreEntries;
    if (chunked) {
      const int64_t some = std::min({rows, rows_with_lists(wanted), rows_with_lists(wanted_blocks),
                                     r.id_stride > 0 ? std::max<int64_t>(kIdEntries / r.id_stride, 1) : rows});
      // Lists are carried from chunk to chunk for `some` rows; rows that fit whole need none.
      if (some > r.group_rows) {
        r.group_rows = some;
        r.chunk_keys = std::min(keys, kScoreEntries / r.group_rows / 128 * 128);
      }
    }
  }
  if (has_windows(op)) {
    r.facts = arena.take<RowFact>(std::min(rows, kGroupRows));
    r.work = arena.take<uint64_t>(std::min(rows, kGroupRows) + 1);
  }
  if (r.id_stride > 0) {
    r.ids = arena.take<int32_t>(std::min(std::min(rows, kGroupRows) * r.id_stride, std::max(kIdEntries, r.id_stride)));
  }
  if (keeps_scores(op))
    r.scores = reinterpret_cast<float*>(arena.take<uint32_t>(std::min(rows * width, kScoreEntries)));
  if (chunked) {
    const auto list = [&](int64_t length) {
      const int64_t entries = std::min(std::min(rows, kChunkedRows) * length, std::max(kListEntries, length));
      WinnerList w{arena.take<uint32_t>(entries), arena.take<int32_t>(entries), length};
      return w;
    };
    for (WinnerList& w : r.lists) w = list(wanted);
    for (WinnerList& w : r.block_lists) w = list(wanted_blocks);
    r.states = arena.take<RowState>(std::min(rows, kChunkedRows));
  }
  // Cutting a row pays where its parts' winners are far fewer than its keys.
  const int64_t parts = (keys + kPartKeys - 1) / kPartKeys, part_entries = rows * parts * wanted;
  const bool selects = keeps_scores(op) || op == Op::topk;
  r.parts = 1;
  if (selects && parts > 1 && !chunked && rows * parts <= kPartBlocks && part_entries <= kPartEntries &&
      wanted * 4 <= kPartKeys)
    r.parts = parts;
  if (selects && parts > 1) {
    const int64_t entries = std::min(part_entries, kPartEntries);
    r.part_lists = {arena.take<uint32_t>(entries), arena.take<int32_t>(entries), wanted};
    r.part_states = arena.take<PartState>(std::min(rows * parts, kPartBlocks));
  }
  r.list_length = wanted, r.block_list_length = wanted_blocks;
  // A merge sorts all blocks that the parts published.
  r.sorted = op == Op::merge_topk && shape.blocks > 0 ? keys : wanted;
  if (r.sorted > kSharedSort) {
    r.sort_length = power_of_two(r.sorted);
    r.sort_blocks = std::min(rows, kSortBlocks);
    r.sort = arena.take<uint64_t>(r.sort_blocks * r.sort_length);
  }
  r.bytes = arena.size();
  return r;
}

size_t room_bytes(Op op, const Shape& shape) { return make_room(op, shape, nullptr).bytes; }

}  // namespace topkey::cuda
