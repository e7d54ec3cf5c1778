"""File system of the run folder: kind, free space, speed, and a trial to publish a checkpoint.

Rank 0 does with small files what a save does (`checkpoint.folders`): a folder gets its name, is replaced, and
`latest` is pointed to it. Every host then looks for what rank 0 wrote, since each rank reads its own part of
a checkpoint. Nothing of it stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from zero_mpi.checkpoint import folders
from zero_mpi.cli.text import duration, few, short_size
from zero_mpi.commands.doctor.ranks import BAD, Ranks, Row, assessed
from zero_mpi.files.file_systems import UNKNOWN, FileSystem, file_system

TRIAL, BLOCK = 16 << 20, 1 << 20  # bytes that are written and flushed to disk, and bytes per call
LONGEST = 5.0  # seconds after which writing stops
PATIENCE, LOOK = 3.0, 0.05  # seconds that a host has to see a file, and seconds between looks
SLOW = 20e6  # bytes per second
LITTLE = 1 << 30  # bytes free
BYTES_A_PARAMETER = 12  # bytes per parameter in a checkpoint
COMMON = "use a file system that all hosts mount at the same path: --out DIR"


@dataclass
class Trial:
    """Findings of rank 0. problem: why a run could not save there; folder: to look for; made: to remove."""

    system: FileSystem = UNKNOWN
    free: int = 0
    written: int = 0  # bytes flushed to disk, TRIAL unless that took too long
    synced: float = 0.0  # seconds that this took
    published: float = 0.0  # seconds to publish a small checkpoint
    problem: str = ""
    folder: Path | None = None
    made: list[Path] = field(default_factory=list)


def section(where: Ranks) -> list[Row]:
    """Try the run folder. Collective."""
    out = Path(where.options.out)
    found: Trial = where.world.comm.broadcast_object(begin(out) if where.rank == 0 else None)
    seen = where.of_nodes(lambda: bool(found.problem) or sees(found.folder))
    if where.rank == 0:
        end(found)
    return list(rows(out, found, [name for ok, name in where.named(seen) if not ok]))


def begin(out: Path) -> Trial:
    """Try everything that one rank can; the trial folder stays."""
    found = Trial()
    try:
        found.made += [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
        found.system, found.free = file_system(out), shutil.disk_usage(out).free
        folder = out / f".doctor-{os.getpid()}-{time.time_ns()}"
        folder.mkdir()
        found.folder = folder
        found.written, found.synced = write(folder / "bytes")
        begun = time.perf_counter()
        publish(folder)
        found.published = time.perf_counter() - begun
    except OSError as error:
        found.problem = f"{error.filename or out}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            found.free = 0
    return found


def write(path: Path) -> tuple[int, float]:
    """Write a file and flush it to disk; return (bytes, seconds)."""
    data, begun, done = os.urandom(BLOCK), time.perf_counter(), 0
    with open(path, "wb", buffering=0) as file:
        while done < TRIAL and time.perf_counter() - begun < LONGEST:
            done += file.write(data)
        os.fsync(file.fileno())
    return done, time.perf_counter() - begun


def publish(trial: Path) -> None:
    """Publish two checkpoints of one step, the second in the place of the first; OSError if it went wrong."""
    for text in ("first", "second"):
        folder = folders.begin(trial, 1)
        (folder / folders.MODEL).write_text(text)
        folders.publish(trial, 1, folder, keep=1)
    seen = (trial / folders.LATEST / folders.MODEL).read_text()
    if seen != "second":
        raise OSError(errno.EIO, f"a rename is not visible: `{folders.LATEST}` shows the {seen} of two files")


def end(found: Trial) -> None:
    """Remove what `begin` made."""
    if found.folder is not None:
        shutil.rmtree(found.folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # somebody uses it by now, and what is above it
        for folder in found.made:
            folder.rmdir()


def sees(trial: Path | None) -> bool:
    """Tell whether this host sees what rank 0 published; a network file system may take a moment."""
    until = time.monotonic() + PATIENCE
    while trial is not None:
        with contextlib.suppress(OSError):
            return (trial / folders.LATEST / folders.MODEL).read_text() == "second"
        if time.monotonic() > until:
            return False
        time.sleep(LOOK)
    return True


def rows(out: Path, found: Trial, blind: list[str]) -> Iterator[Row]:
    """Yield all rows; `blind`: hosts that do not see the folder."""
    if found.problem:
        full = found.free == 0 and found.folder is not None
        remedy = f"{'free some space' if full else 'make it writable'}, or use another folder: --out DIR"
        yield Row("run folder", f"{out}: a run cannot save checkpoints there: {found.problem}", BAD, remedy)
        return
    models, free = found.free / BYTES_A_PARAMETER / 1e6, short_size(found.free)
    value = f"{out} on {found.system.kind}, {free} free: checkpoints of {models:,.0f} million parameters"
    remedy = "free some space: a checkpoint takes 12 bytes per parameter, and --keep 3 are kept"
    if not found.system.lasting:
        remedy = "this folder is in the host's memory and ends with it: use a folder on disk, --out DIR"
    yield assessed("run folder", value, found.free >= LITTLE and found.system.lasting, remedy)
    rate = found.written / max(found.synced, 1e-9)
    value = f"{short_size(found.written)} written to disk in {duration(found.synced)}, {short_size(rate)}/s"
    remedy = "train with --async-save, save less often, or use a faster file system"
    yield assessed("disk", value, rate >= SLOW, remedy)
    value = f"a small checkpoint of rank 0, published twice in {duration(found.published)}"
    if blind:
        value = f"{', '.join(few(blind))} cannot see files that rank 0 writes to {out}"
    yield assessed("seen by all hosts", value, not blind, COMMON, BAD)
