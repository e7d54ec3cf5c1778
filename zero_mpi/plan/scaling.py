"""One case on 1, 2, 4, ... ranks, and where it stops to scale. The step stays: ranks share its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

from zero_mpi.plan.case import Case
from zero_mpi.plan.machine import Machine
from zero_mpi.plan.rank_memory import plan_memory
from zero_mpi.plan.step_time import save_seconds, step_time, tokens_per_second

MOST_RANKS = 16384
LEAST_EFFICIENCY = 0.5
STAYS = 0.98  # of a rank's memory, by twice the ranks: it no longer falls


@dataclass(frozen=True)
class Point:
    """Some number of ranks. efficiency: tokens a second a rank, over those of one rank alone."""

    ranks: int
    nodes: int
    memory: int
    seconds: float
    exposed: float
    tokens_per_second: float
    efficiency: float
    save: float | None = None  # seconds of a checkpoint


def sweep(case: Case, machine: Machine, per_node: int, most: int) -> list[Point]:
    """A point for each power of two up to `most`."""
    points: list[Point] = []
    for ranks in (1 << power for power in range(most.bit_length())):
        here = replace(case, ranks=ranks, nodes=-(-ranks // per_node))
        time = step_time(here, machine)
        speed = tokens_per_second(here, time)
        alone = points[0].tokens_per_second if points else speed
        taken, save = (plan_memory(here).total, time.seconds, time.exposed), save_seconds(here, machine)
        points.append(Point(ranks, here.nodes, *taken, speed, speed / alone / ranks, save))
    return points


def limits(case: Case, points: Sequence[Point]) -> list[str]:
    """What ends the scaling, each from how many ranks on up to the end, the first of them first."""

    tests: dict[str, Callable[[Point, Point], bool]] = {
        f"efficiency is below {LEAST_EFFICIENCY:.0%}": lambda _, here: here.efficiency < LEAST_EFFICIENCY,
        "memory of a rank no longer falls": lambda before, here: here.memory > STAYS * before.memory,
        "there is less than one micro-batch a rank": lambda _, here: here.ranks > case.rounds.micro_batches,
    }
    found = []
    for reason, test in tests.items():
        outcomes = [(here.ranks, test(before, here)) for before, here in pairwise(points)]
        held = [ranks for ranks, _ in takewhile(lambda outcome: outcome[1], reversed(outcomes))]
        if held:
            found.append((held[-1], reason))
    return [f"from {ranks} ranks on {reason}" for ranks, reason in sorted(found, key=lambda item: item[0])]
