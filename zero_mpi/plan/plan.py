"""Plans of cases: memory, traffic and time; sweeps over the number of ranks; largest micro-batch."""

import sys
from bisect import bisect_right
from dataclasses import asdict, dataclass, replace
from typing import Any

from zero_mpi.plan.case import Case
from zero_mpi.plan.machine import Machine
from zero_mpi.plan.rank_memory import Memory, plan_memory
from zero_mpi.plan.step_time import StepTime, step_time, tokens_per_second
from zero_mpi.plan.traffic import Traffic, plan_traffic


@dataclass(frozen=True)
class Plan:
    """Predicted memory, traffic and time of a case."""

    case: Case
    memory: Memory
    traffic: Traffic
    time: StepTime
    tokens_per_second: float
    largest: int | None  # largest micro-batch that fits; None: the memory limit is not known

    def as_json(self) -> dict[str, Any]:
        """Return the plan's numbers by name, in bytes and seconds. Traffic is the bytes sent per step."""
        traffic = self.traffic
        sums = {
            "rank_0": traffic.sent[0],
            "most_of_a_rank": traffic.sent.max(),
            "all": traffic.sent.sum(),
            "all_inside_nodes": traffic.inside.sum(),
            "all_between_nodes": traffic.between.sum(),
            "parameters": (traffic.parameters_inside + traffic.parameters_between).sum(),
            "gradients": (traffic.gradients_inside + traffic.gradients_between).sum(),
            "vectors": traffic.vectors.sum(),
        }
        return {
            "strategy": self.case.strategy_name,
            "transport": self.case.transport.name,
            "memory": asdict(self.memory) | {"total": self.memory.total},
            "traffic": {name: int(count) for name, count in sums.items()},
            "time": asdict(self.time) | {"tokens_per_second": self.tokens_per_second},
            "largest": None if self.largest is None else {"micro_batch": self.largest},
        }


def make_plan(case: Case, machine: Machine) -> Plan:
    """Return the plan of a case."""
    time = step_time(case, machine)
    return Plan(
        case,
        plan_memory(case),
        plan_traffic(case),
        time,
        tokens_per_second(case, time),
        None if machine.memory is None else largest_micro_batch(case, machine.memory),
    )


MOST_RANKS = 16384


@dataclass(frozen=True)
class Point:
    """Prediction for a number of ranks. `efficiency` is the speed per rank, relative to a single rank."""

    ranks: int
    nodes: int
    memory: int
    seconds: float
    exposed: float
    tokens_per_second: float
    efficiency: float


def sweep(case: Case, machine: Machine, per_node: int, most: int) -> list[Point]:
    """Return a point for each power-of-two number of ranks up to `most`."""
    points: list[Point] = []
    for ranks in (1 << power for power in range(most.bit_length())):
        variant = replace(case, ranks=ranks, nodes=-(-ranks // per_node))
        time, memory = step_time(variant, machine), plan_memory(variant).total
        speed = tokens_per_second(variant, time)
        base = points[0].tokens_per_second if points else speed
        efficiency = speed / base / ranks
        points.append(Point(ranks, variant.nodes, memory, time.seconds, time.exposed, speed, efficiency))
    return points


MOST = 256  # largest micro-batch that is tried


def largest_micro_batch(case: Case, limit: int) -> int:
    """Return the largest micro-batch that fits into `limit` bytes per rank: 0 for none, MOST for all."""

    def total(rows: int) -> int:  # bytes per rank for micro-batches of `rows` sequences
        try:
            variant = replace(case, micro_batch=rows, batch_size=rows * case.rounds.micro_batches)
            return plan_memory(variant).total
        except MemoryError:  # too large for the address space
            return sys.maxsize

    return bisect_right(range(1, MOST + 1), limit, key=total)
