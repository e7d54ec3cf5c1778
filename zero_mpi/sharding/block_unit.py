"""Units that stay in the blocks of a file: the layout of their bytes, and those that a model has.

Nothing computes with the bytes, so they may be cut anywhere. Transports see them as float32 words, in a unit
of their own: each tensor is a run of words, and runs begin at multiples of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from zero_mpi.comm import Partition
from zero_mpi.nn.layer import Param, Stage
from zero_mpi.ops.block_kinds import BlockKind
from zero_mpi.sharding.precision import floats
from zero_mpi.sharding.unit import BYTES, QUANTUM, Unit, by_scope

WORDS = 16  # runs and slices are multiples of this: 64 bytes, as the lines of a cache

Stored = Mapping[str, BlockKind]


@dataclass(frozen=True)
class BlockUnit(Unit):
    """A frozen unit whose parameters are kept and gathered as blocks, and unpacked where layers read them."""

    kinds: Stored = field(default_factory=dict)

    @cached_property
    def words(self) -> Unit:
        """The unit of the kept bytes: each tensor's bytes as words."""
        runs = {name: Param((-(-self.nbytes(name) // BYTES),), "zeros") for name in self.params}
        return Unit(self.name, runs, WORDS, False)

    def nbytes(self, name: str) -> int:
        """Return the bytes of one parameter's blocks."""
        return self.kinds[name].bytes_of(self.params[name].size)

    def room(self, compute: Any) -> int:
        return self.words.length

    def room_unpacked(self, compute: Any) -> int:
        return floats(self.length, compute)

    @property
    def dealt(self) -> tuple[int, int]:
        return self.words.length, WORDS

    def in_room(self, ranks: int, compute: Any) -> Partition:
        return self.partition(ranks)

    def kept_bytes(self, compute: Any) -> int:
        return BYTES


def block_units(stages: Iterable[Stage], params: Mapping[str, Param], stored: Stored) -> list[BlockUnit]:
    """Return one unit a scope of the stored parameters; by scope also where others are cut by bytes.

    A unit is what a rank has unpacked at a time.
    """
    members = by_scope(stages, {name: params[name] for name in params if name in stored})
    units = ((scope, {name: params[name] for name in names}) for scope, names in members.items() if names)
    return [
        BlockUnit(f"{scope} (stored)", named, QUANTUM, False, kinds={name: stored[name] for name in named})
        for scope, named in units
    ]
