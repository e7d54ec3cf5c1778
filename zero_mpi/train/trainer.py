"""`mpirun -n N python -m zero_mpi.train`: train, record, save, and show a sample.

The loop of a step is `Trainer.step`: rounds of micro-batches, the loss, the optimizer. Everything else is
what happens between steps: evaluation, checkpoints, signals, the clock.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from zero_mpi import device
from zero_mpi.checkpoint.saver import Saver
from zero_mpi.config.bounds import seconds
from zero_mpi.config.step_range import step_range
from zero_mpi.device.types import Array
from zero_mpi.launch.consistency import blas
from zero_mpi.launch.stopping import OVER, STEPS, signals
from zero_mpi.launch.time_limit import TimeLimit, find_job
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import REQUEUE, World
from zero_mpi.nn import CrossEntropy
from zero_mpi.sharding.grad_accum import Criterion, GradAccum, evaluate
from zero_mpi.telemetry import events, log, spans
from zero_mpi.telemetry.metrics import Records
from zero_mpi.trace.timeline import Tracer
from zero_mpi.train import mfu
from zero_mpi.train.divergence import Divergence
from zero_mpi.train.lr_schedule import make_schedule
from zero_mpi.train.outcome import Outcome
from zero_mpi.train.sample import compare_with_letters, show_sample
from zero_mpi.train.setup import Session
from zero_mpi.train.summary import Start, cautions, hosts_of, lines, plan

SAVE_MARGIN = 1.5  # times the longest save so far is left for the last one before the time is up
SHORTEST_SAVE = 1.0  # seconds
SLOW_DISK = 200e6  # bytes a second; what the first save is taken to write
SAVE_SECONDS = 600.0  # between saves, where no number of steps is given
SAVE_PAUSE = 10  # times the longest save so far, at least: large checkpoints take no more than a tenth


class Trainer:
    """Runs a session to its last step."""

    def __init__(self, world: World, session: Session, watchdog: Watchdog, outcome: Outcome) -> None:
        config = session.config
        self.world, self.session, self.config = world, session, config
        self.watchdog, self.outcome = watchdog, outcome
        self.progress = session.progress
        outcome.at(self.progress.step)
        self.accumulator = GradAccum(session.module, session.loader.micro_batches)
        self.rate = make_schedule(
            config.schedule,
            lr=config.lr,
            min_lr=config.lr / 10 if config.min_lr is None else config.min_lr,
            warmup=config.warmup,
            steps=config.steps,
        )
        begin = partial(Records.of, config, session.out, world.rank, self.progress.step)
        self.records: Records = world.together(begin)
        self.divergence = Divergence()
        self.saver = Saver(
            session.out,
            session.optimizer,
            session.description,
            keep=config.keep,
            parallel=config.checkpoint_io == "parallel",
            background=config.async_save,
            tick=self.saving,
        )
        self.tracer = Tracer(
            session.comm, config.trace, step_range(config.trace_steps, config.steps), self.progress.step
        )
        self.waits_for_save = False
        self.longest_step = self.longest_evaluation = 0.0
        self.limit = TimeLimit(seconds(config.max_time), find_job() if world.rank == 0 else None)
        self.ended_by = ""
        self.saved_step = self.progress.step if self.progress.step else -1
        self.saved_at, self.time_to_save = time.monotonic(), False
        self.val_loss: float | None = None

    def run(self) -> int:
        """Train to the last step or until told to stop. Returns the exit status."""
        self.start = self.begin()
        signals.enter(STEPS)
        stopped = False
        while self.progress.step < self.config.steps and not stopped:
            self.tracer.reach(self.progress.step + 1)
            stopped = self.step()
            if stopped or self.due_to_save():
                self.save()
        if self.saved_step != self.progress.step:
            self.save()
        with self.waiting():
            self.saver.wait()
        self.tracer.end(self.progress.step)
        signals.enter(OVER)
        self.announce()
        self.outcome.folder.check(self.records.problem)
        self.records.close()
        if stopped and self.progress.step < self.config.steps:
            self.outcome.events.reason = self.ended_by.strip() or signals.caught or "a signal to another rank"
            log.info(
                "stopped after step %d%s; run the same command to go on", self.progress.step, self.ended_by
            )
            return REQUEUE
        self.divergence.check_end(self.progress.step)
        self.close()
        return 0

    def step(self) -> bool:
        """One optimizer step and its record. Returns whether to stop."""
        begun, number, meter = time.perf_counter(), self.progress.step, self.session.comm.meter
        waited, sent, skipped = meter.wait_seconds, meter.sent_bytes, self.progress.skipped
        self.watchdog.beat(f"step {number + 1}")
        self.rounds(number)
        fails = self.saver.failed or bool(self.outcome.folder.lost or self.records.problem)
        loss, stop, failed, save = self.accumulator.totals(self.wants_to_stop(), fails, self.wants_to_save())
        self.time_to_save = save > 0
        if failed:
            self.outcome.folder.check(self.records.problem)
            self.saver.wait()  # raises on all ranks what failed in the background
        lr = self.rate(number)
        result = self.session.optimizer.step(lr=lr, max_norm=self.config.grad_clip or None)
        optimizer, tokens = self.session.optimizer, self.session.loader.tokens_per_step
        self.progress = replace(
            self.progress,
            step=number + 1,
            tokens=self.progress.tokens + tokens,
            skipped=optimizer.skipped,
            updates=optimizer.steps,
            samples=self.progress.samples + self.session.loader.batch_size,
            scale_exponent=self.session.module.loss_scale.exponent,
            scale_steps=self.session.module.loss_scale.good_steps,
        )
        self.outcome.at(number + 1)
        took = time.perf_counter() - begun
        self.longest_step = max(self.longest_step, took)
        record: dict[str, Any] = {
            "step": number + 1,
            "loss": loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": self.progress.tokens,
            "tokens_per_second": tokens / took,
            "step_seconds": took,
            "wait_seconds": meter.wait_seconds - waited,
            "sent_bytes": meter.sent_bytes - sent,
            "skipped": optimizer.skipped,
        }
        if number + 1 == self.config.steps or self.due(self.config.eval_every):
            record |= self.evaluate()
            self.longest_evaluation = max(self.longest_evaluation, time.perf_counter() - begun - took)
        share = self.start.share(took)
        record |= {} if share is None else {"mfu": round(share, 4)}
        if self.records.logs(number + 1) or "val_loss" in record:
            record["memory_bytes"] = self.world.everyone(device.in_use().memory_in_use())
        self.records.step(record)
        self.announce()
        self.warn_of_skips(before=skipped)
        scale = self.session.module.loss_scale
        self.divergence.saw(number + 1, loss, result.skipped, scale.dynamic and scale.exponent > 0)
        return stop > 0

    def rounds(self, number: int) -> None:
        """Forward and backward of all micro-batches of a step, each on the rank it falls to."""
        loader = self.session.loader
        scale = 1.0 / loader.tokens_per_step
        for mine in self.accumulator:
            if mine is None:
                self.accumulator.accumulate(None)
            else:
                with spans.during(spans.DATA, "read"):
                    batch = loader.micro(number, mine)
                self.accumulator.accumulate(*with_loss(batch, scale))

    def evaluate(self) -> dict[str, float]:
        """The held-out loss in nats per token, as an entry of a record; empty if nothing is held out."""
        held_out = self.session.held_out
        if not held_out.micro_batches:
            return {}
        self.watchdog.beat("evaluation")
        self.val_loss = evaluate(
            self.session.module,
            held_out.micro_batches,
            lambda i: with_loss(held_out.micro(i), 1.0 / held_out.tokens),
        )
        return {"val_loss": self.val_loss}

    def due(self, every: int) -> bool:
        """Whether the step just done is one of every `every`; 0 is never."""
        return every > 0 and self.progress.step % every == 0

    def due_to_save(self) -> bool:
        """Whether the step just done is one after which to save; all ranks agree."""
        every = self.config.save_every
        return self.time_to_save if every is None else self.due(every)

    def wants_to_save(self) -> bool:
        """Whether rank 0's clock says so, where no number of steps is given."""
        pause = max(SAVE_SECONDS, SAVE_PAUSE * self.saver.longest)
        return self.world.rank == 0 and time.monotonic() - self.saved_at >= pause

    def wants_to_stop(self) -> bool:
        """Whether this rank was signalled, or rank 0 sees the time run out."""
        if self.world.rank == 0 and self.limit.left() < self.needed():
            self.ended_by = f" in time for {self.limit.name}"
        return bool(signals.caught or self.ended_by)

    def needed(self) -> float:
        """Seconds that one more step and the last checkpoint may take."""
        state = 3 * self.session.module.replicated_memory_bytes  # parameters and two moments
        save = max(SHORTEST_SAVE, self.saver.longest or state / SLOW_DISK)
        return 2 * self.longest_step + self.longest_evaluation + SAVE_MARGIN * save

    def save(self) -> None:
        """Write a checkpoint of the step just done, or begin to."""
        self.outcome.folder.check(self.records.problem)
        if not self.divergence.worth_saving(self.progress.step):
            return
        with self.waiting():
            self.saver.save(self.progress)
        self.saved_step, self.saved_at = self.progress.step, time.monotonic()
        self.announce()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While the run waits for a checkpoint, what the save gets done counts as progress."""
        self.waits_for_save = True
        self.watchdog.beat(f"saving step {self.progress.step}")
        yield
        self.waits_for_save = False

    def saving(self, what: str) -> None:
        """A save gets on; it may be a thread's that says so."""
        if self.waits_for_save:
            self.watchdog.beat(f"saving: {what}")

    def announce(self) -> None:
        """Say which checkpoints are complete."""
        for saved in self.saver.finished():
            log.info("saved %s in %.1f s, state %s", saved.folder, saved.seconds, saved.digest[:16])
            self.outcome.events.note(
                events.SAVED,
                step=saved.step,
                folder=saved.folder.name,
                digest=saved.digest,
                seconds=round(saved.seconds, 3),
                bytes=bytes_in(saved.folder),
            )

    def begin(self) -> Start:
        """Say what is about to happen, to the person who started it and in the run's records. Collective."""
        session, phase = self.session, log.Phases()
        hosts = hosts_of(self.world.everyone(platform.node()))
        reached = mfu.measure(self.world, session.module.precision.compute)
        phase("matrix products")
        start = Start(session, hosts, reached)
        if self.world.rank:
            return start
        start = plan(start)
        phase("plan")
        self.outcome.begin(start)
        for line in lines(start):
            log.info("%s", line)
        for note in [*session.notes, *map(log.Caution, cautions(start))]:
            log.tell(note)
        log.debug("BLAS: %s, threads of rank 0: %d", blas(), start.threads)
        for unit in session.module.units:
            own = unit.part.stop - unit.part.start
            log.debug("unit %s: %s elements, %s of them here", unit.name, f"{unit.unit.length:,}", f"{own:,}")
        return start

    def warn_of_skips(self, before: int) -> None:
        """Say it when the first step is skipped; in fp16 that is how the scale of the losses is found."""
        if before == 0 < self.progress.skipped and not self.session.module.loss_scale.dynamic:
            log.warning(
                "the gradient of step %d is not finite: steps with such a gradient change nothing",
                self.progress.step,
            )

    def close(self) -> None:
        """Rank 0 compares with what letter frequencies alone would give, and shows a sample."""
        self.watchdog.beat("sample")
        if self.world.rank == 0:
            compare_with_letters(self.session, self.val_loss)
            signals.cut_short(partial(show_sample, self.session, self.progress.step, self.outcome.events))
        self.session.comm.barrier()


def with_loss(batch: tuple[Array, Array], scale: float) -> tuple[Array, Criterion]:
    """Tokens, and the criterion that holds the model's output against their targets."""
    tokens, targets = batch
    return tokens, CrossEntropy(targets, scale)


def bytes_in(folder: Path) -> int:
    """Of the files in a folder; 0 where it is gone already."""
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0
