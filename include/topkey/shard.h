// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// One answer on any number of ranks. A Communicator carries bytes between them: the caller's own (an engine's process
// group), MPI, NCCL, or threads of one process. The collectives below are called by every rank; results are the same
// bits on every rank and those of a single rank in the same arithmetic. A rank on which a collective throws tells its
// peers, which throw peer_error: nobody waits for ever. After that the communicator is of no more use.
#pragma once
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "topkey/cache.h"
#include "topkey/indexer.h"
#include "topkey/plan.h"
#include "topkey/topkey_shard_c.h"

namespace topkey {

/// The ranks of one group. Derive from it to bring a transport: two functions that move bytes in host memory, or in that
/// of the device and on the stream that the collectives are given.
class Communicator {
 public:
  /// flags: TOPKEY_COMM_BLOCKS where calls block the host; such a transport is refused under stream capture, and its
  /// calls get copies in host memory of what lies on a device, unless TOPKEY_COMM_DEVICE says that they take it.
  Communicator(int32_t rank, int32_t size, uint32_t flags = TOPKEY_COMM_BLOCKS);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator() = default;

  /// `bytes` of each rank, rank after rank, into receive [size * bytes]. send may be this rank's part of receive.
  virtual void all_gather(const void* send, void* receive, size_t bytes, void* stream) = 0;
  /// The same with bytes[r] of rank r.
  virtual void all_gatherv(const void* send, void* receive, const size_t* bytes, void* stream) = 0;
  /// This rank has failed: peers that wait for it should throw. A transport that cannot tell them does nothing.
  virtual void fail(const char* /*sentence*/) noexcept {}

  int32_t rank() const noexcept { return twin_.rank; }
  int32_t size() const noexcept { return twin_.size; }
  /// Bytes that collectives of the library have received from other ranks.
  uint64_t received_bytes() const noexcept { return twin_.received_bytes; }
  topkey_communicator* border() noexcept { return &twin_; }
  /// Throws what a callback threw during the failed call, if it did.
  void rethrow() {
    if (thrown_ != nullptr) std::rethrow_exception(std::exchange(thrown_, nullptr));
  }

 protected:
  explicit Communicator(const topkey_communicator& made) : twin_(made) {}
  topkey_communicator twin_;

 private:
  template <class Call>
  static topkey_status guarded(void* self, Call&& call) noexcept;
  std::exception_ptr thrown_;
  std::string failure_;
};

/// What all ranks must agree on. Zero = that cut is not used. Context with rows is refused, as is rows with prefill.
struct ShardSpec {
  uint32_t struct_size;
  /// Keys interleaved over ranks (decode context parallelism): step.keys.shard must be the same
  Shard context;
  /// Prefill rows in contiguous slices, one a rank, every rank with all keys (tensor parallelism)
  int32_t row_rank, row_shards;
  /// Every rank has query rows and new keys of its own (prefill context parallelism). Keys are gathered, answers are
  /// not: a rank's rows carry their own positions and lengths
  int32_t prefill_rank, prefill_size;
  bool shard_decode;      ///< prefill: decode rows are dealt out too; else every rank has them all, in front
  size_t exchange_limit;  ///< bytes received at once; 0 = 64 MiB. Rows are answered in chunks chosen from shapes alone
};

/// The sharded part of one step.
struct ShardStep {
  uint32_t struct_size;
  Communicator* comm;              ///< of the context ranks, or of the row ranks
  Communicator* prefill_comm;      ///< of the prefill ranks
  const int64_t* row_shard_sizes;  ///< host [row_shards] prefill rows of each rank (plan_step or row_shard_sizes)
  /// Context: i32 [R] the row's window in global key rows (pools in the k-pool layer). step.rows counts this rank's keys (expand_rows with the
  /// shard); these are for what speaks of the whole: rows.start (then whole_start is needed), candidates and forced
  /// keys, published blocks (whole_end)
  Tensor whole_start, whole_end;
  /// Prefill with context: the prefill rows search all keys of their requests, gathered from the context ranks into
  /// this memory [>= total_keys, ...]. key_indptr i32 [B+1] counts global key rows, total_keys bounds it;
  /// gathered_start i32 [R] is where the row's request begins; whole_end is needed
  DenseKeys gathered;
  Tensor key_indptr;
  int64_t total_keys;
  Tensor gathered_start;
  /// Prefill ranks of the k-pool layer: the T new tokens of all ranks as one rank has them, a request's side by side and
  /// ascending. token_order i32 [T]: where a token's k and gate lie, a row of this rank's decode rows and then the
  /// prefill rows of all ranks, rank after rank; of another number they are NaN. token_positions i32|i64 [T],
  /// token_request i32 [T] (< 0: padding). step.slot_mapping and step.tail_slots count these tokens too
  Tensor token_order, token_positions, token_request;
};

/// Row shards back into global order: rows [first_row + sizes before rank, + sizes[rank]) of every rank's buffer reach
/// all ranks, columns < width; other rows and columns are not touched. One exchange; in place where the rows are
/// contiguous. Strided buffers are staged in the workspace.
struct ExchangeRows {
  uint32_t struct_size;
  Tensor buffer;  ///< [rows, >=width] of any dtype, or [rows] with width 1
  int64_t width, first_row;
  const int64_t* row_shard_sizes;  ///< host [comm size]
};

namespace border {
struct ShardTwin : topkey_shard_step {
  explicit ShardTwin(const ShardStep& step) : topkey_shard_step() {
    struct_size = sizeof(topkey_shard_step);
    comm = step.comm == nullptr ? nullptr : step.comm->border();
    prefill_comm = step.prefill_comm == nullptr ? nullptr : step.prefill_comm->border();
    row_shard_sizes = step.row_shard_sizes;
    std::memcpy(&whole_start, &step.whole_start, sizeof whole_start);
    std::memcpy(&whole_end, &step.whole_end, sizeof whole_end);
    std::memcpy(&gathered, &step.gathered, sizeof gathered);
    std::memcpy(&key_indptr, &step.key_indptr, sizeof key_indptr);
    total_keys = step.total_keys;
    std::memcpy(&gathered_start, &step.gathered_start, sizeof gathered_start);
    std::memcpy(&token_order, &step.token_order, sizeof token_order);
    std::memcpy(&token_positions, &step.token_positions, sizeof token_positions);
    std::memcpy(&token_request, &step.token_request, sizeof token_request);
  }
};
/// What a collective threw: a callback's own exception, else the status.
inline void check_collective(topkey_status status, Communicator* a, Communicator* b = nullptr) {
  if (status == TOPKEY_OK) return;
  const Error error(static_cast<Status>(status), topkey_last_error());
  if (a != nullptr) a->rethrow();
  if (b != nullptr) b->rethrow();
  throw error;
}
inline size_t sized(size_t bytes) {
  if (bytes == SIZE_MAX) check(topkey_last_status());
  return bytes;
}
/// `run`, `ask`: a layer's functions of the C interface.
template <class Run>
void run_sharded(Run* run, const IndexerConfig& config, const IndexerStep& step, const ShardSpec& spec,
                 const ShardStep& shard, const Exec& exec) {
  const auto c_config = to_c<topkey_indexer_config>(config);
  const auto c_step = to_c<topkey_indexer_step>(step);
  const auto c_spec = to_c<topkey_shard_spec>(spec);
  const ShardTwin c_shard(shard);
  const auto c_exec = to_c<topkey_exec>(exec);
  check_collective(run(&c_config, &c_step, &c_spec, &c_shard, &c_exec), shard.comm, shard.prefill_comm);
}
template <class Ask>
size_t sharded_bytes(Ask* ask, const IndexerConfig& config, const IndexerLimits& limits, const ShardSpec& spec,
                     const Exec& exec) {
  const auto c_config = to_c<topkey_indexer_config>(config);
  const auto c_limits = to_c<topkey_indexer_limits>(limits);
  const auto c_spec = to_c<topkey_shard_spec>(spec);
  const auto c_exec = to_c<topkey_exec>(exec);
  return sized(ask(&c_config, &c_limits, &c_spec, &c_exec));
}
}  // namespace border

inline void exchange_rows(const ExchangeRows& args, Communicator& comm, const Exec& exec) {
  const auto c_args = border::to_c<topkey_exchange_rows_args>(args);
  const auto c_exec = border::to_c<topkey_exec>(exec);
  border::check_collective(topkey_exchange_rows(&c_args, comm.border(), &c_exec), &comm);
}
inline size_t exchange_rows_workspace_bytes(const ExchangeRows& args, Communicator& comm, const Exec& exec) {
  const auto c_args = border::to_c<topkey_exchange_rows_args>(args);
  const auto c_exec = border::to_c<topkey_exec>(exec);
  return border::sized(topkey_exchange_rows_workspace_bytes(&c_args, comm.border(), &c_exec));
}

/// gather_k over all ranks of args.keys.shard: out row i of request b is global key row i - indptr[b], indptr counts
/// global key rows, and every rank gets them all. Each rank reads what it owns; the parts are exchanged and put into
/// global order.
inline void gather_k_sharded(const GatherK& args, Communicator& comm, const Exec& exec) {
  const auto c_args = border::to_c<topkey_gather_k_args>(args);
  const auto c_exec = border::to_c<topkey_exec>(exec);
  border::check_collective(topkey_gather_k_sharded(&c_args, comm.border(), &c_exec), &comm);
}
inline size_t gather_k_sharded_workspace_bytes(const GatherK& args, const Exec& exec) {
  const auto c_args = border::to_c<topkey_gather_k_args>(args);
  const auto c_exec = border::to_c<topkey_exec>(exec);
  return border::sized(topkey_gather_k_sharded_workspace_bytes(&c_args, &c_exec));
}

/// A step of the layer on one of several ranks. Every rank calls it with the same configuration and rows.count (under
/// prefill: the same number of new keys; pad with slot -1). The first step of a communicator, of one that blocks every
/// step, compares what ranks must have alike before it writes, and throws on all of them, naming both, if they have not.
/// Prefill ranks: slot_mapping and rope.positions cover this rank's decode keys, then the prefill keys of all ranks, rank
/// after rank, with the slots of this rank's own cache. Under strict a wild value throws after the keys are stored.
/// exec.team must be absent. On a device all tensors lie there, all work goes to exec.stream, and a transport that does
/// not block can be captured from the second step on.
inline void forward_sharded(const SparseAttnIndexer& indexer, const IndexerStep& step, const ShardSpec& spec,
                            const ShardStep& shard, const Exec& exec) {
  border::run_sharded(topkey_indexer_forward_sharded, indexer.config(), step, spec, shard, exec);
}
/// Of the worst step within the limits, exchange included.
inline size_t sharded_workspace_bytes(const SparseAttnIndexer& indexer, const IndexerLimits& limits,
                                      const ShardSpec& spec, const Exec& exec) {
  return border::sharded_bytes(topkey_indexer_sharded_workspace_bytes, indexer.config(), limits, spec, exec);
}

/// The same for the layer over k-pools. A pool is what is cut and exchanged: context.interleave counts pools, step.rows
/// this rank's pools (expand_rows with the shard and ratio pool_size), slot_mapping has the pools that this rank owns.
/// k, gate, positions, tail and tail slots are those of all rows on every rank: a pool may be completed by tokens of
/// earlier steps, whoever owns it. whole_end counts global pools. Winning pools are merged, then every rank expands
/// them by its own slot_map and appends the open pool. Row shards exchange pool ids, in the workspace. Prefill ranks
/// have k and gate of their own rows: decode rows in front (unless these are dealt out too), behind them as many rows as
/// every other rank has. They are gathered and put into the order of the tokens in the workspace, which holds all of
/// them, and every rank makes the pools whose slots it was given. step.positions are those of this rank's own rows.
inline void forward_sharded(const SparseAttnIndexerKpool& indexer, const IndexerStep& step, const ShardSpec& spec,
                            const ShardStep& shard, const Exec& exec) {
  border::run_sharded(topkey_indexer_kpool_forward_sharded, indexer.config(), step, spec, shard, exec);
}
inline size_t sharded_workspace_bytes(const SparseAttnIndexerKpool& indexer, const IndexerLimits& limits,
                                      const ShardSpec& spec, const Exec& exec) {
  return border::sharded_bytes(topkey_indexer_kpool_sharded_workspace_bytes, indexer.config(), limits, spec, exec);
}

/// plan_step(step).row_shard_sizes for devices that answer rows_at_once prefill rows side by side, and then the next ones:
/// a rank that gets a few rows more than full rounds would need a round for them, so shares end where rounds do if that is
/// sooner done. cuda.sm90 with fp8 keys: its SMs times 512 / heads (up to 64 heads; 1,056 rows on an H200 with 64).
/// 0 = not known: by cost alone.
inline std::vector<int64_t> row_shard_sizes(const PlanStep& step, int64_t rows_at_once) {
  const auto args = border::to_c<topkey_plan_step_args>(step);
  std::vector<int64_t> sizes(static_cast<size_t>(step.row_shards > 1 ? step.row_shards : 0));
  sizes.resize(static_cast<size_t>(border::counted(topkey_row_shard_sizes(&args, rows_at_once, sizes.data()))));
  return sizes;
}

// ---- transports -----------------------------------------------------------------------------------------------------

template <class Call>
topkey_status Communicator::guarded(void* self, Call&& call) noexcept {
  auto* comm = static_cast<Communicator*>(self);
  try {
    call(*comm);
    return TOPKEY_OK;
  } catch (const std::exception& e) {
    comm->thrown_ = std::current_exception();
    try {
      comm->failure_ = e.what();
    } catch (...) {
      comm->failure_.clear();
    }
  } catch (...) {
    comm->thrown_ = std::current_exception();
    comm->failure_.clear();
  }
  return TOPKEY_PEER_ERROR;
}

inline Communicator::Communicator(int32_t rank, int32_t size, uint32_t flags) : twin_() {
  twin_.struct_size = sizeof twin_;
  twin_.rank = rank;
  twin_.size = size;
  twin_.flags = flags;
  twin_.ctx = this;
  twin_.all_gather = [](void* self, const void* send, void* receive, size_t bytes, void* stream) noexcept {
    return guarded(self, [&](Communicator& c) { c.all_gather(send, receive, bytes, stream); });
  };
  twin_.all_gatherv = [](void* self, const void* send, void* receive, const size_t* bytes, void* stream) noexcept {
    return guarded(self, [&](Communicator& c) { c.all_gatherv(send, receive, bytes, stream); });
  };
  twin_.fail = [](void* self, const char* sentence) noexcept { static_cast<Communicator*>(self)->fail(sentence); };
  twin_.failure = [](void* self) noexcept { return static_cast<Communicator*>(self)->failure_.c_str(); };
}

namespace border {
/// A transport of the library's own.
class MadeCommunicator final : public Communicator {
 public:
  explicit MadeCommunicator(const topkey_communicator& made) : Communicator(made) {}
  ~MadeCommunicator() override { twin_.release(twin_.ctx); }
  void all_gather(const void* send, void* receive, size_t bytes, void* stream) override {
    require(twin_.all_gather(twin_.ctx, send, receive, bytes, stream));
  }
  void all_gatherv(const void* send, void* receive, const size_t* bytes, void* stream) override {
    require(twin_.all_gatherv(twin_.ctx, send, receive, bytes, stream));
  }
  void fail(const char* sentence) noexcept override { twin_.fail(twin_.ctx, sentence); }

 private:
  void require(topkey_status status) const {
    if (status != TOPKEY_OK) throw Error(static_cast<Status>(status), twin_.failure(twin_.ctx));
  }
};
}  // namespace border

/// Ranks as threads of this process, one communicator for each; any thread may use one. A peer that does not arrive
/// within `seconds` (0 = 60), or whose communicator is gone, ends in peer_error naming it.
inline std::vector<std::unique_ptr<Communicator>> local_communicators(int32_t size, double seconds = 0) {
  std::vector<topkey_communicator> made(static_cast<size_t>(size > 0 ? size : 0));
  border::check(topkey_local_communicators(size, seconds, made.data()));
  std::vector<std::unique_ptr<Communicator>> all;
  for (const topkey_communicator& one : made) all.push_back(std::make_unique<border::MadeCommunicator>(one));
  return all;
}
/// mpi_comm: an MPI_Comm*, null = the world. Calls block; a peer that does not answer within `seconds` ends in
/// peer_error. MPI is started where it is not yet, and ended with the last communicator where the library started it.
inline std::unique_ptr<Communicator> mpi_communicator(const void* mpi_comm = nullptr, double seconds = 0) {
  topkey_communicator made{};
  border::check(topkey_mpi_communicator(mpi_comm, seconds, &made));
  return std::make_unique<border::MadeCommunicator>(made);
}
/// nccl_comm: an ncclComm_t, which stays the caller's; calls are enqueued on the stream. After a peer_error that names
/// the time limit it has been aborted and must not be destroyed again. A non-blocking one is also given up while NCCL
/// still connects.
inline std::unique_ptr<Communicator> nccl_communicator(void* nccl_comm, double seconds = 0) {
  topkey_communicator made{};
  border::check(topkey_nccl_communicator(nccl_comm, seconds, &made));
  return std::make_unique<border::MadeCommunicator>(made);
}

}  // namespace topkey
