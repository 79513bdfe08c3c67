// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stages `select` and `search` from the host: rows in groups and keys in chunks, as the workspace allows (room.h); for each
// look, score, pick. The number of launches follows from shapes alone, so a captured call serves any lengths.
#include <algorithm>
#include <cmath>

#include "cuda/decode_blocks.h"
#include "cuda/decode_sm90.h"
#include "cuda/pick_blocks_sm90.h"
#include "cuda/pick_sm90.h"
#include "cuda/prefill_sm90.h"
#include "cuda/score.h"
#include "cuda/search_parts.h"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

bool needs_scores(const Selection& out) {
  return out.scores.data != nullptr || out.blocks.data != nullptr || out.order == Order::score;
}

/// calls work(group) for all groups; look comes before the first chunk of each.
struct Walk {
  Room room;
  int64_t rows, keys;  ///< keys: most that a row can look at

  template <class Look, class Work>
  void operator()(const Look& look_at, const Work& work) const {
    for (int64_t row = 0; row < rows; row += room.group_rows) {
      Group group{row, std::min(room.group_rows, rows - row), 0, static_cast<uint32_t>(room.chunk_keys)};
      look_at(group);
      for (int64_t key = 0; key < std::max<int64_t>(keys, 1); key += room.chunk_keys) {
        group.first_key = static_cast<uint32_t>(key);
        work(group);
      }
    }
  }
};

Shape shape_of(const Rows& rows, int64_t keys, int64_t topk, const Tensor& blocks, const Admit& admit) {
  Shape s{};
  s.rows = rows.count;
  s.keys = rows.max_len > 0 ? std::min(keys, rows.max_len) : keys;
  s.topk = topk;
  s.blocks = blocks.data != nullptr ? blocks.shape[1] : 0;
  s.candidates = present(admit.candidates) ? admit.candidates.shape[1] : -1;
  return s;
}
/// Most keys that a row can look at.
int64_t most_keys(const Shape& shape, const Admit& admit) {
  if (shape.candidates < 0) return shape.keys;
  return std::min(shape.keys, shape.candidates * int64_t{admit.candidate_block_size});
}

LookParams look_params(const KeySource& keys, const Rows& rows, const Admit& admit, const Room& room,
                       const Exec& exec) {
  LookParams p{};
  p.keys = keys, p.rows = rows, p.admit = admit, p.width = keys.count;
  p.has_candidates = present(admit.candidates);
  p.facts = room.facts, p.ids = room.ids, p.id_stride = room.id_stride, p.stats = exec.stats;
  return p;
}

/// What only paged keys have: the cut of the keys over ranks, and what speaks of the whole.
struct Part {
  Shard shard;
  Tensor whole_start, whole_end, block_scores;
};

/// Whether blocks may be picked apart from the keys, from rows that are whole.
bool blocks_apart(const Shape& shape, const Admit& admit, const Part& part, const Selection& out,
                  const Launch& launch) {
  return shape.blocks > 0 && shape.candidates < 0 && !part.shard.active() && part.block_scores.data == nullptr &&
         admit.force_first == 0 && admit.force_last == 0 &&
         pick_blocks_suits(shape.keys, {out.blocks, out.block_size}, launch);
}

/// Rows that come in chunks of keys, fewer at a time but whole, where they can then be picked in one reading.
template <class Args>
void take_whole_rows(const Shape& shape, const Args& a, bool apart, Room& room) {
  const int64_t rows = kScoreEntries / std::max<int64_t>(shape.keys, 1);
  const bool plain = shape.candidates < 0 && (shape.blocks == 0 || apart) && a.admit.force_first == 0 &&
                     a.admit.force_last == 0 && a.out.order != Order::score;
  if (!plain || room.chunk_keys >= shape.keys || !stream_suits(rows, shape.keys, a.topk)) return;
  room.group_rows = rows, room.chunk_keys = shape.keys;
}

/// Rows of a group, at most `most`, so that the thread blocks of the wide score kernel (one an SM, each with so many pieces of
/// a tile's keys) end together: what counts is the pieces of the block that has most, and about as long as one of them a
/// group takes besides. Rows are taken to be the last of a causal prefill; if they are not, only time is lost.
int64_t even_rows(int64_t most, int64_t rows, int64_t keys, int64_t sms) {
  if (most >= rows) return most;
  const int64_t seen = std::max(keys - std::min(rows, keys) / 2, int64_t{1});
  const double pieces = static_cast<double>(seen) / kWidePiece + 0.5;
  const auto longest = [&](int64_t count) {
    const double all = static_cast<double>((count + kWideTileRows - 1) / kWideTileRows) * pieces;
    return std::ceil(all / static_cast<double>(sms)) + (count > 0 ? 1 : 0);
  };
  int64_t best = most;
  double least = INFINITY;
  for (int64_t count = most; count > most / 2 && count > 0; --count) {
    const double time = static_cast<double>(rows / count) * longest(count) + longest(rows % count);
    if (time < least) least = time, best = count;
  }
  return best;
}

/// A search over dense or paged keys.
template <class Args>
void search(Cores cores, Op op, const Args& a, const KeySource& keys, const Part& part, bool absolute_slots,
            const Exec& exec) {
  if (a.rows.count == 0) return;
  const Launch launch(op_name(op), exec);
  if (cores == Cores::hopper) launch.require_hopper(op_name(op));
  Shape shape = shape_of(a.rows, keys.count, a.topk, a.out.blocks, a.admit);
  shape.whole = part.shard.active();
  shape.format = keys.format, shape.heads = a.q.values.shape[1];
  Emission emission{a.out, a.topk, part.shard, absolute_slots, exec.stats};
  const bool apart = blocks_apart(shape, a.admit, part, a.out, launch);
  Room room = make_room(op, shape, exec.workspace);
  take_whole_rows(shape, a, apart, room);
  if (cores == Cores::portable && room.chunk_keys >= most_keys(shape, a.admit))
    room.group_rows = even_rows(room.group_rows, shape.rows, shape.keys, launch.sms());
  LookParams look_at = look_params(keys, a.rows, a.admit, room, exec);
  look_at.topk = a.topk, look_at.needs_scores = needs_scores(a.out);
  look_at.shard = part.shard, look_at.whole_start = part.whole_start, look_at.whole_end = part.whole_end;
  if (answer_whole_rows(look_at, emission, launch)) return;
  KeyBoxes boxes;
  if (cores == Cores::hopper && (shape.blocks == 0 || apart) &&
      prefill_suits(shape, keys, a.rows, a.admit, a.out, &boxes)) {
    prefill(shape, look_at, a.q, boxes, emission, exec.workspace, launch);
    return;
  }
  if (cores == Cores::hopper && decode_suits(shape, keys, a.q, a.admit, a.out)) {
    decode(look_at, a.q, emission, exec.workspace, launch);
    return;
  }
  if (cores == Cores::hopper && decode_blocks(shape, look_at, a.q, emission, exec.workspace, launch)) return;
  const ScoreParams scoring{cores,
                            keys,
                            a.q,
                            {room.scores, {}, a.admit.mask, 0, 0},
                            room.facts,
                            room.ids,
                            room.id_stride,
                            static_cast<uint32_t>(a.admit.candidate_block_size),
                            room.work,
                            exec.stats,
                            a.rows.request.data != nullptr || a.rows.q_indptr.data != nullptr,
                            a.rows.next_n};
  PickParams picking{};
  picking.emission = emission;
  picking.block_scores = part.block_scores;
  picking.rows = a.rows, picking.admit = a.admit, picking.room = room;
  picking.keys = most_keys(shape, a.admit);
  const bool whole = apart && room.chunk_keys >= picking.keys;
  if (whole) emission.out.blocks = picking.emission.out.blocks = {};
  picking.has_entries = true, picking.has_blocks = picking.emission.out.blocks.data != nullptr;
  Walk{room, a.rows.count, most_keys(shape, a.admit)}(
      [&](const Group& g) { look(look_at, g, launch); },
      [&](const Group& g) {
        score(scoring, g, launch);
        // Of dense keys without a mask each is live.
        const KeptRows kept{room.facts, room.scores, g.chunk, g.first_row, g.count};
        const bool live = !keys.paged && g.chunk >= picking.keys;
        if (!live || !pick_in_clusters(look_at, kept, emission, launch)) pick(picking, g, launch);
        if (whole) pick_blocks(kept, picking.keys, {a.out.blocks, a.out.block_size}, launch);
      });
}

}  // namespace

void mqa_topk(Cores cores, const MqaTopk& a, const Exec& exec) {
  search(cores, Op::mqa_topk, a, source_of(a.keys), Part{}, false, exec);
}

void paged_mqa_topk(Cores cores, const PagedMqaTopk& a, const Exec& exec) {
  const Part part{a.keys.shard, a.whole_start, a.whole_end, a.block_scores};
  search(cores, Op::paged_mqa_topk, a, source_of(a.keys), part, true, exec);
}

void mqa_topk(const MqaTopk& a, const Exec& exec) { mqa_topk(Cores::portable, a, exec); }
void paged_mqa_topk(const PagedMqaTopk& a, const Exec& exec) { paged_mqa_topk(Cores::portable, a, exec); }

void topk(const Topk& a, const Exec& exec) {
  if (a.rows.count == 0) return;
  const Launch launch("topk", exec);
  const int64_t columns = a.scores.shape[1];
  const Shape shape = shape_of(a.rows, columns, a.topk, a.out.blocks, a.admit);
  const Room room = make_room(Op::topk, shape, exec.workspace);
  LookParams look_at = look_params(columns_of(columns), a.rows, a.admit, room, exec);
  look_at.topk = a.topk, look_at.row_topk = a.row_topk, look_at.needs_scores = needs_scores(a.out);
  const Emission emission{a.out, a.topk, Shard{}, false, exec.stats};
  // Where rows outnumber the SMs' clusters by far, a thread block a row takes less.
  const bool many = a.rows.count >= 4 * int64_t{launch.sms()} && stream_suits(a.rows.count, shape.keys, a.topk);
  if (!many && pick_in_clusters(look_at, a.scores, emission, launch)) return;
  PickParams picking{};
  picking.emission = emission;
  picking.scores = a.scores, picking.mask = a.admit.mask, picking.rows = a.rows, picking.admit = a.admit;
  picking.room = room, picking.has_entries = true, picking.has_blocks = a.out.blocks.data != nullptr;
  picking.keys = shape.keys;
  Walk{room, a.rows.count, 1}([&](const Group& g) { look(look_at, g, launch); },
                              [&](const Group& g) { pick(picking, g, launch); });
}

void select_blocks(const SelectBlocks& a, const Exec& exec) {
  if (a.rows.count == 0) return;
  const Launch launch("select_blocks", exec);
  const int64_t columns = a.scores.shape[1];
  const Shape shape = shape_of(a.rows, columns, 0, a.blocks, Admit{});
  const Room room = make_room(Op::select_blocks, shape, exec.workspace);
  LookParams look_at = look_params(columns_of(columns), a.rows, Admit{}, room, exec);
  look_at.needs_scores = true;
  if (exec.stats == nullptr && pick_blocks(look_at, a.scores, {a.blocks, a.block_size}, launch)) return;
  PickParams picking{};
  picking.emission.out.blocks = a.blocks, picking.emission.out.block_size = a.block_size;
  picking.emission.stats = exec.stats;
  picking.scores = a.scores, picking.rows = a.rows, picking.room = room, picking.has_blocks = true;
  Walk{room, a.rows.count, 1}([&](const Group& g) { look(look_at, g, launch); },
                              [&](const Group& g) { pick(picking, g, launch); });
}

}  // namespace topkey::cuda
