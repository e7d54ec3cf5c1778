"""Ranks that write the files of a checkpoint: rank 0 for all, or several ranks, each for a group of its own.

A group is ranks of one node, and its first rank writes what all of them have, so that a file system sees as
many writers as it is best served by (`files.file_systems`); a group may be one rank. What hosts have written
is theirs until they bring it to disk: no other host can do that for them. But all processes of a host share
its cache, so one of its writers does it for the others, once a file, after all have written.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        return self.writer_of[self.comm.rank] == self.comm.rank

    @property
    def syncs(self) -> bool:
        """Whether this rank brings a file to disk: the first of its node that writes."""
        here = [writer for writer in self.writer_of if self.nodes[writer] == self.nodes[self.comm.rank]]
        return self.writes and self.comm.rank == min(here)

    @property
    def hosts(self) -> int:
        """Number of nodes that write."""
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
    count = len(set(writer_of))
    group = comm if count == 1 else SerialComm() if count == comm.size else comm.split(writer_of[comm.rank])
    return Writers(comm, group, nodes, writer_of, f"{count} of {comm.size} ranks write, on {found.kind}")


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

    def stretches(self, piece: Piece) -> list[tuple[int, slice]]:
        """Return where a piece belongs: (start in the buffer, part of it); slices side by side are one."""
        found, at = list[tuple[int, slice]](), 0
        for number, part in enumerate(self.slices):
            inside = piece.of_slice(self, number)
            start, stop = part.start + inside.start, at + inside.stop - inside.start
            if stop > at:
                if found and found[-1][0] + at - found[-1][1].start == start:
                    start, joined = found.pop()
                    at = joined.start
                found.append((start, slice(at, stop)))
            at = stop
        return found


def share_of(partition: Partition, ranks: Sequence[int]) -> JoinedSlices:
    """The share of some ranks, in ascending order."""
    slices = tuple(partition.part(rank) for rank in ranks)
    return JoinedSlices(sum(part.stop - part.start for part in slices), len(slices), slices=slices)
