"""Tests of arrays, which start at a cache line, and of recycled memory, which is never reused too early."""

import random
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_mpi.device import HOST
from zero_mpi.device.arrays import empty, recycled
from zero_mpi.device.types import ALIGNMENT


@pytest.mark.parametrize("make", [empty, HOST.zeros])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint16, np.uint8])
@pytest.mark.parametrize("size", [0, 1, 3, 17, 1000])
def test_arrays_start_at_a_cache_line(make, dtype, size):
    arrays = [make(size, dtype) for _ in range(8)]  # all arrays are alive, so they have different addresses
    for array in arrays:
        assert size == 0 or array.ctypes.data % ALIGNMENT == 0  # an empty array has no address
        assert (array.shape, array.dtype) == ((size,), np.dtype(dtype))
        assert array.flags.c_contiguous
        assert array.flags.writeable


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("tvdr"), st.integers(0, 99)), max_size=80))
def test_what_is_referenced_keeps_its_values(actions):
    arrays = []
    for number, (action, choice) in enumerate(actions):
        if action == "t":
            array = recycled((choice % 3 + 1, 5000))
            assert array.ctypes.data % ALIGNMENT == 0
            array.fill(number)
            arrays.append((array, number))
        elif arrays and action == "v":
            array, value = arrays[choice % len(arrays)]
            arrays.append((array[choice % array.shape[0] :][..., 1:-1], value))
        elif arrays and action == "d":
            arrays.pop(choice % len(arrays))
        elif arrays:
            array, value = arrays[choice % len(arrays)]
            arrays[choice % len(arrays)] = (array.reshape(-1)[::3], value)
        assert all((array == value).all() for array, value in arrays)


def test_two_threads_never_get_the_same_memory():
    faults = []

    def work(mark):
        chance = random.Random(mark)
        arrays = []
        for turn in range(3000):
            array = recycled((chance.choice([4096, 5000, 9000]),))
            array.fill(mark * 10_000 + turn % 7)
            arrays.append((array[10:], mark * 10_000 + turn % 7))
            if len(arrays) > 8:
                sample, value = arrays.pop(chance.randrange(9))
                if not (sample == value).all():
                    faults.append((mark, turn))

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not faults
