# SPDX-License-Identifier: Apache-2.0 OR MIT
"""From vectors to codes: norm, rope, Hadamard, and the quantisation rules. f32, every operation rounded once."""

from typing import NamedTuple

import numpy as np

from .numbers import E4M3, F32, NAN, e2m1_codes, e4m3_codes, e4m3fnuz_codes, rounded

NAN_F32 = np.array(NAN["f32"], np.uint32).view(F32)


class Rule(NamedTuple):
    rounds: str  # to bf16 before amax: nothing, the roped dims, or the whole vector
    floor: float  # of amax
    multiplies: bool  # s = a * f32(1/448), not a / 448
    code: str = "x / s"
    weights: str = "one by one"


RULES = {
    "v32_key": Rule("nothing", 1e-4, False),
    "v4_key": Rule("whole", 1e-4, False, "x * 2^-e"),
    "kpool_key": Rule("whole", 1e-4, True),
    "v32_query": Rule("roped", 1e-10, True),
    "v4_query": Rule("roped", 1e-4, False),
    "kpool_query": Rule("whole", 1e-4, True, weights="scales together"),
    "cpu_query": Rule("nothing", 1e-4, False, "x * (1 / s)"),
}


# ---- before the rule ----
def ordered_sum(v):
    """[n, 1]: partial sum l takes d = l, l + 32, ...; then halves are added."""
    n, d = v.shape
    padded = np.zeros((n, -(-d // 32) * 32), F32)
    padded[:, :d] = v
    parts = np.zeros((n, 32), F32)
    for chunk in np.split(padded, padded.shape[1] // 32, axis=1):
        parts = parts + chunk
    while parts.shape[1] > 1:
        half = parts.shape[1] // 2
        parts = parts[:, :half] + parts[:, half:]
    return parts


def norm(x, kind, weight, bias, eps):
    size = F32(x.shape[1])
    if kind == "layer":
        x = x - ordered_sum(x) / size
    root = np.sqrt(ordered_sum(x * x) / size + F32(eps))
    y = x * (F32(1) / root)
    if weight is not None:
        y = y * weight.astype(F32)
    return y if bias is None else y + bias.astype(F32)


def roped(d, dim, where):
    return slice(d - dim, d) if where == "trailing" else slice(0, dim)


def rope(x, positions, cos_sin, dim, style, where):
    """positions: one a vector. A position outside the table makes the vector NaN."""
    half = dim // 2
    wild = (positions < 0) | (positions >= len(cos_sin))
    table = cos_sin.astype(F32)[np.where(wild, 0, positions)]
    cos, sin = table[:, :half], table[:, half:]
    out = x.copy()
    part = out[:, roped(x.shape[1], dim, where)]
    first, second = (slice(0, dim, 2), slice(1, dim, 2)) if style == "interleaved" else (slice(half), slice(half, dim))
    a, b = part[:, first].copy(), part[:, second].copy()
    part[:, first] = a * cos - b * sin
    part[:, second] = b * cos + a * sin
    out[wild] = np.nan
    return out


def hadamard(x):
    d, stride = x.shape[1], 1
    while stride < d:
        pairs = x.reshape(len(x), -1, 2, stride)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        x = np.stack([a + b, a - b], axis=2).reshape(len(x), d)
        stride *= 2
    return x * F32(d**-0.5)


def prepare(x, rounds, *, dtype, norm_=None, rope_=None, hadamard_=False):
    """Vectors [n, D] of `dtype`, widened, through all steps before amax. rounds: what the rule rounds to bf16."""
    with np.errstate(all="ignore"):
        x = x.astype(F32)
        if norm_ is not None:
            x = rounded(norm(x, *norm_), dtype).astype(F32)
        if rope_ is not None:
            part = roped(x.shape[1], rope_[2], rope_[4])
            x = rope(x, *rope_)
            x[:, part] = rounded(x[:, part], dtype).astype(F32)
            if rounds == "roped":
                x[:, part] = rounded(x[:, part], "bf16").astype(F32)
        if hadamard_:
            x = hadamard(x)
        return rounded(x, "bf16").astype(F32) if rounds == "whole" else x


# ---- the rules ----
def ceil_log2(s):
    fraction, exponent = np.frexp(s.astype(np.float64))  # s = fraction * 2^exponent, 0.5 <= fraction < 1
    return np.where(fraction == 0.5, exponent - 1, exponent)


def fp8(x, rule, scale="ue8m0", fnuz=False):
    """Codes [n, D] and scales [n] of prepared vectors; a vector with inf or NaN becomes a NaN key. fnuz: e4m3fnuz, as bytes."""
    top, encode = (F32(224), e4m3fnuz_codes) if fnuz else (F32(448), e4m3_codes)
    facts = RULES[rule]
    bad = ~np.isfinite(x).all(axis=1)
    x = np.where(bad[:, None], F32(0), x)
    a = np.maximum(np.abs(x).max(axis=1), F32(facts.floor))
    s = a * (F32(1) / top) if facts.multiplies and scale == "ue8m0" else a / top
    if scale == "ue8m0":
        s = np.ldexp(F32(1), ceil_log2(s).astype(np.int32)).astype(F32)
    inverse = {"x / s": None, "x * 2^-e": F32(1) / s, "x * (1 / s)": F32(1) / s}[facts.code]
    codes = encode(x / s[:, None] if inverse is None else x * inverse[:, None])
    codes[bad] = 0x80 if fnuz else 0x7F
    return (codes if fnuz else codes.view(E4M3)), np.where(bad, NAN_F32, s)


def mxfp4(x):
    """Packed codes [n, D / 2] and scale bytes [n, D / 32]."""
    blocks = x.reshape(len(x), -1, 32)
    bad = ~np.isfinite(blocks).all(axis=2)
    blocks = np.where(bad[:, :, None], F32(0), blocks)
    a = np.maximum(np.abs(blocks).max(axis=2), F32(6 * 2.0**-126))
    e = np.clip(ceil_log2(a / F32(6)), -127, 127)
    scaled = (blocks.astype(np.float64) * np.ldexp(1.0, -e)[:, :, None]).astype(F32)
    codes = np.where(bad[:, :, None], 0, e2m1_codes(scaled)).reshape(x.shape).astype(np.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, np.where(bad, 255, e + 127).astype(np.uint8)


def q8_0(x):
    """Blocks [n, D / 32 * 34]: an f16 d, 32 int8."""
    blocks = x.reshape(len(x), -1, 32)
    bad = ~np.isfinite(blocks).all(axis=2)
    blocks = np.where(bad[:, :, None], F32(0), blocks)
    d = np.abs(blocks).max(axis=2) / F32(127)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = F32(1) / d
        stored = d.astype(np.float16)
    inverse[~np.isfinite(inverse)] = 0
    scaled = (blocks * inverse[:, :, None]).astype(np.float64)
    codes = np.clip(np.trunc(scaled + np.copysign(0.5, scaled)), -127, 127).astype(np.int8)
    out = np.zeros((*bad.shape, 34), np.uint8)
    out[:, :, :2] = np.where(bad, 0x7E00, stored.view(np.uint16)).astype("<u2")[:, :, None].view(np.uint8)
    out[:, :, 2:] = codes.view(np.uint8)
    return out.reshape(len(x), -1)


def fold_weights(weights, s, softmax_scale, head_scale, how="one by one"):
    """weights_out of quantize_q, f32 [n]; s [n] is None for formats whose queries have no scale of their own."""
    with np.errstate(all="ignore"):
        w, softmax, head = weights.astype(F32), F32(softmax_scale or 1), F32(head_scale or 1)
        if s is None:
            out = (w * softmax) * head
        elif how == "scales together":
            out = (w * s) * (softmax * head)
        else:
            out = ((w * s) * softmax) * head
    return rounded(out, "f32")
