"""When each unit is gathered, released and reduced: lists per stage, worked out once, equal on all ranks.

A unit is started `prefetch` stages before its first use and dropped after its last use in that direction.
The units of the last stage stay between forward and backward, and so does one that several distant stages
share (a tied embedding, the root): it is gathered once a micro-step. Others are gathered at most twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Indices = tuple[int, ...]


@dataclass(frozen=True)
class StagePlan:
    """What happens around one stage in one direction; numbers are units."""

    start: Indices  # gathers to start before the stage computes
    need: Indices  # units whose gather must be complete
    drop: Indices  # units to release after it
    reduce: Indices = ()  # units whose gradient is complete after it (backward)


@dataclass(frozen=True)
class Schedule:
    """The plans of the stages: forward, forward without a backward to come, backward (by stage number)."""

    forward: tuple[StagePlan, ...]
    evaluate: tuple[StagePlan, ...]
    backward: tuple[StagePlan, ...]
    last_backward: int  # backward ends at this stage: below it nothing is trained


def make_schedule(
    uses: Sequence[Indices], reads_in_backward: Sequence[bool], trainable: Sequence[bool], prefetch: int
) -> Schedule:
    """The schedule for stages that use the units `uses[stage]`.

    `reads_in_backward[stage]`: whether the stage's backward looks at its parameters; `trainable[unit]`.
    """
    count = len(uses)
    last = next((i for i in range(count) if any(trainable[u] for u in uses[i])), count)
    order = range(count)
    kept = set(uses[-1]) | {u for u in range(len(trainable)) if distant(uses, u)}
    backward_needs = [uses[i] if reads_in_backward[i] and i >= last else () for i in order]
    backward_units = {u for units in backward_needs for u in units}
    carried = kept & backward_units
    forward = plan(uses, prefetch, keep=carried, held=set())
    evaluate = plan(uses, prefetch, keep=set(), held=set())
    backward = plan(backward_needs[::-1], prefetch, keep=set(), held=carried)[::-1]
    reduced = [
        tuple(u for u in uses[i][::-1] if trainable[u] and first_use(uses, u) == i) if i >= last else ()
        for i in order
    ]
    with_reduce = tuple(StagePlan(p.start, p.need, p.drop, reduced[i]) for i, p in enumerate(backward))
    return Schedule(forward, evaluate, with_reduce, last)


def plan(needs: Sequence[Indices], prefetch: int, *, keep: set[int], held: set[int]) -> tuple[StagePlan, ...]:
    """Plans in order of computation; `held` units are there at the start, `keep` stay at the end."""
    started = set(held)
    plans = []
    for position, need in enumerate(needs):
        ahead = [u for units in needs[position : position + prefetch + 1] for u in units if u not in started]
        start = tuple(dict.fromkeys(ahead))
        started.update(start)
        later = {u for units in needs[position + 1 :] for u in units}
        drop = tuple(u for u in dict.fromkeys(need) if u not in later and u not in keep)
        plans.append(StagePlan(start, tuple(dict.fromkeys(need)), drop))
    return tuple(plans)


def first_use(uses: Sequence[Indices], unit: int) -> int:
    """The first stage that uses `unit`, where its gradient is complete in backward."""
    return min(i for i, units in enumerate(uses) if unit in units)


def distant(uses: Sequence[Indices], unit: int) -> bool:
    """Whether stages use `unit` with others, that do not, between them."""
    stages = [i for i, units in enumerate(uses) if unit in units]
    return bool(stages) and stages[-1] - stages[0] >= len(stages)
