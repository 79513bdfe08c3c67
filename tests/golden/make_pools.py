# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Golden bytes of pool_k and compress_k, written with numpy and ml_dtypes from the formulas of docs/formats.md.

    python make_pools.py            writes pools.json beside this file
    python make_pools.py --check    recomputes it and fails if the stored bytes differ

The file is a JSON list of cases; one case is one key row. Hex strings are little endian, as in make_golden.py.
  name, op     "pool_k" | "compress_k"
  exact        true: no score leaves anything to exp (equal scores, or one more than 104 above the others), so that
               every backend must give these bytes; false: those of exp in double, rounded once
  format, scale, d
  value, score [tokens, width] (bf16 or f32 by op), ape f32 [pool_size or ratio, width], ratio (of pool_k: its tokens)
  position     of the last token; the others stand right before it
  compress_k:  windows (1 | 2), weight f32 [d], eps f32, cos_sin f32 [positions, dim]
  codes, scales
Joining: s = score + ape; m = the largest s; p = exp(s - m); x = sum(value * p) / sum(p), tokens ascending, f32, every
operation rounded once. Then rules.py.
"""

import json
import sys
from pathlib import Path

import numpy as np

from rules import (
    BF16,
    F,
    Random,
    apply_hadamard,
    apply_norm,
    apply_rope,
    hex_of,
    quantise_fp8,
    quantise_mxfp4,
    self_check,
    to_bf16,
)

RNG = Random(20261130)


def normals(*shape):
    return RNG.normal(int(np.prod(shape))).reshape(shape)


def join(value, score):
    m = score[0]
    for s in score[1:]:
        m = np.where(s > m, s, m)
    total, weights = np.zeros_like(m), np.zeros_like(m)
    for v, s in zip(value, score, strict=True):
        p = np.exp((s - m).astype(np.float64)).astype(F)
        total = total + v * p
        weights = weights + p
    x = total / weights
    assert x.dtype == F
    return x


def quantised(rule, x, fmt, scale):
    x = to_bf16(x)[None]
    codes, scales = quantise_mxfp4(x) if fmt == "mxfp4" else quantise_fp8(rule, x, scale)
    return hex_of(codes[0]), hex_of(scales[0:1] if fmt == "fp8" else scales[0])


def exact_score(tokens, width, ape, equal):
    """Scores that with ape are all alike, or one far above the others, another one in each channel."""
    if equal:
        return -ape  # small multiples of 1/4: no rounding
    return np.where(np.arange(tokens)[:, None] == np.arange(width) % tokens, F(256), F(-256))


def pool_case(name, size, d, fmt, scale, kind):
    value = to_bf16(normals(size, d) * F(2))
    ape = (np.round(normals(size, d) * 4) / 4).astype(F)
    score = to_bf16(normals(size, d) * F(2)) if kind == "random" else exact_score(size, d, ape, kind == "equal")
    assert (to_bf16(score) == score).all()
    x = to_bf16(join(value, score + ape))
    codes, scales = quantised("kpool_key", apply_hadamard(x[None])[0], fmt, scale)
    return dict(name=name, op="pool_k", exact=kind != "random" or size == 1, format=fmt, scale=scale, d=d, ratio=size,
                position=3 * size - 1, value=hex_of(value.astype(BF16)), score=hex_of(score.astype(BF16)),
                ape=hex_of(ape), codes=codes, scales=scales)  # fmt: skip


def window_case(name, ratio, windows, d, rope, fmt, kind, first=False):
    width, position = windows * d, ratio - 1 if first else 3 * ratio - 1
    tokens = ratio if first else windows * ratio
    value, ape = normals(tokens, width) * F(2), (np.round(normals(ratio, width) * 4) / 4).astype(F)
    at = ape[(position + 1 - tokens + np.arange(tokens)) % ratio]
    score = normals(tokens, width) * F(2) if kind == "random" else exact_score(tokens, width, at, kind == "equal")
    # The younger half of the window gives its last d channels.
    younger = np.arange(tokens) >= tokens - ratio
    half = [slice(d, 2 * d) if windows == 2 and y else slice(0, d) for y in younger]
    x = join([value[i, h] for i, h in enumerate(half)], [(score + at)[i, h] for i, h in enumerate(half)])
    weight, eps = normals(d), F(1e-6)
    table = normals(position + 1, rope)
    y = apply_norm(x[None], "rms", weight, None, eps)
    y = apply_rope(y, rope, True, True, table, np.array([position // ratio * ratio]))[0]
    codes, scales = quantised("v4_key", y, fmt, "ue8m0")
    return dict(name=name, op="compress_k", exact=kind != "random", format=fmt, scale="ue8m0", d=d, ratio=ratio,
                windows=windows, position=position, value=hex_of(value), score=hex_of(score), ape=hex_of(ape),
                weight=hex_of(weight), eps=hex_of(np.array([eps])), rope=rope, cos_sin=hex_of(table), codes=codes,
                scales=scales)  # fmt: skip


def document():
    self_check()
    cases = []
    for fmt, scale in (("fp8", "ue8m0"), ("fp8", "f32"), ("mxfp4", "ue8m0")):
        for size in (1, 2, 4, 16):
            for kind in ("equal", "alone", "random"):
                d = 128 if size == 4 else 32
                cases.append(pool_case(f"pool_k/{fmt}/{scale}/{size}/{kind}", size, d, fmt, scale, kind))
    for fmt in ("fp8", "mxfp4"):
        for ratio, windows in ((4, 2), (2, 1), (16, 1)):
            for kind in ("equal", "alone", "random"):
                name = f"compress_k/{fmt}/{ratio}/{windows}/{kind}"
                cases.append(window_case(name, ratio, windows, 32, 16, fmt, kind))
        cases.append(window_case(f"compress_k/{fmt}/4/2/first", 4, 2, 128, 64, fmt, "random", True))
    return "[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n", len(cases)


def main():
    path, (text, count) = Path(__file__).with_name("pools.json"), document()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if path.exists() and path.read_text() == text else f"{path.name} is not what this script makes")
    path.write_text(text)
    print(f"{path.name}: {count} cases, {len(text)} bytes")


if __name__ == "__main__":
    main()
