# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Inputs for the tests: keys, queries and caches of every format, from a generator; exact ones, on which every backend
must give the bits of S_ref, and random ones."""

from typing import NamedTuple

import numpy as np
import topkey
from formulas import keys as key_formulas
from formulas.numbers import DTYPES, E4M3, F32, e4m3fnuz_codes

FORMATS = ("fp8", "mxfp4", "bf16", "f16", "f32", "q8_0", "fp8_fnuz")
HAVE_Q_CODES = ("fp8", "mxfp4", "fp8_fnuz")  # whose queries are codes too


class Problem(NamedTuple):
    """What scores are made of, as arrays to hand over; and `q`, `k`, `w`, `outer` in double."""

    format: str
    arguments: dict  # q, weights (and q_scales)
    dense: dict  # k, k_scales, format
    q: np.ndarray
    k: np.ndarray
    w: np.ndarray
    outer: np.ndarray


def supported(format, backend="ref"):
    """Not every build has every format yet; the library says so itself."""
    q = np.zeros((1, 1, 32), F32) if format not in HAVE_Q_CODES else np.zeros((1, 1, 32), np.uint8)
    arguments = {"q": q, "weights": np.zeros((1, 1), F32), "topk": 1, "format": format}
    if format == "mxfp4":
        arguments |= {
            "q": q[:, :, :16],
            "q_scales": np.zeros((1, 1, 1), np.uint8),
            "k_scales": np.zeros((1, 1), np.uint8),
        }
    if format in ("fp8", "fp8_fnuz"):
        arguments["k_scales"] = np.zeros(1, F32)
    width = key_formulas.VALUE_BYTES[format](32)
    plain = format in key_formulas.PLAIN
    arguments["k"] = np.zeros((1, 32), key_formulas.PLAIN[format]) if plain else np.zeros((1, width), np.uint8)
    return topkey.unsupported("mqa_topk", **arguments, exec=topkey.Exec(backend=backend)) is None


SUPPORTED = tuple(format for format in FORMATS if supported(format))


def small_codes(rng, shape):
    """Whole numbers from -4 to 4: they exist in every format."""
    return rng.integers(-4, 5, shape).astype(F32)


def power_of_two(rng, shape, signed=True):
    sign = rng.choice([-1, 1], shape) if signed else 1
    return (sign * np.exp2(rng.integers(-3, 4, shape))).astype(F32)


def keys(rng, format, n, d, exact):
    """(values, scales) of n keys as the library takes them."""
    if format in ("fp8", "fp8_fnuz"):
        x = small_codes(rng, (n, d)) if exact else rng.normal(0, 8, (n, d)).astype(F32)
        scales = power_of_two(rng, n) if exact else rng.uniform(1e-3, 2, n).astype(F32)
        return (np.clip(x, -448, 448).astype(E4M3) if format == "fp8" else e4m3fnuz_codes(x)), scales
    if format == "mxfp4":
        # Codes of 0, 1, 2, 3, 4 and their negatives.
        codes = rng.choice([0, 2, 4, 5, 6, 10, 12, 13, 14], (n, d)) if exact else rng.integers(0, 16, (n, d))
        scales = np.full((n, d // 32), 127) if exact else rng.integers(120, 132, (n, d // 32))
        return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8), scales.astype(np.uint8)
    if format == "q8_0":
        blocks = np.zeros((n, d // 32, 34), np.uint8)
        scale = np.abs(power_of_two(rng, (n, d // 32))) if exact else rng.uniform(1e-3, 0.1, (n, d // 32))
        codes = rng.integers(-4, 5, (n, d // 32, 32)) if exact else rng.integers(-127, 128, (n, d // 32, 32))
        blocks[:, :, :2] = scale.astype(np.float16)[:, :, None].view(np.uint8)
        blocks[:, :, 2:] = codes.astype(np.int8).view(np.uint8)
        return blocks.reshape(n, d // 32 * 34), None
    x = small_codes(rng, (n, d)) if exact else rng.normal(size=(n, d)).astype(F32)
    return x.astype(key_formulas.PLAIN[format]), None


def problem(rng, format, rows, heads, d, n, exact=True, q_dtype="f32"):
    """A whole problem. q_dtype: for formats whose queries are plain."""
    values, scales = keys(rng, format, n, d, exact)
    k, outer = key_formulas.decode(format, values, scales)
    w = power_of_two(rng, (rows, heads)) if exact else rng.normal(size=(rows, heads)).astype(F32)
    arguments = {"weights": w}
    if format in HAVE_Q_CODES:
        codes, q_scales = keys(rng, format, rows * heads, d, exact)
        arguments["q"] = codes.reshape(rows, heads, -1)
        if format == "mxfp4":
            arguments["q_scales"] = q_scales.reshape(rows, heads, -1)
        q, _ = key_formulas.decode(format, codes, q_scales)
        q = q.reshape(rows, heads, d)
    else:
        x = small_codes(rng, (rows, heads, d)) if exact else rng.normal(size=(rows, heads, d)).astype(F32)
        arguments["q"] = x.astype(DTYPES[q_dtype])
        q = arguments["q"].astype(np.float64)
    dense = {"k": values, "k_scales": scales, "format": format}
    return Problem(format, arguments, dense, q, k, w.astype(np.float64), outer)


def paged(rng, problem, lengths, page_size, layout="planar", spare=0, dtype=np.uint8):
    """The problem's keys laid into pages in a random order: (KeyCache, block_table). Request b has lengths[b] of them."""
    d = problem.q.shape[2]
    pages_of = [-(-n // page_size) for n in lengths]
    total, width = sum(pages_of) + 1, max([*pages_of, 1])
    page_bytes = page_size * sum(key_formulas.row_bytes(problem.format, d))
    stride = (page_bytes + 3) // 4 * 4 + 4 * spare
    pool = rng.integers(0, 256, (total, stride)).astype(np.uint8)
    cache = topkey.KeyCache(pool.view(dtype)[:, :page_bytes], page_size, d, problem.format, layout)
    order, table = list(rng.permutation(total)), np.full((len(lengths), width), -1, np.int32)
    values, scales = key_formulas.split_bytes(problem.format, problem.dense["k"], problem.dense["k_scales"])
    first = 0
    for b, n in enumerate(lengths):
        table[b, : pages_of[b]] = [order.pop() for _ in range(pages_of[b])]
        slots = [table[b, p // page_size] * page_size + p % page_size for p in range(n)]
        key_formulas.to_pages(cache._replace(pages=pool), slots, values[first : first + n], scales[first : first + n])
        first += n
    return cache, table
