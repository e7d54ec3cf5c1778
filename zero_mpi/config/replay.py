"""`OUT/config.toml`: the settings of a run, so that `--config OUT/config.toml` continues it from anywhere.

Paths are absolute. Settings of a single start, not of the run, are left at their defaults: a
`resume = "never"` would overwrite the run that the file is meant to continue.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_mpi.config.inputs import BYTE, FROM_INIT
from zero_mpi.config.settings import FIELDS, Config
from zero_mpi.config.toml import write_toml
from zero_mpi.errors import UsageError, writing
from zero_mpi.files.atomic import write_whole
from zero_mpi.files.foreign import shown

NAME = "config.toml"
OF_ONE_START = ("resume", "dry_run")
PATHS = ("out", "init", "lora_init", "data", "val_data", "tokenizer", "chat_template", "trace", "prometheus")
WORDS = (None, BYTE, FROM_INIT)  # values other than paths, for settings that may be paths


def recorded(config: Config) -> Config:
    """Return the settings in a form that can be read again from any folder."""
    settings: dict[str, Any] = {name: in_full(getattr(config, name)) for name in PATHS}
    if not os.path.isfile(config.chat_template or ""):
        settings["chat_template"] = config.chat_template  # the name of one of the tokenizer's templates
    settings |= {name: FIELDS[name].default for name in OF_ONE_START}
    return replace(config, **settings)


def in_full(value: Any) -> Any:
    """Return an absolute path, or a list of them; a keyword stays unchanged."""
    if isinstance(value, list):
        return [in_full(item) for item in value]
    return value if value in WORDS else os.path.abspath(value)


def write_config(out: Path, config: Config) -> None:
    """Write the file. A path that is not UTF-8 keeps its bytes; reading the file then reports it.

    Raises UsageError if a folder stands in its place, JobError if it cannot be written.
    """
    place = out / NAME
    if place.is_dir() and not place.is_symlink():
        raise UsageError(f"--out: {shown(place)} is a folder: move it away")
    with writing():
        write_whole(place, write_toml(recorded(config)).encode(errors="surrogateescape"))
