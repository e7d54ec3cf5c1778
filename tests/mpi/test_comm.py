"""Every collective of every transport fulfils the contract of `Comm` at any number of ranks."""

import functools
import time
from itertools import count

import numpy as np
import pytest
from collectives import near, poll, wild
from mpi4py import MPI
from transports import ON_ONE_NODE

from zero_mpi.comm import Partition, SerialComm, mpi
from zero_mpi.comm.mpi import MPIComm
from zero_mpi.comm.shared.comm import SharedComm

RANKS = MPI.COMM_WORLD.Get_size()
SETTINGS = {  # transport -> options: sizes of messages and chunks
    "exact": {},
    "exact pieces": {"exact_chunk": 3},
    "exact cut": {"most": 5, "exact_chunk": 5},
    "exact thread": {"exact_chunk": 3},
    "fast": {},
    "fast pieces": {"fast_chunk": 9},
    "fast cut": {"most": 7, "fast_chunk": 7},
    "fast thread": {"fast_chunk": 9},
}
OWN = [name for name in ON_ONE_NODE if name != "mpi"]
NAMES = [*SETTINGS, *OWN, *(["serial"] if RANKS == 1 else [])]
EXACT = [name for name in NAMES if not name.startswith("fast")]
FAST = [name for name in NAMES if name.startswith("fast")]
MESSAGES = [name for name in EXACT if name in SETTINGS]  # exact transports that send messages
THREADED = [name for name in NAMES if name.endswith("thread")]
# (length, quantum): even or ragged slices, one or few ranks with elements, no elements
LENGTHS = [(48, 1), (101, 1), (101, 10), (3, 1), (5, 7), (0, 1), (0, 10)]
EDGE = 4  # elements before and after a buffer, which no collective may write

BUFFERS = [*((*lengths, np.float32) for lengths in LENGTHS), (101, 10, np.float64), (101, 10, np.uint16)]

over_lengths = pytest.mark.parametrize(("length", "quantum"), LENGTHS)
over_buffers = pytest.mark.parametrize(("length", "quantum", "dtype"), BUFFERS)


@functools.cache
def communicator(name):
    if name in SETTINGS:
        comm = MPIComm(exact=name.startswith("exact"), threaded=name.endswith("thread"))
        vars(comm).update(SETTINGS[name])
        return comm
    return SerialComm() if name == "serial" else ON_ONE_NODE[name](threaded=False)


@pytest.fixture(scope="module", autouse=True)
def threads_end():
    yield
    for name in THREADED:
        communicator(name)._progress.close()
    communicator.cache_clear()


@pytest.fixture(params=NAMES)
def comm(request):
    return communicator(request.param)


@pytest.fixture(params=EXACT)
def exact(request):
    return communicator(request.param)


class Buffer:
    """Array inside a larger array; `check` also checks that the surrounding elements did not change."""

    def __init__(self, values, whole=None):
        self.whole = np.empty(values.size + 2 * EDGE, values.dtype) if whole is None else whole
        self.whole.fill(77)
        self.array = self.whole[EDGE : EDGE + values.size]
        self.array[...] = values

    def check(self, expected):
        assert same_bits(self.array, expected)
        self.check_edges()

    def check_edges(self):
        assert np.all(self.whole[:EDGE] == 77)
        assert np.all(self.whole[EDGE + self.array.size :] == 77)


def same_bits(a, b):
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def pattern(length, dtype):
    return (np.arange(length) * 7 % 1009 + 1).astype(dtype)


def nothing(length, dtype=np.float32):
    return np.full(length, np.nan if np.issubdtype(dtype, np.floating) else 54321, dtype)


def in_order(parts, before=None):
    terms = list(parts) if before is None else [before, *parts]
    return functools.reduce(np.add, terms)


@over_buffers
@pytest.mark.parametrize("in_place", [False, True], ids=["slice", "in place"])
def test_allgather(comm, length, quantum, dtype, in_place):
    partition, values = Partition(length, comm.size, quantum), pattern(length, dtype)
    part, full = partition.part(comm.rank), Buffer(nothing(length, dtype))
    shard = Buffer(values[part])
    if in_place:
        full.array[part] = values[part]
    comm.allgather(None if in_place else shard.array, full.array, partition, "test").wait()
    full.check(values)
    shard.check(values[part])


@over_buffers
def test_gather_to_each_root(comm, length, quantum, dtype):
    partition, values = Partition(length, comm.size, quantum), pattern(length, dtype)
    piece = values[partition.part(comm.rank)]
    for root in range(comm.size):
        shard = Buffer(piece)
        full = Buffer(nothing(length, dtype)) if comm.rank == root else None
        for chunk in partition.cut(5):
            part = shard.array[chunk.of_slice(partition, comm.rank)]
            comm.gather(part, None if full is None else full.array[chunk.start : chunk.stop], chunk, root)
        shard.check(piece)
        if full is not None:
            full.check(values)


def room(comm, length):
    """Return a buffer with edges in shared memory, and its pool; None for other transports. Collective.

    Shared memory stays allocated while anything refers to it.
    """
    if not isinstance(comm, SharedComm):
        return None
    count = length + 2 * EDGE
    slot = comm.memory([], [count]).buffers
    return slot.take(count)[:count], slot


def start_reduction(comm, partition, contributors, accumulate, place=None):
    storage, slot = place or room(comm, partition.length) or (None, None)
    source = wild(comm.rank, partition.length)
    if comm.rank >= contributors:
        source = nothing(partition.length) if comm.exact else np.zeros(partition.length, np.float32)
    part = partition.part(comm.rank)
    before = nothing(part.stop - part.start)
    if accumulate:
        before = wild(1000, partition.length)[part]
    full, out = Buffer(source, storage), Buffer(before)
    full.slot = slot  # keeps the memory alive, like a module's pool
    handle = comm.reduce_scatter(
        full.array, out.array, partition, contributors=contributors, accumulate=accumulate, label="test"
    )
    return handle, full, source, out


def terms(partition, contributors, accumulate):
    parts = [wild(rank, partition.length) for rank in range(contributors)]
    return [wild(1000, partition.length), *parts] if accumulate else parts


def ordered(partition, contributors, accumulate):
    parts = terms(partition, contributors, accumulate)
    return in_order(parts) if parts else np.zeros(partition.length, np.float32)


@pytest.mark.parametrize("accumulate", [False, True], ids=["set", "add"])
@over_lengths
def test_exact_reduction_adds_in_the_order_of_ranks(exact, length, quantum, accumulate):
    partition = Partition(length, exact.size, quantum)
    for contributors in range(exact.size + 1):
        handle, full, source, out = start_reduction(exact, partition, contributors, accumulate)
        handle.wait()
        full.check(source)
        out.check(ordered(partition, contributors, accumulate)[partition.part(exact.rank)])


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("accumulate", [False, True], ids=["set", "add"])
@over_lengths
def test_fast_reduction_is_close(name, length, quantum, accumulate):
    comm = communicator(name)
    partition = Partition(length, comm.size, quantum)
    for contributors in range(comm.size + 1):
        handle, full, source, out = start_reduction(comm, partition, contributors, accumulate)
        handle.wait()
        full.check(source)
        out.check_edges()
        part = partition.part(comm.rank)
        parts = [term[part] for term in terms(partition, contributors, accumulate)]
        assert near(out.array, parts or [np.zeros(out.array.size)])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [101, 1, 0])
def test_allreduce(comm, length, dtype):
    array = Buffer(wild(comm.rank, length, dtype))
    comm.allreduce(array.array, "test").wait()
    array.check_edges()
    assert near(array.array, [wild(rank, length, dtype) for rank in range(comm.size)])


def test_sum_vector_is_exact_where_one_rank_fills_each_place(comm):
    values = pattern(101, np.float64) * 1e200
    owners = np.arange(101) * 7 % comm.size
    vector = np.where(owners == comm.rank, values, 0)
    assert same_bits(comm.sum_vector(vector.copy()), values)
    assert same_bits(comm.sum_vector(np.empty(0)), np.empty(0))
    ones = comm.sum_vector((owners == comm.rank).astype(np.float32))
    assert same_bits(ones, np.ones(101))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint16])
@pytest.mark.parametrize("shape", [(101,), (7, 5), (0,)], ids=str)
def test_broadcast_from_each_root(comm, shape, dtype):
    values = pattern(int(np.prod(shape)), dtype)
    for root in range(comm.size):
        array = Buffer(values + root if comm.rank == root else nothing(values.size, dtype))
        comm.broadcast(array.array.reshape(shape), root, "test").wait()
        array.check((values + root).astype(dtype))


def test_objects(comm):
    for root in range(comm.size):
        value = {"rank": comm.rank, "text": "x" * comm.rank}
        assert comm.broadcast_object(value, root) == {"rank": root, "text": "x" * root}
    assert comm.broadcast_object(comm.rank) == 0
    assert comm.allgather_object(("of", comm.rank)) == [("of", rank) for rank in range(comm.size)]
    assert comm.allgather_object(None) == [None] * comm.size


def test_barrier_waits_for_the_last(comm):
    comm.barrier()
    late = comm.size - 1
    if comm.rank == late:
        time.sleep(0.02)
    arrival = time.monotonic()
    comm.barrier()
    left = time.monotonic()
    assert min(comm.allgather_object(left)) >= comm.allgather_object(arrival)[late]


class Many:
    def __init__(self, comm):
        self.comm, self.checks, self.handles = comm, [], []
        shapes = [(101, 1), (101, 10), (3, 1)]
        places = [room(comm, length) for length, _ in shapes]
        for number, ((length, quantum), place) in enumerate(zip(shapes, places, strict=True)):
            self.gather(Partition(length, comm.size, quantum))
            self.reduce(Partition(length, comm.size, quantum), bool(number % 2), place)
            self.broadcast(length, number % comm.size)
            self.allreduce(length)

    def gather(self, partition):
        values, full = pattern(partition.length, np.float32), Buffer(nothing(partition.length))
        shard = values[partition.part(self.comm.rank)].copy()
        self.handles.append(self.comm.allgather(shard, full.array, partition))
        self.checks.append(lambda: full.check(values))

    def reduce(self, partition, accumulate, place):
        comm = self.comm
        handle, _, _, out = start_reduction(comm, partition, comm.size, accumulate, place=place)
        part = partition.part(comm.rank)
        parts = [term[part] for term in terms(partition, comm.size, accumulate)]
        self.handles.append(handle)
        if comm.exact:
            self.checks.append(lambda: out.check(in_order(parts)))
        else:
            self.checks.append(lambda: self.is_sum(out, parts))

    def broadcast(self, length, root):
        values = pattern(length, np.float32)
        array = Buffer(values if self.comm.rank == root else nothing(length))
        self.handles.append(self.comm.broadcast(array.array, root))
        self.checks.append(lambda: array.check(values))

    def allreduce(self, length):
        array = Buffer(wild(self.comm.rank, length))
        self.handles.append(self.comm.allreduce(array.array))
        parts = [wild(rank, length) for rank in range(self.comm.size)]
        self.checks.append(lambda: self.is_sum(array, parts))

    @staticmethod
    def is_sum(buffer, parts):
        buffer.check_edges()
        assert near(buffer.array, parts)

    def check(self):
        for check in self.checks:
            check()


def test_waiting_in_reverse_order(comm):
    many = Many(comm)
    for handle in many.handles[::-1]:
        handle.wait()
    many.check()
    assert all(handle.test() for handle in many.handles)


@pytest.mark.parametrize("name", [*SETTINGS, "shared"])
def test_the_runtime_pushes_transfers_to_the_end(name):
    """Without a progress thread, calls of `progress` advance the transfers; a thread needs no calls."""
    comm = communicator(name)
    many = Many(comm)

    def all_done():
        if name not in THREADED:
            comm.progress()
        if name == "shared":
            return not comm.due and not comm._inner._progress._active
        return not comm._progress._active

    poll(all_done)
    many.check()


@pytest.mark.world(2, 3, 4, 8)
@pytest.mark.parametrize("name", [name for name in [*SETTINGS, "shared"] if name not in THREADED])
def test_a_reduction_is_not_complete_before_the_last_rank_gives(name):
    comm, late = communicator(name), RANKS - 1
    partition = Partition(101, comm.size)
    place = room(comm, 101)
    comm.barrier()
    if comm.rank == late:
        comm.barrier()
    handle, _, _, out = start_reduction(comm, partition, comm.size, False, place=place)
    if comm.rank != late:
        assert not handle.test()
        comm.barrier()
    handle.wait()
    assert near(out.array, [term[partition.part(comm.rank)] for term in terms(partition, RANKS, False)])


@pytest.mark.parametrize("name", MESSAGES)
def test_later_reductions_use_the_first_ones_scratch(name):
    comm, partition = communicator(name), Partition(101, RANKS)
    sizes = []
    for number in range(30):
        handle, _, _, out = start_reduction(comm, partition, comm.size, number % 2 == 1)
        handle.wait()
        out.check(ordered(partition, comm.size, number % 2 == 1)[partition.part(comm.rank)])
        sizes.append({key: sorted(map(id, buffers)) for key, buffers in comm._scratch.items() if buffers})
    assert sizes[0][comm.size, np.dtype(np.float32)]
    assert all(size == sizes[0] for size in sizes)


@pytest.mark.parametrize("name", MESSAGES)
def test_tags_begin_again(name):
    """Two message tags are left and four reductions start, so tags begin again at 0."""
    comm, partition = communicator(name), Partition(101, RANKS)
    assert MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) >= mpi.TAGS - 1
    comm._tags = count(mpi.TAGS - 2)
    started = [start_reduction(comm, partition, comm.size, False) for _ in range(4)]
    for handle, _, _, out in started:
        handle.wait()
        out.check(ordered(partition, comm.size, False)[partition.part(comm.rank)])


@pytest.mark.parametrize("threaded", [False, True])
def test_an_error_inside_a_transfer_comes_out_where_it_is_waited_for(threaded):
    comm = MPIComm(threaded=threaded)

    def failing():
        yield [comm._control.Ibarrier()]
        raise OverflowError("in the middle")

    with pytest.raises(OverflowError, match="in the middle"):
        comm.start(failing(), "transfer", "").wait()
    comm.close()
