// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Second half of the oracle: which keys are live, and the sort that says which of them win.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "support/oracle.h"

namespace topkey::support {
namespace {

/// NaN, then numbers: a key that sorts as the score does.
double rank_key(float score) {
  if (std::isnan(score)) return -2;
  // Any finite float maps into (-1, 1) monotonically and distinctly by its own value; only the ends need care.
  return std::isinf(score) ? (score > 0 ? 2 : -1.5) : 0;
}

/// Relative positions of row `range` that the candidate list admits, ascending and distinct; false if there is no list.
bool candidate_ranges(const Admit& admit, int64_t row, int64_t visible,
                      std::vector<std::pair<int64_t, int64_t>>* ranges) {
  if (!present(admit.candidates)) return false;  // an empty list may have no address, and admits nothing
  const int64_t size = admit.candidate_block_size;
  std::vector<int64_t> ids;
  for (int64_t c = 0; c < admit.candidates.shape[1]; ++c) {
    const int64_t id = int_at(admit.candidates, row, c);
    if (id >= 0 && id * size < visible) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  for (int64_t id : ids) ranges->push_back({id * size, std::min(visible, (id + 1) * size)});
  return true;
}

/// Calls per readable, admitted key. `read(relative, &score)`: false if it is hidden; `readable` bounds where it may
/// be asked.
struct Readable {
  int64_t first, last;  ///< relative positions that some memory stands behind; all others are wild
};

template <class Read, class CanRead>
void collect(RowQuestion& q, const Admit& admit, int64_t row, Readable memory, const CanRead& can_read,
             const Read& read) {
  const int64_t visible = q.range.visible();
  std::vector<std::pair<int64_t, int64_t>> ranges;
  if (!candidate_ranges(admit, row, visible, &ranges)) ranges.push_back({0, visible});
  for (const auto& [from, to] : ranges) {
    const int64_t low = std::clamp(memory.first, from, to), high = std::clamp(memory.last, low, to);
    q.wild += (to - from) - (high - low);
    for (int64_t i = low; i < high; ++i) {
      float score = 0;
      if (!can_read(i)) {
        ++q.wild;
      } else if (read(i, &score)) {
        q.live.push_back({i, canonical(score)});
      }
    }
  }
}

/// False where the mask hides column `column`; adds a float mask.
bool apply_mask(const Tensor& mask, int64_t row, int64_t column, float* score) {
  if (mask.data == nullptr) return true;
  if (mask.dtype == DType::b8) return int_at(mask, row, column) != 0;
  const float add = float_at(mask, row, column);
  *score += add;
  return !(std::isinf(add) && add < 0);
}

bool needs_scores(const Selection& out) {
  return out.scores.data != nullptr || out.order == Order::score || out.blocks.data != nullptr;
}

void common(RowQuestion& q, const Admit& admit, const Selection& out, int64_t topk) {
  q.topk = topk;
  q.force_first = admit.force_first;
  q.force_last = admit.force_last;
  q.must_score = needs_scores(out);
  if (out.blocks.data != nullptr) {
    q.block_size = out.block_size;
    q.blocks = out.blocks.shape[1];
  }
}

/// Columns [0, n) of a matrix seen from a row's start, cut by max_len.
Readable dense_memory(const RowRange& range, int64_t n, int64_t max_len) {
  Readable memory{-range.start, n - range.start};
  if (max_len > 0) memory.last = std::min(memory.last, max_len);
  return memory;
}

/// Topk and MqaTopk are the same question once scores are there.
RowQuestion matrix_question(const Rows& rows, const Admit& admit, const Tensor& scores, int64_t n, int64_t row) {
  RowQuestion q;
  q.range = row_range(rows, row, n, -1);
  const auto read = [&](int64_t i, float* score) {
    const int64_t column = q.range.start + i;
    *score = scores.data != nullptr ? float_at(scores, row, column) : 0.F;
    return apply_mask(admit.mask, row, column, score);
  };
  collect(
      q, admit, row, dense_memory(q.range, n, rows.max_len), [](int64_t) { return true; }, read);
  return q;
}

bool is_forced(const RowQuestion& q, int64_t position) {
  return position < q.force_first || position >= q.range.visible() - q.force_last;
}

struct Block {
  int64_t id;
  float score;
};

/// The best `count` of the blocks found, `newest` always among them; NaN where it was not found. Ascending.
std::vector<Block> best_of(std::vector<Block> found, int64_t newest, int64_t count) {
  std::vector<Block> chosen{{newest, canonical_nan()}};
  for (const Block& block : found) {
    if (block.id == newest) chosen[0] = block;
  }
  std::sort(found.begin(), found.end(),
            [](const Block& a, const Block& b) { return comes_before(a.score, a.id, b.score, b.id); });
  for (const Block& block : found) {
    if (static_cast<int64_t>(chosen.size()) >= count) break;
    if (block.id != newest) chosen.push_back(block);
  }
  std::sort(chosen.begin(), chosen.end(), [](const Block& a, const Block& b) { return a.id < b.id; });
  return chosen;
}

std::vector<Block> best_blocks(const RowQuestion& q) {
  std::vector<Block> found;
  for (const Key& key : q.live) {  // ascending position, so blocks arrive in order
    const int64_t id = key.position / q.block_size;
    if (found.empty() || found.back().id != id) {
      found.push_back({id, key.score});
    } else if (comes_before(key.score, 0, found.back().score, 0)) {
      found.back().score = key.score;
    }
  }
  return best_of(std::move(found), (q.range.visible() - 1) / q.block_size, q.blocks);
}

/// A search of one rank's keys, asked of the whole: positions are distances from the whole window's start.
RowQuestion sharded_question(const PagedMqaTopk& args, const Tensor& logits, int64_t row) {
  const PagedKeys& keys = args.keys;
  const int64_t run = std::max(1, keys.shard.interleave), world = keys.shard.world_size, rank = keys.shard.rank;
  const auto global = [&](int64_t local) { return (local / run * world + rank) * run + local % run; };
  RowQuestion q;
  const RowRange own = row_range(args.rows, row, 0, keys.table_per_row ? -1 : keys.block_table.shape[0]);
  q.range = own;
  q.range.start = args.whole_start.data != nullptr ? int_at(args.whole_start, row) : 0;
  q.range.end = args.whole_end.data != nullptr ? int_at(args.whole_end, row) : std::numeric_limits<int32_t>::max();
  q.range.fill_only = own.request < 0 || own.wild_request || q.range.end <= q.range.start;
  common(q, args.admit, args.out, args.topk);
  q.wild = own.wild_request ? 1 : 0;
  if (q.range.fill_only) return q;
  std::vector<std::pair<int64_t, int64_t>> admitted;
  if (!candidate_ranges(args.admit, row, q.range.visible(), &admitted)) admitted.push_back({0, q.range.visible()});
  const int64_t line = table_line(keys.table_per_row, row, own);
  const int64_t width = keys.block_table.shape[1] * keys.cache.page_size;
  int64_t first = -1;  // of this rank's positions that both windows show
  for (int64_t p = std::max<int64_t>(own.start, 0); p < own.end; ++p) {
    const int64_t distance = global(p) - q.range.start;
    if (distance < 0) continue;
    if (distance >= q.range.visible()) break;
    first = first < 0 ? p : first;
    const bool in = std::any_of(admitted.begin(), admitted.end(),
                                [&](const auto& r) { return r.first <= distance && distance < r.second; });
    if (!in) continue;
    const bool reached = p < width && (args.rows.max_len == 0 || p < first + args.rows.max_len);
    if (!reached || !key_at(keys, line, p).has_value()) {
      ++q.wild;
    } else {
      q.live.push_back({distance, canonical(logits.data != nullptr ? float_at(logits, row, p) : 0.F)});
    }
  }
  return q;
}

}  // namespace

float canonical(float score) {
  if (std::isnan(score)) return canonical_nan();
  return score == 0 ? 0.F : score;
}

bool comes_before(float a, int64_t i, float b, int64_t j) {
  const double ka = rank_key(a), kb = rank_key(b);
  if (ka != kb) return ka > kb;
  if (ka == 0 && a != b) return a > b;
  return i < j;
}

RowQuestion question(const Topk& args, int64_t row) {
  RowQuestion q = matrix_question(args.rows, args.admit, args.scores, args.scores.shape[1], row);
  const int64_t own = args.row_topk.data != nullptr ? int_at(args.row_topk, row) : args.topk;
  common(q, args.admit, args.out, std::clamp<int64_t>(own, 0, args.topk));
  return q;
}

RowQuestion question(const SelectBlocks& args, int64_t row) {
  RowQuestion q = matrix_question(args.rows, Admit{}, args.scores, args.scores.shape[1], row);
  q.block_size = args.block_size;
  q.blocks = args.blocks.shape[1];
  q.must_score = true;
  return q;
}

RowQuestion question(const MqaTopk& args, const Tensor& logits, int64_t row) {
  RowQuestion q = matrix_question(args.rows, args.admit, logits, args.keys.values.shape[0], row);
  common(q, args.admit, args.out, args.topk);
  return q;
}

RowQuestion question(const PagedMqaTopk& args, const Tensor& logits, int64_t row) {
  const PagedKeys& keys = args.keys;
  if (keys.shard.world_size > 1) return sharded_question(args, logits, row);
  RowQuestion q;
  q.range = row_range(args.rows, row, 0, keys.table_per_row ? -1 : keys.block_table.shape[0]);
  common(q, args.admit, args.out, args.topk);
  q.wild = q.range.wild_request ? 1 : 0;
  const int64_t line = table_line(keys.table_per_row, row, q.range);
  const Readable memory = dense_memory(q.range, keys.block_table.shape[1] * keys.cache.page_size, args.rows.max_len);
  const auto can_read = [&](int64_t i) { return key_at(keys, line, q.range.start + i).has_value(); };
  const auto read = [&](int64_t i, float* score) {
    *score = logits.data != nullptr ? float_at(logits, row, q.range.start + i) : 0.F;
    return true;
  };
  collect(q, args.admit, row, memory, can_read, read);
  return q;
}

RowQuestion question(const MergeTopk& args, int64_t row) {
  RowQuestion q;
  q.range = row_range(args.rows, row, 0, -1);
  const int64_t end = q.range.end;
  q.range.end = args.force_last > 0 ? end : q.range.start + std::numeric_limits<int32_t>::max();
  q.range.fill_only = q.range.request < 0;
  common(q, Admit{}, args.out, args.topk);
  q.force_first = args.force_first, q.force_last = args.force_last;
  q.blocks = 0;         // merged_blocks()
  q.must_score = true;  // a merge reads every entry it is given
  for (int64_t w = 0; w < args.indices.shape[0] && !q.range.fill_only; ++w) {
    for (int64_t i = 0; i < args.indices.shape[2]; ++i) {
      int32_t index;
      float score;
      std::memcpy(&index, element(args.indices, w, row, i), sizeof index);
      std::memcpy(&score, element(args.scores, w, row, i), sizeof score);
      if (index >= 0) q.live.push_back({index - q.range.start, canonical(score)});
    }
  }
  std::sort(q.live.begin(), q.live.end(), [](const Key& a, const Key& b) { return a.position < b.position; });
  return q;
}

std::vector<std::pair<int64_t, float>> merged_blocks(const MergeTopk& args, int64_t row) {
  std::vector<Block> found;
  int64_t newest = -1;
  for (int64_t w = 0; w < args.block_ids.shape[0]; ++w) {
    for (int64_t i = 0; i < args.block_ids.shape[2]; ++i) {
      int32_t id;
      float score;
      std::memcpy(&id, element(args.block_ids, w, row, i), sizeof id);
      std::memcpy(&score, element(args.block_scores, w, row, i), sizeof score);
      newest = std::max<int64_t>(newest, id);
      if (id >= 0) found.push_back({id, canonical(score)});
    }
  }
  std::vector<std::pair<int64_t, float>> result;
  if (newest < 0) return result;
  // The best of each: a stable sort by id keeps it in front.
  std::sort(found.begin(), found.end(), [](const Block& a, const Block& b) {
    return a.id != b.id ? a.id < b.id : comes_before(a.score, 0, b.score, 0);
  });
  found.erase(std::unique(found.begin(), found.end(), [](const Block& a, const Block& b) { return a.id == b.id; }),
              found.end());
  for (const Block& block : best_of(found, newest, args.out.blocks.shape[1])) result.push_back({block.id, block.score});
  return result;
}

RowAnswer answer(const RowQuestion& q) {
  RowAnswer result;
  if (q.range.visible() == 0) return result;
  const auto before = [&](const Key& a, const Key& b) {
    const bool fa = is_forced(q, a.position), fb = is_forced(q, b.position);
    if (fa != fb) return fa;
    return fa ? a.position < b.position : comes_before(a.score, a.position, b.score, b.position);
  };
  std::vector<Key> sorted = q.live;
  const auto live = static_cast<int64_t>(sorted.size()), count = std::min(q.topk, live);
  // As a sort of all would leave the first `count` and the one behind them. Of long rows the rest was most of the time.
  std::nth_element(sorted.begin(), sorted.begin() + count, sorted.end(), before);
  std::sort(sorted.begin(), sorted.begin() + count, before);
  result.scored = q.must_score || live > q.topk;
  if (count > 0 && count < live) {
    const Key &last = sorted[count - 1], &next = sorted[count];
    result.tied_cut = !is_forced(q, last.position) && !comes_before(last.score, 0, next.score, 0);
  }
  sorted.resize(static_cast<size_t>(count));
  result.chosen = std::move(sorted);
  if (q.blocks == 0) return result;
  for (const Block& block : best_blocks(q)) {
    result.blocks.push_back(static_cast<int32_t>(block.id)), result.block_scores.push_back(block.score);
  }
  return result;
}

}  // namespace topkey::support
