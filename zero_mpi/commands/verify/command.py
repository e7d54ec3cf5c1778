"""`zero-mpi verify`: from the flags to a yes or to the first difference, on all ranks."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from functools import partial
from itertools import groupby

from zero_mpi.cli.text import few, plural, write
from zero_mpi.commands.verify.compute import check_config, check_facts, compute
from zero_mpi.commands.verify.history import (
    Differs,
    History,
    Segment,
    Steps,
    agreed,
    between,
    check_tensors,
    drawn,
    gaps,
    joined,
    of_root,
    read_history,
)
from zero_mpi.commands.verify.request import MOST_SEED, Request, config_then, make_parser, read_request
from zero_mpi.errors import UsageError
from zero_mpi.launch.consistency import check, check_installation, check_not_alone
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World, run
from zero_mpi.telemetry import log
from zero_mpi.telemetry.proof import PROOF
from zero_mpi.train.identity import SETTINGS
from zero_mpi.train.resolve import RunSpec, resolve
from zero_mpi.train.same_flags import obey_early

__all__ = ["command", "main", "make_parser"]
INCOMPLETE = 3  # exit status: not all that was asked for could be computed again


def command(world: World, arguments: Sequence[str]) -> int:
    """Verify a run, and say what came of it. Returns the exit status."""
    check_not_alone(world)
    check_installation(world)
    request: Request = world.together(lambda: read_request(arguments))
    log.install(world.rank, world.size).to_stderr = True  # stdout has the findings and nothing else
    check(world.comm, request.facts(), "start all ranks with the same flags and variables")
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
    say(world, *([f"chain: whole, proof {history.head}"] if history.head else []))
    say(world, *(f"note: {note}" for note in history.notes))
    for step in history.kept:
        watchdog.beat(f"reading the checkpoint of step {step}")
        agreed(world, partial(check_tensors, request.run, step, world))
    agreed(world, lambda: check_config(request, history))
    if history.at != (request.config.steps or history.at):
        say(world, f"note: {history.at} of {request.config.steps} steps were made")
    say(world, f"files: sound, the tensors of {plural(len(history.kept), 'checkpoint')} too")
    bounds = request.first or 0, history.at if request.last is None else request.last
    asked = between(history.segments, *bounds)
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
    return answer(world.size, history.head, chosen, gaps(asked, *bounds), inexact)


def choose(world: World, request: Request, bounds: Steps, chosen: Sequence[Segment]) -> Sequence[Segment]:
    """Return the stretches to compute, the same on all ranks. Collective; raises UsageError."""
    if (request.first, request.last) != (None, None):
        if bounds[0] >= bounds[1]:
            raise UsageError(f"--from {bounds[0]} --to {bounds[1]}: there is no step between them")
        if chosen:
            between_states = f"from step {chosen[0].start} to step {chosen[-1].last}"
            say(world, f"{between_states}, which are states that are there")
    if request.sample is not None:
        seed = request.seed
        if seed is None:
            seed = of_root(world, lambda: secrets.randbelow(MOST_SEED))
        say(world, f"sample: {request.sample} of {len(chosen)} stretches, by --seed {seed}")
        chosen = drawn(chosen, request.sample, seed)
    return chosen


def look(world: World, request: Request, history: History, segments: Sequence[Segment]) -> RunSpec:
    """Return a job of the run, its data and files looked at; raises Differs for others. Collective."""
    said = history.runs[segments[0].run]
    config = request.config
    if SETTINGS in said:
        config = world.together(lambda: config_then(config, said[SETTINGS], request.run / PROOF))
    spec = resolve(world, config, cached=False)
    notes = of_root(world, lambda: check_facts(spec, said, request.run, segments))
    say(world, *(f"note: {note}" for note in notes))
    return spec


def answer(
    ranks: int, head: str, chosen: Sequence[Segment], missing: Sequence[Steps], inexact: Sequence[Steps]
) -> tuple[int, str]:
    """Return the exit status, and a line that says what is true of the run and what nobody can compute."""
    found = {
        f"have the same bits, computed again on {plural(ranks, 'rank')}": joined(chosen),
        "cannot be, from this folder": missing,
        "have no --reduction exact": inexact,
    }
    parts = ["its files are those that it has written" if head else "its files agree"]
    parts += [] if chosen else ["no step was computed again"]
    for text, steps in found.items():
        if steps:
            parts.append(f"steps {', '.join(few([f'{start + 1}-{last}' for start, last in steps]))} {text}")
    whole = chosen and not missing and not inexact
    return (0 if whole else INCOMPLETE), f"{'yes' if whole else 'incomplete'}: {'; '.join(parts)}"


def say(world: World, *texts: str) -> None:
    """Print lines on rank 0. Collective."""
    world.on_root(lambda: write(texts))


def main() -> None:
    """Entry point of the command."""
    obey_early(sys.argv[1:], lambda arguments: read_request(arguments).config)
    run("verify", command, sys.argv[1:])
