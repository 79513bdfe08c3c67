# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Golden bytes for every QuantRule, written with numpy and ml_dtypes from the QuantRule table (API.md, section 2).

    python make_golden.py           writes quant_rules.json beside this file
    python make_golden.py --check   recomputes it and fails if the stored bytes differ

The file is one JSON object. Hex strings are little endian, in the order of the array in memory, no separators.

  inputs   name -> {dtype "f32"|"bf16", d, labels [n], vectors [n] (hex, d elements each)}
  arrays   name -> {dtype "f32"|"bf16", shape, data (hex)}: norm weights and biases, cos|sin tables
  cases    list of
    name           rule/side/scale/dtype/d/what, unique; with a format: format/rule/...
    format         absent (that of the rule: fp8, mxfp4 or q8_0) | "fp8_fnuz"
    rule, side     a QuantRule; "q" (quantize_q) or "k" (quantize_k, store_k)
    scale          "ue8m0" | "f32"; q8_0: "f16"
    d, input_dtype head_dim, dtype of the input
    rows, heads    the input is [rows, heads, d] (k: heads = 1); vector i is row i // heads, head i % heads
    input          key of `inputs`; its n is rows * heads
    norm           absent | {kind "layer"|"rms", weight, bias (keys of `arrays`; bias may be null), eps (f32 hex)}
    rope           absent | {dim, interleaved, trailing, cos_sin (key of `arrays`, [max_pos, dim]), positions [rows]}
    hadamard       absent | true
    softmax_scale, head_scale   q only, f32 hex: f32(d^-0.5), f32(heads^-0.5)
    weights        q only: list of {dtype "f32"|"bf16", in (hex, [rows, heads]), out (f32 hex, [rows, heads])}
    codes          [n] hex. fp8: d bytes e4m3fn. fp8_fnuz: d bytes e4m3fnuz. mxfp4: d/2 bytes, low nibble = even d.
                   q8_0: d/32 blocks of 34 bytes, f16 d then 32 int8
    scales         [n] hex. fp8, fp8_fnuz: one f32 (a query's too, though its scale leaves only inside weights_out);
                   mxfp4: d/32 bytes; q8_0: absent (inside the block)

The formulas and the order of every rounding are in rules.py.
"""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from rules import (
    DTYPES,
    FP8,
    F,
    Random,
    apply_hadamard,
    apply_norm,
    apply_rope,
    hex_of,
    quantise_fp8,
    quantise_mxfp4,
    quantise_q8_0,
    roped_slice,
    self_check,
    to_bf16,
    ulp,
    weights_out,
)

# ---- inputs ----
RNG = Random(20240229)


def peak(block, a):
    """a, either sign, at some place of the block."""
    block[RNG.index(len(block))] = a if RNG.index(2) else -a
    return block


INPUTS, ARRAYS, CASES = {}, {}, []


def add_input(name, dtype, d, rows):
    """rows: label -> values. Stored in dtype; the golden computation starts from what is stored."""
    data = [np.asarray(v).astype(F).astype(DTYPES[dtype]) for v in rows.values()]
    assert all(v.shape == (d,) for v in data)
    INPUTS[f"{name}_{dtype}_d{d}"] = (dtype, d, list(rows), np.stack(data))


def special(d, bits):
    v = RNG.normal(d)
    for where, b in bits.items():
        v.view(np.uint32)[where] = b
    return v


def make_inputs(dtype, d):
    full = d == 128
    tiny4, tiny12 = (peak(RNG.below(d, m), m) for m in (1e-5, 1e-12))
    add_input(
        "small",
        dtype,
        d,
        {
            "zeros": np.zeros(d),
            "negative zeros": -np.zeros(d),
            "1e-5": tiny4,
            "1e-12": tiny12,
            "1e-4": peak(RNG.below(d, 1e-4), F(1e-4)),
            "1e-4 + ulp": peak(RNG.below(d, 1e-4), ulp(F(1e-4), 1, dtype)),
        },
    )
    exponents = ((-35, -34, -14, 0, 127) if full else (-14, 0)) if dtype == "f32" else (-14, 127)
    rows = {}
    for j in exponents:
        for step in (-1, 0, 1):
            a = ulp(F(1.75 * 2.0**j), step, dtype)
            rows[f"1.75*2^{j} {step:+d} ulp"] = peak(RNG.below(d, a), a)
    add_input("powers", dtype, d, rows)
    # one exponent a block of 32
    for name, base, js in (("powers6", 1.5, (-124, -125, 0, 126)), ("powers127", 127.0, (-20, -3, 0, 8))):
        rows = {}
        for step in (-1, 0, 1):
            peaks = [ulp(F(base * 2.0**j), step, dtype) for j in js[-(d // 32) :]]
            rows[f"{base}*2^j {step:+d} ulp"] = np.concatenate([peak(RNG.below(32, a), a) for a in peaks])
        add_input(name, dtype, d, rows)
    ramp = (np.arange(d) - d // 2) / 16
    add_input(
        "ramp", dtype, d, {"(i - d/2) / 16": ramp, "descending, half negative zero": np.maximum(ramp, 0)[::-1] * -1}
    )
    add_input(
        "nonfinite",
        dtype,
        d,
        {
            "inf": special(d, {5: 0x7F800000}),
            "-inf": special(d, {d - 1: 0xFF800000}),
            "NaN": special(d, {d // 2: 0x7FC00000}),
            "negative NaN and inf": special(d, {0: 0xFFD50000, 3: 0x7F800000}),
        },
    )
    biggest = 0x7F7FFFFF if dtype == "f32" else 0x7F7F0000
    add_input(
        "extreme",
        dtype,
        d,
        {
            "subnormals": np.array([RNG.index(2**23) | RNG.index(2) << 31 for _ in range(d)], np.uint32).view(F),
            "largest finite": special(d, {d // 3: biggest}),
            "largest f32 that is finite in bf16": special(d, {d // 3: 0x7F7F7FFF}),
        },
    )
    add_input(
        "random",
        dtype,
        d,
        {"normal*1e-3": RNG.normal(d) * F(1e-3), "normal": RNG.normal(d), "normal*300": RNG.normal(d) * F(300)},
    )
    if d >= 64:  # for norm, rope, Hadamard
        add_input(
            "mixed",
            dtype,
            d,
            {
                "normal*1e-3": RNG.normal(d) * F(1e-3),
                "normal": RNG.normal(d),
                "normal*300": RNG.normal(d) * F(300),
                "normal + 8": RNG.normal(d) + F(8),
                "zeros": np.zeros(d),
                "normal, one NaN": special(d, {d - 2: 0x7FC00000}),
            },
        )
    if full and dtype == "f32":  # with an f32 scale: a / 448 shows the last bits of what the steps before made
        add_input("probe", dtype, d, {f"normal*{i + 1} + {i}": RNG.normal(d) * F(i + 1) + F(i) for i in range(10)})
    if full:  # every tie of e4m3 at scale 1, and their neighbours; both signs
        finite = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F)
        ties = (finite[1:] + finite[:-1]) / F(2)
        sign = np.where(np.arange(126) % 2 == 0, F(1), F(-1))
        add_input(
            "ties_fp8",
            dtype,
            d,
            {
                f"ties {n:+d} ulp": np.concatenate(
                    [[F(448), F(-0.0)], sign * np.array([ulp(t, n, dtype) for t in ties])]
                )
                for n in (0, -1, 1)
            },
        )
    # the seven ties of e2m1 a block at scale 1 with their neighbours, both signs, and values above 5 that saturate to 6
    half = [ulp(F(t), n, dtype) for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0) for n in (0, -1, 1)]
    block = np.array([6.0, *half, 5.5, 5.96875, -5.5, -6.0, 0.0, -0.0, 0.125, 4.0, -3.0, 1.0], F)
    rows = {
        "scale 1": np.concatenate([block * F((-1) ** b) for b in range(d // 32)]),
        "scale 2^b": np.concatenate([block * F(2.0 ** (3 * b - 4)) for b in range(d // 32)]),
    }
    add_input("ties_mxfp4", dtype, d, rows)
    # halves at d = 1
    halves = np.array([127.0] + [(-1) ** i * (i + 0.5) for i in range(28)], F)
    block = np.concatenate(
        [halves, [ulp(F(0.5), -1, dtype), -ulp(F(2.5), -1, dtype), ulp(F(126.5), -1, dtype)]]
    ).astype(F)
    add_input(
        "ties_q8_0",
        dtype,
        d,
        {
            "d = 1": np.concatenate([block * F((-1) ** b) for b in range(d // 32)]),
            "d = 2^b": np.concatenate([block * F(2.0 ** (2 * b - 3)) for b in range(d // 32)]),
        },
    )
    # stored d: the largest finite f16 (bf16 input: a smaller one), and beyond the rounding limit 65520: inf
    name, a = ("d = 65504", F(127 * 65504)) if dtype == "f32" else ("d = 65280", F(253 * 2**15))
    rows = {name: peak(RNG.below(d, 1e6), a), "d = inf": peak(RNG.below(d, 1e6), F(127 * 65536))}
    add_input("large_q8_0", dtype, d, rows)


def add_array(name, dtype, values):
    ARRAYS[name] = (dtype, np.asarray(values).astype(F).astype(DTYPES[dtype]))


def make_arrays():
    for dtype in DTYPES:
        for d in (64, 128):
            add_array(f"norm_weight_{dtype}_d{d}", dtype, F(1) + RNG.normal(d) / F(8))
            add_array(f"norm_bias_{dtype}_d{d}", dtype, RNG.normal(d) / F(8))
        for dim in (64, 32):  # points of the unit circle from rational angles: no libm; position 0 does not turn
            t = np.array([[p * (2 * i + 3) % 97 * (-1) ** (p + i) / 64 for i in range(dim // 2)] for p in range(8)])
            table = np.concatenate([(1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)], axis=1)
            add_array(f"cos_sin_{dtype}_dim{dim}", dtype, table)


# ---- cases ----
def add_case(rule, side, scale, what, key, *, norm=None, rope=None, hadamard=False, rows=None, fnuz=False):
    dtype, d, _, stored = INPUTS[key]
    n = len(stored)
    rows = rows or (1 if side == "q" else n)
    heads = n // rows
    x = stored.astype(F)

    def as_input(v):
        return v.astype(DTYPES[dtype]).astype(F)

    case = {
        "name": f"{'fp8_fnuz/' if fnuz else ''}{rule}/{side}/{scale}/{dtype}/d{d}/{what}",
        "rule": rule,
        "side": side,
        "scale": scale,
        "d": d,
        "input_dtype": dtype,
        "rows": rows,
        "heads": heads,
        "input": key,
    }
    if fnuz:
        case["format"] = "fp8_fnuz"
    if norm:
        kind, weight, bias, eps = norm
        case["norm"] = {"kind": kind, "weight": weight, "bias": bias, "eps": hex_of(F(eps))}
        x = as_input(apply_norm(x, kind, ARRAYS[weight][1].astype(F), bias and ARRAYS[bias][1].astype(F), F(eps)))
    rounding = {"q": "roped", "k": "whole"}[side] if rule == "mxfp4" else FP8[rule][0] if rule in FP8 else "nothing"
    if rope:
        dim, interleaved, trailing, table = rope
        positions = [(5 * r + 5) % 8 for r in range(rows)]
        case["rope"] = {
            "dim": dim,
            "interleaved": interleaved,
            "trailing": trailing,
            "cos_sin": table,
            "positions": positions,
        }
        x = apply_rope(x, dim, interleaved, trailing, ARRAYS[table][1].astype(F), np.repeat(positions, heads))
        part = roped_slice(d, dim, trailing)
        x[:, part] = as_input(x[:, part])
        if rounding == "roped":
            assert not hadamard
            x[:, part] = to_bf16(x[:, part])
    if hadamard:
        case["hadamard"] = True
        x = apply_hadamard(x)
    if rounding == "whole":
        x = to_bf16(x)
    assert x.dtype == F

    scales = None
    if rule == "mxfp4":
        codes, scales = quantise_mxfp4(x)
    elif rule == "q8_0":
        codes = quantise_q8_0(x)
    else:
        codes, scales = quantise_fp8(rule, x, scale, fnuz)
    if side == "q":
        softmax, head = F(d**-0.5), F(heads**-0.5)
        order = "mxfp4" if rule == "mxfp4" else FP8[rule][3]
        w = RNG.normal(n) * F(3)
        w[n // 2] = F(-0.0)
        case |= {"softmax_scale": hex_of(softmax), "head_scale": hex_of(head), "weights": []}
        for t, kind in DTYPES.items():
            v = w.astype(kind)
            case["weights"].append(
                {"dtype": t, "in": hex_of(v), "out": hex_of(weights_out(order, v, scales, softmax, head))}
            )
    case["codes"] = [hex_of(c) for c in codes]
    if scales is not None:
        case["scales"] = [hex_of(s) for s in scales]
    CASES.append(case)


def producers():
    """(rule, side, scale): f32 scales only where a key rule defines them (v4_key does not: x * 2^-e)."""
    for rule in FP8:
        side = "k" if rule.endswith("key") else "q"
        yield rule, side, "ue8m0"
        if rule in ("v32_key", "kpool_key"):
            yield rule, side, "f32"
    yield from (("mxfp4", "q", "ue8m0"), ("mxfp4", "k", "ue8m0"), ("q8_0", "k", "f16"))


def make_plain_cases():
    for rule, side, scale in producers():
        for d in (128, 64, 32) if rule == "q8_0" else (128, 64):
            for dtype in DTYPES:
                kinds = ["nonfinite", "random"] if d == 64 and dtype == "bf16" else ["small", "nonfinite", "random"]
                kinds += {
                    "mxfp4": ["powers", "powers6", "ties_mxfp4"],
                    "q8_0": ["powers127", "ties_q8_0", "large_q8_0"],
                }.get(rule, ["powers", "ties_fp8"] if d == 128 else ["powers"])
                if d == 128 and dtype == "f32":
                    kinds += ["ramp"] if rule == "q8_0" else ["ramp", "extreme"]
                for kind in kinds:
                    add_case(rule, side, scale, kind, f"{kind}_{dtype}_d{d}")


def make_step_cases():
    half_split, interleaved = (64, False, False, "cos_sin_f32_dim64"), (64, True, True, "cos_sin_f32_dim64")
    half_split_bf16 = (64, False, False, "cos_sin_bf16_dim64")

    def layer(d, t="f32"):
        return "layer", f"norm_weight_{t}_d{d}", f"norm_bias_{t}_d{d}", 1e-6

    def rms(d, t="f32"):
        return "rms", f"norm_weight_{t}_d{d}", None, 1e-6

    def add(rule, side, scale, what, **steps):
        add_case(rule, side, scale, what, f"mixed_{dtype}_d{d}", rows=3 if side == "q" else 6, **steps)

    for dtype in DTYPES:
        for d in (128, 64):
            for rule in ("v32_query", "cpu_query"):
                add(rule, "q", "ue8m0", "rope_half_leading64", rope=half_split)
            add("v32_key", "k", "ue8m0", "rope_half_leading64", rope=half_split_bf16)
            for rule, side in (("v4_query", "q"), ("v4_key", "k"), ("mxfp4", "q"), ("mxfp4", "k")):
                add(rule, side, "ue8m0", "rope_interleaved_trailing64", rope=interleaved)
            for rule, side, scale in (
                ("kpool_query", "q", "ue8m0"),
                ("kpool_key", "k", "ue8m0"),
                ("kpool_key", "k", "f32"),
                ("v32_key", "k", "f32"),
                ("q8_0", "k", "f16"),
            ):
                add(rule, side, scale, "hadamard", hadamard=True)
            add("v32_key", "k", "ue8m0", "layer_norm", norm=layer(d))
            add(
                "v32_key",
                "k",
                "f32",
                "layer_norm_no_bias_bf16_weight",
                norm=("layer", f"norm_weight_bf16_d{d}", None, 1e-5),
            )
            add("v4_key", "k", "ue8m0", "rms_norm", norm=rms(d, "bf16"))
            add("mxfp4", "k", "ue8m0", "rms_norm", norm=rms(d))
            add("q8_0", "k", "f16", "rms_norm", norm=rms(d))
        d = 128
        add_case("v32_key", "k", "ue8m0", "layer_norm+rope", f"mixed_{dtype}_d128", norm=layer(d), rope=half_split)
        add_case("v4_key", "k", "ue8m0", "rms_norm+rope", f"mixed_{dtype}_d128", norm=rms(d), rope=interleaved)
        add_case(
            "kpool_key",
            "k",
            "f32",
            "layer_norm+rope+hadamard",
            f"mixed_{dtype}_d128",
            norm=layer(d, "bf16"),
            rope=half_split,
            hadamard=True,
        )
        add_case(
            "kpool_query",
            "q",
            "ue8m0",
            "rope+hadamard",
            f"mixed_{dtype}_d128",
            rows=2,
            rope=half_split_bf16,
            hadamard=True,
        )
        add_case(
            "q8_0",
            "k",
            "f16",
            "rms_norm+rope+hadamard",
            f"mixed_{dtype}_d64",
            norm=rms(64),
            rope=(32, False, True, "cos_sin_f32_dim32"),
            hadamard=True,
        )
        add_case(
            "v32_query",
            "q",
            "ue8m0",
            "rope_interleaved_leading32",
            f"mixed_{dtype}_d64",
            rows=3,
            rope=(32, True, False, "cos_sin_bf16_dim32"),
        )
    for what, steps in (
        ("layer_norm", {"norm": layer(128)}),
        ("layer_norm_no_bias", {"norm": ("layer", "norm_weight_f32_d128", None, 1e-3)}),
        ("rms_norm", {"norm": rms(128)}),
        ("rope_half_leading64", {"rope": half_split}),
        ("rope_interleaved_trailing64", {"rope": interleaved}),
        ("hadamard", {"hadamard": True}),
        ("layer_norm+rope+hadamard", {"norm": layer(128), "rope": half_split, "hadamard": True}),
    ):
        add_case("v32_key", "k", "f32", "probe_" + what, "probe_f32_d128", **steps)


def make_fnuz_cases():
    """e4m3fnuz, scaled to 224. Made last: what is above draws no other numbers for it."""
    for dtype in DTYPES:
        finite = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fnuz).astype(F)
        ties = (finite[1:] + finite[:-1]) / F(2)
        sign = np.where(np.arange(126) % 2 == 0, F(1), F(-1))
        rows = {
            f"ties {n:+d} ulp": np.concatenate([[F(224), F(-0.0)], sign * np.array([ulp(t, n, dtype) for t in ties])])
            for n in (0, -1, 1)
        }
        add_input("ties_fnuz", dtype, 128, rows)
        half_split, interleaved = (64, False, False, "cos_sin_f32_dim64"), (64, True, True, "cos_sin_f32_dim64")
        for rule, side, scale in (
            ("v32_key", "k", "ue8m0"),
            ("v32_key", "k", "f32"),
            ("v4_key", "k", "ue8m0"),
            ("v32_query", "q", "ue8m0"),
            ("v4_query", "q", "ue8m0"),
        ):
            for what in ["small", "powers", "nonfinite", "random", "ties_fnuz"] + ["extreme"] * (dtype == "f32"):
                add_case(rule, side, scale, what, f"{what}_{dtype}_d128", fnuz=True)
            rope = half_split if rule.startswith("v32") else interleaved
            rows = 3 if side == "q" else 6
            add_case(rule, side, scale, "rope", f"mixed_{dtype}_d64", rope=rope, rows=rows, fnuz=True)
        layer = ("layer", "norm_weight_f32_d128", "norm_bias_f32_d128", 1e-6)
        add_case("v32_key", "k", "ue8m0", "layer_norm", f"mixed_{dtype}_d128", norm=layer, rows=6, fnuz=True)


def document():
    self_check()
    make_arrays()
    for dtype in DTYPES:
        for d in (128, 64, 32):
            make_inputs(dtype, d)
    make_plain_cases()
    make_step_cases()
    make_fnuz_cases()
    assert len({c["name"] for c in CASES}) == len(CASES)
    used = {c["input"] for c in CASES}
    return (
        write_json(
            {
                "made_by": "tests/golden/make_golden.py",
                "inputs": {
                    k: {"dtype": t, "d": d, "labels": labels, "vectors": [hex_of(v) for v in data]}
                    for k, (t, d, labels, data) in INPUTS.items()
                    if k in used
                },
                "arrays": {k: {"dtype": t, "shape": list(a.shape), "data": hex_of(a)} for k, (t, a) in ARRAYS.items()},
                "cases": CASES,
            }
        )
        + "\n"
    )


def write_json(value, depth=0):
    """JSON with a line for each input, array and case, and for each vector inside them."""
    if isinstance(value, (dict, list)) and depth <= 2:
        items = [write_json(v, depth + 1) for v in (value.values() if isinstance(value, dict) else value)]
        if isinstance(value, dict):
            items = [f"{json.dumps(k)}: {item}" for k, item in zip(value, items, strict=True)]
        left, right = "{}" if isinstance(value, dict) else "[]"
        return left + ", ".join(items) + right if depth == 2 else left + "\n" + ",\n".join(items) + "\n" + right
    if depth == 3 and isinstance(value, list) and isinstance(value[0], str) and len(value[0]) >= 64:
        return "[\n " + ",\n ".join(json.dumps(v) for v in value) + "]"
    return json.dumps(value)


def main():
    path, text = Path(__file__).with_name("quant_rules.json"), document()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if path.exists() and path.read_text() == text else f"{path.name} is not what this script makes")
    path.write_text(text)
    per_rule = {}
    for c in CASES:
        key = f"{c.get('format', '')} {c['rule']} {c['side']} {c['scale']}".strip()
        cases, vectors = per_rule.get(key, (0, 0))
        per_rule[key] = (cases + 1, vectors + len(c["codes"]))
    for key, (cases, vectors) in per_rule.items():
        print(f"{key:24} {cases:3} cases {vectors:4} vectors")
    print(f"{path.name}: {len(CASES)} cases, {len(text)} bytes")


if __name__ == "__main__":
    main()
