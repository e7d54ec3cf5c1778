"""Everything about one case, worked out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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
