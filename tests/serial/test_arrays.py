"""Arrays start at a cache line, and the pool of buffers lends, takes back and only grows."""

import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_mpi.arrays import ALIGNMENT, BufferPool, empty, namespace, zeros


@pytest.mark.parametrize("make", [empty, zeros])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint16, np.uint8])
@pytest.mark.parametrize("size", [0, 1, 3, 17, 1000])
def test_arrays_start_at_a_cache_line(make, dtype, size):
    arrays = [make(size, dtype) for _ in range(8)]  # at once: they lie in different places
    for array in arrays:
        assert size == 0 or array.ctypes.data % ALIGNMENT == 0  # an empty one lies nowhere
        assert (array.shape, array.dtype) == ((size,), np.dtype(dtype))
        assert array.flags.c_contiguous
        assert array.flags.writeable


def test_arrays_do_not_overlap():
    arrays = [empty(16) for _ in range(20)]
    for number, array in enumerate(arrays):
        array.fill(number)
    assert all(np.all(array == number) for number, array in enumerate(arrays))


def test_zeros_are_zeros_whatever_the_memory_held():
    for _ in range(20):
        empty(1000).fill(7)
        assert not zeros(1000).any()


def test_elements_are_float32_unless_told():
    assert empty(2).dtype == zeros(2).dtype == BufferPool().take(2).dtype == np.float32


def test_namespace_of_host_arrays_is_numpy():
    assert all(namespace(x) is np for x in (np.ones(2), np.float32(1), [1.0], 2.0))


def test_namespace_of_device_arrays_is_cupy(monkeypatch):
    cupy = ModuleType("cupy")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    array = type("ndarray", (), {"__module__": "cupy._core.core"})
    other = type("ndarray", (), {"__module__": "cupyfake.core"})
    assert namespace(array()) is cupy
    assert namespace(other()) is np


def test_a_buffer_given_back_is_lent_again():
    pool = BufferPool(np.float64)
    first = pool.take(100)
    assert (first.size, first.dtype) == (100, np.float64)
    pool.give(first)
    assert pool.take(60) is first
    assert pool.nbytes == 800


def test_a_lent_buffer_is_not_lent_again():
    pool = BufferPool()
    first, second = pool.take(10), pool.take(10)
    assert not np.shares_memory(first, second)
    assert pool.lent == 2


@pytest.mark.parametrize(("wanted", "lent"), [(5, 10), (10, 10), (11, 20), (20, 20), (21, 30), (31, 31)])
def test_the_smallest_buffer_that_fits(wanted, lent):
    pool = BufferPool()
    for buffer in [pool.take(size) for size in (30, 10, 20)]:
        pool.give(buffer)
    assert pool.take(wanted).size == lent


def test_peak_and_lent():
    pool = BufferPool()
    buffers = [pool.take(4) for _ in range(3)]
    assert (pool.lent, pool.peak_lent) == (3, 3)
    for buffer in buffers:
        pool.give(buffer)
    assert (pool.lent, pool.peak_lent) == (0, 3)
    pool.take(4)
    assert (pool.lent, pool.peak_lent) == (1, 3)


@pytest.mark.parametrize("wrong", ["twice", "foreign", "a part", "of another pool"])
def test_only_a_lent_buffer_is_taken_back(wrong):
    pool, other = BufferPool(), BufferPool()
    lent, free = pool.take(8), pool.take(8)
    pool.give(free)
    buffer = {"twice": free, "foreign": empty(8), "a part": lent[:4], "of another pool": other.take(8)}[wrong]
    with pytest.raises(AssertionError, match="not lent by this pool"):
        pool.give(buffer)
    assert pool.lent == 1
    assert pool.nbytes == 64


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=40))
def test_a_pool_only_grows_and_loses_nothing(actions):
    pool, out, grown = BufferPool(), [], 0
    for take, number in actions:
        before = pool.nbytes
        if take:
            buffer = pool.take(number)
            assert buffer.size >= number
            assert all(buffer is not other for other in out)
            out.append(buffer)
        elif out:
            pool.give(out.pop(number % len(out)))
        assert pool.lent == len(out)
        assert pool.nbytes >= before
        assert take or pool.nbytes == before
        grown = max(grown, len(out))
    assert pool.peak_lent == grown


def test_the_second_round_of_the_same_sizes_allocates_nothing():
    pool = BufferPool()
    for _ in range(3):
        buffers = [pool.take(size) for size in (50, 10, 30, 50)]
        for buffer in buffers:
            pool.give(buffer)
        assert pool.nbytes == 4 * (50 + 10 + 30 + 50)
