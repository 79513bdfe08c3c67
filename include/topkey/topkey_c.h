/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * The C border of TopKey: every exported symbol and every struct that crosses it, but for several ranks
 * (topkey_shard_c.h). C11, self-contained.
 * The C++ headers are inline over this file; each struct here has a C++ twin with the same fields in the same order and the
 * same layout, where each field is described (types.h, format.h, ..., search.h). Zero is the default of every field.
 * A struct that a call takes by pointer begins with `struct_size`: set it to sizeof the struct (0 means the size it had in
 * the first version), so that fields can be added at its end without breaking a caller. */
#ifndef TOPKEY_C_H
#define TOPKEY_C_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define TOPKEY_API
#else
#define TOPKEY_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- enumerations: int32_t on the border, named constants here ---------------------------------------------------------- */
typedef int32_t topkey_status;
enum {
  TOPKEY_OK = 0,
  TOPKEY_INVALID_ARGUMENT = 1,
  TOPKEY_UNSUPPORTED = 2,
  TOPKEY_WORKSPACE_TOO_SMALL = 3,
  TOPKEY_NOT_PREPARED = 4,
  TOPKEY_DEVICE_ERROR = 5,
  TOPKEY_PEER_ERROR = 6
};
typedef int32_t topkey_dtype;
enum {
  TOPKEY_DTYPE_NONE = 0,
  TOPKEY_DTYPE_F32 = 1,
  TOPKEY_DTYPE_F16 = 2,
  TOPKEY_DTYPE_BF16 = 3,
  TOPKEY_DTYPE_F8_E4M3FN = 4,
  TOPKEY_DTYPE_E8M0 = 5,
  TOPKEY_DTYPE_U8 = 6,
  TOPKEY_DTYPE_B8 = 7,
  TOPKEY_DTYPE_I32 = 8,
  TOPKEY_DTYPE_I64 = 9
};
typedef int32_t topkey_device;
enum { TOPKEY_DEVICE_CPU = 0, TOPKEY_DEVICE_CUDA = 1 };
typedef int32_t topkey_key_format;
enum {
  TOPKEY_FORMAT_FP8 = 0,
  TOPKEY_FORMAT_MXFP4 = 1,
  TOPKEY_FORMAT_BF16 = 2,
  TOPKEY_FORMAT_F16 = 3,
  TOPKEY_FORMAT_F32 = 4,
  TOPKEY_FORMAT_Q8_0 = 5,
  TOPKEY_FORMAT_FP8_FNUZ = 6
};
typedef int32_t topkey_layout;
enum {
  TOPKEY_LAYOUT_PLANAR = 0,
  TOPKEY_LAYOUT_INTERLEAVED = 1,
  TOPKEY_LAYOUT_TILED16 = 2,
  TOPKEY_LAYOUT_TILED32 = 3,
  TOPKEY_LAYOUT_TILED64 = 4
};
typedef int32_t topkey_order;
enum { TOPKEY_ORDER_POSITION = 0, TOPKEY_ORDER_SCORE = 1, TOPKEY_ORDER_ANY = 2 };
typedef int32_t topkey_fill;
enum { TOPKEY_FILL_MINUS_ONE = 0, TOPKEY_FILL_REPEAT = 1, TOPKEY_FILL_VALUE = 2 };
typedef int32_t topkey_norm_kind;
enum { TOPKEY_NORM_NONE = 0, TOPKEY_NORM_LAYER = 1, TOPKEY_NORM_RMS = 2 };
typedef int32_t topkey_scale_rule;
enum { TOPKEY_SCALE_UE8M0 = 0, TOPKEY_SCALE_F32 = 1 };
typedef int32_t topkey_quant_rule;
enum {
  TOPKEY_RULE_AUTOMATIC = 0,
  TOPKEY_RULE_V32_KEY = 1,
  TOPKEY_RULE_V32_QUERY = 2,
  TOPKEY_RULE_V4_QUERY = 3,
  TOPKEY_RULE_V4_KEY = 4,
  TOPKEY_RULE_KPOOL_QUERY = 5,
  TOPKEY_RULE_KPOOL_KEY = 6,
  TOPKEY_RULE_CPU_QUERY = 7,
  TOPKEY_RULE_MXFP4 = 8,
  TOPKEY_RULE_Q8_0 = 9
};
enum {
  TOPKEY_STAT_ROWS = 0,
  TOPKEY_STAT_SCORED_KEYS = 1,
  TOPKEY_STAT_RESCANS = 2,
  TOPKEY_STAT_SKIPPED_PAGES = 3,
  TOPKEY_STAT_SKIPPED_SLOTS = 4,
  TOPKEY_STAT_NAN_SCORES = 5,
  TOPKEY_STAT_TIED_CUTS = 6,
  TOPKEY_STAT_RESERVED = 7,
  TOPKEY_NUM_STATS = 8
};
enum { TOPKEY_FLAG_OVERLAP_PREVIOUS = 1 };

/* ---- structs inside arguments: these never grow -------------------------------------------------------------------------- */
typedef struct topkey_tensor {
  void* data;
  int64_t shape[4], stride[4];
  int32_t ndim;
  topkey_dtype dtype;
} topkey_tensor;

typedef struct topkey_team {
  int32_t rank, size;
  void (*barrier)(void* ctx);
  void* ctx;
} topkey_team;

typedef struct topkey_dense_keys {
  topkey_tensor values, scales;
  topkey_key_format format;
} topkey_dense_keys;

typedef struct topkey_key_cache {
  topkey_tensor pages;
  topkey_key_format format;
  topkey_layout layout;
  int32_t page_size, head_dim;
} topkey_key_cache;

typedef struct topkey_shard {
  int32_t rank, world_size, interleave;
} topkey_shard;

typedef struct topkey_paged_keys {
  topkey_key_cache cache;
  topkey_shard shard;
  topkey_tensor block_table;
  bool table_per_row;
} topkey_paged_keys;

typedef struct topkey_query {
  topkey_tensor values, scales, weights;
} topkey_query;

typedef struct topkey_rows {
  int64_t count;
  topkey_tensor end, length, start, request, q_indptr;
  int32_t next_n;
  int64_t max_len;
} topkey_rows;

typedef struct topkey_admit {
  topkey_tensor candidates;
  int32_t candidate_block_size;
  topkey_tensor mask;
  int32_t force_first, force_last;
} topkey_admit;

typedef struct topkey_slot_map {
  topkey_tensor block_table;
  bool table_per_row;
  int32_t page_size;
} topkey_slot_map;

typedef struct topkey_selection {
  topkey_tensor indices, slots, scores, counts, blocks;
  int32_t block_size;
  topkey_tensor index_base;
  topkey_slot_map slot_map;
  topkey_order order;
  topkey_fill fill;
  int32_t fill_value;
} topkey_selection;

typedef struct topkey_norm {
  topkey_norm_kind kind;
  topkey_tensor weight, bias;
  float eps;
} topkey_norm;

typedef struct topkey_rope {
  topkey_tensor positions, cos_sin;
  int32_t dim;
  bool interleaved, trailing;
} topkey_rope;

/* ---- structs that a call takes by pointer: they may grow at the end ------------------------------------------------------- */
typedef struct topkey_exec {
  uint32_t struct_size;
  topkey_device device;
  int32_t device_id;
  void* stream;
  void* workspace;
  size_t workspace_bytes;
  const char* backend;
  int32_t max_sms, threads;
  const topkey_team* team;
  uint64_t* stats;
  uint32_t flags;
  const char* arithmetic;
  const char* strategy;
  bool strict;
} topkey_exec;

typedef struct topkey_expand_rows_args {
  uint32_t struct_size;
  topkey_tensor query_start, seq_lens;
  int32_t ratio;
  topkey_shard shard;
  topkey_tensor block_table;
  int32_t page_size;
  int64_t capacity;
  topkey_tensor row_request, lens, positions, slots;
} topkey_expand_rows_args;

typedef struct topkey_to_slots_args {
  uint32_t struct_size;
  topkey_tensor indices, row_request, block_table;
  int32_t page_size;
  topkey_shard shard;
  bool compact;
  topkey_tensor slots, counts;
} topkey_to_slots_args;

typedef struct topkey_quantize_q_args {
  uint32_t struct_size;
  topkey_tensor q, weights;
  float softmax_scale, head_scale;
  topkey_quant_rule rule;
  topkey_rope rope;
  bool hadamard;
  topkey_key_format format;
  topkey_tensor q_out, q_scales_out, weights_out;
} topkey_quantize_q_args;

typedef struct topkey_quantize_k_args {
  uint32_t struct_size;
  topkey_tensor k;
  topkey_norm norm;
  topkey_rope rope;
  bool hadamard;
  topkey_scale_rule scale;
  topkey_quant_rule rule;
  topkey_dense_keys out;
} topkey_quantize_k_args;

typedef struct topkey_store_k_args {
  uint32_t struct_size;
  topkey_tensor k, k_scales;
  topkey_norm norm;
  topkey_rope rope;
  bool hadamard;
  topkey_scale_rule scale;
  topkey_quant_rule rule;
  topkey_tensor slot_mapping;
  topkey_key_cache cache;
} topkey_store_k_args;

typedef struct topkey_gather_k_args {
  uint32_t struct_size;
  topkey_paged_keys keys;
  topkey_tensor indptr;
  int64_t total;
  topkey_dense_keys out;
} topkey_gather_k_args;

typedef struct topkey_mqa_logits_args {
  uint32_t struct_size;
  topkey_query q;
  topkey_dense_keys keys;
  topkey_rows rows;
  topkey_tensor mask;
  bool clean;
  topkey_tensor logits;
} topkey_mqa_logits_args;

typedef struct topkey_paged_mqa_logits_args {
  uint32_t struct_size;
  topkey_query q;
  topkey_paged_keys keys;
  topkey_rows rows;
  bool clean;
  topkey_tensor logits;
} topkey_paged_mqa_logits_args;

typedef struct topkey_topk_args {
  uint32_t struct_size;
  topkey_tensor scores, row_topk;
  topkey_rows rows;
  topkey_admit admit;
  int32_t topk;
  topkey_selection out;
} topkey_topk_args;

typedef struct topkey_select_blocks_args {
  uint32_t struct_size;
  topkey_tensor scores;
  topkey_rows rows;
  int32_t block_size;
  topkey_tensor blocks;
} topkey_select_blocks_args;

typedef struct topkey_mqa_topk_args {
  uint32_t struct_size;
  topkey_query q;
  topkey_dense_keys keys;
  topkey_rows rows;
  topkey_admit admit;
  int32_t topk;
  topkey_selection out;
} topkey_mqa_topk_args;

typedef struct topkey_paged_mqa_topk_args {
  uint32_t struct_size;
  topkey_query q;
  topkey_paged_keys keys;
  topkey_rows rows;
  topkey_admit admit;
  int32_t topk;
  topkey_selection out;
  topkey_tensor whole_start, whole_end, block_scores;
} topkey_paged_mqa_topk_args;

typedef struct topkey_merge_topk_args {
  uint32_t struct_size;
  topkey_tensor scores, indices;
  int32_t topk;
  topkey_rows rows;
  topkey_selection out;
  int32_t force_first, force_last;
  topkey_tensor block_scores, block_ids;
} topkey_merge_topk_args;

typedef struct topkey_pool_k_args {
  uint32_t struct_size;
  topkey_tensor k, gate, ape, positions, q_indptr, slot_mapping, tail, tail_slots;
  int32_t pool_size;
  topkey_scale_rule scale;
  topkey_key_cache cache;
  topkey_tensor request;
  int32_t next_n;
} topkey_pool_k_args;

typedef struct topkey_compress_k_args {
  uint32_t struct_size;
  topkey_tensor kv, score, ape, positions, state, state_slots, query_start, rms_weight;
  float eps;
  topkey_tensor cos_sin, slot_mapping;
  topkey_key_cache cache;
  topkey_quant_rule rule;
  topkey_tensor state_table;
} topkey_compress_k_args;

typedef struct topkey_expand_pools_args {
  uint32_t struct_size;
  topkey_tensor pools;
  topkey_rows rows;
  int32_t pool_size;
  topkey_selection out;
  topkey_tensor positions;
} topkey_expand_pools_args;

typedef struct topkey_range {
  int64_t first, last;
} topkey_range;

typedef struct topkey_prefill_chunk {
  int64_t first_request, last_request, first_row, last_row, total_keys;
  bool skip_gather;
} topkey_prefill_chunk;

typedef struct topkey_plan_step_args {
  uint32_t struct_size;
  int64_t num_requests;
  const int64_t* query_lens;
  const int64_t* seq_lens;
  const uint8_t* prefilling;
  int64_t decode_threshold;
  bool require_uniform, extends_prefill;
  int32_t ratio;
  int64_t gather_rows, logits_bytes;
  int32_t row_shards;
  int64_t min_shard_rows;
} topkey_plan_step_args;

typedef struct topkey_step_plan {
  uint32_t struct_size;
  int64_t num_decode_requests, num_decode_rows, num_prefill_rows, max_next_n;
  bool decode_uniform;
  int64_t max_decode_len, max_prefill_len;
  bool rows_sharded;
} topkey_step_plan;

typedef int32_t topkey_candidate_role;
enum { TOPKEY_ROLE_NONE = 0, TOPKEY_ROLE_SOURCE = 1, TOPKEY_ROLE_CONSUMER = 2 };

typedef struct topkey_indexer_config {
  uint32_t struct_size;
  int32_t heads, head_dim, topk, ratio, pool_size;
  topkey_key_format format;
  topkey_scale_rule scale;
  topkey_candidate_role role;
  int32_t candidate_block_size, candidate_topk_blocks, force_first, force_last;
  int32_t candidate_ratio;
} topkey_indexer_config;

typedef struct topkey_indexer_limits {
  uint32_t struct_size;
  int64_t max_rows, max_requests, max_len;
  int32_t max_next_n;
} topkey_indexer_limits;

typedef struct topkey_indexer_step {
  uint32_t struct_size;
  topkey_tensor k, k_scales, gate, ape, positions, slot_mapping, tail, tail_slots;
  topkey_norm norm;
  topkey_rope rope;
  bool hadamard;
  topkey_query q;
  topkey_paged_keys keys;
  topkey_rows rows;
  int64_t num_decode_rows;
  topkey_tensor candidates;
  topkey_selection out;
  bool cleared, skip_step;
} topkey_indexer_step;

/* ---- operations: name, name_workspace_bytes (0 is possible), name_unsupported (null = can run, else the reason) ----------- */
/* On failure: a status, and one sentence in topkey_last_error(). name_workspace_bytes returns SIZE_MAX for wrong arguments.
 * Strings returned live until the next TopKey call of the same thread. */
#define TOPKEY_DECLARE(name)                                                                                    \
  TOPKEY_API topkey_status topkey_##name(const topkey_##name##_args* args, const topkey_exec* exec);            \
  TOPKEY_API size_t topkey_##name##_workspace_bytes(const topkey_##name##_args* args, const topkey_exec* exec); \
  TOPKEY_API const char* topkey_##name##_unsupported(const topkey_##name##_args* args, const topkey_exec* exec)
TOPKEY_DECLARE(expand_rows);
TOPKEY_DECLARE(to_slots);
TOPKEY_DECLARE(quantize_q);
TOPKEY_DECLARE(quantize_k);
TOPKEY_DECLARE(store_k);
TOPKEY_DECLARE(gather_k);
TOPKEY_DECLARE(mqa_logits);
TOPKEY_DECLARE(paged_mqa_logits);
TOPKEY_DECLARE(topk);
TOPKEY_DECLARE(select_blocks);
TOPKEY_DECLARE(mqa_topk);
TOPKEY_DECLARE(paged_mqa_topk);
TOPKEY_DECLARE(merge_topk);
TOPKEY_DECLARE(pool_k);
TOPKEY_DECLARE(compress_k);
TOPKEY_DECLARE(expand_pools);
#undef TOPKEY_DECLARE

/* ---- plans (host) and the layers ------------------------------------------------------------------------------------------- */
/* The chunk functions return how many there are and write at most `capacity` of them; -1 on wrong arguments. row_shard_sizes
 * holds args->row_shards numbers (null where that is under 2). */
TOPKEY_API int64_t topkey_prefill_chunks(const topkey_plan_step_args* args, topkey_prefill_chunk* chunks,
                                         int64_t capacity);
TOPKEY_API int64_t topkey_decode_chunks(int64_t rows, int64_t width, int64_t budget, topkey_range* ranges,
                                        int64_t capacity);
TOPKEY_API topkey_status topkey_plan_step(const topkey_plan_step_args* args, topkey_step_plan* plan,
                                          int64_t* row_shard_sizes);
TOPKEY_API topkey_status topkey_indexer_check(const topkey_indexer_config* config);
TOPKEY_API size_t topkey_indexer_workspace_bytes(const topkey_indexer_config* config,
                                                 const topkey_indexer_limits* limits, const topkey_exec* exec);
TOPKEY_API topkey_status topkey_indexer_forward(const topkey_indexer_config* config, const topkey_indexer_step* step,
                                                const topkey_exec* exec);

TOPKEY_API topkey_status topkey_indexer_kpool_check(const topkey_indexer_config* config);
TOPKEY_API size_t topkey_indexer_kpool_workspace_bytes(const topkey_indexer_config* config,
                                                       const topkey_indexer_limits* limits, const topkey_exec* exec);
TOPKEY_API topkey_status topkey_indexer_kpool_forward(const topkey_indexer_config* config,
                                                      const topkey_indexer_step* step, const topkey_exec* exec);

/* ---- the library itself ---------------------------------------------------------------------------------------------------- */
/* Version of the library that runs, "0.1.0"; the ABI it speaks (compare with TOPKEY_ABI_VERSION); sentence and status of this
 * thread's last error ("" and TOPKEY_OK when there was none). */
#define TOPKEY_ABI_VERSION 1
TOPKEY_API const char* topkey_version(void);
TOPKEY_API uint32_t topkey_abi_version(void);
TOPKEY_API const char* topkey_last_error(void);
TOPKEY_API topkey_status topkey_last_status(void);
/* Backends in order of preference. name: null past the last. unusable: null where it runs on this machine, else the reason.
 * detail: what it found there, as "AVX3", or "". */
TOPKEY_API const char* topkey_backend_name(int32_t index);
TOPKEY_API topkey_device topkey_backend_device(int32_t index);
TOPKEY_API const char* topkey_backend_unusable(int32_t index);
TOPKEY_API const char* topkey_backend_detail(int32_t index);
/* Name of the score arithmetic of a backend for keys of `format` and queries of `q_dtype` (docs/numerics.md); null if it has none. */
TOPKEY_API const char* topkey_arithmetic(const char* backend, topkey_key_format format, topkey_dtype q_dtype);
TOPKEY_API const char* topkey_numerics_version(const char* backend, topkey_key_format format);
TOPKEY_API topkey_status topkey_prepare(topkey_device device, int32_t device_id);

#ifdef __cplusplus
}
#endif
#endif /* TOPKEY_C_H */
