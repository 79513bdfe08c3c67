# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Stage `score`: scores as a matrix, for callers who want it."""

from __future__ import annotations

from . import _native
from .calls import cache_fields, extent, finish, make, operation, shard_fields
from .types import DEFAULT_EXEC, Array, Exec, Format, KeyCache, Shard

_FORMATS: dict[str, Format] = {"f8_e4m3fn": "fp8", "bf16": "bf16", "f16": "f16", "f32": "f32"}


def dense_format(op: str, k: Array) -> Format:
    """The key format that a dtype says; bytes say none."""
    if k is None:
        raise ValueError(f"{op}: k must be given, got None")
    dtype = _native.dtype_of(k)
    if dtype == "u8":
        raise ValueError(f"{op}: format must be given for keys in bytes, got None")
    return _FORMATS.get(dtype, "f32")  # the library says what is wrong with the dtype


@operation
def mqa_logits(
    q: Array,
    k: Array,
    weights: Array,
    *,
    k_scales: Array | None = None,
    q_scales: Array | None = None,
    start: Array | None = None,
    end: Array | None = None,
    length: Array | None = None,
    mask: Array | None = None,
    format: Format | None = None,
    clean: bool = True,
    request: Array | None = None,
    q_indptr: Array | None = None,
    next_n: int = 1,
    max_len: int = 0,
    count: int | None = None,
    out: Array | None = None,
    exec: Exec = DEFAULT_EXEC,
) -> Array:
    """Scores of all keys for each query row, float32 [R, N]: column n is key n.

    Arguments as in mqa_topk. Columns outside a row's window are -inf; with clean=False they are not written. out:
    float32 or bfloat16 [>= R, >= N] to be filled and returned.

    ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend can
    run it.
    """
    rows = extent(q, 0) if count is None else count
    logits = make(q, (rows, extent(k, 0)), "f32", exec) if out is None else out
    fields = {
        "q": q, "q_scale": q_scales, "weights": weights, "keys": k, "key_scale": k_scales,
        "format": dense_format("mqa_logits", k) if format is None else format,
        "count": rows, "starts": start, "ends": end, "lens": length, "row_request": request, "q_indptr": q_indptr,
        "next_n": next_n, "max_len": max_len, "mask": mask, "clean": clean, "logits": logits,
    }  # fmt: skip
    finish("mqa_logits", fields, exec)
    return logits


@operation
def paged_mqa_logits(
    q: Array,
    cache: KeyCache,
    weights: Array,
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
    clean: bool = False,
    count: int | None = None,
    out: Array | None = None,
    exec: Exec = DEFAULT_EXEC,
) -> Array:
    """Scores of each request's keys in pages, float32 [R, W]: column n is position n of the row's request.

    W is max_len, or what the block table can hold where that is less, where max_len is 0, or where start is given.
    Arguments as in paged_mqa_topk. Columns outside a row's window are not written; with clean they are -inf.

    ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend can
    run it.
    """
    rows = extent(q, 0) if count is None else count
    fields = {
        "q": q, "q_scale": q_scales, "weights": weights, "block_table": block_table, "table_per_row": table_per_row,
        "count": rows, "starts": start, "ends": end, "lens": length, "row_request": request, "q_indptr": q_indptr,
        "next_n": next_n, "max_len": max_len, "clean": clean,
    }  # fmt: skip
    cache_fields("paged_mqa_logits", fields, cache)
    if out is None:
        width = extent(block_table, 1) * max(cache.page_size, 0)
        out = make(q, (rows, min(max_len, width) if max_len > 0 and start is None else width), "f32", exec)
    fields["logits"] = out
    shard_fields("paged_mqa_logits", fields, shard)
    finish("paged_mqa_logits", fields, exec)
    return out
