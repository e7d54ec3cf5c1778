"""Offsets of other hosts' clocks from that of rank 0, measured by messages to and fro.

The other clock is read between two readings of ours. Of several tries the one with the shortest round trip
counts, and its error is at most half of that time (F. Cristian, Probabilistic clock synchronization, 1989).
`now` reads the clock. The communicators are those of the MPI library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

TRIES = 10
Clock = Callable[[], float]


class Offset(NamedTuple):
    """Offset of a clock: `ahead` seconds ahead of rank 0's, `wrong` more or less, when it shows `at`."""

    ahead: float
    wrong: float
    at: float


def ask(world: Any, other: int, now: Clock) -> Offset:
    """Return how far the clock of rank `other` is ahead."""

    def once() -> tuple[float, float, float]:
        begun = now()
        world.send(None, other)
        there = world.recv(None, other)
        way = now() - begun
        return way, there - (begun + way / 2), there

    way, ahead, there = min(once() for _ in range(TRIES))
    return Offset(ahead, way / 2, there)


def answer(world: Any, now: Clock) -> None:
    """Answer `ask` on the other rank."""
    for _ in range(TRIES):
        world.recv(None, 0)
        world.send(now(), 0)


def offset_of_node(world: Any, node: Any, now: Clock) -> Offset:
    """Return how far the clock of this rank's node is ahead: ranks of a node have one clock. Collective.

    `node`: the ranks of this node, in the order of `world`.
    """
    first = node.bcast(world.Get_rank())
    for other in sorted(set(world.allgather(first)) - {0}):
        if world.Get_rank() == 0:
            world.send(ask(world, other, now), other)
        elif world.Get_rank() == other:
            answer(world, now)
    mine = world.recv(None, 0) if world.Get_rank() == first and first else Offset(0.0, 0.0, now())
    found: Offset = node.bcast(mine)
    return found
