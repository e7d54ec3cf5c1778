"""Lengths of the buffers that are lent at once: a schedule's own lists, run by units that only borrow.

A transport that shares memory is asked for these buffers before the model is there, so their lengths must be
known beforehand, and every rank's steps must find the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from zero_mpi.device import Host
from zero_mpi.device.arrays import BufferPool
from zero_mpi.device.types import Array
from zero_mpi.sharding.actions import Actions, Gather, run
from zero_mpi.sharding.precision import FP32, Precision, floats
from zero_mpi.sharding.schedule import Indices, Schedule
from zero_mpi.sharding.unit import Unit

ROUNDS = 3  # rounds of a step, after which the same buffers are lent again


class LengthOnly(Host):
    """Arrays that have a length and no memory, for code that only counts them."""

    def empty(self, size: int, dtype: Any = np.float32) -> Array:
        """Return a flat array whose elements all lie in one place."""
        return np.lib.stride_tricks.as_strided(np.empty(1, dtype), (size,), (0,))


LENGTH_ONLY = LengthOnly()


class BufferOnlyUnit:
    """A unit that borrows as a `ShardedUnit` does where nothing is shared and nothing is summed in place."""

    def __init__(
        self, unit: Unit, parameters: BufferPool, gradients: BufferPool, precision: Precision
    ) -> None:
        self._room, self._trainable = unit.room(precision.compute), unit.trainable
        self._of_gradient = floats(unit.length, precision.reduce)
        self._unpacks = unit.room_unpacked(precision.compute) > 0
        self._parameters, self._gradients, self._unpacked = parameters, gradients, False
        self._whole: Array | None = None
        self._gradient: Array | None = None  # the buffer that backward adds to
        self._reducing: Array | None = None

    def start_gather(self) -> None:
        """Borrow the buffer in which the parameters are gathered."""
        if self._whole is None and not self._unpacked:
            self._whole = self._parameters.take(self._room)

    def wait_gather(self) -> None:
        """Give back the gathered buffer if it was unpacked into another one."""
        if self._unpacks and self._whole is not None:
            self._give_back()
            self._unpacked = True

    def release(self) -> None:
        """Give back the gathered parameters."""
        self._unpacked = False
        self._give_back()

    def _give_back(self) -> None:
        if self._whole is not None:
            self._parameters.give(self._whole)
            self._whole = None

    def open_gradient(self) -> None:
        """Borrow the buffer that backward adds to, unless it is there, once the round before is summed."""
        if self._trainable and self._gradient is None:
            self.wait_reduce()
            self._gradient = self._gradients.take(self._of_gradient)

    def start_reduce(self, contributors: int) -> None:
        """Keep the gradient until its sum is complete; a rank without a micro-batch borrows it only now."""
        self.open_gradient()
        self._reducing, self._gradient = self._gradient, None

    def wait_reduce(self) -> None:
        """Give back the gradient that was summed."""
        if self._reducing is not None:
            self._gradients.give(self._reducing)
            self._reducing = None


class BufferOnlyStages:
    """Stages that compute nothing; their backward opens the gradients of their units."""

    contributors = 0

    def __init__(self, units: Sequence[BufferOnlyUnit], uses: Sequence[Indices], idle: bool) -> None:
        self._units, self._uses, self._idle = units, uses, idle

    def backward(self, stage: int) -> None:
        """Open the gradients that the stage adds to, unless the rank has no micro-batch."""
        for unit in () if self._idle else self._uses[stage]:
            self._units[unit].open_gradient()

    loss_and_backward = backward

    def forward(self, stage: int) -> None:
        """Do nothing: no array is computed."""

    evaluate = forward

    def progress(self) -> None:
        """Do nothing: no array is computed."""


def buffer_lengths(
    units: Sequence[Unit], uses: Sequence[Indices], schedule: Schedule, precision: Precision = FP32
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return lengths of all buffers that steps and evaluations in any order hold: (gradients, parameters).

    Float32 elements, longest first; of stored units the bytes alone, as what is made of them is not shared.
    """
    parameters, gradients = BufferPool(where=LENGTH_ONLY), BufferPool(where=LENGTH_ONLY)
    borrowers = [BufferOnlyUnit(unit, parameters, gradients, precision) for unit in units]
    known = -1
    while known != parameters.nbytes + gradients.nbytes:
        known = parameters.nbytes + gradients.nbytes
        for rounds in kinds_of_steps(schedule):
            for actions, idle in rounds:
                run(actions, borrowers, BufferOnlyStages(borrowers, uses, idle))
            for borrower in borrowers:
                borrower.wait_reduce()
    return gradients.lengths, parameters.lengths


def kinds_of_steps(schedule: Schedule) -> Iterator[list[tuple[Actions, bool]]]:
    """Yield steps by their rounds: (actions, whether the rank has no micro-batch).

    Gathers before and after an evaluation are those of a run.
    """
    early = tuple(map(Gather, schedule.first_gathers))
    for rounds in range(ROUNDS + 1):
        yield [(schedule.training, False)] * rounds
        yield [*[(schedule.training, False)] * rounds, (schedule.training, True)]
    for both in (schedule.training, (*schedule.forward, *schedule.backward)):
        yield [(both, False), (schedule.inference, True), (early, True)]
