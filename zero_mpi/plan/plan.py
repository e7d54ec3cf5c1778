"""Plans of cases: memory, traffic and time; sweeps over the number of ranks; the largest sizes that fit."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import gcd
from operator import itemgetter
from typing import Any

from zero_mpi.models import ModelConfig
from zero_mpi.models.model_config import elements
from zero_mpi.plan.case import Case
from zero_mpi.plan.machine import Machine
from zero_mpi.plan.rank_memory import Memory, plan_memory
from zero_mpi.plan.step_time import StepTime, save_seconds, step_time, tokens_per_second
from zero_mpi.plan.traffic import Traffic, plan_traffic


@dataclass(frozen=True)
class Plan:
    """Memory, traffic and time that a case will take."""

    case: Case
    memory: Memory
    traffic: Traffic
    time: StepTime
    tokens_per_second: float
    fits: Largest | None  # None: no limit of memory is known
    save: float | None  # seconds of a checkpoint; None: no disk is known

    def as_json(self) -> dict[str, Any]:
        """Return the numbers by name: bytes and seconds; for traffic, the bytes that ranks send in a step."""
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
    """Return the plan of a case."""
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
STAYS = 0.98  # if twice the ranks need this share of a rank's memory, it no longer falls


@dataclass(frozen=True)
class Point:
    """Plan for one number of ranks. efficiency: tokens per second per rank, relative to a single rank."""

    ranks: int
    nodes: int
    memory: int
    seconds: float
    exposed: float
    tokens_per_second: float
    efficiency: float
    save: float | None = None  # seconds of a checkpoint


def sweep(case: Case, machine: Machine, per_node: int, most: int) -> list[Point]:
    """Return a point for each power of two up to `most`."""
    points: list[Point] = []
    for ranks in (1 << power for power in range(most.bit_length())):
        here = replace(case, ranks=ranks, nodes=-(-ranks // per_node))
        time, memory = step_time(here, machine), plan_memory(here).total
        speed = tokens_per_second(here, time)
        alone = points[0].tokens_per_second if points else speed
        took = memory, time.seconds, time.exposed, speed, speed / alone / ranks
        points.append(Point(ranks, here.nodes, *took, save_seconds(here, machine)))
    return points


def limits(case: Case, points: Sequence[Point]) -> list[str]:
    """Return what limits the scaling, each from some number of ranks up to the end, the first one first."""
    tests: dict[str, Callable[[Point, Point], bool]] = {
        f"efficiency is below {LEAST_EFFICIENCY:.0%}": lambda _, here: here.efficiency < LEAST_EFFICIENCY,
        "memory per rank no longer falls": lambda before, here: here.memory > STAYS * before.memory,
        "there is less than one micro-batch per rank": lambda _, here: here.ranks > case.rounds.micro_batches,
    }
    first = dict[str, int]()
    for reason, test in tests.items():
        for before, here in reversed([*pairwise(points)]):
            if not test(before, here):
                break
            first[reason] = here.ranks
    return [f"from {ranks} ranks on {reason}" for reason, ranks in sorted(first.items(), key=itemgetter(1))]


BLOCK = re.compile(r"blk\.([0-9]+)\.(.*)")
MOST = 256  # limit of blocks, sequences, or multiples of the least width; a plan of more blocks takes seconds


@dataclass(frozen=True)
class Largest:
    """Largest sizes that fit: sequences in a micro-batch; depth; width; elements of the largest models.

    0 if not even the smallest fits; `MOST` means that more may fit.
    """

    micro_batch: int
    layers: int
    layers_parameters: int
    width: int
    width_parameters: int


def largest(case: Case, limit: int) -> Largest:
    """Return the sizes that fit into `limit` bytes of a rank, one size changed at a time."""
    model = case.model
    # Number of equal steps of the width, each of full heads and the key/value heads that belong to them.
    steps = gcd(model.head_count, getattr(model, "head_count_kv", model.head_count), model.embedding_length)

    def rows(count: int) -> Case:  # as many micro-batches as before
        return replace(case, micro_batch=count, batch_size=count * case.rounds.micro_batches)

    def deep(count: int) -> Case:
        return replace(case, model=stored_alike(replace(model, block_count=count), model))

    def wide(count: int) -> Case:
        return replace(case, model=stored_alike(widened(model, count, steps), model))

    def fitting(changed: Callable[[int], Case]) -> tuple[int, int]:
        """Return the largest number that fits, and the elements of the model then."""

        def total(count: int) -> int:
            try:
                return plan_memory(changed(count)).total
            except MemoryError:  # this machine lacks even the address space of a unit's buffers
                return sys.maxsize

        count = most(total, limit)
        return count, elements(changed(count).model) if count else 0

    (widest, of_wide), (layers, of_deep) = fitting(wide), fitting(deep)
    width = model.embedding_length // steps * widest
    return Largest(fitting(rows)[0], layers, of_deep, width, of_wide)


def stored_alike(model: ModelConfig, like: ModelConfig) -> ModelConfig:
    """Return `model`, of another size than `like`, with its base stored in the same types of blocks."""
    if like.lora is None or not like.stored:
        return model
    kinds, found = like.stored, []
    for name, param in model.params().items():
        number = BLOCK.match(name)
        known = f"blk.{int(number[1]) % like.block_count}.{number[2]}" if number else name
        if known in kinds and param.size % kinds[known].elements == 0:
            found.append((name, kinds[known]))
    return replace(model, lora=replace(like.lora, stored=tuple(found)))


def most(size: Callable[[int], int], limit: int) -> int:
    """Return the largest integer up to MOST whose size is within the limit; 0 if not even 1 is.

    Sizes grow almost linearly. The search begins where a line through two of them meets the limit, takes
    growing strides from there, and bisects the rest: each size costs a simulation.
    """
    low, high, stride = 0, MOST + 1, 1  # low fits; high does not, or exceeds the limit MOST
    first, second = size(2), size(4)
    slope = max(1, second - first) / 2
    probe = min(max(1, 4 + int((limit - second) / slope)), MOST)  # where the line meets the limit
    while high - low > 1:
        if size(probe) <= limit:
            low, probe = probe, probe + stride
        else:
            high, probe = probe, probe - stride
        stride *= 2
        if not low < probe < high:
            probe = (low + high) // 2
    return low


def widened(model: ModelConfig, count: int, steps: int) -> ModelConfig:
    """Return the model `count` steps wide instead of `steps`; feed-forward keeps its ratio to the width."""
    names = ("embedding_length", "head_count", "head_count_kv")
    changed: dict[str, Any] = {
        name: getattr(model, name) // steps * count for name in names if hasattr(model, name)
    }
    wanted = model.feed_forward_length * changed["embedding_length"] / model.embedding_length
    return replace(model, feed_forward_length=max(1, round(wanted)), **changed)
