# SPDX-License-Identifier: Apache-2.0 OR MIT
"""What differs between array frameworks: making arrays, the current stream. Each is imported only once it is in use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from .types import Array

_NUMPY_NAMES = {"f32": "float32", "f16": "float16", "u8": "uint8", "b8": "bool", "i32": "int32", "i64": "int64"}
_ML_NAMES = {"bf16": "bfloat16", "f8_e4m3fn": "float8_e4m3fn", "e8m0": "float8_e8m0fnu"}
_TORCH_NAMES = _NUMPY_NAMES | _ML_NAMES
_numpy_dtypes: dict[str, Any] = {}
_frameworks: dict[type, str] = {}


def framework(array: Array) -> str:
    """Top package of the array's type: "numpy", "torch", ..."""
    kind = type(array)
    found = _frameworks.get(kind)
    if found is None:
        tops = [one.__module__.partition(".")[0] for one in kind.__mro__]
        found = _frameworks[kind] = next((top for top in tops if top in ("numpy", "torch")), tops[0])
    return found


def numpy_dtype(name: str) -> Any:
    """numpy's dtype for TopKey's name; those that numpy lacks are ml_dtypes'."""
    found = _numpy_dtypes.get(name)
    if found is None:
        import numpy as np

        if name in _ML_NAMES:
            found = np.dtype(getattr(importlib.import_module("ml_dtypes"), _ML_NAMES[name]))
        else:
            found = np.dtype(_NUMPY_NAMES[name])
        _numpy_dtypes[name] = found
    return found


def empty(like: Array, shape: Sequence[int], dtype: str) -> Array:
    """An array of `like`'s framework and device, contents undefined. numpy for frameworks that TopKey does not know."""
    if framework(like) == "torch":
        torch = sys.modules["torch"]
        return torch.empty(tuple(shape), dtype=getattr(torch, _TORCH_NAMES[dtype]), device=like.device)
    import numpy as np

    return np.empty(shape, numpy_dtype(dtype))


def ends_of_causal_rows(like: Array, rows: int, keys: int) -> Array:
    """int32 [rows]: row m of the last `rows` of `keys` keys ends at keys - rows + m + 1."""
    first = keys - rows + 1
    if framework(like) == "torch":
        torch = sys.modules["torch"]
        return torch.arange(first, first + rows, dtype=torch.int32, device=like.device)
    import numpy as np

    return np.arange(first, first + rows, dtype=np.int32)


def clear_rows(array: Array, rows: int, stream: int | None) -> None:
    """Sets the first rows of a numpy or torch array to -1; on a GPU on `stream`, or the current one."""
    if rows == 0:
        return
    if framework(array) == "torch" and array.is_cuda and stream is not None:
        cuda = sys.modules["torch"].cuda
        with cuda.stream(cuda.ExternalStream(stream, device=array.device)):
            array[:rows] = -1
    else:
        array[:rows] = -1


def address(array: Array) -> int:
    """Where a numpy or torch array begins; 0 for others."""
    kind = framework(array)
    return int(array.data_ptr()) if kind == "torch" else int(array.ctypes.data) if kind == "numpy" else 0


def workspace(like: Array, size: int, stream: int | None) -> Array:
    """GPU memory for one call from the framework's own allocator, which frees in the order of the stream it is made for:
    `stream`, or the current one."""
    if framework(like) != "torch":
        raise ValueError("exec.workspace must be given for GPU arrays of this framework, got None")
    if stream is None:
        return empty(like, (size,), "u8")
    cuda = sys.modules["torch"].cuda
    with cuda.stream(cuda.ExternalStream(stream, device=like.device)):
        return empty(like, (size,), "u8")


def current_stream(like: Array, device_id: int) -> int | None:
    """cudaStream_t of the framework's current stream; None: the legacy default stream."""
    if framework(like) == "torch":
        return sys.modules["torch"].cuda.current_stream(device_id).cuda_stream
    return None
