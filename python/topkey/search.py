# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Stage `search`, the product: score and select in one pass, no logits matrix."""

from __future__ import annotations

from .calls import cache_fields, extent, finish, operation, shard_fields
from .frameworks import ends_of_causal_rows
from .score import dense_format
from .selection import Selection, form_fields, output_fields
from .types import DEFAULT_EXEC, Array, Exec, Fill, Format, KeyCache, Order, Out, Shard, SlotMap


@operation
def mqa_topk(
    q: Array,
    k: Array,
    weights: Array,
    topk: int,
    *,
    k_scales: Array | None = None,
    q_scales: Array | None = None,
    start: Array | None = None,
    end: Array | None = None,
    length: Array | None = None,
    causal: bool = False,
    mask: Array | None = None,
    format: Format | None = None,
    index_base: Array | None = None,
    order: Order = "position",
    fill: Fill = "minus_one",
    candidates: Array | None = None,
    candidate_block_size: int = 0,
    force_first: int = 0,
    force_last: int = 0,
    block_size: int = 0,
    num_blocks: int = 0,
    slot_map: SlotMap | None = None,
    request: Array | None = None,
    q_indptr: Array | None = None,
    next_n: int = 1,
    max_len: int = 0,
    count: int | None = None,
    out: Out = ("indices",),
    exec: Exec = DEFAULT_EXEC,
) -> Selection:
    """The topk best keys of each query row, over keys given as a matrix.

    q [R, H, D]: float8_e4m3fn (or its bytes) for fp8 keys, else float32, bfloat16 or float16 of any pairing with the
    keys. k [N, D] in `format`, which follows from its dtype unless that is uint8. weights [R, H] float32 or bfloat16,
    scales folded in. k_scales: float32 [N] for fp8 keys.

    Window of row m: [start[m], end[m]), int32 [R]; start absent = 0, end absent = N; or `length` instead of `end`; or
    `causal`: the R rows are the last of the N keys, row m ends at N - R + m + 1. mask [R, N]: bool (False hides), or
    float32 / float16 added to the scores. candidates int32 [R, C]: ids of blocks of candidate_block_size keys that are
    let through. force_first, force_last: so many visible keys win before any other. count: rows to answer, if not R.

    out names the outputs to be made ("indices", "slots", "scores", "counts", "blocks"), or maps these names to arrays
    [>= R, >= topk] to be filled. "slots" needs slot_map; "blocks" needs block_size and num_blocks.

    ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend can
    run it.
    """
    rows = extent(q, 0) if count is None else count
    if causal:
        if end is not None or length is not None or start is not None:
            raise ValueError("mqa_topk: causal must be False where start, end or length is given, got True")
        end = ends_of_causal_rows(q, rows, extent(k, 0))
    fields = {
        "q": q, "q_scale": q_scales, "weights": weights, "keys": k, "key_scale": k_scales,
        "format": dense_format("mqa_topk", k) if format is None else format,
        "count": rows, "starts": start, "ends": end, "lens": length, "row_request": request, "q_indptr": q_indptr,
        "next_n": next_n, "max_len": max_len, "mask": mask, "candidates": candidates,
        "candidate_block": candidate_block_size, "force_first": force_first, "force_last": force_last, "topk": topk,
        "block_size": block_size,
    }  # fmt: skip
    form_fields("mqa_topk", fields, index_base, slot_map, order, fill)
    selection = output_fields("mqa_topk", fields, q, (rows, topk, num_blocks), out, exec)
    finish("mqa_topk", fields, exec)
    return selection


@operation
def paged_mqa_topk(
    q: Array,
    cache: KeyCache,
    weights: Array,
    topk: int,
    *,
    block_table: Array,
    end: Array | None = None,
    max_len: int = 0,
    q_scales: Array | None = None,
    start: Array | None = None,
    length: Array | None = None,
    request: Array | None = None,
    q_indptr: Array | None = None,
    next_n: int = 1,
    table_per_row: bool = False,
    shard: Shard | None = None,
    slot_map: SlotMap | None = None,
    index_base: Array | None = None,
    order: Order = "position",
    fill: Fill = "minus_one",
    candidates: Array | None = None,
    candidate_block_size: int = 0,
    force_first: int = 0,
    force_last: int = 0,
    block_size: int = 0,
    num_blocks: int = 0,
    whole_start: Array | None = None,
    whole_end: Array | None = None,
    block_scores: Array | None = None,
    count: int | None = None,
    out: Out = ("indices",),
    exec: Exec = DEFAULT_EXEC,
) -> Selection:
    """The topk best keys of each query row, straight from the pages of a key cache.

    q [R, H, D] and weights [R, H] as in mqa_topk; block_table int32 [B, pages], any strides. A row finds its request by
    request int32 [R], or q_indptr int32 [B + 1], or a uniform next_n. Its window ends at end int32 [R], or [R / next_n]
    (row j of a request then ends at end - next_n + 1 + j), or start + length. max_len: an upper bound of the windows
    (0 = what the table can hold). table_per_row: the block table has a row for each query row. shard: the windows
    count this rank's keys, the positions returned are global; candidates, blocks and forced keys then speak of the row's
    window in the whole request, whole_start and whole_end int32 [R] in global key rows, and block_scores float32
    [>= R, num_blocks], with "blocks", is filled with their scores on this rank, for merge_topk. All else as in mqa_topk.

    ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend can
    run it.
    """
    rows = extent(q, 0) if count is None else count
    fields = {
        "q": q, "q_scale": q_scales, "weights": weights, "block_table": block_table, "table_per_row": table_per_row,
        "count": rows, "starts": start, "ends": end, "lens": length, "row_request": request, "q_indptr": q_indptr,
        "next_n": next_n, "max_len": max_len, "candidates": candidates, "candidate_block": candidate_block_size,
        "force_first": force_first, "force_last": force_last, "topk": topk, "whole_start": whole_start,
        "whole_end": whole_end, "block_scores": block_scores, "block_size": block_size,
    }  # fmt: skip
    cache_fields("paged_mqa_topk", fields, cache)
    shard_fields("paged_mqa_topk", fields, shard)
    form_fields("paged_mqa_topk", fields, index_base, slot_map, order, fill)
    selection = output_fields("paged_mqa_topk", fields, q, (rows, topk, num_blocks), out, exec)
    finish("paged_mqa_topk", fields, exec)
    return selection
