"""`zero-mpi verify`: from the flags to a yes or to the first difference, on all ranks."""

from __future__ import annotations

import argparse
import os
import random
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import few, plural, write
from zero_mpi.commands.verify.compute import check_config, check_facts, compute
from zero_mpi.commands.verify.history import (
    Differs,
    History,
    Segment,
    Steps,
    agreed,
    check_tensors,
    gaps,
    of_root,
    read_history,
    steps_of,
)
from zero_mpi.config import toml
from zero_mpi.config.bounds import check, within
from zero_mpi.config.command_line import add_settings, given, joined
from zero_mpi.config.settings import Config
from zero_mpi.config.toml import checked_type, read_toml
from zero_mpi.data.conversations.chat_template import DAY
from zero_mpi.data.tokenizers.byte import NEVER
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import exists
from zero_mpi.launch.consistency import check as check_same
from zero_mpi.launch.consistency import check_installation
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World, run
from zero_mpi.telemetry import log
from zero_mpi.telemetry.proof import PROOF
from zero_mpi.train.description import FACTS, NAMES, SETTINGS, obey_early, settings
from zero_mpi.train.resolve import RunSpec, resolve

PLACES = ("data", "val_data", "init", "lora_init", "teacher", "tokenizer", "chat_template")
MEANS = ("strategy", "transport", "prefetch", "device", "timeout")  # ways of computing, which affect no bit
OWN = {
    **dict.fromkeys(PLACES, "current path (default: path in the run's settings)"),
    **dict.fromkeys(MEANS, "(default: as in the run)"),
}
MOST_SEED = 1 << 32
EXAMPLES = """\
Examples:

  mpirun -n 2 zero-mpi verify runs/mine
  mpirun -n 4 zero-mpi verify runs/mine --sample 3
  zero-mpi verify runs/mine --from 200 --to 300 --data TEXT

Exit status 0: the run matches its records; 1: it does not, and a line names the first difference; 3: no
difference was found, but not everything could be recomputed."""


@dataclass(frozen=True)
class Request:
    """Run to verify, and how."""

    run: Path
    config: Config  # settings of the run, with the current places and ways of computing
    first: int | None  # states between which the steps are to be computed; None: all
    last: int | None
    sample: int | None  # maximum number of segments; None: all
    seed: int | None  # random seed of the sample; None: any
    expect: str | None  # digest that the chain has to end with


def make_parser() -> Parser:
    """Make the parser of the command line. Flags that are not given are absent from the result."""
    parser = Parser(
        prog="mpirun -n N zero-mpi verify",
        usage="%(prog)s DIR [flags]",
        description="Recompute the steps of a run, on any number of ranks, and compare every bit with its "
        "records.",
        epilog=EXAMPLES,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("run", metavar="DIR", help="run folder, --out of training")
    parser.add_argument("--from", type=int, metavar="STEP", help="start from the state after this step")
    parser.add_argument("--to", type=int, metavar="STEP", help="stop at the state after this step")
    parser.add_argument(
        "--sample", type=int, metavar="K", help="recompute K random segments between checkpoints; 0: none"
    )
    parser.add_argument("--seed", type=int, help="random seed for --sample (default: random, and printed)")
    parser.add_argument("--expect", metavar="HEX", help="digest that the run printed at its end")
    add_settings(parser, OWN)
    return parser


def read_request(arguments: Sequence[str]) -> Request:
    """Return the request of a command line: the settings of the run with the current values put in."""
    now, own = given(make_parser(), arguments, OWN)
    run = Path(own.pop("run"))
    for name in ("from", "to", "sample", "seed"):
        within(name, own.get(name, 0), 0, MOST_SEED)
    place = run / toml.CONFIG_FILE
    if not exists(place):
        raise UsageError(f"{shown(run)}: expected a run folder (--out of training) with {toml.CONFIG_FILE}")
    # Nothing is to be written or resumed: this job has no folder.
    now |= {"out": os.devnull, "resume": "never", "dry_run": False}
    config = Config(**joined(read_toml(place, []), now))
    check(config)
    return Request(run, config, *map(own.get, ("from", "to", "sample", "seed", "expect")))


INCOMPLETE = 3  # exit status: not all that was asked for could be computed again


def command(world: World, arguments: Sequence[str]) -> int:
    """Verify a run, and print the result. Return the exit status."""
    check_installation(world)
    request: Request = world.together(lambda: read_request(arguments))
    log.install(world.rank, world.size).to_stderr = True  # stdout has the findings and nothing else
    facts = {name: str(value) for name, value in vars(request).items() if name != "config"}
    facts |= settings(request.config)
    check_same(world.comm, facts, "start all ranks with the same flags and variables")
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
    """Return status and last line of a run without a difference; raises Differs on all ranks. Collective."""
    watchdog.beat("reading the records")
    history: History = of_root(world, lambda: read_history(request.run, request.expect))
    say(world, *([f"chain: complete, proof {history.head}"] if history.head else []))
    say(world, *(f"note: {note}" for note in history.notes))
    for step in history.kept:
        watchdog.beat(f"reading the checkpoint of step {step}")
        agreed(world, partial(check_tensors, request.run, step, world))
    agreed(world, lambda: check_config(request.run, request.config, history))
    if history.at != (request.config.steps or history.at):
        say(world, f"note: {history.at} of {request.config.steps} steps were run")
    say(world, f"files: valid, including the tensors of {plural(len(history.kept), 'checkpoint')}")
    bounds = request.first or 0, history.at if request.last is None else request.last
    asked = [one for one in history.segments if one.last > bounds[0] and one.start < bounds[1]]
    said = [history.runs[one.run].get(SETTINGS, {}) for one in asked]
    kinds = [each.get("reduction", request.config.reduction) for each in said]
    exact = [one for one, kind in zip(asked, kinds, strict=True) if kind == "exact"]
    chosen = choose(world, request, bounds, exact)
    for _, group in groupby(chosen, key=lambda segment: segment.run):
        segments = list(group)
        watchdog.beat("reading the data")
        spec = look(world, request, history, segments)
        compute(world, request.run, spec, segments, watchdog, lambda text: say(world, text))
    inexact = [(one.start, one.last) for one in asked if one not in exact]
    missing = gaps(asked, *bounds)
    parts = ["its files are unchanged" if history.head else "its files agree"]
    parts += [] if chosen else ["no step was recomputed"]
    for text, steps in (
        (f"have the same bits, recomputed on {plural(world.size, 'rank')}", steps_of(chosen)),
        ("cannot be recomputed from this folder", missing),
        ("have no --reduction exact", inexact),
    ):
        if steps:
            parts.append(f"steps {', '.join(few([f'{start + 1}-{last}' for start, last in steps]))} {text}")
    whole = chosen and not missing and not inexact
    return (0 if whole else INCOMPLETE), f"{'yes' if whole else 'incomplete'}: {'; '.join(parts)}"


def choose(world: World, request: Request, bounds: Steps, chosen: Sequence[Segment]) -> Sequence[Segment]:
    """Return the segments to compute, the same on all ranks. Collective; raises UsageError."""
    if (request.first, request.last) != (None, None):
        if bounds[0] >= bounds[1]:
            raise UsageError(f"--from {bounds[0]} --to {bounds[1]}: there is no step between them")
        if chosen:
            between_states = f"from step {chosen[0].start} to step {chosen[-1].last}"
            say(world, f"{between_states}, where states are saved")
    if request.sample is not None:
        seed = request.seed
        if seed is None:
            seed = of_root(world, lambda: secrets.randbelow(MOST_SEED))
        say(world, f"sample: {request.sample} of {len(chosen)} segments, --seed {seed}")
        places = random.Random(seed).sample(range(len(chosen)), min(request.sample, len(chosen)))
        chosen = [chosen[place] for place in sorted(places)]
    return chosen


def look(world: World, request: Request, history: History, segments: Sequence[Segment]) -> RunSpec:
    """Return a job of the run with data and files resolved; raises Differs for others. Collective."""
    said, proof = history.runs[segments[0].run], request.run / PROOF

    def config_then() -> Config:
        """Return the settings with those that the job recorded; UsageError for an unknown one."""
        then = {"bos": NEVER, "template_date": DAY, **said[SETTINGS]}  # values from before these settings
        found: Config = replace(
            request.config,
            **{
                name: then[name] if then[name] is None else checked_type(proof, name, then[name])
                for name in NAMES
                if name in then
            },
        )
        check(found)
        return found

    config = world.together(config_then) if SETTINGS in said else request.config
    spec = resolve(world, config, cached=False, begun=said.get(FACTS, {}).get("data.tokenizer"))
    notes = of_root(world, lambda: check_facts(spec, said, request.run, segments))
    say(world, *(f"note: {note}" for note in notes))
    return spec


def say(world: World, *texts: str) -> None:
    """Print lines on rank 0. Collective."""
    world.on_root(lambda: write(texts))


def main() -> None:
    """Run the command."""
    obey_early(sys.argv[1:], lambda arguments: read_request(arguments).config)
    run("verify", command, sys.argv[1:])
