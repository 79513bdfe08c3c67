# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Stages `quantize` and `cache`: from a model's vectors to codes, into the pages of a cache and out of them."""

from __future__ import annotations

from collections.abc import Mapping

from . import _native
from .calls import (
    Fields,
    Question,
    cache_fields,
    extent,
    finish,
    make,
    norm_fields,
    operation,
    rope_fields,
    shard_fields,
    wanted,
)
from .types import DEFAULT_EXEC, Array, Exec, Format, KeyCache, Norm, Rope, Scale, Shard

_CODES = {"fp8": "f8_e4m3fn", "bf16": "bf16", "f16": "f16", "f32": "f32"}  # the others: bytes


@operation
def quantize_q(
    q: Array,
    weights: Array,
    *,
    format: Format = "fp8",
    softmax_scale: float = 1.0,
    head_scale: float = 1.0,
    rope: Rope | None = None,
    hadamard: bool = False,
    rule: str | None = None,
    out: Mapping[str, Array] | None = None,
    exec: Exec = DEFAULT_EXEC,
) -> tuple[Array, Array | None, Array]:
    """Queries [R, H, D] (float32, bfloat16 or float16) to codes for keys of `format`; returns codes, scales, weights.

    fp8: float8_e4m3fn codes (fp8_fnuz: uint8), None, and float32 [R, H] weights * q_scale * softmax_scale * head_scale. mxfp4: uint8
    [R, H, D / 2] and their scales uint8 [R, H, D / 32]. Other formats: q in its own dtype. weights: float32 or bfloat16
    [R, H]. rule names a quantisation rule of docs/formats.md. out: arrays to be filled, "q_out", "q_scales_out",
    "weights_out".

    ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend can
    run it.
    """
    rows, heads, dim = extent(q, 0), extent(q, 1), extent(q, 2)
    given = wanted("quantize_q", {} if out is None else out, ("q_out", "q_scales_out", "weights_out"))
    codes, scales, folded = given.get("q_out"), given.get("q_scales_out"), given.get("weights_out")
    if codes is None:
        dtype = {"fp8": "f8_e4m3fn", "mxfp4": "u8", "fp8_fnuz": "u8"}.get(format) or _native.dtype_of(q) or "f32"
        codes = make(q, (rows, heads, dim // 2 if format == "mxfp4" else dim), dtype, exec)
    if scales is None and format == "mxfp4":
        scales = make(q, (rows, heads, dim // 32), "u8", exec)
    if folded is None:
        folded = make(q, (rows, heads), "f32", exec)
    fields = {
        "q": q, "weights": weights, "softmax_scale": softmax_scale, "head_scale": head_scale, "rule": rule,
        "hadamard": hadamard, "format": format, "q_out": codes, "q_scales_out": scales, "weights_out": folded,
    }  # fmt: skip
    rope_fields("quantize_q", fields, rope)
    finish("quantize_q", fields, exec)
    return codes, scales, folded


@operation
def quantize_k(
    k: Array,
    *,
    format: Format = "fp8",
    scale: Scale = "ue8m0",
    norm: Norm | None = None,
    rope: Rope | None = None,
    hadamard: bool = False,
    rule: str | None = None,
    out: Mapping[str, Array] | None = None,
    exec: Exec = DEFAULT_EXEC,
) -> tuple[Array, Array | None]:
    """Keys [T, D] (float32, bfloat16 or float16) to codes and scales of `format`, in the order norm, rope, Hadamard.

    fp8: float8_e4m3fn (fp8_fnuz: uint8) [T, D] and float32 [T]. mxfp4: uint8 [T, D / 2] and [T, D / 32]. q8_0: uint8 [T, D / 32 * 34].
    bf16, f16, f32: [T, D] rounded. The last four have no scales (None). out: arrays to be filled, "values", "scales".

    ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend can
    run it.
    """
    fields: Fields = {"k": k, "hadamard": hadamard, "scale": scale, "rule": rule, "format": format}
    norm_fields("quantize_k", fields, norm)
    rope_fields("quantize_k", fields, rope)
    values, scales = _dense_outputs("quantize_k", fields, k, (extent(k, 0), extent(k, 1)), format, out, exec)
    finish("quantize_k", fields, exec)
    return values, scales


@operation
def store_k(
    k: Array,
    slot_mapping: Array,
    cache: KeyCache,
    *,
    k_scales: Array | None = None,
    norm: Norm | None = None,
    rope: Rope | None = None,
    hadamard: bool = False,
    scale: Scale = "ue8m0",
    rule: str | None = None,
    exec: Exec = DEFAULT_EXEC,
) -> None:
    """Norm, rope, Hadamard, quantise and scatter into the cache, in one pass; or scatter ready codes (with k_scales).

    k [>= T, D]; slot_mapping int32 or int64 [T]: slot = page * page_size + offset, negative = not written. Writes
    cache.pages.

    ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend can
    run it.
    """
    fields: Fields = {
        "k": k, "k_scales": k_scales, "hadamard": hadamard, "scale": scale, "rule": rule, "slot_mapping": slot_mapping
    }  # fmt: skip
    norm_fields("store_k", fields, norm)
    rope_fields("store_k", fields, rope)
    cache_fields("store_k", fields, cache)
    finish("store_k", fields, exec)


@operation
def gather_k(
    cache: KeyCache,
    block_table: Array,
    indptr: Array,
    *,
    total: int,
    shard: Shard | None = None,
    out: Mapping[str, Array] | None = None,
    exec: Exec = DEFAULT_EXEC,
) -> tuple[Array, Array | None]:
    """Pages to flat rows: row i of request b, indptr[b] <= i < indptr[b + 1], is its key row i - indptr[b].

    block_table int32 [B, pages], indptr int32 [B + 1]; total: an upper bound of indptr[B]. Returns values and scales
    as quantize_k does, [total, ...]; rows from indptr[B] on are not written. A key that cannot be read becomes a NaN key.

    ValueError: an argument of wrong dtype, shape, stride or device; nothing is written. RuntimeError: no backend can
    run it.
    """
    fields: Fields = {"block_table": block_table, "indptr": indptr, "total": total}
    cache_fields("gather_k", fields, cache)
    fields["out.format"] = cache.format
    shard_fields("gather_k", fields, shard)
    values, scales = _dense_outputs("gather_k", fields, indptr, (total, cache.head_dim), cache.format, out, exec)
    finish("gather_k", fields, exec)
    return values, scales


def _dense_outputs(
    op: str,
    fields: Fields,
    like: Array,
    size: tuple[int, int],
    format: Format,
    out: Mapping[str, Array] | None,
    exec: Exec | Question,
) -> tuple[Array, Array | None]:
    """Adds values and scales of `size` = (rows, head_dim) key rows to the fields, made where not given."""
    rows, dim = size
    given = wanted(op, {} if out is None else out, ("values", "scales"))
    values, scales = given.get("values"), given.get("scales")
    if values is None:
        width = {"mxfp4": dim // 2, "q8_0": dim // 32 * 34}.get(format, dim)
        values = make(like, (rows, width), _CODES.get(format, "u8"), exec)
    if scales is None and format in ("fp8", "fp8_fnuz"):
        scales = make(like, (rows,), "f32", exec)
    if scales is None and format == "mxfp4":
        scales = make(like, (rows, dim // 32), "u8", exec)
    fields["out.values"], fields["out.scales"] = values, scales
    return values, scales
