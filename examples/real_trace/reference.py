# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The formulas of an fp8 indexer call in numpy: quantise, lay out pages, score, select.

Written from the documented formulas, independently of the library: the expected results of a trace are meant to catch
the library, not to repeat it. Keys stand in position order here; only `pack_pages` knows pages.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
E4M3 = ml_dtypes.float8_e4m3fn
E4M3_MAX = np.float32(448)
KEY_FLOOR = np.float32(1e-4)  # rule v32_key
QUERY_FLOOR = np.float32(1e-10)  # rule v32_query


def ue8m0(scale: F32) -> F32:
    """2^ceil(log2 scale) from the bits of positive normal f32: the exponent, one more if any fraction bit is set."""
    bits = scale.view(np.uint32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent.astype(np.uint32) << 23).view(np.float32)


def encode(x: F32, scale: F32) -> NDArray:
    """e4m3fn codes of x [..., D] / scale [...]: nearest even, saturating.

    ml_dtypes rounds to nearest even but makes NaN of what lies above 464, so clip first.
    """
    return np.clip(x / scale[..., None], -E4M3_MAX, E4M3_MAX).astype(E4M3)


def _amax(x: F32, floor: np.float32) -> F32:
    """max(|x|) over the last dimension, at least `floor`."""
    if not np.isfinite(x).all():
        raise ValueError("quantise: values must be finite")
    return np.maximum(np.abs(x).max(axis=-1), floor)


def quantize_keys(keys: NDArray) -> tuple[NDArray, F32]:
    """Rule v32_key with ue8m0 scales: bf16 keys [T, D] to codes [T, D] and scales [T]."""
    x = keys.astype(np.float32)
    scale = ue8m0(_amax(x, KEY_FLOOR) / E4M3_MAX)
    return encode(x, scale), scale


def quantize_queries(q: NDArray) -> tuple[NDArray, F32]:
    """Rule v32_query with ue8m0 scales and raw weights 1: bf16 q [R, H, D] to codes [R, H, D] and weights [R, H].

    weights = ((1 * s) * f32(D^-0.5)) * f32(H^-0.5), each product rounded to f32.
    """
    heads, dim = q.shape[1:]
    x = q.astype(np.float32)
    scale = ue8m0(_amax(x, QUERY_FLOOR) * np.float32(1 / 448))
    weights = np.float32(1) * scale * np.float32(dim**-0.5) * np.float32(heads**-0.5)
    return encode(x, scale), weights


def pack_pages(codes: NDArray, scales: F32, block_table: NDArray, page_size: int) -> NDArray[np.uint8]:
    """The cache [pages, page_size * (D + 4)]: in each page the values of all its rows, then their f32 scales.

    Position p lies in row p % page_size of page block_table[p // page_size].
    """
    pages, dim = len(block_table), codes.shape[1]
    cache = np.empty((pages, page_size * (dim + 4)), np.uint8)
    cache[block_table, : page_size * dim] = codes.view(np.uint8).reshape(pages, -1)
    cache[block_table, page_size * dim :] = scales.astype("<f4").view(np.uint8).reshape(pages, -1)
    return cache


def scores(q: NDArray, weights: F32, keys: NDArray, key_scale: F32) -> F32:
    """The library's `ref` arithmetic, [R, T] f32: codes q [R, H, D] and keys [T, D].

    Products of e4m3 codes are multiples of 2^-18 below 2^18, so a double holds their sum exactly in whatever order a
    BLAS adds. Heads add in ascending order, product and sum rounded apart; the key scale multiplies last; then one
    rounding to f32.
    """
    wide_keys = keys.astype(np.float64).T
    total = np.zeros((len(q), keys.shape[0]))
    for h in range(q.shape[1]):
        dot = q[:, h].astype(np.float64) @ wide_keys
        total += weights[:, h, None].astype(np.float64) * np.maximum(dot, 0)
    return canonical((total * key_scale.astype(np.float64)).astype(np.float32))


def canonical(x: F32) -> F32:
    """-0 as +0 and every NaN as 0x7FC00000."""
    x = x + np.float32(0)
    x[np.isnan(x)] = np.uint32(0x7FC00000).view(np.float32)
    return x


def select(row: F32, topk: int) -> NDArray[np.int32]:
    """Positions of the topk best of one row's scores, ascending.

    Best is: score descending with NaN last, then position ascending.
    """
    order = np.argsort(-row, kind="stable")  # stable: equal scores keep ascending positions; numpy sorts NaN last
    return np.sort(order[:topk]).astype(np.int32)


def search(scored: F32, lens: NDArray, topk: int) -> tuple[NDArray[np.int32], F32]:
    """Selection of every row over its first lens[row] positions: indices and scores [R, topk], ascending positions."""
    indices = np.stack([select(row[:n], topk) for row, n in zip(scored, lens, strict=True)])
    return indices, np.take_along_axis(scored, indices, axis=1)
