"""Settings in a TOML file, which has one key for each flag."""

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zero_mpi.cli.parser import REMOVED, nearest
from zero_mpi.config.bounds import LARGEST
from zero_mpi.config.settings import ALIASES, BYTE, FIELDS, FROM_INIT, Config, spelled
from zero_mpi.errors import FileError, UsageError, writing
from zero_mpi.files.atomic import write_whole
from zero_mpi.files.foreign import LONGEST, quoted, show, shown
from zero_mpi.files.open import read_file
from zero_mpi.files.parse import parse_toml

MOST_SETTINGS = 1 << 20  # maximum size of a TOML file in bytes


def read_toml(path: Path, removed: list[str]) -> dict[str, Any]:
    """Return the settings in a TOML file. Keys may use - or _. UsageError names the file and the key.

    removed: list that receives the names of settings that only version 0.1.0 had
    """
    settings = {}
    for name, value in read_tables("--config", path).items():
        if spelled(setting_of(name)) in REMOVED:
            removed.append(name)
        else:
            settings[setting_of(name)] = checked_type(path, name, value)
    return settings


def read_tables(flag: str, path: Path) -> dict[str, Any]:
    """Return the content of the TOML file that `flag` names. UsageError names the flag and the file."""
    try:
        return parse_toml(read_file(path, MOST_SETTINGS, "a TOML file"))
    except FileError as error:
        raise UsageError(f"{flag} {error}") from None
    except ValueError as error:
        raise UsageError(f"{flag} {shown(path)}: not a TOML file: {error}") from None


def setting_of(key: str) -> str:
    name = key.replace("-", "_")
    return ALIASES.get(name, name)


def checked_type(path: Path, key: str, value: Any) -> Any:
    """Return `value` in the setting's type. Raise UsageError for an unknown key or a wrong type."""
    field = FIELDS.get(setting_of(key))
    if field is None:
        hint = nearest(key.replace("-", "_"), [*FIELDS, *ALIASES]) or "; see --help for the names"
        raise UsageError(f"--config {shown(path)}: {show(key)} is not a setting{hint}")
    kind = field.metadata["kind"]
    if kind is float and type(value) is int and abs(value) < LARGEST:
        return float(value)
    if field.name in ("threads", "max_time", "warmup") and type(value) is int and abs(value) < LARGEST:
        return str(value)  # these settings are strings, but the file may have a number
    if kind is list and isinstance(value, list) and not all(isinstance(item, str) for item in value):
        raise UsageError(f"--config {shown(path)}: {key} = {shown([*value[:9]])}, expected a list of strings")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UsageError(
            f"--config {shown(path)}: {key} = {quoted(value, LONGEST)}, expected {kind.__name__}"
        )
    return value


def write_toml(config: Config) -> str:
    """Return the configuration as TOML text, which `--config` can read."""
    import tomli_w

    settings: Mapping[str, Any] = asdict(config)
    return tomli_w.dumps({name: value for name, value in settings.items() if value is not None})


CONFIG_FILE = "config.toml"
OF_ONE_START = ("resume", "dry_run")
PATHS: tuple[str, ...] = ("out", "init", "lora_init", "teacher", "data", "val_data", "tokenizer")
PATHS += ("add_tokens", "chat_template", "trace", "prometheus")
WORDS = (None, BYTE, FROM_INIT)  # values of the settings in PATHS that are not paths


def recorded(config: Config) -> Config:
    """Return the settings with absolute paths, valid in any folder, and with `OF_ONE_START` reset."""
    settings: dict[str, Any] = {name: in_full(getattr(config, name)) for name in PATHS}
    if not os.path.isfile(config.chat_template or ""):
        settings["chat_template"] = config.chat_template  # a name of one of the tokenizer's templates
    settings |= {name: FIELDS[name].default for name in OF_ONE_START}
    return replace(config, **settings)


def in_full(value: Any) -> Any:
    """Return a path, or each path in a list, as an absolute path. Return a keyword unchanged."""
    if isinstance(value, list):
        return [in_full(item) for item in value]
    return value if value in WORDS else os.path.abspath(value)


def write_config(out: Path, config: Config) -> None:
    """Write OUT/config.toml. A path that is not UTF-8 keeps its bytes, so reading the file back fails.

    Raises UsageError if OUT/config.toml is a folder, JobError if the file cannot be written.
    """
    path = out / CONFIG_FILE
    if path.is_dir() and not path.is_symlink():
        raise UsageError(f"--out: {shown(path)} is a folder: move it away")
    with writing():
        write_whole(path, write_toml(recorded(config)).encode(errors="surrogateescape"))
