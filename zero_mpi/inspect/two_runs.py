"""What two run folders say, held against each other: settings, records, checkpoints. Nothing is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.sound import STATE_DIGEST, keys_of, open_checkpoint
from zero_mpi.config.settings import Config
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import quoted
from zero_mpi.files.open import exists
from zero_mpi.inspect.compare import compare
from zero_mpi.inspect.tensors import Report
from zero_mpi.session.identity import CODE, FACTS, MACHINE, SETTINGS, settings_of
from zero_mpi.session.resume import differences
from zero_mpi.telemetry.proof import ORIGIN, PROOF, RUN, Broken, bits_of, read_proof
from zero_mpi.verify.claim import RecordFile, examine, other
from zero_mpi.verify.findings import Differs
from zero_mpi.verify.request import config_of, config_then

MOVES = {SETTINGS: True, FACTS: True, MACHINE: False, CODE: False}  # known to move bits; the others may


@dataclass(frozen=True)
class RunSaid:
    """What a run folder says of the job that made a step.

    config      its settings
    identity    what its bits depend on, as far as that is known
    begun       the step from which on all was made by the same identity
    checkpoints   of what there is, by step
    """

    folder: Path
    config: Config
    identity: Mapping[str, Any]
    begun: int
    checkpoints: Mapping[int, Path] = field(default_factory=dict)


def said_by(run: Path, step: int | None, data: Sequence[str] | None) -> RunSaid:
    """What a run says of the job that made a step, or of its last one; raises UsageError."""
    config, proof = config_of(run, {} if data is None else {"data": data}), run / PROOF
    identity, begun = job_of(proof, step) if exists(proof) else ({}, max(RecordFile(run).step - 1, 0))
    if SETTINGS in identity:
        config = config_then(config, identity[SETTINGS], proof)
    else:
        identity = {SETTINGS: settings_of(config)}
    return RunSaid(run, config, identity, begun, dict(folders.steps(run)))


def job_of(proof: Path, step: int | None) -> tuple[dict[str, Any], int]:
    """What the bits of a step depend on by the chain, and since which step; nothing where it is broken."""
    found: dict[str, Any] = {}
    begun = 0
    try:
        for line in read_proof(proof):
            if step is not None and line.step >= step:
                break
            if line.kind == RUN and isinstance(line.value.get(SETTINGS), dict):
                now = {key: value for key, value in line.value.items() if key != ORIGIN}
                if now != found:
                    found, begun = now, line.step
    except Broken:
        pass  # `problem_of` tells of it
    return found, begun


def problem_of(run: Path) -> str:
    """What of a run's files contradicts the others, empty where nothing does; raises UsageError."""
    try:
        examine(run, None)
    except Differs as difference:
        return str(difference)
    return ""


def identities(first: RunSaid, second: RunSaid) -> list[Report]:
    """What differs of that which bits depend on, what is known to move them first."""
    found = []
    for kind, moves in MOVES.items():
        values = [as_mapping(kind, one.identity.get(kind)) for one in (first, second)]
        if None in values:
            continue  # a run without a chain has not said it
        found += [
            {"kind": kind, "name": name, "values": [a, b], "moves_bits": moves}
            for name, a, b in differences(*values)  # type: ignore[arg-type]
        ]
    return found


def as_mapping(kind: str, value: Any) -> Mapping[str, Any] | None:
    """Names and values; the digest of the package's files is one value."""
    return value if value is None or isinstance(value, dict) else {kind: value}


def records(first: Path, second: Path) -> Report:
    """How many records both have, and the first that differs: its step, field and both values."""
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


def digest_of(folder: Path) -> str | None:
    """The digest of a checkpoint's tensors, as written; None where it cannot be read."""
    try:
        return keys_of(open_checkpoint(folder).state).text(STATE_DIGEST)
    except UsageError:
        return None


def first_other_checkpoint(first: RunSaid, second: RunSaid) -> Report:
    """How many checkpoints both have, and the first whose tensors differ, with its first tensor."""
    common = sorted(first.checkpoints.keys() & second.checkpoints.keys())
    for step in common:
        pair = first.checkpoints[step], second.checkpoints[step]
        said = [digest_of(folder) for folder in pair]
        if said[0] != said[1] or None in said:
            return {"common": len(common), "step": step, **state_difference(*pair)}
    return {"common": len(common), "step": None}


def state_difference(first: Path, second: Path) -> Report:
    """What of two checkpoints' tensors differs; nothing of their keys."""
    try:
        found = compare(first, second)
    except UsageError as error:
        return {"problem": str(error)}
    names = ("tensors", "differing", "difference", "only_in_first", "only_in_second")
    return {name: found[name] for name in names}


def is_same(difference: Report) -> bool:
    """Whether it is none."""
    odd = ("problem", "differing", "only_in_first", "only_in_second")
    return not any(difference.get(name) for name in odd)


def newest_equal(first: RunSaid, second: RunSaid, step: int) -> int | None:
    """The newest step before another one whose state is there in both, bit for bit; 0: the first weights.

    None: there is no such state, from which the jobs of both made that step.
    """
    for at in sorted(first.checkpoints.keys() & second.checkpoints.keys(), reverse=True):
        pair = first.checkpoints[at], second.checkpoints[at]
        if max(first.begun, second.begun) <= at < step and is_same(state_difference(*pair)):
            return at
    return 0 if first.begun == second.begun == 0 else None


def value_text(value: Any) -> str:
    """A value for people."""
    return "none" if value is None else quoted(value)
