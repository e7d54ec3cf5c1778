"""Computes the steps of two runs again on this one rank, and tells what differs first in what they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from tempfile import TemporaryFile
from typing import Any

from zero_mpi.config.settings import FIELDS
from zero_mpi.errors import JobError, UsageError
from zero_mpi.inspect.tensors import Report
from zero_mpi.inspect.two_runs import RunSaid
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World
from zero_mpi.session.identity import FACTS, SETTINGS
from zero_mpi.session.resolve import resolve
from zero_mpi.session.setup import build
from zero_mpi.verify.claim import records_of
from zero_mpi.verify.findings import Differs
from zero_mpi.verify.premises import check_facts
from zero_mpi.verify.recompute import Comparison, Recomputation, check_reduction, compare_state, point_of
from zero_mpi.verify.stage_digests import Seen, ShownSteps
from zero_mpi.verify.stretches import Stretch

# Means of computing that move no bit, but the order in which tensors come: the same for both.
ORDERING: dict[str, Any] = {name: FIELDS[name].default for name in ("strategy", "transport", "bucket_mb")}
Runs = Mapping[str, RunSaid]  # by what they are called


def compute_runs(world: World, runs: Runs, start: int, last: int) -> Report:
    """Compute steps from a state that both runs have, by the settings of each.

    `differs` has the first few things that the two computations make otherwise, `runs` by name what a run
    has otherwise than it comes out here ("" for nothing). Runs of the same settings and data are computed
    once.
    """
    told = list(runs.values())
    alike = all(told[0].identity.get(part) == told[1].identity.get(part) for part in (SETTINGS, FACTS))
    groups = [runs] if alike else [{name: run} for name, run in runs.items()]
    watchdog = Watchdog(world.rank, told[0].config.timeout, world.kill)
    found: Report = {"from": start, "to": last, "differs": [], "runs": {}, "notes": []}
    try:
        with TemporaryFile() as file:
            for number, group in enumerate(groups):
                seen = Seen(file, holds=number > 0)
                texts, notes = compute(world, group, Stretch(start, last, False, 0), seen, watchdog)
                found["runs"] |= texts
                found["notes"] += [note for note in notes if note not in found["notes"]]
                found["differs"] += seen.found
    except (UsageError, JobError, Differs) as error:
        found["problem"] = str(error)
    finally:
        watchdog.stop()
    return found


def compute(
    world: World, runs: Runs, stretch: Stretch, seen: Seen, watchdog: Watchdog
) -> tuple[dict[str, str], list[str]]:
    """Compute steps by the settings of the first of some runs. Returns what each has otherwise, and notes.

    Raises UsageError and Differs where the data and settings of the run are not there.
    """
    run = next(iter(runs.values()))
    check_reduction(run.config)
    watchdog.beat("reading the data")
    spec = resolve(world, replace(run.config, **ORDERING))
    notes = check_facts(spec, run.identity, run.folder, [])
    session = build(world, replace(spec, checkpoint=point_of(world, run.folder, stretch.start)))
    comparisons = {name: comparison_after(told, stretch.start) for name, told in runs.items()}
    steps = Recomputation(session, watchdog)
    steps.pace = shown = ShownSteps(session, seen, comparisons.values())
    steps.make(stretch, shown)
    texts = {}
    for name, told in runs.items():
        texts[name] = comparisons[name].found
        if not texts[name] and stretch.last in told.checkpoints:
            try:
                compare_state(world, told.folder, session, stretch.last)
            except Differs as difference:
                texts[name] = str(difference)
    comm = session.comm
    del session, steps, shown  # before the memory that they lie in
    comm.close()
    return texts, notes


def comparison_after(told: RunSaid, step: int) -> Comparison:
    """Holds the steps after one to the records of a run."""
    return Comparison(record for record in records_of(told.folder) if record["step"] > step)
