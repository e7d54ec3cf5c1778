"""`zero-mpi verify`: recomputes steps of a run and reports the first difference from the records.

Segments of the run are recomputed with the code of training. The settings, data and initial weights must be
those of the run.
"""

import argparse
import json
import os
import random
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.parallel_write import CHUNK_ELEMENTS
from zero_mpi.checkpoint.saver import Parts, parts_of
from zero_mpi.checkpoint.sound import open_checkpoint
from zero_mpi.checkpoint.state import STATE, read_json, read_state
from zero_mpi.checkpoint.weights import WeightSource
from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import few, plural, seconds, write
from zero_mpi.comm.agree import Differs
from zero_mpi.commands.verify.history import (
    History,
    Segment,
    check_tensors,
    differing,
    gaps,
    other,
    read_history,
    records_of,
    steps_of,
)
from zero_mpi.config import toml
from zero_mpi.config.bounds import check, within
from zero_mpi.config.command_line import add_settings, joined, split_flags
from zero_mpi.config.settings import FIELDS, Config, spelled
from zero_mpi.config.toml import checked_type, read_toml
from zero_mpi.data.conversations.chat_template import DAY
from zero_mpi.data.tokenizers.byte import NEVER
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import quoted, shown
from zero_mpi.files.open import exists
from zero_mpi.launch.consistency import SAME_FLAGS, check_installation
from zero_mpi.launch.consistency import check as check_same
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World, run
from zero_mpi.sharding.precision import LossScale
from zero_mpi.telemetry import log
from zero_mpi.telemetry.metrics import METRICS, finite_or_none
from zero_mpi.telemetry.proof import PROOF, bits_of
from zero_mpi.train import observers
from zero_mpi.train.description import (
    CODE,
    FACTS,
    MACHINE,
    NAMES,
    SETTINGS,
    changes,
    identity,
    obey_early,
    settings,
    settings_of,
)
from zero_mpi.train.observers import HeldOutLoss, Observer, StepMade
from zero_mpi.train.resolve import RunSpec, resolve
from zero_mpi.train.resume import CORPUS, SINCE, ResumePoint, differences
from zero_mpi.train.setup import Session, build, fill_parameters
from zero_mpi.train.steps import Steps

PLACES = ("data", "val_data", "init", "lora_init", "teacher", "tokenizer", "chat_template")
MEANS = ("strategy", "transport", "prefetch", "device", "timeout")  # settings that change no bit
OWN = {
    **dict.fromkeys(PLACES, "current path (default: path in the run's settings)"),
    **dict.fromkeys(MEANS, "(default: as in the run)"),
}
MOST_SEED = 1 << 32
INCOMPLETE = 3  # exit status: some of the requested steps could not be recomputed
SAY_SECONDS = 30.0  # seconds between lines on progress
Facts = Mapping[str, Any]
EXAMPLES = """\
Examples:

  mpirun -n 2 zero-mpi verify runs/mine
  mpirun -n 4 zero-mpi verify runs/mine --sample 3
  zero-mpi verify runs/mine --from 200 --to 300 --data TEXT

Exit status 0: the run matches its records; 1: it does not, and a line names the first difference; 3: no
difference was found, but not everything could be recomputed."""


@dataclass(frozen=True)
class Request:
    """Request to verify a run: the run, its settings, and the flags that select steps."""

    run: Path
    config: Config  # settings of the run, with the current paths and values of MEANS
    first: int | None  # steps of the states where recomputation starts and ends; None: first and last
    last: int | None
    sample: int | None  # maximum number of segments to recompute, drawn at random; None: all
    seed: int | None  # random seed for drawing segments; None: any seed
    expect: str | None  # digest that the chain must end with


def make_parser() -> Parser:
    """Return the parser of the command line. It returns only the flags that the user gave."""
    parser = Parser(
        prog="mpirun -n N zero-mpi verify",
        usage="%(prog)s DIR [flags]",
        description="Recompute the steps of a run, on any number of ranks, and compare every bit with its "
        "records.",
        epilog=EXAMPLES,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("run", metavar="DIR", help="run folder, --out of training")
    add("--from", type=int, metavar="STEP", help="start from the state after this step")
    add("--to", type=int, metavar="STEP", help="stop at the state after this step")
    add("--sample", type=int, metavar="K", help="recompute K random segments between checkpoints; 0: none")
    add("--seed", type=int, help="random seed for --sample (default: random, and printed)")
    add("--expect", metavar="HEX", help="digest that the run printed at its end")
    add_settings(parser, OWN)
    return parser


def read_request(arguments: Sequence[str]) -> Request:
    """Return the request of a command line, with the settings of the run and the current paths."""
    overrides, flags = split_flags(make_parser(), arguments, OWN)
    run = Path(flags.pop("run"))
    for name in ("from", "to", "sample", "seed"):
        within(name, flags.get(name, 0), 0, MOST_SEED)
    place = run / toml.CONFIG_FILE
    if not exists(place):
        raise UsageError(f"{shown(run)}: expected a run folder (--out of training) with {toml.CONFIG_FILE}")
    # This job writes nothing and does not resume, so it has no run folder.
    overrides |= {"out": os.devnull, "resume": "never", "dry_run": False}
    config = Config(**joined(read_toml(place, []), overrides))
    check(config)
    if "expect" in flags:
        flags["expect"] = digest = flags["expect"].strip().lower()
        if len(digest) != 64 or not {*digest} <= {*"0123456789abcdef"}:
            raise UsageError(f"--expect {shown(digest)}: expected a digest of 64 hexadecimal digits")
    return Request(run, config, *map(flags.get, ("from", "to", "sample", "seed", "expect")))


def command(world: World, arguments: Sequence[str]) -> int:
    """Verify a run, and print the result. Return the exit status."""
    check_installation(world)
    request: Request = world.run_on_all(lambda: read_request(arguments))
    log.install(world.rank, world.size).to_stderr = True  # stdout has only the result
    facts = {name: str(value) for name, value in vars(request).items() if name != "config"}
    facts |= settings(request.config)
    check_same(world.comm, facts, SAME_FLAGS)
    watchdog = Watchdog(world.rank, request.config.timeout, world.kill)
    try:
        status, last = verify(world, request, watchdog)
    except Differs as difference:
        status, last = 1, f"no: {difference}"
    finally:
        watchdog.stop()
    say(world, last)
    return status


def verify(world: World, request: Request, watchdog: Watchdog) -> tuple[int, str]:
    """Verify a run. Return status and last line, or raise Differs on all ranks. Collective."""
    watchdog.beat("reading the records")
    history: History = world.run_on_root(lambda: read_history(request.run, request.expect))
    say(world, f"chain: complete, proof {history.head}", *(f"note: {note}" for note in history.notes))
    for step in history.kept:
        watchdog.beat(f"reading the checkpoint of step {step}")
        world.run_on_all(partial(check_tensors, request.run, step, world))
    world.run_on_all(lambda: check_config(request.run, request.config, history))
    if history.last != (request.config.steps or history.last):
        say(world, f"note: {history.last} of {request.config.steps} steps were run")
    say(world, f"files: valid, including the tensors of {plural(len(history.kept), 'checkpoint')}")
    bounds = request.first or 0, history.last if request.last is None else request.last
    selected = [span for span in history.segments if span.last > bounds[0] and span.start < bounds[1]]
    exact, inexact = list[Segment](), list[Segment]()
    for span in selected:
        is_exact = history.runs[span.run][SETTINGS].get("reduction", "exact") == "exact"
        (exact if is_exact else inexact).append(span)
    chosen = choose(world, request, bounds, exact)
    for segments in (list(group) for _, group in groupby(chosen, key=lambda segment: segment.run)):
        watchdog.beat("reading the data")
        spec = resolve_job(world, request, history, segments)
        compute(world, request.run, spec, segments, watchdog)
    missing = gaps(selected, *bounds)
    parts = ["its files are unchanged", *([] if chosen else ["no step was recomputed"])]
    for text, steps in (
        (f"have the same bits, recomputed on {plural(world.size, 'rank')}", steps_of(chosen)),
        ("cannot be recomputed from this folder", missing),
        ("were run without --reduction exact", [(span.start, span.last) for span in inexact]),
    ):
        if steps:
            parts.append(f"steps {', '.join(few([f'{start + 1}-{last}' for start, last in steps]))} {text}")
    is_complete = chosen and not missing and not inexact
    return (0 if is_complete else INCOMPLETE), f"{'yes' if is_complete else 'incomplete'}: {'; '.join(parts)}"


def choose(
    world: World, request: Request, bounds: tuple[int, int], chosen: Sequence[Segment]
) -> Sequence[Segment]:
    """Return the segments to recompute, on all ranks. Raise UsageError for an empty range. Collective."""
    if (request.first, request.last) != (None, None):
        if bounds[0] >= bounds[1]:
            raise UsageError(f"--from {bounds[0]} --to {bounds[1]}: there is no step between them")
        if chosen:
            extent = f"from step {chosen[0].start} to step {chosen[-1].last}"
            say(world, f"{extent}, extended to full segments")
    if request.sample is not None:
        seed = request.seed
        if seed is None:
            seed = world.run_on_root(lambda: secrets.randbelow(MOST_SEED))
        say(world, f"sample: {request.sample} of {len(chosen)} segments, --seed {seed}")
        places = random.Random(seed).sample(range(len(chosen)), min(request.sample, len(chosen)))
        chosen = [chosen[place] for place in sorted(places)]
    return chosen


def resolve_job(world: World, request: Request, history: History, segments: Sequence[Segment]) -> RunSpec:
    """Prepare a job of the run with its data and files. Raise Differs if they have changed. Collective."""
    job = history.runs[segments[0].run]
    config = world.run_on_all(lambda: config_of(request, job))
    spec = resolve(world, config, cached=False, begun=job[FACTS].get("data.tokenizer"))
    notes = world.run_on_root(lambda: check_facts(spec, job, request.run, segments))
    say(world, *(f"note: {note}" for note in notes))
    return spec


def config_of(request: Request, job: Facts) -> Config:
    """Return the settings with the values recorded for a job. Raise UsageError for an invalid value."""
    recorded = {"bos": NEVER, "template_date": DAY, **job[SETTINGS]}  # not recorded by older runs
    values = {name: recorded[name] for name in NAMES if name in recorded}
    for name, value in values.items():
        if value is not None:
            values[name] = checked_type(request.run / PROOF, name, value)
    config: Config = replace(request.config, **values)
    check(config)
    return config


def say(world: World, *texts: str) -> None:
    """Print lines, on rank 0 only. Collective."""
    world.on_root(lambda: write(texts))


def check_config(run: Path, config: Config, history: History) -> None:
    """Raise Differs unless config.toml and checkpoints have the settings of the chain."""
    job = history.runs[-1]  # a setting that is newer than the run has its default
    refuse(toml.CONFIG_FILE, settings_of(config), {**settings_of(Config()), **job[SETTINGS]})
    keys = {*Config().fixed(), *job[FACTS]} - {*toml.PATHS}
    recorded = {key: value for key, value in (job[SETTINGS] | job[FACTS]).items() if key in keys}
    for step in history.kept:
        with differing():
            state = open_checkpoint(folders.step_folder(run, step)).state
            saved = read_json(state, "training.settings")
        refuse(f"the checkpoint of step {step}", {**SINCE, **saved}, {**SINCE, **recorded})


def check_facts(spec: RunSpec, run: Facts, folder: Path, segments: Sequence[Segment]) -> list[str]:
    """Raise Differs unless data and initial weights match the run's job and its checkpoints.

    Return notes on other differences, in machine and package, that may change bits.
    """
    current: Facts = json.loads(json.dumps(identity(spec.config, spec.description, spec.weights)))
    refuse("here", current[FACTS], run[FACTS])
    for step in sorted({step for span in segments for step in (span.start, span.last * span.ends) if step}):
        state = open_checkpoint(folders.step_folder(folder, step)).state
        saved = {**SINCE, **read_json(state, "training.settings")}
        refuse("here", dict(spec.description.settings), saved, f"the checkpoint of step {step}")
    notes = list(changes(run[MACHINE], current[MACHINE], "the run"))
    if run.get(CODE, current[CODE]) != current[CODE]:
        versions = f"{quoted(run[CODE])}, now {quoted(current[CODE])}"
        notes.append(f"the package differs from that of the run ({versions}): bits may differ")
    return notes


def refuse(source: str, facts: Facts, recorded: Facts, record: str = f"the chain in {PROOF}") -> None:
    """Raise Differs for the first value that is not the recorded value, naming `record`."""
    for key, before, now in differences(recorded, facts):
        label = {"corpus": CORPUS}.get(key, spelled(key) if key in FIELDS else shown(key))
        place = source if source == "here" else f"in {source}"
        raise Differs(f"{label} is {quoted(now)} {place}, and {quoted(before)} in {record}")


class Recomputation(Steps, Observer):
    """Steps that stop at the first difference from a record. Rank 0 has the records."""

    def __init__(self, session: Session, watchdog: Watchdog) -> None:
        super().__init__(session)
        self._watchdog, self._log_time = watchdog, time.monotonic()
        self._records: Iterator[Facts] | None = None
        self.difference = ""  # description of the first difference

    def make(self, segment: Segment, records: Iterator[Facts] | None) -> None:
        session, config = self.session, self.session.config
        self._records, goes_on = records, config.init is not None
        self.observers = [
            observers.SkippedSteps(session.module.loss_scale, lambda: session.optimizer.skipped),
            observers.Evaluation(config.eval_every, config.steps, self.evaluate, first=goes_on),
            self,
        ]
        while self.progress.step < segment.last and not self.step():
            if time.monotonic() - self._log_time > SAY_SECONDS:
                self._log_time = time.monotonic()
                log.info("step %d of %s", self.progress.step, segment.text)

    def ends(self, step: StepMade) -> None:
        if self._records is None or self.difference:
            return
        record = next(self._records, {})
        if record.get("step") != step.number:
            self.difference = f"step {step.number} has no record at its position in {METRICS}"
        elif values := other(bits_of(finite_or_none(step.record)), bits_of(record)):
            name, new, old = values
            self.difference = f"step {step.number}: {name} is {old} in the records, but {new} when recomputed"

    def step(self) -> bool:
        self._watchdog.beat(f"step {self.progress.step + 1}")
        return super().step()

    def evaluate(self) -> HeldOutLoss | None:
        self._watchdog.beat("evaluation")
        return super().evaluate()

    def wants_to_stop(self) -> bool:
        return bool(self.difference)


def compute(
    world: World, folder: Path, spec: RunSpec, segments: Sequence[Segment], watchdog: Watchdog
) -> None:
    """Recompute segments of one job. Raise Differs on all ranks at the first difference. Collective.

    All segments share a session. Each segment begins by reading its first state.
    """
    session: Session | None = None
    for segment in segments:
        watchdog.beat(f"reading the state of step {segment.start}")
        begun = time.monotonic()
        place = folders.step_folder(folder, segment.start)
        files = world.run_on_all(partial(open_checkpoint, place)) if segment.start else None
        start = replace(spec, checkpoint=ResumePoint(place, files) if files else None)
        if session is None:
            session = build(world, start)
            steps = Recomputation(session, watchdog)
        else:
            scale = session.module.loss_scale
            fresh = LossScale(scale.dynamic)
            scale.exponent, scale.good_steps = fresh.exponent, fresh.good_steps
            steps.progress = fill_parameters(world, session.optimizer, start)
        records = (record for record in records_of(folder) if record["step"] > segment.start)
        steps.make(segment, records if world.rank == 0 else None)
        if problem := world.comm.broadcast_object(steps.difference):
            raise Differs(problem)
        if segment.ends:
            watchdog.beat(f"comparing the state of step {segment.last}")
            compare_state(world, folder, session, segment.last)
        say(world, f"{segment.text}: the same bits, {seconds(time.monotonic() - begun)}")
    if session is not None:
        comm = session.comm
        del session, steps  # free the arrays before `close` frees their memory
        comm.close()


def compare_state(world: World, folder: Path, session: Session, step: int) -> None:
    """Raise Differs unless all tensors are equal to those in a step's checkpoint. Collective."""
    parts, place = parts_of(session.optimizer, session.description), folders.step_folder(folder, step)
    mismatches = world.results(lambda: min(others(place, parts, session.comm.rank), default=None))
    first = min(filter(None, mismatches), default=None)
    if first is not None:
        raise Differs(f"step {step}: {first[-1]}")


def others(folder: Path, parts: Parts, rank: int) -> Iterator[tuple[int, int, int, str]]:
    """Yield (file, tensor, element, text) where this rank's shards differ. Raise FileError for a bad file.

    A chunk of a tensor yields at most its first different element.
    """
    files = open_checkpoint(folder)
    sources: dict[str, WeightSource] = {**files.weights, STATE: files.state}
    for number, (role, shards) in enumerate(parts.items()):
        file = sources[role]
        read = partial(read_state, files.state) if role == STATE else file.read
        order = {name: place for place, name in enumerate(file.tensors)}
        chunks = ((shard, at) for shard in shards for at in range(0, shard.values.size, CHUNK_ELEMENTS))
        runs = (
            shard.runs(shard.partition.bounds[rank] + at, shard.on_host(slice(at, at + CHUNK_ELEMENTS)))
            for shard, at in chunks
        )
        for name, first, values in chain.from_iterable(runs):
            saved = read(name, first, first + values.size)
            odd = np.flatnonzero(values.view(f"u{values.itemsize}") != saved.view(f"u{values.itemsize}"))[:1]
            for place in odd.tolist():
                text = f"element {first + place} of {shown(name)} is {saved[place]:.9g} in {folder.name}/"
                text += f"{file.path.name}, but {values[place]:.9g} when recomputed"
                yield number, order[name], first + place, text


def main() -> None:
    obey_early(sys.argv[1:], lambda arguments: read_request(arguments).config)
    run("verify", command, sys.argv[1:])
