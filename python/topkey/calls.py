# SPDX-License-Identifier: Apache-2.0 OR MIT
"""How an operation ends: its arguments are a dict of named fields (docs/formats.md has the names), and `finish` runs it.

A question about a call (how much workspace, why not, as a trace) is asked by handing the operation an `Exec` that is a
`Question`: the operation forms the same call, and `finish` answers instead of running.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from operator import index
from typing import Any, NamedTuple, TypeVar, cast

from . import _native
from .frameworks import empty
from .types import DEFAULT_EXEC, Array, Exec, KeyCache, Norm, Out, Rope, Shard, SlotMap

Fields = dict[str, Any]


class Question(NamedTuple):
    """Takes the place of `exec`."""

    ask: Callable[[str, Fields, Exec], Any]
    exec: Exec = DEFAULT_EXEC
    allocates: bool = False  # outputs are real arrays; else only their shapes and dtypes


class Answer(Exception):
    """Carries the answer out of the operation."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


_F = TypeVar("_F", bound=Callable[..., Any])


def operation(function: _F) -> _F:
    """An argument of another kind is a wrong argument like any other: ValueError. TypeError is left for keywords."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            entered = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            if not entered:  # the call itself does not fit the signature
                raise
            raise ValueError(
                f"{function.__name__}: each argument must be of the kind that its signature says, got another: {error}"
            ) from error

    return cast(_F, call)


class Placeholder(NamedTuple):
    """An output of a question: no memory."""

    shape: tuple[int, ...]
    dtype: str


def finish(op: str, fields: Fields, exec: Exec | Question) -> None:
    """Runs the call, or answers the question."""
    if isinstance(exec, Question):
        raise Answer(exec.ask(op, fields, exec.exec))
    _native.run(op, fields, exec)


_FULL_NAMES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8_e4m3fn": "float8_e4m3fn",
    "e8m0": "float8_e8m0fnu",
    "u8": "uint8",
    "i32": "int32",
    "i64": "int64",
}


def _extent_or_0(number: Any) -> int:
    try:
        number = index(number)
    except TypeError:
        return 0
    return number if 0 <= number < 2**31 else 0


def make(like: Array, shape: Sequence[int], dtype: str, exec: Exec | Question) -> Array:
    """An output of `like`'s framework; for a question only its shape. An extent that is none counts as 0: the library, which
    is given the same number, then says what is wrong with it."""
    shape = tuple(map(_extent_or_0, shape))
    if isinstance(exec, Question) and not exec.allocates:
        return Placeholder(shape, _FULL_NAMES[dtype])
    return empty(like, shape, dtype)


def extents(array: Any) -> tuple[int, ...]:
    """Shape of an array; of what is none: (). The library then says what is wrong with it."""
    shape = getattr(array, "shape", ())
    return tuple(shape) if hasattr(shape, "__len__") else ()


def extent(array: Array, dim: int) -> int:
    """Extent of a dimension, 0 where it has none."""
    shape = extents(array)
    return int(shape[dim]) if len(shape) > dim else 0


def wanted(op: str, out: Out, known: Sequence[str]) -> Mapping[str, Array | None]:
    """`out` by name; None stands for an array to be made."""
    if isinstance(out, str):
        out = (out,)
    try:
        named: Mapping[str, Array | None] = out if isinstance(out, Mapping) else dict.fromkeys(out)  # type: ignore[arg-type]
    except TypeError:
        got = "None" if out is None else type(out).__name__
        raise ValueError(f"{op}: out must be of {', '.join(known)}, got {got}") from None
    for name in named:
        if name not in known:
            raise ValueError(f"{op}: out must be of {', '.join(known)}, got {name!r}")
    return named


# ---- options that are tuples, as fields ----
def check_kind(op: str, name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{op}: {name} must be a {kind.__name__}, got {type(value).__name__}")


def cache_fields(op: str, fields: Fields, cache: KeyCache) -> None:
    check_kind(op, "cache", cache, KeyCache)
    fields["cache"], fields["page_size"], fields["head_dim"], fields["format"], fields["layout"] = cache


def shard_fields(op: str, fields: Fields, shard: Shard | None) -> None:
    if shard is None:
        return
    check_kind(op, "shard", shard, Shard)
    fields["shard.rank"], fields["shard.world_size"], fields["shard.interleave"] = shard


def slot_map_fields(op: str, fields: Fields, slot_map: SlotMap | None) -> None:
    if slot_map is None:
        return
    check_kind(op, "slot_map", slot_map, SlotMap)
    (fields["slot_map.block_table"], fields["slot_map.page_size"], fields["slot_map.table_per_row"]) = slot_map


def norm_fields(op: str, fields: Fields, norm: Norm | None) -> None:
    if norm is None:
        return
    check_kind(op, "norm", norm, Norm)
    fields["norm.kind"], fields["norm.weight"], fields["norm.bias"], fields["norm.eps"] = norm


def rope_fields(op: str, fields: Fields, rope: Rope | None) -> None:
    if rope is None:
        return
    check_kind(op, "rope", rope, Rope)
    if rope.style not in ("half_split", "interleaved"):
        raise ValueError(f"{op}: rope.style must be half_split or interleaved, got {rope.style!r}")
    if rope.where not in ("leading", "trailing"):
        raise ValueError(f"{op}: rope.where must be leading or trailing, got {rope.where!r}")
    fields["positions"], fields["rope.cos_sin"], fields["rope.dim"] = rope.positions, rope.cos_sin, rope.dim
    fields["rope.interleaved"] = rope.style == "interleaved"
    fields["rope.trailing"] = rope.where == "trailing"
