"""Files that a corpus is read from: those of --data, or those of Python's own library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from zero_mpi.errors import UsageError, prefixed
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import exists, is_file, is_folder

_NAME = 40  # letters shown of a path in short messages
NANOGPT = "nanogpt:"  # before a path: ids without a header, which nothing else tells from other bytes
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.gguf"  # files of a folder that `zero-mpi tokenize` made
NOTES = frozenset({"dataset_info.json", "state.json", "dataset_dict.json"})  # files of the package datasets
# Distributions may or may not ship these, and tests are poor prose; caches are no source.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def stdlib_root() -> Path:
    """Return the folder of Python's own library: of the base installation, even in a virtual environment."""
    return Path(sysconfig.get_paths()["stdlib"])


def named(paths: Sequence[str], most: int = _NAME) -> str:
    """Return what `--data` names, for messages: the first path, cut to `most` letters, and how many
    more.
    """
    if not paths:
        return f"Python's standard library in {stdlib_root()}"
    return shown(paths[0], most) + (f" and {len(paths) - 1} more" * (len(paths) > 1))


def stdlib_files() -> list[Path]:
    """Return Python's own .py sources in the order of their names, without tests and installed packages."""
    return [path for _, path in library_files()]


def library_files() -> list[tuple[str, Path]]:
    """Return (name, path) of the files of `stdlib_files`, as `collect_files` does."""
    # _sysconfigdata* is written by the build and differs between machines.
    names = [name for name in _walk(stdlib_root(), _NOT_LIBRARY) if not name.startswith("_sysconfigdata")]
    return [(name, stdlib_root() / name) for name in names if name.endswith(".py")]


def collect_files(paths: Sequence[str], flag: str = "--data") -> list[tuple[str, Path]]:
    """Return (name, path) of every file under `paths`: files as given, folders recursively in order of name.

    The name is relative to the given folder, with forward slashes; for a file given by itself, its last part,
    with `NANOGPT` before it if the path has that.
    Hidden files and folders inside a folder are skipped; links are followed. A repeated file is taken
    once, or its text could be trained on and held out too. Files that the package datasets adds beside its
    data are left out. Raises UsageError, which names the `flag` that the
    paths are from, for a missing path.
    """
    found: dict[str, tuple[str, Path]] = {}
    for given in paths:
        mark = NANOGPT if given.startswith(NANOGPT) else ""
        with prefixed(flag):
            files = _files_of(Path(given.removeprefix(mark)), flag)
        for name, path in files:
            found.setdefault(os.path.realpath(path), (mark + name, path))
    is_dataset = any(path.suffix == ".arrow" for _, path in found.values())
    return [file for file in found.values() if not (is_dataset and file[1].name in NOTES)]


def _files_of(given: Path, flag: str) -> list[tuple[str, Path]]:
    if is_folder(given):
        return [(name, given / name) for name in _walk(given)]
    if is_file(given):
        return [(given.name, given)]
    problem = "is neither a file nor a folder" if exists(given) else "does not exist"
    raise UsageError(f"{flag} {shown(given)} {problem}")


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> list[str]:
    """Return names of regular files under `root`, sorted; each folder once, because links may form a loop."""
    names: list[str] = []
    seen: set[str] = set()
    for folder, below, files in os.walk(root, onerror=unreadable, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(n for n in below if n not in skip and n[0] != ".")
        kept = (Path(folder, n) for n in files if n[0] != ".")
        names += [path.relative_to(root).as_posix() for path in kept if is_file(path)]
    return sorted(names)


def unreadable(error: OSError) -> NoReturn:
    """Raise the UsageError for a file of --data that the system does not let us read."""
    raise UsageError(f"cannot read {shown(error.filename)}: {error.strerror}") from error
