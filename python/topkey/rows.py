# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Stage `rows`: device lengths to query rows, positions to physical slots."""

from __future__ import annotations

from typing import NamedTuple

from .calls import Fields, extent, finish, make, operation, shard_fields, wanted
from .types import DEFAULT_EXEC, Array, Exec, Out, Shard


class ExpandedRows(NamedTuple):
    """Rows of a step; None where not asked for."""

    row_request: Array | None = None  # int32 [capacity], -1 for rows of no request
    lens: Array | None = None  # int32 [capacity], key rows that this rank lets the row see
    positions: Array | None = None  # int64 [capacity], token positions
    slots: Array | None = None  # int64 [capacity], slot_mapping of store_k


class Slots(NamedTuple):
    """Physical slots of positions; None where not asked for."""

    slots: Array | None = None  # int32 [R, K]
    counts: Array | None = None  # int32 [R], valid slots


@operation
def expand_rows(
    query_start: Array,
    seq_lens: Array,
    *,
    capacity: int,
    ratio: int = 1,
    shard: Shard | None = None,
    block_table: Array | None = None,
    page_size: int = 0,
    out: Out | None = None,
    exec: Exec = DEFAULT_EXEC,
) -> ExpandedRows:
    """From lengths on the device to the rows of a step.

    query_start int32 [B + 1], ascending from 0; seq_lens int32 [B], tokens of each request, this step's included.
    `capacity` rows are written. A row at token position p sees (p + 1) // ratio key rows, of which a shard's rank sees
    its own. With block_table int32 [B, pages] and page_size also the slot of each token that completes a key row, else
    -1. out: names of the outputs to be made (all that can be, by default), or arrays [>= capacity] by name.

    ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend can
    run it.
    """
    if out is None:
        out = ("row_request", "lens", "positions") if block_table is None else ExpandedRows._fields
    named = wanted("expand_rows", out, ExpandedRows._fields)
    made = {}
    for name, array in named.items():
        wide = name in ("positions", "slots")
        made[name] = make(query_start, (capacity,), "i64" if wide else "i32", exec) if array is None else array
    fields: Fields = {
        "query_start": query_start, "seq_lens": seq_lens, "ratio": ratio, "block_table": block_table,
        "page_size": page_size, "capacity": capacity, **made,
    }  # fmt: skip
    shard_fields("expand_rows", fields, shard)
    finish("expand_rows", fields, exec)
    return ExpandedRows(**made)


@operation
def to_slots(
    indices: Array,
    block_table: Array,
    page_size: int,
    *,
    row_request: Array | None = None,
    shard: Shard | None = None,
    compact: bool = False,
    out: Out = ("slots", "counts"),
    exec: Exec = DEFAULT_EXEC,
) -> Slots:
    """Positions int32 [R, K] (-1 = none) to slots page * page_size + offset, -1 where there is none.

    block_table int32 [B, pages]; row_request int32 [R], absent: row r is request r. Under a shard positions are global,
    and those of other ranks get -1. compact moves the valid slots of a row to its front, in order.

    ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend can
    run it.
    """
    rows, width = extent(indices, 0), extent(indices, 1)
    made = {}
    for name, array in wanted("to_slots", out, Slots._fields).items():
        made[name] = (
            make(indices, (rows, width) if name == "slots" else (rows,), "i32", exec) if array is None else array
        )
    fields: Fields = {
        "indices": indices, "row_request": row_request, "block_table": block_table, "page_size": page_size,
        "compact": compact, **made,
    }  # fmt: skip
    shard_fields("to_slots", fields, shard)
    finish("to_slots", fields, exec)
    return Slots(**made)
