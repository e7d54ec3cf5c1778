"""Simulated step without memory or ranks: runs the runtime's module and layers and records events.

`ShardedModule` runs unchanged. The transport only records starts and waits, and the device makes arrays that
have shapes but no data. The script of a step lists a rank's events in order: computing, starts, waits. More
than two nodes, or than two ranks on a node, do not change a script, so many cases share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from zero_mpi import device, ops
from zero_mpi.comm import Handle, Partition
from zero_mpi.comm.base import ModuleMemory, ReduceScatter
from zero_mpi.device.arrays import BufferPool
from zero_mpi.device.types import Array
from zero_mpi.nn import CrossEntropy, Packed
from zero_mpi.nn.loss import Distilled, HeadLoss, Segment, SequenceLoss
from zero_mpi.plan import fake_ops  # noqa: F401  (registers the operations on fake arrays)
from zero_mpi.plan.case import Case, SimulatedComm
from zero_mpi.plan.fake_ops import FakeMemory, without_memory
from zero_mpi.plan.workspaces import Compiled, OnGPU
from zero_mpi.sharding.module import ShardedModule
from zero_mpi.sharding.parameters import NONE

COMPUTE, WAIT, GATHER, REDUCE, ALLREDUCE, TOTAL = "compute", "wait", "gather", "reduce", "allreduce", "total"
GATHER_SUMS, SUMS, NORM, UPDATE = "gather sums", "sums", "norm", "update"
TRANSFERS = (GATHER, GATHER_SUMS, REDUCE, ALLREDUCE)
MOST_ROUNDS = 4  # maximum number of simulated rounds; rounds between the second and the last are equal
KERNELS = {"cpu": Compiled, "cuda": OnGPU}  # counters of the operations' memory, by device
RECORD = np.dtype([("ids", "<u4", (1,)), ("logp", "<f4", (1,)), ("rest", "<f4")])  # a teacher's record
STEPS = 2  # only the second step finds buffers and transfers of a previous step


class StepEvent(NamedTuple):
    """Event on a rank: its kind, its unit and, for computing, the FLOP and the moved bytes."""

    kind: str
    unit: int = -1
    transfer: str = ""  # for a wait: its kind
    flop: float = 0.0
    moved_bytes: float = 0.0


@dataclass(frozen=True)
class Simulation:
    """Result of a simulation: the events of each step, and the bytes in memory pools at the end.

    `recycled`: as in `arrays.Recycler.nbytes`, logits included. `small`: arrays too small for that pool.
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
        return self.recycled + self.small - self.logits


class StepScript:
    """Collector of events; `note` first adds an event for the computing since the previous event."""

    def __init__(self, memory: FakeMemory) -> None:
        self.memory = memory
        self.events: list[StepEvent] = []

    def note(self, kind: str, unit: int = -1, transfer: str = "") -> None:
        flop, moved = self.memory.spent()
        if flop or moved:
            self.events.append(StepEvent(COMPUTE, flop=flop, moved_bytes=moved))
        self.events.append(StepEvent(kind, unit, transfer))


class SimulatedTransfer(Handle):
    """Transfer of a unit; waiting for it is an event."""

    def __init__(self, script: StepScript, kind: str, unit: int) -> None:
        self.script, self.kind, self.unit = script, kind, unit
        script.note(kind, unit)

    def wait(self) -> None:
        self.script.note(WAIT, self.unit, self.kind)


class ScriptedComm(SimulatedComm):
    """Transport of a case that records collectives as events and returns arrays without memory."""

    def __init__(self, case: Case, script: StepScript, size: int) -> None:
        super().__init__(case)
        self.size, self.case, self.script = size, case, script
        self.numbers = {unit.name: number for number, unit in enumerate(case.layout.units)}

    def shard_group(self) -> ScriptedComm:
        return ScriptedComm(self.case, self.script, self.case.owners)

    def memory(
        self, full: Sequence[Partition], buffers: Sequence[int], gathers: Sequence[int] = ()
    ) -> ModuleMemory:
        """Return fake memory: full arrays if the transport's ranks share them."""
        empty, shared = device.in_use().empty, self.case.shares_full
        return ModuleMemory([empty(w.length) if shared and w.length else None for w in full], BufferPool())

    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        purpose, _, name = label.partition(" ")
        kind = GATHER_SUMS if purpose == "gradients" else GATHER
        return SimulatedTransfer(self.script, kind, self.numbers[name])

    def _reduce(self, call: ReduceScatter) -> Handle:
        return SimulatedTransfer(self.script, REDUCE, self.numbers[call.label.partition(" ")[2]])

    def allreduce(self, array: Array, label: str = "") -> Handle:
        return SimulatedTransfer(self.script, ALLREDUCE, self.numbers[label.partition(" ")[2]])


class FakeDistilled(Distilled):
    """Distillation loss on fake arrays, with as much memory as the real loss."""

    def divergence(self, z: Any, mask: Any, records: Array) -> tuple[Any, Any]:
        return 0.0, ops.cross_entropy(self.cool(z), mask.view(np.uint8), 1.0)[1]

    def cool(self, z: Any) -> Any:
        z.memory.passes(z, z)
        return z.memory.take(z.shape, z.dtype)


class Simulator:
    """Runner of simulated steps: the real module with a transport and a device without memory."""

    def __init__(self, case: Case, memory: Compiled | None = None) -> None:
        self.case, self.memory = case, memory or KERNELS[case.device]()
        self.script = StepScript(self.memory)
        with without_memory(self.memory):
            comm = ScriptedComm(case, self.script, case.ranks)
            stages = case.model.stages(case.recompute)
            self.module = ShardedModule(stages, comm, case.layout_config)

    def step(self) -> tuple[StepEvent, ...]:
        """Run a step as `train` does: passes without backward, rounds of micro-batches, optimizer step."""
        module, script, rounds = self.module, self.script, len(self.case.rounds)
        with without_memory(self.memory):
            for adapted in self.case.scoring_passes:
                for _ in range(rounds):
                    module.losses(self.input(), self.loss(), adapted=adapted)
                script.note(SUMS)
            for number in range(rounds):
                module.forward_backward(self.input(), self.loss(), last=number == rounds - 1)
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

    def input(self) -> Array | Packed:
        shape = self.case.micro_batch, self.case.context
        ids, begins = self.memory.outside(shape, np.int64), self.memory.outside(shape, np.int64)
        return Packed(ids, begins) if self.case.packed else ids

    def loss(self) -> HeadLoss:
        """Return the loss of a micro-batch, made by the code of training."""
        case, shape = self.case, (self.case.micro_batch, self.case.context)
        if case.preference is not None:
            half, targets, segments = case.context // 2, np.zeros(shape, np.int64), list[Segment]()
            for row in range(shape[0]):
                for begin in (0, half):
                    answer = begin + half // 2 * case.preference.learns_prompts
                    segments.append(Segment(row, slice(answer, begin + half), targets))
                    if answer > begin:
                        segments.append(Segment(row, slice(begin, answer), targets))
            return SequenceLoss(segments, lambda sums: (0.0, [1.0] * len(sums)))
        if case.teacher:
            targets, records = np.zeros(shape, np.int64), np.zeros(shape[0] * shape[1], RECORD)
            return FakeDistilled(targets, 1.0, records, 0.5, 1.0, vocab=case.model.vocab_size)
        return CrossEntropy(self.memory.outside(shape, np.int64), 1.0)


def simulate(case: Case, most_rounds: int = MOST_ROUNDS) -> Simulation:
    """Return the simulation of a case; at most `most_rounds` rounds are simulated."""
    ranks = min(case.nodes, 2) * min(case.per_node, 2)  # more nodes or ranks would give the same events
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
    return Simulation(steps, gathered, unpacked, gradients, memory.recycled, memory.small, memory.logits)
