"""A unit: parameters that travel together, laid out in one flat buffer.

Each parameter starts at a multiple of the quantum (1024 elements, or one row under row sharding), so that
the fixed chunks over which norms are summed do not depend on the unit or bucket that it travels in. The gaps
are zeros and stay zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from zero_mpi.comm.partition import Partition, dealt_out
from zero_mpi.device.types import Array
from zero_mpi.nn.layer import Param, Stage
from zero_mpi.sharding.precision import floats

QUANTUM = 1024  # elements
TRAINED, WHOLE, FROZEN = "trained", "whole", "frozen"  # the kind that all parameters of a unit have
BYTES = 4  # bytes of an element


@dataclass(frozen=True)
class ShardInfo:
    """The part of one parameter that a rank owns: elements [offset, offset + size) of it, flattened.

    With `by_rows` they are counted in rows (dimension 0), of which ranks own whole ones.
    """

    full_shape: tuple[int, ...]
    offset: int
    size: int
    by_rows: bool = False

    def in_rows(self) -> ShardInfo:
        """Return the same, counted in rows."""
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
    """Names and shapes of the parameters of a flat buffer, and where each starts.

    whole: no parameter is cut; ends: then, where each rank's slice ends (`dealt_whole`).
    """

    name: str
    params: Mapping[str, Param]
    quantum: int
    trainable: bool
    whole: bool = False
    ends: tuple[int, ...] = ()

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The start of each parameter, a multiple of the quantum."""
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
        """Return the number of quanta that the parameter takes."""
        return -(-self.params[name].size // self.quantum)

    @property
    def dealt(self) -> tuple[int, int]:
        """The number of elements that ranks have slices of, and the number whose multiples slices are."""
        return self.length, self.quantum

    def partition(self, ranks: int) -> Partition:
        """Return the partition of the buffer among ranks."""
        length, quantum = self.dealt
        return (
            Partition(length, ranks, quantum, ends=self.ends)
            if self.ends
            else dealt_out(length, ranks, quantum)
        )

    def room(self, compute: Any) -> int:
        """Return the float32 elements that gathered parameters take, for this type of computing."""
        return floats(self.length, compute)

    def room_unpacked(self, compute: Any) -> int:
        """Return the float32 elements of arrays unpacked for layers; 0 if these read what was gathered."""
        return 0

    def in_room(self, ranks: int, compute: Any) -> Partition:
        """Return the partition of `room` among ranks."""
        room, quantum = self.room(compute), floats(self.quantum, compute)
        ends = tuple(floats(end, compute) for end in self.ends)
        return Partition(room, ranks, quantum, ends=ends) if ends else dealt_out(room, ranks, quantum)

    def kept_bytes(self, compute: Any) -> int:
        """Return the bytes of an element of what ranks have slices of."""
        return int(compute.itemsize)

    def views(self, flat: Array) -> dict[str, Array]:
        """Return name -> view in full shape of the whole flat buffer."""
        return {
            name: flat[self.offsets[name] : self.offsets[name] + param.size].reshape(param.shape)
            for name, param in self.params.items()
        }

    def segments(self, part: slice) -> list[Segment]:
        """Return the parameters' runs inside the slice `part` of the buffer, in order, gaps left out."""
        found = []
        for name, param in self.params.items():
            first = max(self.offsets[name], part.start)
            last = min(self.offsets[name] + param.size, part.stop)
            if first < last:
                where = slice(first - part.start, last - part.start)
                found.append(Segment(name, where, first - self.offsets[name]))
        return found


Kind = tuple[str, bool, bool]  # how the name of a unit ends, whether it is trainable, whether it is whole
KINDS: dict[str, Kind] = {
    TRAINED: ("", True, False),
    WHOLE: (" (whole)", True, True),
    FROZEN: (" (frozen)", False, False),
}


def units_by_scope(
    stages: Iterable[Stage], params: Mapping[str, Param], kind_of: Callable[[str], str], by_rows: bool
) -> list[Unit]:
    """Return one unit a scope, in the model's order; what is frozen or whole in a scope is a unit of its own.

    Units hold `params` alone. `by_rows`: one unit a parameter, cut between its rows (dimension 0).
    """
    units, placed = [], set()
    members: dict[str, list[str]] = {}
    for stage in stages:
        names = [name for name in stage.layer.params() if name in params and name not in placed]
        placed.update(names)
        members.setdefault(stage.scope, []).extend(names)
    for scope, names in members.items():
        if by_rows:
            units += [row_unit(name, params[name], kind_of(name) == TRAINED) for name in names]
            continue
        for kind, (end, trainable, whole) in KINDS.items():
            chosen = {name: params[name] for name in names if kind_of(name) == kind}
            if chosen:
                units.append(Unit(scope + end, chosen, QUANTUM, trainable, whole))
    return units


def row_unit(name: str, param: Param, trainable: bool) -> Unit:
    """Return a parameter on its own, whose slices are whole rows; a vector's rows are its elements."""
    return Unit(name, {name: param}, param.size // param.shape[0], trainable)


def units_by_bytes(
    params: Mapping[str, Param], kind_of: Callable[[str], str], bucket_bytes: int
) -> list[Unit]:
    """Return buckets of up to `bucket_bytes`, filled from the last parameter on, as gradients come.

    A parameter larger than a bucket, or one kept unsharded, has its own bucket. Frozen parameters form one
    unit, which is never sent.
    """
    full: list[tuple[str, dict[str, Param]]] = []
    open_buckets: dict[str, dict[str, Param]] = {}
    for name in reversed([name for name in params if kind_of(name) != FROZEN]):
        bucket = open_buckets.setdefault(kind_of(name), {})
        if bucket and sum(p.size for p in bucket.values()) * BYTES + params[name].size * BYTES > bucket_bytes:
            full.append((kind_of(name), bucket))
            bucket = open_buckets[kind_of(name)] = {}
        bucket[name] = params[name]
    full += [(kind, bucket) for kind, bucket in open_buckets.items() if bucket]
    named = [
        Unit(f"bucket {number}", members, QUANTUM, True, kind == WHOLE)
        for number, (kind, members) in enumerate(full)
    ]
    frozen = {name: param for name, param in params.items() if kind_of(name) == FROZEN}
    return [*named, Unit("frozen", frozen, QUANTUM, False)] if frozen else named


def dealt_whole(units: Sequence[Unit], ranks: int, cost: Callable[[tuple[int, ...]], int]) -> list[Unit]:
    """Return the units for `ranks` ranks; in units of full matrices each parameter has one owner.

    The largest `cost` is placed first, each on the rank that has least so far, over all units together.
    """
    costs = {name: cost(p.shape) for unit in units if unit.whole for name, p in unit.params.items()}
    load, owner = [0] * ranks, dict[str, int]()
    for name in sorted(costs, key=lambda name: -costs[name]):
        owner[name] = load.index(min(load))
        load[owner[name]] += costs[name]
    found = []
    for unit in units:
        if unit.whole:
            names = sorted(unit.params, key=owner.__getitem__)
            ends, end = [], 0
            for rank in range(ranks):
                end += sum(unit.chunks(name) for name in names if owner[name] == rank) * unit.quantum
                ends.append(end)
            unit = replace(unit, params={name: unit.params[name] for name in names}, ends=tuple(ends))
        found.append(unit)
    return found


def shard_infos(unit: Unit, part: slice) -> Iterator[tuple[str, ShardInfo]]:
    """Yield (name, what the slice `part` holds of it) for every parameter of the unit, even if nothing."""
    held = {segment.name: segment for segment in unit.segments(part)}
    for name, param in unit.params.items():
        if name in held:
            where = held[name].where
            yield name, ShardInfo(param.shape, held[name].offset, where.stop - where.start)
        else:
            yield name, ShardInfo(param.shape, 0, 0)
