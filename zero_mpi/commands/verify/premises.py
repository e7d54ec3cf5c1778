"""Whether what a run is computed from is what it says: settings, data, first weights; and by what it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.sound import open_checkpoint
from zero_mpi.checkpoint.state import read_json
from zero_mpi.commands.verify.claim import Claim
from zero_mpi.commands.verify.findings import Differs, differing
from zero_mpi.commands.verify.request import Request
from zero_mpi.commands.verify.stretches import Stretch
from zero_mpi.config import replay
from zero_mpi.config.settings import FIELDS, Config, spelled
from zero_mpi.files.foreign import quoted, shown
from zero_mpi.telemetry.proof import PROOF
from zero_mpi.train.identity import CODE, FACTS, MACHINE, SETTINGS, identity, settings_of
from zero_mpi.train.resolve import RunSpec
from zero_mpi.train.resume import CORPUS, SINCE, differences
from zero_mpi.train.same_bits import changes

Facts = Mapping[str, Any]


def check_config(request: Request, claim: Claim) -> None:
    """Raise Differs unless config.toml and checkpoints have the settings of the chain, if there is one."""
    if SETTINGS in (said := claim.runs[-1]):  # a setting that came later had its default
        refuse(replay.NAME, settings_of(request.config), {**settings_of(Config()), **said[SETTINGS]})
        chain, stays = {**said[SETTINGS], **said[FACTS]}, {*Config().fixed(), *said[FACTS]} - {*replay.PATHS}
        kept = {key: value for key, value in chain.items() if key in stays}
        for step in claim.saved:
            with differing():
                state = open_checkpoint(folders.step_folder(request.run, step)).state
                found = read_json(state, "training.settings")
            refuse(f"the checkpoint of step {step}", {**SINCE, **found}, {**SINCE, **kept})


def check_facts(spec: RunSpec, run: Facts, folder: Path, stretches: Sequence[Stretch]) -> list[str]:
    """Raise Differs unless data and first weights are those of a job of the run and of its checkpoints.

    Returns what may give other bits all the same: of the machine and the package.
    """
    now: Facts = json.loads(json.dumps(identity(spec.config, spec.description, spec.weights)))
    if FACTS in run:
        refuse("here", now[FACTS], run[FACTS])
    machine = run.get(MACHINE)
    for step in sorted({step for one in stretches for step in (one.start, one.last * one.ends) if step}):
        state = open_checkpoint(folders.step_folder(folder, step)).state
        said = {**SINCE, **read_json(state, "training.settings")}
        refuse("here", dict(spec.description.settings), said, f"the checkpoint of step {step}")
        machine = machine or read_json(state, "training.machine")
    notes = list(changes(machine or now[MACHINE], now[MACHINE], "the run"))
    if run.get(CODE, now[CODE]) != now[CODE]:
        found = f"{quoted(run[CODE])}, now {quoted(now[CODE])}"
        notes.append(f"the package's files are not those of the run ({found}): bits may differ")
    return notes


def refuse(where: str, found: Facts, said: Facts, whose: str = f"the chain in {PROOF}") -> None:
    """Raise Differs with the first value that is not what was said."""
    for key, before, now in differences(said, found):
        label = {"corpus": CORPUS}.get(key, spelled(key) if key in FIELDS else shown(key))
        place = where if where == "here" else f"in {where}"
        raise Differs(f"{label} is {quoted(now)} {place}, and {quoted(before)} in {whose}")
