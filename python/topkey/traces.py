# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Traces: one call in a .safetensors file, read and written by the code of the command line, byte for byte.

docs/formats.md has the names. A bug report is a trace: `save_trace("bug.safetensors", trace_of("mqa_topk", q=q, ...))`;
`topkey check bug.safetensors` then compares every backend.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from . import _native, operations
from .calls import Answer, Fields, Question
from .frameworks import framework, numpy_dtype
from .types import DEFAULT_EXEC, Array, Exec

_NAMES = {
    "F64": "float64", "I64": "int64", "U64": "uint64", "C64": "complex64", "F32": "float32", "I32": "int32",
    "U32": "uint32", "F16": "float16", "BF16": "bfloat16", "I16": "int16", "U16": "uint16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "U8": "uint8", "I8": "int8",
    "BOOL": "bool",
}  # fmt: skip
_CODES = {name: code for code, name in _NAMES.items()}
_SHORT = {"bfloat16": "bf16", "float8_e4m3fn": "f8_e4m3fn", "float8_e8m0fnu": "e8m0"}


class Packed(NamedTuple):
    """A tensor of a dtype that numpy lacks (4 and 6 bits): its safetensors name, shape and bytes, kept as they are."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Trace(NamedTuple):
    """Named tensors (numpy; `load_trace`'s are writable copies of the file) and metadata strings."""

    tensors: dict[str, Array]
    metadata: dict[str, str]


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace. bfloat16 and float8 tensors are ml_dtypes'. ValueError: no such file, or not a trace."""
    tensors, metadata = _native.read_trace(_path("load_trace", path))
    return Trace({name: _to_array(*parts) for name, parts in tensors.items()}, metadata)


def save_trace(path: str | os.PathLike[str], trace: Trace) -> None:
    """Writes a trace, whole or not at all: the same trace gives the same bytes, here and from the command line."""
    for name, value in trace.metadata.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ValueError(f"save_trace: metadata must be strings, got {name!r}: {value!r}")
    tensors = {_name(name): _to_parts(name, array) for name, array in trace.tensors.items()}
    _native.write_trace(_path("save_trace", path), tensors, dict(trace.metadata))


def trace_of(op: str, /, **arguments: Any) -> Trace:
    """A call of `op` as a trace: its inputs and numbers, and which outputs it was asked for. It is not run.

    Arguments are the operation's own. ValueError: as for the call; arrays must be on the CPU.
    """

    def ask(name: str, fields: Fields, exec: Exec) -> Trace:
        tensors, metadata = _native.trace_of(name, fields)
        return Trace({name: _to_array(*parts) for name, parts in tensors.items()}, metadata)

    exec = arguments.pop("exec", DEFAULT_EXEC)
    try:
        operations.by_name(op)(**arguments, exec=Question(ask, exec, allocates=True))
    except Answer as answer:
        return answer.value
    raise AssertionError("an operation must end in calls.finish")


def _path(op: str, path: str | os.PathLike[str]) -> str:
    name = os.fspath(path)
    if "\0" in name:
        raise ValueError(f"{op}: path must be without NUL, got {name!r}")
    return name


def _name(name: Any) -> str:
    if not isinstance(name, str) or name == "__metadata__":  # what the format calls the metadata
        raise ValueError(f"save_trace: a tensor's name must be a string other than __metadata__, got {name!r}")
    return name


def _to_array(dtype: str, shape: tuple[int, ...], data: bytearray) -> Array:
    import numpy as np

    name = _NAMES.get(dtype)
    if name is None:
        return Packed(dtype, shape, bytes(data))
    if name == "float8_e5m2":
        import ml_dtypes

        return np.frombuffer(data, ml_dtypes.float8_e5m2).reshape(shape)
    return np.frombuffer(data, numpy_dtype(_SHORT[name]) if name in _SHORT else np.dtype(name)).reshape(shape)


def _to_parts(name: str, array: Array) -> tuple[str, list[int], bytes]:
    if isinstance(array, Packed):
        return array.dtype, list(array.shape), array.data
    if framework(array) == "torch":
        import torch

        code, shape = _CODES.get(str(array.dtype).removeprefix("torch.")), list(array.shape)
        data = array.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if code else b""
    else:
        import numpy as np

        array = np.asarray(array)
        array = array.astype(array.dtype.newbyteorder("="), copy=False)  # the file is little-endian, as the machine
        code, shape, data = _CODES.get(array.dtype.name), list(array.shape), array.tobytes()
    if code is None:
        raise ValueError(f"save_trace: tensor {name!r} must be of a dtype that safetensors has, got {array.dtype}")
    return code, shape, data
