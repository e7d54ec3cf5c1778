"""Collectives on device memory are bit-identical to those on the host, over every transport.

The simulated CuPy delays copies and kernels to reveal missing waits. Its device memory is host memory, which
any MPI accepts. Tests also check that later transfers reuse buffers and pinned memory, and that several
chunks are in flight.
"""

import functools
import threading
from collections import Counter
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from collectives import KINDS, OfDevices, on_host, poll, reduced, wild

from zero_mpi import device, ops
from zero_mpi.comm import Partition, SerialComm
from zero_mpi.comm.gpu.backends import CudaAwareBackend, NcclBackend, StagedBackend
from zero_mpi.comm.gpu.comm import DeviceComm
from zero_mpi.comm.gpu.exchanges import GpuStreams
from zero_mpi.comm.kinds import TRANSFERS
from zero_mpi.comm.mpi import MPIComm
from zero_mpi.comm.transfer import MPI
from zero_mpi.device.ordered_sum import ordered_sum
from zero_mpi.errors import UsageError

RANKS = MPI.COMM_WORLD.Get_size()
BF16 = np.dtype(ml_dtypes.bfloat16)
SMALL = {"most_bytes": 40, "most_summed": 7}
PIECES = {"chunk_bytes": 40}
WIRES = {
    "mpi": (CudaAwareBackend, {}),
    "mpi pieces": (CudaAwareBackend, SMALL),
    "mpi thread": (CudaAwareBackend, SMALL),
    "mpi fast": (CudaAwareBackend, {}),
    "staged": (StagedBackend, {}),
    "staged pieces": (StagedBackend, PIECES),
    "staged thread": (StagedBackend, PIECES),
    "nccl": (NcclBackend, {"most_summed": 7}),
    "nccl fast": (NcclBackend, {}),
}
NAMES = list(WIRES) if RANKS > 1 else ["serial", "mpi", "staged pieces", "nccl"]
EXACT = [name for name in NAMES if not name.endswith("fast")]
FAST = [name for name in NAMES if name.endswith("fast")]

several_ranks = pytest.mark.world(2, 3)  # a single rank sends nothing


@functools.cache
def communicator(name):
    if name == "serial":
        return SerialComm()
    backend, options = WIRES[name]
    streams = GpuStreams(device.in_use())
    inner = MPIComm(exact=not name.endswith("fast"), threaded=name.endswith("thread"))
    instance = backend(streams, inner) if backend is NcclBackend else backend(streams)
    vars(instance).update(options)
    return DeviceComm(inner, instance, streams, name)


@pytest.fixture(scope="module", autouse=True)
def threads_end():
    yield
    for name in NAMES:
        if name.endswith("thread"):
            communicator(name)._inner._progress.close()


@pytest.fixture(autouse=True)
def gpu(the_gpu, monkeypatch):
    monkeypatch.setenv("PRETEND_CUPY_DELAY", "0.0005")
    device.adopt(the_gpu)
    yield the_gpu
    the_gpu.synchronize()


@pytest.fixture(params=NAMES)
def comm(request, gpu):
    return communicator(request.param)


@pytest.fixture(params=EXACT)
def exact(request, gpu):
    return communicator(request.param)


@pytest.fixture(params=FAST)
def fast(request, gpu):
    return communicator(request.param)


@pytest.fixture
def side():
    return SimpleNamespace(upload=on_device, download=host)


def on_device(values):
    array = device.in_use().empty(values.size, values.dtype)
    array.set(values, stream=device.in_use().stream)
    return array


def host(array):
    return device.in_use().to_host(array)


def same_bits(array, expected):
    actual = host(array)
    assert actual.dtype == expected.dtype
    assert actual.tobytes() == expected.tobytes()


class TestCollectives(OfDevices):
    pass


def test_arrays_of_the_host_go_as_ever(comm):
    values = np.arange(10.0)
    vector = np.where(np.arange(10) % comm.size == comm.rank, values, 0)
    assert (comm.sum_vector(vector) == values).all()
    text = np.frombuffer(b"corpus" if comm.rank == 0 else b"------", np.uint8).copy()
    comm.broadcast(text, label="corpus").wait()
    assert text.tobytes() == b"corpus"
    assert comm.allgather_object(comm.rank) == list(range(comm.size))
    other = comm.background()
    assert other.allgather_object(comm.rank) == list(range(comm.size))
    assert other.rank == comm.rank
    if other is not comm:
        other.close()


def is_pretend():
    return hasattr(device.in_use().stream, "do")


only_pretend = "work of a real GPU cannot be delayed: only the simulated GPU tests this"


def hold(stream, seconds=None):
    """Delay the next work of a simulated stream for `seconds`, or until the returned event is set."""
    gate = threading.Event()
    stream.do(gate.wait)
    if seconds is not None:
        threading.Timer(seconds, gate.set).start()
    return gate


def test_kernels_and_rooms_are_of_the_stream_that_computes(gpu):
    """Kernels ignore CuPy's current stream; the side stream uses a buffer after the computing stream."""
    if not is_pretend():
        pytest.skip(only_pretend)
    streams, other, x = GpuStreams(gpu), gpu.cupy.cuda.Stream(), gpu.zeros(64)
    out = gpu.zeros(64)
    ops.prepare()
    gpu.synchronize()
    with other:
        ops.scale(x, 2.0)
        ordered_sum(out, [x, x], False)
        gate = hold(gpu.stream)
        buffer = streams.empty(16, np.float32)
    waits = not streams.stream.done
    gate.set()
    assert waits
    assert other._asked == 0
    assert buffer.data.mem._stream is gpu.stream


@several_ranks
def test_a_transfer_begins_after_what_was_computed(exact, gpu):
    values = wild(7, 101)
    parts, partition = [wild(rank, 101) for rank in range(exact.size)], Partition(101, exact.size)
    part = partition.part(exact.rank)
    shard, out = (gpu.zeros(part.stop - part.start) for _ in range(2))
    full, summand, sent = (gpu.zeros(101) for _ in range(3))
    gpu.synchronize()
    if is_pretend():
        hold(gpu.stream, 0.05)
    shard.set(values[part], stream=gpu.stream)
    summand.set(parts[exact.rank], stream=gpu.stream)
    if exact.rank == 0:
        sent.set(values, stream=gpu.stream)
    started = [
        exact.allgather(shard, full, partition),
        exact.reduce_scatter(summand, out, partition),
        exact.broadcast(sent, 0),
    ]
    for handle in started:
        handle.wait()
    same_bits(full, values)
    same_bits(out, functools.reduce(np.add, parts)[part])
    same_bits(sent, values)


@several_ranks
def test_computing_comes_after_the_last_copy(exact, gpu):
    """`wait` makes the next kernel wait for the copy; the host itself waits only in NCCL's transfers."""
    if not is_pretend():
        pytest.skip(only_pretend)
    partition, values = Partition(2 * exact.size, exact.size), wild(7, 2 * exact.size)
    full, shard = gpu.zeros(values.size), on_device(values[partition.part(exact.rank)])
    gpu.synchronize()
    gate = hold(exact.streams.stream)
    handle = exact.allgather(shard, full, partition)
    assert not handle.test()
    if not exact.backend.in_order:
        handle.wait()
    threading.Timer(0.02, gate.set).start()
    handle.wait()
    same_bits(full, values)


@several_ranks
def test_sums_are_sent_on_when_they_are_done(exact, gpu, monkeypatch):
    """An allreduce sends its sums on only after the last addition."""
    real = exact.streams.add

    def late(*arguments):
        if is_pretend():
            hold(exact.streams.stream, 0.02)
        real(*arguments)

    monkeypatch.setattr(exact.streams, "add", late)
    array = on_device(wild(exact.rank, 9))
    exact.allreduce(array).wait()
    same_bits(array, functools.reduce(np.add, [wild(rank, 9) for rank in range(exact.size)]))


def start_many(comm, count):
    handles, checks = [], []
    for number in range(count):
        partition, values = Partition(60 + number, comm.size), wild(number, 60 + number)
        full = device.in_use().zeros(values.size)
        handles.append(
            comm.allgather(on_device(values[partition.part(comm.rank)]), full, partition, f"{number}")
        )
        checks.append(functools.partial(same_bits, full, values))
        handle, _, out = reduced(comm, partition, comm.size, number % 2 == 1, KINDS[number % 3], on_device)
        other, _, expected = reduced(
            on_host(), partition, comm.size, number % 2 == 1, KINDS[number % 3], np.copy
        )
        other.wait()
        handles.append(handle)
        checks.append(functools.partial(same_bits, out, expected))
    return handles, checks


@pytest.mark.parametrize("backwards", [False, True], ids=["in order", "backwards"])
def test_more_transfers_than_may_be_under_way(exact, backwards):
    handles, checks = start_many(exact, 2 * TRANSFERS)
    for handle in handles[::-1] if backwards else handles:
        handle.wait()
    for check in checks:
        check()
    assert all(handle.test() for handle in handles)


@several_ranks
@pytest.mark.parametrize("name", EXACT)
def test_the_runtime_pushes_transfers_to_the_end(name, gpu):
    """Without a progress thread, calls of `progress` advance the transfers; a thread needs no calls."""
    comm = communicator(name)
    handles, checks = start_many(comm, 3)

    def all_done():
        if not name.endswith("thread"):
            comm.progress()
        return not comm._inner._progress._active

    poll(all_done)
    for handle in handles:
        handle.wait()
    for check in checks:
        check()


@several_ranks
@pytest.mark.parametrize("name", ["mpi pieces", "staged pieces", "staged thread", "nccl"])
def test_nothing_is_allocated_after_the_first_transfers(name, gpu, monkeypatch):
    comm, counts = communicator(name), Counter()
    for kind, method in ((GpuStreams, "empty"), (type(gpu), "pinned")):
        real = getattr(kind, method)

        def counted(self, *arguments, real=real, method=method):
            counts[method] += 1
            return real(self, *arguments)

        monkeypatch.setattr(kind, method, counted)
    partition = Partition(101, comm.size)
    full, out = on_device(wild(comm.rank, 101, BF16)), gpu.zeros(partition.counts[comm.rank])
    shard, values = gpu.zeros(out.size), gpu.zeros(101)

    def transfers():
        handles = [
            comm.reduce_scatter(full, out, partition, accumulate=True),
            comm.allgather(shard, values, partition),
            comm.broadcast(values, 0),
        ]
        for handle in handles:
            handle.wait()
        gpu.synchronize()

    transfers()
    transfers()
    before, nbytes = Counter(counts), gpu.cupy.get_default_memory_pool().used_bytes()
    for _ in range(5):
        transfers()
    assert counts == before
    assert gpu.cupy.get_default_memory_pool().used_bytes() == nbytes


@several_ranks
@pytest.mark.parametrize("name", ["mpi pieces", "staged pieces", "staged thread"])
def test_exchanges_are_under_way_at_once(name, gpu, monkeypatch):
    comm = communicator(name)
    backend, under_way, most, total = comm.backend, Counter(), Counter(), Counter()
    real = backend._one

    def counted(*arguments):
        under_way["exchanges"] += 1
        total["exchanges"] += 1
        most["exchanges"] = max(most["exchanges"], under_way["exchanges"])
        yield from real(*arguments)
        under_way["exchanges"] -= 1

    monkeypatch.setattr(backend, "_one", counted)
    partition = Partition(101 * comm.size, comm.size)
    handle, _, out = reduced(comm, partition, comm.size, False, KINDS[0], on_device)
    handle.wait()
    expected = functools.reduce(np.add, [wild(rank, partition.length) for rank in range(comm.size)])
    same_bits(out, expected[partition.part(comm.rank)])
    assert most["exchanges"] == backend.depth > 1
    assert total["exchanges"] == -(-101 // backend.largest(4, summed=True))
    assert under_way["exchanges"] == 0


@several_ranks
def test_slices_of_nodes_are_for_one_node(gpu, monkeypatch):
    comm = communicator("staged")
    assert comm.shard_group() is comm
    monkeypatch.setenv("ZERO_MPI_RANKS_PER_NODE", "1")
    with pytest.raises(UsageError, match="--strategy hybrid-shard: with --device cuda"):
        comm.shard_group()


@pytest.fixture
def fault(gpu):
    if not hasattr(gpu.cupy.cuda, "fault"):
        pytest.skip("a real GPU cannot be made to fail")
    yield gpu.cupy.cuda.fault
    gpu.cupy.cuda.fault.status = 0


@several_ranks
def test_a_gpu_that_fails_ends_the_wait_and_no_thread(exact, gpu, fault):
    """After errors such as `cudaErrorIllegalAddress` no event completes any more."""
    partition, values = Partition(40, exact.size), wild(7, 40, np.float32)
    piece = values[partition.part(exact.rank)]
    fault.status = 700
    with pytest.raises(gpu.cupy.cuda.runtime.CUDARuntimeError, match="700"):
        exact.allgather(on_device(piece), on_device(values), partition, "test").wait()
    fault.status = 0  # so that the calls of all threads succeed again
    full = on_device(np.full(40, 77, np.float32))
    handle = exact.allgather(on_device(piece), full, partition, "test")
    poll(handle.test)
    handle.wait()
    same_bits(full, values)
