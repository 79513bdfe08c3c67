# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Scores: S_ref bit for bit on `ref`, and on every backend where the inputs are exact; else within the bound."""

import numpy as np
import pytest
import topkey
from data import SUPPORTED, paged, problem
from formulas.numbers import canonical, rounded
from formulas.score import bound_f32, s_ref
from formulas.selection import bits_equal
from hypothesis import given
from hypothesis import strategies as st

TILED = [("fp8", "tiled16", 32), ("fp8_fnuz", "tiled16", 64), *(("mxfp4", f"tiled{n}", 128) for n in (16, 32, 64))]
seeds = st.integers(0, 2**32 - 1)
PLAIN_Q = st.sampled_from(["f32", "bf16", "f16"])


def expected(p):
    return canonical(s_ref(p.q, p.k, p.w, p.outer))


@pytest.mark.parametrize("format", SUPPORTED)
@given(
    seed=seeds,
    rows=st.integers(1, 5),
    heads=st.integers(1, 5),
    d=st.sampled_from([32, 64]),
    n=st.integers(0, 70),
    q_dtype=PLAIN_Q,
)
def test_exact_inputs_give_the_same_bits_everywhere(backend, format, seed, rows, heads, d, n, q_dtype):
    p = problem(np.random.default_rng(seed), format, rows, heads, d, n, q_dtype=q_dtype)
    logits = topkey.mqa_logits(**p.arguments, **p.dense, exec=topkey.Exec(backend=backend))
    assert bits_equal(logits, expected(p))


@pytest.mark.parametrize("format", SUPPORTED)
@given(
    seed=seeds,
    rows=st.integers(1, 4),
    heads=st.integers(1, 9),
    d=st.sampled_from([32, 64, 128]),
    n=st.integers(1, 40),
    q_dtype=PLAIN_Q,
)
def test_random_inputs(backend, format, seed, rows, heads, d, n, q_dtype):
    p = problem(np.random.default_rng(seed), format, rows, heads, d, n, exact=False, q_dtype=q_dtype)
    logits = topkey.mqa_logits(**p.arguments, **p.dense, exec=topkey.Exec(backend=backend))
    if backend == "ref":
        assert bits_equal(logits, expected(p))
    else:
        distance = np.abs(logits.astype(np.float64) - s_ref(p.q, p.k, p.w, p.outer))
        assert (distance <= bound_f32(p.q, p.k, p.w, p.outer)).all()


def test_head_dims_that_are_no_multiple_of_a_vector(on):
    for d in (1, 3, 17, 33):
        p = problem(np.random.default_rng(d), "f32", 3, 2, d, 19)
        assert bits_equal(topkey.mqa_logits(**p.arguments, **p.dense, exec=on), expected(p))


def test_nan_anywhere_makes_the_score_nan(on):
    p = problem(np.random.default_rng(1), "fp8", 2, 2, 32, 6)
    p.dense["k"].view(np.uint8)[1, 5] = 0x7F
    p.dense["k_scales"][3] = np.nan
    p.arguments["weights"][1, 1] = -np.nan
    logits = topkey.mqa_logits(**p.arguments, **p.dense, exec=on)
    assert np.isnan(logits).tolist() == [[False, True, False, True, False, False], [True] * 6]
    assert set(logits[np.isnan(logits)].view(np.uint32)) == {0x7FC00000}


@given(seed=seeds, kind=st.sampled_from(["b8", "f32", "f16"]))
def test_windows_and_masks(backend, seed, kind):
    rng = np.random.default_rng(seed)
    p = problem(rng, "f32", 4, 2, 32, 23)
    start, end = rng.integers(-3, 20, 4).astype(np.int32), rng.integers(0, 30, 4).astype(np.int32)
    hidden = rng.random((4, 23)) < 0.3
    mask = (
        ~hidden
        if kind == "b8"
        else np.where(hidden, -np.inf, rng.integers(-3, 4, (4, 23))).astype(kind.replace("f", "float"))
    )
    logits = topkey.mqa_logits(
        **p.arguments, **p.dense, start=start, end=end, mask=mask, exec=topkey.Exec(backend=backend)
    )
    scores = expected(p) if kind == "b8" else canonical(expected(p) + mask.astype(np.float32))
    columns = np.arange(23)
    outside = (columns < start[:, None]) | (columns >= end[:, None]) | hidden
    assert bits_equal(logits, np.where(outside, np.float32(-np.inf), scores))


@pytest.mark.parametrize("format", SUPPORTED)
@given(
    seed=seeds,
    page_size=st.integers(1, 9),
    layout=st.sampled_from(["planar", "interleaved"]),
    spare=st.integers(0, 3),
    next_n=st.integers(1, 3),
)
def test_pages(backend, format, seed, page_size, layout, spare, next_n):
    """Page columns are positions of the request, whatever the page size, stride, layout and form of `end`."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 25, 3)
    p = problem(rng, format, 3 * next_n, 2, 32, int(lengths.sum()))
    cache, table = paged(rng, p, lengths, page_size, layout, spare)
    logits = topkey.paged_mqa_logits(
        p.arguments["q"], cache, p.w.astype(np.float32), q_scales=p.arguments.get("q_scales"), block_table=table,
        end=lengths.astype(np.int32), next_n=next_n, clean=True, exec=topkey.Exec(backend=backend),
    )  # fmt: skip
    all_scores, want = expected(p), np.full_like(logits, -np.inf)
    first = np.concatenate([[0], np.cumsum(lengths)])
    for r in range(3 * next_n):
        b, j = divmod(r, next_n)
        end = max(0, int(lengths[b]) - next_n + 1 + j)
        want[r, :end] = all_scores[r, first[b] : first[b] + end]
    assert bits_equal(logits, want)


@pytest.mark.parametrize(("format", "layout", "d"), TILED)
@given(seed=seeds, groups=st.integers(1, 2))
def test_tiled_pages(backend, format, layout, d, seed, groups):
    rng = np.random.default_rng(seed)
    page_size = groups * int(layout.removeprefix("tiled"))
    p = problem(rng, format, 2, 2, d, 150)
    cache, table = paged(rng, p, [150], page_size, layout)
    got = topkey.paged_mqa_logits(
        p.arguments["q"], cache, p.w.astype(np.float32), q_scales=p.arguments.get("q_scales"), block_table=table,
        end=np.array([150, 150], np.int32), request=np.zeros(2, np.int32), max_len=150,
        exec=topkey.Exec(backend=backend),
    )  # fmt: skip
    assert bits_equal(got, expected(p))


def test_bf16_logits_are_the_rounded_scores(on):
    p = problem(np.random.default_rng(3), "bf16", 3, 2, 32, 20, exact=False)
    scores = topkey.mqa_logits(**p.arguments, **p.dense, exec=on)
    out = rounded(np.zeros((3, 20), np.float32), "bf16")
    assert topkey.mqa_logits(**p.arguments, **p.dense, out=out, exec=on) is out
    assert bits_equal(out, rounded(scores, "bf16"))


def test_columns_outside_the_window_are_left_alone_unless_clean(on):
    p = problem(np.random.default_rng(4), "f32", 2, 1, 32, 8)
    out = np.full((3, 10), 7, np.float32)
    topkey.mqa_logits(
        **p.arguments,
        **p.dense,
        start=np.array([2, 0], np.int32),
        end=np.array([4, 0], np.int32),
        clean=False,
        out=out,
        exec=on,
    )
    want = np.full((3, 10), 7, np.float32)
    want[0, 2:4] = expected(p)[0, 2:4]
    assert bits_equal(out, want)
