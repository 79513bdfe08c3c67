# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Host work before a step, from upper bounds on lengths: what decodes, what prefills, chunks, row shards, maxima.

Nothing here may change a result when a bound is too high. The fused search needs no chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from . import _native


class Range(NamedTuple):
    """[first, last)."""

    first: int
    last: int


class PrefillChunk(NamedTuple):
    """Consecutive requests whose keys are gathered together, and the rows that are answered from them."""

    first_request: int
    last_request: int
    first_row: int
    last_row: int
    total_keys: int
    skip_gather: bool  # same requests as the chunk before: its gathered keys are still there


class StepPlan(NamedTuple):
    num_decode_requests: int
    num_decode_rows: int
    num_prefill_rows: int
    max_next_n: int
    decode_uniform: bool
    max_decode_len: int
    max_prefill_len: int
    chunks: list[PrefillChunk]
    row_shard_sizes: list[int]  # rows of each rank; empty: not sharded


class RowShard(NamedTuple):
    """One rank's part of the prefill rows."""

    first_row: int
    last_row: int

    @classmethod
    def of(cls, plan: StepPlan, rank: int) -> RowShard:
        """All prefill rows where the plan is not sharded. ValueError for a rank that the plan does not have."""
        first = plan.num_decode_rows
        if not plan.row_shard_sizes:
            return cls(first, first + plan.num_prefill_rows)
        if not 0 <= rank < len(plan.row_shard_sizes):
            raise ValueError(f"RowShard: rank must be one of the plan's, got {rank}")
        first += sum(plan.row_shard_sizes[:rank])
        return cls(first, first + plan.row_shard_sizes[rank])

    def narrow(self, chunk: PrefillChunk) -> Range:
        """The rows of `chunk` that this rank answers; empty where it owns none. Gathering is never narrowed."""
        first, last = max(chunk.first_row, self.first_row), min(chunk.last_row, self.last_row)
        return Range(first, last) if first < last else Range(self.first_row, self.first_row)


def _ints(lens: Iterable[Any]) -> list[int]:
    return [int(n) for n in lens]


def _step(query_lens: Any, seq_lens: Any, prefilling: Any, numbers: dict[str, Any]) -> tuple[Any, ...]:
    return (
        _ints(query_lens),
        _ints(seq_lens),
        None if prefilling is None else [int(bool(p)) for p in prefilling],
        numbers,
    )


def plan_step(
    query_lens: Iterable[int],
    seq_lens: Iterable[int],
    *,
    prefilling: Iterable[bool] | None = None,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    extends_prefill: bool = False,
    ratio: int = 1,
    gather_rows: int = 0,
    logits_bytes: int = 0,
    row_shards: int = 1,
    min_shard_rows: int = 0,
    rows_at_once: int = 0,
) -> StepPlan:
    """The plan of a step whose request b has query_lens[b] rows and seq_lens[b] tokens, these included (upper bounds).

    Batch order: decodes, short extends, long extends, first chunks. decode_threshold: most rows of a decode request.
    require_uniform: decode requests must have the first one's number of rows, or none. extends_prefill: short requests
    still in their prompt (`prefilling`) are prefill. gather_rows, logits_bytes: budgets of a chunk, 0 = none.
    row_shards: ranks that share the prefill rows, at least min_shard_rows each. rows_at_once: rows that a rank's device
    answers side by side, so that shares end where rounds of them do (cuda.sm90 with fp8 keys and up to 64 heads: SMs times
    512 / heads; 0 = not known). ValueError: negative or too small.
    """
    step = _step(query_lens, seq_lens, prefilling, {
        "decode_threshold": decode_threshold, "require_uniform": require_uniform, "extends_prefill": extends_prefill,
        "ratio": ratio, "gather_rows": gather_rows, "logits_bytes": logits_bytes, "row_shards": row_shards,
        "min_shard_rows": min_shard_rows,
    })  # fmt: skip
    made = StepPlan(*_native.plan_step(*step))
    sizes = _native.row_shard_sizes(*step, rows_at_once) if rows_at_once != 0 else made.row_shard_sizes
    return made._replace(chunks=[PrefillChunk(*c) for c in made.chunks], row_shard_sizes=sizes)


def prefill_chunks(
    query_lens: Iterable[int],
    seq_lens: Iterable[int],
    *,
    prefilling: Iterable[bool] | None = None,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    extends_prefill: bool = False,
    ratio: int = 1,
    gather_rows: int = 0,
    logits_bytes: int = 0,
) -> list[PrefillChunk]:
    """The prefill chunks of plan_step alone."""
    step = _step(query_lens, seq_lens, prefilling, {
        "decode_threshold": decode_threshold, "require_uniform": require_uniform, "extends_prefill": extends_prefill,
        "ratio": ratio, "gather_rows": gather_rows, "logits_bytes": logits_bytes, "row_shards": 1, "min_shard_rows": 0,
    })  # fmt: skip
    return [PrefillChunk(*c) for c in _native.prefill_chunks(*step)]


def decode_chunks(rows: int, width: int, budget: int) -> list[Range]:
    """Slices of `rows` decode rows whose bf16 logits (rows * width * 2 bytes) fit the budget, in units of 16 rows.

    Empty: no split is needed. ValueError: a budget that does not hold 16 rows.
    """
    return [Range(*r) for r in _native.decode_chunks(rows, width, budget)]
