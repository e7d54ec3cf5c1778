"""A moving average of the parameters, which often predicts better than the last of them.

After each update e = keep e + (1 - keep) p, in float32, beginning with the first parameters; an update
that is left out leaves it as it is. It lies where the moments lie: each rank has it for what it updates.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zero_mpi import device, ops
from zero_mpi.arguments import number
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.sharding.host_masters import NONE
from zero_mpi.sharding.sharded_unit import ShardedUnit


class MovingAverage:
    """The averages of some units, flat, by their names; zeros until `begin`."""

    def __init__(self, units: Iterable[ShardedUnit], keep: float) -> None:
        zeros = device.in_use().zeros
        self.keep = keep
        self.values: dict[str, Array] = {unit.name: zeros(unit.updated[0].size) for unit in units}

    @property
    def nbytes(self) -> int:
        """Bytes of all of them on this rank."""
        return int(sum(array.nbytes for array in self.values.values()))

    def begin(self, units: Iterable[ShardedUnit]) -> None:
        """Set the averages to the parameters as they are."""
        for unit in units:
            device.in_use().copy(self.values[unit.name], unit.updated[0])

    def follow(self, unit: ShardedUnit) -> None:
        """Update the averages by the parameters of a unit that was updated."""
        ops.moving_average(self.values[unit.name], unit.updated[0], self.keep)


def check_average(ema: Any, offload: str) -> None:
    """Raise ValueError for an impossible `ema`, UsageError with `offload`: parameters are not at hand."""
    if ema is None:
        return
    number("ShardedAdamW: ema", ema, above=0, below=1)
    if offload != NONE:
        raise UsageError(f"--ema {ema}: cannot be combined with --offload {offload}: remove one of them")
