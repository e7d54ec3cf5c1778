"""Losses without gradients: micro-batches are dealt out as in training, each loss keeps its place.

The losses of all ranks are added in one vector; a rank fills the places of its own micro-batches. Only zeros
are added to these, so the vector does not depend on the number of ranks, nor does any sum of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zero_mpi import device
from zero_mpi.device.types import Array
from zero_mpi.nn.loss import HeadLoss, PartLosses
from zero_mpi.sharding.grad_accum import Criterion, Rounds, no_losses, ordered_total
from zero_mpi.sharding.module import ShardedModule
from zero_mpi.telemetry import spans


@dataclass(frozen=True, eq=False)
class PartedBatch:
    """A micro-batch of which each part has a loss of its own.

    x, targets   (b, T) ids
    parts        indices of targets, such as (row, slice(3, 9)); targets in no part do not count
    first        the place of the first part's loss among those of all micro-batches
    scale        factor of the loss; 0: the number of targets that are not the most likely ids
    """

    x: Any
    targets: Any
    parts: Sequence[Any]
    first: int
    scale: float = 1.0


def evaluate(
    module: ShardedModule, micro_batches: int, read: Callable[[int], tuple[Any, Criterion | HeadLoss]]
) -> float:
    """Return the summed loss over `micro_batches`, dealt out as in training, without gradients. Collective.

    `read(i)` gives input and criterion of micro-batch i.
    """

    def compute(number: int, losses: Array) -> None:
        x, criterion = read(number)
        if isinstance(criterion, HeadLoss):
            losses[number] = module.losses(x, criterion)[0]
        else:
            losses[number] = criterion(module.forward(x, training=False))[0]

    return ordered_total(dealt_out(module, micro_batches, micro_batches, compute))


def part_losses(
    module: ShardedModule,
    micro_batches: int,
    count: int,
    read: Callable[[int], PartedBatch],
    after: Callable[[int], None] | None = None,
) -> Array:
    """Return the losses of all parts in nats, (count,) float64, the same on all ranks. Collective.

    `read(i)` gives micro-batch i. A loss is the sum over its part's targets. `after` as in `dealt_out`.
    """

    def compute(number: int, losses: Array) -> None:
        batch = read(number)
        found = module.losses(batch.x, PartLosses(batch.targets, batch.parts, batch.scale))
        for place, loss in enumerate(found, batch.first):
            losses[place] = loss

    return dealt_out(module, micro_batches, count, compute, after=after)


def dealt_out(
    module: ShardedModule,
    micro_batches: int,
    count: int,
    compute: Callable[[int, Array], None],
    idle: Callable[[], Any] | None = None,
    after: Callable[[int], None] | None = None,
) -> Array:
    """Return `count` losses; compute(i, losses) fills in those of micro-batch i on its rank. Collective.

    idle: called on a rank without a micro-batch in a round, in the place of the module's forward
    after: called on all ranks after each round, with the number of ranks that had a micro-batch in it
    """
    idle = idle or (lambda: module.forward(None, training=False))
    with spans.during(spans.STEPS, "evaluation"):
        rounds = Rounds(micro_batches, module.comm.rank, module.comm.size)
        losses = no_losses(count)
        for number in range(len(rounds)):
            if (micro_batch := rounds.micro_batch(number)) is None:
                idle()
            else:
                compute(micro_batch, losses)
            if after is not None:
                after(rounds.contributors(number))
        return module.comm.sum_vector(device.in_use().to_host(losses))
