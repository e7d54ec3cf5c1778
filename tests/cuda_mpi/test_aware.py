"""Device memory through a CUDA-aware MPI: each collective of the runtime has the bits of the host's.

In one message and in pieces, by the main thread and by one of its own, for ragged and empty slices and ranks
that give nothing. The memory is a driver's: whoever reads or writes it by its address dies.
"""

import functools
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from collectives import LENGTHS, near, poll, reduced, wild
from driver_array import DriverSide

from zero_mpi.comm import Partition
from zero_mpi.comm.gpu import detect as device_detect
from zero_mpi.comm.gpu.backends import CudaAwareBackend
from zero_mpi.comm.gpu.comm import DeviceComm
from zero_mpi.comm.kinds import TRANSFERS
from zero_mpi.comm.mpi import MPIComm
from zero_mpi.comm.transfer import MPI

KINDS = [np.dtype(kind) for kind in (np.float32, ml_dtypes.bfloat16, np.float16)]
LONG = [*LENGTHS, (100_001, 1024)]  # longer than what libraries send at once
SMALL = {"most_bytes": 40 << 10, "summed": 5 << 10}
SETTINGS = {"whole": {}, "pieces": SMALL, "thread": SMALL, "fast": {}, "fast pieces": SMALL}
EXACT = [name for name in SETTINGS if not name.startswith("fast")]


@functools.cache
def streams():
    return DriverSide()


@functools.cache
def communicator(name):
    inner = MPIComm(exact=not name.startswith("fast"), threaded=name == "thread")
    return DeviceComm(inner, CudaAwareBackend(streams(), **SETTINGS[name]), streams(), name)


@functools.cache
def on_host():
    return MPIComm(threaded=False)


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


def same_bits(array, expected):
    found = streams().download(array)
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()


def test_the_host_cannot_touch_this_memory():
    """Otherwise these tests would show nothing."""
    code = (
        "import ctypes, numpy as np; from zero_mpi.comm.gpu.probe import Driver; driver = Driver(); "
        "driver.open(); ctypes.string_at(driver.upload(np.ones(9, np.uint8)).address, 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode == -11, done.stderr


def test_the_library_says_that_it_takes_device_memory_and_it_is_true():
    world = MPI.COMM_WORLD
    answer = device_detect.find_answer(world, {})
    assert answer.yes, answer
    assert answer.why.startswith("MPIX_Query_cuda_support says 1, and a message from device to device memory")
    assert set(world.allgather(answer)) == {answer}
    refused = device_detect.find_answer(world, {device_detect.FORCED: "0"})
    assert (refused.yes, refused.why) == (False, "ZERO_MPI_GPU_AWARE=0")


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("in_place", [False, True], ids=["slice", "in place"])
def test_allgather(comm, kind, in_place):
    for length, quantum in LONG:
        partition, whole = Partition(length, comm.size, quantum), wild(7, length, kind)
        part = partition.part(comm.rank)
        before = np.full(length, 77, kind)
        if in_place:
            before[part] = whole[part]
        full, shard = streams().upload(before), streams().upload(whole[part])
        comm.allgather(None if in_place else shard, full, partition, "test").wait()
        same_bits(full, whole)
        same_bits(shard, whole[part])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_broadcast_from_each_root(comm, kind):
    for root in range(comm.size):
        whole = wild(root, 30_000, kind)
        array = streams().upload(whole if comm.rank == root else np.zeros_like(whole))
        comm.broadcast(array, root, "test").wait()
        same_bits(array, whole)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("accumulate", [False, True], ids=["set", "add"])
def test_exact_reduction_has_the_bits_of_the_host(exact, kind, accumulate):
    for length, quantum in LONG:
        partition = Partition(length, exact.size, quantum)
        for contributors in range(exact.size + 1):
            handle, full, out = reduced(exact, partition, contributors, accumulate, kind, streams().upload)
            other, given, expected = reduced(on_host(), partition, contributors, accumulate, kind, np.copy)
            other.wait()
            handle.wait()
            same_bits(out, expected)
            same_bits(full, given)


@pytest.mark.parametrize("name", ["fast", "fast pieces"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["set", "add"])
def test_the_librarys_reduction(name, accumulate):
    comm = communicator(name)
    for length, quantum in LONG:
        partition = Partition(length, comm.size, quantum)
        part = partition.part(comm.rank)
        for contributors in range(1, comm.size + 1):
            handle, _, out = reduced(comm, partition, contributors, accumulate, KINDS[0], streams().upload)
            handle.wait()
            parts = [wild(rank, length)[part] for rank in range(contributors)]
            assert near(streams().download(out), parts + ([wild(1000, length)[part]] if accumulate else []))


@pytest.mark.parametrize("length", [30_000, 101, 1, 0])
def test_allreduce(comm, length):
    array = streams().upload(wild(comm.rank, length))
    comm.allreduce(array, "test").wait()
    parts = [wild(rank, length) for rank in range(comm.size)]
    assert near(streams().download(array), parts)
    if comm.exact:
        same_bits(array, functools.reduce(np.add, parts))


def test_many_at_once_beside_vectors_of_the_host(comm):
    """Gathers and sums under way while ranks agree on numbers, as in a step; then nothing new is needed."""

    def step():
        handles, checks = [], []
        for number in range(2 * TRANSFERS):
            partition, whole = Partition(9000 + number, comm.size), wild(number, 9000 + number)
            part = partition.part(comm.rank)
            full, shard = fulls[number][: whole.size], shards[number][: part.stop - part.start]
            streams().write(shard, whole[part])
            handles.append(comm.allgather(shard, full, partition))
            checks.append(functools.partial(same_bits, full, whole))
        assert (comm.sum_vector(np.ones(3)) == comm.size).all()
        for handle in handles[::-1]:
            handle.wait()
        for check in checks:
            check()

    fulls = [streams().empty(9100, np.float32) for _ in range(2 * TRANSFERS)]
    shards = [streams().empty(9100, np.float32) for _ in range(2 * TRANSFERS)]
    step()
    taken = streams().taken
    step()
    assert streams().taken == taken


def test_a_thread_alone_brings_it_to_the_end():
    comm = communicator("thread")
    partition, whole = Partition(30_000, comm.size), wild(7, 30_000)
    full = streams().upload(np.zeros_like(whole))
    handle = comm.allgather(streams().upload(whole[partition.part(comm.rank)]), full, partition)
    poll(lambda: not comm._inner._progress._active)
    handle.wait()
    same_bits(full, whole)
