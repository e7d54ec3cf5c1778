"""Observers: what happens at a step beside training, called in the order of a list.

A step begins and ends for all ranks alike, so an observer may start collectives. Its figures go
into the record of the step, a line of metrics.jsonl.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zero_mpi.comm.meter import Meter
from zero_mpi.errors import JobError
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.optim.optimizer import StepResult
from zero_mpi.sharding.precision import LossScale
from zero_mpi.telemetry import log
from zero_mpi.telemetry.metrics import METRICS, Records, last_record
from zero_mpi.train.summary import Outcome

MOST = 20  # steps in a row without finite values
REMEDY = "try a lower --lr, a longer --warmup or a smaller --grad-clip"


class Divergence:
    """Counts the steps of a job that were not finite."""

    def __init__(self) -> None:
        self._steps = self._bad = 0  # number of steps seen, and of the last ones that were not finite
        self._loss = 0.0

    def saw(self, step: int, loss: float, skipped: bool, searching: bool) -> None:
        """Count a step; raise JobError on all ranks if too many steps in a row were not finite.

        skipped: its gradient was not finite; searching: float16 tries a lower loss scale next.
        """
        self._steps, self._loss = self._steps + 1, loss
        if not math.isfinite(loss) or (skipped and not searching):
            self._bad += 1
        elif not skipped:
            self._bad = 0
        if self._bad >= MOST:
            raise JobError(
                f"loss or gradient was not finite in {MOST} steps in a row, up to step {step}. Such steps "
                f"are skipped, and the run has diverged; {REMEDY}"
            )

    def worth_saving(self, step: int) -> bool:
        """Return whether the weights may be valid; if not, log it, because they must not replace good
        ones.
        """
        if math.isfinite(self._loss):
            return True
        log.warning("no checkpoint is saved at step %d, because its loss is not finite", step)
        return False

    def check_end(self, step: int) -> None:
        """Raise JobError on all ranks if the run has come to its last step without a usable result."""
        if not math.isfinite(self._loss):
            raise JobError(not_finite(step))
        if self._bad and self._bad == self._steps:
            raise JobError(f"no step up to {step} had a finite gradient, so nothing was learned; {REMEDY}")


def not_finite(step: int) -> str:
    """Return why a run that has made all its steps is not done."""
    return f"the loss of the last step ({step}) is not finite: the run has diverged; {REMEDY}"


def check_recorded(out: Path, step: int) -> None:
    """Raise JobError if the records of a run that has made its last step say that it ended so."""
    record = last_record(out / METRICS)
    if record.get("step") == step and record.get("loss", 0.0) is None:
        raise JobError(not_finite(step))


@dataclass(frozen=True)
class StepMade:
    """Result of an optimizer step, the same on all ranks except for what observers add to `record`.

    number    steps of the run so far, including this one
    loss      nats per token, of all micro-batches
    seconds   from the first micro-batch to the update, on this rank
    """

    number: int
    loss: float
    result: StepResult
    seconds: float
    record: dict[str, Any] = field(default_factory=dict)


class Observer:
    """Follows the beginning and end of each step; the base class does nothing."""

    def begins(self, number: int) -> None:
        """Handle the beginning of step `number` (from 1). Collective if the observer says so."""

    def ends(self, step: StepMade) -> None:
        """Handle the end of a step. Collective if the observer says so."""


class SignsOfLife(Observer):
    """Reports the current step to the watchdog and status.json."""

    def __init__(self, watchdog: Watchdog, outcome: Outcome) -> None:
        self._watchdog, self._outcome = watchdog, outcome

    def begins(self, number: int) -> None:
        self._watchdog.beat(f"step {number}")

    def ends(self, step: StepMade) -> None:
        self._outcome.at(step.number)


class Costs(Observer):
    """Records the costs of a step: seconds, waits, bytes sent. Remembers the longest step."""

    def __init__(self, meter: Meter, positions_per_step: int) -> None:
        self.longest = 0.0  # seconds
        self._meter, self._positions = meter, positions_per_step
        self._waited = self._sent = 0.0

    def begins(self, number: int) -> None:
        self._waited, self._sent = self._meter.wait_seconds, self._meter.sent_bytes

    def ends(self, step: StepMade) -> None:
        self.longest = max(self.longest, step.seconds)
        step.record["tokens_per_second"] = self._positions / step.seconds
        step.record["step_seconds"] = step.seconds
        step.record["wait_seconds"] = self._meter.wait_seconds - self._waited
        step.record["sent_bytes"] = int(self._meter.sent_bytes - self._sent)


class SkippedSteps(Observer):
    """Records how many updates were skipped, and warns at the first outside the search for a loss scale."""

    def __init__(self, scale: LossScale, count: Callable[[], int]) -> None:
        self._scale, self._count, self._before = scale, count, count()

    def ends(self, step: StepMade) -> None:
        now, before = self._count(), self._before
        self._before = step.record["skipped"] = now
        if before == 0 < now and not self._scale.dynamic:
            log.warning(
                "the gradient of step %d is not finite: the step is skipped",
                step.number,
            )


class HeldOutLoss(NamedTuple):
    """Loss of an evaluation in nats per token, of each source where there are several, further figures."""

    mean: float
    by_source: dict[str, float]
    figures: dict[str, float] = {}  # noqa: RUF012  (never changed)


class Evaluation(Observer):
    """Records the validation loss every `every` steps and after the last step. Collective.

    every      steps; 0: only after the last step
    evaluate   function that returns the loss; None if nothing is held out
    first      evaluate before the first step too, into that step's record: where training starts from a
               pretrained model, this is the loss to improve on
    """

    def __init__(
        self, every: int, last: int, evaluate: Callable[[], HeldOutLoss | None], *, first: bool
    ) -> None:
        self.loss: float | None = None
        self.before: float | None = None
        self.longest = 0.0  # seconds
        self._every, self._last, self._evaluate, self._first = every, last, evaluate, first

    def begins(self, number: int) -> None:
        if self._first and number == 1:
            found = self._timed()
            if found is not None:
                self.before, self.figures = found.mean, found.figures
                log.info("before the first step: validation loss %.4f", self.before)

    def ends(self, step: StepMade) -> None:
        if step.number == 1 and self.before is not None:
            step.record["val_loss_before"] = self.before
            step.record.update({f"val_{name}_before": value for name, value in self.figures.items()})
        if step.number != self._last and not (self._every > 0 and step.number % self._every == 0):
            return
        found = self._timed()
        if found is None:
            return
        self.loss = step.record["val_loss"] = found.mean
        if found.by_source:
            step.record["val_losses"] = found.by_source
        step.record.update({f"val_{name}": value for name, value in found.figures.items()})

    def _timed(self) -> HeldOutLoss | None:
        begun = time.perf_counter()
        loss = self._evaluate()
        self.longest = max(self.longest, time.perf_counter() - begun)
        return loss


class Utilization(Observer):
    """Records the share of the processor's peak that a step reaches, where the peak is known."""

    def __init__(self, share: Callable[[float], float | None]) -> None:
        self._share = share

    def ends(self, step: StepMade) -> None:
        share = self._share(step.seconds)
        if share is not None:
            step.record["mfu"] = round(share, 4)


class RecordWriter(Observer):
    """Writes the record: metrics.jsonl, the progress bar, trackers."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def ends(self, step: StepMade) -> None:
        self._records.step(step.record)


class EndOfDivergence(Observer):
    """Ends a run whose loss or gradients are no longer finite; raises JobError on all ranks."""

    def __init__(self, divergence: Divergence, scale: LossScale) -> None:
        self._divergence, self._scale = divergence, scale

    def ends(self, step: StepMade) -> None:
        searching = self._scale.dynamic and self._scale.exponent > 0
        self._divergence.saw(step.number, step.loss, step.result.skipped, searching)
