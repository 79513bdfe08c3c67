// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `pool`: several tokens to one key row. pool_k joins the pool_size tokens of a k-pool, compress_k a window of a
// compressed layer; both go through the producers of stage `quantize` into pages. Tokens are found by request and
// position, never by where they stand in the batch: in the rows of the call, else in a small state that the caller
// keeps between calls, so that a pool or a window may straddle calls. docs/formats.md has formulas and state bytes.
//
// Both read the state as it was before the call, then write it. Two calls that share state must not overlap.
// Backends may differ by one bf16 step before quantisation (exp); each gives the same bytes on every call, batch cut,
// thread count and ISA.
#pragma once
#include "topkey/format.h"
#include "topkey/types.h"

namespace topkey {

/// k-pools. Row t is the token at position p = positions[t] of its request (request, q_indptr, or a uniform next_n: the
/// first that is given; rows of a request are adjacent). Where slot_mapping[t] >= 0 and p completes pool g = p /
/// pool_size ((p + 1) % pool_size == 0), its key row is, for each channel d over the tokens j of the pool,
///   a_j = gate_j + ape[j], m = max a_j, x = sum_j k_j exp(a_j - m) / sum_j exp(a_j - m), j ascending, f32,
/// rounded to bf16, then Hadamard and quantisation (fp8: rule kpool_key; mxfp4: mxfp4), stored at the slot. Token q is
/// the nearest row at or before t of that request and position, else entry q % ring of the tail block that t's tail
/// slot lies in. A pool with a token in neither place is not written and counted, as is a slot outside the cache or of
/// a row that completes no pool; strict raises. Afterwards every row with a tail slot >= 0 leaves k and gate there; of
/// equal slots the last row. Equal cache slots: the last row's pool, whole. A negative position: padding.
/// Tail: ring entries a block, a multiple of pool_size; the tail slot of a token is block * ring + position % ring.
/// With ring >= pool_size + most rejected tokens of a step no live entry is lost. Without a tail, host sizes that leave
/// no pool whole in the call (fewer rows, or a next_n, under pool_size) raise. Cost: one pass over k and gate.
struct PoolK {
  uint32_t struct_size;
  Tensor k, gate;       ///< bf16 [>=T,D], unit; D a power of two
  Tensor ape;           ///< f32 [P,D], unit
  Tensor positions;     ///< i32|i64 [>=T]
  Tensor q_indptr;      ///< i32 [B+1]
  Tensor slot_mapping;  ///< i32|i64 [T], of the pool that the row completes; -1 = do not write
  Tensor tail;          ///< bf16 [blocks,2,ring,D]: k, then gate; unit; read and written; optional
  Tensor tail_slots;    ///< i32|i64 [>=T]; -1 = leave nothing, read nothing
  int32_t pool_size;
  ScaleRule scale;
  KeyCache cache;
  Tensor request;  ///< i32 [>=T], instead of q_indptr; < 0: padding
  int32_t next_n;  ///< instead of both: next_n rows a request (0 = 1)
};
TOPKEY_OP(pool_k, PoolK)

/// The compressor of a layer with `ratio` tokens a key row (ratio = rows of ape). Where slot_mapping[t] >= 0,
/// state_slots[t] >= 0 and (p + 1) % ratio == 0, a key row is made of the last c * ratio positions (c = 2: two windows
/// overlap; tokens of the older half give their first D channels, those of the younger half their last D; c = 1: one
/// window). Positions before 0 take no part. For each channel over the window, ascending, f32:
///   s = score + ape[position % ratio], m = max s, x = sum kv exp(s - m) / sum exp(s - m),
/// then RMS norm, interleaved rope of the trailing cos_sin.shape[1] channels at position (p / ratio) * ratio, and
/// quantisation (fp8: v4_key; mxfp4: mxfp4). Tokens are found as in PoolK, else in the state, where a token is kept as
/// kv | score + ape. Without state_table the block of t's state slot is a ring (a window and most rejected tokens long);
/// with it, position q of request b lies in page state_table[b, q / state_block]. A window that is not whole, or a slot
/// outside the cache: not written and counted; strict raises. A rope position outside its table: a NaN key, counted.
/// Afterwards every row with a state slot >= 0 leaves its state there; of equal slots the last row.
struct CompressK {
  uint32_t struct_size;
  Tensor kv, score;    ///< f32|bf16|f16 [>=T,c*D], unit; c is 1 or 2
  Tensor ape;          ///< f32 [ratio,c*D], unit
  Tensor positions;    ///< i32|i64 [>=T]; < 0: padding
  Tensor state;        ///< f32 [blocks,state_block,2*c*D], unit; read and written
  Tensor state_slots;  ///< i32|i64 [>=T] block * state_block + offset; -1 = leave nothing, write no key row
  Tensor query_start;  ///< i32 [B+1]
  Tensor rms_weight;   ///< f32|bf16 [D]; absent = nothing is multiplied
  float eps;
  Tensor cos_sin;       ///< f32|bf16|f16 [max_pos,dim] = cos | sin; absent = no rope
  Tensor slot_mapping;  ///< i32|i64 [T], of the key row that the row completes; -1 = do not write
  KeyCache cache;
  QuantRule rule;
  Tensor state_table;  ///< i32 [B,pages]; optional
};
TOPKEY_OP(compress_k, CompressK)

}  // namespace topkey
