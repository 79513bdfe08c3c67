# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Stage `pool`: key rows that stand for several tokens, made of them; and back to tokens."""

from __future__ import annotations

from .calls import Fields, cache_fields, extent, finish, operation
from .selection import Selection, form_fields, output_fields
from .types import DEFAULT_EXEC, Array, Exec, Fill, KeyCache, Out, Scale, SlotMap


@operation
def pool_k(
    k: Array,
    gate: Array,
    ape: Array,
    positions: Array,
    slot_mapping: Array,
    cache: KeyCache,
    *,
    pool_size: int,
    tail: Array | None = None,
    tail_slots: Array | None = None,
    q_indptr: Array | None = None,
    request: Array | None = None,
    next_n: int = 1,
    scale: Scale = "ue8m0",
    exec: Exec = DEFAULT_EXEC,
) -> None:
    """k-pools: softmax(gate + ape) over pool_size tokens, Hadamard, quantise, store where a row completes its pool.

    k, gate bfloat16 [>= T, D]; ape float32 [pool_size, D]; positions int32 or int64 [>= T]; slot_mapping int32 or int64
    [T], -1 = not written. Rows find their request by request int32 [>= T], q_indptr int32 [B + 1], or a uniform next_n.
    tail bfloat16 [blocks, 2, ring, D] keeps each request's open pool, at tail_slots [>= T]. Writes cache.pages and tail.

    ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend can
    run it.
    """
    fields: Fields = {
        "k": k, "gate": gate, "ape": ape, "positions": positions, "q_indptr": q_indptr, "slot_mapping": slot_mapping,
        "tail": tail, "tail_slots": tail_slots, "pool_size": pool_size, "scale": scale, "row_request": request,
        "next_n": next_n,
    }  # fmt: skip
    cache_fields("pool_k", fields, cache)
    finish("pool_k", fields, exec)


@operation
def compress_k(
    kv: Array,
    score: Array,
    ape: Array,
    positions: Array,
    slot_mapping: Array,
    cache: KeyCache,
    *,
    state: Array,
    state_slots: Array,
    query_start: Array,
    rms_weight: Array | None = None,
    eps: float = 1e-6,
    cos_sin: Array | None = None,
    rule: str | None = None,
    state_table: Array | None = None,
    exec: Exec = DEFAULT_EXEC,
) -> None:
    """The compressor: softmax(score + ape) over windows of tokens, RMS norm, rope, quantise, store.

    kv, score float32, bfloat16 or float16 [>= T, c * D], c 1 or 2; ape float32 [ratio, c * D]; positions [>= T];
    slot_mapping [T], -1 = not written; state float32 [blocks, state_block, 2 * c * D] at state_slots [>= T]; query_start
    int32 [B + 1]; rms_weight [D]; cos_sin [max_pos, dim]; state_table int32 [B, pages]. Writes cache.pages and state.

    ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend can
    run it.
    """
    fields: Fields = {
        "kv": kv, "score": score, "ape": ape, "positions": positions, "state": state, "state_slots": state_slots,
        "query_start": query_start, "rms_weight": rms_weight, "eps": eps, "cos_sin": cos_sin,
        "slot_mapping": slot_mapping, "rule": rule, "state_table": state_table,
    }  # fmt: skip
    cache_fields("compress_k", fields, cache)
    finish("compress_k", fields, exec)


@operation
def expand_pools(
    pools: Array,
    end: Array | None = None,
    pool_size: int = 1,
    *,
    length: Array | None = None,
    positions: Array | None = None,
    request: Array | None = None,
    q_indptr: Array | None = None,
    next_n: int = 1,
    slot_map: SlotMap | None = None,
    index_base: Array | None = None,
    fill: Fill = "minus_one",
    count: int | None = None,
    out: Out = ("indices",),
    exec: Exec = DEFAULT_EXEC,
) -> Selection:
    """Pool ids int32 [R, K] to tokens [R, K * pool_size + pool_size - 1]: the last columns hold the open pool's tokens.

    end int32 [R] (or length): tokens that the row sees; or positions [R], its own position, so positions + 1 of them.
    With none of them the open pool's columns are left out. Columns without a token get the fill, wherever they stand;
    counts are the columns with one. Other arguments as in topk; scores and blocks cannot be asked for.

    ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend can
    run it.
    """
    rows = extent(pools, 0) if count is None else count
    tail = 0 if end is None and length is None and positions is None else pool_size - 1
    fields: Fields = {
        "pools": pools, "pool_size": pool_size, "count": rows, "ends": end, "lens": length, "positions": positions,
        "row_request": request, "q_indptr": q_indptr, "next_n": next_n,
    }  # fmt: skip
    form_fields("expand_pools", fields, index_base, slot_map, "position", fill)
    width = extent(pools, 1) * pool_size + tail
    selection = output_fields("expand_pools", fields, pools, (rows, max(width, 0), 0), out, exec)
    finish("expand_pools", fields, exec)
    return selection
