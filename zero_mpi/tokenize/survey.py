"""What the inputs are: each is looked at once, by one rank, before the work is cut.

What is found decides, with the flags, every byte that is written: which files hold text, what they weigh, and
their digests, by which a job that goes on sees that they are the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_mpi.data.text_files import collect_files, library_files, unreadable
from zero_mpi.data.text_filter import TextFilter
from zero_mpi.errors import JobError, UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import open_file
from zero_mpi.launch.world import World
from zero_mpi.tokenize.parts import dealt
from zero_mpi.tokenize.progress import WorkDisplay, work_under_pulse
from zero_mpi.tokenize.pulse import Amount, Pulse
from zero_mpi.tokenize.text_formats import TEXT_FORMATS, InputFile, Reading, format_named

FLAG = "TEXT"  # what the inputs are named by
BLOCK = 1 << 20  # bytes that are read at once


@dataclass(frozen=True)
class Looked:
    """What was found in a file: its digest, and what its pieces weigh; neither, where it is left out."""

    sha256: str
    weights: tuple[int, ...]

    @property
    def taken(self) -> bool:
        """Whether the file is read."""
        return bool(self.sha256)


def found_files(paths: Sequence[str], out: str) -> list[InputFile]:
    """The files that the flags name; raises UsageError, also where `out` is in a folder of these."""
    files = collect_files(paths, FLAG) if paths else library_files()
    for path in paths:
        inner, outer = os.path.realpath(out), os.path.realpath(path)
        if os.path.commonpath([inner, outer]) == outer:
            raise UsageError(f"--out {shown(out)}: lies in {FLAG} {shown(path)}: use a folder beside it")
    return [described(name, path) for name, path in files]


def described(name: str, path: Path) -> InputFile:
    """A file, as it is now; raises UsageError."""
    try:
        about = path.stat()
    except OSError as error:
        unreadable(error)
    return InputFile(name, path, format_named(name).name, about.st_size, about.st_mtime_ns)


def look_at_files(
    world: World,
    files: Sequence[InputFile],
    known: Mapping[int, Looked],
    reading: Reading,
    moved: Callable[[], object],
) -> tuple[list[Looked], list[TextFilter]]:
    """What is found in each file, but for those that are `known`, and what the filters of all ranks say.

    `moved` is called while ranks get on. Collective; raises UsageError.
    """
    new = [number for number in range(len(files)) if number not in known]
    sizes = [files[number].size for number in new]
    mine = [new[place] for place in dealt(sizes, world.size)[world.rank]]
    display = WorkDisplay(0, sum(sizes), "of the files looked at") if world.rank == 0 else None
    looked = dict[int, Looked]()

    def look(pulse: Pulse) -> None:
        reading.beat = pulse.beat
        for number in mine:
            if not pulse.beat():
                break  # another rank raises
            looked[number] = look_at_file(files[number], reading, pulse)

    work_under_pulse(world, look, display, moved)
    told = world.results(lambda: (looked, reading.filter))
    found = dict(known)
    for theirs, _ in told:
        found |= theirs
    return [found[number] for number in range(len(files))], [text_filter for _, text_filter in told]


def look_at_file(file: InputFile, reading: Reading, pulse: Pulse) -> Looked:
    """What is found in a file, which is told as it is read; raises UsageError."""
    form = TEXT_FORMATS[file.format]
    if not form.takes(file, reading):
        return Looked("", ())
    weights = tuple(form.weights(file, reading))
    digest = hashlib.sha256()
    with open_file(file.path) as raw:
        try:
            while block := raw.read(BLOCK):
                digest.update(block)
                pulse.beat(Amount(len(block), len(block)))
        except OSError as error:
            error.filename = file.path
            unreadable(error)
    check_unchanged(file)
    return Looked(digest.hexdigest(), weights)


def check_unchanged(file: InputFile) -> None:
    """Raise JobError for a file that is not as it was when the job began."""
    try:
        about = os.stat(file.path)
    except OSError as error:
        raise JobError(f"{shown(file.path)}: {error.strerror}; it was there when the job began") from None
    if (about.st_size, about.st_mtime_ns) != (file.size, file.changed_at):
        raise JobError(f"{shown(file.path)} changed while it was read: start again when it stays as it is")


def as_plan(files: Sequence[InputFile], looked: Sequence[Looked]) -> list[dict[str, Any]]:
    """All that was looked at, for the next job."""
    return [
        {
            "name": file.name,
            "bytes": file.size,
            "changed_at": file.changed_at,
            "sha256": found.sha256,
            "weights": found.weights,
        }
        for file, found in zip(files, looked, strict=True)
    ]


def as_inputs(files: Sequence[InputFile], looked: Sequence[Looked]) -> list[dict[str, Any]]:
    """The files that are read, for the manifest."""
    return [
        {"name": file.name, "format": file.format, "bytes": file.size, "sha256": found.sha256}
        for file, found in zip(files, looked, strict=True)
        if found.taken
    ]
