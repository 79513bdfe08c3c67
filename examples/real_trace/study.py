# SPDX-License-Identifier: Apache-2.0 OR MIT
"""How well does the indexer find what attention looks at?

Exact attention is computed in double from the bf16 queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import reference as ref

TOPKS = (64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Quality:
    """Means over rows at one topk; `mass` is attention probability, mean over heads."""

    topk: int
    recall: float  # share of exact attention's topk positions that the indexer selects
    mass: float  # held by the indexer's positions
    best: float  # held by exact attention's own topk positions: no selection holds more
    recent: float  # held by the topk latest positions: what a sliding window would see


def attention(q: NDArray, keys: NDArray, lens: NDArray) -> NDArray[np.float64]:
    """Probabilities [R, H, T] of bf16 q [R, H, D] on bf16 keys [T, D], row r over positions below lens[r]."""
    wide_q, wide_k = q.astype(np.float64), keys.astype(np.float64)
    scored = wide_q @ wide_k.T * q.shape[-1] ** -0.5
    scored[np.broadcast_to(np.arange(len(keys)) >= lens[:, None, None], scored.shape)] = -np.inf
    p = np.exp(scored - scored.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def indexer_scores(q: NDArray, keys: NDArray, lens: NDArray) -> NDArray[np.float32]:
    """Scores [R, T] of the quantised call, -inf from lens[r] on."""
    q_codes, weights = ref.quantize_queries(q)
    scored = ref.scores(q_codes, weights, *ref.quantize_keys(keys))
    scored[np.arange(len(keys)) >= lens[:, None]] = -np.inf
    return scored


def rank(values: NDArray, topk: int) -> NDArray[np.int64]:
    """The topk best positions of each row [R, T], best first, ties to the lower position."""
    return np.argsort(-values, axis=1, kind="stable")[:, :topk]


def quality(q: NDArray, keys: NDArray, lens: NDArray, topks: tuple[int, ...] = TOPKS) -> list[Quality]:
    """One `Quality` for each topk."""
    p = attention(q, keys, lens).mean(axis=1)
    found = rank(indexer_scores(q, keys, lens), max(topks))
    wanted = rank(p, max(topks))
    recent = lens[:, None] - 1 - np.arange(max(topks))
    return [_at(p, k, found[:, :k], wanted[:, :k], recent[:, :k]) for k in topks]


def _at(p: NDArray, topk: int, found: NDArray, wanted: NDArray, recent: NDArray) -> Quality:
    """The figures of one topk; p [R, T], the rest positions [R, topk]."""
    hit = np.zeros(p.shape, bool)
    np.put_along_axis(hit, found, True, axis=1)

    def mass(positions: NDArray) -> float:
        return float(np.take_along_axis(p, positions, axis=1).sum(axis=1).mean())

    return Quality(topk, float(np.take_along_axis(hit, wanted, axis=1).mean()), mass(found), mass(wanted), mass(recent))


@dataclass(frozen=True)
class Shape:
    """How attention is spread, and how the ReLU of the score meets it."""

    effective: float  # exp of the mean entropy: as many equal keys would be as spread
    sink: float  # attention on position 0
    positive: float  # share of visible keys whose score is above zero
    tied: float  # share of rows whose cut falls between equal scores


def shape(q: NDArray, keys: NDArray, lens: NDArray, topk: int) -> Shape:
    """The figures of `Shape`, means over rows and heads."""
    p = attention(q, keys, lens)
    entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(axis=-1)
    scored = indexer_scores(q, keys, lens)
    positive = (scored > 0).sum(axis=1) / lens
    descending = -np.sort(-scored, axis=1)
    tied = descending[:, topk - 1] == descending[:, topk]
    return Shape(float(np.exp(entropy.mean())), float(p[..., 0].mean()), float(positive.mean()), float(tied.mean()))


def describe(s: Shape) -> str:
    """The figures as text."""
    attended = f"{s.effective:.1f} effective keys, sink {s.sink:.3f}"
    return f"{attended}, {s.positive:.1%} of scores positive, cut in a tie in {s.tied:.0%} of rows"


def table(rows: list[Quality]) -> str:
    """The figures as text."""
    lines = ["  topk  recall    mass    best  recent"]
    lines += [f"{r.topk:6d}  {r.recall:6.3f}  {r.mass:6.3f}  {r.best:6.3f}  {r.recent:6.3f}" for r in rows]
    return "\n".join(lines)
