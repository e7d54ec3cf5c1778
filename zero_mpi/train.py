"""`mpirun -n N python -m zero_mpi.train`: train, record, save, and show a sample.

The loop of a step is `Trainer.step`: rounds of micro-batches, the loss, the optimizer. Everything else is
what happens between steps: evaluation, checkpoints, signals, the clock.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.accumulate import Criterion, GradAccum, evaluate
from zero_mpi.arrays import Array
from zero_mpi.batch import TimeLimit, find_job
from zero_mpi.checkpoint import manager
from zero_mpi.checkpoint.saver import Saver
from zero_mpi.config import Config, parse, seconds
from zero_mpi.data import unigram_entropy
from zero_mpi.launch import BAD_USAGE, REQUEUE, World, run
from zero_mpi.nn import CrossEntropy
from zero_mpi.optim import make_schedule
from zero_mpi.records import Records
from zero_mpi.rollcall import RollCall
from zero_mpi.session import Session, prepare
from zero_mpi.status import DONE, FAILED, STOPPED, Status
from zero_mpi.textmodel import TextModel
from zero_mpi.uniform import check_installation, check_not_alone, check_settings
from zero_mpi.watchdog import Watchdog

SAVE_MARGIN = 1.5  # times the longest save so far is left for the last one before the time is up
SHORTEST_SAVE = 1.0  # seconds
SLOW_DISK = 200e6  # bytes a second; what the first save is taken to write


class StopSignals:
    """Notes SIGTERM and SIGUSR1, from the beginning on: also while a run is being prepared."""

    def __init__(self) -> None:
        self.caught = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.caught = True  # the ranks agree on it after the step


class Trainer:
    """Runs a session to its last step."""

    def __init__(
        self, world: World, session: Session, watchdog: Watchdog, status: Status, signals: StopSignals
    ) -> None:
        config = session.config
        self.world, self.session, self.config = world, session, config
        self.watchdog, self.status, self.signals = watchdog, status, signals
        self.progress = session.progress
        status.at(self.progress.step)
        self.accumulator = GradAccum(session.module, session.loader.micro_batches)
        self.rate = make_schedule(
            config.schedule,
            lr=config.lr,
            min_lr=config.lr / 10 if config.min_lr is None else config.min_lr,
            warmup=config.warmup,
            steps=config.steps,
        )
        self.records = Records(
            session.out, world.rank, done=self.progress.step, steps=config.steps, log_every=config.log_every
        )
        self.saver = Saver(
            session.out,
            session.optimizer,
            session.description,
            keep=config.keep,
            parallel=config.checkpoint_io == "parallel",
            background=config.async_save,
            tick=self.saving,
        )
        self.waits_for_save = False
        self.longest_step = self.longest_evaluation = 0.0
        self.limit = TimeLimit(seconds(config.max_time), find_job() if world.rank == 0 else None)
        self.ended_by = ""
        self.saved_step = self.progress.step if self.progress.step else -1
        self.val_loss: float | None = None

    def run(self) -> int:
        """Train to the last step or until told to stop. Returns the exit status."""
        for note in [*self.summary(), *self.session.notes]:
            self.records.say(note)
        stopped = False
        while self.progress.step < self.config.steps and not stopped:
            stopped = self.step()
            if stopped or self.due(self.config.save_every):
                self.save()
        if self.saved_step != self.progress.step:
            self.save()
        with self.waiting():
            self.saver.wait()
        self.announce()
        self.records.close()
        if stopped and self.progress.step < self.config.steps:
            self.records.say(
                f"stopped after step {self.progress.step}{self.ended_by}; run the same command to go on"
            )
            return REQUEUE
        self.close()
        return 0

    def step(self) -> bool:
        """One optimizer step and its record. Returns whether to stop."""
        begun, number, meter = time.perf_counter(), self.progress.step, self.session.comm.meter
        waited, sent = meter.wait_seconds, meter.sent_bytes
        self.watchdog.beat(f"step {number + 1}")
        self.rounds(number)
        loss, stop, failed = self.accumulator.totals(self.wants_to_stop(), self.saver.failed)
        if failed:
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
        self.status.at(number + 1)
        took = time.perf_counter() - begun
        self.longest_step = max(self.longest_step, took)
        record = {
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
        self.records.step(record)
        self.announce()
        return stop > 0

    def rounds(self, number: int) -> None:
        """Forward and backward of all micro-batches of a step, each on the rank it falls to."""
        loader = self.session.loader
        scale = 1.0 / loader.tokens_per_step
        for _ in range(len(self.accumulator.rounds)):
            mine = self.accumulator.next_micro_batch
            if mine is None:
                self.accumulator.accumulate(None)
            else:
                self.accumulator.accumulate(*with_loss(loader.micro(number, mine), scale))

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

    def wants_to_stop(self) -> bool:
        """Whether this rank was signalled, or rank 0 sees the time run out."""
        if self.world.rank == 0 and self.limit.left() < self.needed():
            self.ended_by = f" in time for {self.limit.name}"
        return self.signals.caught or bool(self.ended_by)

    def needed(self) -> float:
        """Seconds that one more step and the last checkpoint may take."""
        state = 3 * self.session.module.replicated_memory_bytes  # parameters and two moments
        save = max(SHORTEST_SAVE, self.saver.longest or state / SLOW_DISK)
        return 2 * self.longest_step + self.longest_evaluation + SAVE_MARGIN * save

    def save(self) -> None:
        """Write a checkpoint of the step just done, or begin to."""
        with self.waiting():
            self.saver.save(self.progress)
        self.saved_step = self.progress.step
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
            self.records.say(f"saved {saved.folder} in {saved.seconds:.1f} s, state {saved.digest[:16]}")

    def summary(self) -> list[str]:
        """What is about to happen, for the person who started it."""
        session, module, comm = self.session, self.session.module, self.session.comm
        parameters = sum(param.size for param in module.params.values())
        moments = session.optimizer.memory_bytes()
        return [
            f"zero_mpi: {session.model.arch}, {parameters:,} parameters, {module.strategy.name} over "
            f"{comm.size} rank{'s' if comm.size > 1 else ''}, {self.config.reduction} reduction, "
            f"{self.computing()}",
            f"data: {session.corpus.train.size:,} tokens to train on in "
            f"{session.corpus.documents - session.corpus.val_documents} documents, "
            f"{session.corpus.val.size:,} held out; {session.loader.tokens_per_step:,} tokens a step in "
            f"{session.loader.micro_batches} micro-batches",
            f"memory on rank 0: {mebibytes(module.shard_memory_bytes)} parameters and {mebibytes(moments)} "
            f"moments; the whole model has {mebibytes(module.replicated_memory_bytes)} of parameters",
        ]

    def computing(self) -> str:
        """On what and in which precision."""
        machine = self.session.description.machine
        low = f"{machine['precision']}, " if "precision" in machine else ""
        if "device" in machine:
            return f"{low}{machine['device']}, {machine['operations']}"
        return f"{low}{machine['threads']} BLAS thread(s) a rank"

    def close(self) -> None:
        """Rank 0 compares with what letter frequencies alone would give, and shows a sample."""
        self.watchdog.beat("sample")
        if self.world.rank == 0:
            self.report()
            self.show_sample()
        self.session.comm.barrier()

    def report(self) -> None:
        """The held-out loss beside the entropy of the same text's token frequencies."""
        held_out = self.session.held_out
        if self.val_loss is None or not held_out.micro_batches:
            return
        targets = np.concatenate([held_out.micro(i)[1].ravel() for i in range(held_out.micro_batches)])
        self.records.say(
            f"validation loss {self.val_loss:.4f} nats a token; "
            f"the entropy of the same text's unigram distribution is {unigram_entropy(targets):.4f}"
        )

    def show_sample(self) -> None:
        """Text from the file that was just written."""
        tokenizer = self.session.tokenizer
        if tokenizer is None or not self.config.sample:
            return
        path = manager.step_folder(self.session.out, self.progress.step) / manager.MODEL
        if not path.exists():
            return
        model = TextModel(path)
        prompt = tokenizer.encode_prompt(self.config.prompt)
        ids = [
            *prompt.tolist(),
            *model.generate(prompt, self.config.sample, seed=self.config.seed),
        ]
        self.records.say(f"sample of {path}:\n{tokenizer.decode(ids).decode('utf-8', 'replace')}")


def with_loss(batch: tuple[Array, Array], scale: float) -> tuple[Array, Criterion]:
    """Tokens, and the criterion that holds the model's output against their targets."""
    tokens, targets = batch
    return tokens, CrossEntropy(targets, scale)


def mebibytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**20:.1f} MiB"


def read_flags(world: World, arguments: Sequence[str]) -> Config:
    """The configuration; `--help` is printed by rank 0 only."""
    quiet = contextlib.nullcontext() if world.rank == 0 else contextlib.redirect_stdout(io.StringIO())
    with quiet:
        return parse(arguments)


def command(world: World, arguments: Sequence[str]) -> int:
    """The whole run. Returns the exit status."""
    signals = StopSignals()
    check_not_alone(world)
    check_installation(world)
    config = world.together(lambda: read_flags(world, arguments))
    watchdog, status = stand_guard(world, config)
    check_settings(world, config)
    world.together(lambda: device.use(config.device))
    return Trainer(world, prepare(world, config), watchdog, status, signals).run()


def stand_guard(world: World, config: Config) -> tuple[Watchdog, Status]:
    """What ends the job where it stands still, and what tells the world how it fares. Collective."""
    out, watchdog = Path(config.out), Watchdog(world.rank, config.timeout)
    places = world.everyone(f"process {os.getpid()} on {platform.node()}")
    roll = RollCall(out, world.rank, job=world.share(f"{places[0]}, {time.time_ns()}"))
    if world.rank == 0:
        roll.clear()  # what a job left that was killed while it stood still
    status = Status(out, world.rank, world.size, config.steps)
    world.at_end.append(partial(record_end, status))
    watchdog.gather(roll, places, partial(status.end, FAILED), world.kill)
    status.begin()
    return watchdog, status


def record_end(status: Status, code: int, reason: str) -> None:
    """What the exit status means for status.json."""
    if code == BAD_USAGE:
        status.refused(reason)
    else:
        status.end({0: DONE, REQUEUE: STOPPED}.get(code, FAILED), reason)


def main() -> None:
    """Entry point."""
    run("train", command, sys.argv[1:])


if __name__ == "__main__":
    main()
