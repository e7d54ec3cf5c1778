"""Schedules: lists of gathers, computations, releases and reductions, made once from the strategy.

All ranks execute the same lists, even without a micro-batch in a round, so collectives match. The gather of a
unit starts `prefetch` stages before its first use, and the unit is released after its last use in that
direction. Units of the last stage are kept between forward and backward. Units that distant stages share
(a tied embedding) are also kept, and gathered once per micro-batch; other units are gathered at most twice. A
unit is reduced after the last backward that adds to it; two reductions may be in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, groupby, takewhile
from typing import NamedTuple

from zero_mpi.sharding.actions import (
    REDUCING,
    Action,
    Actions,
    Backward,
    Evaluate,
    Forward,
    Gather,
    Loss,
    Progress,
    Reduce,
    Release,
    StageAction,
    Turn,
    UnitAction,
    Wait,
    WaitReduce,
    by_stage,
    without,
)

Indices = tuple[int, ...]

REDUCTIONS_IN_FLIGHT = 2  # maximum number of units whose gradients are sent while the next stages compute


@dataclass(frozen=True)
class Schedule:
    """Actions of a rank in a round, for ranks with and without a micro-batch.

    forward, backward   the two directions separately
    training            both directions; the last stage runs forward and backward together
    inference           forward, when no backward follows
    evaluation          like inference, with the loss of the last stage
    """

    forward: Actions
    backward: Actions
    training: Actions
    inference: Actions
    evaluation: Actions
    unit_names: tuple[str, ...] = ()
    stage_names: tuple[str, ...] = ()

    @cached_property
    def reductions(self) -> Indices:
        """Units in the order in which their reductions start."""
        return tuple(action.unit for action in self.backward if isinstance(action, Reduce))

    @cached_property
    def first_gathers(self) -> Indices:
        """Units whose gathers start before the first stage computes."""
        prefix = takewhile(lambda action: isinstance(action, Gather), self.forward)
        return tuple(action.unit for action in prefix if isinstance(action, Gather))

    @cached_property
    def without_reductions(self) -> Schedule:
        """Schedule of a round without reductions; a later round also reduces its gradients."""
        backward, training = without(REDUCING, self.backward), without(REDUCING, self.training)
        return replace(self, backward=backward, training=training)

    def __str__(self) -> str:
        return "\n".join(f"  {'; '.join(self._in_words(actions))}" for actions in by_stage(self.training))

    def _in_words(self, actions: Actions) -> Iterator[str]:
        spoken = (action for action in actions if action.verb)
        for verb, group in groupby(spoken, lambda action: action.verb):
            yield f"{verb} {' '.join(map(self._name, group))}"

    def _name(self, action: Action) -> str:
        if isinstance(action, StageAction):
            return self.stage_names[action.stage] if self.stage_names else str(action.stage)
        assert isinstance(action, UnitAction)
        return self.unit_names[action.unit] if self.unit_names else str(action.unit)


# ------------------------------------------------------------------------------------- how the lists are made


@dataclass(frozen=True)
class Moves:
    """A computation, with the units that are gathered, awaited, released and reduced around it."""

    compute: StageAction
    gathers: Indices
    waits: Indices
    releases: Indices
    reductions: Actions = ()

    def __add__(self, other: Moves) -> Moves:
        waits = tuple(dict.fromkeys(self.waits + other.waits))  # one wait for a unit that both need
        gathers, releases = self.gathers + other.gathers, self.releases + other.releases
        return Moves(other.compute, gathers, waits, releases, other.reductions)

    def actions(self) -> Actions:
        before = (*map(Gather, self.gathers), *map(Wait, self.waits))
        return (*before, self.compute, *map(Release, self.releases), *self.reductions, Progress())


class Step(NamedTuple):
    """A computation: its action, the units that it reads, and the units to whose gradients it adds."""

    compute: StageAction
    reads: Indices
    adds: Indices = ()


@dataclass(frozen=True)
class Parts:
    """Stacked parameters of a stage, which are processed one part after the other, in turns.

    names     all stacked parameters, including those that are not split into parts
    members   each part's range of the first dimension
    units     the units of each part
    again     number of times that the stage's backward runs forward again
    """

    names: tuple[str, ...]
    members: tuple[slice, ...]
    units: tuple[Indices, ...]
    again: int = 0

    def forward(self, stage: int, reads: Indices) -> Iterator[Step]:
        for number, units in enumerate(self.units):
            yield Step(Turn(stage, number), reads + units)

    def backward(self, stage: int, reads: Indices, adds: Indices) -> Iterator[Step]:
        """Yield the turns of the stage's backward: repeated forwards, then the parts from last to first."""
        for _ in range(self.again):
            yield from self.forward(stage, reads)
        for number, units in reversed([*enumerate(self.units)]):
            yield Step(Turn(stage, number, units), reads + units, adds + units)


def make_schedule(
    uses: Sequence[Indices],
    reads_in_backward: Sequence[bool],
    trainable: Sequence[bool],
    prefetch: int,
    *,
    gathers: Sequence[bool],
    parts: Mapping[int, Parts],
) -> Schedule:
    """Return the schedule of stages. `uses[stage]`: its units; `parts[stage]`: its units used in turns.

    `reads_in_backward[stage]`: whether the stage's backward reads parameters; `trainable[unit]`: whether it
    has gradients; `gathers[unit]`: whether its parameters are sharded, and so gathered.
    The last stage has no parts.
    """
    top = len(uses) - 1
    ascent, descent = steps_of(uses, reads_in_backward, trainable, parts)
    users = [[stage for stage in range(top + 1) if unit in uses[stage]] for unit in range(len(trainable))]
    distant = {unit for unit, stages in enumerate(users) if stages and stages[-1] - stages[0] >= len(stages)}
    carried = ({*uses[top]} | distant) & {unit for step in descent for unit in step.reads}

    passing = {unit for each in parts.values() for units in each.units for unit in units}
    plan = partial(plan_moves, prefetch=prefetch, gathers=gathers, passing=passing)
    forward, inference = plan(ascent, keep=carried), plan(ascent)
    pairs = zip(plan(descent, held=carried), reductions_after(descent, trainable), strict=True)
    backward = [replace(moves, reductions=reductions) for moves, reductions in pairs]
    both = forward[-1] + backward[0] if backward else forward[-1]
    training = [*forward[:-1], replace(both, compute=Loss(top)), *backward[1:]]
    evaluation = [*inference[:-1], replace(inference[-1], compute=Evaluate(top))]
    return Schedule(flat(forward), flat(backward), flat(training), flat(inference), flat(evaluation))


def flat(moves: Sequence[Moves]) -> Actions:
    return tuple(chain.from_iterable(map(Moves.actions, moves)))


def steps_of(
    uses: Sequence[Indices],
    reads_in_backward: Sequence[bool],
    trainable: Sequence[bool],
    parts: Mapping[int, Parts],
) -> tuple[list[Step], list[Step]]:
    """Return the steps of forward, and the steps of backward down to the first trained stage."""
    ascent, descent = list[Step](), list[Step]()
    for stage, units in enumerate(uses):
        ascent.append(Step(Forward(stage), units))
        ascent += parts[stage].forward(stage, units) if stage in parts else ()
    trained = (step.compute.stage for step in ascent if any(trainable[unit] for unit in step.reads))
    for stage in reversed(range(next(trained, len(uses)), len(uses))):
        reads = uses[stage] if reads_in_backward[stage] else ()
        descent.append(Step(Backward(stage), reads, uses[stage]))
        descent += parts[stage].backward(stage, reads, uses[stage]) if stage in parts else ()
    return ascent, descent


def reductions_after(descent: Sequence[Step], trainable: Sequence[bool]) -> list[Actions]:
    """Return the reductions that start after each step of backward.

    A unit's gradient is complete after the last step that adds to it. The reduction starts when fewer
    reductions than the limit are in flight, including reductions of the previous round.
    """
    last = {unit: i for i, step in enumerate(descent) for unit in step.adds if trainable[unit]}
    groups = [[unit for unit in reversed(step.adds) if last.get(unit) == i] for i, step in enumerate(descent)]
    order = [unit for units in groups for unit in units]
    earlier = order[-REDUCTIONS_IN_FLIGHT:] + order  # the last reductions of the previous round come first
    waits = [WaitReduce(unit) for unit in earlier] if len(order) >= REDUCTIONS_IN_FLIGHT else []
    pairs = dict(zip(order, waits, strict=False))
    return [
        tuple(action for unit in units for action in (pairs.get(unit), Reduce(unit)) if action)
        for units in groups
    ]


def plan_moves(
    steps: Sequence[Step],
    prefetch: int,
    gathers: Sequence[bool],
    passing: Collection[int] = (),
    *,
    keep: Collection[int] = (),
    held: Collection[int] = (),
) -> list[Moves]:
    """Return the moves of each step. `held` units are present at the start, `keep` units stay at the end.

    Units in `passing` are released after a step, unless the next step reads them.
    """
    last = {unit: place for place, step in enumerate(steps) for unit in step.reads}
    started = set(held)
    moves = []
    for place, step in enumerate(steps):
        units = [unit for each in steps[place : place + prefetch + 1] for unit in each.reads]
        start = tuple(dict.fromkeys(unit for unit in units if unit not in started and gathers[unit]))
        started.update(start)
        need = tuple(dict.fromkeys(step.reads))
        later = steps[place + 1].reads if place + 1 < len(steps) else ()
        unused = [unit for unit in need if last[unit] == place or (unit in passing and unit not in later)]
        drop = tuple(unit for unit in unused if unit not in keep and gathers[unit])
        started.difference_update(drop)
        moves.append(Moves(step.compute, start, need, drop))
    return moves
