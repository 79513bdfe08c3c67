# SPDX-License-Identifier: Apache-2.0 OR MIT
"""What both layers are made of: their common arguments, the search into the buffer, and the worst case of workspace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import _native
from .calls import Placeholder, cache_fields, shard_fields
from .frameworks import clear_rows, framework
from .library import backends
from .operations import workspace_bytes
from .ranks import Communicator, communicator, telling
from .step import Stage, StepMetadata, bound, check_buffer, check_number, check_rows, key_cache, run_step
from .types import Array, Exec, Format, KeyCache, Scale, Shard

# Heads that workspace_bytes of a layer reckons with: no model has more, and a layer learns theirs with its first step.
_MOST_HEADS = 128
_MOST_KEYS = 2**31 - 1


class LayerBase:
    """What both layers are made of."""

    def __init__(
        self, k_cache: Any, quant_block_size: int, scale_fmt: str | None, topk_tokens: int, head_dim: int,
        topk_indices_buffer: Array, skip_k_cache_insert: bool, use_fp4_cache: bool,
    ) -> None:  # fmt: skip
        self._name = type(self).__name__
        self._numbers(1, topk_tokens=topk_tokens, head_dim=head_dim)
        self._require(quant_block_size == head_dim, "quant_block_size", f"head_dim {head_dim}", quant_block_size)
        self._require(scale_fmt in (None, "ue8m0"), "scale_fmt", "'ue8m0' or None", repr(scale_fmt))
        check_buffer(self._name, topk_indices_buffer, topk_tokens)
        self.k_cache, self.quant_block_size, self.scale_fmt = k_cache, quant_block_size, scale_fmt
        self.topk_tokens, self.head_dim = topk_tokens, head_dim
        self.topk_indices_buffer = topk_indices_buffer
        self.skip_k_cache_insert, self.use_fp4_cache = skip_k_cache_insert, use_fp4_cache
        self._communicators: dict[int, tuple[Any, Communicator]] = {}

    def _numbers(self, lowest: int, **numbers: Any) -> None:
        """Whole numbers of 32 bits, from `lowest` on."""
        for name, value in numbers.items():
            check_number(self._name, name, value, lowest)

    def _require(self, ok: bool, name: str, must: str, got: Any) -> None:
        if not ok:
            raise ValueError(f"{self._name}: {name} must be {must}, got {got}")

    def _format(self) -> Format:
        cache = bound(self.k_cache)
        return cache.format if isinstance(cache, KeyCache) else "mxfp4" if self.use_fp4_cache else "fp8"

    def _cache(self) -> KeyCache:
        return key_cache(self._name, self.k_cache, "mxfp4" if self.use_fp4_cache else "fp8", self.head_dim)

    def _scale(self) -> Scale:
        """Only fp8 keys have a scale that may be any number."""
        return "f32" if self.scale_fmt is None and self._format() in ("fp8", "fp8_fnuz") else "ue8m0"

    def _search(self, q: tuple[Array, Array | None], weights: Array, metadata: StepMetadata, rows: int) -> Stage:
        """A search into the first columns of the buffer's first rows."""
        arguments = {
            "q": q[0], "cache": self._cache(), "weights": weights, "topk": self.topk_tokens, "q_scales": q[1],
            "block_table": metadata.block_table, "end": metadata.end, "max_len": metadata.max_len,
            "request": metadata.request, "q_indptr": metadata.q_indptr, "next_n": metadata.next_n,
            "table_per_row": metadata.table_per_row, "count": rows, "out": {"indices": self.topk_indices_buffer},
        }  # fmt: skip
        return Stage("paged_mqa_topk", arguments)

    def _communicator(self, group: Any) -> Communicator | None:
        """One for each group, which is kept as long as the layer is."""
        if group is None or isinstance(group, Communicator):
            return group
        if id(group) not in self._communicators:
            self._communicators[id(group)] = group, communicator(group)
        return self._communicators[id(group)][1]

    def _fields(
        self, own: dict[str, Any], query: tuple[Any, ...], metadata: StepMetadata, rows: int
    ) -> dict[str, Any]:  # fmt: skip
        """Of a step on ranks, as the library names them."""
        gathered = (None, None) if metadata.gathered is None else metadata.gathered
        pair = isinstance(gathered, (tuple, list)) and len(gathered) == 2
        self._require(pair, "metadata.gathered", "a tuple (values, scales) or None", type(gathered).__name__)
        values, scales = gathered
        fields = {
            "q": query[0], "q_scale": query[1], "weights": query[2], "topk": self.topk_tokens, "scale": self._scale(),
            "slot_mapping": None if own.get("k") is None else metadata.slot_mapping,
            "block_table": metadata.block_table, "table_per_row": metadata.table_per_row, "ends": metadata.end,
            "row_request": metadata.request, "q_indptr": metadata.q_indptr, "next_n": metadata.next_n,
            "max_len": metadata.max_len, "count": rows, "num_decode_rows": metadata.num_decode_rows,
            "indices": self.topk_indices_buffer, "shard_decode": metadata.shard_decode, "whole_end": metadata.whole_end,
            "gathered": values, "gathered_scales": scales, "key_indptr": metadata.key_indptr,
            "total_keys": metadata.total_keys, "gathered_start": metadata.gathered_start, **own,
        }  # fmt: skip
        cache_fields(self._name, fields, self._cache())
        shard_fields(self._name, fields, metadata.shard)
        return fields

    def _run_on_ranks(
        self, own: dict[str, Any], query: tuple[Any, ...], metadata: StepMetadata, groups: tuple[Any, Any],
        rows: tuple[int, int], cleared: bool, workspace: Array | None, exec: Exec,
    ) -> Array:  # fmt: skip
        """own: fields of the layer; query: q, scales, weights; rows: of the step, and those of hidden_states."""
        buffer = self.topk_indices_buffer
        with telling(*groups):
            if not cleared:
                check_rows(self._name, buffer, rows[1])
            fields = self._fields(own, query, metadata, rows[0]) | {"cleared": cleared}
            comm, prefill = (self._communicator(group) for group in groups)
        exec = exec if workspace is None else exec._replace(workspace=workspace)
        _native.forward_sharded("pool_size" in own, fields, metadata.row_shard_sizes, comm, prefill, exec)
        if not cleared and rows[1] > rows[0]:
            clear_rows(buffer[rows[0] :], rows[1] - rows[0], exec.stream)
        return buffer

    def _bytes_on_ranks(
        self, pools: bool, limits: dict[str, int], blocks: int, shard: Shard | None, row_shards: int, prefill_size: int,
    ) -> int:  # fmt: skip
        cut = shard or Shard(0, 1)
        numbers = limits | {
            "heads": _MOST_HEADS, "head_dim": self.head_dim, "topk": self.topk_tokens, "blocks": blocks,
            "world_size": cut.world_size, "interleave": cut.interleave, "row_shards": row_shards,
            "prefill_size": prefill_size,
        }  # fmt: skip
        for name, value in numbers.items():
            check_number(self._name, name, value, 0)

        def ask(on: Exec) -> int:
            assert on.backend is not None
            return _native.sharded_workspace_bytes(pools, numbers, self._format(), on.backend)

        return most_of(self._name, self.topk_indices_buffer, ask)

    def _run(self, stages: list[Stage], hidden_rows: int, cleared: bool, workspace: Array | None, exec: Exec) -> Array:
        exec = exec if workspace is None else exec._replace(workspace=workspace)
        stages = [stage for stage in stages if stage.inserts or stage.arguments["count"] > 0]
        run_step(self._name, stages, exec, self.topk_indices_buffer, 0 if cleared else hidden_rows)
        return self.topk_indices_buffer


# ---- the worst case of workspace ----
def shape(dims: Sequence[int], dtype: str) -> Array:
    return Placeholder(tuple(dims), dtype)


def largest_search(format: Format, head_dim: int, rows: int, topk: int, max_len: int) -> Stage:
    """A search with scores, over a table as wide as it can be."""
    fp4, plain = format == "mxfp4", format not in ("fp8", "mxfp4", "fp8_fnuz")
    q = shape((rows, _MOST_HEADS, head_dim // 2 if fp4 else head_dim), "float32" if plain else "uint8")
    columns = shape((rows, topk), "int32")
    table = shape((1, _MOST_KEYS), "int32")
    out = {"indices": columns, "scores": shape((rows, topk), "float32")}
    arguments = {
        "q": q, "cache": largest_cache(format, head_dim), "weights": shape((rows, _MOST_HEADS), "float32"),
        "topk": topk, "block_table": table, "end": shape((rows,), "int32"), "request": shape((rows,), "int32"),
        "max_len": max_len, "q_scales": shape((rows, _MOST_HEADS, head_dim // 32), "uint8") if fp4 else None,
        "out": out,
    }  # fmt: skip
    return Stage("paged_mqa_topk", arguments)


def largest_cache(format: Format, head_dim: int) -> KeyCache:
    widths = {"mxfp4": head_dim // 2 + head_dim // 32, "fp8": head_dim + 4, "fp8_fnuz": head_dim + 4}
    widths |= {"q8_0": head_dim // 32 * 34, "f32": 4 * head_dim}
    return KeyCache(shape((1, widths.get(format, 2 * head_dim)), "uint8"), 1, head_dim, format)


def most_bytes(layer: str, limits: dict[str, int], stages: Sequence[Stage], buffer: Array) -> int:
    """What any of the stages needs on any backend of the buffer's device, and to align it."""
    for name, value in limits.items():
        check_number(layer, name, value, 0)
    return most_of(layer, buffer, lambda on: max(workspace_bytes(s.op, **s.arguments, exec=on) for s in stages))


def most_of(layer: str, buffer: Array, ask: Callable[[Exec], int]) -> int:
    """The most that any backend of the buffer's device answers, and what aligns it."""
    device = "cuda" if framework(buffer) == "torch" and buffer.is_cuda else "cpu"
    usable = [b.name for b in backends() if b.device == device and not b.unusable]
    sizes, why = [], f"{layer}: no backend of this build can run on {device}"
    for name in usable:
        try:
            sizes.append(ask(Exec(backend=name)))
        except RuntimeError as error:
            why = str(error)
    if not sizes:
        raise RuntimeError(why)
    return max(sizes) + 255 if max(sizes) > 0 else 0
