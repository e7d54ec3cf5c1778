"""Gradient accumulation: a step of M micro-batches dealt out to the ranks in rounds.

Micro-batch i is computed by rank i mod P in round i div P, and after each round its gradients are added in
the order of ranks. So every element is summed over the micro-batches in the order 0 ... M - 1 whatever the
number of ranks, also when it does not divide M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.arguments import FLOATING, array, came, instance, same_names, whole
from zero_mpi.comm.agree import agreed
from zero_mpi.device.arrays import Scalar
from zero_mpi.device.types import Array
from zero_mpi.nn.loss import HeadLoss
from zero_mpi.sharding.module import ShardedModule
from zero_mpi.telemetry import log, spans

Criterion = Callable[[Any], tuple[Scalar, Any]]  # output of the model -> (loss, its gradient)


class Rounds:
    """Distribution of M micro-batches among the ranks."""

    def __init__(self, micro_batches: int, rank: int, ranks: int) -> None:
        self.micro_batches = whole("micro-batches per step, over all ranks", micro_batches, least=1)
        self.rank, self.ranks = rank, ranks

    def __len__(self) -> int:
        return -(-self.micro_batches // self.ranks)

    def mine(self, number: int) -> int | None:
        """Return this rank's micro-batch in round `number`; None if it has none."""
        index = number * self.ranks + self.rank
        return index if index < self.micro_batches else None

    def contributors(self, number: int) -> int:
        """Return the number of ranks that have a micro-batch in round `number`: the first ones."""
        return min(self.ranks, self.micro_batches - number * self.ranks)


class GradAccum:
    """Accumulator of one step of `steps` micro-batches, counted over all ranks, on a ShardedModule.

        for micro_batch in accum:
            accum.accumulate(*read(step, micro_batch))

    is a step: its rounds one after the other, on every rank. Then it is `complete`, `losses` holds one entry
    a micro-batch, and the optimizer may step. After an error that all ranks caught, `reset` begins anew.
    Making one is collective; raises ValueError for fewer than one micro-batch a step, UsageError where ranks
    differ in it.
    """

    def __init__(self, module: ShardedModule, steps: int) -> None:
        instance("GradAccum: module", module, ShardedModule, "a ShardedModule")
        self.module = module
        self.rounds = agreed(module.comm, "this GradAccum", lambda: self._look(module, steps))
        self.losses = no_losses(self.rounds.micro_batches)
        self.round = 0
        self._since = module.forgotten  # its value when the step began
        self._inside = False  # a round that was begun and has not come to its end
        warn_of_idle(self.rounds)

    def _look(self, module: ShardedModule, steps: int) -> tuple[Rounds, dict[str, object]]:
        """Return the rounds, and the facts that ranks must share."""
        try:
            rounds = Rounds(steps, module.comm.rank, module.comm.size)
        except ValueError as error:
            raise ValueError(f"GradAccum: {error}") from None
        return rounds, {"the number of micro-batches": rounds.micro_batches}

    @property
    def complete(self) -> bool:
        """Return whether all rounds of the step are done."""
        return self.round == len(self.rounds)

    @property
    def next_micro_batch(self) -> int | None:
        """Number of the micro-batch that this rank computes next; None: it has none in the coming round."""
        return self.rounds.mine(0 if self._begins else self.round)

    def __iter__(self) -> Iterator[int | None]:
        """Yield the rounds of a step that are still to come: for each the number of this rank's micro-batch.

        None if this rank has none: it takes part in the round all the same. Whoever leaves the loop early
        continues with the next loop where it stopped, or forgets what was accumulated by `reset`; after that
        inside the loop it gives the first round again. Raises ValueError if the step is complete and was not
        used, and if a round went by without `accumulate`.
        """
        self._check_ready()
        while True:
            coming, forgotten = 0 if self._begins else self.round, self.module.forgotten
            yield self.rounds.mine(coming)
            if self.round == coming + 1 and self.complete:
                return
            if self.round != coming + 1 and self.module.forgotten == forgotten:
                raise ValueError(
                    f"round {coming} of {len(self.rounds)} was not accumulated; expected one call of "
                    "GradAccum.accumulate for each micro-batch of the loop, also where it is None"
                )

    def reset(self) -> None:
        """Forget what was accumulated, and what an error left half done: the next round is a step's first.

        For errors that all ranks raised in the same place and caught, such as one of `read`: where only some
        did, the others wait for them in the round, and the job has to end. Collective.
        """
        self.module.drop_gathered()
        self.module.zero_gradients()
        self._begin()

    def _begin(self) -> None:
        """Begin a step of rounds."""
        self.round, self._since, self._inside = 0, self.module.forgotten, False
        self.losses = no_losses(self.rounds.micro_batches)

    @property
    def _begins(self) -> bool:
        """Return whether the next round is a step's first: the one before is complete, or was forgotten."""
        return self.complete or self._since != self.module.forgotten

    def accumulate(self, x: Any, criterion: Criterion | HeadLoss | None = None) -> Scalar | None:
        """Run one round: forward, loss and backward of this rank's micro-batch. Returns its loss.

        A rank without one in this round (`next_micro_batch` is None) passes None and gets None. `criterion`
        maps the output to (loss, gradient), both scaled by 1 over the tokens of the whole step. Collective;
        raises ValueError if a rank without a micro-batch gives one, or the reverse.
        """
        mine = self.next_micro_batch
        self._check(x, criterion, mine)
        return self._one_round(mine, lambda: self._forward_backward(x, criterion))

    def add_gradients(self, gradients: Mapping[str, Array] | None, loss: float = 0.0) -> None:
        """Run one round with gradients that were computed elsewhere, in place of `accumulate`. Collective.

        `gradients`: for each parameter that is not frozen, by name, those of this rank's micro-batch in full
        shape, scaled as in `accumulate`; a rank without a micro-batch in this round passes None. In a round
        all ranks add gradients, or all accumulate. `loss` is the micro-batch's part of `total_loss`. Raises
        ValueError for missing or surplus names, other shapes, and None or gradients on the wrong rank.
        """
        mine = self.next_micro_batch
        self._check_ready()
        self._check_turn(gradients, mine, "its gradients")
        self._check_given(gradients, loss)
        self._one_round(mine, lambda: self._add(gradients, loss))

    def _one_round(self, mine: int | None, work: Callable[[], Scalar | None]) -> Scalar | None:
        if self._begins:
            self._begin()
        self._inside, self.module.tallies.micro_batches = True, self.rounds.micro_batches
        if spans.active is not None:
            spans.active.begin_micro_batch(mine)
        with spans.during(spans.STEPS, "round", str(self.round)):
            loss = work()
        if spans.active is not None:
            spans.active.begin_micro_batch(None)
        if mine is not None and loss is not None:
            self.losses[mine] = loss
        self.round, self._inside = self.round + 1, False
        return loss

    def _check(self, x: Any, criterion: Any, mine: int | None) -> None:
        """Raise ValueError unless this round can begin."""
        self._check_ready()
        self._check_turn(x, mine, "its input")
        if x is not None and criterion is None:
            raise ValueError("accumulate needs a criterion: without a loss there is no gradient")
        if criterion is not None and not callable(criterion) and not isinstance(criterion, HeadLoss):
            raise ValueError(
                f"accumulate: criterion: expected a function of the output, got {came(criterion)}"
            )

    def _check_turn(self, given: Any, mine: int | None, wanted: str) -> None:
        """Raise ValueError unless a value is given where this rank has a micro-batch, and only there."""
        if (given is None) != (mine is None):
            raise ValueError(
                f"round {0 if self._begins else self.round} of {len(self.rounds)}: rank {self.rounds.rank} "
                f"{'has no' if mine is None else 'needs a'} micro-batch; pass "
                f"{'None' if mine is None else wanted}"
            )

    def _check_given(self, gradients: Any, loss: Any) -> None:
        """Raise ValueError for anything but None or all gradients by name, and a loss."""
        instance("add_gradients: loss", loss, Real, "a number")
        if gradients is None:
            return
        instance("add_gradients", gradients, Mapping, "a mapping of names to arrays")
        wanted = [name for name in self.module.params if self.module.is_trainable(name)]
        same_names("add_gradients: the gradients do not fit the model", gradients, wanted)
        for name in wanted:
            array(f"add_gradients: {name}", gradients[name], self.module.params[name].shape, kinds=FLOATING)

    def _check_ready(self) -> None:
        """Raise ValueError unless there is a round to come."""
        if self._since != self.module.forgotten:
            return
        if self.complete:
            raise ValueError(
                f"accumulate: all {len(self.rounds)} rounds of this step are done; call ShardedAdamW.step "
                "(or GradAccum.reset, to forget them) before the next step's first"
            )
        if self._inside:
            raise ValueError(
                f"accumulate: round {self.round} of {len(self.rounds)} ended in an error; call "
                "GradAccum.reset on all ranks, which forgets the step, before its first round"
            )

    @property
    def _place(self) -> tuple[int, bool]:
        """The number of ranks with a micro-batch in this round, and whether the round is the last."""
        return self.rounds.contributors(self.round), self.round == len(self.rounds) - 1

    def _add(self, gradients: Mapping[str, Array] | None, loss: float) -> Scalar:
        contributors, last = self._place
        self.module.add_gradients(gradients, contributors=contributors, last=last)
        return loss

    def _forward_backward(self, x: Any, criterion: Criterion | HeadLoss | None) -> Scalar | None:
        """Run both directions in one go where the last stage computes the loss. The collectives are the same
        either way, so a rank without a micro-batch need not know."""
        contributors, last = self._place
        if isinstance(criterion, HeadLoss):
            return self.module.forward_backward(x, criterion, contributors=contributors, last=last)
        output, loss, dy = self.module.forward(x, training=True), None, None
        if criterion is not None and x is not None:
            with spans.during(spans.COMPUTE, "loss"):
                loss, dy = criterion(output)
        self.module.backward(dy, contributors=contributors, last=last)
        return loss

    def total_loss(self) -> float:
        """Return the step's loss: the micro-batches' losses, summed in their order. Collective."""
        return self.totals()[0]

    def totals(self, *flags: float) -> tuple[float, ...]:
        """Return the step's loss, and the sums over ranks of `flags`, small integers. One collective."""
        losses = device.in_use().to_host(self.losses)
        totals = self.module.comm.sum_vector(np.append(losses, flags))
        return ordered_total(totals[: self.losses.size]), *totals[self.losses.size :].tolist()


def warn_of_idle(rounds: Rounds) -> None:
    """Warn, on rank 0, where some ranks never have a micro-batch."""
    idle = rounds.ranks - rounds.micro_batches
    if idle > 0 and rounds.rank == 0:
        log.warning(
            "%d of %d ranks have nothing to compute: a step has %d micro-batch(es); start fewer ranks, or "
            "use more micro-batches",
            idle,
            rounds.ranks,
            rounds.micro_batches,
        )


def no_losses(micro_batches: int) -> Array:
    """Return zeros for the loss of each micro-batch, on the device: nobody waits for a single one."""
    return device.in_use().zeros(micro_batches, np.float64)


def ordered_total(values: Array) -> float:
    """Return the sum of a vector from first to last."""
    return float(np.cumsum(values)[-1])
