// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See cluster.h.
#include "tests/cluster.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <thread>

namespace topkey::testing {
namespace {

constexpr int64_t kAttentionPage = 8;

/// A tensor of the same dtype and width whose rows are these of `from` (-1: `pad` bytes).
Array pick(const Array& from, const std::vector<int64_t>& rows, uint8_t pad) {
  const Tensor& t = from.view();
  const auto n = static_cast<int64_t>(rows.size());
  const Array to = t.ndim == 2 ? Array(t.dtype, {n, t.shape[1]}) : Array(t.dtype, {n, t.shape[1], t.shape[2]});
  const size_t bytes = n == 0 ? 0 : to.bytes() / static_cast<size_t>(n);
  for (int64_t r = 0; r < n; ++r) {
    uint8_t* cell = to.as<uint8_t>() + static_cast<size_t>(r) * bytes;
    if (rows[static_cast<size_t>(r)] < 0) {
      std::memset(cell, pad, bytes);
    } else {
      std::memcpy(cell, from.as<uint8_t>() + static_cast<size_t>(rows[static_cast<size_t>(r)]) * bytes, bytes);
    }
  }
  return to;
}

std::vector<int64_t> count_up(int64_t first, int64_t last) {
  std::vector<int64_t> all;
  for (int64_t i = first; i < last; ++i) all.push_back(i);
  return all;
}

Array rope_table(const ClusterSpec& spec) {
  const Array table(DType::f32, {spec.max_tokens, 16});
  Random random(spec.seed * 7 + 1);
  for (int64_t i = 0; i < table.size(); ++i) table.as<float>()[i] = random.normal();
  return table;
}

/// The workspace of a rank (0..; -1: the one that answers alone), kept from step to step: it is large, and what it holds
/// must not matter. 64 canaries behind `bytes`.
uint8_t* workspace_of(int32_t rank, size_t bytes) {
  struct Room {
    std::shared_ptr<uint8_t> memory;
    size_t bytes = 0;
  };
  static std::mutex mutex;
  static std::map<int32_t, Room> rooms;
  const std::lock_guard<std::mutex> lock(mutex);
  Room& room = rooms[rank];
  if (room.bytes < bytes + 64) room = {aligned_bytes(bytes + 64), bytes + 64};
  std::memset(room.memory.get() + bytes, 0xC3, 64);
  return room.memory.get();
}
bool canaries_live(const uint8_t* workspace, size_t bytes) {
  return std::all_of(workspace + bytes, workspace + bytes + 64, [](uint8_t b) { return b == 0xC3; });
}

/// A step in the making: the arrays that it borrows.
struct Made {
  Array q, weights, k, slots, positions, request, end, start, whole_start, whole_end, table, attention, rope;
  Array values, scales, indptr, gathered_start;
  Array q_scales, gate, ape, tail_slots, row_positions, token_order, token_request;
  Answer answer;
  IndexerStep step{};
};

void set_windows(const ClusterSpec& spec, const StepData& data, Shard shard, Made& m) {
  std::vector<int32_t> request, end, start, whole_start, whole_end;
  for (const int64_t r : m.answer.rows) {
    const bool pad = r < 0;
    const StepData::Row row = pad ? StepData::Row{-1, -1} : data.rows[static_cast<size_t>(r)];
    const auto keys = static_cast<int32_t>((row.token + 1) / spec.ratio);
    const int32_t from = spec.starts && row.token % 2 == 1 ? keys / 3 : 0;
    request.push_back(static_cast<int32_t>(row.turn));
    whole_start.push_back(from), whole_end.push_back(keys);
    start.push_back(static_cast<int32_t>(shard.local_length(from)));
    end.push_back(static_cast<int32_t>(shard.local_length(keys)));
  }
  m.request = Array::of(request), m.end = Array::of(end), m.start = Array::of(start);
  m.whole_start = Array::of(whole_start), m.whole_end = Array::of(whole_end);
  m.step.rows.count = static_cast<int64_t>(m.answer.rows.size());
  m.step.rows.request = m.request.view(), m.step.rows.end = m.end.view();
  if (spec.starts) m.step.rows.start = m.start.view();
}

/// Slots and positions of these rows' tokens.
void set_slots(const ClusterSpec& spec, const StepData& data, const Replica& replica, const std::vector<int64_t>& rows,
               Made& m) {
  for (Array* a : {&m.slots, &m.positions, &m.tail_slots}) *a = Array(DType::i64, {static_cast<int64_t>(rows.size())});
  for (size_t i = 0; i < rows.size(); ++i) {
    for (const Array* a : {&m.slots, &m.positions, &m.tail_slots}) a->as<int64_t>()[i] = -1;
    if (rows[i] < 0) continue;
    const StepData::Row row = data.rows[static_cast<size_t>(rows[i])];
    const uint64_t id = data.turns[static_cast<size_t>(row.turn)].id;
    m.slots.as<int64_t>()[i] = replica.slot(id, row.token);
    if (spec.pools) m.tail_slots.as<int64_t>()[i] = replica.tail_slot(id, row.token);
    m.positions.as<int64_t>()[i] = row.token;
  }
  m.step.slot_mapping = m.slots.view();
  if (!spec.rope) return;
  m.rope = rope_table(spec);
  m.step.rope.positions = m.positions.view(), m.step.rope.cos_sin = m.rope.view(), m.step.rope.dim = 16;
}

void set_pools(const ClusterSpec& spec, const StepData& data, const Replica& replica, Made& m) {
  if (!spec.pools) return;
  m.gate = pick(data.gate, m.answer.rows, 0xFF);
  m.ape = Array(DType::f32, {spec.ratio, spec.head_dim});
  Random random(spec.seed * 7 + 2);
  for (int64_t i = 0; i < m.ape.size(); ++i) m.ape.as<float>()[i] = random.normal();
  m.row_positions = Array(DType::i64, {m.step.rows.count});
  for (int64_t j = 0; j < m.step.rows.count; ++j) {
    const int64_t r = m.answer.rows[static_cast<size_t>(j)];
    m.row_positions.as<int64_t>()[j] = r < 0 ? -1 : data.rows[static_cast<size_t>(r)].token;
  }
  m.step.gate = m.gate.view(), m.step.ape = m.ape.view(), m.step.positions = m.row_positions.view();
  m.step.tail = replica.tail().view(), m.step.tail_slots = m.tail_slots.view();
}

void set_outputs(const ClusterSpec& spec, const StepData& data, Made& m) {
  const int64_t rows = m.step.rows.count;
  Answer& a = m.answer;
  a.indices = Array(DType::i32, {rows, spec.columns() + 3}), a.slots = Array(DType::i32, {rows, spec.columns()});
  if (!spec.pools) a.scores = Array(DType::f32, {rows, spec.topk});
  a.counts = Array(DType::i32, {rows});
  const auto requests = static_cast<int64_t>(std::max<size_t>(1, data.turns.size()));
  m.attention = Array(DType::i32, {requests, spec.max_tokens / kAttentionPage + 1});
  for (int64_t i = 0; i < m.attention.size(); ++i) m.attention.as<int32_t>()[i] = static_cast<int32_t>(3 * i + 1);
  m.step.out.indices = a.indices.view(), m.step.out.slots = a.slots.view();
  m.step.out.scores = a.scores.view(), m.step.out.counts = a.counts.view();
  m.step.out.slot_map = {m.attention.view(), false, kAttentionPage};
  m.step.out.order = spec.order;
  if (spec.role == CandidateRole::none) return;
  a.candidates = pick(data.candidates, a.rows, 0xFF);
  m.step.candidates = a.candidates.view();
}

/// Queries, keys, windows and outputs of `rows`; slots of `stored`.
Made make_step(const ClusterSpec& spec, const StepData& data, const Replica& replica, std::vector<int64_t> rows,
               const std::vector<int64_t>& stored) {
  Made m;
  m.answer.rows = std::move(rows);
  m.q = pick(data.q, m.answer.rows, 0);
  if (data.q_scales) m.q_scales = pick(data.q_scales, m.answer.rows, 0);
  m.weights = pick(data.weights, m.answer.rows, 0);
  m.k = pick(data.k, m.answer.rows, 0xFF);  // NaN where there is no token
  m.step.q = {m.q.view(), m.q_scales.view(), m.weights.view()};
  m.step.k = m.k.view();
  m.table = replica.table(data);
  m.step.keys = {replica.cache(), replica.shard(), m.table.view(), false};
  set_windows(spec, data, replica.shard(), m);
  set_slots(spec, data, replica, stored, m);
  set_pools(spec, data, replica, m);
  set_outputs(spec, data, m);
  m.step.num_decode_rows = data.decode_rows;
  if (spec.change != nullptr) spec.change(m.step);
  return m;
}

/// Rows of each rank: cut by the plan where it cuts, else all on the last rank.
std::vector<int64_t> slices(const ClusterSpec& spec, const StepData& data) {
  std::vector<int64_t> query, seq;
  std::vector<uint8_t> prefilling;
  for (const Turn& t : data.turns) {
    query.push_back(t.rows), seq.push_back(t.cached + t.rows), prefilling.push_back(!t.decodes);
  }
  PlanStep p{};
  p.num_requests = static_cast<int64_t>(query.size()), p.query_lens = query.data(), p.seq_lens = seq.data();
  p.prefilling = prefilling.data(), p.extends_prefill = true, p.decode_threshold = 64, p.ratio = spec.ratio,
  p.row_shards = spec.world;
  std::vector<int64_t> sizes = plan_step(p).row_shard_sizes;
  const int64_t rows = static_cast<int64_t>(data.rows.size()) - data.decode_rows;
  int64_t sum = 0;
  for (const int64_t n : sizes) sum += n;
  if (sum == rows && !sizes.empty()) return sizes;
  sizes.assign(static_cast<size_t>(spec.world), 0);
  sizes.back() = rows;
  return sizes;
}

/// Rows dealt to `rank` in turn, padded to as many as any rank has.
std::vector<int64_t> dealt(const StepData& data, int32_t rank, int32_t world, bool decode_too) {
  const auto rows = static_cast<int64_t>(data.rows.size()), first = decode_too ? 0 : data.decode_rows;
  std::vector<int64_t> own;
  for (int64_t i = 0; i < (rows - first + world - 1) / world; ++i) {
    const int64_t row = first + i * world + rank;
    own.push_back(row < rows ? row : -1);
  }
  return own;
}

/// All tokens in order, whoever has their rows: what `dealt` has dealt, found again.
void set_tokens(const ClusterSpec& spec, const StepData& data, Made& m, ShardStep& shard) {
  const auto tokens = static_cast<int64_t>(data.rows.size()), own = spec.shard_decode ? 0 : data.decode_rows;
  const int64_t each = (tokens - own + spec.world - 1) / spec.world;
  m.token_order = Array(DType::i32, {tokens}), m.token_request = Array(DType::i32, {tokens});
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t dealt = t - own, at = dealt < 0 ? t : own + dealt % spec.world * each + dealt / spec.world;
    m.token_order.as<int32_t>()[t] = static_cast<int32_t>(at);
    m.token_request.as<int32_t>()[t] = static_cast<int32_t>(data.rows[static_cast<size_t>(t)].turn);
  }
  shard.token_order = m.token_order.view(), shard.token_request = m.token_request.view();
  shard.token_positions = m.positions.view();
}

/// Why this build has no such backend; empty: it has.
std::string unusable(const char* backend) {
  if (backend == nullptr) return {};  // some backend there always is
  for (const BackendInfo& b : backends()) {
    if (b.name == backend) return b.unusable;
  }
  return "no such backend";
}

void set_gathered(const ClusterSpec& spec, const StepData& data, Made& m, ShardStep& shard) {
  std::vector<int32_t> indptr{0}, start;
  for (const Turn& t : data.turns) {
    indptr.push_back(indptr.back() + static_cast<int32_t>((t.cached + t.rows) / spec.ratio));
  }
  for (const int64_t r : m.answer.rows) {
    start.push_back(r < 0 ? 0 : indptr[static_cast<size_t>(data.rows[static_cast<size_t>(r)].turn)]);
  }
  const int64_t total = indptr.back() + 3;  // a bound, not what it is
  m.indptr = Array::of(indptr), m.gathered_start = Array::of(start);
  m.values = Array(dense_dtype(spec.format), {total, dense_elements(spec.format, spec.head_dim)});
  if (spec.format == KeyFormat::fp8) m.scales = Array(DType::f32, {total});
  if (spec.format == KeyFormat::mxfp4) m.scales = Array(DType::u8, {total, spec.head_dim / 32});
  shard.gathered = {m.values.view(), m.scales.view(), spec.format};
  shard.key_indptr = m.indptr.view(), shard.total_keys = total, shard.gathered_start = m.gathered_start.view();
}

}  // namespace

const char* kind_name(Kind kind) {
  const char* names[] = {"context", "rows", "prefill", "prefill_context"};
  return names[static_cast<int>(kind)];
}

std::string ClusterSpec::text() const {
  return std::string(kind_name(kind)) + " world " + std::to_string(world) + " interleave " +
         std::to_string(interleave) + " " + format_name(format) + " topk " + std::to_string(topk) + " ratio " +
         std::to_string(ratio) + " page " + std::to_string(page_size) + " role " +
         std::to_string(static_cast<int>(role)) + " force " + std::to_string(force_first) + "/" +
         std::to_string(force_last) + " limit " + std::to_string(exchange_limit) + (starts ? " starts" : "") +
         (pools ? " pools" : "") + (padding > 0 ? " padding" : "") + (rope ? " rope" : "") +
         (shard_decode ? " shard_decode" : "") + " seed " + std::to_string(seed);
}

void ClusterSpec::suit(const std::string& backend) {
  static const std::vector<std::string> general = general_backends();
  if (std::find(general.begin(), general.end(), backend) == general.end()) format = KeyFormat::fp8, head_dim = 128;
}

StepData step_data(const ClusterSpec& spec, const std::vector<Turn>& turns, uint64_t seed) {
  StepData d;
  d.turns = turns;
  for (size_t b = 0; b < turns.size(); ++b) {
    for (int64_t j = 0; j < turns[b].rows; ++j) d.rows.push_back({static_cast<int64_t>(b), turns[b].cached + j});
    if (turns[b].decodes) d.decode_rows = static_cast<int64_t>(d.rows.size());
  }
  const auto rows = static_cast<int64_t>(d.rows.size());
  Random random(seed);
  const Array raw(DType::bf16, {rows, spec.heads, spec.head_dim}), weights(DType::f32, {rows, spec.heads});
  for (int64_t i = 0; i < raw.size(); ++i) raw.as<uint16_t>()[i] = float_to_bf16(random.normal());
  for (int64_t i = 0; i < weights.size(); ++i) weights.as<float>()[i] = random.normal();
  d.q = raw, d.weights = weights;
  if (const bool fp4 = spec.format == KeyFormat::mxfp4; fp4 || spec.format == KeyFormat::fp8) {
    d.q = Array(fp4 ? DType::u8 : DType::f8_e4m3fn, {rows, spec.heads, fp4 ? spec.head_dim / 2 : spec.head_dim});
    if (fp4) d.q_scales = Array(DType::u8, {rows, spec.heads, spec.head_dim / 32});
    d.weights = Array(DType::f32, {rows, spec.heads});
    QuantizeQ a{};
    a.q = raw.view(), a.weights = weights.view(), a.format = spec.format;
    a.q_out = d.q.view(), a.q_scales_out = d.q_scales.view(), a.weights_out = d.weights.view();
    if (rows > 0) run(a, Exec{});
  }
  d.k = Array(spec.pools ? DType::bf16 : DType::f32, {rows, spec.head_dim});
  if (spec.pools) d.gate = Array(DType::bf16, {rows, spec.head_dim});
  d.candidates = Array(DType::i32, {rows, spec.blocks});
  for (int64_t r = 0; r < rows; ++r) {
    const StepData::Row row = d.rows[static_cast<size_t>(r)];
    Random token((*turns[static_cast<size_t>(row.turn)].tokens)[static_cast<size_t>(row.token)]);
    for (int64_t i = r * spec.head_dim; i < (r + 1) * spec.head_dim; ++i) {
      if (!spec.pools) d.k.as<float>()[i] = token.normal();
      if (spec.pools) d.k.as<uint16_t>()[i] = float_to_bf16(token.normal());
      if (spec.pools) d.gate.as<uint16_t>()[i] = float_to_bf16(token.normal());
    }
    for (int32_t i = 0; i < spec.blocks; ++i) {
      d.candidates.as<int32_t>()[r * spec.blocks + i] =
          static_cast<int32_t>(random.between(-1, spec.max_tokens / spec.block_size));
    }
  }
  return d;
}

IndexerConfig indexer_config(const ClusterSpec& spec) {
  IndexerConfig c{};
  c.heads = spec.heads, c.head_dim = spec.head_dim, c.topk = spec.topk, c.format = spec.format;
  (spec.pools ? c.pool_size : c.ratio) = spec.ratio;
  c.role = spec.role, c.candidate_block_size = spec.block_size, c.candidate_topk_blocks = spec.blocks;
  if (spec.role == CandidateRole::none) c.candidate_block_size = c.candidate_topk_blocks = 0;
  c.force_first = spec.force_first, c.force_last = spec.force_last;
  return c;
}

ShardSpec shard_spec(const ClusterSpec& spec, int32_t rank) {
  ShardSpec s{};
  const bool context = spec.kind == Kind::context || spec.kind == Kind::prefill_context;
  const bool prefill = spec.kind == Kind::prefill || spec.kind == Kind::prefill_context;
  if (context) s.context = {rank, spec.world, spec.interleave};
  if (spec.kind == Kind::rows) s.row_rank = rank, s.row_shards = spec.world;
  if (prefill) s.prefill_rank = rank, s.prefill_size = spec.world, s.shard_decode = spec.shard_decode;
  s.exchange_limit = spec.exchange_limit;
  return s;
}

namespace {

/// A step of either layer, on one rank, in a workspace of what it asks for.
template <class Layer>
void run_alone(const Layer& layer, const ClusterSpec& spec, const Made& m, const Exec& exec) {
  const size_t bytes = layer.workspace_bytes({0, m.step.rows.count, 16, spec.max_tokens, 4}, exec);
  Exec own = exec;
  own.workspace = workspace_of(-1, bytes), own.workspace_bytes = bytes;
  forward_on_device(layer, m.step, own);
}

/// The same on one of several.
template <class Layer>
void run_rank(const Layer& layer, const ClusterSpec& spec, const Made& m, int32_t rank, const ShardStep& shard,
              const Exec& exec) {
  const ShardSpec cut = shard_spec(spec, rank);
  const IndexerLimits limits{0, std::max<int64_t>(1, m.step.rows.count), 16, spec.max_tokens, 4};
  // A backend that does not exist is for the step to complain of.
  size_t bytes = size_t{1} << 20;
  if (unusable(exec.backend).empty()) bytes = sharded_workspace_bytes(layer, limits, cut, exec);
  if (spec.without_workspace) bytes = 0;
  uint8_t* workspace = workspace_of(rank, bytes);
  Exec own = exec;
  own.workspace = workspace, own.workspace_bytes = bytes;
  forward_on_device(layer, m.step, {cut, shard}, own);
  if (!canaries_live(workspace, bytes)) throw std::logic_error("forward_sharded wrote past its workspace");
}

}  // namespace

Answer answer_alone(const ClusterSpec& spec, const Replica& replica, const StepData& data, const Exec& exec) {
  const std::vector<int64_t> all = count_up(0, static_cast<int64_t>(data.rows.size()));
  Made m = make_step(spec, data, replica, all, all);
  const IndexerConfig config = indexer_config(spec);
  if (spec.pools) {
    run_alone(SparseAttnIndexerKpool(config), spec, m, exec);
  } else {
    run_alone(SparseAttnIndexer(config), spec, m, exec);
  }
  return m.answer;
}

Answer answer_rank(const ClusterSpec& spec, const Replica& replica, const StepData& data, int32_t rank, Group group,
                   const Exec& exec) {
  const bool prefill = spec.kind == Kind::prefill || spec.kind == Kind::prefill_context;
  std::vector<int64_t> rows = count_up(0, static_cast<int64_t>(data.rows.size())), stored = rows;
  if (prefill) {
    rows = count_up(0, spec.shard_decode ? 0 : data.decode_rows);
    stored = spec.pools ? count_up(0, static_cast<int64_t>(data.rows.size())) : rows;
    for (int32_t r = 0; r < spec.world; ++r) {
      const std::vector<int64_t> own = dealt(data, r, spec.world, spec.shard_decode);
      if (!spec.pools) stored.insert(stored.end(), own.begin(), own.end());
      if (r == rank) rows.insert(rows.end(), own.begin(), own.end());
    }
  } else {
    rows.insert(rows.end(), static_cast<size_t>(spec.padding), -1);
    stored = rows;
  }
  Made m = make_step(spec, data, replica, rows, stored);
  if (spec.shard_decode) {
    m.step.num_decode_rows =
        std::count_if(rows.begin(), rows.end(), [&](int64_t r) { return r >= 0 && r < data.decode_rows; });
  }
  ShardStep shard{};
  shard.comm = group.comm, shard.prefill_comm = prefill ? group.prefill : nullptr;
  std::vector<int64_t> sizes = slices(spec, data);
  sizes.back() += spec.padding;
  if (spec.kind == Kind::rows) shard.row_shard_sizes = sizes.data();
  if (replica.shard().active()) {
    if (spec.starts) shard.whole_start = m.whole_start.view();
    shard.whole_end = m.whole_end.view();
  }
  if (spec.kind == Kind::prefill_context && replica.shard().active()) set_gathered(spec, data, m, shard);
  if (spec.pools && prefill) set_tokens(spec, data, m, shard);
  if (spec.change_rank != nullptr) spec.change_rank(shard);
  const IndexerConfig config = indexer_config(spec);
  if (spec.pools) {
    run_rank(SparseAttnIndexerKpool(config), spec, m, rank, shard, exec);
  } else {
    run_rank(SparseAttnIndexer(config), spec, m, rank, shard, exec);
  }
  return m.answer;
}

std::string difference(const Answer& alone, const Answer& rank) {
  const auto differ = [&](const char* what, const Array& a, const Array& b, int64_t width) -> std::string {
    if (!a) return {};
    for (size_t j = 0; j < rank.rows.size(); ++j) {
      const int64_t r = rank.rows[j], row = static_cast<int64_t>(j);
      for (int64_t i = 0; i < width && r >= 0; ++i) {
        const uint32_t x = a.as<uint32_t>()[r * width + i], y = b.as<uint32_t>()[row * width + i];
        if (x == y) continue;
        return std::string(what) + " of row " + std::to_string(r) + ", column " + std::to_string(i) + ": " +
               std::to_string(static_cast<int32_t>(y)) + ", alone " + std::to_string(static_cast<int32_t>(x));
      }
    }
    return {};
  };
  const int64_t topk = rank.slots.view().shape[1];
  std::string found = differ("index", alone.indices, rank.indices, topk + 3);
  if (found.empty()) found = differ("slot", alone.slots, rank.slots, topk);
  if (found.empty()) found = differ("score", alone.scores, rank.scores, topk);
  if (found.empty()) found = differ("count", alone.counts, rank.counts, 1);
  if (found.empty()) found = differ("block", alone.candidates, rank.candidates, alone.candidates.view().shape[1]);
  for (size_t j = 0; j < rank.rows.size() && found.empty(); ++j) {
    if (rank.rows[j] >= 0) continue;
    for (int64_t i = 0; i < topk + 3; ++i) {
      if (int_at(rank.indices.view(), static_cast<int64_t>(j), i) != -1) found = "a padding row was answered";
    }
  }
  return found;
}

std::vector<Thrown> run_ranks(int32_t world, const std::function<void(int32_t)>& body) {
  std::vector<Thrown> thrown(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] { thrown[static_cast<size_t>(rank)] = thrown_by([&] { body(rank); }); });
  }
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

}  // namespace topkey::testing
