// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stages `search` and `select`: facts of each row, tasks over groups of rows and slices of keys, and a merge of what
// was sliced. The same walk serves keys that are scored on the way (mqa_topk, paged_mqa_topk) and scores that are
// given (topk, select_blocks).
#include "cpu/search.h"

#include <algorithm>
#include <string_view>

#include "backend_table.h"
#include "cpu/emit.h"
#include "cpu/job.h"
#include "cpu/room.h"
#include "cpu/team.h"

namespace topkey::cpu {
namespace {

int64_t row_limit(const Job& job, int64_t row) {
  if (job.row_topk == nullptr || job.row_topk->data == nullptr) return job.topk;
  return std::clamp<int64_t>(read_i32(*job.row_topk, row), 0, job.topk);
}

/// How sliced rows are merged; no bit of an answer depends on it. A forced way also cuts the smallest of slices.
enum class Strategy { automatic, rows, team };
Strategy strategy_of(const Exec& exec) {
  const std::string_view name = exec.strategy != nullptr ? exec.strategy : "";
  return name == "radix.rows" ? Strategy::rows : name == "radix.team" ? Strategy::team : Strategy::automatic;
}

class Pass {
 public:
  Pass(const Job& job, const Exec& exec, const Member& member)
      : job_(job),
        exec_(exec),
        member_(member),
        strategy_(strategy_of(exec)),
        room_(make_room(job.extents, exec.workspace, exec.workspace_bytes, member.rank(), member.size())),
        emitter_{&job.out, job.topk, job.shard, job.absolute_slots, room_.scratch.words} {}

  /// Answers every row. dry: computes all and writes nothing, for strict. Returns how many wild values were met, by
  /// all members.
  int64_t run(bool dry) {
    emitter_.dry = dry;
    const TaskTable& table = room_.table;
    if (member_.rank() == 0) table.state->wild = 0;
    for (int64_t first = 0; first < job_.rows.count; first += table.max_rows) {
      first_row_ = first;
      const int64_t rows = std::min(table.max_rows, job_.rows.count - first);
      const bool works = member_.rank() < room_.workers;
      for (int64_t r = member_.rank(); works && r < rows; r += room_.workers) look_at(r);
      member_.barrier();
      if (member_.rank() == 0) cut(rows);
      for (int64_t l = member_.rank(); l < room_.together.lists; l += member_.size()) room_.together.clear(l);
      member_.barrier();
      for (int64_t t = next(); works && t < table.state->num_tasks; t = next()) do_task(table.tasks[t]);
      member_.barrier();
      if (together()) {
        merge_together();
      } else if (works) {
        merge_sliced();
      }
      member_.barrier();
    }
    if (!dry) counts_.publish(exec_);
    if (!dry) return 0;
    table.state->wild += static_cast<int64_t>(counts_.words[kSkippedPages] + counts_.words[kSkippedSlots]);
    member_.barrier();
    const int64_t wild = table.state->wild;
    member_.barrier();
    counts_ = Counts{};
    return wild;
  }

 private:
  int64_t next() { return room_.table.state->next_task.fetch_add(1, std::memory_order_relaxed); }

  /// Fills the fact: where its keys are, what of its window can be reached, how many keys are live. Counts what cannot.
  void measure(RowFact& fact, int64_t row) {
    if (job_.q != nullptr) fact.table_row = table_row_of(job_.source, row, fact.request);
    counts_.add(kSkippedPages, fact.table_row == -2);
    clip_row(fact, job_.source.count, job_.rows.max_len);
    if (fact.size() == 0) fact.high = fact.low;
    num_candidates_ = sort_candidates(job_.admit, fact, row, room_.scratch.candidates);
    fact.live = 0;
    int64_t unreadable = 0;
    const int64_t cut =
        for_each_run(job_.admit, fact, room_.scratch.candidates, num_candidates_, [&](int64_t a, int64_t b) {
          unreadable += for_each_chunk(job_.source, fact.table_row, a, b,
                                       [&](const Chunk& c) { fact.live += c.count - hidden(row, c); });
        });
    counts_.add(kSkippedPages, cut + unreadable);
  }

  int64_t hidden(int64_t row, const Chunk& c) const {
    int64_t n = 0;
    float addend = 0.0f;
    for (int64_t i = 0; job_.admit.mask.data != nullptr && i < c.count; ++i)
      n += masked(job_.admit.mask, row, c.first + i, &addend);
    return n;
  }

  void look_at(int64_t r) {
    const int64_t row = first_row_ + r;
    RowFact& fact = room_.table.facts[r];
    fact = read_row(job_.rows, row, job_.source.count);
    shard_row(fact, job_.shard, job_.whole_start, job_.whole_end, row);
    measure(fact, row);
    room_.table.gates[r].store(0, std::memory_order_relaxed);
    counts_.add(kRows);
    fact.scored = needs_scores(job_.out) || fact.live > row_limit(job_, row);
    if (!fact.scored) answer_all(row, fact);
  }

  /// All live keys are the answer.
  void answer_all(int64_t row, const RowFact& fact) {
    const SinkBuffers& b = room_.scratch.sinks[0];
    Entries entries{b.score, b.position, 0};
    for_each_run(job_.admit, fact, room_.scratch.candidates, num_candidates_, [&](int64_t first, int64_t last) {
      for_each_chunk(job_.source, fact.table_row, first, last, [&](const Chunk& c) {
        float addend = 0.0f;
        int32_t* to = entries.position + entries.size;
        if (job_.admit.mask.data == nullptr) {
          for (int64_t i = 0; i < c.count; ++i) to[i] = static_cast<int32_t>(c.first) + static_cast<int32_t>(i);
          entries.size += c.count;
          return;
        }
        for (int64_t i = 0; i < c.count; ++i) {
          entries.position[entries.size] = static_cast<int32_t>(c.first + i);
          entries.size += !masked(job_.admit.mask, row, c.first + i, &addend);
        }
      });
    });
    emit_row(emitter_, row, fact, entries, Forced{}, counts_);
  }

  void cut(int64_t rows) {
    Cutting c{};
    c.workers = room_.workers;
    c.row_block = room_.row_block;
    c.max_parts = room_.max_parts;
    c.part_room = room_.part_room;
    c.part_entries = most_entries(job_.extents);
    c.block_bytes = part_bytes(job_.extents, 0);
    c.block_size = job_.out.blocks.data != nullptr ? job_.out.block_size : 0;
    c.least_slice = strategy_ == Strategy::automatic ? 1024 : 16;
    c.panel = strategy_ == Strategy::automatic && job_.q != nullptr ? kernels().panel_keys : 8;
    c.by_start = c.block_size > 0;
    c.row_by_row = present(job_.admit.candidates) || job_.scores != nullptr;
    cut_tasks(c, rows, room_.table);
  }

  SinkBuffers buffers_of(const Task& task, int64_t i) const {
    return task.part < 0 ? room_.scratch.sinks[i] : room_.part_buffers(task, i);
  }
  Part& part_of(const Task& task, int64_t i) const {
    return room_.parts[task.part + int64_t{task.slice} * task.num_rows + i];
  }

  void do_task(const Task& task) {
    RowSink sinks[kRowBlock];
    for (int64_t i = 0; i < task.num_rows; ++i) {
      const int64_t row = first_row_ + task.first_row + i;
      SharedGate* gate = task.part < 0 ? nullptr : &room_.table.gates[task.first_row + i];
      const RowSink::Wanted wanted{row_limit(job_, row), &job_.admit, &job_.out, exec_.stats != nullptr, gate};
      sinks[i].start(fact_of(task, i), row, wanted, buffers_of(task, i));
    }
    if (job_.scores != nullptr) {
      walk_scores(task, sinks[0]);
    } else {
      walk_keys(task, sinks);
    }
    for (int64_t i = 0; i < task.num_rows; ++i) {
      sinks[i].finish(has_newest(task, fact_of(task, i)), task.part >= 0);
      if (task.part < 0) {
        answer(first_row_ + task.first_row + i, fact_of(task, i), sinks[i].entries(), sinks[i].blocks(),
               sinks[i].forced(), sinks[i].cut());
      } else {
        part_of(task, i) = {{sinks[i].entries(), 0, 0}, {sinks[i].blocks(), 0, 0}, sinks[i].cut()};
        if (!counts_parts(task, i)) continue;
        count_part(sinks[i].entries(), sinks[i].forced(), row_limit(job_, first_row_ + task.first_row + i),
                   room_.together.bins_of((task.sliced + i) * lists_a_row(), 0),
                   &room_.table.gates[task.first_row + i]);
      }
    }
  }

  /// Whether the row's newest block, which slices never cut, is this slice's. Rows of a group end apart, so it need not
  /// be the last slice's; nor need it have a key.
  bool has_newest(const Task& task, const RowFact& fact) const {
    if (task.slices == 1 || fact.whole_size() == 0 || job_.out.blocks.data == nullptr) return true;
    const int64_t block = fact.position_at((fact.whole_size() - 1) / job_.out.block_size * job_.out.block_size);
    return (task.slice == 0 || task.first_key <= block) && (task.slice + 1 == task.slices || block < task.last_key);
  }

  const RowFact& fact_of(const Task& task, int64_t i) const { return room_.table.facts[task.first_row + i]; }

  /// Slices of the same rows mostly follow one another.
  void pack(const Task& task) {
    const int64_t first = first_row_ + task.first_row;
    if (first == packed_ && task.num_rows == packed_rows_) return;
    for (int64_t i = 0; i < task.num_rows; ++i) {
      pack_query(*job_.q, first + i, job_.source.head_dim, i, room_.scratch.queries);
    }
    packed_ = first, packed_rows_ = task.num_rows;
  }

  void walk_keys(const Task& task, RowSink* sinks) {
    Scratch& s = room_.scratch;
    pack(task);
    s.tile.begin(Tile::keys_for(task.num_rows, job_.source.head_dim), task.num_rows);
    const auto flush = [&] {
      const int32_t* positions = s.tile.positions();
      for (int64_t i = 0; i < task.num_rows; ++i) {
        const RowFact& fact = fact_of(task, i);
        const int64_t a = std::lower_bound(positions, positions + s.tile.size(), fact.low) - positions;
        const int64_t b = std::lower_bound(positions + a, positions + s.tile.size(), fact.high) - positions;
        if (a == b) continue;
        s.tile.score(s.queries, i, a, b);
        sinks[i].take(s.tile.scores() + a, positions + a, b - a, s.accepted, counts_);
      }
    };
    const RowFact& fact = fact_of(task, 0);
    if (fact.table_row < 0) return;
    const auto walk = [&](int64_t first, int64_t last) {
      for_each_chunk(job_.source, fact.table_row, std::max(first, task.first_key), std::min(last, task.last_key),
                     [&](const Chunk& c) { s.tile.push(job_.source, c, flush); });
    };
    if (present(job_.admit.candidates)) {
      const int64_t n = sort_candidates(job_.admit, fact, first_row_ + task.first_row, s.candidates);
      for_each_run(job_.admit, fact, s.candidates, n, walk);
    } else {
      walk(task.first_key, task.last_key);
    }
    s.tile.drain(flush);
  }

  void walk_scores(const Task& task, RowSink& sink) {
    Scratch& s = room_.scratch;
    const int64_t row = first_row_ + task.first_row;
    const RowFact& fact = fact_of(task, 0);
    const int64_t n = sort_candidates(job_.admit, fact, row, s.candidates);
    for_each_run(job_.admit, fact, s.candidates, n, [&](int64_t first, int64_t last) {
      for (int64_t at = std::max(first, task.first_key), end = std::min(last, task.last_key); at < end;
           at += kTakeKeys) {
        const int64_t m = std::min(kTakeKeys, end - at);
        for (int64_t i = 0; i < m; ++i) s.positions[i] = static_cast<int32_t>(at + i);
        sink.take(given_scores(row, at, m), s.positions, m, s.accepted, counts_);
      }
    });
  }

  const float* given_scores(int64_t row, int64_t first, int64_t n) {
    const Tensor& t = *job_.scores;
    const int64_t at = row * t.stride[0] + first;
    if (t.dtype == DType::f32) return static_cast<const float*>(t.data) + at;
    const uint16_t* halves = static_cast<const uint16_t*>(t.data) + at;
    for (int64_t i = 0; i < n; ++i) {
      room_.scratch.scores[i] = t.dtype == DType::bf16 ? bf16_to_float(halves[i]) : f16_to_float(halves[i]);
    }
    return room_.scratch.scores;
  }

  void answer(int64_t row, const RowFact& fact, const Entries& entries, const Entries& blocks, const Forced& forced,
              const Cut& cut) {
    counts_.add(kTiedCuts, cut.tied);
    if (job_.topk > 0) emit_row(emitter_, row, fact, entries, forced, counts_);
    if (job_.out.blocks.data != nullptr && !emitter_.dry) emit_blocks(job_.out.blocks, job_.block_scores, row, blocks);
  }

  /// Whether the whole team merges each row, because there are fewer of them than members.
  bool together() const {
    const int64_t rows = room_.table.state->sliced_rows;
    if (rows == 0 || room_.together.lists == 0 || strategy_ == Strategy::rows) return false;
    // Two or three members gain less by it than five more barriers cost.
    return strategy_ == Strategy::team || (room_.workers >= 4 && rows < 2 * room_.workers);
  }

  /// Calls f(task of the first slice, row of the group) for each row of a sliced group.
  template <class F>
  void for_each_sliced(F&& f) const {
    const TaskTable& table = room_.table;
    for (int64_t t = 0; t < table.state->num_tasks; ++t) {
      const Task& task = table.tasks[t];
      for (int64_t i = 0; task.slices > 1 && task.slice == 0 && i < task.num_rows; ++i) f(task, i);
    }
  }

  /// Rows of sliced groups, dealt to the workers in turn.
  void merge_sliced() {
    int64_t turn = 0;
    for_each_sliced([&](const Task& task, int64_t i) {
      if (turn++ % room_.workers == member_.rank()) merge_row(task, i);
    });
  }

  int64_t lists_a_row() const { return job_.extents.blocks > 0 ? 2 : 1; }
  /// Rows of the first merge have histograms before it, and by them a threshold as early as can be.
  bool counts_parts(const Task& task, int64_t i) const {
    return (task.sliced + i + 1) * lists_a_row() <= room_.together.lists;
  }
  TeamList keys_of(const Task& first, int64_t i) const {
    return {&part_of(first, i),
            first.num_rows,
            first.slices,
            false,
            row_limit(job_, first_row_ + first.first_row + i),
            forced_keys(job_.admit, fact_of(first, i)),
            counts_parts(first, i)};
  }
  TeamList blocks_of(const Task& first, int64_t i) const {
    TeamList list = keys_of(first, i);
    list.blocks = true;
    list.counted = false;
    list.k = job_.extents.blocks;
    list.forced = forced_block(fact_of(first, i), job_.out.block_size);
    return list;
  }

  /// A part may have left out equals of the whole's k-th; where nothing had to be left out here, the one full part's cut
  /// is the whole's.
  static Cut whole_cut(const TeamList& list, Cut cut) {
    for (int64_t p = 0; p < list.parts; ++p) {
      const Cut& own = list.first[p * list.step].cut;
      cut.tied = cut.tied || (own.tied && (cut.key == own.key || cut.key == 0));
    }
    return cut;
  }

  void merge_row(const Task& first, int64_t i);
  void merge_together();

  const Job& job_;
  const Exec& exec_;
  const Member& member_;
  Strategy strategy_;
  Room room_;
  Emitter emitter_;
  Counts counts_;
  int64_t first_row_ = 0, num_candidates_ = 0;
  int64_t packed_ = -1, packed_rows_ = 0;  ///< whose queries are packed
};

/// The parts' entries lie in ascending positions, part after part, so the same stable selection does for the whole.
void Pass::merge_row(const Task& first, int64_t i) {
  const SinkBuffers& to = room_.scratch.sinks[0];
  Entries parts[kMaxSlices], best{to.score, to.position, 0}, best_blocks{to.block_score, to.block_id, 0};
  const auto select = [&](const TeamList& list, Entries& out) {
    Cut cut;
    for (int64_t p = 0; p < list.parts; ++p) parts[p] = list.part(p).entries;
    out.size = select_best(parts, list.parts, list.k, list.forced, out, &cut);
    return cut;
  };
  const TeamList keys = keys_of(first, i);
  const Cut cut = select(keys, best);
  if (job_.extents.blocks > 0) select(blocks_of(first, i), best_blocks);
  answer(first_row_ + first.first_row + i, fact_of(first, i), best, best_blocks, keys.forced, whole_cut(keys, cut));
}

/// A few rows at a time; every member walks the same lists.
void Pass::merge_together() {
  struct Row {
    const Task* task;
    int64_t i;
  };
  const TeamRoom& room = room_.together;
  const int64_t each = lists_a_row();
  Row rows[kMostLists];
  TeamList lists[kMostLists];
  int64_t n = 0;
  const auto merge = [&] {
    select_together(member_, room_.workers, room, lists, n * each);
    for (int64_t r = member_.rank(); r < n && member_.rank() < room_.workers; r += room_.workers) {
      const int64_t keys = r * each;
      const Entries blocks = each > 1 ? room.entries(keys + 1) : Entries{};
      answer(first_row_ + rows[r].task->first_row + rows[r].i, fact_of(*rows[r].task, rows[r].i), room.entries(keys),
             blocks, lists[keys].forced, whole_cut(lists[keys], room.found[keys].cut));
      for (int64_t l = keys; l < keys + each; ++l) room.clear(l);
    }
    member_.barrier();
    n = 0;
  };
  for_each_sliced([&](const Task& task, int64_t i) {
    rows[n] = {&task, i};
    lists[n * each] = keys_of(task, i);
    if (each > 1) lists[n * each + 1] = blocks_of(task, i);
    if (++n * each == room.lists) merge();
  });
  if (n > 0) merge();
}

/// Work that makes another thread worth waking, in multiply-adds.
constexpr double kGrain = 4e6;

int64_t useful_workers(const Job& job) {
  const Extents& e = job.extents;
  // Lengths are read only until they are known to suffice.
  const double per_key = e.heads > 0 ? static_cast<double>(e.heads) * static_cast<double>(e.head_dim) : 64.0;
  const double most = per_key * static_cast<double>(e.rows) * static_cast<double>(std::max<int64_t>(e.keys, 1));
  if (most < 2 * kGrain) return 1;
  double work = 0;
  for (int64_t r = 0; r < job.rows.count && work < 1024 * kGrain; ++r) {
    RowFact fact = read_row(job.rows, r, job.source.count);
    shard_row(fact, job.shard, job.whole_start, job.whole_end, r);
    clip_row(fact, job.source.count, job.rows.max_len);
    const int64_t keys = fact.high - fact.low;
    if (keys > job.topk || needs_scores(job.out)) work += static_cast<double>(keys) * per_key;
  }
  return static_cast<int64_t>(work / kGrain) + 1;
}

}  // namespace

void run_job(const Job& job, const Exec& exec) {
  if (job.rows.count == 0) return;
  int64_t wild = 0;
  auto body = [&](const Member& member) {
    Pass pass(job, exec, member);
    int64_t found = 0;
    if (exec.strict) found = pass.run(true);
    if (found == 0 && (exec.flags & kCheckOnly) == 0) pass.run(false);
    if (member.rank() == 0 || exec.team != nullptr) wild = found;
  };
  const bool forced = strategy_of(exec) != Strategy::automatic;
  run_team(exec, team_size(exec, forced ? INT32_MAX : useful_workers(job)), body);
  if (wild > 0) raise_wild(job.op, wild);
}

}  // namespace topkey::cpu
