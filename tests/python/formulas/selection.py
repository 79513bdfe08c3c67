# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Windows, live keys, the order of the selection, candidate blocks: one row at a time, in plain Python."""

import math

import numpy as np


def order_key(score, position):
    """Smaller is better: score descending (-0 equals +0), NaN below -inf, then position ascending."""
    return (math.isnan(score), 0.0 if math.isnan(score) else -float(score), position)


def live_positions(window, admitted=None, limit=math.inf, readable=lambda p: True):
    """Positions of [start, end) that are let through, within `limit` of the start, and can be read."""
    start, end = window
    inside = range(start, end)
    return [p for p in inside if (admitted is None or admitted(p)) and p - start < limit and readable(p)]


def in_blocks(candidates, block_size, start):
    """Lets positions of the candidate blocks through; blocks count from the row's start."""
    wanted = {int(c) for c in candidates if c >= 0}
    return lambda p: (p - start) // block_size in wanted


def select(score_of, live, topk, window, force_first=0, force_last=0):
    """The first min(topk, live) positions: forced keys by position, then by order_key."""
    start, end = window
    forced = [p for p in live if p < start + force_first or p >= end - force_last]
    others = sorted(set(live) - set(forced), key=lambda p: order_key(score_of(p), p))
    return (forced + others)[:topk]


def row_of(chosen, topk, order="position", fill="minus_one"):
    """A row of the output as positions: ordered, unused entries filled."""
    row = sorted(chosen) if order == "position" else list(chosen)
    unused = {"minus_one": -1, "repeat": row[0] if row else -1}.get(fill, fill)
    return row + [unused] * (topk - len(row))


def best_blocks(score_of, live, window, block_size, count):
    """Ids of the best blocks, ascending, -1 unused; the newest key's block is always among them."""
    start, end = window
    if end <= start:
        return [-1] * count
    best = {}
    for p in live:
        block, key = (p - start) // block_size, order_key(score_of(p), 0)
        best[block] = min(best.get(block, key), key)
    newest = (end - 1 - start) // block_size
    others = sorted((b for b in best if b != newest), key=lambda b: (best[b], b))
    ids = sorted([newest, *others[: count - 1]])
    return ids + [-1] * (count - len(ids))


def window_of(row, columns, start=None, end=None, length=None, next_n=1):
    """[start, end) of a row as the arguments give it; next_n > 1: `end` has an entry a request."""
    first = 0 if start is None else int(start[row])
    if length is not None:
        return first, first + int(length[row])
    if end is None:
        return first, columns
    return first, int(end[row // next_n]) - next_n + 1 + row % next_n


def bits_equal(a, b):
    """Same shape and same bits."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
