# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Number formats: what rounds to what, and the bits that stand for NaN."""

import ml_dtypes
import numpy as np

F32 = np.float32
BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
DTYPES = {"f32": F32, "bf16": BF16, "f16": np.float16}
NAN = {"f32": 0x7FC00000, "bf16": 0x7FC0, "f16": 0x7E00}
BITS = {2: np.uint16, 4: np.uint32, 1: np.uint8}


def bits(array):
    """The array's bits as unsigned integers."""
    array = np.ascontiguousarray(array)
    return array.view(BITS[array.dtype.itemsize])


def rounded(x, dtype):
    """f32 to nearest even of `dtype`, with the library's NaN; too large becomes inf."""
    with np.errstate(over="ignore", invalid="ignore"):
        out = x.astype(DTYPES[dtype])
    raw = bits(out).copy()
    raw[np.isnan(x)] = NAN[dtype]
    return raw.view(DTYPES[dtype])


def canonical(scores):
    """f32 scores as they are written: -0 as +0, one NaN."""
    scores = np.where(scores == 0, F32(0), scores.astype(F32))
    return rounded(scores, "f32")


def e4m3_codes(x):
    """f32 to the nearest e4m3fn code, saturating."""
    return np.clip(x, F32(-448), F32(448)).astype(E4M3).view(np.uint8)


def e4m3fnuz_codes(x):
    """f32 to the nearest e4m3fnuz code, held within 224 as producers do; one zero."""
    return np.clip(x, F32(-224), F32(224)).astype(ml_dtypes.float8_e4m3fnuz).view(np.uint8)


def e2m1_codes(x):
    """f32 to the nearest e2m1 code (4 bits), saturating, ties to the even code."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)
    middles = (values[1:] + values[:-1]) / 2
    size = np.abs(x)
    above = (size[..., None] > middles).sum(axis=-1)
    tie = (size[..., None] == middles).any(axis=-1)
    code = above + (tie & (above % 2 == 1))
    return (code + 8 * np.signbit(x)).astype(np.uint8)


def e2m1_values(codes):
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F32)
    return values[codes]


def ue8m0_values(byte):
    """2^(byte - 127); 255 is NaN."""
    with np.errstate(invalid="ignore"):
        return np.where(byte == 255, np.nan, np.ldexp(1.0, byte.astype(np.int32) - 127))
