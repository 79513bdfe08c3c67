# SPDX-License-Identifier: Apache-2.0 OR MIT
"""One rank of a run over MPI from Python, started by python.sh: the layers under every cut against one rank with all keys,
over all processes; the same over a communicator of an MPI that was started elsewhere; a rank that raises."""

import ctypes
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import numpy as np
import topkey
from test_ranks import CUTS, World

EXEC = topkey.Exec(threads=1)


def equal(group, prefill):
    for pool_size in (0, 4):
        for cut in CUTS:
            groups = iter([[group] * group.size, [prefill] * group.size])
            world = World(7, pool_size, cut, group.size, 4, lambda size, groups=groups: next(groups))
            for step in range(3):
                rows = world.rows(2 if step else 30, 13)
                decode_rows = sum(b == 0 for b, _ in rows) if step else 0
                want = world.one(rows, decode_rows, EXEC)
                answers, own = world.rank(group.rank, rows, decode_rows, EXEC)
                for at, row in enumerate(own):
                    assert answers[at] == (want[row] if row >= 0 else [-1] * len(answers[at])), (pool_size, cut, step)
    assert group.received_bytes > 0 and prefill.received_bytes > 0


def handle():
    """An engine has started MPI: its communicator comes as the address of its handle (Open MPI's is a pointer)."""
    mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
    assert mpi.MPI_Init(None, None) == 0
    world = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world")))
    both = [topkey.mpi_communicator(ctypes.addressof(world), 30) for _ in range(2)]
    equal(*both)
    both.clear()
    assert mpi.MPI_Finalize() == 0


def raises(group):
    """Rank 1's step is refused; the others are told why."""
    world = World(7, 0, "context", group.size, 1, lambda size: [group] * size)
    rows = world.rows(9, 9)
    exec = EXEC._replace(backend="abacus") if group.rank == 1 else EXEC
    try:
        world.rank(group.rank, rows, 0, exec)
    except RuntimeError as error:
        told = "abacus" in str(error) and ("rank 1 failed" in str(error)) == (group.rank != 1)
        assert told, error
    else:
        raise AssertionError("answered")


def main(scene):
    if scene == "handle":
        return handle()
    group, prefill = topkey.mpi_communicator(), topkey.mpi_communicator()
    assert 0 <= group.rank < group.size
    return raises(group) if scene == "raises" else equal(group, prefill)


np.seterr(all="ignore")
main(sys.argv[1])
