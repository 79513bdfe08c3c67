# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Selection on given scores against a plain sort: ties, NaN, -0, infinities, windows, admission, blocks, fill, order."""

import numpy as np
import topkey
from formulas import selection
from formulas.numbers import DTYPES, canonical
from formulas.selection import bits_equal
from hypothesis import given
from hypothesis import strategies as st

seeds = st.integers(0, 2**32 - 1)
# Few distinct values: most cuts fall into ties.
VALUES = np.array([0.0, -0.0, 1, 1, 2, -1, np.inf, -np.inf, np.nan, -np.nan, 0.5], np.float32)


def draw(rng, rows, n, dtype="f32"):
    return rng.choice(VALUES, (rows, n)).astype(DTYPES[dtype])


def windows_of(rng, rows, n):
    """Windows of every kind: inside, empty, reaching over both ends."""
    start = rng.integers(-4, n + 3, rows).astype(np.int32)
    return start, (start + rng.integers(-2, n + 3, rows)).astype(np.int32)


def expected(scores, windows, topk, options):
    """(indices, scores, counts) for rows of given scores."""
    rows = []
    n = scores.shape[1]
    wide = canonical(scores.astype(np.float32))
    for r, window in enumerate(windows):
        candidates, mask = options.get("candidates"), options.get("mask")
        admitted = None
        if candidates is not None:
            admitted = selection.in_blocks(candidates[r], options["candidate_block_size"], window[0])
        row_scores = wide[r]
        if mask is not None:
            row_scores = canonical(row_scores + mask[r])
        readable = lambda p, r=r: 0 <= p < n and (mask is None or mask[r, p] != -np.inf)  # noqa: E731
        live = selection.live_positions(window, admitted, options.get("max_len") or np.inf, readable)
        most = topk if options.get("row_topk") is None else min(max(int(options["row_topk"][r]), 0), topk)
        forced = options.get("force_first", 0), options.get("force_last", 0)
        chosen = selection.select(lambda p, s=row_scores: s[p], live, most, window, *forced)
        order, fill = options.get("order", "position"), options.get("fill", "minus_one")
        positions = [p - window[0] for p in (sorted(chosen) if order == "position" else chosen)]
        shown = [row_scores[p + window[0]] for p in positions] + [-np.inf] * (topk - len(positions))
        rows.append((selection.row_of(positions, topk, "score", fill), shown, len(positions)))
    indices, shown, counts = zip(*rows, strict=True)
    return np.array(indices, np.int32), canonical(np.array(shown, np.float32)), np.array(counts, np.int32)


def check(scores, windows, topk, backend, **options):
    start = np.array([w[0] for w in windows], np.int32)
    end = np.array([w[1] for w in windows], np.int32)
    out = ("indices", "scores", "counts")
    got = topkey.topk(scores, topk, start=start, end=end, **options, out=out, exec=topkey.Exec(backend=backend))
    for array, want in zip(
        (got.indices, got.scores, got.counts), expected(scores, windows, topk, options), strict=True
    ):
        assert bits_equal(array, want)


@given(
    seed=seeds, rows=st.integers(1, 5), n=st.integers(1, 60), topk=st.integers(1, 40),
    dtype=st.sampled_from(["f32", "bf16", "f16"]), order=st.sampled_from(["position", "score"]),
    fill=st.sampled_from(["minus_one", "repeat", -7, 99]),
)  # fmt: skip
def test_order_ties_and_fill(backend, seed, rows, n, topk, dtype, order, fill):
    rng = np.random.default_rng(seed)
    start, end = windows_of(rng, rows, n)
    check(
        draw(rng, rows, n, dtype),
        list(zip(start.tolist(), end.tolist(), strict=True)),
        topk,
        backend,
        order=order,
        fill=fill,
    )


@given(
    seed=seeds,
    n=st.integers(1, 50),
    topk=st.integers(1, 20),
    block=st.integers(1, 7),
    first=st.integers(0, 4),
    last=st.integers(0, 4),
)
def test_admission(backend, seed, n, topk, block, first, last):
    """Candidates (repeated and wild ones too), a mask, forced keys, max_len and a count of each row's own, together."""
    rng = np.random.default_rng(seed)
    scores = np.nan_to_num(draw(rng, 4, n), posinf=9, neginf=-9)
    start, end = windows_of(rng, 4, n)
    mask = np.where(rng.random((4, n)) < 0.2, -np.inf, rng.integers(-1, 2, (4, n))).astype(np.float32)
    check(
        scores, list(zip(start.tolist(), end.tolist(), strict=True)), topk, backend,
        candidates=rng.integers(-2, n // block + 3, (4, 6)).astype(np.int32), candidate_block_size=block, mask=mask,
        force_first=first, force_last=last, max_len=int(rng.integers(0, n + 2)),
        row_topk=rng.integers(-1, topk + 3, 4).astype(np.int32), order="score",
    )  # fmt: skip


@given(seed=seeds, n=st.integers(1, 60), block=st.integers(1, 9), count=st.integers(1, 9))
def test_blocks(backend, seed, n, block, count):
    rng = np.random.default_rng(seed)
    scores = draw(rng, 4, n)
    start, end = windows_of(rng, 4, n)
    on = topkey.Exec(backend=backend)
    got = topkey.select_blocks(scores, count, block, start=start, end=end, exec=on)
    for r, window in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        live = selection.live_positions(window, readable=lambda p: 0 <= p < n)
        want = selection.best_blocks(lambda p, r=r: scores[r, p], live, window, block, count)
        assert got[r].tolist() == want
    same = topkey.topk(
        scores, 1, start=start, end=end, block_size=block, num_blocks=count, out=("indices", "blocks"), exec=on
    )
    assert bits_equal(same.blocks, got)


@given(seed=seeds, parts=st.integers(1, 5), n=st.integers(1, 60), topk=st.integers(1, 20))
def test_merged_parts_are_the_selection_of_the_whole(backend, seed, parts, n, topk):
    rng = np.random.default_rng(seed)
    scores, on = draw(rng, 3, n), topkey.Exec(backend=backend)
    owner = rng.integers(0, parts, n)
    local = [np.where(owner == part, scores, np.float32(np.nan)) for part in range(parts)]
    mask = [np.repeat((owner == part)[None], 3, axis=0) for part in range(parts)]
    each = [topkey.topk(s, topk, mask=m, out=("indices", "scores"), exec=on) for s, m in zip(local, mask, strict=True)]
    stacked = np.stack([e.scores for e in each]), np.stack([e.indices for e in each])
    for order in ("position", "score"):
        merged = topkey.merge_topk(*stacked, topk, order=order, out=("indices", "scores", "counts"), exec=on)
        whole = topkey.topk(scores, topk, order=order, out=("indices", "scores", "counts"), exec=on)
        for name in ("indices", "scores", "counts"):
            assert bits_equal(getattr(merged, name), getattr(whole, name))


def test_slots_and_index_base(on):
    scores = np.array([[1, 5, 3, 4, 2, 0]], np.float32)
    table = topkey.SlotMap(np.array([[7, -1, 2]], np.int32), 2)
    got = topkey.topk(
        scores, 4, slot_map=table, index_base=np.array([100], np.int32), out=("indices", "slots"), exec=on
    )
    assert got.indices.tolist() == [[101, 102, 103, 104]]
    assert got.slots.tolist() == [[15, -1, -1, 4]]


def test_end_of_requests_with_next_n(on):
    """`end` of one entry a request: row j of b ends at end[b] - next_n + 1 + j."""
    scores = np.tile(np.arange(9, dtype=np.float32), (6, 1))
    got = topkey.topk(scores, 1, end=np.array([5, 9], np.int32), next_n=3, exec=on)
    assert got.indices.ravel().tolist() == [2, 3, 4, 6, 7, 8]


@given(seed=seeds)
def test_merge_counts_forced_keys_and_blocks_of_the_whole(backend, seed):
    """Parts that hold every third key: starts, forced keys and blocks are the whole row's."""
    rng, on = np.random.default_rng(seed), topkey.Exec(backend=backend)
    rows, n, topk, size, parts = 3, 40, 7, 4, 3
    scores = draw(rng, rows, n)
    wide = canonical(scores)
    start = rng.integers(0, 5, rows).astype(np.int32)
    end = rng.integers(30, n + 1, rows).astype(np.int32)
    options = {"force_first": int(rng.integers(0, 3)), "force_last": int(rng.integers(0, 3))}
    whole = topkey.topk(
        scores, topk, start=start, end=end, block_size=size, num_blocks=5, out=("indices", "scores", "blocks"),
        exec=on, **options,
    )  # fmt: skip
    part_scores = np.full((parts, rows, n), -np.inf, np.float32)
    part_indices = np.full((parts, rows, n), -1, np.int32)
    blocks = n // size + 1
    block_scores = np.full((parts, rows, blocks), -np.inf, np.float32)
    block_ids = np.full((parts, rows, blocks), -1, np.int32)
    for w in range(parts):
        for r in range(rows):
            mine = [p for p in range(start[r], end[r]) if p % parts == w]
            part_indices[w, r, : len(mine)] = mine
            part_scores[w, r, : len(mine)] = wide[r, mine]
            # Every block of the row, in ascending ids; the best of its keys here, NaN where there is none.
            for b in range((end[r] - start[r] - 1) // size + 1):
                keys = [p for p in mine if (p - start[r]) // size == b]
                keys.sort(key=lambda p, r=r: selection.order_key(wide[r, p], p))
                block_ids[w, r, b] = b
                block_scores[w, r, b] = wide[r, keys[0]] if keys else np.nan
    merged = topkey.merge_topk(
        part_scores, part_indices, topk, start=start, end=end, block_scores=block_scores, block_ids=block_ids,
        num_blocks=5, out=("indices", "scores", "blocks"), exec=on, **options,
    )  # fmt: skip
    assert np.array_equal(merged.indices, whole.indices)
    assert bits_equal(merged.scores, whole.scores)
    assert np.array_equal(merged.blocks, whole.blocks)
