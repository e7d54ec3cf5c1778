"""A unit at run time on one rank: its parameters and its gradients, by the verbs that a schedule uses."""

from __future__ import annotations

from zero_mpi.device.types import Array
from zero_mpi.sharding.gradients import make_gradients
from zero_mpi.sharding.parameters import Context, make_parameters
from zero_mpi.sharding.unit import Unit


class ShardedUnit:
    """One rank's part of a unit. What is not sharded takes the same calls, which then have nothing to do.

    `memory`: float32 for the unit's length that all ranks see, or None. The parameters lie there, or where
    every rank updates all of them their summed gradient.
    """

    def __init__(self, unit: Unit, context: Context, memory: Array | None = None) -> None:
        self.unit, self.name = unit, unit.name
        self.parameters = parameters = make_parameters(unit, context, memory)
        self.gradient = gradient = make_gradients(unit, context, memory)
        self.partition, self.part = parameters.partition, parameters.part
        self.start_gather, self.wait_gather = parameters.start_gather, parameters.wait_gather
        self.release, self.weights = parameters.release, parameters.views
        self.start_reduce, self.wait_reduce = gradient.start_reduce, gradient.wait_reduce
        self.gradients = gradient.views

    @property
    def updated(self) -> tuple[Array, Array, slice]:
        """Arrays that the optimizer works on: parameters, gradients, and which part of the unit they are."""
        gradient = self.gradient.sum if self.gradient.whole is None else self.gradient.whole
        return self.parameters.master, gradient, self.parameters.master_part
