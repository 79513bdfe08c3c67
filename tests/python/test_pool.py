# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Pools: key rows of several tokens against their formula, cut into steps anyhow; expansion to tokens."""

import ml_dtypes
import numpy as np
import topkey
from formulas import keys as key_formulas
from formulas import quantize
from formulas.numbers import F32, rounded
from formulas.rows import slot_of
from hypothesis import given
from hypothesis import strategies as st

seeds = st.integers(0, 2**32 - 1)
BF16 = ml_dtypes.bfloat16


def pooled(k, gate, ape):
    """bf16 [D] of the tokens of one pool, k and gate [P, D]."""
    a = gate.astype(F32) + ape
    p = np.exp(a - a.max(axis=0))
    return rounded(((k.astype(F32) * p).sum(axis=0) / p.sum(axis=0)).astype(F32)[None], "bf16")


@given(
    seed=seeds, pool_size=st.sampled_from([1, 2, 4]), steps=st.integers(1, 4), scale=st.sampled_from(["ue8m0", "f32"])
)
def test_pool_k(backend, seed, pool_size, steps, scale):
    """One request, its tokens in several steps: every complete pool ends up in the cache as its formula's key."""
    rng = np.random.default_rng(seed)
    d, tokens, page_size = 32, int(rng.integers(1, 30)), 4
    k, gate = (rng.normal(size=(tokens, d)).astype(BF16) for _ in range(2))
    ape = rng.normal(size=(pool_size, d)).astype(F32)
    table = rng.permutation(10).astype(np.int32)
    cache = topkey.KeyCache(np.full((10, page_size * (d + 4)), 0xAB, np.uint8), page_size, d)
    tail = np.zeros((1, 2, 2 * pool_size, d), BF16)
    cuts = [0, *np.sort(rng.integers(0, tokens + 1, steps - 1)).tolist(), tokens]
    for first, last in zip(cuts[:-1], cuts[1:], strict=True):
        positions = np.arange(first, last)
        ends = (positions + 1) % pool_size == 0
        slots = np.array(
            [slot_of(p // pool_size, table, page_size) if e else -1 for p, e in zip(positions, ends, strict=True)]
        )
        topkey.pool_k(
            k[first:last], gate[first:last], ape, positions, slots.astype(np.int64), cache, pool_size=pool_size, tail=tail,
            tail_slots=positions % (2 * pool_size), q_indptr=np.array([0, last - first], np.int32), scale=scale,
            exec=topkey.Exec(backend=backend),
        )  # fmt: skip
    for g in range(tokens // pool_size):
        part = slice(g * pool_size, (g + 1) * pool_size)
        x = quantize.hadamard(pooled(k[part], gate[part], ape).astype(F32))
        values, scales = quantize.fp8(rounded(x, "bf16").astype(F32), "kpool_key", scale)
        want, outer = key_formulas.decode("fp8", values, scales)
        page, row = divmod(slot_of(g, table, page_size), page_size)
        got, got_outer = key_formulas.decode(
            "fp8", *(part[None] for part in key_formulas.read_row(cache.pages, cache, page, row))
        )
        # exp may differ by a bf16 step before quantisation: a code then differs by one.
        size = np.abs(want * outer).max()
        assert np.abs(got * got_outer[:, None] - want * outer[:, None]).max() <= size * 2.0**-3


def windowed(kv, score, ape, last, ratio, d):
    """f32 [D]: the last c * ratio tokens up to position `last`, the older half by its first D channels."""
    windows = kv.shape[1] // d
    tokens = np.arange(max(last + 1 - windows * ratio, 0), last + 1)
    younger = tokens > last - ratio
    channels = [slice(d, 2 * d) if windows == 2 and y else slice(0, d) for y in younger]
    value = np.stack([kv[t, c] for t, c in zip(tokens, channels, strict=True)]).astype(np.float64)
    s = np.stack([(score[t] + ape[t % ratio])[c] for t, c in zip(tokens, channels, strict=True)]).astype(np.float64)
    p = np.exp(s - s.max(axis=0))
    return ((value * p).sum(axis=0) / p.sum(axis=0)).astype(F32)


@given(
    seed=seeds,
    window=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (16, 1), (128, 1)]),
    steps=st.integers(1, 4),
    format=st.sampled_from(["fp8", "mxfp4", "f32"]),
)
def test_compress_k(backend, seed, window, steps, format):
    """One request, its tokens in several steps: every key row is its window's, whatever lay in the rows of the call."""
    rng = np.random.default_rng(seed)
    (ratio, windows), d, page_size = window, 32, 4
    tokens, dim = int(rng.integers(1, 5 * ratio + 3)), 16
    kv, score = (rng.normal(size=(tokens, windows * d)).astype(F32) for _ in range(2))
    ape = rng.normal(size=(ratio, windows * d)).astype(F32)
    weight, cos_sin = rng.normal(size=d).astype(F32), rng.normal(size=(tokens, dim)).astype(F32)
    ring = windows * ratio
    state = np.zeros((1, ring, 2 * windows * d), F32)
    table = rng.permutation(10).astype(np.int32)
    cache = topkey.KeyCache(
        np.full((10, page_size * sum(key_formulas.row_bytes(format, d))), 0xAB, np.uint8), page_size, d, format
    )
    cuts = [0, *np.sort(rng.integers(0, tokens + 1, steps - 1)).tolist(), tokens]
    for first, last in zip(cuts[:-1], cuts[1:], strict=True):
        positions = np.arange(first, last)
        slots = [slot_of(p // ratio, table, page_size) if (p + 1) % ratio == 0 else -1 for p in positions]
        topkey.compress_k(
            kv[first:last], score[first:last], ape, positions, np.array(slots, np.int64), cache, state=state,
            state_slots=positions % ring, query_start=np.array([0, last - first], np.int32), rms_weight=weight,
            cos_sin=cos_sin, exec=topkey.Exec(backend=backend),
        )  # fmt: skip
    for g in range(tokens // ratio):
        x = windowed(kv, score, ape, (g + 1) * ratio - 1, ratio, d)[None]
        x = quantize.norm(x, "rms", weight, None, F32(1e-6))
        want = quantize.rope(x, np.array([g * ratio]), cos_sin, dim, "interleaved", "trailing")[0]
        page, row = divmod(slot_of(g, table, page_size), page_size)
        raw = key_formulas.read_row(cache.pages, cache, page, row)
        got, outer = key_formulas.decode(format, *(part[None] for part in raw))
        # exp may differ, and a code is half a step from what it stands for: 2^-4, of e2m1 2^-2 of its block.
        step = {"fp8": 2.0**-3, "mxfp4": 0.3, "f32": 2.0**-16}[format]
        assert np.abs(np.asarray(got) * np.reshape(outer, (-1, 1)) - want).max() <= np.abs(want).max() * step


@given(seed=seeds, pool_size=st.integers(1, 5), by=st.sampled_from(["end", "positions", None]))
def test_expand_pools(backend, seed, pool_size, by):
    rng = np.random.default_rng(seed)
    seen = rng.integers(1, 40, 5).astype(np.int32)
    pools = np.stack([rng.permutation(np.r_[np.arange(n // pool_size), [-1] * 6])[:6] for n in seen]).astype(np.int32)
    window = {"end": {"end": seen}, "positions": {"positions": (seen - 1).astype(np.int64)}}.get(by, {})
    got = topkey.expand_pools(
        pools, pool_size=pool_size, **window, out=("indices", "counts"), exec=topkey.Exec(backend=backend)
    )
    want = topkey.Selection(pools).tokens(pool_size=pool_size, end=seen if by else None).indices
    assert got.indices.tolist() == want.tolist()
    assert got.counts.tolist() == (want >= 0).sum(axis=1).tolist()
