# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Producers: norm, rope, Hadamard and every quantisation rule give the formulas' bytes, dense and into pages."""

import numpy as np
import pytest
import topkey
from data import SUPPORTED
from formulas import keys as key_formulas
from formulas import quantize
from formulas.numbers import DTYPES, F32, bits, rounded
from formulas.selection import bits_equal
from hypothesis import given
from hypothesis import strategies as st

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(["f32", "bf16", "f16"])
KEY_RULES = [("fp8", r, s) for r in ("v32_key", "kpool_key") for s in ("ue8m0", "f32")] + [("fp8", "v4_key", "ue8m0")]
KEY_RULES += [("fp8_fnuz", "v32_key", "f32"), ("fp8_fnuz", "v4_key", "ue8m0")]
KEY_RULES += [(f, "automatic", "ue8m0") for f in ("mxfp4", "bf16", "f16", "f32", "q8_0")]
KEY_RULES = [case for case in KEY_RULES if case[0] in SUPPORTED]
QUERY_RULES = [("fp8", r) for r in quantize.RULES if r.endswith("query")] + [
    ("mxfp4", "automatic"),
    ("fp8_fnuz", "v32_query"),
    ("fp8_fnuz", "v4_query"),
    ("bf16", "automatic"),
]
QUERY_RULES = [case for case in QUERY_RULES if case[0] in SUPPORTED]


def vectors(rng, n, d, dtype):
    """Rows of very different size, one of zeros, some with an inf or a NaN."""
    x = rng.normal(size=(n, d)) * np.exp2(rng.integers(-12, 9, (n, 1)))
    x[rng.integers(n)] = 0
    if rng.random() < 0.5:
        x[rng.integers(n), rng.integers(d)] = rng.choice([np.inf, -np.inf, np.nan])
    return rounded(x.astype(F32), dtype)


def draw_rope(rng, n, d):
    dim, table = int(rng.choice([2, 16, d])), rng.normal(size=(7, d)).astype(F32)
    style, where = rng.choice(["half_split", "interleaved"]), rng.choice(["leading", "trailing"])
    positions = rng.integers(-1, 8, n).astype(rng.choice([np.int32, np.int64]))
    cos_sin = table[:, :dim].astype(DTYPES[rng.choice(["f32", "bf16", "f16"])])
    return topkey.Rope(positions, cos_sin, dim, str(style), str(where))


def draw_norm(rng, d):
    kind = str(rng.choice(["layer", "rms"]))
    weight = rng.normal(1, 0.1, d).astype(DTYPES[rng.choice(["f32", "bf16"])]) if rng.random() < 0.8 else None
    bias = rng.normal(0, 0.1, d).astype(F32) if kind == "layer" and rng.random() < 0.7 else None
    return topkey.Norm(kind, weight, bias, float(rng.choice([1e-6, 1e-3])))


def draw_steps(rng, n, d, with_norm):
    """Some of norm, rope, Hadamard, as options and for the formulas."""
    steps = {"hadamard": bool(rng.random() < 0.4)}
    if with_norm and rng.random() < 0.5:
        steps["norm"] = draw_norm(rng, d)
    if rng.random() < 0.5:
        steps["rope"] = draw_rope(rng, n, d)
    return steps


def prepared(x, rounds, dtype, steps, heads=1):
    rope = steps.get("rope")
    if rope is not None:
        rope = rope._replace(positions=np.repeat(rope.positions, heads))
    return quantize.prepare(x, rounds, dtype=dtype, norm_=steps.get("norm"), rope_=rope, hadamard_=steps["hadamard"])


def coded(x, format, rule, scale, dtype, steps):
    """Values and scales of keys, by the formulas."""
    name = "v32_key" if rule == "automatic" else rule
    rounds = {"fp8": quantize.RULES[name].rounds, "fp8_fnuz": quantize.RULES[name].rounds, "mxfp4": "whole"}.get(
        format, "nothing"
    )
    x = prepared(x, rounds, dtype, steps)
    if format in ("fp8", "fp8_fnuz"):
        return quantize.fp8(x, name, scale, format == "fp8_fnuz")
    if format == "mxfp4":
        return quantize.mxfp4(x)
    return (quantize.q8_0(x) if format == "q8_0" else rounded(x, format)), None


@pytest.mark.parametrize(("format", "rule", "scale"), KEY_RULES)
@given(seed=seeds, dtype=dtypes, d=st.sampled_from([32, 64, 128]))
def test_quantize_k(backend, format, rule, scale, seed, dtype, d):
    rng = np.random.default_rng(seed)
    x, steps = vectors(rng, 5, d, dtype), draw_steps(rng, 5, d, True)
    got = topkey.quantize_k(x, format=format, rule=rule, scale=scale, **steps, exec=topkey.Exec(backend=backend))
    want = coded(x, format, rule, scale, dtype, steps)
    assert bits_equal(bits(got[0]), bits(want[0]))
    assert got[1] is None if want[1] is None else bits_equal(bits(got[1]), bits(want[1]))


@pytest.mark.parametrize(("format", "rule"), QUERY_RULES)
@given(seed=seeds, dtype=dtypes, d=st.sampled_from([32, 64]), heads=st.integers(1, 3))
def test_quantize_q(backend, format, rule, seed, dtype, d, heads):
    rng = np.random.default_rng(seed)
    x, steps = vectors(rng, 4 * heads, d, dtype), draw_steps(rng, 4, d, False)
    if "rope" in steps:  # what rope rounds, Hadamard spreads: no producer has both under these rules
        steps["hadamard"] = False
    weights = rounded(rng.normal(size=(4, heads)).astype(F32), str(rng.choice(["f32", "bf16"])))
    factors = {"softmax_scale": float(d**-0.5), "head_scale": float(heads**-0.5)}
    codes, scales, folded = topkey.quantize_q(
        x.reshape(4, heads, d), weights, format=format, rule=rule, **factors, **steps, exec=topkey.Exec(backend=backend)
    )
    facts = quantize.RULES.get(rule)
    y = prepared(x, {"mxfp4": "roped", "bf16": "nothing"}.get(format) or facts.rounds, dtype, steps, heads)
    s = None
    if format in ("fp8", "fp8_fnuz"):
        want, s = quantize.fp8(y, rule, fnuz=format == "fp8_fnuz")
    else:
        want, want_scales = quantize.mxfp4(y) if format == "mxfp4" else (rounded(y, dtype), None)
        if format == "mxfp4":
            assert bits_equal(scales.reshape(want_scales.shape), want_scales)
    assert bits_equal(bits(codes.reshape(want.shape)), bits(want))
    how = facts.weights if facts else "one by one"
    assert bits_equal(folded.ravel(), quantize.fold_weights(weights.ravel(), s, *factors.values(), how))


@pytest.mark.parametrize(("format", "rule", "scale"), KEY_RULES)
@given(seed=seeds, page_size=st.integers(1, 7), layout=st.sampled_from(["planar", "interleaved"]), ready=st.booleans())
def test_store_k_and_gather_k(backend, format, rule, scale, seed, page_size, layout, ready):
    """Bytes in pages, from vectors or ready codes, and nothing else of the pool; then back as flat rows."""
    rng, on = np.random.default_rng(seed), topkey.Exec(backend=backend)
    d, n, pages = 32, 9, 6
    page_bytes = page_size * sum(key_formulas.row_bytes(format, d))
    pool = rng.integers(0, 256, (pages, (page_bytes + 3) // 4 * 4 + 4)).astype(np.uint8)
    cache = topkey.KeyCache(pool[:, :page_bytes], page_size, d, format, layout)
    x, steps = vectors(rng, n, d, "bf16"), draw_steps(rng, n, d, True)
    slots = rng.permutation(max(pages * page_size, n))[:n].astype(np.int64)
    slots[rng.random(n) < 0.2] = -1
    slots[slots >= pages * page_size] = -1
    want = pool.copy()
    values, scales = coded(x, format, rule, scale, "bf16", steps)
    rows = key_formulas.split_bytes(format, values, scales)
    key_formulas.to_pages(cache._replace(pages=want), slots, *rows)
    if ready and (scales is not None or format == "q8_0"):
        topkey.store_k(values, slots, cache, k_scales=scales, exec=on)
    else:
        topkey.store_k(x, slots, cache, rule=rule, scale=scale, **steps, exec=on)
    assert bits_equal(pool, want)

    table, lengths = np.array([[3, 0, 5], [1, 2, 4]], np.int32), [2 * page_size + 1, page_size]
    indptr = np.cumsum([0, *lengths]).astype(np.int32)
    total = int(indptr[-1])
    got = key_formulas.split_bytes(format, *topkey.gather_k(cache, table, indptr, total=total, exec=on))
    for b, length in enumerate(lengths):
        for p in range(length):
            here = key_formulas.read_row(pool, cache, table[b, p // page_size], p % page_size)
            for part, wanted in zip(got, here, strict=True):
                assert bits_equal(part[indptr[b] + p], wanted)
