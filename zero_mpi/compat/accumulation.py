"""Gradient accumulation for scripts: the engine's class, with checks of the order of calls."""

from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any

from zero_mpi.arguments import FLOATING, array, instance, same_names
from zero_mpi.comm.agree import agreed
from zero_mpi.compat.module import ShardedModule
from zero_mpi.device.arrays import Scalar
from zero_mpi.device.types import Array
from zero_mpi.nn.loss import HeadLoss
from zero_mpi.sharding.rounds import Accumulator, Criterion, Rounds


class GradAccum(Accumulator):
    """Accumulator of `steps` micro-batches per step, over all ranks; see `sharding.rounds.Accumulator`.

    After all rounds of a step, `complete` is True and the optimizer may step. After an error that all ranks
    caught, `reset` restarts the step. The constructor is collective. It raises ValueError for fewer than one
    micro-batch per step, and UsageError if ranks give different numbers.
    """

    module: ShardedModule

    def __init__(self, module: ShardedModule, steps: int) -> None:
        instance("GradAccum: module", module, ShardedModule, "a ShardedModule")

        def prepare() -> tuple[Rounds, dict[str, object]]:
            try:
                rounds = Rounds(steps, module.comm.rank, module.comm.size)
            except ValueError as error:
                raise ValueError(f"GradAccum: {error}") from None
            return rounds, {"the number of micro-batches": rounds.micro_batches}

        super().__init__(module, agreed(module.comm, "this GradAccum", prepare))

    def begin(self) -> None:
        super().begin()
        self._clears_at_start = self.module.forgotten  # value of the module's `forgotten` when the step began
        self._in_round = False  # True during a round, and after an error in a round

    @property
    def complete(self) -> bool:
        return self.round == len(self.rounds)

    @property
    def _next_round(self) -> int:
        """Number of the next round: 0 if the previous step is complete or its gradients were cleared."""
        return 0 if self.complete or self._clears_at_start != self.module.forgotten else self.round

    @property
    def next_micro_batch(self) -> int | None:
        """Number of the micro-batch that this rank computes next; None if it has none in the next round."""
        return self.rounds.micro_batch(self._next_round)

    def __iter__(self) -> Iterator[int | None]:
        """Yield this rank's micro-batch, or None, for each remaining round of the step.

        After a `break` the next loop continues at the same round; `reset` restarts the step, even inside the
        loop. Raise ValueError if the gradients of a complete step were not used, or a round was not
        accumulated.
        """
        self._check_ready()
        while True:
            number, forgotten = self._next_round, self.module.forgotten
            yield self.rounds.micro_batch(number)
            if self.round == number + 1 and self.complete:
                return
            if self.round != number + 1 and self.module.forgotten == forgotten:
                raise ValueError(
                    f"round {number} of {len(self.rounds)} was not accumulated; expected one call of "
                    "GradAccum.accumulate for each micro-batch of the loop, even if it is None"
                )

    def reset(self) -> None:
        """Drop the accumulated gradients and an unfinished round; the next round is the first of a step.

        Use it after an error, such as a failed read, that all ranks caught at the same point. Collective.
        """
        self.module.drop_gathered()
        self.module.zero_gradients()
        self.begin()

    def accumulate(self, x: Any, criterion: Criterion | HeadLoss | None = None) -> Scalar | None:
        """Run one round; see `Accumulator.accumulate`. Collective.

        Raises ValueError if a rank without a micro-batch passes x, or a rank with a micro-batch passes None.
        """
        self._check_turn(x, "its input")
        if x is not None and criterion is None:
            raise ValueError("accumulate needs a criterion: without a loss there is no gradient")
        if criterion is not None:
            instance("accumulate: criterion", criterion, (Callable, HeadLoss), "a function of the output")
        return super().accumulate(x, criterion)

    def add_gradients(self, gradients: Mapping[str, Array] | None, loss: float = 0.0) -> None:
        """Run one round with gradients that the script has computed, instead of `accumulate`. Collective.

        `gradients`: name -> full gradient of each trained parameter, scaled as in `accumulate`; None on a
        rank without a micro-batch. `loss` is the micro-batch's part of `total_loss`. Raises ValueError for
        wrong names or shapes, or if only one of gradients and micro-batch is present.
        """
        self._check_turn(gradients, "its gradients")
        instance("add_gradients: loss", loss, Real, "a number")
        if gradients is not None:
            instance("add_gradients", gradients, Mapping, "a mapping of names to arrays")
            names = [name for name in self.module.params if self.module.is_trainable(name)]
            same_names("add_gradients: the gradients do not fit the model", gradients, names)
            for name in names:
                shape = self.module.params[name].shape
                array(f"add_gradients: {name}", gradients[name], shape, kinds=FLOATING)

        def add(contributors: int, last: bool) -> Scalar:
            self.module.add_gradients(gradients, contributors=contributors, last=last)
            return loss

        self.run_round(add)

    def run_round(self, work: Callable[[int, bool], Scalar | None]) -> Scalar | None:
        """Run a round. It begins a step if the previous one is complete or its gradients were cleared."""
        if self._next_round == 0:
            self.begin()
        self._in_round = True
        loss = super().run_round(work)
        self._in_round = False
        return loss

    def total_loss(self) -> float:
        """Return the step's loss: the micro-batches' losses, summed in their order. Collective."""
        return self.totals()[0]

    def _check_turn(self, argument: Any, label: str) -> None:
        """Raise ValueError if no round can begin, or only one of `argument` and the micro-batch is None."""
        self._check_ready()
        micro_batch = self.next_micro_batch
        if (argument is None) != (micro_batch is None):
            raise ValueError(
                f"round {self._next_round} of {len(self.rounds)}: rank {self.rounds.rank} "
                f"{'has no' if micro_batch is None else 'needs a'} micro-batch; pass "
                f"{'None' if micro_batch is None else label}"
            )

    def _check_ready(self) -> None:
        """Raise ValueError unless another round may begin."""
        if self._clears_at_start != self.module.forgotten:
            return
        if self.complete:
            raise ValueError(
                f"accumulate: all {len(self.rounds)} rounds of this step are done; call ShardedAdamW.step "
                "(or GradAccum.reset, to discard them) before the next step"
            )
        if self._in_round:
            raise ValueError(
                f"accumulate: round {self.round} of {len(self.rounds)} ended in an error; call "
                "GradAccum.reset on all ranks to discard this step, then repeat it from its first round"
            )
