"""Recomputation of segments of a run, by the steps that training makes, and comparison of the results.

The settings, the data and the first weights must be the run's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.parallel_write import PIECE_ELEMENTS
from zero_mpi.checkpoint.saver import Parts, parts_of
from zero_mpi.checkpoint.shards import Contribution, Run
from zero_mpi.checkpoint.sound import open_checkpoint
from zero_mpi.checkpoint.state import STATE, read_json, read_state
from zero_mpi.checkpoint.weights import WeightSource
from zero_mpi.cli.text import elapsed
from zero_mpi.commands.verify.history import (
    Differs,
    History,
    Segment,
    agreed,
    differing,
    of_root,
    other,
    records_of,
)
from zero_mpi.config import toml
from zero_mpi.config.settings import FIELDS, Config, spelled
from zero_mpi.files.foreign import quoted, shown
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World
from zero_mpi.sharding.precision import LossScale
from zero_mpi.telemetry import log
from zero_mpi.telemetry.metrics import METRICS, finite_or_none
from zero_mpi.telemetry.proof import PROOF, bits_of
from zero_mpi.train import observers
from zero_mpi.train.description import CODE, FACTS, MACHINE, SETTINGS, changes, identity, settings_of
from zero_mpi.train.observers import HeldOutLoss, Observer, StepMade
from zero_mpi.train.resolve import RunSpec
from zero_mpi.train.resume import CORPUS, SINCE, ResumePoint, differences
from zero_mpi.train.setup import Session, build, fill_parameters
from zero_mpi.train.steps import Steps

SAY_SECONDS = 30.0  # seconds between progress lines
Facts = Mapping[str, Any]


def check_config(run: Path, config: Config, history: History) -> None:
    """Raise Differs unless config.toml and checkpoints have the settings of the chain, if there is one."""
    if SETTINGS in (said := history.runs[-1]):  # a setting that was added later had its default
        refuse(toml.CONFIG_FILE, settings_of(config), {**settings_of(Config()), **said[SETTINGS]})
        stays = {*Config().fixed(), *said[FACTS]} - {*toml.PATHS}
        kept = {key: value for key, value in (said[SETTINGS] | said[FACTS]).items() if key in stays}
        for step in history.kept:
            with differing():
                state = open_checkpoint(folders.step_folder(run, step)).state
                found = read_json(state, "training.settings")
            refuse(f"the checkpoint of step {step}", {**SINCE, **found}, {**SINCE, **kept})


def check_facts(spec: RunSpec, run: Facts, folder: Path, segments: Sequence[Segment]) -> list[str]:
    """Raise Differs unless data and first weights are those of a job of the run and of its checkpoints.

    Returns notes on what may change bits all the same: the machine and the package.
    """
    now: Facts = json.loads(json.dumps(identity(spec.config, spec.description, spec.weights)))
    if FACTS in run:
        refuse("here", now[FACTS], run[FACTS])
    machine = run.get(MACHINE)
    for step in sorted({step for one in segments for step in (one.start, one.last * one.ends) if step}):
        state = open_checkpoint(folders.step_folder(folder, step)).state
        said = {**SINCE, **read_json(state, "training.settings")}
        refuse("here", dict(spec.description.settings), said, f"the checkpoint of step {step}")
        machine = machine or read_json(state, "training.machine")
    notes = list(changes(machine or now[MACHINE], now[MACHINE], "the run"))
    if run.get(CODE, now[CODE]) != now[CODE]:
        found = f"{quoted(run[CODE])}, now {quoted(now[CODE])}"
        notes.append(f"the package differs from that of the run ({found}): bits may differ")
    return notes


def refuse(where: str, found: Facts, said: Facts, whose: str = f"the chain in {PROOF}") -> None:
    """Raise Differs with the first value that is not the recorded one."""
    for key, before, now in differences(said, found):
        label = {"corpus": CORPUS}.get(key, spelled(key) if key in FIELDS else shown(key))
        place = where if where == "here" else f"in {where}"
        raise Differs(f"{label} is {quoted(now)} {place}, and {quoted(before)} in {whose}")


class Comparison(Observer):
    """Compares each step with its record, where there are records: on rank 0. found: the first difference."""

    def __init__(self, records: Iterator[Mapping[str, Any]] | None) -> None:
        self.found, self._records = "", records

    def ends(self, step: StepMade) -> None:
        if self._records is None or self.found:
            return
        said = next(self._records, {})
        if said.get("step") != step.number:
            self.found = f"step {step.number} has no record at its position in {METRICS}"
            return
        found = other(bits_of(finite_or_none(step.record)), bits_of(said))
        if found:
            name, now, before = found
            self.found = f"step {step.number}: {name} is {before} in the records, but {now} when recomputed"


class Recomputation(Steps):
    """Makes steps of a run again, up to the first that differs."""

    def __init__(self, session: Session, watchdog: Watchdog) -> None:
        super().__init__(session)
        self._watchdog, self._comparison = watchdog, Comparison(None)
        self._said = time.monotonic()

    def make(self, segment: Segment, records: Iterator[Facts] | None) -> str:
        """Make the steps of a segment. Return the first difference to the records. Collective."""
        session, config = self.session, self.session.config
        self.progress, self._comparison = session.progress, Comparison(records)
        goes_on = config.init is not None
        self.observers = [
            observers.SkippedSteps(session.module.loss_scale, lambda: session.optimizer.skipped),
            observers.Evaluation(config.eval_every, config.steps, self.evaluate, first=goes_on),
            self._comparison,
        ]
        while self.progress.step < segment.last and not self.step():
            if time.monotonic() - self._said > SAY_SECONDS:
                self._said = time.monotonic()
                log.info("step %d of %s", self.progress.step, segment.text)
        return self._comparison.found

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
    segments: Sequence[Segment],
    watchdog: Watchdog,
    say: Callable[[str], None],
) -> None:
    """Compute segments of one job of a run; raises Differs on all ranks at the first difference. Collective.

    One session serves all of them: each begins by reading its state. `say` reports each, on all ranks.
    """
    session: Session | None = None
    for segment in segments:
        watchdog.beat(f"reading the state of step {segment.start}")
        begun = time.monotonic()
        folder = folders.step_folder(run, segment.start)
        files = world.together(partial(open_checkpoint, folder)) if segment.start else None
        start = replace(spec, checkpoint=ResumePoint(folder, files) if files else None)
        if session is None:
            session = build(world, start)
            steps = Recomputation(session, watchdog)
        else:
            scale = session.module.loss_scale
            fresh = LossScale.start(scale.dynamic)
            scale.exponent, scale.good_steps = fresh.exponent, fresh.good_steps
            session.progress = fill_parameters(world, session.optimizer, start)
        records = (record for record in records_of(run) if record["step"] > segment.start)
        found = steps.make(segment, records if world.rank == 0 else None)
        if told := of_root(world, partial(str, found)):
            raise Differs(told)
        if segment.ends:
            watchdog.beat(f"comparing the state of step {segment.last}")
            compare_state(world, run, session, segment.last)
        say(f"{segment.text}: the same bits, {elapsed(time.monotonic() - begun)}")
    if session is not None:
        comm = session.comm
        del session, steps  # freed before the memory that they lie in
        comm.close()


def compare_state(world: World, run: Path, session: Session, step: int) -> None:
    """Raise Differs unless all tensors are those of the checkpoint of a step. Collective."""
    folder, parts = folders.step_folder(run, step), parts_of(session.optimizer, session.description)
    found = agreed(world, lambda: min(others(folder, parts, session.comm.rank), default=None))
    first = min(filter(None, world.comm.allgather_object(found)), default=None)
    if first is not None:
        raise Differs(f"step {step}: {first[-1]}")


def others(folder: Path, parts: Parts, rank: int) -> Iterator[tuple[int, int, int, str]]:
    """Yield (file, tensor, element, text) where this rank's slices are not the checkpoint's; FileError.

    It is the first such element of each tensor and piece.
    """
    files = open_checkpoint(folder)
    sources: dict[str, WeightSource] = {**files.weights, STATE: files.state}
    for number, (role, given) in enumerate(parts.items()):
        file = sources[role]
        read = partial(read_state, files.state) if role == STATE else file.read
        order = {name: place for place, name in enumerate(file.tensors)}
        for name, first, run in chain.from_iterable(runs_of(one, rank) for one in given):
            stored = read(name, first, first + run.size)
            odd = np.flatnonzero(run.view(f"u{run.itemsize}") != stored.view(f"u{run.itemsize}"))[:1]
            for place in odd.tolist():
                text = f"element {first + place} of {shown(name)} is {stored[place]:.9g} in {folder.name}/"
                text += f"{file.path.name}, but {run[place]:.9g} when recomputed"
                yield number, order[name], first + place, text


def runs_of(given: Contribution, rank: int) -> Iterator[Run]:
    """Yield this rank's elements as runs of tensors, a piece at a time."""
    for at in range(0, given.values.size, PIECE_ELEMENTS):
        yield from given.runs(
            given.partition.bounds[rank] + at, given.on_host(slice(at, at + PIECE_ELEMENTS))
        )
