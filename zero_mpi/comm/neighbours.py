"""Who keeps copies for whom: the hosts stand in a ring, and each hands what it has to the next one.

Two ranks of one host have keepers on the same other host, so where one host is lost each rank's copy is still
there: at home, or with its keeper. Of several hosts lost at once, those must not be neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_mpi.comm.members import members_of
from zero_mpi.comm.meter import Meter
from zero_mpi.device.types import Array


@dataclass(frozen=True)
class Ring:
    """A rank's place in it: who keeps its copies, None where there is one host, and whose it keeps."""

    keeper: int | None
    kept: tuple[int, ...]


def ring(nodes: Sequence[int], rank: int) -> Ring:
    """The place of a rank, from the node of each rank by number; nodes may have unequally many ranks."""
    members = members_of(nodes)
    if len(members) == 1:
        return Ring(None, ())
    order, keepers = list(members), dict[int, int]()
    for place, node in enumerate(order):
        next_ones = members[order[(place + 1) % len(order)]]
        keepers |= {each: next_ones[at % len(next_ones)] for at, each in enumerate(members[node])}
    return Ring(keepers[rank], tuple(sorted(each for each, keeper in keepers.items() if keeper == rank)))


class Neighbours:
    """Carries what ranks hand to their keepers, over a communicator of its own. Collective where it is made.

    `world`: mpi4py's communicator of all ranks.
    """

    def __init__(self, world: Any, ring: Ring, meter: Meter) -> None:
        self.ring, self._comm, self._meter = ring, world.Dup(), meter

    def tell(self, word: Any) -> dict[int, Any]:
        """Hand any small object to the keeper. Returns those of the ranks whose copies are kept here."""
        with self._meter.waiting("copy", "what a copy is"):
            sent = [] if self.ring.keeper is None else [self._comm.isend(word, self.ring.keeper)]
            found = {rank: self._comm.recv(source=rank) for rank in self.ring.kept}
            for request in sent:
                request.wait()
        return found

    def hand_over(self, own: Array, rooms: Mapping[int, Array]) -> None:
        """Hand bytes to the keeper, and fill the rooms of ranks that this one keeps for; both may be empty.

        own, rooms: uint8, contiguous, at most 1 GiB.
        """
        with self._meter.waiting("copy", "a piece"):
            requests = [self._comm.Irecv(room, rank) for rank, room in rooms.items() if room.size]
            if self.ring.keeper is not None and own.size:
                requests.append(self._comm.Isend(own, self.ring.keeper))
            for request in requests:
                request.Wait()

    def close(self) -> None:
        """Give the communicator up. Collective."""
        self._comm.Free()
