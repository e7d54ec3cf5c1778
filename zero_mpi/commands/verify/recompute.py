"""Computes stretches of a run again, by the steps that training makes, and compares what comes of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.saver import parts_of
from zero_mpi.checkpoint.sound import CheckpointFiles, open_checkpoint
from zero_mpi.cli.text import elapsed
from zero_mpi.commands.verify.claim import other, records_of
from zero_mpi.commands.verify.findings import Differs, agreed, of_root
from zero_mpi.commands.verify.state_bits import first_other
from zero_mpi.commands.verify.stretches import Stretch
from zero_mpi.files.foreign import shown
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World
from zero_mpi.sharding.loss_scale import LossScale
from zero_mpi.telemetry import log
from zero_mpi.telemetry.metrics import METRICS, finite_or_none
from zero_mpi.telemetry.proof import bits_of
from zero_mpi.train import observers
from zero_mpi.train.observers import HeldOutLoss, Observer, StepMade
from zero_mpi.train.resolve import RunSpec
from zero_mpi.train.resume import ResumePoint
from zero_mpi.train.setup import Session, build, fill_parameters
from zero_mpi.train.steps import Steps

SAY_SECONDS = 30.0  # between signs of life for people


class Comparison(Observer):
    """Holds each step to its record, where there are records: on rank 0. found: the first difference."""

    def __init__(self, records: Iterator[Mapping[str, Any]] | None) -> None:
        self.found, self._records = "", records

    def ends(self, step: StepMade) -> None:
        if self._records is None or self.found:
            return
        said = next(self._records, {})
        if said.get("step") != step.number:
            self.found = f"step {step.number} has no record in its place in {METRICS}"
            return
        found = other(bits_of(finite_or_none(step.record)), bits_of(said))
        if found:
            name, now, before = found
            self.found = f"step {step.number}: {name} is {before} in the records, and {now} computed again"


class Recomputation(Steps):
    """Makes steps of a run again, up to the first that differs."""

    def __init__(self, session: Session, watchdog: Watchdog) -> None:
        super().__init__(session)
        self._watchdog, self._comparison = watchdog, Comparison(None)
        self._said = time.monotonic()

    def make(self, stretch: Stretch, comparison: Comparison) -> None:
        """Make the steps of a stretch, as they are to be compared. Collective."""
        session, config = self.session, self.session.config
        self.progress, self._comparison = session.progress, comparison
        goes_on = config.init is not None
        self.observers = [
            observers.SkippedSteps(session.module.loss_scale, lambda: session.optimizer.skipped),
            observers.Evaluation(config.eval_every, config.steps, self.evaluate, first=goes_on),
            comparison,
        ]
        while self.progress.step < stretch.last and not self.step():
            if time.monotonic() - self._said > SAY_SECONDS:
                self._said = time.monotonic()
                log.info("step %d of %s", self.progress.step, stretch.text)

    def step(self) -> bool:
        self._watchdog.beat(f"step {self.progress.step + 1}")
        return super().step()

    def evaluate(self) -> HeldOutLoss | None:
        self._watchdog.beat("evaluation")
        return super().evaluate()

    def wants_to_stop(self) -> bool:
        return bool(self._comparison.found)


def compute(
    world: World,
    run: Path,
    spec: RunSpec,
    stretches: Sequence[Stretch],
    watchdog: Watchdog,
    say: Callable[[str], None],
) -> None:
    """Compute stretches of one job of a run; raises Differs on all ranks at the first difference. Collective.

    One session serves all of them: each begins by reading its state. `say` is told of each, on all ranks.
    """
    session: Session | None = None
    for stretch in stretches:
        watchdog.beat(f"reading the state of step {stretch.start}")
        begun, point = time.monotonic(), point_of(world, run, stretch.start)
        start = replace(spec, checkpoint=point)
        if session is None:
            session = build(world, start)
            steps = Recomputation(session, watchdog)
        else:
            session.progress = reload(world, session, start)
        records = (record for record in records_of(run) if record["step"] > stretch.start)
        comparison = Comparison(records if world.rank == 0 else None)
        steps.make(stretch, comparison)
        if found := of_root(world, lambda seen=comparison: seen.found):  # type: ignore[misc]
            raise Differs(found)
        if stretch.ends:
            watchdog.beat(f"comparing the state of step {stretch.last}")
            compare_state(world, run, session, stretch.last)
        say(f"{stretch.text}: the same bits, {elapsed(time.monotonic() - begun)}")
    if session is not None:
        comm = session.comm
        del session, steps  # before the memory that they lie in
        comm.close()


def point_of(world: World, run: Path, step: int) -> ResumePoint | None:
    """The checkpoint of a step, None for the first weights. Collective; raises UsageError."""
    if step == 0:
        return None
    folder = folders.step_folder(run, step)
    files: CheckpointFiles = world.together(lambda: open_checkpoint(folder))
    return ResumePoint(folder, files)


def reload(world: World, session: Session, spec: RunSpec) -> Any:
    """Let a session that has made steps go on from another state, as if it began there. Collective."""
    scale = session.module.loss_scale
    fresh = LossScale.start(scale.dynamic)
    scale.exponent, scale.good_steps = fresh.exponent, fresh.good_steps
    return fill_parameters(world, session.optimizer, spec)


def compare_state(world: World, run: Path, session: Session, step: int) -> None:
    """Raise Differs unless all tensors are those of the checkpoint of a step. Collective."""
    parts = parts_of(session.optimizer, session.description)
    folder = folders.step_folder(run, step)
    found = agreed(world, lambda: first_other(open_checkpoint(folder), parts, session.comm.rank))
    first = min(filter(None, world.comm.allgather_object(found)), default=None)
    if first is not None:
        raise Differs(
            f"step {step}: element {first.element} of {shown(first.name)} is {first.stored:.9g} in "
            f"{folder.name}/{first.file}, and {first.found:.9g} computed again"
        )
