# SPDX-License-Identifier: Apache-2.0 OR MIT
"""What this build can run on this machine."""

from __future__ import annotations

import sys
from typing import Any

from . import _native
from .types import Backend, Format


def backends() -> list[Backend]:
    """Every backend of this build, in the order in which they are chosen."""
    return [Backend._make(one) for one in _native.backends()]


def numerics_version(backend: str, format: Format) -> str:
    """ "fp8/cpu/1": changes exactly when score bits of that backend and format may change.

    ValueError: a backend or a pairing that this build does not have.
    """
    version = _native.numerics_version(backend, format)
    if version is None:
        raise ValueError(f"numerics_version: backend must be one of this build that has {format} keys, got {backend!r}")
    return version


def prepare(device: Any = None) -> None:
    """Loads every kernel of a device now, so that the very first call may be captured in a CUDA graph.

    device: "cpu", "cuda", "cuda:1", a torch.device, or the number of a GPU; None: torch's current GPU where torch is in
    use and has one, else the CPU. RuntimeError: a device without a usable backend.
    """
    if device is None:
        torch = sys.modules.get("torch")
        device = torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else "cpu"
    name, _, index = ("cuda", ":", str(device)) if isinstance(device, int) else str(device).partition(":")
    if name not in ("cpu", "cuda") or not (index == "" or index.isdecimal()):
        raise ValueError(f"prepare: device must be cpu, cuda or cuda:N, got {device!r}")
    _native.prepare(name, int(index or 0))
