"""A step without arrays or ranks: the runtime's own loops over the real layers, with everything written down.

`ShardedModule` runs as it is; its units here only say what a unit would do: start and wait for transfers,
lend buffers. The script of a step is the list of what happens on a rank in its order: stretches of computing,
starts, waits. No number of ranks changes it, so many cases share one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from zero_mpi import device
from zero_mpi.arrays import Array, BufferPool
from zero_mpi.comm import DONE, Handle
from zero_mpi.device import HOST
from zero_mpi.plan import operations  # noqa: F401  (registers the operations on ghosts)
from zero_mpi.plan.case import Case, Imagined
from zero_mpi.plan.ghost import Room
from zero_mpi.plan.kernels import Compiled, OnGPU
from zero_mpi.sharding import ShardedModule
from zero_mpi.sharding.loss_scale import LossScale
from zero_mpi.sharding.precision import FLOAT32, floats
from zero_mpi.sharding.shard import Views, accumulates_locally
from zero_mpi.sharding.unit import Unit

COMPUTE, WAIT, GATHER, REDUCE, ALLREDUCE, TOTAL = "compute", "wait", "gather", "reduce", "allreduce", "total"
GATHER_SUMS, NORM, UPDATE = "gather sums", "norm", "update"
MOST_ROUNDS = 4  # the rounds between the first two and the last are alike
STEPS = 2  # the first finds no buffers, and no transfers of the one before


class Event(NamedTuple):
    """What happens next on a rank: the kind, which transfer of which unit, how much computing."""

    kind: str
    unit: int = -1
    what: str = ""  # of a wait: the kind of the transfer
    flop: float = 0.0
    moved: float = 0.0


@dataclass(frozen=True)
class Rehearsal:
    """steps: the events of each step; sizes in bytes of what pools held in the end.

    recycled: as `arrays.recycled_stats` tells it, logits included; small: arrays outside that pool.
    """

    steps: tuple[tuple[Event, ...], ...]
    gathered: int
    gradient_buffers: int
    recycled: int
    small: int
    logits: int

    @property
    def activations(self) -> int:
        """Bytes of what layers make and keep, but for the logits."""
        return self.recycled + self.small - self.logits


class Script:
    """Collects events; what was computed since the last one goes before the next."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.events: list[Event] = []

    def note(self, kind: str, unit: int = -1, what: str = "") -> None:
        """Something happens after what was computed."""
        flop, moved = self.room.spent()
        if flop or moved:
            self.events.append(Event(COMPUTE, flop=flop, moved=moved))
        self.events.append(Event(kind, unit, what))

    def cut(self) -> tuple[Event, ...]:
        """The events since the last cut."""
        events, self.events = tuple(self.events), []
        return events


class Transfer(Handle):
    """A transfer of a unit; to wait for it is an event."""

    def __init__(self, script: Script, kind: str, unit: int) -> None:
        self.script, self.kind, self.unit = script, kind, unit
        script.note(kind, unit)

    def wait(self) -> None:
        self.script.note(WAIT, self.unit, self.kind)


class ImaginedUnit:
    """What `ShardedUnit` does, as far as others see it, without memory."""

    def __init__(self, number: int, unit: Unit, module: ImaginedModule, whole: bool) -> None:
        self.number, self.unit, self.name, self.in_use = number, unit, unit.name, False
        self.script, self.strategy = module.script, module.strategy
        self._pools = module.parameter_pool, module.gradient_pool
        room, self._kinds = module.script.room, module.precision
        widens = self._kinds.reduce != FLOAT32  # then a gradient is not summed where it is written
        self._weights, self._to_add = (
            {name: room.outside(param.shape, kind) for name, param in unit.params.items()}
            for kind in (self._kinds.compute, self._kinds.reduce)
        )
        self._common = whole and self.strategy.shards_moments
        self.gathered = self._common or not self.strategy.shards_parameters
        keeps = unit.trainable and not self.strategy.shards_moments
        self._own_gradient = keeps and not whole and not widens
        self._allreduces = keeps and accumulates_locally(module.comm, self.strategy)
        self._gathers_gradient = keeps and not whole and not self._allreduces
        self._in_place = module.comm.sums_in_place and not widens
        self._updates = unit.trainable and not self._common
        self._buffer: Array | None = None
        self._gradient_buffer: Array | None = None
        self._gradients: Views | None = None
        self._gather: Transfer | None = None
        self._reduce: Transfer | None = None
        self.contributions = 0

    def start_gather(self) -> None:
        """As `ShardedUnit.start_gather`."""
        if not self.gathered:
            self._buffer = self._pools[0].take(floats(self.unit.length, self._kinds.compute))
            self.gathered = True
            self._gather = Transfer(self.script, GATHER, self.number)

    def start_update(self) -> None:
        """As `ShardedUnit.start_update`."""
        if self._updates:
            self._gather = Transfer(self.script, GATHER, self.number)

    def wait_gather(self) -> None:
        """As `ShardedUnit.wait_gather`."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None

    wait_update = wait_gather

    def weights(self) -> Views:
        """As `ShardedUnit.weights`."""
        assert self.gathered, f"unit {self.name} is not gathered"
        return self._weights

    def release(self) -> None:
        """As `ShardedUnit.release`."""
        if self._buffer is not None:
            self.wait_gather()
            self._pools[0].give(self._buffer)
            self._buffer = None
        self.gathered = self._common or not self.strategy.shards_parameters

    def gradients(self) -> Views:
        """As `ShardedUnit.gradients`."""
        if not self.unit.trainable:
            return {}
        if self._gradients is None:
            self.wait_reduce()
            in_place = self._own_gradient or (self._in_place and self.contributions == 0)
            if not in_place:
                self._gradient_buffer = self._pools[1].take(floats(self.unit.length, self._kinds.reduce))
            self.script.room.moved += self._kinds.reduce.itemsize * self.unit.length  # it is set to zero
            self._gradients = self._to_add
        return self._gradients

    def start_reduce(self, contributors: int) -> None:
        """As `ShardedUnit.start_reduce`."""
        self.gradients()
        self._gradients = None
        self._reduce = Transfer(self.script, ALLREDUCE if self._allreduces else REDUCE, self.number)
        self.contributions += 1

    def wait_reduce(self) -> None:
        """As `ShardedUnit.wait_reduce`."""
        if self._reduce is not None:
            self._reduce.wait()
            self._reduce = None
            if self._gradient_buffer is not None:
                self._pools[1].give(self._gradient_buffer)
                self._gradient_buffer = None

    def start_gradient_gather(self) -> Handle:
        """As `ShardedUnit.start_gradient_gather`."""
        return Transfer(self.script, GATHER_SUMS, self.number) if self._gathers_gradient else DONE

    def reset(self) -> None:
        """As `ShardedUnit.reset`."""
        self.wait_reduce()
        self.contributions = 0


class ImaginedModule(ShardedModule):
    """The loops of a module, over units without memory; the base's `__init__` would make real ones."""

    comm: Imagined

    def __init__(self, case: Case, script: Script) -> None:
        layout = case.layout
        self.stages, self.strategy, self.script = case.model.stages(case.recompute), case.strategy, script
        self._uses, self.schedule = layout.uses, layout.schedule
        self.comm = self.owners = Imagined(case)
        self.precision, self.loss_scale = case.precision, LossScale()
        self.parameter_pool, self.gradient_pool = BufferPool(where=HOST), BufferPool(where=HOST)
        units: list[Any] = [
            ImaginedUnit(i, unit, self, case.shares_wholes) for i, unit in enumerate(layout.units)
        ]
        self.units = units
        self._saved, self._synced = None, False
        self._reducing = deque()

    def step(self, rounds: int, tokens: tuple[int, int]) -> tuple[Event, ...]:
        """A step as `train` does it: rounds of micro-batches, the loss, `ShardedAdamW.step`."""
        in_use = device.in_use()
        device.adopt(HOST)  # ghosts are nowhere; a GPU that is in use would take them for its own
        try:
            return self._step(rounds, tokens)
        finally:
            device.adopt(in_use)

    def _step(self, rounds: int, tokens: tuple[int, int]) -> tuple[Event, ...]:
        for number in range(rounds):
            x, targets = (self.script.room.outside(tokens, np.int64) for _ in range(2))
            self.forward_backward(x, targets, 1.0, last=number == rounds - 1)
            del x, targets
        self.script.note(TOTAL)
        pending = self.overlapped_sync_gradients()
        for unit in self.units:
            unit.wait_reduce()
        self.script.note(NORM)
        pending.wait()
        self.drop_gathered()
        self.script.note(UPDATE)
        self.broadcast_updated_params()
        self.zero_gradients()
        return self.script.cut()


def kernels_of(case: Case) -> Compiled:
    """Of the case's device."""
    return OnGPU() if case.on_gpu else Compiled()


def rehearse(case: Case, most_rounds: int = MOST_ROUNDS) -> Rehearsal:
    """The rehearsal of a case; more than `most_rounds` rounds are rehearsed as so many."""
    ranks = min(case.nodes, 2) * min(case.per_node, 2)  # all that makes a difference
    return _rehearse(
        Case(
            case.model,
            ranks=ranks,
            nodes=min(case.nodes, 2),
            strategy_name=case.strategy_name,
            transport_wanted=case.transport,
            exact_wanted=case.exact,
            batch_size=min(len(case.rounds), most_rounds) * ranks * case.micro_batch,
            micro_batch=case.micro_batch,
            context=case.context,
            prefetch=case.prefetch,
            bucket_mb=case.bucket_mb,
            frozen=case.frozen,
            recompute=case.recompute,
            precision_name=case.precision_name,
            reduce_dtype=case.reduce_dtype,
            device=case.device,
        )
    )


@lru_cache(maxsize=64)
def _rehearse(case: Case) -> Rehearsal:
    room = Room(kernels_of(case))
    module = ImaginedModule(case, Script(room))
    steps = tuple(module.step(len(case.rounds), (case.micro_batch, case.context)) for _ in range(STEPS))
    gathered, gradients = module.parameter_pool.nbytes, module.gradient_pool.nbytes
    return Rehearsal(steps, gathered, gradients, room.held, room.small, room.logits)
