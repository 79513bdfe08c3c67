// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See include/topkey/shard.h. What src/shard has, for the border (c_api_shard.cpp) and the checks (validate_shard.cpp):
// collectives over a topkey_communicator, and the transports that fill one.
#pragma once
#include "topkey/shard.h"

namespace topkey::shard {

/// ShardStep as it crosses the border.
struct Inputs {
  uint32_t struct_size;
  topkey_communicator* comm;
  topkey_communicator* prefill_comm;
  const int64_t* row_shard_sizes;
  Tensor whole_start, whole_end;
  DenseKeys gathered;
  Tensor key_indptr;
  int64_t total_keys;
  Tensor gathered_start;
  Tensor token_order, token_positions, token_request;
};

/// One step of a layer as this rank sees it.
struct Step {
  IndexerConfig config;
  IndexerStep step;
  ShardSpec spec;
  Inputs in;
  bool pools = false;  ///< the layer over k-pools
  /// Tokens in an order that the caller gives: of several prefill ranks, or of one.
  bool orders_tokens() const {
    return pools && (spec.prefill_size > 1 || (spec.prefill_size == 1 && present(in.token_order)));
  }
  const char* op() const { return pools ? "indexer_kpool_forward_sharded" : "indexer_forward_sharded"; }
};

constexpr size_t kExchangeLimit = size_t{64} << 20;

/// The worst step of a layer.
struct WorstStep {
  IndexerConfig config;
  IndexerLimits limits;
  ShardSpec spec;
  bool pools;
};

void forward(const Step& s, const Exec& exec);
size_t workspace_bytes(const WorstStep& worst, const Exec& exec);
void exchange_rows(const ExchangeRows& a, topkey_communicator& comm, const Exec& exec);
size_t exchange_rows_bytes(const ExchangeRows& a, const topkey_communicator& comm);
void gather_k(const GatherK& a, topkey_communicator& comm, const Exec& exec);
size_t gather_k_bytes(const GatherK& a, const Exec& exec);

// Transports. seconds > 0.
void make_local(int32_t size, double seconds, topkey_communicator* comms);
/// Each is in one of two files: the transport, or its twin that throws `unsupported` with the reason.
void make_mpi(const void* mpi_comm, double seconds, topkey_communicator& comm);
void make_nccl(void* nccl_comm, double seconds, topkey_communicator& comm);
const char* mpi_unusable() noexcept;
const char* nccl_unusable() noexcept;

}  // namespace topkey::shard

namespace topkey {

void validate_communicator(const char* op, const char* name, const topkey_communicator* comm);
void validate(const ExchangeRows& a, const topkey_communicator* comm);
void validate_sharded(const GatherK& a, const topkey_communicator* comm);
void validate(const shard::Step& s, const Exec& exec);
void validate(const ShardSpec& spec, const char* op);

}  // namespace topkey
