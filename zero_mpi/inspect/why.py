"""Why two runs have other bits: what they depend on, the first step and tensor that differ, and who is right.

Settings come first, then records and checkpoints (`two_runs`), then the steps from the last state that both
have up to the first that differs, computed again (`twice`). Nothing is written into the folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from zero_mpi.cli.text import plural
from zero_mpi.config.settings import FIELDS, spelled
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import one_line, printable, shown
from zero_mpi.inspect import two_runs
from zero_mpi.inspect.tensors import Report
from zero_mpi.inspect.twice import compute_runs
from zero_mpi.inspect.two_runs import said_by, value_text
from zero_mpi.launch.world import World
from zero_mpi.telemetry import log

FIRST, SECOND = "first", "second"
SAME = "the same, bit for bit, in all that both have"
OTHERWISE = "by another machine, library or kernel or wrongly, or its files were changed"


def explain(world: World, folders: tuple[Path, Path], data: Sequence[str] | None = None) -> Report:
    """All that is to be said of two run folders; raises UsageError where one is none.

    data: of both, where they lie now; None: where they lay
    """
    first, second = folders
    log.install(world.rank, world.size).to_stderr = True  # stdout has the findings and nothing else
    names = {FIRST: first, SECOND: second}
    checkpoint = two_runs.first_other_checkpoint(*(said_by(path, None, data) for path in folders))
    problems = {name: two_runs.problem_of(path) for name, path in names.items()}
    records = two_runs.records(first, second)
    step = min((found["step"] for found in (records, checkpoint) if found["step"] is not None), default=None)
    one, other = (said_by(path, step, data) for path in folders)
    found: Report = {
        "runs": [str(first), str(second)],
        "same": step is None,
        "settings": two_runs.identities(one, other),
        "records": records,
        "checkpoint": checkpoint,
        "notes": [f"{name}: {problem}" for name, problem in problems.items() if problem],
        "step": step,
        "computed": None,
    }
    if step is None and not records["common"] and not checkpoint["common"]:
        raise UsageError(f"{shown(first)} and {shown(second)}: no step has records or a checkpoint in both")
    if step is not None:
        start = two_runs.newest_equal(one, other, step)
        if start is not None:
            found["computed"] = compute_runs(world, {FIRST: one, SECOND: other}, start, step)
    return found | {"verdict": verdict(found)}


def verdict(found: Report) -> str:
    """What it comes to, in a line."""
    if found["same"]:
        return SAME
    computed = found["computed"]
    if computed is None:
        return "not the same; the state that both went on from is not there, so no step can be computed again"
    if "problem" in computed:
        return "not the same; no step could be computed again"
    if computed["differs"]:
        return f"not the same; the first that differs: {computed['differs'][0]}"
    right = [name for name, text in computed["runs"].items() if not text]
    if len(right) == 1:
        other = SECOND if right[0] == FIRST else FIRST
        return f"not the same; computed again it is as in the {right[0]}: the {other} was made {OTHERWISE}"
    if right:
        return "not the same; computed again both come out"
    return "not the same; this machine computes as neither did: other machines, libraries or kernels"


# --------------------------------------------------------------------------------------------------- text


def sections(found: Report) -> Iterator[tuple[str, list[str]]]:
    """The text, as titles with lines."""
    yield FIRST, [printable(found["runs"][0])]
    yield SECOND, [printable(found["runs"][1])]
    yield "note", [one_line(note) for note in found["notes"]]
    yield from setting_lines(found)
    yield "records", [record_line(found["records"])]
    yield "checkpoint", list(checkpoint_lines(found["checkpoint"]))
    yield "computed", list(computed_lines(found["computed"]))
    yield "verdict", [one_line(found["verdict"])]


def setting_lines(found: Report) -> Iterator[tuple[str, list[str]]]:
    """What bits depend on and differs."""
    texts: dict[bool, list[str]] = {True: [], False: []}
    for one in found["settings"]:
        name = spelled(one["name"]) if one["name"] in FIELDS else shown(one["name"])
        texts[one["moves_bits"]].append(f"{name}: {' and '.join(map(value_text, one['values']))}")
    nothing = "nothing that is known to move bits differs; ranks, strategy and transport move none"
    yield "moves bits", texts[True] or [nothing]
    yield "may move", texts[False]


def record_line(records: Report) -> str:
    """The first record that differs."""
    if records["step"] is None:
        return f"all {plural(records['common'], 'common record')} are the same"
    values = " and ".join(map(value_text, records["values"]))
    return f"the first that differs is of step {records['step']}: {shown(records['field'])} {values}"


def checkpoint_lines(found: Report) -> Iterator[str]:
    """The first checkpoint whose tensors differ."""
    if found["step"] is None:
        yield f"{plural(found['common'], 'checkpoint')} that both have: the same tensors"
        return
    if "problem" in found:
        yield f"that of step {found['step']} cannot be read: {one_line(found['problem'])}"
        return
    count = f"{len(found['differing'])} of {found['tensors']} tensors differ"
    yield f"the first that differs is of step {found['step']}: {count}"
    first = found["difference"]
    if first is None:
        return
    values = first.get("values")
    pair = f": {' and '.join(map(value_text, values))}" if values else ""
    yield f"first in {shown(first['name'])}, element {first.get('element', 'of another shape')}{pair}"


def computed_lines(computed: Report | None) -> Iterator[str]:
    """What came of computing again."""
    if computed is None:
        return
    start = f"the state of step {computed['from']}, the same in both" if computed["from"] else "first weights"
    yield f"steps {computed['from'] + 1} to {computed['to']}, from {start}"
    if "problem" in computed:
        yield f"not possible here: {one_line(computed['problem'])}"
        return
    yield from (f"note: {one_line(note)}" for note in computed["notes"])
    if computed["differs"]:
        yield "first that differs between both computations, and what differs next:"
        yield from (f"  {one_line(name)}" for name in computed["differs"])
    for name, text in computed["runs"].items():
        yield f"the {name}: {one_line(text) if text else 'comes out, bit for bit'}"
