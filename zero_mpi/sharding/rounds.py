"""Assignment of the micro-batches of a step or an evaluation to the ranks, in rounds.

Rank i mod P computes micro-batch i in round i div P, and gradients are added in rank order after each round.
Every element is thus summed over the micro-batches in order, for any number of ranks.

The losses of all ranks are all-reduced in one vector. A rank fills the positions of its own micro-batches and
leaves zeros elsewhere, so neither the vector nor its sum depends on the number of ranks.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.arguments import whole
from zero_mpi.device.arrays import Scalar
from zero_mpi.device.types import Array
from zero_mpi.nn.loss import HeadLoss
from zero_mpi.sharding.module import ShardedModule
from zero_mpi.telemetry import log, spans

Criterion = Callable[[Any], tuple[Scalar, Any]]  # output of the model -> (loss, its gradient)


class Rounds:
    """Assignment of M micro-batches to the ranks."""

    def __init__(self, micro_batches: int, rank: int, ranks: int) -> None:
        self.micro_batches = whole("micro-batches per step, over all ranks", micro_batches, least=1)
        self.rank, self.ranks = rank, ranks

    def __len__(self) -> int:
        return -(-self.micro_batches // self.ranks)

    def micro_batch(self, number: int) -> int | None:
        """Return this rank's micro-batch in round `number`; None if it has none."""
        index = number * self.ranks + self.rank
        return index if index < self.micro_batches else None

    def contributors(self, number: int) -> int:
        """Return the number of ranks that have a micro-batch in round `number`: always the first ranks."""
        return min(self.ranks, self.micro_batches - number * self.ranks)


class Accumulator:
    """Runner of the rounds of each step on a ShardedModule.

        for micro_batch in accumulator:
            accumulator.accumulate(*read(step, micro_batch))

    runs a step. `losses` then holds one entry per micro-batch. `zero_mpi.compat.GradAccum`, which scripts
    use, also checks the order of calls.
    """

    def __init__(self, module: ShardedModule, rounds: Rounds) -> None:
        self.module, self.rounds = module, rounds
        self.begin()
        idle = rounds.ranks - rounds.micro_batches
        if idle > 0 and rounds.rank == 0:
            few = f"{idle} of {rounds.ranks} ranks have nothing to compute: a step has {rounds.micro_batches}"
            log.warning("%s micro-batch(es); start fewer ranks, or use more micro-batches", few)

    def __iter__(self) -> Iterator[int | None]:
        """Yield the number of this rank's micro-batch, or None, for each round of a step."""
        self.begin()
        for number in range(len(self.rounds)):
            yield self.rounds.micro_batch(number)

    def begin(self) -> None:
        self.round = 0
        self.losses = device.in_use().zeros(self.rounds.micro_batches, np.float64)  # not read now: no wait

    def accumulate(self, x: Any, criterion: Criterion | HeadLoss | None = None) -> Scalar | None:
        """Run one round: forward, loss and backward of this rank's micro-batch. Return its loss. Collective.

        A rank without a micro-batch in this round passes None and gets None. `criterion` maps the output to
        (loss, gradient), both scaled by 1 over the tokens of the full step; in fp16 the output is float32.
        """

        def work(contributors: int, last: bool) -> Scalar | None:
            # A rank without a micro-batch runs the same code, because it must start the same collectives.
            if isinstance(criterion, HeadLoss):
                return self.module.forward_backward(x, criterion, contributors=contributors, last=last)
            output, loss, dy = self.module.forward(x, training=True), None, None
            if criterion is not None and x is not None:
                with spans.during(spans.COMPUTE, "loss"):
                    wide = output.astype(np.float32) if self.module.loss_scale.dynamic else output
                    loss, dy = criterion(wide)  # not in fp16, in which the unscaled gradient would vanish
            self.module.backward(dy, contributors=contributors, last=last)
            return loss

        return self.run_round(work)

    def run_round(self, work: Callable[[int, bool], Scalar | None]) -> Scalar | None:
        """Call work(number of ranks with a micro-batch, whether the round is the last); record its loss."""
        micro_batch, last = self.rounds.micro_batch(self.round), self.round == len(self.rounds) - 1
        self.module.tallies.micro_batches = self.rounds.micro_batches
        if spans.active is not None:
            spans.active.begin_micro_batch(micro_batch)
        with spans.during(spans.STEPS, "round", str(self.round)):
            loss = work(self.rounds.contributors(self.round), last)
        if spans.active is not None:
            spans.active.begin_micro_batch(None)
        if micro_batch is not None and loss is not None:
            self.losses[micro_batch] = loss
        self.round += 1
        return loss

    def totals(self, *flags: float) -> tuple[float, ...]:
        """Return the step's loss, and the sums of `flags` (small integers) over ranks. One collective."""
        losses = device.in_use().to_host(self.losses)
        totals = self.module.comm.sum_vector(np.append(losses, flags))
        return ordered_total(totals[: self.losses.size]), *totals[self.losses.size :].tolist()


def part_losses(
    module: ShardedModule,
    micro_batches: int,
    count: int,
    read: Callable[[int], tuple[Any, HeadLoss, int]],
    after: Callable[[int], None] | None = None,
) -> Array:
    """Return the loss of each part, summed over the part's targets: (count,) float64. Collective.

    `read(i)` returns x, a loss, and the index of the first part of micro-batch i. `after`: see `dealt_out`.
    """

    def compute(number: int, losses: Array) -> None:
        x, loss, first = read(number)
        for index, part_loss in enumerate(module.losses(x, loss), first):
            losses[index] = part_loss

    return dealt_out(module, micro_batches, count, compute, after=after)


def dealt_out(
    module: ShardedModule,
    micro_batches: int,
    count: int,
    compute: Callable[[int, Array], None],
    idle: Callable[[], Any] | None = None,
    after: Callable[[int], None] | None = None,
) -> Array:
    """Return `count` losses; compute(i, losses) sets the losses of micro-batch i on its rank. Collective.

    idle: called on a rank without a micro-batch in a round, instead of the module's forward
    after: called on all ranks after each round, with the number of ranks that had a micro-batch in it
    """
    idle = idle or (lambda: module.forward(None, training=False))
    with spans.during(spans.STEPS, "evaluation"):
        rounds = Rounds(micro_batches, module.comm.rank, module.comm.size)
        losses = device.in_use().zeros(count, np.float64)
        for number in range(len(rounds)):
            if (micro_batch := rounds.micro_batch(number)) is None:
                idle()
            else:
                compute(micro_batch, losses)
            if after is not None:
                after(rounds.contributors(number))
        return module.comm.sum_vector(device.in_use().to_host(losses))


def ordered_total(values: Array) -> float:
    """Return the sum of a vector, added from first to last."""
    return float(np.cumsum(values)[-1])
