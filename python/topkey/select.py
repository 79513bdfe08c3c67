# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Stages `select` and `merge`: the k best of given scores, exactly."""

from __future__ import annotations

from .calls import extent, finish, make, operation
from .selection import Selection, form_fields, output_fields
from .types import DEFAULT_EXEC, Array, Exec, Fill, Order, Out, SlotMap


@operation
def topk(
    scores: Array,
    topk: int,
    *,
    start: Array | None = None,
    end: Array | None = None,
    length: Array | None = None,
    next_n: int = 1,
    row_topk: Array | None = None,
    request: Array | None = None,
    q_indptr: Array | None = None,
    slot_map: SlotMap | None = None,
    index_base: Array | None = None,
    order: Order = "position",
    fill: Fill = "minus_one",
    candidates: Array | None = None,
    candidate_block_size: int = 0,
    mask: Array | None = None,
    force_first: int = 0,
    force_last: int = 0,
    block_size: int = 0,
    num_blocks: int = 0,
    max_len: int = 0,
    count: int | None = None,
    out: Out = ("indices",),
    exec: Exec = DEFAULT_EXEC,
) -> Selection:
    """The topk best columns of each row of `scores` [R, N] (float32, bfloat16 or float16).

    The order: forced keys, then score descending, then position ascending; -0 equals +0; NaN last. row_topk int32 [R]
    gives each row its own count, at most topk. Windows, admission and outputs as in mqa_topk.

    ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend can
    run it.
    """
    rows = extent(scores, 0) if count is None else count
    fields = {
        "scores": scores, "row_topk": row_topk, "count": rows, "starts": start, "ends": end, "lens": length,
        "row_request": request, "q_indptr": q_indptr, "next_n": next_n, "max_len": max_len, "candidates": candidates,
        "candidate_block": candidate_block_size, "mask": mask, "force_first": force_first, "force_last": force_last,
        "topk": topk, "block_size": block_size,
    }  # fmt: skip
    form_fields("topk", fields, index_base, slot_map, order, fill)
    selection = output_fields("topk", fields, scores, (rows, topk, num_blocks), out, exec)
    finish("topk", fields, exec)
    return selection


@operation
def select_blocks(
    scores: Array,
    num_blocks: int,
    block_size: int,
    *,
    start: Array | None = None,
    end: Array | None = None,
    length: Array | None = None,
    request: Array | None = None,
    q_indptr: Array | None = None,
    next_n: int = 1,
    max_len: int = 0,
    count: int | None = None,
    out: Array | None = None,
    exec: Exec = DEFAULT_EXEC,
) -> Array:
    """The num_blocks best blocks of block_size columns of each row of `scores` [R, N], int32 [R, num_blocks].

    Blocks count from the row's start, ids ascend, unused entries are -1; the block of the newest key is always among
    them. out: int32 [>= R, num_blocks] to be filled and returned.

    ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend can
    run it.
    """
    rows = extent(scores, 0) if count is None else count
    blocks = make(scores, (rows, num_blocks), "i32", exec) if out is None else out
    fields = {
        "scores": scores, "block_size": block_size, "count": rows, "starts": start, "ends": end, "lens": length,
        "row_request": request, "q_indptr": q_indptr, "next_n": next_n, "max_len": max_len, "blocks": blocks,
    }  # fmt: skip
    finish("select_blocks", fields, exec)
    return blocks


@operation
def merge_topk(
    scores: Array,
    indices: Array,
    topk: int,
    *,
    start: Array | None = None,
    end: Array | None = None,
    length: Array | None = None,
    order: Order = "position",
    fill: Fill = "minus_one",
    force_first: int = 0,
    force_last: int = 0,
    block_scores: Array | None = None,
    block_ids: Array | None = None,
    num_blocks: int = 0,
    request: Array | None = None,
    q_indptr: Array | None = None,
    next_n: int = 1,
    slot_map: SlotMap | None = None,
    index_base: Array | None = None,
    count: int | None = None,
    out: Out = ("indices",),
    exec: Exec = DEFAULT_EXEC,
) -> Selection:
    """Selections of parts to the selection of the whole: scores float32 and indices int32 [W, R, K], -1 unused.

    Positions are global and each is in one part only. The result equals, bit for bit, selecting on the whole. start
    int32 [R] of the row's window in the whole is subtracted from the positions, force_first counts from it, force_last
    from end (or start + length). "blocks" [R, num_blocks] are the best of block_scores float32 and block_ids int32
    [W, R, C], C at least num_blocks, as paged_mqa_topk gives them under a shard.

    ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend can
    run it.
    """
    rows = extent(scores, 1) if count is None else count
    fields = {
        "scores": scores, "indices": indices, "topk": topk, "count": rows, "starts": start, "ends": end,
        "lens": length, "row_request": request, "q_indptr": q_indptr, "next_n": next_n, "force_first": force_first,
        "force_last": force_last, "block_scores": block_scores, "block_ids": block_ids,
    }  # fmt: skip
    form_fields("merge_topk", fields, index_base, slot_map, order, fill)
    selection = output_fields("merge_topk", fields, scores, (rows, topk, num_blocks), out, exec)
    finish("merge_topk", fields, exec)
    return selection
