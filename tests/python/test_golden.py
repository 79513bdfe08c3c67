# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The numpy formulas against the golden bytes, so that a comparison with them means something."""

import json
import pathlib

import numpy as np
import pytest
from formulas import quantize
from formulas.numbers import DTYPES, F32

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "quant_rules.json").read_text())


def unhex(text, dtype):
    return np.frombuffer(bytes.fromhex(text), DTYPES[dtype])


def array(name):
    entry = GOLDEN["arrays"][name]
    return unhex(entry["data"], entry["dtype"]).reshape(entry["shape"])


def number(text):
    return unhex(text, "f32")[0]


def prepared(case):
    """The case's vectors through norm, rope, Hadamard and the rule's rounding."""
    entry = GOLDEN["inputs"][case["input"]]
    x = np.stack([unhex(v, entry["dtype"]) for v in entry["vectors"]])
    rule = case["rule"]
    rounds = {"mxfp4": "roped" if case["side"] == "q" else "whole", "q8_0": "nothing"}.get(rule)
    steps = {"dtype": entry["dtype"], "hadamard_": case.get("hadamard", False)}
    if "norm" in case:
        n = case["norm"]
        steps["norm_"] = (n["kind"], array(n["weight"]), array(n["bias"]) if n["bias"] else None, number(n["eps"]))
    if "rope" in case:
        r = case["rope"]
        style, where = "interleaved" if r["interleaved"] else "half_split", "trailing" if r["trailing"] else "leading"
        positions = np.repeat(np.array(r["positions"]), case["heads"])
        steps["rope_"] = (positions, array(r["cos_sin"]), r["dim"], style, where)
    return quantize.prepare(x, rounds or quantize.RULES[rule].rounds, **steps)


def quantised(case):
    x, rule = prepared(case), case["rule"]
    if rule == "mxfp4":
        return quantize.mxfp4(x)
    if rule == "q8_0":
        return quantize.q8_0(x), None
    return quantize.fp8(x, rule, case["scale"], case["name"].startswith("fp8_fnuz/"))


@pytest.mark.parametrize("rule", sorted({c["rule"] for c in GOLDEN["cases"]}))
def test_formulas_give_the_golden_bytes(rule):
    for case in (c for c in GOLDEN["cases"] if c["rule"] == rule):
        codes, scales = quantised(case)
        assert [c.tobytes().hex() for c in codes] == case["codes"], case["name"]
        if scales is not None:
            assert [s.tobytes().hex() for s in scales] == case["scales"], case["name"]
        for w in case.get("weights", []):
            how = "one by one" if rule == "mxfp4" else quantize.RULES[rule].weights
            s = None if rule == "mxfp4" else scales
            factors = number(case["softmax_scale"]), number(case["head_scale"])
            out = quantize.fold_weights(unhex(w["in"], w["dtype"]), s, *factors, how)
            assert out.astype(F32).tobytes().hex() == w["out"], case["name"]
