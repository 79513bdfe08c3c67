# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Communicators: what carries bytes between the ranks of a step. Threads of this process, a torch.distributed group, any
object with the methods of `Transport`; MPI and NCCL where the library was built with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import index
from typing import Any, Protocol

from . import _native
from .frameworks import framework

Communicator = _native.Communicator


class Transport(Protocol):
    """What communicator() makes a Communicator of. Memory is the host's and only for the time of the call; a `send` may
    be this rank's part of `receive`. An exception that a method raises is raised by the step, and the peers are told
    through `fail`, if there is one."""

    rank: int
    size: int

    def all_gather(self, send: memoryview, receive: memoryview) -> None:
        """`send`, as many bytes of each rank, rank after rank into `receive`."""

    def all_gatherv(self, send: memoryview, receive: memoryview, sizes: Sequence[int]) -> None:
        """The same with sizes[r] bytes of rank r, 0 too."""


class _TorchGroup:
    """A torch.distributed group: bytes on the CPU, or on the current GPU where its backend is NCCL."""

    def __init__(self, group: Any) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.group = torch, dist, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"

    def all_gather(self, send: memoryview, receive: memoryview) -> None:
        self.all_gatherv(send, receive, [len(send)] * self.size)

    def all_gatherv(self, send: memoryview, receive: memoryview, sizes: Sequence[int]) -> None:
        # Of one length: not every backend gathers others.
        most = max(sizes)
        if most == 0:
            return
        own = self.torch.frombuffer(bytearray(send) + bytes(most - len(send)), dtype=self.torch.uint8).to(self.device)
        parts = [self.torch.empty(most, dtype=self.torch.uint8, device=self.device) for _ in sizes]
        self.dist.all_gather(parts, own, group=self.group)
        first = 0
        for part, size in zip(parts, sizes, strict=True):
            receive[first : first + size] = part[:size].cpu().numpy().data
            first += size


def communicator(group: Any) -> Communicator:
    """The Communicator of a torch.distributed group or of a Transport. Every rank makes its own, once: it remembers what
    its ranks have agreed on. After a step that raised on any rank it is of no more use.

    rank, size: as the group says. received_bytes: of other ranks, so far.
    ValueError: no group.
    """
    if isinstance(group, Communicator):
        return group
    if framework(group) == "torch":
        group = _TorchGroup(group)
    try:
        rank, size = index(group.rank), index(group.size)
    except (AttributeError, TypeError):
        raise ValueError(
            "communicator: group must be a Communicator, a torch.distributed group, or have rank, size, all_gather and "
            f"all_gatherv, got {type(group).__name__}"
        ) from None
    return _native.communicator(group, rank, size)


@contextmanager
def telling(*groups: Any) -> Iterator[None]:
    """What is found wrong before the library has the step is told to the peers; they would wait."""
    try:
        yield
    except Exception as error:
        for group in groups:
            if hasattr(group, "fail"):
                with suppress(Exception):  # this rank has an error of its own to tell
                    group.fail(str(error))
        raise


def local_communicators(size: int, seconds: float = 0) -> list[Communicator]:
    """Ranks as threads of this process, a Communicator for each. A peer that does not come within `seconds` (0 = 60) is
    named in a RuntimeError."""
    return _native.local_communicators(size, seconds)


def _handle(op: str, comm: Any, what: str) -> int:
    try:
        address = index(comm)
    except TypeError:
        address = 0
    if not 0 < address < 1 << 64:
        raise ValueError(f"{op}: comm must be {what}, got {comm!r}")
    return address


def mpi_communicator(comm: Any = None, seconds: float = 0) -> Communicator:
    """Ranks that are processes of MPI; every rank of `comm` makes one. Memory of a GPU is copied to the host.

    comm: an mpi4py communicator, or the address of an MPI_Comm, of the MPI that the library was built with; None = all
    processes. It is duplicated. MPI is started where it is not yet, and then ended with the last Communicator. A peer that
    does not answer within `seconds` (0 = 60) is named in a RuntimeError.
    RuntimeError: the library was built without MPI (TOPKEY_MPI).
    """
    if comm is None:
        return _native.mpi_communicator(0, seconds)
    if type(comm).__module__.partition(".")[0] == "mpi4py":
        from mpi4py import MPI

        comm = MPI._addressof(comm)
    return _native.mpi_communicator(_handle("mpi_communicator", comm, "an mpi4py communicator or an address"), seconds)


def nccl_communicator(comm: int, seconds: float = 0) -> Communicator:
    """Ranks over NCCL, for steps on a GPU: bytes go from device memory to device memory on the stream of the step (Exec),
    nothing blocks, and from the second step on it may be captured in a graph.

    comm: an ncclComm_t as a number, which stays the caller's and must outlive this; of the NCCL that the library was built
    with. seconds (0 = 60): how long the first exchange waits for a peer; after a RuntimeError that says so the ncclComm_t
    has been aborted.
    RuntimeError: the library was built without NCCL (TOPKEY_NCCL), or comm is none of its.
    """
    return _native.nccl_communicator(_handle("nccl_communicator", comm, "an ncclComm_t as a number"), seconds)


def transport_unusable(transport: str) -> str | None:
    """Why this build has no "local", "mpi" or "nccl" communicators; None: it has."""
    return _native.transport_unusable(transport)
