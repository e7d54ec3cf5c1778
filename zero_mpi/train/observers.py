"""Observers: actions at the start and the end of each step, called in the order of their list.

All ranks call their observers at the same points, so an observer may use collectives. The figures of an
observer go into the record of the step, which is a line of metrics.jsonl.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zero_mpi import device
from zero_mpi.cli.text import plural
from zero_mpi.comm.meter import Meter
from zero_mpi.errors import JobError
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World
from zero_mpi.optim.optimizer import StepResult
from zero_mpi.sharding.precision import LossScale
from zero_mpi.telemetry import log
from zero_mpi.telemetry.energy import Energy
from zero_mpi.telemetry.metrics import METRICS, Records, last_record
from zero_mpi.train.summary import Outcome

MOST = 20  # a run ends after this number of consecutive steps without finite values
REMEDY = "try a lower --lr, a longer --warmup or a smaller --grad-clip"
BEHIND = 0.2  # a rank is slow if its seconds exceed the median by more than this fraction
RECORDS = 3  # a rank is named if it is slow in this number of consecutive records


@dataclass(frozen=True)
class StepMade:
    """Result of an optimizer step. It is equal on all ranks, except for what observers put into `record`."""

    number: int  # number of the step, from 1
    loss: float  # over all micro-batches; cross-entropy is in nats per token
    result: StepResult
    seconds: float  # seconds of this rank from the first micro-batch to the update
    record: dict[str, Any] = field(default_factory=dict)


class Observer:
    """Base class of observers. Its methods do nothing."""

    def begins(self, number: int) -> None:
        """Handle the start of step `number` (from 1). Collective if the observer's docstring says so."""

    def ends(self, step: StepMade) -> None:
        """Handle the end of a step. Collective if the observer's docstring says so."""


class SignsOfLife(Observer):
    """Observer that reports the current step to the watchdog and status.json."""

    def __init__(self, watchdog: Watchdog, outcome: Outcome) -> None:
        self._watchdog, self._outcome = watchdog, outcome

    def begins(self, number: int) -> None:
        self._watchdog.beat(f"step {number}")

    def ends(self, step: StepMade) -> None:
        self._outcome.at(step.number)


class Costs(Observer):
    """Observer that records the duration, speed, waits, sent bytes and share of peak FLOP/s of a step.

    share   function seconds -> share of the processor's peak, or None if the peak is not known
    """

    def __init__(self, meter: Meter, positions: int, share: Callable[[float], float | None]) -> None:
        self.longest = 0.0  # seconds of the longest step
        self._meter, self._positions, self._share = meter, positions, share
        self._wait_seconds = self._sent_bytes = 0.0

    def begins(self, number: int) -> None:
        self._wait_seconds, self._sent_bytes = self._meter.wait_seconds, self._meter.sent_bytes

    def ends(self, step: StepMade) -> None:
        self.longest = max(self.longest, step.seconds)
        step.record["tokens_per_second"] = self._positions / step.seconds
        step.record["step_seconds"] = step.seconds
        step.record["wait_seconds"] = self._meter.wait_seconds - self._wait_seconds
        step.record["sent_bytes"] = int(self._meter.sent_bytes - self._sent_bytes)
        share = self._share(step.seconds)
        if share is not None:
            step.record["mfu"] = round(share, 4)


class SkippedSteps(Observer):
    """Observer that records skipped updates and warns of the first one, unless the loss scale is dynamic."""

    def __init__(self, scale: LossScale, count: Callable[[], int]) -> None:
        self._scale, self._count, self._before = scale, count, count()

    def ends(self, step: StepMade) -> None:
        before, self._before = self._before, self._count()
        step.record["skipped"] = self._before
        if before == 0 < self._before and not self._scale.dynamic:
            log.warning("the gradient of step %d is not finite: the step is skipped", step.number)


class HeldOutLoss(NamedTuple):
    """Results of an evaluation: mean loss and losses by source, and further figures."""

    mean: float
    by_source: dict[str, float]
    figures: dict[str, float]


class Evaluation(Observer):
    """Observer that records the validation loss every `every` steps and after the last step. Collective.

    every      number of steps; 0: only after the last step
    evaluate   function that returns the loss, or None without validation data
    first      whether to evaluate before the first step too, and record the result with step 1: training
    should improve this loss of a pretrained model
    """

    def __init__(
        self, every: int, last: int, evaluate: Callable[[], HeldOutLoss | None], *, first: bool
    ) -> None:
        self.loss: float | None = None
        self.longest = 0.0  # seconds
        self._before: HeldOutLoss | None = None
        self._every, self._last, self._evaluate, self._first = every, last, evaluate, first

    def begins(self, number: int) -> None:
        if self._first and number == 1:
            self._before = self._timed()
            if self._before is not None:
                log.info("before the first step: validation loss %.4f", self._before.mean)

    def ends(self, step: StepMade) -> None:
        if step.number == 1 and self._before is not None:
            step.record["val_loss_before"] = self._before.mean
            step.record.update({f"val_{name}_before": x for name, x in self._before.figures.items()})
        if step.number != self._last and not (self._every > 0 and step.number % self._every == 0):
            return
        held_out = self._timed()
        if held_out is None:
            return
        self.loss = step.record["val_loss"] = held_out.mean
        if held_out.by_source:
            step.record["val_losses"] = held_out.by_source
        step.record.update({f"val_{name}": value for name, value in held_out.figures.items()})

    def _timed(self) -> HeldOutLoss | None:
        start = time.perf_counter()
        loss = self._evaluate()
        self.longest = max(self.longest, time.perf_counter() - start)
        return loss


class RecordWriter(Observer):
    """Observer that sends each record to metrics.jsonl, the progress bar and the trackers."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def ends(self, step: StepMade) -> None:
        self._records.step(step.record)


# ------------------------------------------------------------------------------------------- divergence


class Divergence(Observer):
    """Observer that ends the job after MOST consecutive steps with a loss or gradient that is not finite."""

    def __init__(self, scale: LossScale) -> None:
        self._scale, self._is_finite = scale, True
        self._steps = self._bad = 0  # number of steps; number of latest steps in a row that were not finite

    def ends(self, step: StepMade) -> None:
        """Count a step. Raise JobError on all ranks if too many consecutive steps were not finite.

        A skipped step counts as not finite, unless the loss scale (float16) can be lowered further.
        """
        searching = self._scale.dynamic and self._scale.exponent > 0
        losses = step.loss, step.record.get("val_loss", 0.0)
        self._steps, self._is_finite = self._steps + 1, all(map(math.isfinite, losses))
        if not math.isfinite(step.loss) or (step.result.skipped and not searching):
            self._bad += 1
        elif not step.result.skipped:
            self._bad = 0
        if self._bad >= MOST:
            raise JobError(
                f"loss or gradient was not finite in {MOST} steps in a row, up to step {step.number}. Such "
                f"steps are skipped, and the run has diverged; {REMEDY}"
            )

    def worth_saving(self, step: int) -> bool:
        """Return whether the last losses are finite, so that weights may be saved. If not, log a message."""
        if self._is_finite:
            return True
        log.warning("no checkpoint is saved at step %d, because its loss is not finite", step)
        return False

    def check_end(self, step: int) -> None:
        """Raise JobError on all ranks if a last loss was not finite, or if no step of this job was finite."""
        if not self._is_finite:
            raise JobError(not_finite(step))
        if self._bad and self._bad == self._steps:
            raise JobError(f"no step up to {step} had a finite gradient, so nothing was learned; {REMEDY}")


def not_finite(step: int) -> str:
    return f"the loss of the last step ({step}) is not finite: the run has diverged; {REMEDY}"


def check_recorded(out: Path, step: int) -> None:
    """Raise JobError if a recorded loss of a finished run's last step is not finite."""
    record = last_record(out / METRICS)
    if record.get("step") == step and None in (record.get("loss", 0.0), record.get("val_loss", 0.0)):
        raise JobError(not_finite(step))


# ------------------------------------------------------------------------------------------- slow ranks


class RankReport(NamedTuple):
    """Figures of a rank since its last report, except that `memory` is the current value."""

    memory: int  # bytes in use now
    seconds: float | None  # seconds per micro-batch; None: no micro-batch, or a GPU
    wait_seconds: float  # seconds of waits for other ranks
    joules: float | None  # energy of the host, reported by one of its ranks; None: other ranks, or no counter


class RankFigures(Observer):
    """Observer that records the figures of each rank and names slow ranks. Collective in logged steps.

    All ranks wait for the slowest rank, so the time of a step does not show which rank is slow. So each rank
    measures its own seconds: the time of its micro-batches minus its waits for other ranks.

    pace   context manager around each micro-batch, which measures its time
    say    function that gets a text with the names of slow ranks, or "" if there are none
    """

    def __init__(
        self,
        world: World,
        logs: Callable[[int], bool],
        meter: Meter,
        slow: SlowRanks,
        say: Callable[[str], None],
    ) -> None:
        self.pace = StepTimer(meter)
        self._world, self._logs, self._slow, self._say = world, logs, slow, say
        self._energy = Energy() if world.node.rank == 0 else None
        self._joules, self._hosts = 0.0, 0

    def ends(self, step: StepMade) -> None:
        if self._energy is not None:
            self._energy.count()
        if not (self._logs(step.number) or "val_loss" in step.record):
            return
        processor, (computed, waited) = device.in_use(), self.pace.take()
        local = RankReport(
            processor.memory_in_use(),
            computed if processor is device.HOST else None,
            waited,
            None if self._energy is None else self._energy.take(),
        )
        reports: list[RankReport] = self._world.comm.allgather_object(local)
        seconds = [report.seconds for report in reports]
        step.record["memory_bytes"] = [report.memory for report in reports]
        step.record["micro_batch_seconds"] = seconds
        step.record["waited_seconds"] = [report.wait_seconds for report in reports]
        if self._world.rank == 0:
            self._say(self._slow.add(seconds))
        joules = [report.joules for report in reports if report.joules is not None]
        if joules:
            step.record["joules"] = sum(joules)
            self._joules, self._hosts = self._joules + sum(joules), len(joules)

    def close(self, tokens: int) -> None:
        """Log the energy of the job, if hosts measure it. `tokens`: number of tokens trained on."""
        if self._hosts and tokens:
            hosts, joules = plural(self._hosts, "host"), self._joules / tokens
            log.info("energy: %.4g kJ of %s, %.3g J per token", self._joules / 1e3, hosts, joules)


class StepTimer:
    """Timer of this rank's computation, used as a context around each micro-batch."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._seconds, self._count, self._start = 0.0, 0, 0.0
        self._wait_seconds = meter.wait_seconds

    def __enter__(self) -> None:
        self._start = time.perf_counter() - self._meter.wait_seconds

    def __exit__(self, *error: object) -> None:
        self._seconds += time.perf_counter() - self._meter.wait_seconds - self._start
        self._count += 1

    def take(self) -> tuple[float | None, float]:
        """Return seconds per micro-batch (None if none ran) and seconds of waiting since the last call."""
        mean = self._seconds / self._count if self._count else None
        waited, self._wait_seconds = self._meter.wait_seconds - self._wait_seconds, self._meter.wait_seconds
        self._seconds, self._count = 0.0, 0
        return mean, waited


class SlowRanks:
    """Detector of ranks that are slower than the median in several consecutive records."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts, self._counts = hosts, Counter[int]()

    def add(self, seconds: Sequence[float | None]) -> str:
        """Add the seconds per micro-batch of each rank. Return a text with the names of slow ranks, or ""."""
        paces = {rank: pace for rank, pace in enumerate(seconds) if pace is not None}
        median = statistics.median_low(paces.values()) if paces else 0.0
        lags = {rank: pace / median - 1 for rank, pace in paces.items() if pace > (1 + BEHIND) * median > 0}
        for rank in [rank for rank in self._counts if rank not in lags]:
            if self._counts.pop(rank) >= RECORDS:
                log.info("rank %d on %s is no longer slow", rank, self._hosts[rank])
        for rank, lag in lags.items():
            self._counts[rank] += 1
            if self._counts[rank] == RECORDS:
                log.warning(
                    "rank %d on %s is slow: %.4g s per micro-batch, %.0f %% more than the median of ranks "
                    "(%.4g s), %d times in a row. Is another program running there? zero-mpi doctor measures "
                    "all ranks at once",
                    *(rank, self._hosts[rank], paces[rank], 100 * lag, median, RECORDS),
                    extra={"facts": {"rank": rank, "host": self._hosts[rank], "behind": round(lag, 3)}},
                )
        return "; ".join(
            f"rank {rank} on {self._hosts[rank]}, {lag:.0%} behind"
            for rank, lag in lags.items()
            if self._counts[rank] >= RECORDS
        )
