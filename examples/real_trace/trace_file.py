# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Reads and writes safetensors: an 8-byte little-endian length, a JSON header of that length, the tensors' bytes.

By hand, because it is short and because checking a trace should need numpy and ml_dtypes only.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray]

_DTYPES = {
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U8": np.dtype("u1"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write(path: Path, tensors: Tensors, metadata: dict[str, str]) -> None:
    """Writes a file whose bytes depend on the arguments only.

    Wide elements come first, so that every tensor is aligned to its elements.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.nbytes
        place = {"data_offsets": [offset, end]}
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)} | place
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format allows spaces at the end; the data then starts at a multiple of 8
    body = b"".join(np.ascontiguousarray(tensors[name]).tobytes() for name in order)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def read(path: Path) -> tuple[Tensors, dict[str, str]]:
    """Tensors (read-only views of the file's bytes) and metadata."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        data = np.frombuffer(raw[start + begin : start + end], _DTYPES[entry["dtype"]])
        tensors[name] = data.reshape(entry["shape"])
    return tensors, metadata
