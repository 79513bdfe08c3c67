# SPDX-License-Identifier: Apache-2.0 OR MIT
"""What operations are given beside plain arrays: small tuples, named as the structs of the C++ headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Union

Array = Any
"""numpy (also with ml_dtypes), torch, or anything with the buffer protocol or ``__dlpack__``."""
Format = Literal["fp8", "mxfp4", "bf16", "f16", "f32", "q8_0", "fp8_fnuz"]
Layout = Literal["planar", "interleaved", "tiled16", "tiled32", "tiled64"]
Scale = Literal["ue8m0", "f32"]
Order = Literal["position", "score", "any"]
Fill = Union[Literal["minus_one", "repeat"], int]
Out = Union[Sequence[str], Mapping[str, Array]]
"""Names of outputs to be made, or arrays to be filled by name."""


class Exec(NamedTuple):
    """Where and how a call runs. The device is that of the arrays."""

    backend: str | None = None  # None: the best that can run (TOPKEY_BACKEND sets the default)
    stream: int | None = None  # cudaStream_t; None: the current stream of the arrays' framework
    workspace: Array | None = None  # uint8 [bytes]; None: the package takes care of it
    max_sms: int = 0  # 0: all. No bit of a result depends on it, nor on threads
    threads: int = 0
    stats: Array | None = None  # uint64 [8], counters that a call adds to (docs/numerics.md)
    arithmetic: str | None = None  # None: the backend's own; else its name, or the call is refused
    strategy: str | None = None  # selection, for tests and tuning
    strict: bool = False  # CPU: wild page ids, slots and requests raise before anything is written
    overlap_previous: bool = False


DEFAULT_EXEC = Exec()


class KeyCache(NamedTuple):
    """Pages of keys as engines allocate them: uint8 ``[P, bytes]``, or ``[P, page_size, row_bytes]`` and the like."""

    pages: Array
    page_size: int
    head_dim: int
    format: Format = "fp8"
    layout: Layout = "planar"


class SlotMap(NamedTuple):
    """The block table of the cache that the attention reads, int32 ``[B, pages]``."""

    block_table: Array
    page_size: int
    table_per_row: bool = False


class Rope(NamedTuple):
    """Rotates ``dim`` dims by ``cos_sin[positions]``; a row of the table is ``cos | sin``, ``dim / 2`` each."""

    positions: Array
    cos_sin: Array
    dim: int
    style: Literal["half_split", "interleaved"] = "half_split"
    where: Literal["leading", "trailing"] = "leading"


class Norm(NamedTuple):
    """Layer or RMS norm over the head dim, before rope."""

    kind: Literal["layer", "rms"]
    weight: Array | None = None
    bias: Array | None = None
    eps: float = 1e-6


class Shard(NamedTuple):
    """Keys interleaved over ranks: key row g belongs to rank ``g // interleave % world_size``."""

    rank: int
    world_size: int
    interleave: int = 1


class Backend(NamedTuple):
    """One backend of this build. ``unusable``: why it cannot run on this machine, or ""."""

    name: str
    device: Literal["cpu", "cuda"]
    unusable: str
    detail: str  # what it found on this machine: the instruction set of `cpu`
