"""What the bits of a run depend on, for the chain over it (`telemetry.proof`), and what a job begins from.

Paths are not in it: digests of what they name are. Nor is what moves no bit: strategy, transport, ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_mpi.checkpoint.folders import OPTIMIZER
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.merged import weights_digest
from zero_mpi.checkpoint.sound import ID, STATE_DIGEST, keys_of
from zero_mpi.checkpoint.state import Description
from zero_mpi.checkpoint.weights import WeightSource
from zero_mpi.config.replay import PATHS
from zero_mpi.config.settings import FIELDS, Config
from zero_mpi.launch import consistency
from zero_mpi.telemetry.proof import JobStart
from zero_mpi.train.setup import Session

GROUPS = ("model", "adapter", "data", "batch", "optimizer")  # of settings, all of which move bits
EVALUATIONS = ("eval_every", "eval_windows", "patience")
OTHERS = ("steps", "seed", "reduction", "precision", "reduce_dtype", "bits", *EVALUATIONS)
NAMES = tuple(
    name
    for name, field in FIELDS.items()
    if name not in PATHS and (field.metadata["group"] in GROUPS or name in OTHERS)
)
READ = ("packing", "control_tokens")  # of these a description has what they came to with the data
SETTINGS, FACTS, MACHINE, CODE = "settings", "facts", "machine", "code"


def settings_of(config: Config) -> dict[str, Any]:
    """The settings that move bits, but for paths."""
    return {name: getattr(config, name) for name in NAMES}


def identity(
    config: Config, description: Description, weights: Mapping[str, WeightSource | None]
) -> dict[str, Any]:
    """What the bits of a run depend on, as JSON has it.

    weights: the files that it begins from, by their settings; raises FileError for one that cannot be read.
    """
    facts = {key: value for key, value in description.settings.items() if key not in NAMES or key in READ}
    begun = {name: None if file is None else weights_digest(file) for name, file in weights.items()}
    return {
        SETTINGS: settings_of(config),
        FACTS: {**facts, **begun},
        MACHINE: dict(description.machine),
        CODE: consistency.own_source(),
    }


def start_of(session: Session) -> JobStart:
    """What the job of a session begins from; raises FileError where a file cannot be read."""
    run = identity(session.config, session.description, session.weights)
    step, folder = session.progress.step, session.resumed
    if folder is None:
        return JobStart(step, run)
    state = GGUFFile.open(folder / OPTIMIZER)
    own = folder.parent == Path(os.path.realpath(session.out))
    return JobStart(step, run, keys_of(state).text(ID), keys_of(state).text(STATE_DIGEST), own)
