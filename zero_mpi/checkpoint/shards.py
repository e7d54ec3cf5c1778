"""Contributions of each rank to a checkpoint: its slices of parameters, averages and optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from zero_mpi import device
from zero_mpi.checkpoint.sound import PIECE_BYTES, piece_digests
from zero_mpi.comm import Comm, Partition
from zero_mpi.device import Done
from zero_mpi.device.types import Array
from zero_mpi.optim.optimizer import ShardedOptimizer
from zero_mpi.sharding.module import ShardedUnit
from zero_mpi.sharding.precision import FLOAT32, FP64
from zero_mpi.sharding.unit import Unit

MASTER = "optimizer.master."  # names of float64 parameters, which the model's file has in float32
Run = tuple[str, int, Array]  # a tensor's name, the first element in it, the elements


@dataclass(frozen=True)
class Contribution:
    """A rank's slice of one unit's values; in the file a tensor is named `prefix` + its parameter's name."""

    prefix: str
    unit: Unit
    partition: Partition
    values: Array
    names: frozenset[str] | None = None  # the parameters that have such a value; None: all

    def on_host(self, inside: slice) -> Array:
        """Return a part of this rank's slice in host memory: a view, or a copy from the GPU."""
        return device.in_use().to_host(self.values[inside])

    def runs(self, start: int, values: Array) -> Iterator[Run]:
        """Yield the elements of the unit's buffer from `start` on as runs of its tensors, without gaps."""
        for segment in self.unit.segments(slice(start, start + values.size)):
            if self.names is not None and segment.name not in self.names:
                continue
            yield self.prefix + segment.name, segment.offset, values[segment.where]

    @property
    def by_pieces(self) -> bool:
        """True if all bounds of slices are bounds of the pieces of digests."""
        return bool(self.unit.quantum * self.values.itemsize % PIECE_BYTES == 0)

    def digests(self, start: int, values: Array) -> list[tuple[str, bytes]]:
        """Return (tensor, digests of its pieces) of the elements of the unit's buffer from `start` on."""
        return [(name, piece_digests(run)) for name, _, run in self.runs(start, values)]


def parameters_of(optimizer: ShardedOptimizer, trained: bool = False) -> list[Contribution]:
    """Return slices of all parameters, or of the `trained` ones, views. Wait for pending gathers."""
    units = optimizer.units if trained else optimizer.module.units
    for unit in units:
        unit.wait_gather()
    found = masters(optimizer.module.comm, "", units)
    return [replace(given, values=given.values.astype(FLOAT32, copy=False)) for given in found]


def masters(comm: Comm, prefix: str, units: Iterable[ShardedUnit]) -> list[Contribution]:
    """Return slices of parameters as they are updated, float32 or float64, views."""
    held = [(unit, unit.parameters.master, unit.parameters.master_part) for unit in units]
    return [contribution(comm, prefix, *each) for each in held]


def averages_of(optimizer: ShardedOptimizer, trained: bool = False) -> list[Contribution]:
    """Return slices of the averages, views, and unless `trained` those of the frozen parameters."""
    comm, values = optimizer.module.comm, optimizer.averages()
    frozen = [] if trained else [unit for unit in optimizer.module.units if not unit.unit.trainable]
    for unit in frozen:
        unit.wait_gather()
    units = [(unit, values[unit.name], unit.updated[2]) for unit in optimizer.units]
    return masters(comm, "", frozen) + [contribution(comm, "", *each) for each in units]


def states_of(optimizer: ShardedOptimizer) -> list[Contribution]:
    """Return the slices of the optimizer's states, views: float64's masters, one state after the other."""
    wide = optimizer.module.units if optimizer.module.precision is FP64 else []
    return masters(optimizer.module.comm, MASTER, wide) + [
        replace(contribution(optimizer.module.comm, f"optimizer.{state}.", unit, values, part), names=names)
        for state, unit, names in optimizer.kept_states()
        for values, part in [(optimizer.states[unit.name][state], optimizer.state_part(unit))]
    ]


def contribution(comm: Comm, prefix: str, unit: ShardedUnit, values: Array, part: slice) -> Contribution:
    """Return this rank's slice of `values`, which hold `part` of the unit: that slice, or the full unit.

    If every node has all slices, the ranks of the first node contribute them.
    """
    owners = unit.partition.parts
    first = unit.part.start - part.start
    own = values[first : first + unit.part.stop - unit.part.start]
    partition = replace(unit.partition, idle=comm.size - owners)
    return Contribution(prefix, unit.unit, partition, own if comm.rank < owners else own[:0])


class Snapshot:
    """Copies of contributions, so that training can continue; the buffers are reused."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, str, str], Array] = {}
        self.complete: Any = Done()  # a mark behind the last copies

    def take(self, role: str, contributions: Iterable[Contribution]) -> list[Contribution]:
        """Return the same contributions to one file; they have copied values once `complete` has come."""
        given = list(contributions)
        copies = [replace(each, values=self._room(role, each)) for each in given]
        pairs = [(copy.values, each.values) for copy, each in zip(copies, given, strict=True)]
        self.complete = device.in_use().fetch(pairs)
        return copies

    def _room(self, role: str, given: Contribution) -> Array:
        key, values = (role, given.prefix, given.unit.name), given.values
        if key not in self._rooms:
            self._rooms[key] = device.in_use().pinned(values.nbytes).view(values.dtype)
        return self._rooms[key]
