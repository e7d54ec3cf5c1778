"""Partitions of flat arrays: the slice of each rank, and the chunks in which an array is sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from zero_mpi.arguments import whole


@dataclass(frozen=True)
class Partition:
    """A flat buffer of `length` elements that is divided among `parts` ranks in contiguous slices.

    `ends` gives the end of each slice. By default, boundaries are multiples of `quantum`, lengths are as even
    as that allows, and longer slices come first. A rank may own no elements.
    """

    length: int
    parts: int
    quantum: int = 1
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("length", 0), ("parts", 1), ("quantum", 1)):
            whole(f"Partition: {name}", getattr(self, name), least)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Offsets of all slices, parts + 1 numbers; rank r owns [bounds[r], bounds[r + 1])."""
        if self.ends:
            return (0, *self.ends)
        share, longer = divmod(-(-self.length // self.quantum), self.parts)
        offsets = (rank * share + min(rank, longer) for rank in range(self.parts + 1))
        return tuple(min(offset * self.quantum, self.length) for offset in offsets)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in pairwise(self.bounds))

    def part(self, rank: int) -> slice:
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def span(self, rank: int, start: int, length: int) -> slice:
        """Return the segment [start, start + length) of `rank`'s slice, cut off at the slice's end."""
        first, last = self.bounds[rank], self.bounds[rank + 1]
        return slice(min(first + start, last), min(first + start + length, last))

    def outside(self, rank: int) -> int:
        return self.length - self.counts[rank]

    def cut(self, most: int) -> Iterator[Chunk]:
        """Yield contiguous chunks of the buffer, of at most `most` elements."""
        for start in range(0, self.length, most):
            stop = min(start + most, self.length)
            offsets = [min(max(bound, start), stop) - start for bound in self.bounds]
            counts = tuple(b - a for a, b in pairwise(offsets))
            yield Chunk(start, stop, counts, tuple(offsets[:-1]))


@lru_cache(maxsize=4096)
def dealt_out(length: int, parts: int, quantum: int, ends: tuple[int, ...] = ()) -> Partition:
    """Return a cached partition; equal calls share an object, since its bounds take 72 bytes per rank."""
    return Partition(length, parts, quantum, ends)


@dataclass(frozen=True)
class Chunk:
    """A segment [start, stop) of a flat buffer, with each rank's number of elements and its offset in it."""

    start: int
    stop: int
    counts: tuple[int, ...]
    offsets: tuple[int, ...]

    def of_slice(self, partition: Partition, rank: int) -> slice:
        """Return the part of `rank`'s slice that is in the chunk, relative to the beginning of the slice."""
        first = self.start + self.offsets[rank] - partition.bounds[rank]
        return slice(first, first + self.counts[rank])


def others(rank: int, size: int) -> list[int]:
    """Return the other ranks, beginning with the next one, so that no two ranks begin with the same rank."""
    return [(rank + step) % size for step in range(1, size)]
