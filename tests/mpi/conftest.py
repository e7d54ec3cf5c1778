"""Communicators for the tests under MPI: made once, because each duplicates communicators of the library."""

import pytest

from zero_mpi import MPIComm
from zero_mpi.comm.shared.comm import SharedComm


@pytest.fixture(scope="session")
def mpi():
    """All ranks, exact reduction by messages."""
    return MPIComm()


@pytest.fixture(scope="session")
def shared():
    """All ranks, memory that they share."""
    return SharedComm()


@pytest.fixture(scope="session", params=["mpi", "shared"])
def exact(request):
    """All ranks, exact reduction, over each transport."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def pieces():
    """All ranks, exact reduction cut into many small pieces, pushed by a thread."""
    return MPIComm(exact_piece=700, most=5000, threaded=True)


@pytest.fixture(scope="session")
def fast():
    """All ranks, the library's reductions."""
    return MPIComm(exact=False, fast_piece=3000)
