# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Selection, the answer of topk, mqa_topk, paged_mqa_topk and merge_topk; and how an operation is told its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from .calls import Fields, Question, make, slot_map_fields, wanted
from .frameworks import framework
from .types import Array, Exec, Fill, Order, Out, SlotMap

NAMES = ("indices", "slots", "scores", "counts", "blocks")
_FIELDS = {name: f"out.{name}" for name in NAMES}


class Selection:
    """Arrays of the caller's framework; None where not asked for.

    indices: int32 [rows, topk] positions, ascending by default; slots: int32 [rows, topk] in the attention's cache;
    scores: float32 [rows, topk]; counts: int32 [rows] entries used; blocks: int32 [rows, num_blocks]. Unused trailing
    entries hold -1 (or as `fill` said), their scores -inf. `unit` says what a position counts; set it where it is not
    tokens.
    """

    __slots__ = ("blocks", "counts", "indices", "scores", "slots", "unit")

    def __init__(
        self,
        indices: Array | None = None,
        slots: Array | None = None,
        scores: Array | None = None,
        counts: Array | None = None,
        blocks: Array | None = None,
        unit: Literal["token", "compressed", "pool", "block"] = "token",
    ) -> None:
        self.indices, self.slots, self.scores, self.counts, self.blocks = indices, slots, scores, counts, blocks
        self.unit = unit

    def __repr__(self) -> str:
        shown = ((name, getattr(self, name)) for name in NAMES)
        parts = [f"{name} {list(array.shape)}" for name, array in shown if array is not None]
        return f"Selection({', '.join(parts)}, unit={self.unit!r})"

    def tokens(self, *, ratio: int = 1, pool_size: int = 1, end: Array | None = None) -> Selection:
        """Positions of key rows as the tokens they stand for, int32 [rows, topk * ratio * pool_size], -1 unused.

        Key row p stands for tokens p * ratio * pool_size and the ones after it. With `end` (int32 [rows], tokens that
        the row sees) the tokens of its open pool, which no key row stands for yet, follow in ratio * pool_size - 1
        further columns.
        """
        width = ratio * pool_size
        if width < 1:
            raise ValueError(f"tokens: ratio and pool_size must be at least 1, got {ratio} and {pool_size}")
        indices = self._indices("tokens")
        xp = _module(indices)
        offsets = _range(xp, width, indices)
        spread = indices[:, :, None] * width + offsets
        found = xp.where((indices >= 0)[:, :, None], spread, -1).reshape(indices.shape[0], -1)
        if end is not None and width > 1:
            open_pool = _range(xp, width - 1, indices)
            seen = end[:, None]
            tail = xp.where(open_pool < seen % width, seen // width * width + open_pool, -1)
            found = xp.concatenate([found, tail], axis=1) if xp.__name__ == "numpy" else xp.cat([found, tail], dim=1)
        return Selection(indices=found.astype("int32") if xp.__name__ == "numpy" else found.to(xp.int32))

    def to_mask(self, n_keys: int) -> Array:
        """bool [rows, n_keys]: which keys are selected. Entries outside are ignored."""
        indices = self._indices("to_mask")
        xp = _module(indices)
        valid = (indices >= 0) & (indices < n_keys)
        # One column more takes what is not valid.
        columns = xp.where(valid, indices, n_keys)
        if xp.__name__ == "numpy":
            mask = xp.zeros((indices.shape[0], n_keys + 1), bool)
            xp.put_along_axis(mask, columns, True, axis=1)
        else:
            mask = xp.zeros((indices.shape[0], n_keys + 1), dtype=xp.bool, device=indices.device)
            mask.scatter_(1, columns.to(xp.int64), True)
        return mask[:, :n_keys]

    def overlap(self, other: Selection) -> Array:
        """float32 [rows]: |A & B| / |B| with `other` as B; 1 where B is empty."""
        mine, theirs = self._indices("overlap"), other._indices("overlap")
        if mine.shape[0] != theirs.shape[0]:
            raise ValueError(f"overlap: selections must have as many rows, got {mine.shape[0]} and {theirs.shape[0]}")
        xp = _module(mine)
        keys = 1 + max((int(a.max()) for a in (mine, theirs) if a.shape[0] * a.shape[1]), default=0)
        a, b = Selection(mine).to_mask(keys), Selection(theirs).to_mask(keys)
        if xp.__name__ == "numpy":
            common, size = (a & b).sum(axis=1), b.sum(axis=1)
            return xp.where(size > 0, common / xp.maximum(size, 1), 1).astype("float32")
        common, size = (a & b).sum(dim=1), b.sum(dim=1)
        return xp.where(size > 0, common / size.clamp(min=1), 1.0).to(xp.float32)

    def _indices(self, method: str) -> Array:
        if self.indices is None:
            raise ValueError(f"{method}: the selection must have indices, got {self!r}")
        return self.indices


def _module(array: Array) -> Any:
    if framework(array) == "torch":
        import torch

        return torch
    import numpy

    return numpy


def _range(xp: Any, n: int, like: Array) -> Array:
    return xp.arange(n, dtype=xp.int32) if xp.__name__ == "numpy" else xp.arange(n, dtype=xp.int32, device=like.device)


def output_fields(
    op: str, fields: Fields, like: Array, size: tuple[int, int, int], out: Out, exec: Exec | Question
) -> Selection:
    """Adds the outputs that `out` names to the fields; size: rows, topk, num_blocks of those to be made."""
    rows, topk, num_blocks = size
    selection = Selection()
    named: Mapping[str, Array | None] = wanted(op, out, NAMES)
    for name, array in named.items():
        if array is None:
            shape = (rows,) if name == "counts" else (rows, num_blocks if name == "blocks" else topk)
            array = make(like, shape, "f32" if name == "scores" else "i32", exec)
        fields[_FIELDS[name]] = array
        setattr(selection, name, array)
    return selection


def form_fields(
    op: str, fields: Fields, index_base: Array | None, slot_map: SlotMap | None, order: Order, fill: Fill
) -> None:
    """In which form entries are written."""
    fields["index_base"] = index_base
    fields["order"] = order
    slot_map_fields(op, fields, slot_map)
    if isinstance(fill, str):
        fields["fill"] = fill
    else:
        fields["fill"], fields["fill_value"] = "value", fill
