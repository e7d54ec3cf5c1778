"""A unit at run time on one rank: its parameters and its gradients, by the verbs that a schedule uses."""

from __future__ import annotations

from zero_mpi.device.types import Array
from zero_mpi.sharding.block_parameters import BlockParameters
from zero_mpi.sharding.block_unit import BlockUnit
from zero_mpi.sharding.gradients import make_gradients
from zero_mpi.sharding.parameters import Context, Views, make_parameters
from zero_mpi.sharding.unit import Unit


class ShardedUnit:
    """One rank's part of a unit. An unsharded unit has the same methods, which do nothing.

    `memory`: float32 for the unit's length that all ranks see, or None. The parameters lie there, or where
    every rank updates all of them their summed gradient.
    """

    def __init__(self, unit: Unit, context: Context, memory: Array | None = None) -> None:
        self.unit, self.name = unit, unit.name
        self.parameters = (
            BlockParameters(unit, context, memory)
            if isinstance(unit, BlockUnit)
            else make_parameters(unit, context, memory)
        )
        self.gradient = make_gradients(unit, context, memory)
        self.partition, self.part = self.parameters.partition, self.parameters.part

    def start_gather(self) -> None:
        """Start to gather the full parameters, unless they are here."""
        self.parameters.start_gather()

    def wait_gather(self) -> None:
        """Return when the parameters are whole."""
        self.parameters.wait_gather()

    def release(self) -> None:
        """Give up the gathered whole; the slice stays."""
        self.parameters.release()

    def start_reduce(self, contributors: int) -> None:
        """Start to sum this round's gradients over ranks into the slices of their owners."""
        self.gradient.start_reduce(contributors)

    def wait_reduce(self) -> None:
        """Return when the reduction that was started is complete."""
        self.gradient.wait_reduce()

    @property
    def updated(self) -> tuple[Array, Array, slice]:
        """Arrays that the optimizer works on: parameters, gradients, and which part of the unit they are."""
        gradient = self.gradient.sum if self.gradient.whole is None else self.gradient.whole
        return self.parameters.updated, gradient, self.parameters.updated_part

    def weights(self) -> Views:
        """Return name -> view of the gathered parameters, in full shape."""
        return self.parameters.views()

    def gradients(self) -> Views:
        """Return name -> view to add gradients into; zeros at the first call of a round; empty if frozen."""
        return self.gradient.views()
