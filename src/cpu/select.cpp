// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The operations of stages `search` and `select` as jobs of one pass, and the size of their workspace.
#include <algorithm>

#include "cpu/job.h"
#include "cpu/merge.h"
#include "cpu/search.h"

namespace topkey::cpu {
namespace {

int64_t bounded(int64_t keys, const Rows& rows) { return rows.max_len > 0 ? std::min(keys, rows.max_len) : keys; }

/// The part of a job that all four operations share.
Job make_job(const char* op, const Rows& rows, const Admit& admit, int64_t topk, const Selection& out,
             const Source& source) {
  Job job{};
  job.op = op;
  job.rows = rows;
  job.admit = admit;
  job.topk = topk;
  job.out = out;
  job.source = source;
  job.extents.rows = rows.count;
  job.extents.keys = bounded(std::min<int64_t>(source.count, INT32_MAX), rows);
  job.extents.topk = topk;
  job.extents.blocks = out.blocks.data != nullptr ? out.blocks.shape[1] : 0;
  job.extents.candidates = present(admit.candidates) ? admit.candidates.shape[1] + 1 : 0;
  return job;
}

void add_query(Job& job, const Query& q) {
  job.q = &q;
  job.extents.heads = q.values.shape[1];
  job.extents.head_dim = job.source.head_dim;
  job.extents.format = job.source.format;
}

Job scores_job(const char* op, const Tensor& scores, const Rows& rows, const Admit& admit, int64_t topk,
               const Selection& out) {
  Source columns{};
  columns.count = scores.shape[1];
  Job job = make_job(op, rows, admit, topk, out, columns);
  job.scores = &scores;
  return job;
}

}  // namespace

size_t search_workspace_bytes(Op op, const Shape& shape) {
  if (op == Op::merge_topk) return merge_workspace_bytes(shape.keys, shape.topk);
  Extents e{shape.rows, shape.keys,  shape.scored ? shape.heads : 0, shape.head_dim, shape.topk, shape.blocks,
            0,          shape.format};
  if (shape.candidates >= 0) e.candidates = shape.candidates + 1;
  return wanted_bytes(e);
}

void mqa_topk(const MqaTopk& a, const Exec& exec) {
  Job job = make_job("mqa_topk", a.rows, a.admit, a.topk, a.out, make_source(a.keys));
  add_query(job, a.q);
  run_job(job, exec);
}

void paged_mqa_topk(const PagedMqaTopk& a, const Exec& exec) {
  Job job = make_job("paged_mqa_topk", a.rows, a.admit, a.topk, a.out, make_source(a.keys));
  add_query(job, a.q);
  job.shard = a.keys.shard;
  job.absolute_slots = true;
  job.whole_start = a.whole_start;
  job.whole_end = a.whole_end;
  job.block_scores = a.block_scores;
  run_job(job, exec);
}

void topk(const Topk& a, const Exec& exec) {
  Job job = scores_job("topk", a.scores, a.rows, a.admit, a.topk, a.out);
  job.row_topk = &a.row_topk;
  run_job(job, exec);
}

void select_blocks(const SelectBlocks& a, const Exec& exec) {
  Selection out{};
  out.blocks = a.blocks;
  out.block_size = a.block_size;
  run_job(scores_job("select_blocks", a.scores, a.rows, Admit{}, 0, out), exec);
}

}  // namespace topkey::cpu
