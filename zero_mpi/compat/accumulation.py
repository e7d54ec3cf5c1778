"""Accumulation that scripts use: that of the engine, with checks of the order of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any

from zero_mpi.arguments import FLOATING, array, came, instance, same_names
from zero_mpi.comm.agree import agreed
from zero_mpi.compat.module import ShardedModule
from zero_mpi.device.arrays import Scalar
from zero_mpi.device.types import Array
from zero_mpi.nn.loss import HeadLoss
from zero_mpi.sharding.grad_accum import Accumulator, Criterion, Rounds


class GradAccum(Accumulator):
    """Accumulator of steps of `steps` micro-batches each, counted over all ranks; see the engine.

    After its rounds a step is `complete`, and the optimizer may step. After an error that all ranks caught,
    `reset` begins anew. Making one is collective; raises ValueError for fewer than one micro-batch a step,
    UsageError where ranks differ in it.
    """

    module: ShardedModule

    def __init__(self, module: ShardedModule, steps: int) -> None:
        instance("GradAccum: module", module, ShardedModule, "a ShardedModule")

        def look() -> tuple[Rounds, dict[str, object]]:
            try:
                rounds = Rounds(steps, module.comm.rank, module.comm.size)
            except ValueError as error:
                raise ValueError(f"GradAccum: {error}") from None
            return rounds, {"the number of micro-batches": rounds.micro_batches}

        super().__init__(module, agreed(module.comm, "this GradAccum", look))
        self.begin()

    def begin(self) -> None:
        """Begin a step of rounds."""
        super().begin()
        self._since = self.module.forgotten  # its value when the step began
        self._inside = False  # whether a round was begun and has not come to its end

    @property
    def complete(self) -> bool:
        """Return whether all rounds of the step are done."""
        return self.round == len(self.rounds)

    @property
    def _coming(self) -> int:
        """The next round: a step's first if the one before is complete, or was forgotten."""
        return 0 if self.complete or self._since != self.module.forgotten else self.round

    @property
    def next_micro_batch(self) -> int | None:
        """Number of the micro-batch that this rank computes next; None: it has none in the coming round."""
        return self.rounds.mine(self._coming)

    def __iter__(self) -> Iterator[int | None]:
        """Yield this rank's micro-batch, or None, of each round of a step that is still to come.

        Whoever leaves the loop early goes on with the next loop where it stopped; `reset` begins the step
        again, also inside the loop. Raises ValueError if a complete step was not used, and for a round that
        was not accumulated.
        """
        self._check_ready()
        while True:
            coming, forgotten = self._coming, self.module.forgotten
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

        For errors that all ranks raised in the same place and caught, such as one of `read`. Collective.
        """
        self.module.drop_gathered()
        self.module.zero_gradients()
        self.begin()

    def accumulate(self, x: Any, criterion: Criterion | HeadLoss | None = None) -> Scalar | None:
        """Run one round; see the engine. Collective.

        Raises ValueError if a rank without a micro-batch gives one, or the reverse.
        """
        self._check_turn(x, "its input")
        if x is not None and criterion is None:
            raise ValueError("accumulate needs a criterion: without a loss there is no gradient")
        if criterion is not None and not callable(criterion) and not isinstance(criterion, HeadLoss):
            raise ValueError(
                f"accumulate: criterion: expected a function of the output, got {came(criterion)}"
            )
        return super().accumulate(x, criterion)

    def add_gradients(self, gradients: Mapping[str, Array] | None, loss: float = 0.0) -> None:
        """Run one round with gradients that were computed elsewhere, in place of `accumulate`. Collective.

        `gradients`: those of all trained parameters by name, in full shape, scaled as in `accumulate`; None
        on a rank without a micro-batch. `loss` is the micro-batch's part of `total_loss`. Raises ValueError
        for other names or shapes, and None or gradients on the wrong rank.
        """
        self._check_turn(gradients, "its gradients")
        instance("add_gradients: loss", loss, Real, "a number")
        if gradients is not None:
            instance("add_gradients", gradients, Mapping, "a mapping of names to arrays")
            wanted = [name for name in self.module.params if self.module.is_trainable(name)]
            same_names("add_gradients: the gradients do not fit the model", gradients, wanted)
            for name in wanted:
                shape = self.module.params[name].shape
                array(f"add_gradients: {name}", gradients[name], shape, kinds=FLOATING)

        def add(contributors: int, last: bool) -> Scalar:
            self.module.add_gradients(gradients, contributors=contributors, last=last)
            return loss

        self.run_round(add)

    def run_round(self, work: Callable[[int, bool], Scalar | None]) -> Scalar | None:
        """Run a round, of a new step where the one before is complete or was forgotten."""
        if self._coming == 0:
            self.begin()
        self._inside = True
        loss = super().run_round(work)
        self._inside = False
        return loss

    def total_loss(self) -> float:
        """Return the step's loss: the micro-batches' losses, summed in their order. Collective."""
        return self.totals()[0]

    def _check_turn(self, given: Any, wanted: str) -> None:
        """Raise ValueError unless a round can begin, with a value where this rank has a micro-batch."""
        self._check_ready()
        mine = self.next_micro_batch
        if (given is None) != (mine is None):
            raise ValueError(
                f"round {self._coming} of {len(self.rounds)}: rank {self.rounds.rank} "
                f"{'has no' if mine is None else 'needs a'} micro-batch; pass "
                f"{'None' if mine is None else wanted}"
            )

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
