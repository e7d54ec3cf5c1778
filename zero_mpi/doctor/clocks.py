"""How far the hosts' clocks are apart, by messages to and fro.

A clock is read between two readings of ours; of several tries the one with the shortest way tells most, and
its error is at most half of that way (F. Cristian, Probabilistic clock synchronization, 1989). Times in
records come from rank 0; with other clocks far off, the records of batch system and job do not fit together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from zero_mpi.doctor.ranks import Ranks
from zero_mpi.doctor.rows import NOTE, Row, duration

TRIES = 10
FAR = 1.0  # seconds
Offset = tuple[float, float]  # seconds ahead of rank 0's clock, at most so many wrong


def now() -> float:
    """This host's clock."""
    return time.time()


def offsets(where: Ranks) -> list[Offset]:
    """Of each node but the first. Collective; the answers are on all ranks."""
    found: list[Offset] = []
    for ranks in where.nodes[1:]:
        if where.rank == 0:
            found.append(ask(where.world.mpi.COMM_WORLD, ranks[0]))
        elif where.rank == ranks[0]:
            answer(where.world.mpi.COMM_WORLD)
    shared: list[Offset] = where.world.share(found)
    return shared


def ask(world: Any, other: int) -> Offset:
    """How far the clock of rank `other` is ahead."""

    def once() -> tuple[float, float]:
        begun = now()
        world.send(None, other)
        there = world.recv(None, other)
        way = now() - begun
        return way, there - (begun + way / 2)

    way, ahead = min(once() for _ in range(TRIES))
    return ahead, way / 2


def answer(world: Any) -> None:
    """The other side of `ask`."""
    for _ in range(TRIES):
        world.recv(None, 0)
        world.send(now(), 0)


def rows(found: list[Offset], names: tuple[str, ...]) -> Iterator[Row]:
    """The worst clock; `names` of the nodes that were asked."""
    if not found:
        yield Row("clocks", "one host, one clock")
        return
    (ahead, wrong), name = max(zip(found, names, strict=True), key=lambda entry: abs(entry[0][0]))
    value = f"at most {duration(abs(ahead))} apart: {name} (known to {duration(wrong)})"
    if abs(ahead) <= FAR:
        yield Row("clocks", value)
    else:
        yield Row(
            "clocks", value, NOTE, "let all hosts follow one clock: chronyd, or timedatectl set-ntp true"
        )


def section(where: Ranks) -> list[Row]:
    """Compare the clocks of all hosts. Collective."""
    return list(rows(offsets(where), where.names[1:]))
