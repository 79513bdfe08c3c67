# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Key formats and pages: the value of every key element, the bytes of every row, where a page keeps them."""

import ml_dtypes
import numpy as np

from .numbers import BF16, E4M3, F32, e2m1_values, ue8m0_values

VALUE_BYTES = {
    "fp8": lambda d: d,
    "fp8_fnuz": lambda d: d,
    "mxfp4": lambda d: d // 2,
    "bf16": lambda d: 2 * d,
    "f16": lambda d: 2 * d,
    "f32": lambda d: 4 * d,
    "q8_0": lambda d: d // 32 * 34,
}
SCALE_BYTES = {"fp8": lambda d: 4, "fp8_fnuz": lambda d: 4, "mxfp4": lambda d: d // 32}
PLAIN = {"bf16": BF16, "f16": np.float16, "f32": F32}


def row_bytes(format, d):
    """Bytes of a key row: values, scales."""
    return VALUE_BYTES[format](d), SCALE_BYTES.get(format, lambda d: 0)(d)


def values_of(format, raw):
    """Key elements [..., D] in double from the value bytes [..., V] of rows; mxfp4: before their scales."""
    raw = np.ascontiguousarray(raw)
    *lead, width = raw.shape
    if format == "fp8":
        return raw.view(E4M3).astype(np.float64)
    if format == "fp8_fnuz":
        return raw.view(ml_dtypes.float8_e4m3fnuz).astype(np.float64)
    if format == "mxfp4":
        return e2m1_values(np.stack([raw & 15, raw >> 4], axis=-1).reshape(*lead, 2 * width)).astype(np.float64)
    if format == "q8_0":
        blocks = raw.reshape(*lead, width // 34, 34)
        scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64)
        codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
        return (scale * codes).reshape(*lead, width // 34 * 32)
    return raw.view(PLAIN[format]).astype(np.float64)


def decode(format, values, scales=None):
    """De-quantised keys [N, D] and their outer scale [N], both double. values and scales: bytes or typed arrays."""
    values = np.ascontiguousarray(values).view(np.uint8)
    k = values_of(format, values)
    outer = np.ones(k.shape[:-1])
    if format in ("fp8", "fp8_fnuz"):
        outer = np.ascontiguousarray(scales).view(F32).reshape(outer.shape).astype(np.float64)
    if format == "mxfp4":
        k = k * np.repeat(ue8m0_values(np.ascontiguousarray(scales).view(np.uint8)), 32, axis=-1)
    return k, outer


def row_offsets(format, layout, page_size, d, row):
    """Places of a row's value and scale bytes inside its page."""
    v, g = row_bytes(format, d)
    values, scales = np.arange(v), np.arange(g)
    if layout == "interleaved":
        return row * (v + g) + values, row * (v + g) + v + scales
    first = page_size * v
    if layout == "planar":
        return row * v + values, first + row * g + scales
    # Groups of rows whose 16-byte pieces alternate; of the four scales of mxfp4 64 / tile lie apart.
    tile = int(layout.removeprefix("tiled"))
    group, inside = divmod(row, tile)
    values = group * tile * v + values // 16 * 16 * tile + inside * 16 + values % 16
    if format != "mxfp4":
        return values, first + row * g + scales
    apart = 64 // tile
    together = g // apart
    return values, first + group * tile * g + scales % apart * tile * together + inside * together + scales // apart


def read_row(pages, cache, page, row):
    """Value and scale bytes of one row of a page."""
    values, scales = row_offsets(cache.format, cache.layout, cache.page_size, cache.head_dim, row)
    return pages[page, values], pages[page, scales]


def to_pages(cache, slots, values, scales):
    """Puts rows of value and scale bytes at their slots of cache.pages, one after the other."""
    for slot, value, scale in zip(slots, values, scales, strict=True):
        if slot < 0:
            continue
        page, row = divmod(int(slot), cache.page_size)
        here, there = row_offsets(cache.format, cache.layout, cache.page_size, cache.head_dim, row)
        cache.pages[page, here], cache.pages[page, there] = value, scale


def split_bytes(format, values, scales):
    """Rows of value bytes and of scale bytes, of keys given as arrays."""
    values = np.ascontiguousarray(values).view(np.uint8)
    if scales is None:
        return values, np.zeros((len(values), 0), np.uint8)
    return values, np.ascontiguousarray(scales).reshape(len(values), scales.size // max(len(values), 1)).view(np.uint8)
