"""The steps of a run: `Trainer.step` is data, accumulation, totals, optimizer.

Whatever else happens at a step is an observer's work (`observers`, `saving`); `Trainer.run` goes on until the
last step, or until the run is told to stop.
"""

from __future__ import annotations

import platform
import time
from dataclasses import replace
from functools import partial

from zero_mpi import device
from zero_mpi.checkpoint.state import TrainingProgress
from zero_mpi.config.bounds import seconds
from zero_mpi.config.step_range import step_range
from zero_mpi.data import Batch, EvalLoader, Windows
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.launch.consistency import blas
from zero_mpi.launch.ending import REQUEUE
from zero_mpi.launch.stopping import OVER, STEPS, signals
from zero_mpi.launch.time_limit import TimeLimit, find_job
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World
from zero_mpi.nn import CrossEntropy, Packed
from zero_mpi.sharding.evaluation import evaluate
from zero_mpi.sharding.grad_accum import GradAccum
from zero_mpi.sharding.witness import Digest, compute_again
from zero_mpi.telemetry import log, spans
from zero_mpi.telemetry.metrics import Records
from zero_mpi.trace.timeline import Tracer
from zero_mpi.train import audit, mfu, observers
from zero_mpi.train.divergence import Divergence
from zero_mpi.train.early_stop import EarlyStop
from zero_mpi.train.lr_schedule import schedule_of
from zero_mpi.train.observers import HeldOutLoss, Observer, StepMade
from zero_mpi.train.outcome import Outcome
from zero_mpi.train.rank_figures import RankFigures
from zero_mpi.train.sample import compare_with_letters, show_sample
from zero_mpi.train.saving import Saving
from zero_mpi.train.setup import Session
from zero_mpi.train.slow_ranks import SlowRanks
from zero_mpi.train.summary import Start, cautions, hosts_of, lines, plan


class Trainer:
    """Runs a session to its last step."""

    def __init__(self, world: World, session: Session, watchdog: Watchdog, outcome: Outcome) -> None:
        config = session.config
        self.world, self.session = world, session
        self.watchdog, self.outcome = watchdog, outcome
        self.progress = session.progress
        outcome.at(self.progress.step)
        self.accumulator = GradAccum(session.module, session.loader.micro_batches)
        self.rate = schedule_of(config)
        numbers = {"done": self.progress.step, "steps": config.steps, "log_every": config.log_every}
        begin = partial(Records, session.out, world.rank, **numbers, tensorboard=config.tensorboard)
        self.records: Records = world.together(begin)
        self.divergence = Divergence()
        self.saving = Saving(session, watchdog, outcome.events)
        self.limit = TimeLimit(seconds(config.max_time), find_job() if world.rank == 0 else None)
        self.ended_by = ""

    def observe(self, start: Start) -> list[Observer]:
        """Those who see each step, in their order."""
        session, scale = self.session, self.session.module.loss_scale
        meter, told = session.comm.meter, partial(setattr, self.outcome.status, "slow")
        self.rank_figures = RankFigures(self.world, self.records.logs, meter, SlowRanks(self.hosts), told)
        self.costs = observers.Costs(meter, session.loader.positions_per_step)
        config, goes_on = session.config, session.config.init is not None
        self.evaluation = observers.Evaluation(config.eval_every, config.steps, self.evaluate, first=goes_on)
        self.early_stop = EarlyStop(self.progress.best, session.config.patience)
        is_known = isinstance(
            session.loader.windows, Windows
        )  # packed, how much is computed depends on documents
        return [
            observers.SignsOfLife(self.watchdog, self.outcome),
            self.costs,
            *self.audits(),
            observers.SkippedSteps(scale, lambda: session.optimizer.skipped),
            self.evaluation,
            self.early_stop,
            *([observers.Utilization(start.share)] if is_known else []),
            self.rank_figures,
            observers.RecordWriter(self.records),
            self.saving,
            observers.EndOfDivergence(self.divergence, scale),
        ]

    def run(self) -> int:
        """Train to the last step or until told to stop. Returns the exit status."""
        steps = step_range(self.session.config.trace_steps, self.session.config.steps)
        tracer = Tracer(self.session.comm, self.session.config.trace, steps, self.progress.step)
        self.observers, before = self.observe(self.begin()), self.progress.tokens
        signals.enter(STEPS)
        stopped = False
        while not (stopped or self.is_done()):
            tracer.reach(self.progress.step + 1)
            stopped = self.step()
            if stopped or self.saving.is_due(self.progress.step) or self.early_stop.is_best():
                self.save()
        if self.saving.saved_step != self.progress.step:
            self.save()
        self.saving.wait(self.progress.step)
        tracer.end(self.progress.step)
        signals.enter(OVER)
        self.saving.announce()
        self.outcome.folder.check(self.records.problem)
        self.records.close()
        self.rank_figures.close(self.progress.tokens - before)
        if stopped and not self.is_done():
            self.outcome.events.reason = self.ended_by.strip() or signals.caught or "a signal to another rank"
            log.info(
                "stopped after step %d%s; run the same command to go on", self.progress.step, self.ended_by
            )
            return REQUEUE
        self.divergence.check_end(self.progress.step)
        self.early_stop.tell(self.progress.step, self.session.out, self.outcome.events)
        self.close()
        return 0

    def step(self) -> bool:
        """One optimizer step. Returns whether to stop; all ranks agree."""
        number = self.progress.step
        for observer in self.observers:
            observer.begins(number + 1)
        begun = time.perf_counter()
        self.rounds(number)
        for observer in self.observers:
            observer.computed(number + 1)
        loss, stop = self.totals()
        lr = self.rate(number)
        result = self.session.optimizer.step(lr=lr, max_norm=self.session.config.grad_clip or None)
        self.progress = self.after_a_step()
        record = {"step": number + 1, "loss": loss, "grad_norm": result.grad_norm, "lr": lr}
        record["tokens"] = self.progress.tokens
        made = StepMade(number + 1, loss, result, time.perf_counter() - begun, record)
        for observer in self.observers:
            observer.ends(made)
        self.progress = replace(self.progress, best=self.early_stop.best)
        return stop

    def is_done(self) -> bool:
        """Whether the last step was made, or the run stops early; all ranks agree."""
        return self.progress.step >= self.session.config.steps or self.early_stop.is_over()

    def rounds(self, number: int) -> None:
        """Forward and backward of all micro-batches of a step, each on the rank it falls to."""
        loader = self.session.loader
        scale = 1.0 / loader.counted(number)
        for mine in self.accumulator:
            if mine is None:
                self.accumulator.accumulate(None)
            else:
                with self.rank_figures.pace:
                    with spans.during(spans.DATA, "read"):
                        batch = loader.micro(number, mine)
                    self.accumulator.accumulate(*with_loss(batch, scale))

    def audits(self) -> list[Observer]:
        """Who holds what ranks compute against each other, if that is wanted. Collective."""
        config, accumulator = self.session.config, self.accumulator
        if config.audit is None:
            return []
        if device.in_use() is not device.HOST:
            raise UsageError(f"--audit {config.audit}: expected --device cpu")
        log.info("%s", audit.cost(config.audit, accumulator.rounds))
        return [
            audit.Audit(
                config.audit,
                config.audit_action,
                accumulator,
                self.session.optimizer,
                self.hosts,
                again=self.compute_again,
                redo=self.redo,
            )
        ]

    def compute_again(self, number: int, micro_batch: int | None) -> list[Digest]:
        """The digests of a micro-batch of step `number`; None: this rank has none to compute. Collective."""
        loader, module = self.session.loader, self.session.module
        if micro_batch is None:
            return compute_again(module, None, None, 1.0)
        batch = loader.micro(number - 1, micro_batch)
        x, criterion = with_loss(batch, 1.0 / loader.counted(number - 1))
        return compute_again(module, x, criterion.targets, criterion.scale)

    def redo(self, number: int) -> None:
        """Compute step `number` again, whose gradients are forgotten. Collective."""
        self.accumulator.reset()
        self.rounds(number - 1)

    def totals(self) -> tuple[float, bool]:
        """The loss of all ranks, and whether one of them is to stop; raises what one could not write."""
        fails = self.saving.saver.failed or bool(self.outcome.folder.lost or self.records.problem)
        saves = self.world.rank == 0 and self.saving.clock_says_so()
        loss, stop, failed, save = self.accumulator.totals(self.wants_to_stop(), fails, saves)
        self.saving.time_has_come = save > 0
        if failed:
            self.outcome.folder.check(self.records.problem)
            self.saving.saver.wait()  # raises on all ranks what failed in the background
        return loss, stop > 0

    def after_a_step(self) -> TrainingProgress:
        """The counters of the run once the optimizer has made a step."""
        loader, optimizer = self.session.loader, self.session.optimizer
        scale = self.session.module.loss_scale
        return replace(
            self.progress,
            step=self.progress.step + 1,
            tokens=self.progress.tokens + loader.counted(self.progress.step),
            skipped=optimizer.skipped,
            updates=optimizer.steps,
            samples=self.progress.samples + loader.batch_size,
            scale_exponent=scale.exponent,
            scale_steps=scale.good_steps,
        )

    def evaluate(self) -> HeldOutLoss | None:
        """The held-out loss in nats per token; None where nothing is held out. Collective."""
        held_out = self.session.held_out
        if not held_out:
            return None
        self.watchdog.beat("evaluation")
        losses = {
            name: self.loss_of(loader) for name, loader in held_out.loaders.items() if loader.micro_batches
        }
        return HeldOutLoss(held_out.mean(losses), losses if len(losses) > 1 else {})

    def loss_of(self, held_out: EvalLoader) -> float:
        """The mean loss of held-out windows. Collective."""
        return evaluate(
            self.session.module,
            held_out.micro_batches,
            lambda i: with_loss(held_out.micro(i), 1.0 / held_out.counted),
        )

    def wants_to_stop(self) -> bool:
        """Whether this rank was signalled, or rank 0 sees the time run out."""
        if self.world.rank == 0 and self.limit.left() < self.seconds_needed():
            self.ended_by = f" in time for {self.limit.name}"
        return bool(signals.caught or self.ended_by)

    def seconds_needed(self) -> float:
        """What one more step and the last checkpoint may take."""
        return 2 * self.costs.longest + self.evaluation.longest + self.saving.seconds_needed()

    def save(self) -> None:
        """Write a checkpoint of the step just done, or begin to."""
        self.outcome.folder.check(self.records.problem)
        if self.divergence.worth_saving(self.progress.step):
            self.saving.save(self.progress)

    def begin(self) -> Start:
        """Say what is about to happen, to the person who started it and in the run's records. Collective."""
        session, phase = self.session, log.Phases()
        self.hosts: list[str] = self.world.comm.allgather_object(platform.node())
        reached = mfu.measure(self.world, session.module.precision.compute)
        phase("matrix products")
        start = Start(session, hosts_of(self.hosts), reached)
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
            log.debug(
                "unit %s: %s elements, %s of them here", unit.name, f"{unit.partition.length:,}", f"{own:,}"
            )
        return start

    def close(self) -> None:
        """Rank 0 compares with what letter frequencies alone would give, and shows a sample."""
        self.watchdog.beat("sample")
        if self.world.rank == 0:
            compare_with_letters(self.session, self.evaluation.loss)
            signals.cut_short(partial(show_sample, self.session, self.progress.step, self.outcome.events))
        self.session.comm.barrier()


def with_loss(batch: Batch, scale: float) -> tuple[Array | Packed, CrossEntropy]:
    """What the model is given, and the criterion that holds its output against the targets."""
    x = batch.inputs if batch.begins is None else Packed(batch.inputs, batch.begins)
    return x, CrossEntropy(batch.targets, scale)
