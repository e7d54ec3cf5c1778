"""What tests of transports for device memory start, and compare with the host's."""

import functools
import time

import numpy as np

# (length, quantum): even, ragged, empty slices, nothing at all
LENGTHS = [(48, 1), (101, 1), (101, 10), (3, 1), (5, 7), (0, 1)]


@functools.cache
def wild(rank, length, kind=np.float32):
    """Numbers of different magnitude, others on each rank, the same in every call; -0 and denormals too."""
    generator = np.random.default_rng([rank, length])
    values = generator.standard_normal(length) * 10.0 ** generator.integers(-4, 4, length)
    chance = generator.random(length)
    values[chance < 0.1] = -0.0
    values[chance > 0.9] *= 1e-38 if kind != np.float16 else 1e-6
    return values.astype(kind)


def reduced(comm, partition, contributors, accumulate, kind, place):
    """Start a reduction of what every rank gives; returns (handle, full, out)."""
    given = wild(comm.rank, partition.length, kind)
    if comm.rank >= contributors:
        given = np.full(partition.length, np.nan if comm.exact else 0, kind)
    part = partition.part(comm.rank)
    before = np.full(part.stop - part.start, np.nan, np.float32)
    if accumulate:
        before = wild(1000, partition.length)[part]
    full, out = place(given), place(before)
    handle = comm.reduce_scatter(
        full, out, partition, contributors=contributors, accumulate=accumulate, label="test"
    )
    return handle, full, out


def near(found, parts):
    """Whether it is the sum of the parts, in whatever order they were added."""
    wide = [part.astype(np.float64) for part in parts]
    room = 8 * len(parts) * np.finfo(found.dtype).eps * np.sum(np.abs(wide), axis=0)
    return bool(np.all(np.abs(found - np.sum(wide, axis=0)) <= room))


def poll(ready, patience=20.0):
    end = time.monotonic() + patience
    while not ready():
        assert time.monotonic() < end, "not complete in time"
        time.sleep(1e-4)
