"""Actions of a rank in a step, and the one loop that executes them in order.

A schedule consists of lists of actions. Training and evaluation pass them to `run`; plans, buffer sizes and
diagrams are computed from the same lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero_mpi.sharding.module import ShardedUnit
    from zero_mpi.sharding.passes import MicroBatch


class Action:
    """One action. `verb` describes it; `method` names the method of a unit or micro-batch that does it."""

    verb = method = ""

    def do(self, units: Sequence[ShardedUnit], work: MicroBatch) -> None:
        """Execute the action."""
        getattr(work, self.method)()


@dataclass(frozen=True)
class UnitAction(Action):
    """Action on a unit."""

    unit: int

    def do(self, units: Sequence[ShardedUnit], work: MicroBatch) -> None:
        getattr(units[self.unit], self.method)()


@dataclass(frozen=True)
class StageAction(Action):
    """Action on a micro-batch at one stage. A rank without a micro-batch skips such actions."""

    stage: int

    def do(self, units: Sequence[ShardedUnit], work: MicroBatch) -> None:
        if not work.is_idle:
            getattr(work, self.method)(self.stage)


class Gather(UnitAction):
    """Start the gather of a unit's parameters."""

    verb, method = "gather", "start_gather"


class Wait(UnitAction):
    """Wait until a unit's full parameters have arrived."""

    verb, method = "wait for", "wait_gather"


class Release(UnitAction):
    """Release a unit's gathered parameters."""

    verb, method = "release", "release"


class Reduce(UnitAction):
    """Start the sum of a unit's gradients over ranks."""

    verb, method = "reduce", "start_reduce"

    def do(self, units: Sequence[ShardedUnit], work: MicroBatch) -> None:
        units[self.unit].start_reduce(work.contributors)


class WaitReduce(UnitAction):
    """Wait until a unit's reduction is complete, if one is in flight."""

    verb, method = "wait for the sum of", "wait_reduce"


class Forward(StageAction):
    """Compute a stage's output; if backward follows, keep the values that it needs."""

    verb, method = "forward", "forward"


class Loss(StageAction):
    """Run forward, loss and backward of the last stage together, without storing all logits."""

    verb, method = "forward, loss and backward of", "loss_and_backward"


class Evaluate(StageAction):
    """Run forward and loss of the last stage together, when no backward follows."""

    verb, method = "forward and loss of", "evaluate"


class Backward(StageAction):
    """Compute the gradient of a stage's input, and add to the gradients of its parameters."""

    verb, method = "backward", "backward"


@dataclass(frozen=True)
class Turn(StageAction):
    """Switch a stage to part `number` of its stacked parameters."""

    number: int
    adds: tuple[int, ...] = ()  # units whose gradients backward adds to
    verb, method = "go on with", "turn"

    def do(self, units: Sequence[ShardedUnit], work: MicroBatch) -> None:
        work.turn(self)


@dataclass(frozen=True)
class Progress(Action):
    """Make progress on the transfers in flight."""

    method = "progress"


Actions = tuple[Action, ...]
GATHERING = Gather | Wait | Release
REDUCING = Reduce | WaitReduce


def run(actions: Iterable[Action], units: Sequence[ShardedUnit], work: MicroBatch) -> None:
    work.rest = iter(actions)
    for action in work.rest:
        action.do(units, work)


def without(kinds: UnionType, actions: Iterable[Action]) -> Actions:
    return tuple(action for action in actions if not isinstance(action, kinds))


def by_stage(actions: Sequence[Action]) -> Iterator[Actions]:
    """Yield the actions in groups, one for each computation; a group ends with `Progress`."""
    start = 0
    for end, action in enumerate(actions, 1):
        if isinstance(action, Progress):
            yield tuple(actions[start:end])
            start = end
