"""Compares two run folders: the first record and the first checkpoint that differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero_mpi.checkpoint import folders
from zero_mpi.cli.text import plural
from zero_mpi.commands.inspect.compare import compare
from zero_mpi.commands.inspect.pieces import Report
from zero_mpi.commands.verify.claim import RecordFile, other
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import one_line, quoted, shown
from zero_mpi.files.open import exists
from zero_mpi.telemetry.metrics import METRICS
from zero_mpi.telemetry.proof import bits_of


def is_run(path: Path) -> bool:
    """Return whether a path is the folder of a run, which has records."""
    return exists(path / METRICS)


def compare_runs(first: Path, second: Path) -> Report:
    """Return what differs first in the records and in the checkpoints that both run folders have."""
    return {
        "records": compare_records(first, second),
        "checkpoint": compare_checkpoints(first, second),
    }


def compare_records(first: Path, second: Path) -> Report:
    """Return how many records both runs have, and of the first that differs its step, field and values."""
    files = RecordFile(first), RecordFile(second)
    common = 0
    while files[0].step and files[1].step:
        steps = [file.step for file in files]
        if steps[0] != steps[1]:
            files[steps[0] > steps[1]].take()
            continue
        a, b = (bits_of(file.take()) for file in files)
        common += 1
        difference = other(b, a)
        if difference:
            name = difference[0]
            return {"common": common, "step": steps[0], "field": name, "values": [a.get(name), b.get(name)]}
    return {"common": common, "step": None}


def compare_checkpoints(first: Path, second: Path) -> Report:
    """Return how many checkpoints both runs have, and what differs in the first whose tensors differ."""
    found = [dict(folders.steps(run)) for run in (first, second)]
    common = sorted(found[0].keys() & found[1].keys())
    names = ("tensors", "differing", "difference", "only_in_first", "only_in_second")
    for step in common:
        try:
            pair = compare(found[0][step], found[1][step])
        except UsageError as error:
            return {"common": len(common), "step": step, "problem": str(error)}
        if any(pair[name] for name in ("differing", "only_in_first", "only_in_second")):
            return {"common": len(common), "step": step, **{name: pair[name] for name in names}}
    return {"common": len(common), "step": None}


def is_same(found: Report) -> bool:
    """Return whether nothing differs in all that both run folders have."""
    return found["records"]["step"] is None and found["checkpoint"]["step"] is None


def record_line(records: Report) -> str:
    """Return a line about the first record that differs."""
    if records["step"] is None:
        return f"all {plural(records['common'], 'common record')} are the same"
    values = " and ".join(map(value_text, records["values"]))
    return f"the first that differs is of step {records['step']}: {shown(records['field'])} {values}"


def checkpoint_lines(found: Report) -> Iterator[str]:
    """Yield lines about the first checkpoint whose tensors differ."""
    if found["step"] is None:
        yield f"{plural(found['common'], 'common checkpoint')}: the same tensors"
        return
    if "problem" in found:
        yield f"the one of step {found['step']} cannot be read: {one_line(found['problem'])}"
        return
    count = f"{len(found['differing'])} of {found['tensors']} tensors differ"
    yield f"the first that differs is of step {found['step']}: {count}"
    first = found["difference"]
    if first is not None:
        values = first.get("values")
        pair = f": {' and '.join(map(value_text, values))}" if values else ""
        yield f"first in {shown(first['name'])}, element {first.get('element', 'of another shape')}{pair}"


def value_text(value: Any) -> str:
    """Return a value for people."""
    return "none" if value is None else quoted(value)
