"""Transfers of device memory as exchanges: pieces that travel together, several exchanges in progress at
once.

`comm` works out once, as a list of exchanges, which data travel where. A backend decides how they travel:
straight from device memory, by way of pinned memory, or by NCCL. A backend runs each exchange as a
generator of its own, and `overlapped` runs these side by side: while one is copied, another is in the MPI
library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from zero_mpi.comm.kinds import Transport
from zero_mpi.comm.partition import Partition
from zero_mpi.comm.start_mpi import MPI as MPI
from zero_mpi.comm.transfer import Needed, Running, has_come
from zero_mpi.device.types import Array


@dataclass(frozen=True)
class Exchange:
    """Pieces that are sent together (`sends`, with ranks) and rooms that ranks fill (`receives`, with ranks).

    `then` launches the work on the rooms once they are filled.
    """

    sends: Sequence[tuple[Array, Sequence[int]]] = ()
    receives: Sequence[tuple[Array, int]] = ()
    then: Callable[[], None] | None = None


class Backend(Protocol):
    """A way for exchanges to travel.

    depth       exchanges in progress at once; the room of an exchange is used again `depth` exchanges later
    in_order    everything is launched at once and in the order of the side stream: no MPI request, no host
    kind        the transport that it makes of messages between hosts
    """

    depth: int
    in_order: bool
    kind: Transport

    def largest(self, itemsize: int, *, summed: bool) -> int:
        """Return the maximum chunk length of an exchange, in elements; `summed`: with sums."""

    def run(self, exchanges: Iterator[Exchange], tags: Iterator[int]) -> Running:
        """Move the pieces of all exchanges and launch what follows; each exchange takes a tag."""

    def sum_slices(self, full: Array, target: Array, partition: Partition) -> None:
        """Set `target` to the library's sum over ranks of this rank's slice of their `full`. Collective."""

    def sum_all(self, array: Array) -> None:
        """Replace `array` by the library's sum of it over ranks, on all ranks. Collective."""

    def close(self) -> None:
        """Release what the backend holds. Collective."""


def as_message(piece: Array) -> list[Any]:
    """Return a piece, which is not empty, as a message of bytes: mpi4py knows no bfloat16."""
    return [piece.view(np.uint8), MPI.BYTE]


def passed(mark: Any) -> Callable[[], bool]:
    """Return a function that tells whether the device has come to a mark."""
    return lambda: bool(mark.done)


def arrived(adopt: Callable[[], None], requests: list[Any]) -> Callable[[], bool]:
    """Return a function that tells whether requests are complete; MPI may copy device memory in it."""

    def look() -> bool:
        adopt()
        return bool(MPI.Request.Testall(requests))

    return look


class RunningExchange:
    """A generator in progress, and what it needs next. The generator begins at once."""

    def __init__(self, running: Running) -> None:
        self._running, self.done = running, False
        self._needed: Needed = []
        self._advance()

    def _advance(self) -> None:
        try:
            self._needed = next(self._running)
        except StopIteration:
            self.done = True

    def ready(self) -> bool:
        """Return whether the generator can go on."""
        return has_come(self._needed)

    def push(self) -> None:
        """Advance the generator as far as it can go."""
        while not self.done and self.ready():
            self._advance()


def overlapped(runs: Iterable[Running], depth: int) -> Running:
    """Run generators, up to `depth` at once; one begins when the one `depth` before it has ended."""
    under_way: deque[RunningExchange] = deque()
    coming = iter(runs)
    more = True
    while more or under_way:
        while more and len(under_way) < depth:
            running = next(coming, None)
            more = running is not None
            if running is not None:
                under_way.append(RunningExchange(running))
        # The needs of a step are checked here and not in the condition: an error then is the transfer's own.
        for step in under_way:
            step.push()
        while under_way and under_way[0].done:
            under_way.popleft()
        if under_way and (not more or len(under_way) == depth):
            yield partial(any_ready, [step for step in under_way if not step.done])


def any_ready(steps: Sequence[RunningExchange]) -> bool:
    """Return whether one of the steps can go on."""
    return any(step.ready() for step in steps)


class Tickets:
    """Queue of transfers: they begin in the order in which they were started, at most `most` at once.

    There are as many rooms and pinned buffers. All ranks start transfers in one order, so the oldest one not
    complete everywhere is in progress on every rank that has started it: none waits forever for its turn.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: list[int] = []
        self._next = 0

    def take(self) -> int:
        """Return the number of a new transfer."""
        number, self._next = self._next, self._next + 1
        self._waiting.append(number)
        return number

    def has_come(self, number: int) -> bool:
        """Return whether a transfer may begin."""
        return number in self._waiting[: self._most]

    def end(self, number: int) -> None:
        """Note that a transfer is over."""
        self._waiting.remove(number)
