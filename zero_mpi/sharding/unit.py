"""A unit: parameters that travel together, laid out in one flat buffer.

Each parameter starts at a multiple of the quantum (1024 elements, or one row under row sharding), so that
the fixed chunks over which norms are summed do not depend on the unit or bucket that it travels in. The gaps
are zeros and stay zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from zero_mpi.comm.partition import Partition, dealt_out
from zero_mpi.device.types import Array
from zero_mpi.nn.layer import Param, Stage
from zero_mpi.sharding.precision import floats

QUANTUM = 1024  # elements
BYTES = 4  # of an element


@dataclass(frozen=True)
class ShardInfo:
    """The part of one parameter that a rank owns: elements [offset, offset + size) of it, flattened.

    With `by_rows` it is rows (dimension 0) that are counted, of which ranks own whole ones.
    """

    full_shape: tuple[int, ...]
    offset: int
    size: int
    by_rows: bool = False

    def in_rows(self) -> ShardInfo:
        """The same, counted in rows."""
        row = prod(self.full_shape[1:])
        return ShardInfo(self.full_shape, self.offset // row, self.size // row, True)


@dataclass(frozen=True)
class Segment:
    """A run of one parameter's elements inside a slice: `where` in the slice, `offset` in the parameter."""

    name: str
    where: slice
    offset: int


@dataclass(frozen=True)
class Unit:
    """Names and shapes of the parameters of a flat buffer, and where each starts."""

    name: str
    params: Mapping[str, Param]
    quantum: int
    trainable: bool

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each parameter starts, a multiple of the quantum."""
        offsets, end = {}, 0
        for name in self.params:
            offsets[name] = end
            end += self.chunks(name) * self.quantum
        return offsets

    @cached_property
    def length(self) -> int:
        """Elements of the buffer, gaps included."""
        return sum(self.chunks(name) for name in self.params) * self.quantum

    def chunks(self, name: str) -> int:
        """How many quanta the parameter takes."""
        return -(-self.params[name].size // self.quantum)

    @property
    def dealt(self) -> tuple[int, int]:
        """What ranks have slices of: how many elements, and in multiples of how many."""
        return self.length, self.quantum

    def partition(self, ranks: int) -> Partition:
        """Who owns what of the buffer."""
        length, quantum = self.dealt
        return dealt_out(length, ranks, quantum)

    def room(self, compute: Any) -> int:
        """Float32 elements that the parameters take where they are gathered, for this type of computing."""
        return floats(self.length, compute)

    def room_unpacked(self, compute: Any) -> int:
        """The same of what they are turned into for layers, where these do not read what was gathered."""
        return 0

    def in_room(self, ranks: int, compute: Any) -> Partition:
        """Who owns what of `room`."""
        return dealt_out(self.room(compute), ranks, floats(self.quantum, compute))

    def kept_bytes(self, compute: Any) -> int:
        """Bytes of an element of what ranks have slices of."""
        return int(compute.itemsize)

    def views(self, flat: Array) -> dict[str, Array]:
        """Name -> view in full shape of the whole flat buffer."""
        return {
            name: flat[self.offsets[name] : self.offsets[name] + param.size].reshape(param.shape)
            for name, param in self.params.items()
        }

    def segments(self, part: slice) -> list[Segment]:
        """The parameters' runs inside the slice `part` of the buffer, in order, gaps left out."""
        found = []
        for name, param in self.params.items():
            first = max(self.offsets[name], part.start)
            last = min(self.offsets[name] + param.size, part.stop)
            if first < last:
                where = slice(first - part.start, last - part.start)
                found.append(Segment(name, where, first - self.offsets[name]))
        return found


def units_by_scope(
    stages: Iterable[Stage], params: Mapping[str, Param], trainable: Callable[[str], bool], by_rows: bool
) -> list[Unit]:
    """One unit a scope, in the model's order; what is frozen in a scope is a unit of its own.

    Of `params` alone. `by_rows`: one unit a parameter, cut between its rows (dimension 0).
    """
    units, placed = [], set()
    members: dict[str, list[str]] = {}
    for stage in stages:
        names = [name for name in stage.layer.params() if name in params and name not in placed]
        placed.update(names)
        members.setdefault(stage.scope, []).extend(names)
    for scope, names in members.items():
        if by_rows:
            units += [row_unit(name, params[name], trainable(name)) for name in names]
            continue
        for wanted in (True, False):
            chosen = {name: params[name] for name in names if trainable(name) == wanted}
            if chosen:
                units.append(Unit(scope if wanted else f"{scope} (frozen)", chosen, QUANTUM, wanted))
    return units


def row_unit(name: str, param: Param, trainable: bool) -> Unit:
    """A parameter on its own, whose slices are whole rows; a vector's rows are its elements."""
    return Unit(name, {name: param}, param.size // param.shape[0], trainable)


def units_by_bytes(
    params: Mapping[str, Param], trainable: Callable[[str], bool], bucket_bytes: int
) -> list[Unit]:
    """Buckets of up to `bucket_bytes`, filled from the last parameter backwards, as their gradients come.

    A parameter larger than a bucket is one of its own. What is frozen is one unit: it never travels.
    """
    units = []
    bucket: dict[str, Param] = {}
    for name in reversed([name for name in params if trainable(name)]):
        if bucket and sum(p.size for p in bucket.values()) * BYTES + params[name].size * BYTES > bucket_bytes:
            units.append(bucket)
            bucket = {}
        bucket[name] = params[name]
    if bucket:
        units.append(bucket)
    named = [Unit(f"bucket {number}", members, QUANTUM, True) for number, members in enumerate(units)]
    frozen = {name: param for name, param in params.items() if not trainable(name)}
    return [*named, Unit("frozen", frozen, QUANTUM, False)] if frozen else named


def shard_infos(unit: Unit, part: slice) -> Iterator[tuple[str, ShardInfo]]:
    """(name, what the slice `part` holds of it) for every parameter of the unit, even if nothing."""
    held = {segment.name: segment for segment in unit.segments(part)}
    for name, param in unit.params.items():
        if name in held:
            where = held[name].where
            yield name, ShardInfo(param.shape, held[name].offset, where.stop - where.start)
        else:
            yield name, ShardInfo(param.shape, 0, 0)
