// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A sharded step as a table of contents: agree, clear, store the keys, answer the rows. Rows are answered in one of
// four ways: alone (rows that this rank has all keys of), shared out and exchanged (row shards), on this rank's keys and
// merged (context), or over all keys gathered from the context ranks (prefill with context). Where keys are pools, every
// rank then expands all rows' pools to tokens.
#include "shard/layer.h"

#include <vector>

namespace topkey::shard {
namespace {

/// A chunk's memory: what is received of all ranks, rank after rank: scores, positions, block scores, block ids, each
/// [rows, entries]. What this rank sends lies there already, in its place.
struct Exchange {
  char* receive;
  Entries entries;
  int64_t rows;
  int32_t rank, ranks;

  size_t bytes() const { return static_cast<size_t>(rows * entries.row_bytes()); }
  char* send() const { return receive + bytes() * static_cast<size_t>(rank); }
  /// Part 0 to 3 of what is sent.
  Tensor sent(int part) const {
    Tensor t = received(part);
    t.data = send() + offset(part);
    return tensor(t.data, t.dtype, {rows, t.shape[2]});
  }
  /// [ranks, rows, entries].
  Tensor received(int part) const {
    const int64_t n = part < 2 ? entries.winners : entries.blocks;
    return tensor(receive + offset(part), part % 2 == 0 ? DType::f32 : DType::i32, {ranks, rows, n},
                  {rows * entries.row_bytes() / 4, n, 1});
  }

 private:
  int64_t offset(int part) const {
    return 4 * rows * (part < 2 ? part * entries.winners : 2 * entries.winners + (part - 2) * entries.blocks);
  }
};

PagedMqaTopk local_search(const PagedMqaTopk& rows, const Exchange& x) {
  PagedMqaTopk a = rows;
  a.topk = static_cast<int32_t>(x.entries.winners);
  a.out = {};
  a.out.scores = x.sent(0);
  a.out.indices = x.sent(1);
  if (x.entries.blocks == 0) return a;
  a.block_scores = x.sent(2);
  a.out.blocks = x.sent(3);
  a.out.block_size = rows.out.block_size;
  return a;
}

MergeTopk merge_of(const PagedMqaTopk& rows, const Exchange& x) {
  MergeTopk m{};
  m.scores = x.received(0);
  m.indices = x.received(1);
  m.topk = rows.topk;
  m.rows.count = rows.rows.count;
  m.rows.request = rows.rows.request;
  m.rows.next_n = rows.rows.next_n;
  m.rows.start = rows.whole_start;
  m.rows.end = rows.whole_end;
  m.out = rows.out;
  m.force_first = rows.admit.force_first;
  m.force_last = rows.admit.force_last;
  if (x.entries.blocks == 0) return m;
  m.block_scores = x.received(2);
  m.block_ids = x.received(3);
  return m;
}

/// Rows of `whole` that are answered at once, and the exchange for `rows` of them.
int64_t most_rows(const Step& s) {
  const int64_t most = chunk_rows(entries_of(s.config, s.step.rows.max_len), s.in.comm->size, limit_of(s.spec));
  const int64_t each = there(s.step.rows.request) ? 1 : next_n_of(s.step.rows);
  return std::max(most / each, int64_t{1}) * each;
}
Exchange exchange_of(const Step& s, int64_t rows) {
  return {nullptr, entries_of(s.config, s.step.rows.max_len), rows, s.in.comm->rank, s.in.comm->size};
}

/// Local selection with scores, exchange, merge; chunk after chunk.
void answer_merged(const Step& s, const PagedMqaTopk& whole, RowRange rows, const Exec& exec) {
  Comm comm(s.op(), *s.in.comm, exec);
  const int64_t most = most_rows(s);
  for (int64_t first = rows.first; first < rows.last; first += most) {
    const PagedMqaTopk chunk = search_rows(whole, {first, std::min(first + most, rows.last)});
    Exchange x = exchange_of(s, chunk.rows.count);
    Workspace room(s.op(), exec);
    x.receive = room.take(x.bytes() * static_cast<size_t>(x.ranks));
    const Exec rest = room.rest(exec);
    paged_mqa_topk(local_search(chunk, x), rest);
    comm.all_gather(x.send(), x.receive, x.bytes());
    merge_topk(merge_of(chunk, x), rest);
  }
}

GatherK gather_args(const Step& s) {
  GatherK gather{};
  gather.keys = s.step.keys;
  gather.indptr = s.in.key_indptr;
  gather.total = s.in.total_keys;
  gather.out = s.in.gathered;
  return gather;
}

MqaTopk gathered_search(const Step& s, const PagedMqaTopk& whole, RowRange rows) {
  const PagedMqaTopk part = search_rows(whole, rows);
  MqaTopk a{};
  a.q = part.q;
  a.keys = s.in.gathered;
  a.rows.count = rows.size();
  a.rows.request = part.rows.request;
  a.rows.start = rows_of(s.in.gathered_start, rows.first, rows.size());
  a.rows.length = part.whole_end;
  a.admit = part.admit;
  a.topk = part.topk;
  a.out = part.out;
  return a;
}

/// All keys of the requests from the context ranks, then a search over them. Every rank gathers, with rows or without.
void answer_gathered(const Step& s, const PagedMqaTopk& whole, RowRange rows, const Exec& exec) {
  gather_k(gather_args(s), *s.in.comm, exec);
  if (rows.size() > 0) mqa_topk(gathered_search(s, whole, rows), exec);
}

/// What the ranks exchange of a step's outputs. Nothing where no row is dealt out.
std::vector<ExchangeRows> exchanges_of(const Step& s, const PagedMqaTopk& whole) {
  std::vector<ExchangeRows> all;
  const Selection& out = whole.out;
  for (const Tensor* t : {&out.indices, &out.slots, &out.scores, &out.blocks, &out.counts}) {
    if (t->data == nullptr || s.step.rows.count == s.step.num_decode_rows) continue;
    ExchangeRows e{};
    e.buffer = *t;
    e.width = t->ndim == 1 ? 1 : t == &out.blocks ? t->shape[1] : int64_t{whole.topk};
    e.first_row = s.step.num_decode_rows;
    e.row_shard_sizes = s.in.row_shard_sizes;
    all.push_back(e);
  }
  return all;
}

/// Of row shards, the pools of all rows until every rank has them: close together, so that they travel in place.
size_t pools_bytes(const Step& s) {
  return s.pools ? padded(static_cast<size_t>(s.step.rows.count * chosen_keys(s.config) * 4)) : 0;
}

size_t sliced_bytes(const Step& s, const PagedMqaTopk& whole, size_t calls) {
  PagedMqaTopk outputs = whole;
  if (s.pools) outputs.out.indices = Tensor{};
  for (const ExchangeRows& e : exchanges_of(s, outputs)) calls = std::max(calls, exchange_rows_bytes(e, *s.in.comm));
  return pools_bytes(s) + calls;
}

/// Decode rows on every rank, its own slice of the prefill rows, then everyone's slices.
void answer_sliced(const Step& s, PagedMqaTopk whole, const Exec& exec) {
  Workspace room(s.op(), exec);
  if (s.pools) {
    whole.out.indices = tensor(room.take(pools_bytes(s)), DType::i32, {s.step.rows.count, chosen_keys(s.config)});
  }
  const Exec rest = room.rest(exec);
  const int64_t decode = s.step.num_decode_rows;
  RowRange own{decode, decode};
  for (int32_t r = 0; r <= s.spec.row_rank; ++r) {
    own.first = own.last;
    own.last += s.in.row_shard_sizes[r];
  }
  if (decode > 0) paged_mqa_topk(search_rows(whole, {0, decode}), rest);
  if (own.size() > 0) paged_mqa_topk(search_rows(whole, own), rest);
  for (const ExchangeRows& e : exchanges_of(s, whole)) exchange_rows(e, *s.in.comm, rest);
  if (s.pools) expand_pools(expand_args(s, whole.out.indices), rest);
}

/// What answering the rows needs. The operations' own queries throw where they would refuse, before anything is written.
size_t answer_bytes(const Step& s, const Exec& exec) {
  const bool context = s.spec.context.active(), prefill = s.spec.prefill_size > 1;
  const int64_t decode = common_rows(s), all = s.step.rows.count;
  const PagedMqaTopk whole = search_rows(search_args(s), {0, all});
  size_t bytes = paged_mqa_topk_workspace_bytes(whole, exec);
  if (context) {
    const Exchange x = exchange_of(s, std::min(prefill ? decode : all, most_rows(s)));
    const PagedMqaTopk chunk = search_rows(whole, {0, x.rows});
    bytes = padded(x.bytes() * static_cast<size_t>(x.ranks)) +
            std::max(paged_mqa_topk_workspace_bytes(local_search(chunk, x), exec),
                     merge_topk_workspace_bytes(merge_of(chunk, x), exec));
  }
  if (s.pools) {
    bytes = std::max(bytes, expand_pools_workspace_bytes(expand_args(s, whole.out.indices), exec));
  }
  if (s.spec.row_shards > 1) bytes = sliced_bytes(s, whole, bytes);
  if (context && prefill) {
    bytes = std::max(bytes, gather_k_bytes(gather_args(s), exec));
    bytes = std::max(bytes, mqa_topk_workspace_bytes(gathered_search(s, whole, {decode, all}), exec));
  }
  return bytes;
}

void check_calls(const Step& s, const Exec& exec) {
  size_t needed = answer_bytes(s, exec);
  if (stores(s)) needed = std::max(needed, store_bytes(s, exec));
  const size_t given = exec.workspace == nullptr ? 0 : exec.workspace_bytes;
  if (given >= needed) return;
  throw Error(Status::workspace_too_small, std::string(s.op()) + ": exec.workspace_bytes must be at least " +
                                               std::to_string(needed) + ", got " + std::to_string(given));
}

}  // namespace

int64_t chunk_rows(Entries entries, int32_t ranks, size_t limit) {
  const int64_t bytes = entries.row_bytes() * ranks;
  return std::max<int64_t>(1, static_cast<int64_t>(limit) / std::max<int64_t>(bytes, 1));
}

Entries entries_of(const IndexerConfig& config, int64_t max_len) {
  // A rank cannot bring more winners than it has keys.
  const int64_t winners = max_len > 0 ? std::min(chosen_keys(config), max_len) : chosen_keys(config);
  return {winners, config.role == CandidateRole::source ? config.candidate_topk_blocks : 0};
}

void forward(const Step& s, const Exec& exec) {
  if (s.step.skip_step) return;
  const bool context = s.spec.context.active(), prefill = s.spec.prefill_size > 1, rows = s.spec.row_shards > 1;
  check_calls(s, exec);
  for (topkey_communicator* twin : {s.in.comm, s.in.prefill_comm}) {
    if (twin == nullptr) continue;
    Comm comm(s.op(), *twin, exec);
    agree(comm, question_of(s, *twin, exec));
  }
  layer::clear_buffers(Check(s.op(), Mode::call), s.step, exec);
  store_keys(s, exec);
  const PagedMqaTopk whole = search_args(s);
  const int64_t decode = common_rows(s), all = s.step.rows.count;
  if (rows) {
    answer_sliced(s, whole, exec);
  } else if (context && prefill) {
    answer_merged(s, whole, {0, decode}, exec);
    answer_gathered(s, whole, {decode, all}, exec);
  } else if (context) {
    answer_merged(s, whole, {0, all}, exec);
  } else {
    paged_mqa_topk(whole, exec);
  }
  if (s.pools && !rows) expand_pools(expand_args(s, whole.out.indices), exec);
}

}  // namespace topkey::shard
