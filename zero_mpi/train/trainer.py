"""Training: `Trainer.run` makes steps until the last step or until a request to stop.

`steps` defines a step. Observers do everything else that a step needs (`observers`, `saving`).
"""

import os
import platform
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np

from zero_mpi.arguments import UNCOUNTED
from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.folders import OPTIMIZER
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.sound import ID, STATE_DIGEST
from zero_mpi.checkpoint.weights import keys_of
from zero_mpi.config.bounds import seconds
from zero_mpi.config.settings import FIELDS, step_range
from zero_mpi.config.toml import recorded
from zero_mpi.data import Windows, unigram_entropy
from zero_mpi.data.packing import PairBatch
from zero_mpi.device.types import Array
from zero_mpi.launch.consistency import blas
from zero_mpi.launch.ending import REQUEUE
from zero_mpi.launch.stopping import OVER, STEPS, signals
from zero_mpi.launch.time_limit import TimeLimit, find_job
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World
from zero_mpi.telemetry import events, log, trackers
from zero_mpi.telemetry.events import Events
from zero_mpi.telemetry.metrics import Records
from zero_mpi.telemetry.proof import JobStart
from zero_mpi.telemetry.trackers import TrackedJob
from zero_mpi.train.description import identity
from zero_mpi.train.observers import (
    Costs,
    Divergence,
    Evaluation,
    HeldOutLoss,
    Observer,
    RankFigures,
    RecordWriter,
    SignsOfLife,
    SkippedSteps,
    SlowRanks,
    check_recorded,
)
from zero_mpi.train.saving import EarlyStop, Saving, reason
from zero_mpi.train.setup import Session
from zero_mpi.train.steps import Steps
from zero_mpi.train.summary import Outcome, Start, cautions, lines, measure, plan
from zero_mpi.train.text_model import TextModel
from zero_mpi.train.timeline import Tracer


class Trainer(Steps):
    """Loop that trains a session until its last step."""

    def __init__(self, world: World, session: Session, watchdog: Watchdog, outcome: Outcome) -> None:
        super().__init__(session)
        config = session.config
        self.world, self.watchdog, self.outcome = world, watchdog, outcome
        self.records: Records = world.run_on_all(partial(begin_records, session, world.rank))
        self.divergence = Divergence(session.module.loss_scale)
        self.saving = Saving(session, watchdog, outcome.events, self.records)
        self.saving.saver.prepare = world.comm.folder_problem
        self.limit = TimeLimit(seconds(config.max_time), find_job() if world.rank == 0 else None)
        self.ended_by = ""

    def observe(self, start: Start) -> list[Observer]:
        """Return the observers of the steps, in the order in which they are called."""
        session, config = self.session, self.session.config
        meter, on_slow = session.comm.meter, partial(setattr, self.outcome.status, "slow")
        self.rank_figures = RankFigures(self.world, self.records.logs, meter, SlowRanks(self.hosts), on_slow)
        self.pace = self.rank_figures.pace
        # With packed windows, the amount of computation depends on the lengths of the documents.
        windows = session.loader.windows
        is_known = all(isinstance(part, Windows) for part in getattr(windows, "parts", (windows,)))
        share = start.share if is_known else lambda seconds: None
        self.costs = Costs(meter, session.loader.positions_per_step, share)
        self.evaluation = Evaluation(config.eval_every, config.steps, self.evaluate, first=bool(config.init))
        self.early_stop = EarlyStop(self.progress.best, config.patience, session.objective.unit)
        return [
            SignsOfLife(self.watchdog, self.outcome),
            self.costs,
            SkippedSteps(session.module.loss_scale, lambda: session.optimizer.skipped),
            self.evaluation,
            self.early_stop,
            self.rank_figures,
            RecordWriter(self.records),
            self.saving,
            self.divergence,
        ]

    def run(self) -> int:
        """Train until the last step, an early stop or a request to stop. Return the exit status."""
        steps = step_range(self.session.config.trace_steps, self.session.config.steps)
        tracer = Tracer(self.session.comm, self.session.config.trace, steps, self.progress.step)
        self.observers, tokens = self.observe(self.begin()), self.progress.tokens
        signals.enter(STEPS)
        stop = False
        while not (stop or self.is_done()):
            tracer.reach(self.progress.step + 1)
            stop = self.step()
            if stop or self.saving.is_due(self.progress.step) or self.early_stop.is_best():
                self.save()
        if self.saving.saved_step != self.progress.step:
            self.save()
        self.saving.wait(self.progress.step)
        tracer.end(self.progress.step)
        signals.enter(OVER)
        self.saving.announce()
        self.records.close()
        self.world.check(self.records.problem)
        if self.records.head:
            log.info("proof: %s", self.records.head)
        self.rank_figures.close(self.progress.tokens - tokens)
        if stop and not self.is_done():
            signals.name = self.ended_by.strip() or signals.name or "a signal to another rank"
            self.outcome.events.reason = signals.name
            log.info(
                "stopped after step %d%s; the same command continues it", self.progress.step, self.ended_by
            )
            return REQUEUE
        self.divergence.check_end(self.progress.step)
        self.early_stop.report(self.progress.step, self.session.out, self.outcome.events)
        self.close()
        return 0

    def step(self) -> bool:
        """Make one optimizer step and note the best evaluation. Return True if the run must stop."""
        stop = super().step()
        self.progress = replace(self.progress, best=self.early_stop.best)
        return stop

    def is_done(self) -> bool:
        """Return whether the last step is done or the run stops early. The result is equal on all ranks."""
        return self.progress.step >= self.session.config.steps or self.early_stop.is_over()

    def totals(self) -> tuple[float, bool]:
        """Return the loss over all ranks, and whether a rank asks to stop. Raise errors of failed writes."""
        fails = self.saving.saver.failed or bool(self.world.comm.folder_problem() or self.records.problem)
        saves = self.world.rank == 0 and self.saving.clock_says_so()
        flags = self.wants_to_stop(), fails, saves
        loss, stop, failed, save, *self.sums = self.accumulator.totals(*flags, *self.losses.sums)
        self.saving.time_has_come = save > 0
        if failed:
            self.world.check(self.records.problem)
            self.saving.saver.wait()  # raises errors of background saves on all ranks
        return loss, stop > 0

    def evaluate(self) -> HeldOutLoss | None:
        self.watchdog.beat("evaluation")
        return super().evaluate()

    def wants_to_stop(self) -> bool:
        """Return whether this rank received a signal, or, on rank 0, whether time runs out."""
        if self.world.rank == 0 and self.limit.left() < self.seconds_needed():
            self.ended_by = f" in time for {self.limit.name}"
        return bool(signals.name or self.ended_by)

    def seconds_needed(self) -> float:
        """Return the seconds to reserve for another step, an evaluation and the last checkpoint."""
        return 2 * self.costs.longest + self.evaluation.longest + self.saving.seconds_needed()

    def save(self) -> None:
        self.world.check(self.records.problem)
        if self.divergence.worth_saving(self.progress.step):
            self.saving.save(self.progress)

    def begin(self) -> Start:
        """Report the start of the run to the user and in its events. Collective."""
        session = self.session
        self.hosts: list[str] = self.world.comm.allgather_object(platform.node())
        peak = measure(self.world, session.module.precision.compute)
        start = Start(session, [*Counter(self.hosts).items()], peak)
        if self.world.rank:
            return start
        start = plan(start)
        self.outcome.begin(start)
        for line in lines(start):
            log.info("%s", line)
        for note in [*session.notes, *map(log.Caution, cautions(start))]:
            log.log_note(note)
        log.debug("BLAS: %s, threads of rank 0: %d", blas(), start.threads)
        for unit in session.module.units:
            count = unit.part.stop - unit.part.start
            log.debug(
                "unit %s: %s elements, %s on this rank", unit.name, f"{unit.partition.length:,}", f"{count:,}"
            )
        return start

    def close(self) -> None:
        """Log the validation loss with the unigram entropy, and a sample, on rank 0. Collective."""
        self.watchdog.beat("sample")
        if self.world.rank == 0:
            held_out, loss = self.session.held_out, self.evaluation.loss
            if self.session.config.preference is None and loss is not None:
                targets = np.concatenate([batch.targets.ravel() for batch in held_out.batches()])
                entropy = unigram_entropy(targets[targets != UNCOUNTED])
                line = "validation loss %.4f nats per token; unigram entropy of the same text: %.4f"
                log.info(line, loss, entropy)
            signals.cut_short(partial(show_sample, self.session, self.progress.step, self.outcome.events))
        self.session.comm.barrier()


def begin_records(session: Session, rank: int) -> Records:
    """Return the writer of a session's records. Raise JobError or FileError if a file cannot be opened."""
    config, step = session.config, session.progress.step
    job = TrackedJob(session.out, step, asdict(recorded(config)))
    return Records(
        session.out,
        rank,
        done=step,
        steps=config.steps,
        log_every=config.log_every,
        trackers=partial(trackers.begin, config, job),
        beginning=start_of(session) if rank == 0 else None,
    )


def start_of(session: Session) -> JobStart:
    """Return a session's `JobStart`. Raise FileError if an input file cannot be read."""
    run = identity(session.config, session.description, session.weights)
    step, folder = session.progress.step, session.resumed
    if folder is None:
        return JobStart(step, run)
    state = GGUFFile.open(folder / OPTIMIZER)
    in_out = folder.parent == Path(os.path.realpath(session.out))
    return JobStart(step, run, keys_of(state).text(ID), keys_of(state).text(STATE_DIGEST), in_out)


def is_over(session: Session) -> bool:
    """Return whether the run to resume has already ended. The answer is the same on all ranks."""
    progress, config = session.progress, session.config
    is_done = progress.step >= config.steps or progress.best.is_used_up(config.patience)
    return session.resumed is not None and is_done


def say_over(session: Session) -> None:
    """Log that there is nothing to do. Raise JobError if the run has failed."""
    step, steps = session.progress.step, session.config.steps
    check_recorded(session.out, step)
    state = f"and --steps is {steps}; to train longer, increase --steps (or --epochs)"
    if step < steps:
        cause = reason(session.progress.best)
        state = f"where the run stopped early, {cause}; to train longer, increase --patience"
    log.info(
        "nothing to do: %s is at step %d, %s; for a new run use another --out", session.resumed, step, state
    )


def show_sample(session: Session, step: int, sink: Events) -> None:
    """Print text generated from the model file that was just written."""
    config, tokenizer = session.config, session.tokenizer
    if tokenizer is None or not config.sample:
        return
    path = folders.weights_in(folders.step_folder(session.out, step))
    if not path.exists():
        return
    base = session.weights["init"] if session.model.lora is not None else None
    model = TextModel(path) if base is None else TextModel(base, GGUFFile.open(path))
    prompt, ends, prompt_text = question(session), tokenizer.ends, config.prompt
    if prompt is None or prompt_text != FIELDS["prompt"].default:
        prompt, ends = tokenizer.encode_prompt(prompt_text), frozenset()
    else:
        prompt_text = tokenizer.decode(prompt).decode("utf-8", "replace")
    answer = takewhile(lambda id: id not in ends, model.generate(prompt, config.sample, seed=config.seed))
    text = tokenizer.decode([*prompt.tolist(), *answer]).decode("utf-8", "replace")
    log.info_text(f"sample of {path}:", text)
    sink.note(events.SAMPLE, folder=path.parent.name, prompt=prompt_text, text=text)


def question(session: Session) -> Array | None:
    """Return the ids of the first held-out conversation up to its first answer; None if there is none."""
    for batch in session.held_out.batches():
        rows = batch.batch if isinstance(batch, PairBatch) else batch
        first = int(np.argmax(rows.targets[0] != UNCOUNTED))
        return rows.inputs[0, : first + 1] if first else None
    return None
