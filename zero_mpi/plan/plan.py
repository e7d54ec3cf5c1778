"""Everything about one case, worked out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, takewhile
from typing import Any

from zero_mpi.plan.case import Case
from zero_mpi.plan.machine import Machine
from zero_mpi.plan.max_size import Largest, largest
from zero_mpi.plan.rank_memory import Memory, plan_memory
from zero_mpi.plan.step_time import StepTime, save_seconds, step_time, tokens_per_second
from zero_mpi.plan.traffic import Traffic, plan_traffic


@dataclass(frozen=True)
class Plan:
    """What a case will take.

    `fits` is None where no limit of memory is known and `save` where no disk is.
    """

    case: Case
    memory: Memory
    traffic: Traffic
    time: StepTime
    tokens_per_second: float
    fits: Largest | None
    save: float | None  # seconds of a checkpoint

    def as_json(self) -> dict[str, Any]:
        """The numbers by name: bytes and seconds; of traffic, what ranks give away in a step."""
        given = self.traffic
        sums = {
            "rank_0": given.sent[0],
            "most_of_a_rank": given.sent.max(),
            "all": given.sent.sum(),
            "all_inside_nodes": given.inside.sum(),
            "all_between_nodes": given.between.sum(),
            "parameters": (given.parameters_inside + given.parameters_between).sum(),
            "gradients": (given.gradients_inside + given.gradients_between).sum(),
            "vectors": given.vectors.sum(),
        }
        return {
            "strategy": self.case.strategy_name,
            "transport": self.case.transport.name,
            "memory": asdict(self.memory) | {"total": self.memory.total},
            "traffic": {name: int(count) for name, count in sums.items()},
            "time": asdict(self.time) | {"tokens_per_second": self.tokens_per_second},
            "save_seconds": self.save,
            "largest": None if self.fits is None else asdict(self.fits),
        }


def make_plan(case: Case, machine: Machine) -> Plan:
    """The plan of a case."""
    time = step_time(case, machine)
    return Plan(
        case,
        plan_memory(case),
        plan_traffic(case),
        time,
        tokens_per_second(case, time),
        None if machine.memory is None else largest(case, machine.memory),
        save_seconds(case, machine),
    )


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
