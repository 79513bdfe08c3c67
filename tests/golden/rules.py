# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The formulas of the golden bytes: numbers, what comes before a rule (norm, rope, Hadamard), the QuantRules (API.md,
section 2), and their check against known vectors and exact rational arithmetic. make_golden.py feeds them its inputs.

Arithmetic: f32, every operation rounded once, never fused, in this order.
  norm      sum(v) = 32 partial sums p[l], from +0, over d = l, l+32, l+64, ... ascending; then p[l] += p[l+h],
            h = 16, 8, 4, 2, 1.
            layer: mean = sum(x) / D; c = x - mean; var = sum(c * c) / D; r = 1 / sqrt(var + eps);
                   y = (c * r) * weight + bias (no addition without a bias).
            rms:   ms = sum(x * x) / D; r = 1 / sqrt(ms + eps); y = (x * r) * weight.
            r is two roundings (sqrt, then 1 /), and it multiplies. y is then rounded to the input's dtype.
  rope      a' = a * cos - b * sin, b' = b * cos + a * sin; half split: pairs (i, i + dim/2), interleaved: (2i, 2i + 1);
            then the roped dims are rounded to the input's dtype. A table row is cos[dim/2] | sin[dim/2].
  Hadamard  strides 1, 2, 4, ...: (a, b) -> (a + b, a - b); then times f32(D^-0.5). Not rounded to any dtype.
  rule      bf16 rounding of the rule; a = max(amax, floor); s; ue8m0: s = 2^ceil(log2 s) from its bits; codes; weights.
            "Roped dims" are rounded where rope leaves them; no case has both such a rule, rope and Hadamard.
  q8_0      codes divide by the f32 d (as in the published format); only the stored d is rounded to f16, where it may
            become 0 (codes stay) or inf (IEEE conversion). The table does not speak of amax so small that 1 / d
            overflows: no case.
  inf, NaN  judged on the vector (block) that amax sees, so an f32 that overflows to inf in bf16 counts.
"""

from fractions import Fraction

import ml_dtypes
import numpy as np

F = np.float32
BF16 = ml_dtypes.bfloat16
DTYPES = {"f32": F, "bf16": BF16}
NAN = np.array([0x7FC00000], np.uint32).view(F)[0]
np.seterr(all="ignore")

# rule: (what is rounded to bf16, floor, how s follows from a, order of weights_out)
FP8 = {
    "v32_key": ("nothing", F(1e-4), "divide", None),
    "v32_query": ("roped", F(1e-10), "multiply", "scales last"),
    "v4_query": ("roped", F(1e-4), "divide", "scales last"),
    "v4_key": ("whole", F(1e-4), "divide", None),
    "kpool_query": ("whole", F(1e-4), "multiply", "scales together"),
    "kpool_key": ("whole", F(1e-4), "multiply", None),
    "cpu_query": ("nothing", F(1e-4), "divide", "scales last"),
}


# ---- numbers ----
def hex_of(a):
    a = np.ascontiguousarray(a)
    return a.astype(a.dtype.newbyteorder("<")).tobytes().hex() if a.dtype != BF16 else a.view("<u2").tobytes().hex()


def ulp(a, steps, dtype):
    """a moved by so many units in the last place of dtype, a > 0."""
    bits = np.array([a], F).view(np.uint32).astype(np.int64) + steps * (1 if dtype == "f32" else 0x10000)
    return bits.astype(np.uint32).view(F)[0]


def to_bf16(x):
    return x.astype(BF16).astype(F)


def ceil_log2(s):
    """Exact ceil(log2 s) of positive finite f32, subnormals included, from the bits."""
    bits = s.view(np.uint32).astype(np.int64)
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    normal = exponent - 127 + (fraction != 0)
    subnormal = np.array([int(f - 1).bit_length() if f else 0 for f in fraction.ravel()]).reshape(fraction.shape) - 149
    return np.where(exponent > 0, normal, subnormal)


def pow2(e):
    return np.ldexp(F(1), e.astype(np.int32)).astype(F)


def e4m3(v):
    return np.clip(v, F(-448), F(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def e4m3fnuz(v):
    """Producers clamp to 224 although 240 exists; -0 does not."""
    return np.clip(v, F(-224), F(224)).astype(ml_dtypes.float8_e4m3fnuz).view(np.uint8)


def e2m1(v):
    return np.clip(v, F(-6), F(6)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


def round_half_away(v):
    return np.copysign(np.floor(np.abs(v.astype(np.float64)) + 0.5), v)  # exact: the sum needs 33 bits at most


# ---- before the rule ----
def ordered_sum(v):
    p = np.zeros((v.shape[0], 32), F)
    for d in range(0, v.shape[1], 32):
        p = p + v[:, d : d + 32]
    for h in (16, 8, 4, 2, 1):
        p = p[:, :h] + p[:, h : 2 * h]
    return p


def apply_norm(x, kind, weight, bias, eps):
    size = F(x.shape[1])
    centred = x - ordered_sum(x) / size if kind == "layer" else x
    r = F(1) / np.sqrt(ordered_sum(centred * centred) / size + eps)
    y = (centred * r) * weight
    return y if bias is None else y + bias


def roped_slice(d, dim, trailing):
    return slice(d - dim, d) if trailing else slice(0, dim)


def apply_rope(x, dim, interleaved, trailing, table, positions):
    """positions: one a vector."""
    out, half = x.copy(), dim // 2
    part = out[:, roped_slice(x.shape[1], dim, trailing)]  # a view: writes reach out
    a, b = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, half), slice(half, dim))
    cos, sin = table[positions, :half], table[positions, half:]
    xa, xb = part[:, a].copy(), part[:, b].copy()
    part[:, a] = xa * cos - xb * sin
    part[:, b] = xb * cos + xa * sin
    return out


def apply_hadamard(x):
    n, d = x.shape
    stride = 1
    while stride < d:
        pairs = x.reshape(n, d // (2 * stride), 2, stride)
        x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(n, d)
        stride *= 2
    return x * F(d**-0.5)


# ---- the rules ----
def quantise_fp8(rule, x, scale, fnuz=False):
    """fnuz: e4m3fnuz codes, every 448 is then 224."""
    _, floor, how, _ = FP8[rule]
    top, encode, nan = (224, e4m3fnuz, 0x80) if fnuz else (448, e4m3, 0x7F)
    ok = np.isfinite(x).all(axis=1)
    x = np.where(ok[:, None], x, F(0))
    a = np.maximum(np.abs(x).max(axis=1), floor)
    s = a * (F(1) / F(top)) if how == "multiply" and scale == "ue8m0" else a / F(top)
    if scale == "ue8m0":
        e = ceil_log2(s)
        for power, v in zip(e, a, strict=True):  # the f32 division changes no exponent
            assert top * Fraction(2) ** int(power) >= Fraction(float(v)) > top // 2 * Fraction(2) ** int(power)
        s = pow2(e)
    if rule == "v4_key":
        v = x * pow2(-e)[:, None]
    elif rule == "cpu_query":
        v = x * (F(1) / s)[:, None]
    else:
        v = x / s[:, None]
    assert v.dtype == s.dtype == F
    return np.where(ok[:, None], encode(v), np.uint8(nan)), np.where(ok, s, NAN)


def quantise_mxfp4(x):
    n, d = x.shape
    x = x.reshape(n, d // 32, 32)
    ok = np.isfinite(x).all(axis=2)
    x = np.where(ok[:, :, None], x, F(0))
    a = np.maximum(np.abs(x).max(axis=2), F(6 * 2.0**-126))
    e = np.clip(ceil_log2(a / F(6)), -127, 127)
    v = x * pow2(-e)[:, :, None]
    assert v.dtype == F
    code = np.where(ok[:, :, None], e2m1(v), 0).reshape(n, d).astype(np.uint8)
    return code[:, 0::2] | code[:, 1::2] << 4, np.where(ok, e + 127, 255).astype(np.uint8)


def quantise_q8_0(x):
    n, d = x.shape
    x = x.reshape(n, d // 32, 32)
    ok = np.isfinite(x).all(axis=2)
    x = np.where(ok[:, :, None], x, F(0))
    a = np.abs(x).max(axis=2)
    scale = a / F(127)
    inverse = np.where(scale > 0, F(1) / scale, F(0))
    assert np.isfinite(inverse).all() and inverse.dtype == F
    code = np.clip(round_half_away(x * inverse[:, :, None]), -127, 127).astype(np.int8)
    stored = scale.astype(np.float16).view(np.uint16)
    block = np.zeros((n, d // 32, 34), np.uint8)
    block[:, :, :2] = np.where(ok, stored, 0x7E00).astype("<u2")[:, :, None].view(np.uint8)
    block[:, :, 2:] = np.where(ok[:, :, None], code, 0).astype(np.int8).view(np.uint8)
    return block.reshape(n, -1)


def weights_out(order, w, s, softmax, head):
    """w [n] in its own dtype; s [n], or None for mxfp4."""
    w = w.astype(F)
    if order == "mxfp4":
        out = (w * softmax) * head
    elif order == "scales together":
        out = (w * s) * (softmax * head)
    else:
        out = ((w * s) * softmax) * head
    assert out.dtype == F
    return np.where(np.isnan(out), NAN, out)


# ---- a fixed integer generator and correctly rounded operations only: the same numbers on every machine ----
class Random:
    def __init__(self, seed):
        self.state = seed

    def bits(self):  # splitmix64
        self.state = (self.state + 0x9E3779B97F4A7C15) % 2**64
        z = self.state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    def normal(self, n):  # sum of 12 uniforms: normal enough, and exact
        return np.array([sum(self.bits() >> 40 for _ in range(12)) / 2**24 - 6 for _ in range(n)]).astype(F)

    def below(self, n, a):  # |x| <= a/2, both signs
        return np.array([(self.bits() >> 40) / 2**24 - 0.5 for _ in range(n)]).astype(F) * F(a)

    def index(self, n):
        return self.bits() % n


# ---- the formulas against what is known ----
def nearest_even(v, values):
    """Code of the nearest of values (code = index), ties to the even code, in exact arithmetic."""
    return min(range(len(values)), key=lambda c: (abs(Fraction(float(values[c])) - Fraction(abs(float(v)))), c % 2))


def self_check():
    # REFERENCE A.1: the fp8 ramp
    x = ((np.arange(128) - 64) / 16).astype(F)[None]
    want = (
        "f8f8f8f7f7f7f6f6f6f6f6f5f5f5f4f4f4f4f4f3f3f3f2f2f2f2f2f1f1f1f0f0"
        "f0f0efeeeeeeedecececebeaeaeae9e8e8e7e6e5e4e3e2e1e0dedcdad8d4d0c8"
        "00485054585a5c5e60616263646566676868696a6a6a6b6c6c6c6d6e6e6e6f70"
        "7070707171717272727272737373747474747475757576767676767777777878"
    )
    for rule in FP8:
        codes, scale = quantise_fp8(rule, x, "ue8m0")
        assert codes.tobytes().hex() == want and hex_of(scale) == "0000803c"
    codes, scale = quantise_fp8("v32_key", np.zeros((1, 128), F), "ue8m0")
    assert not codes.any() and hex_of(scale) == "00008034"
    # A.2: e4m3 conversion
    pairs = {
        1.0: 0x38,
        -1.0: 0xB8,
        17.0: 0x58,
        19.0: 0x5A,
        448.0: 0x7E,
        464.0: 0x7E,
        500.0: 0x7E,
        2.0**-6: 0x08,
        2.0**-9: 0x01,
        2.0**-10: 0x00,
        float(ulp(F(2.0**-10), 1, "f32")): 0x01,
        -0.0: 0x80,
    }
    assert e4m3(np.array(list(pairs), F)).tolist() == list(pairs.values())
    # A.3: the same ramp in mxfp4
    codes, scale = quantise_mxfp4(x)
    assert scale.tobytes().hex() == "7f7e7e7f" and codes.tobytes().hex() == (
        "eeeeeeeededdddddddddddddcccccccceeeededdddddccccccbcbbaaaa9a9988"
        "0010112222323344444454555555666644444444545555555555555566666666"
    )
    codes, scale = quantise_mxfp4(np.full((1, 128), -0.0, F))
    assert scale.tobytes().hex() == "01010101" and codes.tobytes().hex() == "88" * 64
    # e4m3fnuz: half of e4m3's value but for NaN, one zero
    fnuz = {1.0: 0x40, -1.0: 0xC0, 224.0: 0x7E, -224.0: 0xFE, 500.0: 0x7E, 2.0**-10: 0x01, 2.0**-11: 0x00}
    fnuz |= {-0.0: 0x00, -(2.0**-12): 0x00, float(ulp(F(2.0**-11), 1, "f32")): 0x01}
    assert e4m3fnuz(np.array(list(fnuz), F)).tolist() == list(fnuz.values())
    codes, scale = quantise_fp8("v32_key", x, "ue8m0", fnuz=True)  # the ramp needs twice the scale of e4m3: same codes
    assert codes.tobytes().hex() == want and hex_of(scale) == "0000003d"
    # the conversions against exact nearest-even search
    kinds = (
        (e4m3, ml_dtypes.float8_e4m3fn, 127, 448),
        (e4m3fnuz, ml_dtypes.float8_e4m3fnuz, 127, 224),
        (e2m1, ml_dtypes.float4_e2m1fn, 8, 6),
    )
    for encode, kind, count, top in kinds:
        values = np.arange(count, dtype=np.uint8).view(kind).astype(F)
        mid = (values[1:] + values[:-1]) / F(2)
        tests = [ulp(m, n, "f32") for m in mid for n in (-1, 0, 1)] + list(np.abs(Random(7).normal(200)) * F(top / 4))
        assert encode(np.array(tests, F)).tolist() == [nearest_even(t, values) for t in tests]
    # ceil(log2 s), subnormals included
    bits = [
        1,
        2,
        3,
        4,
        5,
        2**22,
        2**23 - 1,
        2**23,
        2**23 + 1,
        0x3F800000,
        0x3F7FFFFF,
        0x3F800001,
        0x7F7FFFFF,
        0x7F000000,
    ]
    s = np.array(bits, np.uint32).view(F)
    for v, e in zip(s, ceil_log2(s), strict=True):
        assert Fraction(2) ** int(e) >= Fraction(float(v)) > Fraction(2) ** int(e - 1)
    # f32(n^-0.5) is the f32 nearest to the real number
    for n in range(1, 129):
        y = F(n**-0.5)
        low, high = ((Fraction(float(y)) + Fraction(float(np.nextafter(y, F(to))))) / 2 for to in (0, 2))
        assert low**2 * n < 1 < high**2 * n
    assert round_half_away(np.array([0.5, -2.5, 0.49999997, 126.5], F)).tolist() == [1, -3, 0, 127]
    h = np.stack([apply_hadamard(row[None])[0] for row in np.eye(4, dtype=F)]) * 2
    assert h.tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
