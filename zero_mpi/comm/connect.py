"""The transport for a script or notebook of one's own, with and without mpirun."""

from __future__ import annotations

from threadpoolctl import threadpool_limits

from zero_mpi import environment
from zero_mpi.comm.base import Comm
from zero_mpi.comm.serial import SerialComm
from zero_mpi.errors import UsageError


def connect() -> Comm:
    """Messages between the ranks that a launcher has started; a `SerialComm` for a process by itself.

    So the same lines run under mpirun, as plain Python, in a notebook, and where no MPI is installed. It
    starts MPI where there is one. A rank computes with one BLAS thread unless the environment says
    otherwise, also where numpy was imported before zero_mpi. Raises UsageError if a launcher has started
    this process and there is no MPI.
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
    return MPIComm() if MPI.COMM_WORLD.Get_size() > 1 else SerialComm()
