"""A micro-batch during its pass through the stages: the values that the computing actions read and write.

Layers also report numbers for each micro-batch: auxiliary losses, and data for buffer updates. `Tallies` sums
them. Each micro-batch has a row in a table, which its rank fills. Rows are added in order, so the sums do not
depend on the number of ranks.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from numbers import Real
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.arguments import came
from zero_mpi.comm import Comm
from zero_mpi.device.arrays import Scalar
from zero_mpi.device.types import Array
from zero_mpi.nn.batch import BatchContext, Documents, Packed, StageWeights
from zero_mpi.nn.layer import Gradients, Stage, Tally, Weights
from zero_mpi.nn.linear import is_adapter
from zero_mpi.nn.loss import HeadLoss
from zero_mpi.sharding.actions import Action, Turn
from zero_mpi.sharding.parameters import union
from zero_mpi.telemetry import spans


class MicroBatch:
    """Activations, saved values and gradients of a micro-batch; without a micro-batch, x is None.

    module     the ShardedModule that computes it
    keeps      whether a backward follows; the values that it needs are then kept in `saved`
    loss_of    the loss that the last stage computes
    adapted    False: the products of adapters are left out, as if they were zero
    """

    def __init__(
        self,
        module: Any,
        x: Any,
        *,
        keeps: bool = True,
        loss_of: HeadLoss | None = None,
        adapted: bool = True,
    ) -> None:
        self.module, self.keeps, self.loss_of, self.adapted = module, keeps, loss_of, adapted
        self.contributors = module.comm.size
        self.is_idle = x is None
        documents = Documents(x) if isinstance(x, Packed) else None
        factors = module.tallies.factors(module.loss_scale.factor) if keeps else {}
        self.batch = BatchContext(documents, factors)
        self.x: Any = None if x is None else device.in_use().from_host(as_input(x))
        self.saved: dict[int, Any] = {}
        self.dy: Any = None
        self.loss: Scalar | None = None
        self.losses: list[Scalar] = []
        self.rest: Iterator[Action] = iter(())  # remaining actions; a stage executes them up to its next turn

    def _weights(self, units: Iterable[int]) -> dict[str, Any]:
        weights = union([self.module.units[unit].weights() for unit in units])
        return {name: x for name, x in weights.items() if self.adapted or not is_adapter(name)}

    def _gradients(self, units: Iterable[int]) -> Gradients:
        return union([self.module.units[unit].gradients() for unit in units])

    def _stage_weights(self, stage: int, reads: bool = True) -> StageWeights:
        self.batch.stage = stage
        turns = partial(self._turns, stage) if stage in self.module.parts else None
        return StageWeights(self._weights(self.module.uses[stage]) if reads else {}, self.batch, turns)

    def turn(self, turn: Turn) -> None: ...

    def _next_turn(self) -> Turn:
        """Execute the actions before the next turn of the current stage; return the turn."""
        while True:
            action = next(self.rest)
            action.do(self.module.units, self)
            if isinstance(action, Turn):
                return action

    def _turns(self, stage: int, p: StageWeights, g: Gradients) -> Iterator[tuple[slice, Weights, Gradients]]:
        """Yield the parts of a stage's stacked parameters, after executing the actions before each turn."""
        parts, label = self.module.parts[stage], self.module.stages[stage].scope
        for _ in parts.members:
            spans.lap(spans.COMPUTE, "part", label)
            turn = self._next_turn()
            spans.lap(spans.BETWEEN, "before", label)
            members = parts.members[turn.number]
            weights = p | {name: p[name][members] for name in parts.names if name in p}
            gradients = {name: g[name][members] for name in parts.names if name in g}
            gradients |= self._gradients(turn.adds)
            yield members, weights | self._weights(parts.units[turn.number]), gradients

    def forward(self, stage: int) -> None:
        layer, weights = self.module.stages[stage].layer, self._stage_weights(stage)
        with spans.computing("forward", self.module.stages[stage].scope):
            self.x, saved = layer.forward(weights, self.x)
        if self.keeps:
            self.saved[stage] = saved

    def loss_and_backward(self, stage: int) -> None:
        """Compute the loss, and dy for the previous stage, which in fp16 is multiplied by the loss scale."""
        layer, factor = self.module.stages[stage].layer, self.module.loss_scale.factor
        weights, gradients = self._stage_weights(stage), self._gradients(self.module.uses[stage])
        assert self.loss_of is not None, "training needs a loss"
        with spans.computing("loss", self.module.stages[stage].scope):
            self.loss, self.dy = self.loss_of.train(layer, weights, self.x, gradients, factor)
        self.x = None

    def evaluate(self, stage: int) -> None:
        """Compute the loss of each part separately; rows that are in no part get no logits."""
        layer, weights = self.module.stages[stage].layer, self._stage_weights(stage)
        assert self.loss_of is not None, "evaluation needs a loss"
        with spans.computing("loss", self.module.stages[stage].scope):
            self.losses = self.loss_of.evaluate(layer, weights, self.x)

    def backward(self, stage: int) -> None:
        """Compute dy for the previous stage; saved values are dropped as soon as they are used."""
        layer, saved = self.module.stages[stage].layer, self.saved.pop(stage)
        weights = self._stage_weights(stage, layer.backward_reads_params)
        gradients = self._gradients(self.module.uses[stage])
        with spans.computing("backward", self.module.stages[stage].scope):
            self.dy = layer.backward(weights, saved, self.dy, gradients)

    def progress(self) -> None:
        self.module.group.progress()


def as_input(x: Any) -> Any:
    """Return `x` as the layers' input (ids if it is `Packed`); raise ValueError for other values."""
    if isinstance(x, str | bytes | list | Real):
        raise ValueError(f"forward: expected an array, got {came(x)}")
    return x.ids if isinstance(x, Packed) else x


class Tallies:
    """The tallies that a model's layers declare, and their sums over the micro-batches of a step."""

    def __init__(self, kinds: Mapping[str, Tally]) -> None:
        self.kinds = kinds
        self.scales = {name: kind.scale for name, kind in kinds.items() if kind.scale}
        self.micro_batches = 1  # number of micro-batches of a step, over all ranks
        self.rounds: list[dict[str, Any]] = []  # values reported by this rank's micro-batches of the step
        self._sums: dict[str, Array] = {}

    def factors(self, loss_scale: float) -> dict[str, float]:
        """Return each auxiliary loss's factor for a micro-batch, times `loss_scale`."""
        return {name: scale * loss_scale / self.micro_batches for name, scale in self.scales.items()}

    def sums(self, comm: Comm) -> dict[str, Array]:
        """Return name -> float64 sum over the step's micro-batches, or mean for losses. Collective."""
        if self.kinds and self.rounds:
            rows = [self._row(reported) for reported in self.rounds]
            table = np.zeros((len(rows), comm.size, rows[0].size))
            table[:, comm.rank] = rows
            total = np.zeros(rows[0].size)
            for row in comm.sum_vector(table.reshape(-1)).reshape(-1, total.size):
                total += row
            cuts = np.cumsum([1, *(prod(kind.shape) for kind in self.kinds.values())])
            count, *parts = np.split(total, cuts[:-1])
            for (name, kind), part in zip(self.kinds.items(), parts, strict=True):
                self._sums[name] = part.reshape(kind.shape) / (1 if kind.scale is None else max(1, count[0]))
            self.rounds.clear()
        return self._sums

    def _row(self, reported: Mapping[str, Any]) -> Array:
        """Return the table row of a micro-batch: 1, then its numbers; all zeros without a micro-batch."""
        host, row = {name: device.in_use().to_host(x) for name, x in reported.items()}, [np.ones(1)]
        for name, kind in self.kinds.items():
            value = kind.value(host) if kind.value and host else host.get(name, 0.0)
            row.append(np.broadcast_to(np.asarray(value, np.float64), kind.shape).reshape(-1))
        return np.concatenate(row) * bool(host)


def tallies_of(stages: Iterable[Stage], scales: Mapping[str, float] | None) -> Tallies:
    """Return the tallies of a model; `scales` replace the scales that layers declare for auxiliary losses.

    Raises ValueError for a scale without a loss, and for layers that declare different tallies with one name.
    """
    kinds: dict[str, Tally] = {}
    for stage in stages:
        for name, tally in stage.layer.tallies().items():
            if kinds.setdefault(name, tally) != tally:
                raise ValueError(f"tally {name}: layers declare different tallies, {kinds[name]} and {tally}")
    for name, scale in (scales or {}).items():
        if name not in kinds or kinds[name].scale is None:
            raise ValueError(f"auxiliary: {name} is not an auxiliary loss of the model")
        kinds[name] = replace(kinds[name], scale=scale)
    return Tallies(kinds)
