"""Schedules of gathers, computing, releases and reductions: lists of actions, made once by the strategy.

All ranks follow the same lists, also one that has no micro-batch in a round, so collectives pair up. A unit's
gather starts `prefetch` stages before its first use and it is released after its last use in that direction.
The units of the last stage stay between forward and backward, and so does one that distant stages share (a
tied embedding, the root): it is gathered once a micro-batch, others at most twice. A unit is reduced after
the last backward that adds to it, while earlier stages compute; two reductions may be in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby, takewhile

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
    UnitAction,
    Wait,
    WaitReduce,
    by_stage,
    without,
)

Indices = tuple[int, ...]

REDUCTIONS_IN_FLIGHT = 2  # units whose gradients may be under way while the next one is computed


@dataclass(frozen=True)
class Schedule:
    """Actions of a rank with a micro-batch, or without one in a round in which others have one.

    forward, backward   the two directions by themselves
    training            both, with the last stage run both ways at once
    inference           forward without a backward to come
    evaluation          that forward, with the loss of the last stage
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
        """The units whose gradients are reduced, in the order in which that starts."""
        return tuple(action.unit for action in self.backward if isinstance(action, Reduce))

    @cached_property
    def first_gathers(self) -> Indices:
        """The units whose gathers start before the first stage computes."""
        leading = takewhile(lambda action: isinstance(action, Gather), self.forward)
        return tuple(action.unit for action in leading if isinstance(action, Gather))

    @cached_property
    def without_reductions(self) -> Schedule:
        """The schedule of a round whose gradients stay on the rank, to be reduced with a later round's."""
        backward, training = (without(REDUCING, actions) for actions in (self.backward, self.training))
        return replace(self, backward=backward, training=training)

    def __str__(self) -> str:
        return "\n".join(f"  {'; '.join(self._in_words(actions))}" for actions in by_stage(self.training))

    def _in_words(self, actions: Actions) -> Iterator[str]:
        """Yield the actions in words, those of one kind that follow each other together."""
        spoken = (action for action in actions if action.verb)
        for verb, alike in groupby(spoken, lambda action: action.verb):
            yield f"{verb} {' '.join(map(self._name, alike))}"

    def _name(self, action: Action) -> str:
        if isinstance(action, StageAction):
            return self.stage_names[action.stage] if self.stage_names else str(action.stage)
        assert isinstance(action, UnitAction)
        return self.unit_names[action.unit] if self.unit_names else str(action.unit)


# ------------------------------------------------------------------------------------- how a list is made


@dataclass(frozen=True)
class Moves:
    """Moves of units around one stage in one direction, or in both at once."""

    start: Indices  # gathers to start before the stage computes
    need: Indices  # units whose parameters it reads
    drop: Indices  # units to release after it

    def __add__(self, other: Moves) -> Moves:
        need = tuple(dict.fromkeys(self.need + other.need))  # a unit of both is waited for once
        return Moves(self.start + other.start, need, self.drop + other.drop)

    def around(self, compute: StageAction, reductions: Actions = ()) -> Actions:
        """Return the actions of a stage."""
        before = (*map(Gather, self.start), *map(Wait, self.need))
        return (*before, compute, *map(Release, self.drop), *reductions, Progress())


def make_schedule(
    uses: Sequence[Indices],
    reads_in_backward: Sequence[bool],
    trainable: Sequence[bool],
    prefetch: int,
    *,
    gathers: Sequence[bool] | None = None,
) -> Schedule:
    """Return the schedule for stages that use the units `uses[stage]`.

    `reads_in_backward[stage]`: whether the stage's backward looks at its parameters; `trainable[unit]`;
    `gathers[unit]`: whether its parameters are gathered and released, as those that are sharded; None: all.
    """
    stages, top = range(len(uses)), len(uses) - 1
    users = [[stage for stage in stages if unit in uses[stage]] for unit in range(len(trainable))]
    trained = [stage for stage in stages if any(trainable[unit] for unit in uses[stage])]
    descent = range(top, trained[0] - 1, -1) if trained else range(0)  # the stages that backward visits
    reads = [uses[stage] if reads_in_backward[stage] else () for stage in descent]
    distant = {unit for unit, using in enumerate(users) if using and using[-1] - using[0] >= len(using)}
    carried = ({*uses[top]} | distant) & {unit for units in reads for unit in units}

    plan = partial(plan_moves, prefetch=prefetch, gathers=gathers or [True] * len(trainable))
    up = plan(uses, keep=carried)
    down = dict(zip(descent, plan(reads, held=carried), strict=True))
    alone = plan(uses)  # without a backward to come
    reductions = reductions_after(descent, uses, users, trainable)

    forward = [up[stage].around(Forward(stage)) for stage in stages]
    backward = [down[stage].around(Backward(stage), reductions[stage]) for stage in descent]
    inference = [alone[stage].around(Forward(stage)) for stage in stages]
    both = up[top] + down.get(top, Moves((), (), ()))
    at_top = both.around(Loss(top), reductions.get(top, ()))
    training = [*forward[:top], at_top, *backward[1:]]
    evaluation = [*inference[:top], alone[top].around(Evaluate(top))]
    directions = joined(forward), joined(backward)
    return Schedule(*directions, joined(training), joined(inference), joined(evaluation))


def joined(lists: Iterable[Actions]) -> Actions:
    """Return several lists as one."""
    return tuple(action for actions in lists for action in actions)


def reductions_after(
    descent: Sequence[int], uses: Sequence[Indices], users: Sequence[Sequence[int]], trainable: Sequence[bool]
) -> dict[int, Actions]:
    """Return for each stage that backward visits the reductions that start after it.

    A unit's gradient is complete after the first stage that uses it. Its reduction waits until fewer than the
    limit are in flight, of which the first may be of the round before.
    """
    complete = {
        stage: [unit for unit in reversed(uses[stage]) if trainable[unit] and users[unit][0] == stage]
        for stage in descent
    }
    order = [unit for units in complete.values() for unit in units]
    earlier = order[-REDUCTIONS_IN_FLIGHT:] + order  # the last ones of the round before come first
    waits = [WaitReduce(unit) for unit in earlier] if len(order) >= REDUCTIONS_IN_FLIGHT else []
    pairs = dict(zip(order, waits, strict=False))
    return {
        stage: joined((pairs[unit], Reduce(unit)) if pairs else (Reduce(unit),) for unit in units)
        for stage, units in complete.items()
    }


def plan_moves(
    needs: Sequence[Indices],
    prefetch: int,
    gathers: Sequence[bool],
    *,
    keep: Collection[int] = (),
    held: Collection[int] = (),
) -> list[Moves]:
    """Return moves in order of computation; `held` units are there at the start, `keep` stay at the end."""
    started = set(held)
    found = []
    for position, need in enumerate(needs):
        ahead = [unit for units in needs[position : position + prefetch + 1] for unit in units]
        start = tuple(dict.fromkeys(unit for unit in ahead if unit not in started and gathers[unit]))
        started.update(start)
        later = {unit for units in needs[position + 1 :] for unit in units}
        read = tuple(dict.fromkeys(need))
        drop = (unit for unit in read if unit not in later and unit not in keep and gathers[unit])
        found.append(Moves(start, read, tuple(drop)))
    return found
