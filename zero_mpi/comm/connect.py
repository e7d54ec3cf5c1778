"""The transport for a script or notebook of one's own, with and without mpirun."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from threadpoolctl import threadpool_limits

from zero_mpi import environment
from zero_mpi.comm.base import Comm
from zero_mpi.comm.serial import SerialComm
from zero_mpi.errors import UsageError


def connect() -> Comm:
    """Messages between the ranks that a launcher has started; a `SerialComm` for a process by itself.

    So the same lines run under mpirun, as plain Python, in a notebook, and where no MPI is installed. It
    starts MPI where there is one. A rank computes with one BLAS thread unless the environment says
    otherwise, also where numpy was imported before zero_mpi. From now on an exception that nobody catches
    ends all ranks, since the others would wait for this one for ever. Raises UsageError if a launcher has
    started this process and there is no MPI.
    """
    if not environment.threads_were_set:
        threadpool_limits(1)
    try:
        from zero_mpi.comm.mpi import MPIComm  # isort: skip  (first: it sets how mpi4py starts MPI)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if environment.under_launcher():
            raise UsageError(
                "started by an MPI launcher, but no MPI library can be loaded; install one: "
                "pip install 'zero-mpi[mpich]'"
            ) from error
        return SerialComm()
    if MPI.COMM_WORLD.Get_size() == 1:
        return SerialComm()
    if not isinstance(sys.excepthook, Ending):
        sys.excepthook = Ending(MPI.COMM_WORLD)
    return MPIComm()


class Ending:
    """What is called with an exception that nobody caught: says it as before, and ends all ranks."""

    def __init__(self, world: Any) -> None:
        self._world, self._before = world, sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)
        rank, size = self._world.Get_rank(), self._world.Get_size()
        print(f"zero_mpi: rank {rank} of {size} failed with the error above; ending the job", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        self._world.Abort(1)
