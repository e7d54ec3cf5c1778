"""Communicators for the tests under MPI, created once because each one duplicates MPI communicators."""

import pytest
from transports import ON_ONE_NODE

from zero_mpi import MPIComm


@pytest.fixture(scope="session")
def made():
    return {name: make() for name, make in ON_ONE_NODE.items()}


@pytest.fixture(scope="session")
def mpi(made):
    return made["mpi"]


@pytest.fixture(scope="session")
def shared(made):
    return made["shared"]


@pytest.fixture(scope="session", params=ON_ONE_NODE)
def exact(request, made):
    return made[request.param]


@pytest.fixture(scope="session")
def fast():
    comm = MPIComm(exact=False)
    comm.fast_chunk = 3000
    return comm
