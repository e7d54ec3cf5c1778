"""Offsets of other hosts' clocks from the clock of rank 0, measured by round trips of messages.

Rank 0 sends a number to all ranks, and each rank sends back the time of its clock, which falls between two
readings of rank 0's clock. Of several round trips, the shortest is used; its error is at most half of its
duration (F. Cristian, Probabilistic clock synchronization, 1989).
"""

import time
from typing import Any, NamedTuple

import numpy as np

from zero_mpi.comm.base import Comm
from zero_mpi.comm.partition import Partition

TRIES = 10


class Offset(NamedTuple):
    """Offset of a clock: at time `at` it is `lead` seconds ahead of rank 0's, within `error` seconds."""

    lead: float
    error: float
    at: float


def clock_offset(comm: Comm) -> Offset:
    """Return how far `time.perf_counter` on this node is ahead of rank 0's. Collective.

    The ranks of a node share a clock, so the reading of the node's first rank is used.
    """
    nodes = comm.nodes()
    (chunk,) = Partition(comm.size, comm.size).cut(comm.size)
    word, readings = np.zeros(1), np.zeros(comm.size) if comm.rank == 0 else None
    trips = []
    for _ in range(TRIES):
        begun = time.perf_counter()
        comm.broadcast(word, label="clock").wait()
        comm.gather(np.array([time.perf_counter()]), readings, chunk, label="clock")
        duration = time.perf_counter() - begun
        trips.append((duration, begun, None if readings is None else readings.tolist()))
    trip: Any = comm.broadcast_object(min(trips))
    duration, begun, times = trip
    first = nodes.index(nodes[comm.rank])
    if first == 0:
        return Offset(0.0, 0.0, time.perf_counter())
    return Offset(times[first] - (begun + duration / 2), duration / 2, times[first])
