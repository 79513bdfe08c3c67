// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The exported symbols of sharding. A collective that fails on this rank tells its peers before it returns.
#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "border.h"
#include "check.h"
#include "plan.h"
#include "shard.h"

using namespace topkey;  // the symbols below are C; their bodies are not

namespace {

bool callable(const topkey_communicator* comm) {
  return comm != nullptr && (comm->struct_size == 0 || comm->struct_size >= sizeof *comm);
}

void tell(const topkey_communicator* comm, const char* sentence) {
  if (callable(comm) && comm->fail != nullptr) comm->fail(comm->ctx, sentence);
}

template <class Body>
topkey_status collective(std::initializer_list<topkey_communicator*> comms, Body&& body) noexcept {
  const topkey_status status = guard(body);
  if (status == TOPKEY_OK) return status;
  for (const topkey_communicator* comm : comms) tell(comm, kept_error());
  return status;
}

double patience(const char* op, double seconds) {
  const Check c(op, Mode::call);
  TOPKEY_REQUIRE(c, seconds >= 0 && seconds < 1e9, "seconds", "from 0 to 1e9", std::to_string(seconds));
  return seconds > 0 ? seconds : 60.0;
}

void require_given(const char* op, const void* pointer, const char* name) {
  TOPKEY_REQUIRE(Check(op, Mode::call), pointer != nullptr, name, "a struct", "null");
}

struct StepTwin {
  const topkey_indexer_config* config;
  const topkey_indexer_step* step;
  const topkey_shard_spec* spec;
  const topkey_shard_step* inputs;
  const topkey_exec* exec;
};

topkey_status forward(const StepTwin& a, bool pools) noexcept {
  const topkey_shard_step none{};
  const topkey_shard_step& in = a.inputs != nullptr ? *a.inputs : none;
  return collective({in.comm, in.prefill_comm}, [&] {
    shard::Step s{};
    s.pools = pools;
    s.config = from_c<IndexerConfig>(s.op(), "config", a.config);
    s.step = from_c<IndexerStep>(s.op(), "step", a.step);
    s.spec = from_c<ShardSpec>(s.op(), "spec", a.spec);
    s.in = from_c<shard::Inputs>(s.op(), "shard", a.inputs);
    const Exec e = from_c<Exec>(s.op(), "exec", a.exec);
    validate(s, e);
    shard::forward(s, e);
  });
}

struct LimitsTwin {
  const topkey_indexer_config* config;
  const topkey_indexer_limits* limits;
  const topkey_shard_spec* spec;
  const topkey_exec* exec;
};

size_t step_bytes(const LimitsTwin& a, bool pools) noexcept {
  size_t bytes = SIZE_MAX;
  guard([&] {
    const char* op = pools ? "indexer_kpool_sharded_workspace_bytes" : "indexer_sharded_workspace_bytes";
    const shard::WorstStep worst{from_c<IndexerConfig>(op, "config", a.config),
                                 from_c<IndexerLimits>(op, "limits", a.limits), from_c<ShardSpec>(op, "spec", a.spec),
                                 pools};
    validate(worst.spec, op);
    bytes = shard::workspace_bytes(worst, from_c<Exec>(op, "exec", a.exec));
  });
  return bytes;
}

}  // namespace

extern "C" {

topkey_status topkey_exchange_rows(const topkey_exchange_rows_args* args, topkey_communicator* comm,
                                   const topkey_exec* exec) {
  return collective({comm}, [&] {
    const char* op = "exchange_rows";
    const ExchangeRows a = from_c<ExchangeRows>(op, "args", args);
    const Exec e = from_c<Exec>(op, "exec", exec);
    validate_communicator(op, "comm", comm);
    validate(a, comm);
    shard::exchange_rows(a, *comm, e);
  });
}

size_t topkey_exchange_rows_workspace_bytes(const topkey_exchange_rows_args* args, const topkey_communicator* comm,
                                            const topkey_exec* exec) {
  size_t bytes = SIZE_MAX;
  guard([&] {
    const char* op = "exchange_rows";
    const ExchangeRows a = from_c<ExchangeRows>(op, "args", args);
    from_c<Exec>(op, "exec", exec);
    validate_communicator(op, "comm", comm);
    validate(a, comm);
    bytes = shard::exchange_rows_bytes(a, *comm);
  });
  return bytes;
}

topkey_status topkey_gather_k_sharded(const topkey_gather_k_args* args, topkey_communicator* comm,
                                      const topkey_exec* exec) {
  return collective({comm}, [&] {
    const char* op = "gather_k_sharded";
    const GatherK a = from_c<GatherK>(op, "args", args);
    const Exec e = from_c<Exec>(op, "exec", exec);
    validate_communicator(op, "comm", comm);
    validate_sharded(a, comm);
    shard::gather_k(a, *comm, e);
  });
}

size_t topkey_gather_k_sharded_workspace_bytes(const topkey_gather_k_args* args, const topkey_exec* exec) {
  size_t bytes = SIZE_MAX;
  guard([&] {
    const char* op = "gather_k_sharded";
    bytes = shard::gather_k_bytes(from_c<GatherK>(op, "args", args), from_c<Exec>(op, "exec", exec));
  });
  return bytes;
}

topkey_status topkey_indexer_forward_sharded(const topkey_indexer_config* config, const topkey_indexer_step* step,
                                             const topkey_shard_spec* spec, const topkey_shard_step* inputs,
                                             const topkey_exec* exec) {
  return forward({config, step, spec, inputs, exec}, false);
}

size_t topkey_indexer_sharded_workspace_bytes(const topkey_indexer_config* config, const topkey_indexer_limits* limits,
                                              const topkey_shard_spec* spec, const topkey_exec* exec) {
  return step_bytes({config, limits, spec, exec}, false);
}

topkey_status topkey_indexer_kpool_forward_sharded(const topkey_indexer_config* config, const topkey_indexer_step* step,
                                                   const topkey_shard_spec* spec, const topkey_shard_step* inputs,
                                                   const topkey_exec* exec) {
  return forward({config, step, spec, inputs, exec}, true);
}

size_t topkey_indexer_kpool_sharded_workspace_bytes(const topkey_indexer_config* config,
                                                    const topkey_indexer_limits* limits, const topkey_shard_spec* spec,
                                                    const topkey_exec* exec) {
  return step_bytes({config, limits, spec, exec}, true);
}

int64_t topkey_row_shard_sizes(const topkey_plan_step_args* args, int64_t rows_at_once, int64_t* sizes) {
  int64_t count = -1;
  guard([&] {
    const char* op = "row_shard_sizes";
    const PlanStep step = from_c<PlanStep>(op, "args", args);
    const StepPlan s = plan::summary(step);
    const Check c(op, Mode::call);
    c.number("rows_at_once", rows_at_once, 0, kMaxKeys);
    const std::vector<int64_t> made = plan::shard_sizes(step, s.num_decode_requests, rows_at_once);
    TOPKEY_REQUIRE(c, made.empty() || sizes != nullptr, "sizes", "room for row_shards numbers", "null");
    std::copy(made.begin(), made.end(), sizes);
    count = static_cast<int64_t>(made.size());
  });
  return count;
}

topkey_status topkey_local_communicators(int32_t size, double seconds, topkey_communicator* comms) {
  return guard([&] {
    const Check c("local_communicators", Mode::call);
    c.number("size", size, 1, 1 << 16);
    require_given("local_communicators", comms, "comms");
    shard::make_local(size, patience("local_communicators", seconds), comms);
  });
}

topkey_status topkey_mpi_communicator(const void* mpi_comm, double seconds, topkey_communicator* comm) {
  return guard([&] {
    require_given("mpi_communicator", comm, "comm");
    shard::make_mpi(mpi_comm, patience("mpi_communicator", seconds), *comm);
  });
}

topkey_status topkey_nccl_communicator(void* nccl_comm, double seconds, topkey_communicator* comm) {
  return guard([&] {
    require_given("nccl_communicator", comm, "comm");
    require_given("nccl_communicator", nccl_comm, "nccl_comm");
    shard::make_nccl(nccl_comm, patience("nccl_communicator", seconds), *comm);
  });
}

const char* topkey_transport_unusable(const char* transport) {
  if (transport == nullptr) return "no transport has no name";
  if (std::strcmp(transport, "local") == 0) return nullptr;
  if (std::strcmp(transport, "mpi") == 0) return shard::mpi_unusable();
  if (std::strcmp(transport, "nccl") == 0) return shard::nccl_unusable();
  return "this library has no such transport";
}

}  // extern "C"
