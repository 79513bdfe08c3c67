// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See ranks.h. The trace's keys are dealt out to the ranks as engines deal them; each then takes a step of the layer
// with the keys already stored. Keys that are pools go to the layer over k-pools.
#include "ranks.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <thread>

#include "study.h"
#include "support/array.h"
#include "support/call_outputs.h"
#include "support/oracle.h"
#include "support/scaling.h"

namespace topkey::cli {
namespace {

using support::Array;

constexpr int32_t kMostPool = 1024;  ///< tokens of a key, as pool_k has them

/// What a rank reports; sent as it is.
struct RankReport {
  double rows, pairs, received, seconds, same;
};

/// The call as all ranks see it, and what one rank has answered.
struct Whole {
  const PagedMqaTopk& args;
  std::vector<Window> windows;
  std::vector<int64_t> lens;  ///< key rows of each request that some row sees: all there, in known pages
  int64_t widest = 0;         ///< keys of the widest window
  int32_t pool_size = 1;      ///< tokens of a key
  Tensor positions{};         ///< of rows, where keys are pools; optional
  Selection want{};

  bool pools() const { return pool_size > 1; }
  int64_t topk() const { return int64_t{args.topk} * pool_size; }
  /// Columns of an answer: pools are expanded, and the open one stands behind them.
  int64_t columns() const { return topk() + (positions.data != nullptr ? pool_size - 1 : 0); }
};

/// Whether a row says that it sees keys which max_len or the table leave out: the newest block is told from that.
bool any_is_cut(const PagedMqaTopk& args, const std::vector<Window>& windows) {
  const Tensor& table = args.keys.block_table;
  const int64_t columns = table.shape[1] * args.keys.cache.page_size;
  for (int64_t r = 0; r < args.rows.count; ++r) {
    const Window& window = windows[static_cast<size_t>(r)];
    const int64_t tables = args.keys.table_per_row ? -1 : table.shape[0];
    if (window.size() > 0 && support::row_range(args.rows, r, columns, tables).end > window.end) return true;
  }
  return false;
}

/// Pools are named by the trace's metadata, the rows' tokens by its positions.
void set_pools(const support::Trace& trace, Whole& w) {
  const std::string size = trace.text("pool_size", "1");
  int32_t number = 0;
  const auto [end, error] = std::from_chars(size.data(), size.data() + size.size(), number);
  const bool whole = error == std::errc() && end == size.data() + size.size();
  if (!whole || number < 1 || number > kMostPool || int64_t{number} * w.args.topk > INT32_MAX)
    throw Failure(fmt::format("--ranks wants a pool_size from 1 to {}, with topk * pool_size under 2^31, got {}",
                              kMostPool, support::shown(size)));
  w.pool_size = number;
  if (!w.pools()) return;
  w.want = {};  // the call has answered with pools
  const bool from_0 = std::all_of(w.windows.begin(), w.windows.end(), [](const Window& v) { return v.start == 0; });
  if (!from_0) throw Failure("--ranks wants windows from 0 where keys are pools");
  const support::TraceTensor* positions = trace.find("positions");
  if (positions == nullptr) return;
  w.positions = support::view(*positions, "positions");
  const bool ints = w.positions.dtype == DType::i32 || w.positions.dtype == DType::i64;
  if (!ints || w.positions.ndim != 1 || w.positions.shape[0] < w.args.rows.count)
    throw Failure("--ranks wants positions of every row, i32 or i64");
}

Whole whole_of(const support::Call& call) {
  const auto* args = std::get_if<PagedMqaTopk>(&call.args());
  if (args == nullptr) throw Failure("--ranks wants a trace of paged_mqa_topk, got " + call.op());
  if (args->keys.table_per_row || args->keys.shard.active()) throw Failure("--ranks wants one block table a request");
  if (args->out.blocks.data != nullptr && args->admit.candidates.data != nullptr) {
    throw Failure("--ranks wants candidates or published blocks, not both");
  }
  Whole w{*args, windows_of(call.args()), {}};
  w.want = args->out;
  set_pools(call.trace(), w);
  w.lens.assign(static_cast<size_t>(args->keys.block_table.shape[0]), 0);
  for (const Window& window : w.windows) {
    if (window.size() == 0) continue;
    int64_t& len = w.lens[static_cast<size_t>(window.request)];
    len = std::max(len, window.end);
    w.widest = std::max(w.widest, window.size());
  }
  if (args->out.blocks.data != nullptr && any_is_cut(*args, w.windows))
    throw Failure("--ranks wants windows inside max_len and the table where blocks are published");
  if (args->rows.max_len > 0 && args->rows.max_len < w.widest)
    throw Failure("--ranks wants windows of max_len keys at most");
  const Tensor& table = args->keys.block_table;
  for (int64_t b = 0; b < table.shape[0]; ++b) {
    const int64_t pages =
        (w.lens[static_cast<size_t>(b)] + args->keys.cache.page_size - 1) / args->keys.cache.page_size;
    bool known = pages <= table.shape[1];
    for (int64_t i = 0; known && i < pages; ++i) {
      const int64_t page = support::int_at(table, b, i);
      known = page >= 0 && page < args->keys.cache.pages.shape[0];
    }
    if (!known) throw Failure("--ranks wants a trace without page ids outside its cache");
  }
  return w;
}

/// A rank's own keys in a cache of its own.
struct OwnKeys {
  Array pages, table;
  PagedKeys keys{};
};

void copy_key(const KeyCache& from, int64_t page, int64_t row, const KeyCache& to, int64_t slot) {
  const PageLayout layout = page_layout(from.format, from.layout, from.page_size, from.head_dim);
  std::vector<uint8_t> values(static_cast<size_t>(layout.value)), scales(static_cast<size_t>(layout.scale));
  read_row(layout, static_cast<const uint8_t*>(from.pages.data) + page * from.pages.stride[0], row, values.data(),
           scales.data());
  write_row(layout, static_cast<uint8_t*>(to.pages.data) + slot / to.page_size * to.pages.stride[0],
            slot % to.page_size, values.data(), scales.data());
}

OwnKeys own_keys(const Whole& w, Shard shard) {
  const KeyCache& all = w.args.keys.cache;
  const int64_t size = all.page_size, requests = static_cast<int64_t>(w.lens.size());
  const int64_t longest = *std::max_element(w.lens.begin(), w.lens.end());
  const int64_t columns = std::max<int64_t>(1, (shard.local_length(longest) + shard.run() + size - 1) / size);
  const int64_t bytes = page_layout(all.format, all.layout, size, all.head_dim).page_bytes;
  OwnKeys own{Array(DType::u8, {requests * columns, (bytes + 3) / 4 * 4}), Array(DType::i32, {requests, columns}), {}};
  own.keys = w.args.keys;
  own.keys.shard = shard;
  own.keys.cache.pages = own.pages.view();
  own.keys.block_table = own.table.view();
  std::iota(own.table.as<int32_t>(), own.table.as<int32_t>() + own.table.size(), 0);
  for (int64_t b = 0; b < requests; ++b) {
    for (int64_t g = 0; g < w.lens[static_cast<size_t>(b)]; ++g) {
      if (!shard.owns(g)) continue;
      const int64_t page = support::int_at(w.args.keys.block_table, b, g / size);
      copy_key(all, page, g % size, own.keys.cache, b * columns * size + shard.local(g));
    }
  }
  return own;
}

Tensor picked(const Tensor& t, const std::vector<int64_t>& rows, std::vector<Array>& kept) {
  if (t.data == nullptr) return t;
  const auto n = static_cast<int64_t>(rows.size());
  const Array to = t.ndim == 1   ? Array(t.dtype, {n})
                   : t.ndim == 2 ? Array(t.dtype, {n, t.shape[1]})
                                 : Array(t.dtype, {n, t.shape[1], t.shape[2]});
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t i = 0; i < (t.ndim > 2 ? t.shape[1] : 1); ++i) {
      const size_t bytes = support::dtype_bytes(t.dtype) * static_cast<size_t>(t.ndim == 1 ? 1 : t.shape[t.ndim - 1]);
      std::memcpy(support::element(to.view(), r, i), support::element(t, rows[static_cast<size_t>(r)], i), bytes);
    }
  }
  return kept.emplace_back(to).view();
}

IndexerConfig config_of(const Whole& w) {
  const PagedMqaTopk& a = w.args;
  IndexerConfig c{};
  c.heads = static_cast<int32_t>(a.q.values.shape[1]), c.head_dim = a.keys.cache.head_dim;
  c.topk = static_cast<int32_t>(w.topk()), c.pool_size = w.pools() ? w.pool_size : 0;
  c.format = a.keys.cache.format, c.force_first = a.admit.force_first, c.force_last = a.admit.force_last;
  if (a.out.blocks.data != nullptr) {
    c.role = CandidateRole::source, c.candidate_block_size = a.out.block_size;
    c.candidate_topk_blocks = static_cast<int32_t>(a.out.blocks.shape[1]);
  } else if (a.admit.candidates.data != nullptr) {
    c.role = CandidateRole::consumer, c.candidate_block_size = a.admit.candidate_block_size;
    c.candidate_topk_blocks = static_cast<int32_t>(a.admit.candidates.shape[1]);
  }
  return c;
}

/// Contiguous rows for each rank with equal shares of the keys that they see.
std::vector<int64_t> balanced(const std::vector<Window>& windows, int32_t ranks) {
  std::vector<int64_t> sizes(static_cast<size_t>(ranks), 0);
  int64_t total = 0, before = 0;
  for (const Window& w : windows) total += w.size();
  for (const Window& w : windows) {
    const int64_t middle = 2 * before + w.size();
    ++sizes[static_cast<size_t>(total == 0 ? 0 : std::min<int64_t>(ranks - 1, middle * ranks / (2 * total)))];
    before += w.size();
  }
  return sizes;
}

/// One rank's step, with all that it borrows.
class Rank {
 public:
  Rank(const Whole& w, const RanksOptions& o, Communicator& comm, Communicator& prefill) : w_(w), comm_(comm) {
    spec_.context = {comm.rank(), comm.size(), o.interleave};
    for (int64_t r = 0; r < static_cast<int64_t>(w.windows.size()); ++r) rows_.push_back(r);
    shard_.comm = &comm;
    if (o.cut == "rows") {
      spec_.context = {}, spec_.row_rank = comm.rank(), spec_.row_shards = comm.size();
      sizes_ = balanced(w.windows, comm.size());
      shard_.row_shard_sizes = sizes_.data();
    } else if (o.cut == "prefill") {
      spec_.prefill_rank = comm.rank(), spec_.prefill_size = comm.size();
      shard_.prefill_comm = &prefill;
      std::vector<int64_t> own;
      for (const int64_t r : rows_) {
        if (r % comm.size() == comm.rank()) own.push_back(r);
      }
      rows_ = own;
    }
    // Every rank receives what all send: on threads of one process these buffers are in one memory.
    spec_.exchange_limit = std::max<size_t>((size_t{64} << 20) / static_cast<size_t>(comm.size()), 1);
    own_ = own_keys(w, spec_.context);
    make_step();
    if (o.cut == "prefill" && spec_.context.active()) make_gathered();
  }

  RankReport run(const std::string& backend, int threads) {
    const IndexerConfig config = config_of(w_);
    const double spent = w_.pools() ? step(SparseAttnIndexerKpool(config), backend, threads)
                                    : step(SparseAttnIndexer(config), backend, threads);
    const auto answered =
        spec_.row_shards > 1 ? sizes_[static_cast<size_t>(spec_.row_rank)] : static_cast<int64_t>(rows_.size());
    return {static_cast<double>(answered), pairs(), static_cast<double>(comm_.received_bytes()), spent,
            equal() ? 1.0 : 0.0};
  }
  /// Of all its rows.
  Selection answer() const {
    Selection out = step_.out;
    if (w_.args.out.blocks.data != nullptr) out.blocks = step_.candidates;
    return out;
  }

 private:
  /// Seconds of the step.
  template <class Layer>
  double step(const Layer& layer, const std::string& backend, int threads) {
    Exec exec{};
    exec.backend = backend.c_str(), exec.threads = threads;
    const auto most = static_cast<int64_t>(w_.windows.size());
    const IndexerLimits limits{0, most, static_cast<int64_t>(w_.lens.size()),
                               std::max(w_.widest, *std::max_element(w_.lens.begin(), w_.lens.end())), 1};
    exec.workspace_bytes = sharded_workspace_bytes(layer, limits, spec_, exec);
    // Not cleared: most of it is never touched, and there are as many of them as ranks.
    const std::unique_ptr<std::byte[]> memory(new std::byte[exec.workspace_bytes + 256]);
    exec.workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.get()) + 255) / 256 * 256);
    const double begin = now();
    forward_sharded(layer, step_, spec_, shard_, exec);
    return now() - begin;
  }

  /// A window's bound among this rank's keys. Uncut, a bound before the first key stays: winners are told from it.
  int32_t own_position(int64_t whole) const {
    const Shard& cut = spec_.context;
    return static_cast<int32_t>(cut.active() ? cut.local_length(std::max<int64_t>(0, whole)) : whole);
  }

  void make_step() {
    std::vector<int32_t> request, start, end, whole_start, whole_end;
    for (const int64_t r : rows_) {
      const Window& window = w_.windows[static_cast<size_t>(r)];
      request.push_back(window.size() == 0 ? -1 : static_cast<int32_t>(window.request));
      whole_start.push_back(static_cast<int32_t>(window.start)), whole_end.push_back(static_cast<int32_t>(window.end));
      start.push_back(own_position(window.start)), end.push_back(own_position(window.end));
    }
    const auto keep = [&](const std::vector<int32_t>& list) { return kept_.emplace_back(Array::of(list)).view(); };
    const bool starts = std::any_of(whole_start.begin(), whole_start.end(), [](int32_t s) { return s != 0; });
    const PagedMqaTopk& a = w_.args;
    step_.q = {picked(a.q.values, rows_, kept_), picked(a.q.scales, rows_, kept_), picked(a.q.weights, rows_, kept_)};
    step_.keys = own_.keys;
    step_.rows.count = static_cast<int64_t>(rows_.size());
    step_.rows.request = keep(request), step_.rows.end = keep(end);
    if (starts) step_.rows.start = keep(start);
    // No rank has more winners than keys, and rank 0 has the most. Uncut, a window may begin before the first key.
    const Shard most{0, spec_.context.world_size, spec_.context.interleave};
    const int64_t longest = *std::max_element(w_.lens.begin(), w_.lens.end());
    step_.rows.max_len = spec_.context.active() ? most.local_length(longest) : w_.widest;
    if (spec_.context.active()) {
      if (starts) shard_.whole_start = keep(whole_start);
      shard_.whole_end = keep(whole_end);
    }
    const int64_t n = step_.rows.count, columns = w_.columns();
    step_.out = a.out;
    step_.out.slots = step_.out.blocks = {}, step_.out.block_size = 0, step_.out.slot_map = {};
    step_.out.index_base = picked(a.out.index_base, rows_, kept_);
    step_.out.indices = kept_.emplace_back(DType::i32, std::initializer_list<int64_t>{n, columns}).view();
    // A pool's score is no token's.
    step_.out.scores = {};
    if (!w_.pools())
      step_.out.scores = kept_.emplace_back(DType::f32, std::initializer_list<int64_t>{n, columns}).view();
    step_.positions = picked(w_.positions, rows_, kept_);
    step_.out.counts = kept_.emplace_back(DType::i32, std::initializer_list<int64_t>{n}).view();
    step_.candidates = picked(a.out.blocks.data != nullptr ? a.out.blocks : a.admit.candidates, rows_, kept_);
  }

  void make_gathered() {
    std::vector<int32_t> indptr{0}, start;
    for (const int64_t n : w_.lens) indptr.push_back(indptr.back() + static_cast<int32_t>(n));
    for (const int64_t r : rows_) {
      const int64_t request = w_.windows[static_cast<size_t>(r)].request;
      const bool known = request >= 0 && request < static_cast<int64_t>(w_.lens.size());  // else a padding row
      start.push_back(known ? indptr[static_cast<size_t>(request)] : 0);
    }
    const KeyCache& cache = w_.args.keys.cache;
    const int64_t total = indptr.back();
    const std::initializer_list<int64_t> shape{total, dense_elements(cache.format, cache.head_dim)};
    shard_.gathered.values = kept_.emplace_back(dense_dtype(cache.format), shape).view();
    if (is_fp8(cache.format)) {
      shard_.gathered.scales = kept_.emplace_back(DType::f32, std::initializer_list<int64_t>{total}).view();
    } else if (cache.format == KeyFormat::mxfp4) {
      const int64_t groups = cache.head_dim / 32;
      shard_.gathered.scales = kept_.emplace_back(DType::u8, std::initializer_list<int64_t>{total, groups}).view();
    }
    shard_.gathered.format = cache.format;
    shard_.key_indptr = kept_.emplace_back(Array::of(indptr)).view();
    shard_.gathered_start = kept_.emplace_back(Array::of(start)).view();
    shard_.total_keys = total;
  }

  /// (row, key) pairs that this rank had to look at.
  double pairs() const {
    double sum = 0;
    int64_t first = 0, last = static_cast<int64_t>(rows_.size());
    if (spec_.row_shards > 1) {
      first = std::accumulate(sizes_.begin(), sizes_.begin() + spec_.row_rank, int64_t{0});
      last = first + sizes_[static_cast<size_t>(spec_.row_rank)];
    }
    const Shard cut = spec_.prefill_size > 1 ? Shard{} : spec_.context;
    for (int64_t i = first; i < last; ++i) {
      const Window& w = w_.windows[static_cast<size_t>(rows_[static_cast<size_t>(i)])];
      sum += static_cast<double>(cut.local_length(std::max<int64_t>(0, w.end)) -
                                 cut.local_length(std::max<int64_t>(0, w.start)));
    }
    return sum;
  }

  /// This rank's rows are those of the call as one rank has answered it.
  bool equal() {
    const auto same = [&](const Tensor& alone, const Tensor& own, size_t columns) {
      for (size_t i = 0; alone.data != nullptr && i < rows_.size(); ++i) {
        const auto row = static_cast<int64_t>(i);
        if (std::memcmp(support::element(alone, rows_[i]), support::element(own, row), 4 * columns) != 0) return false;
      }
      return true;
    };
    const Selection& a = w_.want;
    const auto columns = static_cast<size_t>(w_.columns());
    return same(a.indices, step_.out.indices, columns) && same(a.scores, step_.out.scores, columns) &&
           same(a.counts, step_.out.counts, 1) &&
           same(a.blocks, step_.candidates, static_cast<size_t>(std::max<int64_t>(0, a.blocks.shape[1])));
  }

  const Whole& w_;
  Communicator& comm_;
  ShardSpec spec_{};
  ShardStep shard_{};
  IndexerStep step_{};
  OwnKeys own_;
  std::vector<int64_t> rows_, sizes_;
  std::vector<Array> kept_;
};

std::vector<RankReport> reports_of(Communicator& comm, const RankReport& own) {
  std::vector<RankReport> all(static_cast<size_t>(comm.size()));
  comm.all_gather(&own, all.data(), sizeof own, nullptr);
  return all;
}

Exit print(const Whole& w, const std::vector<RankReport>& all, const RanksOptions& o, const char* transport) {
  double most = 0, sum = 0, received = 0;
  bool same = true;
  for (const RankReport& r : all) {
    most = std::max(most, r.pairs), sum += r.pairs, received += r.received;
    same = same && r.same == 1.0;
  }
  const double balance = sum > 0 ? most * static_cast<double>(all.size()) / sum : 1;
  if (o.json) {
    nlohmann::ordered_json json = {{"ranks", all.size()}, {"shard", o.cut},       {"transport", transport},
                                   {"balance", balance},  {"received", received}, {"equal", same}};
    if (w.pools()) json["pool_size"] = w.pool_size;
    for (const RankReport& r : all) {
      json["by_rank"].push_back(
          {{"rows", r.rows}, {"pairs", r.pairs}, {"received", r.received}, {"seconds", r.seconds}});
    }
    fmt::print("{}\n", json.dump(1));
    return same ? kDone : kDiffers;
  }
  fmt::print("\n{} rows on {} ranks ({}), cut by {}{}{}\n", w.windows.size(), all.size(), transport, o.cut,
             o.cut == "rows" ? "" : fmt::format(", interleave {}", o.interleave),
             w.pools() ? fmt::format("; keys are pools of {} tokens", w.pool_size) : "");
  fmt::print("  {:>4}  {:>8}  {:>12}  {:>14}  {:>10}\n", "rank", "rows", "row x key", "bytes received", "time");
  for (size_t r = 0; r < all.size(); ++r) {
    fmt::print("  {:>4}  {:>8.0f}  {:>12}  {:>14.0f}  {:>10}\n", r, all[r].rows, short_count(all[r].pairs),
               all[r].received, duration(all[r].seconds));
  }
  fmt::print("  balance (most work over mean work) {:.3f}; {:.0f} bytes exchanged in all\n", balance, received);
  fmt::print("  {} the answer of one rank, bit for bit\n", same ? "equal to" : "DIFFERS from");
  return same ? kDone : kDiffers;
}

int mpi_size() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    if (const char* text = std::getenv(name); text != nullptr) return std::atoi(text);
  }
  return 0;
}

Exit on_threads(const Whole& w, const std::string& backend, const RanksOptions& o) {
  const auto comms = local_communicators(o.ranks), prefill = local_communicators(o.ranks);
  std::vector<RankReport> all;
  std::vector<std::exception_ptr> thrown(static_cast<size_t>(o.ranks));
  std::vector<std::thread> threads;
  for (size_t r = 0; r < thrown.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        Rank rank(w, o, *comms[r], *prefill[r]);
        const std::vector<RankReport> reports = reports_of(*comms[r], rank.run(backend, 1));
        if (r == 0) all = reports;
      } catch (const std::exception& e) {
        thrown[r] = std::current_exception();
        comms[r]->fail(e.what()), prefill[r]->fail(e.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& one : thrown) {
    if (one != nullptr) std::rethrow_exception(one);
  }
  return print(w, all, o, "threads");
}

}  // namespace

Exit run_on_ranks(const support::Call& call, const std::string& backend, const RanksOptions& options) {
  Whole w = whole_of(call);
  if (w.windows.empty() || *std::max_element(w.lens.begin(), w.lens.end()) == 0)
    throw Failure("--ranks wants rows with keys");
  // Of pools' tokens one rank of the layer gives the measure.
  const auto alone = local_communicators(1);
  std::optional<Rank> one;
  if (w.pools()) one.emplace(w, RanksOptions{1}, *alone[0], *alone[0]).run(backend, 0);
  if (one) w.want = one->answer();
  RanksOptions o = options;
  const int processes = mpi_size();
  if (processes <= 1 && o.ranks < 1) {
    throw Failure(fmt::format("run: --ranks must be from 1 to 1024 without mpirun, got {}", o.ranks));
  }
  const bool from_0 = std::all_of(w.windows.begin(), w.windows.end(), [](const Window& v) { return v.start == 0; });
  if (o.cut == "prefill" && !from_0 && std::max(processes, o.ranks) > 1)
    throw Failure("--shard prefill wants windows from 0");
  if (processes <= 1) return on_threads(w, backend, o);
  if (o.ranks != 0 && o.ranks != processes) {
    throw Failure(fmt::format("--ranks must be the {} that mpirun has started, got {}", processes, o.ranks));
  }
  const auto comm = mpi_communicator(), prefill = mpi_communicator();
  Rank rank(w, o, *comm, *prefill);
  const std::vector<RankReport> all = reports_of(*comm, rank.run(backend, 0));
  if (comm->rank() == 0) return print(w, all, o, "MPI");
  return std::all_of(all.begin(), all.end(), [](const RankReport& r) { return r.same == 1.0; }) ? kDone : kDiffers;
}

}  // namespace topkey::cli
