"""What a rank does in a step, one action at a time, and the only loop that does it.

A schedule is lists of actions. Training, evaluation, the sizes of buffers, plans and pictures take the same
lists through `run`, and differ in what their units and stages do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Gather:
    """Start to bring a unit's parameters here."""

    unit: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Return when a unit's parameters are whole."""

    unit: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give up a unit's gathered parameters."""

    unit: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start to sum a unit's gradients over ranks."""

    unit: int


@dataclass(frozen=True, slots=True)
class WaitReduce:
    """Return when a unit's reduction is complete, if one is in flight."""

    unit: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute a stage's output, and keep what its backward needs."""

    stage: int


@dataclass(frozen=True, slots=True)
class Loss:
    """Forward, loss and backward of the last stage in one: it need not hold all logits."""

    stage: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Forward and loss of the last stage in one, without a backward to come."""

    stage: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Compute the gradient of a stage's input, and add those of its parameters."""

    stage: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Push on what is in flight."""


Compute = Forward | Loss | Evaluate | Backward
Action = Gather | Wait | Release | Reduce | WaitReduce | Compute | Progress
Actions = tuple[Action, ...]


class UnitVerbs(Protocol):
    """What actions ask of a unit."""

    def start_gather(self) -> None:
        """Start a unit's gather, for `Gather`."""

    def wait_gather(self) -> None:
        """Wait for a unit's gather, for `Wait`."""

    def release(self) -> None:
        """Give up the gathered parameters, for `Release`."""

    def start_reduce(self, contributors: int) -> None:
        """Do `Reduce`: the first so many ranks contribute."""

    def wait_reduce(self) -> None:
        """Wait for the unit's reduction, for `WaitReduce`."""


class StageVerbs(Protocol):
    """What actions ask of whoever takes a micro-batch through the stages."""

    contributors: int  # ranks with a micro-batch in this round: the first so many

    def forward(self, stage: int) -> None:
        """Run a stage forward, for `Forward`."""

    def loss_and_backward(self, stage: int) -> None:
        """Run the last stage both ways, for `Loss`."""

    def evaluate(self, stage: int) -> None:
        """Compute the loss alone, for `Evaluate`."""

    def backward(self, stage: int) -> None:
        """Run a stage backward, for `Backward`."""

    def progress(self) -> None:
        """Push on what is in flight, for `Progress`."""


def run(actions: Iterable[Action], units: Sequence[UnitVerbs], work: StageVerbs) -> None:
    """Do what a list of actions says."""
    for action in actions:
        match action:
            case Gather(unit):
                units[unit].start_gather()
            case Wait(unit):
                units[unit].wait_gather()
            case Forward(stage):
                work.forward(stage)
            case Loss(stage):
                work.loss_and_backward(stage)
            case Evaluate(stage):
                work.evaluate(stage)
            case Backward(stage):
                work.backward(stage)
            case Release(unit):
                units[unit].release()
            case WaitReduce(unit):
                units[unit].wait_reduce()
            case Reduce(unit):
                units[unit].start_reduce(work.contributors)
            case Progress():
                work.progress()


def without_gathers(actions: Iterable[Action]) -> Actions:
    """The same for whoever needs no parameters."""
    return tuple(action for action in actions if not isinstance(action, Gather | Wait | Release))


def by_stage(actions: Sequence[Action]) -> Iterator[Actions]:
    """The actions cut into one list for each stage that computes; each list ends in `Progress`."""
    start = 0
    for end, action in enumerate(actions, 1):
        if isinstance(action, Progress):
            yield tuple(actions[start:end])
            start = end
