/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * The C border of sharding: communicators, cuts, collectives. C11. Each struct but topkey_communicator has a C++ twin with
 * the same fields in the same order in shard.h, where each field is described. The rules are those of topkey_c.h. */
#ifndef TOPKEY_SHARD_C_H
#define TOPKEY_SHARD_C_H
#include "topkey/topkey_c.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- sharding (shard.h) ---------------------------------------------------------------------------------------------------- */
/* Filled by the caller, or by one of the functions below. ctx is given back to every callback.
 * all_gather: `bytes` of each rank into receive [size * bytes], rank after rank; send may be this rank's part of receive.
 * all_gatherv: bytes[r] of rank r. 0 = done (enqueued). Both in host memory; of a call on a device, in its memory and on its
 * stream where the flags say so (what ranks compare of a step, 16 bytes or 2 KiB each, is in host memory there too).
 * fail: this rank has failed, let the peers that wait fail too (may be null). failure: the last failed call in words (may
 * be null). release: frees ctx of one that the library has filled. flags: TOPKEY_COMM_BLOCKS where calls block the host, which a
 * captured stream refuses; TOPKEY_COMM_DEVICE beside it where they take device memory all the same. One that blocks and does
 * not is given copies in host memory. One that does not block must take device memory.
 * received_bytes (from others, added to) and agreed (what the ranks have agreed on) are the library's: 0 at the start. */
typedef struct topkey_communicator {
  uint32_t struct_size;
  int32_t rank, size;
  topkey_status (*all_gather)(void* ctx, const void* send, void* receive, size_t bytes, void* stream);
  topkey_status (*all_gatherv)(void* ctx, const void* send, void* receive, const size_t* bytes, void* stream);
  void (*fail)(void* ctx, const char* sentence);
  const char* (*failure)(void* ctx);
  void (*release)(void* ctx);
  void* ctx;
  uint32_t flags;
  uint64_t received_bytes, agreed[16];
} topkey_communicator;
enum { TOPKEY_COMM_BLOCKS = 1, TOPKEY_COMM_DEVICE = 2 };

typedef struct topkey_shard_spec {
  uint32_t struct_size;
  topkey_shard context;
  int32_t row_rank, row_shards;
  int32_t prefill_rank, prefill_size;
  bool shard_decode;
  size_t exchange_limit;
} topkey_shard_spec;

typedef struct topkey_shard_step {
  uint32_t struct_size;
  topkey_communicator* comm;
  topkey_communicator* prefill_comm;
  const int64_t* row_shard_sizes;
  topkey_tensor whole_start, whole_end;
  topkey_dense_keys gathered;
  topkey_tensor key_indptr;
  int64_t total_keys;
  topkey_tensor gathered_start;
  topkey_tensor token_order, token_positions, token_request;
} topkey_shard_step;

typedef struct topkey_exchange_rows_args {
  uint32_t struct_size;
  topkey_tensor buffer;
  int64_t width, first_row;
  const int64_t* row_shard_sizes;
} topkey_exchange_rows_args;

/* ---- sharding --------------------------------------------------------------------------------------------------------------- */
/* Each is a collective: every rank of `comm` calls it, with what belongs together. A rank on which it fails tells its peers. */
TOPKEY_API topkey_status topkey_exchange_rows(const topkey_exchange_rows_args* args, topkey_communicator* comm,
                                              const topkey_exec* exec);
TOPKEY_API size_t topkey_exchange_rows_workspace_bytes(const topkey_exchange_rows_args* args,
                                                       const topkey_communicator* comm, const topkey_exec* exec);
TOPKEY_API topkey_status topkey_gather_k_sharded(const topkey_gather_k_args* args, topkey_communicator* comm,
                                                 const topkey_exec* exec);
TOPKEY_API size_t topkey_gather_k_sharded_workspace_bytes(const topkey_gather_k_args* args, const topkey_exec* exec);
TOPKEY_API topkey_status topkey_indexer_forward_sharded(const topkey_indexer_config* config,
                                                        const topkey_indexer_step* step, const topkey_shard_spec* spec,
                                                        const topkey_shard_step* shard, const topkey_exec* exec);
TOPKEY_API size_t topkey_indexer_sharded_workspace_bytes(const topkey_indexer_config* config,
                                                         const topkey_indexer_limits* limits,
                                                         const topkey_shard_spec* spec, const topkey_exec* exec);
/* The same for the layer over k-pools. */
TOPKEY_API topkey_status topkey_indexer_kpool_forward_sharded(const topkey_indexer_config* config,
                                                              const topkey_indexer_step* step,
                                                              const topkey_shard_spec* spec,
                                                              const topkey_shard_step* shard, const topkey_exec* exec);
TOPKEY_API size_t topkey_indexer_kpool_sharded_workspace_bytes(const topkey_indexer_config* config,
                                                               const topkey_indexer_limits* limits,
                                                               const topkey_shard_spec* spec, const topkey_exec* exec);
/* sizes [args->row_shards]: rows of each rank as topkey_plan_step cuts them, for devices that answer rows_at_once prefill rows
 * side by side (0 = not known). Returns how many were written: row_shards, or 0 where the step is not sharded; < 0: an error. */
TOPKEY_API int64_t topkey_row_shard_sizes(const topkey_plan_step_args* args, int64_t rows_at_once, int64_t* sizes);
/* Fill comms[0..size): ranks as threads of this process. Fill *comm: MPI (mpi_comm: an MPI_Comm*, null = the world; started and
 * ended by the library where the caller has not), NCCL (an ncclComm_t). `seconds`: how long a call waits for a peer (0 = 60). */
TOPKEY_API topkey_status topkey_local_communicators(int32_t size, double seconds, topkey_communicator* comms);
TOPKEY_API topkey_status topkey_mpi_communicator(const void* mpi_comm, double seconds, topkey_communicator* comm);
TOPKEY_API topkey_status topkey_nccl_communicator(void* nccl_comm, double seconds, topkey_communicator* comm);
/* Null where this build has the transport ("local", "mpi", "nccl"), else the reason. */
TOPKEY_API const char* topkey_transport_unusable(const char* transport);

#ifdef __cplusplus
}
#endif
#endif /* TOPKEY_SHARD_C_H */
