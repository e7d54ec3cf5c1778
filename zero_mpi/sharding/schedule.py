"""Schedules of gathers, computing, releases and reductions: lists of actions, made once by the strategy.

All ranks follow the same lists, also one that has no micro-batch in a round, so collectives pair up. A unit's
gather starts `prefetch` stages before its first use and it is released after its last use in that direction.
The units of the last stage stay between forward and backward, and so does one that distant stages share (a
tied embedding, the root): it is gathered once a micro-batch, others at most twice. A unit is reduced after
the last backward that adds to it, while earlier stages compute; two reductions may be in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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

REDUCTIONS_IN_FLIGHT = 2  # units whose gradients may be in progress while the next one is computed


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
        return "\n".join(f"  {'; '.join(self.told(actions))}" for actions in by_stage(self.training))

    def told(self, actions: Sequence[Action]) -> Iterator[str]:
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

    def of(self, gathers: Sequence[bool]) -> Moves:
        """Return the moves where some units stay whole: these are waited for alone."""
        start, drop = (tuple(u for u in units if gathers[u]) for units in (self.start, self.drop))
        return Moves(start, self.need, drop)

    @property
    def before(self) -> Actions:
        """The actions that make the stage's units whole."""
        return (*map(Gather, self.start), *map(Wait, self.need))

    @property
    def after(self) -> Actions:
        """The actions that give up what is not needed any more."""
        return tuple(map(Release, self.drop))


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
    order = range(len(uses))
    last = next((i for i in order if any(trainable[u] for u in uses[i])), len(uses))
    kept = set(uses[-1]) | {u for u in range(len(trainable)) if distant(uses, u)}
    backward_needs = [uses[i] if reads_in_backward[i] and i >= last else () for i in order]
    carried = kept & {u for units in backward_needs for u in units}

    def moves(needs: Sequence[Indices], keep: set[int], held: set[int]) -> list[Moves]:
        found = plan_moves(needs, prefetch, keep=keep, held=held)
        return found if gathers is None else [around.of(gathers) for around in found]

    up = moves(uses, carried, set())
    down = moves(backward_needs[::-1], set(), carried)[::-1]
    top = len(uses) - 1
    reductions = after_backward(uses, trainable, last)
    forward = [ascent(up[i], Forward(i)) for i in order]
    backward = [(*down[i].before, Backward(i), *down[i].after, *reductions[i], Progress()) for i in order]
    inference = [ascent(m, Forward(i)) for i, m in enumerate(moves(uses, set(), set()))]
    final = moves(uses, set(), set())[top]
    both = up[top] + down[top]
    both_ways = (*both.before, Loss(top), *both.after)
    return Schedule(
        forward=joined(forward),
        backward=joined(backward[last:][::-1]),
        training=joined(
            [*forward[:top], (*both_ways, *reductions[top], Progress()), *backward[last:top][::-1]]
        ),
        inference=joined(inference),
        evaluation=joined([*inference[:top], ascent(final, Evaluate(top))]),
    )


def ascent(moves: Moves, compute: StageAction) -> Actions:
    """Return the actions of one stage in forward."""
    return (*moves.before, compute, *moves.after, Progress())


def joined(lists: Iterable[Actions]) -> Actions:
    """Return one list of several."""
    return tuple(action for actions in lists for action in actions)


def after_backward(uses: Sequence[Indices], trainable: Sequence[bool], last: int) -> list[Actions]:
    """Return for each stage the reductions that start after its backward.

    Each waits until fewer than the limit are in flight, of which the first may be of the round before.
    """
    ready = [
        [u for u in uses[i][::-1] if trainable[u] and first_use(uses, u) == i] if i >= last else []
        for i in range(len(uses))
    ]
    in_order = [unit for units in reversed(ready) for unit in units]
    found: list[Actions] = []
    for units in ready:
        actions: list[Action] = []
        for unit in units:
            if len(in_order) >= REDUCTIONS_IN_FLIGHT:
                actions.append(WaitReduce(in_order[in_order.index(unit) - REDUCTIONS_IN_FLIGHT]))
            actions.append(Reduce(unit))
        found.append(tuple(actions))
    return found


def plan_moves(needs: Sequence[Indices], prefetch: int, *, keep: set[int], held: set[int]) -> list[Moves]:
    """Return moves in order of computation; `held` units are there at the start, `keep` stay at the end."""
    started = set(held)
    found = []
    for position, need in enumerate(needs):
        ahead = [u for units in needs[position : position + prefetch + 1] for u in units if u not in started]
        start = tuple(dict.fromkeys(ahead))
        started.update(start)
        later = {u for units in needs[position + 1 :] for u in units}
        drop = tuple(u for u in dict.fromkeys(need) if u not in later and u not in keep)
        found.append(Moves(start, tuple(dict.fromkeys(need)), drop))
    return found


def first_use(uses: Sequence[Indices], unit: int) -> int:
    """Return the first stage that uses `unit`, where its gradient is complete in backward."""
    return min(i for i, units in enumerate(uses) if unit in units)


def distant(uses: Sequence[Indices], unit: int) -> bool:
    """Return whether stages use `unit` with other stages, which do not, between them."""
    stages = [i for i, units in enumerate(uses) if unit in units]
    return bool(stages) and stages[-1] - stages[0] >= len(stages)
