/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * The C border seen from C11: one real call, one refused call, a communicator of a C program. Called by abi_test.cpp. */
#include "topkey/topkey_c.h"
#include "topkey/topkey_shard_c.h"

#include <string.h>

_Static_assert(sizeof(topkey_status) == 4 && sizeof(topkey_dtype) == 4, "enumerations are int32_t on the border");

static topkey_tensor vector_i32(int32_t* data, int64_t extent) {
  topkey_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.shape[0] = extent;
  t.stride[0] = 1;
  t.ndim = 1;
  t.dtype = TOPKEY_DTYPE_I32;
  return t;
}

/* Two requests of two and one query rows; ratio 4. Returns null, or what went wrong. */
const char* topkey_abi_c_check(void);
const char* topkey_abi_c_check(void) {
  int32_t query_start[3] = {0, 2, 3}, seq_lens[2] = {8, 5}, request[4], lens[4];
  static const int32_t want_request[4] = {0, 0, 1, -1}, want_lens[4] = {1, 2, 1, 0};
  topkey_expand_rows_args args;
  topkey_exec exec;
  memset(&args, 0, sizeof args);
  memset(&exec, 0, sizeof exec);
  args.struct_size = sizeof args;
  exec.struct_size = sizeof exec;
  args.query_start = vector_i32(query_start, 3);
  args.seq_lens = vector_i32(seq_lens, 2);
  args.ratio = 4;
  args.capacity = 4;
  args.row_request = vector_i32(request, 4);
  args.lens = vector_i32(lens, 4);
  if (topkey_expand_rows_unsupported(&args, &exec) != NULL) return "expand_rows has no backend";
  if (topkey_expand_rows(&args, &exec) != TOPKEY_OK) return topkey_last_error();
  if (memcmp(request, want_request, sizeof request) != 0) return "expand_rows wrote other requests";
  if (memcmp(lens, want_lens, sizeof lens) != 0) return "expand_rows wrote other lengths";
  args.seq_lens.dtype = TOPKEY_DTYPE_F32;
  if (topkey_expand_rows(&args, &exec) != TOPKEY_INVALID_ARGUMENT) return "f32 lengths were not refused";
  if (strncmp(topkey_last_error(), "expand_rows: ", 13) != 0) return "the error does not name the operation";
  if (topkey_abi_version() != TOPKEY_ABI_VERSION) return "header and library speak different ABIs";
  return NULL;
}

/* A transport of a C program: two ranks, of which this one plays both, the other having sent `other`. */
struct two_ranks {
  const void* other;
  int failures;
  int broken;
};
static topkey_status two_gatherv(void* ctx, const void* send, void* receive, const size_t* bytes, void* stream) {
  struct two_ranks* two = (struct two_ranks*)ctx;
  (void)stream;
  if (two->broken) return TOPKEY_PEER_ERROR;
  memmove(receive, send, bytes[0]);
  memcpy((char*)receive + bytes[0], two->other, bytes[1]);
  return TOPKEY_OK;
}
static topkey_status two_gather(void* ctx, const void* send, void* receive, size_t bytes, void* stream) {
  const size_t both[2] = {bytes, bytes};
  return two_gatherv(ctx, send, receive, both, stream);
}
static void two_fail(void* ctx, const char* sentence) {
  (void)sentence;
  ++((struct two_ranks*)ctx)->failures;
}

const char* topkey_abi_c_ranks_check(void);
const char* topkey_abi_c_ranks_check(void) {
  int32_t buffer[3] = {7, -1, -1};
  static const int32_t other[2] = {8, 9}, want[3] = {7, 8, 9};
  static const int64_t sizes[2] = {1, 2};
  struct two_ranks two = {other, 0, 0};
  topkey_communicator comm;
  topkey_exchange_rows_args args;
  topkey_exec exec;
  memset(&comm, 0, sizeof comm);
  memset(&args, 0, sizeof args);
  memset(&exec, 0, sizeof exec);
  comm.struct_size = sizeof comm;
  comm.size = 2;
  comm.all_gather = two_gather;
  comm.all_gatherv = two_gatherv;
  comm.fail = two_fail;
  comm.ctx = &two;
  args.buffer = vector_i32(buffer, 3);
  args.row_shard_sizes = sizes;
  if (topkey_exchange_rows_workspace_bytes(&args, &comm, &exec) != 0) return "contiguous rows were to be staged";
  if (topkey_exchange_rows(&args, &comm, &exec) != TOPKEY_OK) return topkey_last_error();
  if (memcmp(buffer, want, sizeof want) != 0) return "exchange_rows left other rows";
  if (comm.received_bytes != 8) return "received bytes were not counted";
  two.broken = 1;
  if (topkey_exchange_rows(&args, &comm, &exec) != TOPKEY_PEER_ERROR) return "a failed callback was not reported";
  if (two.failures != 1) return "the peers were not told";
  comm.all_gatherv = NULL;
  if (topkey_exchange_rows(&args, &comm, &exec) != TOPKEY_INVALID_ARGUMENT) return "a null callback was not refused";
  if (two.failures != 2) return "the peers were not told of a refusal";
  return NULL;
}
