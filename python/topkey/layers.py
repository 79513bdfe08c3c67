# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The two layers that a model calls: insert the step's keys, answer its rows, in one buffer that all layers share. Each
stage is the public operation."""

from __future__ import annotations

from typing import Any

from .calls import extent
from .layer_base import LayerBase, largest_cache, largest_search, most_bytes, shape
from .ranks import telling
from .step import Stage, StepMetadata, bound, check_metadata, has_ranks, has_rows, query, rows_of
from .types import DEFAULT_EXEC, Array, Exec, Shard


class SparseAttnIndexer(LayerBase):
    """Stores the step's keys and writes each row's topk_tokens best positions into topk_indices_buffer.

    k_cache: uint8, int8 or float8_e4m3fn [P, page_size, row bytes], [P, page_size, 1, row bytes] or [P, bytes] of whole
    rows, a KeyCache (page size, format and layout as it says), or an object whose attribute `kv_cache` is one of these
    by the time of a step. quant_block_size is head_dim; scale_fmt "ue8m0" or None (float32 scales). use_fp4_cache:
    mxfp4 keys. topk_indices_buffer: int32 [rows, >= topk_tokens] of numpy or torch. candidate_blocks: int32 [rows, C],
    ids of blocks of candidate_block_size keys of this layer: with candidate_write each row's best ones are published
    in it, else only keys of the blocks in it are looked at. candidate_ratio: tokens of a key row of the layer that
    published them, where that is not compress_ratio (0: the same); candidate_block_size then counts that layer's keys,
    and its block must be a whole number of key rows here. max_model_len and max_total_seq_len are kept for the reader.

    ValueError: arguments that cannot go together.
    """

    def __init__(
        self,
        k_cache: Any,
        quant_block_size: int,
        scale_fmt: str | None,
        topk_tokens: int,
        head_dim: int,
        max_model_len: int,
        max_total_seq_len: int,
        topk_indices_buffer: Array,
        skip_k_cache_insert: bool = False,
        use_fp4_cache: bool = False,
        compress_ratio: int = 1,
        candidate_blocks: Array | None = None,
        candidate_block_size: int = 0,
        candidate_write: bool = False,
        candidate_ratio: int = 0,
    ) -> None:
        super().__init__(
            k_cache, quant_block_size, scale_fmt, topk_tokens, head_dim, topk_indices_buffer, skip_k_cache_insert,
            use_fp4_cache,
        )  # fmt: skip
        self._numbers(1, compress_ratio=compress_ratio)
        self._numbers(0, candidate_ratio=candidate_ratio)
        self._require(
            candidate_blocks is not None or not candidate_write, "candidate_blocks", "given with candidate_write", None
        )
        if candidate_blocks is not None:
            self._numbers(1, candidate_block_size=candidate_block_size)
        source, tokens = candidate_ratio or compress_ratio, 0 if candidate_blocks is None else candidate_block_size
        self._require(
            candidate_write or source * tokens % compress_ratio == 0, "candidate_ratio",
            f"such that a source's block is a whole number of key rows of {compress_ratio} tokens",
            f"{source} with blocks of {tokens}",
        )  # fmt: skip
        self.candidate_ratio = candidate_ratio
        self.max_model_len, self.max_total_seq_len = max_model_len, max_total_seq_len
        self.compress_ratio = compress_ratio
        self.candidate_blocks, self.candidate_block_size = candidate_blocks, candidate_block_size
        self.candidate_write = candidate_write

    def _add_candidates(self, search: Stage, blocks: Array | None) -> None:
        if self.candidate_write:
            out = search.arguments["out"] | {"blocks": blocks}
            search.arguments.update(out=out, block_size=self.candidate_block_size)
        elif blocks is not None:
            size = (self.candidate_ratio or self.compress_ratio) * self.candidate_block_size // self.compress_ratio
            search.arguments.update(candidates=blocks, candidate_block_size=size)

    def workspace_bytes(
        self, max_rows: int, max_requests: int, max_len: int, max_next_n: int = 1, *, shard: Shard | None = None,
        row_shards: int = 1, prefill_size: int = 1,
    ) -> int:  # fmt: skip
        """Enough `workspace` for any step within the limits, of up to 128 heads, on any backend; 0 is possible.

        On ranks, exchange included: shard as in StepMetadata, row_shards and prefill_size how many there are.
        """
        limits = {"max_rows": max_rows, "max_requests": max_requests, "max_len": max_len, "max_next_n": max_next_n}
        if (shard is not None and shard.world_size > 1) or row_shards > 1 or prefill_size > 1:
            blocks = extent(self.candidate_blocks, 1) if self.candidate_write else 0
            return self._bytes_on_ranks(False, limits, blocks, shard, row_shards, prefill_size)
        format, dim = self._format(), self.head_dim
        k, slots = shape((max_rows, dim), "float32"), shape((max_rows,), "int64")
        insert = {"k": k, "slot_mapping": slots, "cache": largest_cache(format, dim), "scale": self._scale()}
        search = largest_search(format, dim, max_rows, self.topk_tokens, max_len)
        if self.candidate_blocks is not None:
            self._add_candidates(search, shape((max_rows, max(extent(self.candidate_blocks, 1), 1)), "int32"))
        return most_bytes(self._name, limits, [Stage("store_k", insert), search], self.topk_indices_buffer)

    def forward(
        self,
        hidden_states: Array,
        q_quant: Array | tuple[Array, Array],
        k: Array | None,
        weights: Array,
        *,
        metadata: StepMetadata | None = None,
        group: Any = None,
        prefill_group: Any = None,
        workspace: Array | None = None,
        cleared: bool = False,
        skip_step: bool = False,
        exec: Exec = DEFAULT_EXEC,
    ) -> Array:
        """One step; returns topk_indices_buffer, of which rows [0, T) are written, T the rows of hidden_states.

        q_quant [>= R, H, D]: codes of quantize_q, with use_fp4_cache a tuple (values, scales); weights [>= R, H]; k
        [>= S, D], of which the first S = len(metadata.slot_mapping) are stored, None where the cache is written
        elsewhere. All columns of rows [0, T) become -1 first, unless they are `cleared`. Without metadata, or with
        skip_step, the buffer stays as it is. workspace: uint8 [bytes] in place of exec.workspace.

        On one of several ranks every rank calls it with what belongs together, and all of them get the answer of one,
        bit for bit: group is the Communicator (or what communicator() takes) of the ranks of metadata.shard or of
        metadata.row_shard_sizes; prefill_group that of ranks which have query rows and new keys of their own, q, k,
        weights and metadata.end then being this rank's. What StepMetadata has for them is described there.

        ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend
        can run it, or a rank has failed, is missing, or has another configuration.
        """
        if metadata is None or skip_step:
            return self.topk_indices_buffer
        with telling(group, prefill_group):
            check_metadata(self._name, metadata)
            q = query(self._name, q_quant, self.use_fp4_cache)
            ranks = has_ranks(self._name, group, prefill_group, metadata)
            hidden_rows = extent(hidden_states, 0)
            rows = rows_of(self._name, metadata, hidden_rows)
        if ranks:
            own = {"k": None if self.skip_k_cache_insert else k, "ratio": self.compress_ratio}
            if self.candidate_blocks is not None:
                own |= {
                    "candidates": self.candidate_blocks, "candidate_block_size": self.candidate_block_size,
                    "role": "source" if self.candidate_write else "consumer", "candidate_ratio": self.candidate_ratio,
                }  # fmt: skip
            groups = group, prefill_group
            return self._run_on_ranks(
                own, (*q, weights), metadata, groups, (rows, hidden_rows), cleared, workspace, exec
            )
        stages = []
        if k is not None and not self.skip_k_cache_insert and has_rows(metadata.slot_mapping):
            insert = {"k": k, "slot_mapping": metadata.slot_mapping, "cache": self._cache(), "scale": self._scale()}
            stages.append(Stage("store_k", insert, inserts=True))
        search = self._search(q, weights, metadata, rows)
        self._add_candidates(search, self.candidate_blocks)
        return self._run([*stages, search], hidden_rows, cleared, workspace, exec)

    __call__ = forward


class SparseAttnIndexerKpool(LayerBase):
    """The same over k-pools: stores the pools that the step completes, finds each row's topk_tokens / index_kpool best
    ones, and writes their tokens, followed by those of the row's open pool.

    topk_indices_buffer: int32 [rows, >= topk_tokens + index_kpool - 1]. tail_cache: bfloat16 [blocks, 2, ring,
    head_dim], the tokens of each request's open pool between steps; or an object whose `kv_cache` is one. All else as
    in SparseAttnIndexer; lengths and slots of a step count pools.
    """

    def __init__(
        self,
        k_cache: Any,
        quant_block_size: int,
        scale_fmt: str | None,
        topk_tokens: int,
        head_dim: int,
        max_pool_len: int,
        max_total_seq_len: int,
        topk_indices_buffer: Array,
        skip_k_cache_insert: bool = False,
        use_fp4_cache: bool = False,
        tail_cache: Any = None,
    ) -> None:
        super().__init__(
            k_cache, quant_block_size, scale_fmt, topk_tokens, head_dim, topk_indices_buffer, skip_k_cache_insert,
            use_fp4_cache,
        )  # fmt: skip
        self.max_pool_len, self.max_total_seq_len = max_pool_len, max_total_seq_len
        self.tail_cache = tail_cache

    def workspace_bytes(
        self, max_rows: int, max_requests: int, max_len: int, max_next_n: int = 1, *, shard: Shard | None = None,
        row_shards: int = 1, prefill_size: int = 1,
    ) -> int:  # fmt: skip
        """Enough `workspace` for any step within the limits, of up to 128 heads, on any backend; max_len in pools."""
        limits = {"max_rows": max_rows, "max_requests": max_requests, "max_len": max_len, "max_next_n": max_next_n}
        if (shard is not None and shard.world_size > 1) or row_shards > 1 or prefill_size > 1:
            return self._bytes_on_ranks(True, limits, 0, shard, row_shards, prefill_size)
        format, dim = self._format(), self.head_dim
        rows = shape((max_rows, dim), "bfloat16")
        places = shape((max_rows,), "int64")
        # Pools of one token: as many of them are looked for as can be.
        insert = {
            "k": rows, "gate": rows, "ape": shape((1, dim), "float32"), "positions": places, "slot_mapping": places,
            "cache": largest_cache(format, dim), "pool_size": 1, "tail": shape((1, 2, 1, dim), "bfloat16"),
            "tail_slots": places, "scale": self._scale(),
        }  # fmt: skip
        columns = shape((max_rows, self.topk_tokens), "int32")
        expand = {"pools": columns, "positions": places, "pool_size": 1, "out": {"indices": columns}}
        search = largest_search(format, dim, max_rows, self.topk_tokens, max_len)
        stages = [Stage("pool_k", insert), search, Stage("expand_pools", expand)]
        return most_bytes(self._name, limits, stages, self.topk_indices_buffer)

    def forward(
        self,
        hidden_states: Array,
        q_quant: Array | tuple[Array, Array],
        k: Array,
        weights: Array,
        *,
        gate_score: Array | None = None,
        compress_ape: Array | None = None,
        index_kpool: int = 1,
        positions: Array | None = None,
        metadata: StepMetadata | None = None,
        group: Any = None,
        prefill_group: Any = None,
        workspace: Array | None = None,
        cleared: bool = False,
        skip_step: bool = False,
        exec: Exec = DEFAULT_EXEC,
    ) -> Array:
        """One step, as in SparseAttnIndexer; k and gate_score bfloat16 [>= S, D], compress_ape float32 [index_kpool, D].

        positions: int32 or int64 [>= R], each row's own, -1 for padding. Keys are inserted only where k, gate_score,
        compress_ape and positions are all given; without positions the open pool's columns are left out.

        On ranks pools are what is cut and exchanged: metadata.shard.interleave and whole_end count them. k, gate_score
        and tail_slots are those of all rows on every rank, metadata.slot_mapping has this rank's pools. With
        prefill_group k and gate_score [S, D] are those of this rank's rows, as many behind the decode rows as on every
        rank; metadata.token_order says where the step's tokens lie. positions are those of this rank's rows.

        ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend
        can run it, or a rank has failed, is missing, or has another configuration.
        """
        if metadata is None or skip_step:
            return self.topk_indices_buffer
        with telling(group, prefill_group):
            check_metadata(self._name, metadata)
            q = query(self._name, q_quant, self.use_fp4_cache)
            ranks = has_ranks(self._name, group, prefill_group, metadata)
            self._numbers(1, index_kpool=index_kpool)
            topk = self.topk_tokens
            self._require(topk % index_kpool == 0, "topk_tokens", f"a multiple of index_kpool {index_kpool}", topk)
            hidden_rows = extent(hidden_states, 0)
            rows = rows_of(self._name, metadata, hidden_rows)
        if ranks:
            own = {
                "k": None if self.skip_k_cache_insert else k, "gate": gate_score, "ape": compress_ape,
                "pool_size": index_kpool, "positions": positions, "tail": bound(self.tail_cache),
                "tail_slots": None if self.tail_cache is None else metadata.tail_slots,
                "token_order": metadata.token_order, "token_positions": metadata.token_positions,
                "token_request": metadata.token_request,
            }  # fmt: skip
            groups = group, prefill_group
            return self._run_on_ranks(
                own, (*q, weights), metadata, groups, (rows, hidden_rows), cleared, workspace, exec
            )
        who = {"request": metadata.request, "q_indptr": metadata.q_indptr, "next_n": metadata.next_n}
        stages = []
        given = all(array is not None for array in (k, gate_score, compress_ape, positions))
        if given and not self.skip_k_cache_insert and has_rows(metadata.slot_mapping):
            tail = bound(self.tail_cache)
            insert = {
                "k": k, "gate": gate_score, "ape": compress_ape, "positions": positions, "cache": self._cache(),
                "slot_mapping": metadata.slot_mapping, "pool_size": index_kpool, "tail": tail,
                "tail_slots": None if tail is None else metadata.tail_slots, "scale": self._scale(), **who,
            }  # fmt: skip
            stages.append(Stage("pool_k", insert, inserts=True))
        search = self._search(q, weights, metadata, rows)
        search.arguments["topk"] = topk // index_kpool
        # Pools become tokens where they stand.
        buffer = self.topk_indices_buffer
        expand = {
            "pools": buffer[:, : topk // index_kpool], "pool_size": index_kpool, "positions": positions, "count": rows,
            "out": {"indices": buffer}, **who,
        }  # fmt: skip
        return self._run([*stages, search, Stage("expand_pools", expand)], hidden_rows, cleared, workspace, exec)

    __call__ = forward
