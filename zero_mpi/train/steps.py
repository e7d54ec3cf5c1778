"""Makes the steps of a session: reads data, computes gradients and totals, updates, calls observers.

Training (`trainer`) and verification (`verify`) run the same steps.
"""

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from zero_mpi.checkpoint.state import TrainingProgress
from zero_mpi.config.optimizer import schedule_of
from zero_mpi.device.types import Array
from zero_mpi.nn.experts import LOAD
from zero_mpi.sharding.rounds import Accumulator, Rounds
from zero_mpi.telemetry import spans
from zero_mpi.train.objective import StepLoss
from zero_mpi.train.observers import HeldOutLoss, Observer, StepMade
from zero_mpi.train.setup import Session


class Steps:
    """Loop over the steps of a session, beginning at its current progress.

    observers   observers of each step, which are called in this order
    pace        context manager around each micro-batch
    """

    def __init__(self, session: Session) -> None:
        self.session, self.progress = session, session.progress
        comm, micro_batches = session.module.comm, session.loader.micro_batches
        self.accumulator = Accumulator(session.module, Rounds(micro_batches, comm.rank, comm.size))
        self.rate = schedule_of(session.config)
        self.losses: StepLoss
        self.sums: list[float] = []  # `StepLoss.sums` of the current step, over all ranks
        self.observers: list[Observer] = []
        self.pace: contextlib.AbstractContextManager[object] = contextlib.nullcontext()

    def step(self) -> bool:
        """Make one optimizer step. Return True on all ranks if the run must stop after it. Collective."""
        number = self.progress.step
        for observer in self.observers:
            observer.begins(number + 1)
        start = time.perf_counter()
        self.rounds(number)
        loss, stop = self.totals()
        figures, lr = self.tally_figures(), self.rate(number)
        result = self.session.optimizer.step(lr=lr, max_norm=self.session.config.grad_clip or None)
        self.progress = self.after_a_step()
        record = {"step": number + 1, "loss": loss, "grad_norm": result.grad_norm, "lr": lr}
        record |= {"tokens": self.progress.tokens, **self.losses.figures(self.sums), **figures}
        step = StepMade(number + 1, loss, result, time.perf_counter() - start, record)
        for observer in self.observers:
            observer.ends(step)
        return stop

    def rounds(self, number: int) -> None:
        """Compute forward and backward of this rank's micro-batches, one in each round."""
        self.losses = self.session.objective.step(number)
        for micro_batch in self.accumulator:
            if micro_batch is None:
                self.accumulator.accumulate(None)
            else:
                with self.pace:
                    with spans.during(spans.DATA, "read"):
                        x, loss = self.losses.micro(micro_batch)
                    self.accumulator.accumulate(x, loss)

    def totals(self) -> tuple[float, bool]:
        """Return the loss over all ranks, and whether any rank asks to stop. Collective."""
        loss, stop, *self.sums = self.accumulator.totals(self.wants_to_stop(), *self.losses.sums)
        return loss, stop > 0

    def tally_figures(self) -> dict[str, float]:
        """Return the auxiliary losses of the step before scaling, and the load of experts. Collective."""
        tallies = self.session.module.tallies
        sums = tallies.sums(self.session.module.comm)
        return {name: float(sums[name]) for name in tallies.scales} | load_figures(sums)

    def wants_to_stop(self) -> bool:
        return False

    def after_a_step(self) -> TrainingProgress:
        loader, optimizer = self.session.loader, self.session.optimizer
        scale = self.session.module.loss_scale
        return replace(
            self.progress,
            step=self.progress.step + 1,
            tokens=self.progress.tokens + loader.counted(self.progress.step),
            skipped=optimizer.skipped,
            updates=optimizer.steps,
            samples=self.progress.samples + loader.batch_size,
            scale_exponent=scale.stored_exponent,
            scale_steps=scale.good_steps,
        )

    def evaluate(self) -> HeldOutLoss | None:
        """Return the validation loss and further figures, or None without validation data. Collective."""
        held_out = self.session.held_out
        if not held_out:
            return None
        evaluations = {
            name: self.session.objective.held_out(loader)
            for name, loader in held_out.loaders.items()
            if loader.micro_batches
        }
        losses = {name: loss for name, (loss, _) in evaluations.items()}
        figures = next(iter(evaluations.values()))[1]
        return HeldOutLoss(held_out.mean(losses), losses if len(losses) > 1 else {}, figures)


def load_figures(sums: Mapping[str, Array]) -> dict[str, float]:
    """Return the least and the greatest load of experts (mean: 1) and the entropy (1 for equal loads)."""
    loads = [counts / counts.mean() for name, counts in sums.items() if name.endswith(LOAD) and counts.any()]
    if not loads:
        return {}
    shares = [load[load > 0] / load.size for load in loads]
    entropies = [float(-(share * np.log(share)).sum()) / (math.log(loads[0].size) or 1) for share in shares]
    lowest, highest = (float(pick(loads)) for pick in (np.min, np.max))
    return {"load_least": lowest, "load_most": highest, "load_entropy": sum(entropies) / len(entropies)}
