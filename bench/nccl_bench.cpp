// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What two GPUs take beside one, as graph replays over NCCL, one thread a rank: decode with the keys of each request dealt
// over the ranks (local search, exchange and merge also by themselves), prefill with the rows cut in two. Times are those
// of the slower rank, from when both have begun: they meet on their streams just before. Usage: topkey_nccl_bench
// [--backend NAME] [--json FILE] [--only decode|prefill|exchange] [--memory plain|window]; window: the winners' memory is
// registered with NCCL (ncclCommWindowRegister), which then has quicker ways to move it.
#include <nccl.h>

#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "bench/gpu_data.h"
#include "bench/gpu_timer.h"

namespace topkey::bench {
namespace {

using Json = nlohmann::ordered_json;
constexpr int kRanks = 2, kRounds = 15, kInterleave = 64;

void must_nccl(ncclResult_t code) {
  if (code != ncclSuccess) throw std::runtime_error(ncclGetErrorString(code));
}

struct Options {
  std::string backend, json, only, memory = "plain";
};

/// Device memory, until the program ends.
void* room_of(size_t bytes) {
  void* data = nullptr;
  must(cudaMalloc(&data, std::max<size_t>(bytes, 256)));
  return data;
}

class Rank {
 public:
  Rank(int rank, const ncclUniqueId& id, std::barrier<>& gate, std::string backend)
      : rank_(rank), gate_(gate), backend_(std::move(backend)) {
    must(cudaSetDevice(rank));
    prepare(Device::cuda, rank);
    timer_ = std::make_unique<Timer>();
    must_nccl(ncclCommInitRank(&nccl_, kRanks, id, rank));
    comm_ = nccl_communicator(nccl_);
    mark_ = static_cast<char*>(room_of(kRanks));
  }
  ~Rank() {
    comm_.reset();
    ncclCommDestroy(nccl_);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  Communicator& comm() { return *comm_; }
  cudaStream_t stream() const { return timer_->stream(); }
  template <class Ask>
  Exec exec(Ask&& workspace) const {
    Exec e{};
    e.device = Device::cuda, e.device_id = rank_, e.stream = stream(), e.backend = backend_.c_str();
    e.workspace_bytes = workspace(e);
    e.workspace = room_of(e.workspace_bytes);
    return e;
  }
  /// Memory that both ranks exchange from here on: registered at the same place of both.
  char* exchanged(size_t bytes, const std::string& memory) {
    if (memory != "window") return static_cast<char*>(room_of(bytes));
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    void* data = nullptr;
    ncclWindow_t window{};
    must_nccl(ncclMemAlloc(&data, bytes));
    must_nccl(ncclCommWindowRegister(nccl_, data, bytes, &window, NCCL_WIN_COLL_SYMMETRIC));
    return static_cast<char*>(data);
#else
    throw std::runtime_error("--memory window needs NCCL 2.27");
#endif
  }
  /// Median of replays that all ranks begin together: what they start apart would count as exchange.
  double time(const std::function<void()>& call) {
    call(), meet();  // NCCL connects
    must(cudaStreamSynchronize(stream()));
    gate_.arrive_and_wait();
    // A graph too: the host must be done with the launches before the flush is.
    const Graph graph(stream(), call), meeting(stream(), [&] { meet(); });
    std::vector<double> all;
    for (int i = 0; i < kRounds; ++i) {
      gate_.arrive_and_wait();
      all.push_back(timer_->once_behind([&] { meeting.launch(); }, [&] { graph.launch(); }));
    }
    std::sort(all.begin(), all.end());
    return all[all.size() / 2];
  }

 private:
  void meet() { must_nccl(ncclAllGather(mark_ + rank_, mark_, 1, ncclUint8, nccl_, stream())); }

  int rank_;
  std::barrier<>& gate_;
  std::string backend_;
  std::unique_ptr<Timer> timer_;
  ncclComm_t nccl_{};
  std::unique_ptr<Communicator> comm_;
  char* mark_ = nullptr;
};

/// Contents are drawn by one thread at a time: samples are shared.
std::unique_ptr<GpuData> data_of(const GpuCase& c) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  return std::make_unique<GpuData>(c);
}

GpuCase decode_case(int64_t rows, int64_t keys) {
  GpuCase c;
  c.suite = "decode", c.op = "paged_mqa_topk", c.rows = rows, c.keys = keys;
  return c;
}

struct Parts {
  double one = 0, local = 0, exchange = 0, merge = 0, whole = 0;
};

/// One GPU with all keys; then this rank with its half of them.
Parts decode_parts(Rank& r, int rank, int64_t rows, int64_t keys, const std::string& memory) {
  Parts p;
  {
    const auto data = data_of(decode_case(rows, keys));
    const Exec exec = r.exec([&](const Exec& e) { return data->workspace_bytes(e); });
    p.one = r.time([&] { data->call(exec); });
    must(cudaFree(exec.workspace));
  }
  const GpuCase half = decode_case(rows, keys / kRanks);
  const auto data = data_of(half);
  const int64_t topk = half.topk, part = rows * topk * 8;
  char* received = r.exchanged(static_cast<size_t>(part * kRanks), memory);
  auto* sent = received + rank * part;  // in its place, as the layer does it
  PagedMqaTopk local = data->paged();
  local.keys.shard = {rank, kRanks, kInterleave};
  local.out = {};
  local.out.scores = tensor(sent, DType::f32, {rows, topk});
  local.out.indices = tensor(sent + rows * topk * 4, DType::i32, {rows, topk});
  MergeTopk merge{};
  merge.scores = tensor(received, DType::f32, {kRanks, rows, topk}, {rows * topk * 2, topk, 1});
  merge.indices = tensor(received + rows * topk * 4, DType::i32, {kRanks, rows, topk}, {rows * topk * 2, topk, 1});
  merge.topk = static_cast<int32_t>(topk), merge.rows.count = rows;
  merge.out.indices = tensor(room_of(static_cast<size_t>(rows * topk * 4)), DType::i32, {rows, topk});
  const Exec exec = r.exec([&](const Exec& e) {
    return std::max(paged_mqa_topk_workspace_bytes(local, e), merge_topk_workspace_bytes(merge, e));
  });
  const auto search = [&] { paged_mqa_topk(local, exec); };
  const auto exchange = [&] { r.comm().all_gather(sent, received, static_cast<size_t>(part), r.stream()); };
  const auto join = [&] { merge_topk(merge, exec); };
  p.local = r.time(search);
  p.exchange = r.time(exchange);
  p.merge = r.time(join);
  p.whole = r.time([&] { search(), exchange(), join(); });
  must(cudaFree(exec.workspace)), must(cudaFree(merge.out.indices.data));
  return p;
}

/// An all-gather of so many bytes of each rank.
Parts exchange_parts(Rank& r, int rank, int64_t bytes, const std::string& memory) {
  char* received = r.exchanged(static_cast<size_t>(bytes * kRanks), memory);
  Parts p;
  p.exchange = p.whole =
      r.time([&] { r.comm().all_gather(received + rank * bytes, received, static_cast<size_t>(bytes), r.stream()); });
  return p;
}

/// Rows [first, first + count) of a prefill; absent tensors stay so.
MqaTopk rows_of(const MqaTopk& whole, int64_t first, int64_t count) {
  MqaTopk a = whole;
  a.rows.count = count;
  for (Tensor* t : {&a.q.values, &a.q.weights, &a.rows.end, &a.out.indices}) {
    t->data = static_cast<char*>(t->data) + first * t->stride[0] * static_cast<int64_t>(support::dtype_bytes(t->dtype));
    t->shape[0] = count;
  }
  return a;
}

Parts prefill_parts(Rank& r, int rank, int64_t rows, int64_t keys) {
  Parts p;
  GpuCase c;
  c.suite = "prefill", c.op = "mqa_topk", c.rows = rows, c.keys = keys;
  const auto data = data_of(c);
  PlanStep step{};
  const uint8_t prefilling = 1;
  step.num_requests = 1, step.query_lens = &rows, step.seq_lens = &keys, step.prefilling = &prefilling;
  step.decode_threshold = 1, step.row_shards = kRanks;
  cudaDeviceProp facts{};
  must(cudaGetDeviceProperties(&facts, rank));
  // Rows that the kernel works on at a time: a tile on each SM.
  const std::vector<int64_t> sizes = row_shard_sizes(step, int64_t{facts.multiProcessorCount} * 512 / c.heads);
  if (sizes.size() != kRanks) throw std::runtime_error("the plan does not cut the rows");
  const MqaTopk& whole = data->dense();
  const MqaTopk own = rows_of(whole, rank == 0 ? 0 : sizes[0], sizes[static_cast<size_t>(rank)]);
  ExchangeRows e{};
  e.buffer = whole.out.indices, e.width = whole.topk, e.row_shard_sizes = sizes.data();
  const Exec exec = r.exec([&](const Exec& x) { return mqa_topk_workspace_bytes(whole, x); });
  p.one = r.time([&] { mqa_topk(whole, exec); });
  p.local = r.time([&] { mqa_topk(own, exec); });
  p.exchange = r.time([&] { exchange_rows(e, r.comm(), exec); });
  p.whole = r.time([&] { mqa_topk(own, exec), exchange_rows(e, r.comm(), exec); });
  must(cudaFree(exec.workspace));
  return p;
}

/// body(rank's parts) on both; the slower one counts.
Json both(const char* name, double most, std::unique_ptr<Rank>* ranks, const std::function<Parts(Rank&, int)>& body) {
  Parts parts[kRanks];
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        must(cudaSetDevice(rank));
        parts[rank] = body(*ranks[rank], rank);
      } catch (const std::exception& e) {  // the other rank waits for this one: nothing can follow
        std::fprintf(stderr, "topkey_nccl_bench: rank %d: %s\n", rank, e.what());
        std::_Exit(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto slower = [&](double Parts::*of) { return std::max(parts[0].*of, parts[1].*of); };
  const double one = slower(&Parts::one), whole = slower(&Parts::whole);
  if (one == 0) {  // there is nothing of the kind on one GPU
    std::printf("%-20s %8.1f us\n", name, whole);
    std::fflush(stdout);
    return {{"case", name}, {"ranks", kRanks}, {"graph", true}, {"median_us", whole}};
  }
  std::printf("%-20s one GPU %8.1f us, two %8.1f us: %.3f, at most %.2f; local %8.1f, exchange %7.1f, merge %6.1f\n",
              name, one, whole, whole / one, most, slower(&Parts::local), slower(&Parts::exchange),
              slower(&Parts::merge));
  std::fflush(stdout);
  return {{"case", name},
          {"ranks", kRanks},
          {"graph", true},
          {"one_us", one},
          {"median_us", whole},
          {"times", whole / one},
          {"at_most", most},
          {"local_us", slower(&Parts::local)},
          {"exchange_us", slower(&Parts::exchange)},
          {"merge_us", slower(&Parts::merge)}};
}

void run(const Options& o) {
  int gpus = 0;
  must(cudaGetDeviceCount(&gpus));
  if (gpus < kRanks) throw std::runtime_error("two GPUs are needed, got " + std::to_string(gpus));
  ncclUniqueId id{};
  must_nccl(ncclGetUniqueId(&id));
  std::barrier<> gate(kRanks);
  std::unique_ptr<Rank> ranks[kRanks];
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] { ranks[rank] = std::make_unique<Rank>(rank, id, gate, o.backend); });
  }
  for (std::thread& thread : threads) thread.join();
  Json rows = Json::array();
  const auto decode = [&](const char* name, double most, int64_t requests) {
    rows.push_back(
        both(name, most, ranks, [&](Rank& r, int rank) { return decode_parts(r, rank, requests, 131072, o.memory); }));
  };
  if (o.only == "exchange") {
    for (const int64_t kib : {256, 1024, 2048, 8192}) {
      rows.push_back(both(("exchange " + std::to_string(kib) + " KiB").c_str(), 0, ranks,
                          [&](Rank& r, int rank) { return exchange_parts(r, rank, kib * 1024, o.memory); }));
    }
  }
  if (o.only.empty() || o.only == "decode") {
    decode("decode 64 x 128K", 0.62, 64);
    decode("decode 16 x 128K", 0.85, 16);
  }
  if (o.only.empty() || o.only == "prefill") {
    rows.push_back(both("prefill 8192 x 65536", 0.54, ranks,
                        [](Rank& r, int rank) { return prefill_parts(r, rank, 8192, 65536); }));
  }
  if (!o.json.empty()) {
    std::ofstream(o.json) << Json{{"backend", o.backend}, {"memory", o.memory}, {"rows", rows}}.dump(1) << "\n";
  }
}

}  // namespace
}  // namespace topkey::bench

int main(int argc, char** argv) {
  topkey::bench::Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--backend") == 0) o.backend = argv[i + 1];
    if (std::strcmp(argv[i], "--json") == 0) o.json = argv[i + 1];
    if (std::strcmp(argv[i], "--only") == 0) o.only = argv[i + 1];
    if (std::strcmp(argv[i], "--memory") == 0) o.memory = argv[i + 1];
  }
  for (const topkey::BackendInfo& info : topkey::backends()) {
    if (o.backend.empty() && info.device == topkey::Device::cuda && info.unusable.empty()) o.backend = info.name;
  }
  try {
    topkey::bench::run(o);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "topkey_nccl_bench: %s\n", e.what());
    return 1;
  }
}
