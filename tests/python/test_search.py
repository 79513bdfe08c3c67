# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The product: fused equals unfused bit for bit, and on exact inputs the sort of S_ref; dense, paged, sharded."""

import numpy as np
import pytest
import topkey
from data import SUPPORTED, paged, problem
from formulas import selection
from formulas.numbers import canonical
from formulas.rows import OneRank
from formulas.score import s_ref
from formulas.selection import bits_equal
from hypothesis import given
from hypothesis import strategies as st

seeds = st.integers(0, 2**32 - 1)
ALL = ("indices", "scores", "counts")


def best(scores, ends, topk):
    """Rows of positions of the topk best of scores[r, :ends[r]], ascending, -1 unused."""
    rows = []
    for r, end in enumerate(ends):
        window = (0, max(int(end), 0))
        chosen = selection.select(lambda p, r=r: scores[r, p], selection.live_positions(window), topk, window)
        rows.append(selection.row_of(chosen, topk))
    return np.array(rows, np.int32)


@pytest.mark.parametrize("format", SUPPORTED)
@given(seed=seeds, rows=st.integers(1, 5), n=st.integers(1, 60), topk=st.integers(1, 30))
def test_causal_rows_of_exact_inputs(backend, format, seed, rows, n, topk):
    p = problem(np.random.default_rng(seed), format, rows, 3, 32, n)
    got = topkey.mqa_topk(**p.arguments, **p.dense, topk=topk, causal=True, exec=topkey.Exec(backend=backend))
    scores = canonical(s_ref(p.q, p.k, p.w, p.outer))
    assert bits_equal(got.indices, best(scores, [n - rows + m + 1 for m in range(rows)], topk))


@pytest.mark.parametrize("format", SUPPORTED)
@given(
    seed=seeds,
    n=st.integers(1, 80),
    topk=st.integers(1, 30),
    order=st.sampled_from(["position", "score"]),
    block=st.integers(1, 8),
)
def test_fused_equals_unfused(backend, format, seed, n, topk, order, block):
    rng = np.random.default_rng(seed)
    p, on = problem(rng, format, 4, 3, 32, n, exact=False), topkey.Exec(backend=backend)
    rows = {"start": rng.integers(-2, n, 4).astype(np.int32), "length": rng.integers(-1, n + 2, 4).astype(np.int32)}
    admit = {"candidates": rng.integers(0, n // block + 1, (4, 3)).astype(np.int32), "candidate_block_size": block}
    form = {
        "order": order,
        "force_first": 1,
        "force_last": 2,
        "block_size": block,
        "num_blocks": 3,
        "out": (*ALL, "blocks"),
    }
    fused = topkey.mqa_topk(**p.arguments, **p.dense, topk=topk, **rows, **admit, **form, exec=on)
    logits = topkey.mqa_logits(**p.arguments, **p.dense, **rows, exec=on)
    unfused = topkey.topk(logits, topk, **rows, **admit, **form, exec=on)
    for name in (*ALL, "blocks"):
        assert bits_equal(getattr(fused, name), getattr(unfused, name))


@pytest.mark.parametrize("format", SUPPORTED)
@given(
    seed=seeds, page_size=st.integers(1, 9), topk=st.integers(1, 20), layout=st.sampled_from(["planar", "interleaved"])
)
def test_paged_rows_of_any_order(backend, format, seed, page_size, topk, layout):
    """Rows in any order of requests, padding rows between them; wild page ids hide keys and are counted."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, 3)
    p = problem(rng, format, 6, 2, 32, int(lengths.sum()))
    cache, table = paged(rng, p, lengths, page_size, layout, spare=1)
    table[0, 0] = rng.choice([-1, 10**6])
    request = rng.integers(-1, 3, 6).astype(np.int32)
    end = np.array([rng.integers(0, lengths[b] + 1) for b in request], np.int32)
    stats = np.zeros(8, np.uint64)
    got = topkey.paged_mqa_topk(
        p.arguments["q"], cache, p.arguments["weights"], topk, q_scales=p.arguments.get("q_scales"), block_table=table,
        request=request, end=end, max_len=30, out=ALL, exec=topkey.Exec(backend=backend, stats=stats),
    )  # fmt: skip
    scores, first = canonical(s_ref(p.q, p.k, p.w, p.outer)), np.concatenate([[0], np.cumsum(lengths)])
    hidden = 0
    for r, b in enumerate(request.tolist()):
        window = (0, int(end[r]) if b >= 0 else 0)
        live = [n for n in range(*window) if b != 0 or n >= page_size]
        hidden += window[1] - len(live)
        chosen = selection.select(lambda n, r=r, b=b: scores[r, first[b] + n], live, topk, window)
        assert got.indices[r].tolist() == selection.row_of(chosen, topk)
        assert got.counts[r] == len(chosen)
        shown = [scores[r, first[b] + n] for n in sorted(chosen)]
        assert bits_equal(got.scores[r, : len(chosen)], np.array(shown, np.float32))
        assert (got.scores[r, len(chosen) :] == -np.inf).all()
    assert stats[0] == 6 and stats[3] == hidden


@given(seed=seeds, world=st.integers(1, 4), interleave=st.integers(1, 3), topk=st.integers(1, 20))
def test_shards_merged_are_the_whole(backend, seed, world, interleave, topk):
    rng = np.random.default_rng(seed)
    n, on = int(rng.integers(1, 50)), topkey.Exec(backend=backend)
    p = problem(rng, "fp8", 2, 2, 32, n, exact=False)
    parts = []
    for rank in range(world):
        shard = OneRank(rank, world, interleave)
        mine = [g for g in range(n) if shard.owns(g)]
        own = p._replace(dense={"k": p.dense["k"][mine], "k_scales": p.dense["k_scales"][mine]})
        cache, table = paged(rng, own, [len(mine)], 4)
        end = np.array([shard.local(n - 1), shard.local(n)], np.int32)
        parts.append(topkey.paged_mqa_topk(
            p.arguments["q"], cache, p.arguments["weights"], topk, block_table=table, request=np.zeros(2, np.int32),
            end=end, max_len=n, shard=topkey.Shard(*shard), out=("indices", "scores"), exec=on,
        ))  # fmt: skip
    merged = topkey.merge_topk(
        np.stack([s.scores for s in parts]), np.stack([s.indices for s in parts]), topk, out=ALL, exec=on
    )
    whole = topkey.mqa_topk(**p.arguments, **p.dense, topk=topk, causal=True, out=ALL, exec=on)
    for name in ALL:
        assert bits_equal(getattr(merged, name), getattr(whole, name))


def test_short_rows_need_no_scores(on):
    p = problem(np.random.default_rng(5), "f32", 1, 1, 32, 3)
    assert topkey.mqa_topk(**p.arguments, **p.dense, topk=5, exec=on).indices.tolist() == [[0, 1, 2, -1, -1]]


def test_counts_may_be_integers_of_numpy(on):
    q, k, weights = np.ones((2, 2, 4), np.float32), np.ones((6, 4), np.float32), np.ones((2, 2), np.float32)
    got = topkey.mqa_topk(q, k, weights, np.int64(3), exec=on)
    assert got.indices.tolist() == [[0, 1, 2]] * 2
