/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * The C border seen from C11: topkey_c.h alone, one real call, one refused call. Called by abi_test.cpp. */
#include "topkey/topkey_c.h"

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
