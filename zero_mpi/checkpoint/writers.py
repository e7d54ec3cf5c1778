"""Who writes the files of a checkpoint: rank 0 for all, or several ranks, each for a group of its own.

A group is ranks of one node, and its first rank writes what all of them have, so that a file system sees as
many writers as it is best served by (`files.file_systems`); a group may be one rank. What hosts have written
is theirs until they bring it to disk: no other host can do that for them. But all processes of a host share
its cache, so one of its writers does it for the others, once a file, after all have written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from zero_mpi.comm import Comm, Partition, Piece, SerialComm
from zero_mpi.comm.members import members_of
from zero_mpi.files.file_systems import FileSystem, file_system


@dataclass(frozen=True)
class Writers:
    """All ranks of `comm`, of each the node and the rank that writes for it; and this rank's `group`."""

    comm: Comm
    group: Comm
    nodes: tuple[int, ...]
    writer_of: tuple[int, ...]
    about: str = "rank 0 writes"

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this one's group."""
        mine = self.writer_of[self.comm.rank]
        return tuple(rank for rank, writer in enumerate(self.writer_of) if writer == mine)

    @property
    def writes(self) -> bool:
        """Whether this rank writes."""
        return self.writer_of[self.comm.rank] == self.comm.rank

    @property
    def syncs(self) -> bool:
        """Whether this rank brings a file to disk: the first of its node that writes."""
        node = self.nodes[self.comm.rank]
        return self.writes and not any(self.nodes[writer] == node for writer in self._before)

    @property
    def _before(self) -> list[int]:
        return [writer for writer in set(self.writer_of) if writer < self.comm.rank]

    @property
    def count(self) -> int:
        """How many ranks write."""
        return len(set(self.writer_of))

    @property
    def hosts(self) -> int:
        """On how many nodes they are."""
        return len({self.nodes[writer] for writer in self.writer_of})

    def close(self) -> None:
        """Give up the transport of the group. Collective."""
        if self.group is not self.comm:
            self.group.close()


def rank_0_of(comm: Comm) -> Writers:
    """One writer, whom all send what they have."""
    return Writers(comm, comm, (0,) * comm.size, (0,) * comm.size)


def writers_for(comm: Comm, folder: Path, a_node: int | None = None) -> Writers:
    """As many writers as the file system of `folder` is best served by, or so many a node. Collective."""
    nodes = tuple(comm.nodes())
    found: FileSystem = comm.broadcast_object(file_system(folder) if comm.rank == 0 else None)
    writer_of = assigned(nodes, found, a_node)
    alone, together = len(set(writer_of)) == comm.size, len(set(writer_of)) == 1
    group = comm if together else SerialComm() if alone else comm.split(writer_of[comm.rank])
    about = f"{len(set(writer_of))} of {comm.size} ranks write, on {found.kind}"
    return Writers(comm, group, nodes, writer_of, about)


def assigned(nodes: Sequence[int], found: FileSystem, a_node: int | None = None) -> tuple[int, ...]:
    """For each rank, of which the node is given, the rank that writes what it has: the first of its group.

    `a_node`: so many writers of each node, at most; None: what the file system is best served by. Where hosts
    may not write one file at once rank 0 writes for all, whatever was asked for.
    """
    several = len(set(nodes)) > 1
    if several and not found.hosts and (found.known or a_node is None):
        return (0,) * len(nodes)
    writer_of = list(range(len(nodes)))
    for ranks in members_of(nodes).values():
        groups = Partition(len(ranks), min(a_node or found.writers or len(ranks), len(ranks)))
        for number in range(groups.parts):
            for rank in ranks[groups.part(number)]:
                writer_of[rank] = ranks[groups.bounds[number]]
    return tuple(writer_of)


@dataclass(frozen=True)
class JoinedSlices(Partition):
    """What some ranks own of a buffer, one slice after the other, as if it were a buffer of its own."""

    slices: tuple[slice, ...] = ()

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Where each slice begins, and the last one ends, in the share."""
        return tuple(accumulate((part.stop - part.start for part in self.slices), initial=0))

    def stretches(self, piece: Piece) -> Iterator[tuple[int, slice]]:
        """Where a piece belongs: (start in the buffer, part of the piece); slices side by side are one."""
        start = end = done = at = 0
        for number, part in enumerate(self.slices):
            inside = piece.of_slice(self, number)
            if inside.stop > inside.start and part.start + inside.start != end:
                if at > done:
                    yield start, slice(done, at)
                start, end, done = part.start + inside.start, part.start + inside.start, at
            end, at = end + inside.stop - inside.start, at + inside.stop - inside.start
        if at > done:
            yield start, slice(done, at)


def share_of(partition: Partition, ranks: Sequence[int]) -> JoinedSlices:
    """The share of some ranks, in ascending order."""
    slices = tuple(partition.part(rank) for rank in ranks)
    return JoinedSlices(sum(part.stop - part.start for part in slices), len(slices), slices=slices)
