# SPDX-License-Identifier: Apache-2.0 OR MIT
"""TopKey: the sparse attention indexer. For every query row, the positions of the k best keys.

    >>> import numpy as np, topkey
    >>> q, k, weights = np.ones((1, 2, 4), "f4"), np.eye(6, 4, dtype="f4"), np.ones((1, 2), "f4")
    >>> topkey.mqa_topk(q, k, weights, 3, causal=True).indices
    array([[0, 1, 2]], dtype=int32)

Arrays are numpy's (also with ml_dtypes) or torch's, others through DLPack; none is copied. Field names are those of the
C++ headers: `k` is always keys, `topk` always a count. docs/python.md has an overview.
"""

from . import _native
from .keys import gather_k, quantize_k, quantize_q, store_k
from .layers import SparseAttnIndexer, SparseAttnIndexerKpool
from .library import backends, numerics_version, prepare
from .operations import unsupported, workspace_bytes
from .plan import PrefillChunk, Range, RowShard, StepPlan, decode_chunks, plan_step, prefill_chunks
from .pool import compress_k, expand_pools, pool_k
from .ranks import (
    Communicator,
    Transport,
    communicator,
    local_communicators,
    mpi_communicator,
    nccl_communicator,
    transport_unusable,
)
from .rows import ExpandedRows, Slots, expand_rows, to_slots
from .score import mqa_logits, paged_mqa_logits
from .search import mqa_topk, paged_mqa_topk
from .select import merge_topk, select_blocks, topk
from .selection import Selection
from .step import StepMetadata
from .traces import Packed, Trace, load_trace, save_trace, trace_of
from .types import Backend, Exec, KeyCache, Norm, Rope, Shard, SlotMap

__version__: str = _native.version()
if _native.abi_version() != _native.ABI_VERSION:
    raise ImportError(f"topkey: the extension speaks ABI {_native.ABI_VERSION}, the library {_native.abi_version()}")

__all__ = [
    "Backend", "Communicator", "Exec", "ExpandedRows", "KeyCache", "Norm", "Packed", "PrefillChunk", "Range", "Rope", "RowShard",
    "Selection", "Shard", "SlotMap", "Slots", "SparseAttnIndexer", "SparseAttnIndexerKpool", "StepMetadata", "StepPlan",
    "Trace", "Transport", "backends", "communicator", "compress_k", "decode_chunks", "expand_pools", "expand_rows", "gather_k", "load_trace", "local_communicators",
    "merge_topk", "mpi_communicator", "mqa_logits", "mqa_topk", "nccl_communicator", "numerics_version", "paged_mqa_logits", "paged_mqa_topk", "plan_step",
    "pool_k", "prefill_chunks", "prepare", "quantize_k", "quantize_q", "save_trace", "select_blocks", "store_k",
    "to_slots", "topk", "trace_of", "transport_unusable", "unsupported", "workspace_bytes",
]  # fmt: skip
