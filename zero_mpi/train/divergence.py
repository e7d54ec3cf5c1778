"""A run whose loss or gradient is not finite any more has diverged, and must not end as if it were done.

A step with a gradient that is not finite changes nothing, on any rank: one now and then does no harm. Many in
a row will not get better by themselves, for the weights stay as they are. A gradient that is too large for
float16 is none of them while the factor of the loss can still be lowered; a loss that is not finite is always
one. All ranks see the same numbers, so they end together without a word.
"""

from __future__ import annotations

import math
from pathlib import Path

from zero_mpi.errors import JobError
from zero_mpi.telemetry import log
from zero_mpi.telemetry.metrics import METRICS, last_record

MOST = 20  # steps in a row
REMEDY = "try a lower --lr, a longer --warmup or a smaller --grad-clip"


class Divergence:
    """What the steps of a job were like."""

    def __init__(self) -> None:
        self._steps = self._bad = 0  # steps that were seen, and how many of the last were not finite
        self._loss = 0.0

    def saw(self, step: int, loss: float, skipped: bool, searching: bool) -> None:
        """A step was made; JobError on all ranks if it was one too many that was not finite.

        skipped: its gradient was not finite; searching: for float16 a lower factor of the loss is tried next.
        """
        self._steps, self._loss = self._steps + 1, loss
        if not math.isfinite(loss) or (skipped and not searching):
            self._bad += 1
        elif not skipped:
            self._bad = 0
        if self._bad >= MOST:
            raise JobError(
                f"loss or gradient was not finite in {MOST} steps in a row, up to step {step}, and such "
                f"steps change nothing: the run has diverged; {REMEDY}"
            )

    def worth_saving(self, step: int) -> bool:
        """Whether the weights may be sound; if not it is said, for they are not to push out good ones."""
        if math.isfinite(self._loss):
            return True
        log.warning("no checkpoint of step %d is made, for its loss is not finite", step)
        return False

    def check_end(self, step: int) -> None:
        """Raise JobError on all ranks if the run has come to its last step with nothing to show for it."""
        if not math.isfinite(self._loss):
            raise JobError(not_finite(step))
        if self._bad and self._bad == self._steps:
            raise JobError(f"no step up to {step} had a finite gradient, so nothing was learnt; {REMEDY}")


def not_finite(step: int) -> str:
    """Why a run that has made all its steps is not done."""
    return f"the loss of the last step ({step}) is not finite: the run has diverged; {REMEDY}"


def check_recorded(out: Path, step: int) -> None:
    """Raise JobError if the records of a run that has made its last step say that it ended so."""
    record = last_record(out / METRICS)
    if record.get("step") == step and record.get("loss", 0.0) is None:
        raise JobError(not_finite(step))
