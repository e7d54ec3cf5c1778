"""A step without memory or ranks: the runtime's own module over the real layers, with everything noted.

`ShardedModule` runs as it is. Its transport only notes what is started and waited for, and the device that
it computes on makes arrays that have shapes and nothing else. The script of a step is the list of what
happens on a rank in its order: stretches of computing, starts, waits. No number of ranks changes it, so many
cases share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from zero_mpi import device
from zero_mpi.comm import Handle, Partition
from zero_mpi.comm.base import ModuleMemory
from zero_mpi.device.arrays import BufferPool
from zero_mpi.device.types import Array
from zero_mpi.plan import fake_ops  # noqa: F401  (registers the operations on fake arrays)
from zero_mpi.plan.case import Case, SimulatedComm
from zero_mpi.plan.fake_ops import FakeMemory, without_memory
from zero_mpi.plan.workspaces import Compiled, OnGPU
from zero_mpi.sharding import ShardedModule
from zero_mpi.sharding.host_masters import NONE

COMPUTE, WAIT, GATHER, REDUCE, ALLREDUCE, TOTAL = "compute", "wait", "gather", "reduce", "allreduce", "total"
GATHER_SUMS, NORM, UPDATE = "gather sums", "norm", "update"
TRANSFERS = (GATHER, GATHER_SUMS, REDUCE, ALLREDUCE)
MOST_ROUNDS = 4  # the rounds between the first two and the last are alike
KERNELS = {"cpu": Compiled, "cuda": OnGPU}  # by device
STEPS = 2  # the first finds no buffers, and no transfers of the one before


class StepEvent(NamedTuple):
    """What happens next on a rank: the kind, which transfer of which unit, how much computing."""

    kind: str
    unit: int = -1
    what: str = ""  # of a wait: the kind of the transfer
    flop: float = 0.0
    moved: float = 0.0


@dataclass(frozen=True)
class Simulation:
    """steps: the events of each step; sizes in bytes of what pools held in the end.

    recycled: as `arrays.recycled_stats` tells it, logits included; small: arrays outside that pool.
    """

    steps: tuple[tuple[StepEvent, ...], ...]
    gathered: int
    unpacked: int
    gradient_buffers: int
    recycled: int
    small: int
    logits: int

    @property
    def activations(self) -> int:
        """Bytes of what layers make and keep, but for the logits."""
        return self.recycled + self.small - self.logits


class StepScript:
    """Collects events; what was computed since the last one goes before the next."""

    def __init__(self, memory: FakeMemory) -> None:
        self.memory = memory
        self.events: list[StepEvent] = []

    def note(self, kind: str, unit: int = -1, what: str = "") -> None:
        """Something happens after what was computed."""
        flop, moved = self.memory.spent()
        if flop or moved:
            self.events.append(StepEvent(COMPUTE, flop=flop, moved=moved))
        self.events.append(StepEvent(kind, unit, what))


class SimulatedTransfer(Handle):
    """A transfer of a unit; to wait for it is an event."""

    def __init__(self, script: StepScript, kind: str, unit: int) -> None:
        self.script, self.kind, self.unit = script, kind, unit
        script.note(kind, unit)

    def wait(self) -> None:
        self.script.note(WAIT, self.unit, self.kind)


class ScriptedComm(SimulatedComm):
    """The transport of a case: a collective is an event, and what it gives a module has no memory."""

    def __init__(self, case: Case, script: StepScript, size: int) -> None:
        super().__init__(case)
        self.size, self.case, self.script = size, case, script
        self.numbers = {unit.name: number for number, unit in enumerate(case.layout.units)}

    def shard_group(self) -> ScriptedComm:
        """The ranks of the first node, where each node has all slices."""
        return ScriptedComm(self.case, self.script, self.case.owners)

    def memory(
        self, wholes: Sequence[Partition], buffers: Sequence[int], gathers: Sequence[int] = ()
    ) -> ModuleMemory:
        """As the transport's own: wholes where the owners see one array."""
        empty, shared = device.in_use().empty, self.case.shares_wholes
        return ModuleMemory([empty(w.length) if shared and w.length else None for w in wholes], BufferPool())

    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        what, _, name = label.partition(" ")
        kind = GATHER_SUMS if what == "gradients" else GATHER
        return SimulatedTransfer(self.script, kind, self.numbers[name])

    def reduce_scatter(
        self, full: Array, out: Array, partition: Partition, *, label: str = "", **how: Any
    ) -> Handle:
        return SimulatedTransfer(self.script, REDUCE, self.numbers[label.partition(" ")[2]])

    def allreduce(self, array: Array, label: str = "") -> Handle:
        return SimulatedTransfer(self.script, ALLREDUCE, self.numbers[label.partition(" ")[2]])


class Simulator:
    """A module as it is, over a transport and a device without memory, and the steps that it takes."""

    def __init__(self, case: Case, memory: Compiled | None = None) -> None:
        self.case, self.memory = case, memory or KERNELS[case.device]()
        self.script = StepScript(self.memory)
        with without_memory(self.memory):
            comm = ScriptedComm(case, self.script, case.ranks)
            stages = case.model.stages(case.recompute)
            self.module = ShardedModule(stages, comm, case.strategy, **case.settings)
            self.module.unfilled.clear()

    def step(self) -> tuple[StepEvent, ...]:
        """A step as `train` does it: rounds of micro-batches, the loss, `ShardedAdamW.step`."""
        module, script, rounds = self.module, self.script, len(self.case.rounds)
        tokens = self.case.micro_batch, self.case.context
        with without_memory(self.memory):
            for number in range(rounds):
                x, targets = (self.memory.outside(tokens, np.int64) for _ in range(2))
                module.forward_backward(x, targets, 1.0, last=number == rounds - 1)
                del x, targets
            script.note(TOTAL)
            pending = module.overlapped_sync_gradients()
            script.note(NORM)
            pending.wait()
            module.drop_gathered()
            script.note(UPDATE)
            module.start_updates()
            module.zero_gradients()
        events, script.events = tuple(script.events), []
        return events


def simulate(case: Case, most_rounds: int = MOST_ROUNDS) -> Simulation:
    """The simulation of a case; more than `most_rounds` rounds are simulated as so many."""
    ranks = min(case.nodes, 2) * min(case.per_node, 2)  # all that makes a difference
    return _simulate(
        replace(
            case,
            ranks=ranks,
            nodes=min(case.nodes, 2),
            transport_wanted=case.transport,
            exact_wanted=case.exact,
            batch_size=min(len(case.rounds), most_rounds) * ranks * case.micro_batch,
            async_save=False,
            offload=NONE,
        )
    )


@lru_cache(maxsize=64)
def _simulate(case: Case) -> Simulation:
    simulator = Simulator(case)
    steps = tuple(simulator.step() for _ in range(STEPS))
    module, memory = simulator.module, simulator.memory
    pools = module.parameter_pool, module.unpacked_pool, module.gradient_pool
    gathered, unpacked, gradients = (pool.nbytes for pool in pools)
    return Simulation(steps, gathered, unpacked, gradients, memory.held, memory.small, memory.logits)
