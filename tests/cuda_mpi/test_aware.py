"""Each collective on device memory by a CUDA-aware MPI is bit-identical to the collective on the host.

The tests send one message or chunks, from the main or a separate thread, with ragged and empty slices and
ranks without data. The memory belongs to a driver, so a process that dereferences its address crashes.
"""

import functools

import numpy as np
import pytest
from collectives import LENGTHS, OfDevices, poll, wild
from driver_array import DriverSide

from zero_mpi.comm import Partition
from zero_mpi.comm.gpu import select as device_detect
from zero_mpi.comm.gpu.backends import CudaAwareBackend
from zero_mpi.comm.gpu.comm import DeviceComm
from zero_mpi.comm.kinds import TRANSFERS
from zero_mpi.comm.mpi import MPIComm
from zero_mpi.comm.transfer import MPI

LONG = [*LENGTHS, (100_001, 1024)]  # with SMALL, the last array takes several messages
SMALL = {"most_bytes": 40 << 10, "most_summed": 5 << 10}
SETTINGS = {"whole": {}, "pieces": SMALL, "thread": SMALL, "fast": {}, "fast pieces": SMALL}
EXACT = [name for name in SETTINGS if not name.startswith("fast")]


@functools.cache
def streams():
    return DriverSide()


@pytest.fixture
def side():
    return streams()


@functools.cache
def communicator(name):
    inner = MPIComm(exact=not name.startswith("fast"), threaded=name == "thread")
    backend = CudaAwareBackend(streams())
    vars(backend).update(SETTINGS[name])
    return DeviceComm(inner, backend, streams(), name)


@pytest.fixture(scope="module", autouse=True)
def threads_end():
    yield
    if communicator.cache_info().currsize:
        communicator("thread")._inner._progress.close()


@pytest.fixture(params=SETTINGS)
def comm(request):
    return communicator(request.param)


@pytest.fixture(params=EXACT)
def exact(request):
    return communicator(request.param)


@pytest.fixture(params=["fast", "fast pieces"])
def fast(request):
    return communicator(request.param)


def same_bits(array, expected):
    actual = streams().download(array)
    assert actual.dtype == expected.dtype
    assert actual.tobytes() == expected.tobytes()


def test_the_library_says_that_it_takes_device_memory_and_it_is_true():
    world = MPI.COMM_WORLD
    answer = device_detect.find_answer(world, {})
    assert answer.yes, answer
    assert answer.reason.startswith("MPIX_Query_cuda_support says 1, and a message from device to device ")
    assert set(world.allgather(answer)) == {answer}
    refused = device_detect.find_answer(world, {device_detect.FORCED: "0"})
    assert (refused.yes, refused.reason) == (False, "ZERO_MPI_GPU_AWARE=0")


class TestCollectives(OfDevices):
    lengths = LONG


def test_many_at_once_beside_vectors_of_the_host(comm):
    """Gathers run while ranks sum a vector, as in a step; the second step allocates no memory."""

    def step():
        handles, checks = [], []
        for number in range(2 * TRANSFERS):
            partition, values = Partition(9000 + number, comm.size), wild(number, 9000 + number)
            part = partition.part(comm.rank)
            full, shard = fulls[number][: values.size], shards[number][: part.stop - part.start]
            streams().write(shard, values[part])
            handles.append(comm.allgather(shard, full, partition))
            checks.append(functools.partial(same_bits, full, values))
        assert (comm.sum_vector(np.ones(3)) == comm.size).all()
        for handle in handles[::-1]:
            handle.wait()
        for check in checks:
            check()

    fulls = [streams().empty(9100, np.float32) for _ in range(2 * TRANSFERS)]
    shards = [streams().empty(9100, np.float32) for _ in range(2 * TRANSFERS)]
    step()
    count = streams().taken
    step()
    assert streams().taken == count


def test_a_thread_alone_brings_it_to_the_end():
    comm = communicator("thread")
    partition, values = Partition(30_000, comm.size), wild(7, 30_000)
    full = streams().upload(np.zeros_like(values))
    handle = comm.allgather(streams().upload(values[partition.part(comm.rank)]), full, partition)
    poll(lambda: not comm._inner._progress._active)
    handle.wait()
    same_bits(full, values)
