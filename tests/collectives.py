"""Helpers for tests of transports, and tests that compare transports of device memory with the host's."""

import functools
import time

import ml_dtypes
import numpy as np
import pytest

from zero_mpi.comm import Partition
from zero_mpi.comm.mpi import MPIComm

# (length, quantum): slices that are even, ragged or empty, and arrays without elements
LENGTHS = [(48, 1), (101, 1), (101, 10), (3, 1), (5, 7), (0, 1)]


@functools.cache
def wild(rank, length, kind=np.float32):
    """Return numbers of all magnitudes, with -0 and denormals; they depend on the rank, not on the call."""
    generator = np.random.default_rng([rank, length])
    values = generator.standard_normal(length) * 10.0 ** generator.integers(-4, 4, length)
    chance = generator.random(length)
    values[chance < 0.1] = -0.0
    values[chance > 0.9] *= 1e-38 if kind != np.float16 else 1e-6
    return values.astype(kind)


def reduced(comm, partition, contributors, accumulate, kind, place):
    """Start a reduction of every rank's values; return (handle, full, out)."""
    source = wild(comm.rank, partition.length, kind)
    if comm.rank >= contributors:
        source = np.full(partition.length, np.nan if comm.exact else 0, kind)
    part = partition.part(comm.rank)
    before = np.full(part.stop - part.start, np.nan, np.float32)
    if accumulate:
        before = wild(1000, partition.length)[part]
    full, out = place(source), place(before)
    handle = comm.reduce_scatter(
        full, out, partition, contributors=contributors, accumulate=accumulate, label="test"
    )
    return handle, full, out


def near(actual, parts):
    """Return whether the result is the sum of the parts in any order of addition."""
    wide = [part.astype(np.float64) for part in parts]
    buffer = 8 * len(parts) * np.finfo(actual.dtype).eps * np.sum(np.abs(wide), axis=0)
    return bool(np.all(np.abs(actual - np.sum(wide, axis=0)) <= buffer))


def poll(ready, patience=20.0):
    end = time.monotonic() + patience
    while not ready():
        assert time.monotonic() < end, "not complete in time"
        time.sleep(1e-4)


KINDS = [np.dtype(kind) for kind in (np.float32, ml_dtypes.bfloat16, np.float16)]
over_kinds = pytest.mark.parametrize("kind", KINDS, ids=str)
set_or_add = pytest.mark.parametrize("accumulate", [False, True], ids=["set", "add"])


@functools.cache
def on_host():
    return MPIComm(threaded=False)


class OfDevices:
    """Tests that every collective on device memory is bit-identical to the same collective on the host.

    A test module defines fixtures for the transports `comm`, `exact` and `fast`, and a fixture `side` with
    the functions `upload` and `download`. Gathers and exact reductions all start before the first wait.
    """

    lengths = LENGTHS

    def same_bits(self, side, array, expected):
        actual = side.download(array)
        assert actual.dtype == expected.dtype
        assert actual.tobytes() == expected.tobytes()

    @over_kinds
    @pytest.mark.parametrize("in_place", [False, True], ids=["slice", "in place"])
    def test_allgather(self, comm, side, kind, in_place):
        started = []
        for length, quantum in self.lengths:
            partition, values = Partition(length, comm.size, quantum), wild(7, length, kind)
            part, before = partition.part(comm.rank), np.full(length, 77, kind)
            if in_place:
                before[part] = values[part]
            full, shard = side.upload(before), side.upload(values[part])
            handle = comm.allgather(None if in_place else shard, full, partition, "test")
            started.append((handle, full, values, shard, values[part]))
        for handle, full, values, shard, piece in started:
            handle.wait()
            self.same_bits(side, full, values)
            self.same_bits(side, shard, piece)

    @over_kinds
    def test_broadcast_from_each_root(self, comm, side, kind):
        for root in range(comm.size):
            values = wild(root, max(length for length, _ in self.lengths), kind)
            array = side.upload(values if comm.rank == root else np.zeros_like(values))
            comm.broadcast(array, root, "test").wait()
            self.same_bits(side, array, values)

    @over_kinds
    @set_or_add
    def test_exact_reduction_has_the_bits_of_the_host(self, exact, side, kind, accumulate):
        cases = [
            (Partition(length, exact.size, quantum), contributors)
            for length, quantum in self.lengths
            for contributors in range(exact.size + 1)
        ]
        started = [reduced(exact, *case, accumulate, kind, side.upload) for case in cases]
        references = [reduced(on_host(), *case, accumulate, kind, np.copy) for case in cases]
        for (other, source, expected), (handle, full, out) in zip(references, started, strict=True):
            other.wait()
            handle.wait()
            self.same_bits(side, out, expected)
            self.same_bits(side, full, source)

    @set_or_add
    def test_fast_reduction_is_close(self, fast, side, accumulate):
        assert not fast.exact
        for length, quantum in self.lengths:
            partition = Partition(length, fast.size, quantum)
            part = partition.part(fast.rank)
            for contributors in range(1, fast.size + 1):
                handle, _, out = reduced(fast, partition, contributors, accumulate, KINDS[0], side.upload)
                handle.wait()
                parts = [wild(rank, length)[part] for rank in range(contributors)]
                assert near(side.download(out), parts + ([wild(1000, length)[part]] if accumulate else []))

    @pytest.mark.parametrize("length", [30_000, 101, 1, 0])
    def test_allreduce(self, comm, side, length):
        array = side.upload(wild(comm.rank, length))
        comm.allreduce(array, "test").wait()
        parts = [wild(rank, length) for rank in range(comm.size)]
        assert near(side.download(array), parts)
        if comm.exact:
            self.same_bits(side, array, functools.reduce(np.add, parts))
