// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `score`: the logits matrix, from the same tiles and kernels as the search, so the same bits.
#include <algorithm>
#include <limits>

#include "cpu/counts.h"
#include "cpu/room.h"
#include "cpu/search.h"
#include "cpu/team.h"

namespace topkey::cpu {
namespace {

struct LogitsJob {
  const char* op;
  const Query* q;
  Source source;
  Rows rows;
  Tensor mask;
  bool clean;
  int64_t width;  ///< columns that exist
  Tensor logits;
  Extents extents;
};

class LogitsPass {
 public:
  LogitsPass(const LogitsJob& job, const Exec& exec, const Member& member)
      : job_(job),
        exec_(exec),
        member_(member),
        room_(make_room(job.extents, exec.workspace, exec.workspace_bytes, member.rank(), member.size())) {}

  void run() {
    const TaskTable& table = room_.table;
    const bool works = member_.rank() < room_.workers;
    for (int64_t first = 0; first < job_.rows.count; first += table.max_rows) {
      first_row_ = first;
      const int64_t rows = std::min(table.max_rows, job_.rows.count - first);
      for (int64_t r = member_.rank(); works && r < rows; r += room_.workers) look_at(r);
      member_.barrier();
      if (member_.rank() == 0) cut(rows);
      member_.barrier();
      while (works) {
        const int64_t t = table.state->next_task.fetch_add(1, std::memory_order_relaxed);
        if (t >= table.state->num_tasks) break;
        do_task(table.tasks[t]);
      }
      member_.barrier();
    }
    counts_.publish(exec_);
  }

  /// Wild values of all rows, for strict; every member counts them all.
  int64_t count_wild() {
    for (int64_t r = 0; r < job_.rows.count; ++r) measure(r);
    const int64_t wild = static_cast<int64_t>(counts_.words[kSkippedPages]);
    counts_ = Counts{};
    return wild;
  }

 private:
  RowFact measure(int64_t row) {
    RowFact fact = read_row(job_.rows, row, job_.source.count);
    fact.table_row = table_row_of(job_.source, row, fact.request);
    counts_.add(kSkippedPages, fact.table_row == -2);
    clip_row(fact, std::min(job_.source.count, job_.width), job_.rows.max_len);
    if (fact.size() == 0) fact.high = fact.low;
    int64_t readable = 0;
    for_each_chunk(job_.source, fact.table_row, fact.low, fact.high, [&](const Chunk& c) { readable += c.count; });
    counts_.add(kSkippedPages, fact.size() - readable);
    fact.live = readable;
    fact.scored = readable > 0;
    return fact;
  }

  void look_at(int64_t r) {
    const int64_t row = first_row_ + r;
    const RowFact fact = room_.table.facts[r] = measure(row);
    counts_.add(kRows);
    if (job_.clean) hide(row, 0, job_.width);
    if (!job_.clean && (fact.live < fact.size() || job_.mask.data != nullptr))
      hide(row, std::max<int64_t>(fact.start, 0), std::min(fact.end, job_.width));
  }

  /// Parts never meet here, so there may be as many as there are tasks.
  void cut(int64_t rows) {
    Cutting c{};
    c.workers = room_.workers;
    c.row_block = room_.row_block;
    c.max_parts = c.part_room = INT64_MAX / 2;
    c.least_slice = 1024;
    c.panel = kernels().panel_keys;
    cut_tasks(c, rows, room_.table);
  }

  /// -inf in columns [first, last).
  void hide(int64_t row, int64_t first, int64_t last) {
    for (int64_t n = first; n < last; ++n) put(row, n, -std::numeric_limits<float>::infinity());
  }

  void put(int64_t row, int64_t column, float score) {
    const int64_t at = row * job_.logits.stride[0] + column;
    if (job_.logits.dtype == DType::bf16) {
      static_cast<uint16_t*>(job_.logits.data)[at] = float_to_bf16(score);
    } else {
      static_cast<float*>(job_.logits.data)[at] = score;
    }
  }

  void do_task(const Task& task) {
    Scratch& s = room_.scratch;
    const RowFact* facts = room_.table.facts + task.first_row;
    const int64_t row = first_row_ + task.first_row;
    for (int64_t i = 0; i < task.num_rows; ++i) pack_query(*job_.q, row + i, job_.source.head_dim, i, s.queries);
    s.tile.begin(Tile::keys_for(task.num_rows, job_.source.head_dim), task.num_rows);
    const auto flush = [&] {
      const int32_t* positions = s.tile.positions();
      for (int64_t i = 0; i < task.num_rows; ++i) {
        const int64_t a = std::lower_bound(positions, positions + s.tile.size(), facts[i].low) - positions;
        const int64_t b = std::lower_bound(positions + a, positions + s.tile.size(), facts[i].high) - positions;
        if (a == b) continue;
        s.tile.score(s.queries, i, a, b);
        for (int64_t k = a; k < b; ++k) write(row + i, positions[k], s.tile.scores()[k]);
      }
    };
    for_each_chunk(job_.source, facts[0].table_row, task.first_key, task.last_key,
                   [&](const Chunk& c) { s.tile.push(job_.source, c, flush); });
    s.tile.drain(flush);
  }

  void write(int64_t row, int64_t column, float score) {
    float addend = 0.0f;
    if (masked(job_.mask, row, column, &addend)) return;
    const float s = canonical(score + addend);
    counts_.add(kScoredKeys);
    counts_.add(kNanScores, std::isnan(s));
    put(row, column, s);
  }

  const LogitsJob& job_;
  const Exec& exec_;
  const Member& member_;
  Room room_;
  Counts counts_;
  int64_t first_row_ = 0;
};

void run_logits(LogitsJob& job, const Exec& exec) {
  if (job.rows.count == 0) return;
  job.extents = {job.rows.count, job.width, job.q->values.shape[1], job.source.head_dim, 0, 0, 0, job.source.format};
  int64_t wild = 0;
  auto body = [&](const Member& member) {
    LogitsPass pass(job, exec, member);
    const int64_t found = exec.strict ? pass.count_wild() : 0;
    if (found == 0) pass.run();
    if (member.rank() == 0 || exec.team != nullptr) wild = found;
  };
  const double work = static_cast<double>(job.rows.count) * static_cast<double>(job.width) *
                      static_cast<double>(job.extents.heads) * static_cast<double>(job.extents.head_dim);
  run_team(exec, team_size(exec, static_cast<int64_t>(std::min(work / 4e6, 1e6)) + 1), body);
  if (wild > 0) raise_wild(job.op, wild);
}

}  // namespace

void mqa_logits(const MqaLogits& a, const Exec& exec) {
  const Source source = make_source(a.keys);
  LogitsJob job{"mqa_logits", &a.q, source, a.rows, a.mask, a.clean, source.count, a.logits, {}};
  run_logits(job, exec);
}

void paged_mqa_logits(const PagedMqaLogits& a, const Exec& exec) {
  const Source source = make_source(a.keys);
  const bool bounded = a.rows.max_len > 0 && a.rows.start.data == nullptr;
  const int64_t width = std::min(a.logits.shape[1], bounded ? std::min(a.rows.max_len, source.count) : source.count);
  LogitsJob job{"paged_mqa_logits", &a.q, source, a.rows, Tensor{}, a.clean, width, a.logits, {}};
  run_logits(job, exec);
}

}  // namespace topkey::cpu
