"""Actions of a rank in a step, one at a time, and the only loop that does them.

A schedule is lists of actions. Training, evaluation, the sizes of buffers, plans and pictures take the same
lists through `run`, and differ in what their units and stages do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Protocol


class UnitVerbs(Protocol):
    """Methods that actions call on a unit."""

    def start_gather(self) -> None:
        """Start a unit's gather."""

    def wait_gather(self) -> None:
        """Wait for a unit's gather."""

    def release(self) -> None:
        """Give up the gathered parameters."""

    def start_reduce(self, contributors: int) -> None:
        """Start to sum a unit's gradients: the first `contributors` ranks contribute."""

    def wait_reduce(self) -> None:
        """Wait for the unit's reduction."""


class StageVerbs(Protocol):
    """Methods that actions call on whoever takes a micro-batch through the stages."""

    contributors: int  # number of ranks with a micro-batch in this round: the first ones

    def forward(self, stage: int) -> None:
        """Run a stage forward."""

    def loss_and_backward(self, stage: int) -> None:
        """Run the last stage both ways."""

    def evaluate(self, stage: int) -> None:
        """Compute the loss alone."""

    def backward(self, stage: int) -> None:
        """Run a stage backward."""

    def progress(self) -> None:
        """Push on what is in flight."""


class Action(ABC):
    """One thing to do; `verb` says it in words."""

    verb = ""

    @abstractmethod
    def do(self, units: Sequence[UnitVerbs], work: StageVerbs) -> None:
        """Do the action; only `run` calls this."""


@dataclass(frozen=True)
class UnitAction(Action):
    """Action of a unit."""

    unit: int


@dataclass(frozen=True)
class StageAction(Action):
    """Action of whoever takes a micro-batch through the stages."""

    stage: int


class Gather(UnitAction):
    """Start to bring a unit's parameters here."""

    verb = "gather"

    def do(self, units: Sequence[UnitVerbs], work: StageVerbs) -> None:
        units[self.unit].start_gather()


class Wait(UnitAction):
    """Return when a unit's parameters are whole."""

    verb = "wait for"

    def do(self, units: Sequence[UnitVerbs], work: StageVerbs) -> None:
        units[self.unit].wait_gather()


class Release(UnitAction):
    """Give up a unit's gathered parameters."""

    verb = "release"

    def do(self, units: Sequence[UnitVerbs], work: StageVerbs) -> None:
        units[self.unit].release()


class Reduce(UnitAction):
    """Start to sum a unit's gradients over ranks."""

    verb = "reduce"

    def do(self, units: Sequence[UnitVerbs], work: StageVerbs) -> None:
        units[self.unit].start_reduce(work.contributors)


class WaitReduce(UnitAction):
    """Return when a unit's reduction is complete, if one is in flight."""

    verb = "wait for the sum of"

    def do(self, units: Sequence[UnitVerbs], work: StageVerbs) -> None:
        units[self.unit].wait_reduce()


class Forward(StageAction):
    """Compute a stage's output, and keep what its backward needs."""

    verb = "forward"

    def do(self, units: Sequence[UnitVerbs], work: StageVerbs) -> None:
        work.forward(self.stage)


class Loss(StageAction):
    """Forward, loss and backward of the last stage in one: it need not hold all logits."""

    verb = "forward, loss and backward of"

    def do(self, units: Sequence[UnitVerbs], work: StageVerbs) -> None:
        work.loss_and_backward(self.stage)


class Evaluate(StageAction):
    """Forward and loss of the last stage in one, without a backward to come."""

    verb = "forward and loss of"

    def do(self, units: Sequence[UnitVerbs], work: StageVerbs) -> None:
        work.evaluate(self.stage)


class Backward(StageAction):
    """Compute the gradient of a stage's input, and add those of its parameters."""

    verb = "backward"

    def do(self, units: Sequence[UnitVerbs], work: StageVerbs) -> None:
        work.backward(self.stage)


@dataclass(frozen=True)
class Progress(Action):
    """Push on what is in flight."""

    def do(self, units: Sequence[UnitVerbs], work: StageVerbs) -> None:
        work.progress()


Actions = tuple[Action, ...]
GATHERING = Gather | Wait | Release
REDUCING = Reduce | WaitReduce


def run(actions: Iterable[Action], units: Sequence[UnitVerbs], work: StageVerbs) -> None:
    """Do the actions of a list, in order."""
    for action in actions:
        action.do(units, work)


def without(kinds: UnionType, actions: Iterable[Action]) -> Actions:
    """Return the actions that are none of `kinds`."""
    return tuple(action for action in actions if not isinstance(action, kinds))


def by_stage(actions: Sequence[Action]) -> Iterator[Actions]:
    """Yield the actions cut into one list for each stage that computes; each list ends in `Progress`."""
    start = 0
    for end, action in enumerate(actions, 1):
        if isinstance(action, Progress):
            yield tuple(actions[start:end])
            start = end
