# SPDX-License-Identifier: Apache-2.0 OR MIT
"""What the layers share: what one step needs, a cache as engines allocate it, and how the stages of a step run: all of
them are checked before any of them writes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

from . import _native
from .calls import check_kind, extent, extents
from .frameworks import address, clear_rows, framework
from .operations import by_name, workspace_bytes
from .types import Array, Exec, Format, KeyCache, Shard


class StepMetadata(NamedTuple):
    """What one step needs beside the layer's own tensors; every layer of a model shares it.

    Rows are the first of the step's hidden_states. They find their request by request int32 [>= R] or q_indptr int32
    [B + 1], or a uniform next_n. end: int32 [R], key rows that a row sees, 0 for rows of padding; with next_n > 1 also
    [R / next_n], as in paged_mqa_topk (it is per row where it has as many entries as hidden_states has rows).
    """

    slot_mapping: Array  # int32 or int64 [S], where the step's keys go; -1 = not written
    block_table: Array  # int32 [B, pages]
    end: Array
    max_len: int  # an upper bound of `end`; 0: what the table can hold
    num_decode_rows: int  # rows before it are decode rows, the others prefill; all are answered alike
    request: Array | None = None
    q_indptr: Array | None = None
    next_n: int = 1
    table_per_row: bool = False
    tail_slots: Array | None = None  # k-pools: int32 or int64 [>= S], where a token waits in the tail cache
    # ---- of a step over ranks (rows then have a request and an end each)
    row_shard_sizes: Sequence[int] | None = None  # rows: prefill rows of each rank of `group` (plan_step)
    # context: this rank's part of the keys; end, slot_mapping and block_table are those of its own keys (expand_rows)
    shard: Shard | None = None
    whole_end: Array | None = None  # context: int32 [R], keys that a row sees of all ranks; for what a source publishes
    # prefill ranks: slot_mapping covers this rank's decode keys, then the prefill keys of all ranks, rank after rank
    shard_decode: bool = False  # decode rows are dealt out too
    # prefill with context: keys of all ranks are gathered into `gathered`, values [>= total_keys, ...] and scales
    gathered: tuple[Array, Array | None] | None = None
    key_indptr: Array | None = None  # int32 [B + 1], key rows of the requests
    total_keys: int = 0  # a bound of key_indptr[B]
    gathered_start: Array | None = None  # int32 [R], where the row's request begins
    # prefill ranks, k-pools: the T new tokens of all ranks as one rank has them; slot_mapping and tail_slots count them
    token_order: Array | None = None  # int32 [T], their rows of k: this rank's decode rows, then all ranks' prefill rows
    token_positions: Array | None = None  # int32 or int64 [T]
    token_request: Array | None = None  # int32 [T], -1: padding


class Stage(NamedTuple):
    """One operation of a step."""

    op: str
    arguments: dict[str, Any]
    inserts: bool = False  # writes to the caches, and so comes before the buffer is cleared


def bound(holder: Any) -> Any:
    """The allocation itself, of an object that an engine binds one to later."""
    return getattr(holder, "kv_cache", holder)


def key_cache(layer: str, holder: Any, format: Format, head_dim: int) -> KeyCache:
    """k_cache as a KeyCache. Bytes of pages are kept as they are: any page stride, uint8, int8 or fp8."""
    pages = bound(holder)
    if isinstance(pages, KeyCache):
        if (pages.format == "mxfp4") != (format == "mxfp4") or pages.head_dim != head_dim:
            wanted = "of mxfp4 keys" if format == "mxfp4" else "not of mxfp4 keys"
            raise ValueError(
                f"{layer}: k_cache must be {wanted} and of head_dim {head_dim}, got {pages.format} and {pages.head_dim}"
            )
        return pages
    shape = extents(pages)
    width = head_dim // 2 + head_dim // 32 if format == "mxfp4" else head_dim + 4
    if (len(shape) == 3 or (len(shape) == 4 and shape[2] == 1)) and shape[-1] == width:
        return KeyCache(pages, int(shape[1]), head_dim, format)
    if len(shape) == 2 and shape[1] >= width and shape[1] % width == 0:
        return KeyCache(pages, int(shape[1]) // width, head_dim, format)
    raise ValueError(
        f"{layer}: k_cache must be [pages, page_size, {width}], [pages, page_size, 1, {width}], [pages, page_size * "
        f"{width}], or a topkey.KeyCache, got {list(shape) if shape else type(pages).__name__}"
    )


def query(layer: str, q_quant: Any, fp4: bool) -> tuple[Array, Array | None]:
    """Values and scales of q_quant, a pair exactly where the cache is of mxfp4."""
    pair = isinstance(q_quant, (tuple, list))
    if fp4 and not (pair and len(q_quant) == 2 and all(part is not None for part in q_quant)):
        got = f"{len(q_quant)} of them" if pair else type(q_quant).__name__
        raise ValueError(f"{layer}: q_quant must be a tuple (values, scales) with use_fp4_cache, got {got}")
    if not fp4 and (pair or q_quant is None):
        raise ValueError(f"{layer}: q_quant must be one array without use_fp4_cache, got {type(q_quant).__name__}")
    return (q_quant[0], q_quant[1]) if fp4 else (q_quant, None)


def check_number(layer: str, name: str, value: Any, lowest: int) -> None:
    """A whole number of 32 bits, from `lowest` on, also one of numpy."""
    try:
        whole = index(value)
    except TypeError:
        raise ValueError(f"{layer}: {name} must be a whole number from {lowest} on, got {value!r}") from None
    if not lowest <= whole < 2**31:
        must = f"at least {lowest}" if whole < lowest else f"at most {2**31 - 1}"
        raise ValueError(f"{layer}: {name} must be {must}, got {value}")


def check_metadata(layer: str, metadata: Any) -> None:
    if not isinstance(metadata, StepMetadata):
        raise ValueError(f"{layer}: metadata must be a topkey.StepMetadata or None, got {type(metadata).__name__}")
    for name, lowest in (("max_len", 0), ("num_decode_rows", 0), ("next_n", 0)):
        check_number(layer, f"metadata.{name}", getattr(metadata, name), lowest)


def rows_of(layer: str, metadata: StepMetadata, hidden_rows: int) -> int:
    """Rows that the step answers."""
    if metadata.end is None:
        raise ValueError(f"{layer}: metadata.end must be int32 [rows], got None")
    entries, next_n = extent(metadata.end, 0), max(metadata.next_n, 1)
    rows = entries if entries == hidden_rows else entries * next_n
    if rows > hidden_rows:
        raise ValueError(f"{layer}: metadata.end must be of at most {hidden_rows} rows of hidden_states, got {rows}")
    if not 0 <= metadata.num_decode_rows <= rows:
        raise ValueError(f"{layer}: metadata.num_decode_rows must be from 0 to {rows}, got {metadata.num_decode_rows}")
    return rows


def has_rows(array: Array) -> bool:
    """False for an array of no rows, which takes no stage; one that is missing is for the stage to refuse."""
    return extents(array) != (0,)


def has_ranks(layer: str, group: Any, prefill_group: Any, metadata: StepMetadata) -> bool:
    """Whether the step is one of several ranks'."""
    if metadata.shard is not None:
        check_kind(layer, "metadata.shard", metadata.shard, Shard)
        check_number(layer, "metadata.shard.world_size", metadata.shard.world_size, 0)
    sharded = metadata.shard is not None and metadata.shard.world_size > 1
    cut = sharded or metadata.row_shard_sizes is not None
    if cut != (group is not None):
        must = "a communicator of the ranks" if cut else "None without metadata.shard or metadata.row_shard_sizes"
        raise ValueError(f"{layer}: group must be {must}, got {'None' if cut else type(group).__name__}")
    return cut or prefill_group is not None


def check_buffer(layer: str, buffer: Array, columns: int) -> None:
    """topk_indices_buffer, as far as the layer itself knows; and whether its rows can be cleared here."""
    kind, shape = framework(buffer), extents(buffer)
    dtype = _native.dtype_of(buffer) if kind in ("numpy", "torch") else None
    if dtype != "i32" or len(shape) != 2 or shape[1] < columns:
        got = f"{dtype} {list(shape)}" if dtype is not None else type(buffer).__name__
        raise ValueError(f"{layer}: topk_indices_buffer must be i32 [rows, >={columns}] of numpy or torch, got {got}")


def check_rows(layer: str, buffer: Array, rows: int) -> None:
    if extent(buffer, 0) < rows:
        raise ValueError(
            f"{layer}: topk_indices_buffer must have the {rows} rows of hidden_states, got {extent(buffer, 0)}"
        )


def _check_workspace(layer: str, workspace: Array | None, needed: int) -> None:
    """The library wants it aligned to 256 bytes, and any array will do: what precedes such an address is skipped."""
    if workspace is None:
        return
    usable = max(extent(workspace, 0) - -address(workspace) % 256, 0)
    if usable < needed:
        raise ValueError(f"{layer}: workspace must be at least {needed} bytes from a multiple of 256 on, got {usable}")


def _refuse_shapes_only(layer: str, stages: Sequence[Stage]) -> None:
    """Questions about a call take tensors without memory; a step does not."""
    for stage in stages:
        for name, value in stage.arguments.items():
            if getattr(value, "is_meta", False):
                raise ValueError(f"{layer}: {name} must be on cpu or cuda, got a tensor on meta")


def _rehearse(search: Stage, exec: Exec) -> None:
    """A strict search that leaves nothing behind: it raises where the block table or a request is wild."""
    out = search.arguments["out"]
    made = {"out": tuple(out), "num_blocks": extent(out.get("blocks"), 1), "exec": exec._replace(stats=None)}
    by_name(search.op)(**search.arguments | made)


def run_step(layer: str, stages: Sequence[Stage], exec: Exec, buffer: Array, rows_to_clear: int) -> None:
    """Checks every stage, then runs: keys are inserted, the buffer's rows are cleared, the others answer into it."""
    check_rows(layer, buffer, rows_to_clear)
    _refuse_shapes_only(layer, stages)
    needed = [workspace_bytes(stage.op, **stage.arguments, exec=exec) for stage in stages]
    _check_workspace(layer, exec.workspace, max(needed, default=0))
    if exec.strict:
        for stage in stages:
            if stage.op == "paged_mqa_topk":
                _rehearse(stage, exec)
    for stage in stages:
        if stage.inserts:
            by_name(stage.op)(**stage.arguments, exec=exec)
    clear_rows(buffer, rows_to_clear, exec.stream)
    for stage in stages:
        if not stage.inserts:
            by_name(stage.op)(**stage.arguments, exec=exec)
