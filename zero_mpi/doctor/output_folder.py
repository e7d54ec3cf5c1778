"""The file system of the run folder: what it is, how fast it is, whether a checkpoint can be published there.

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
from dataclasses import dataclass
from pathlib import Path

from zero_mpi.checkpoint import folders
from zero_mpi.cli.text import duration, few, short_size
from zero_mpi.doctor.ranks import Ranks
from zero_mpi.doctor.verdicts import BAD, Row, assessed

MOUNTS = Path("/proc/self/mountinfo")
TRIAL = 16 << 20  # bytes that are written and brought to disk
PATIENCE, LOOK = 3.0, 0.05  # seconds that a host is given to see a file, and between looks
SLOW = 20e6  # bytes a second
LITTLE = 1 << 30  # bytes free
BYTES_A_PARAMETER = 12  # in a checkpoint
MEMORY = ("tmpfs", "ramfs")
COMMON = "the run folder must be on a file system that all hosts mount at the same path: --out DIR"


@dataclass
class Found:
    """What rank 0 saw. problem: why a run could not save there; trial: the folder to look for."""

    kind: str = "unknown"
    free: int = 0
    synced: float = 0.0  # seconds to bring TRIAL bytes to disk
    published: float = 0.0  # seconds to publish a small checkpoint
    problem: str = ""
    trial: Path | None = None


def begin(out: Path, made: list[Path]) -> Found:
    """Try everything that one rank can; the trial folder stays. `made` gets the folders to remove again."""
    found = Found()
    try:
        made += [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
        found.kind, found.free = kind_of(out), shutil.disk_usage(out).free
        trial = out / f".doctor-{os.getpid()}-{time.time_ns()}"
        trial.mkdir()
        found.trial = trial
        found.synced = write(trial / "bytes", TRIAL)
        begun = time.perf_counter()
        publish(trial)
        found.published = time.perf_counter() - begun
    except OSError as error:
        found.problem = f"{error.filename or out}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            found.free = 0
    return found


def write(path: Path, nbytes: int) -> float:
    """Seconds to write a file and bring it to disk."""
    data, begun = os.urandom(1 << 20), time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(nbytes // len(data)):
            file.write(data)
        os.fsync(file.fileno())
    return time.perf_counter() - begun


def publish(trial: Path) -> None:
    """Publish two checkpoints of one step, the second in the place of the first; OSError if it went wrong."""
    for text in ("first", "second"):
        folder = folders.begin(trial, 1)
        (folder / folders.MODEL).write_text(text)
        folders.publish(trial, 1, folder, keep=1)
    seen = (trial / folders.LATEST / folders.MODEL).read_text()
    if seen != "second":
        raise OSError(errno.EIO, f"a rename is not seen: `{folders.LATEST}` shows the {seen} of two files")


def end(found: Found, made: list[Path]) -> None:
    """Remove what `begin` made."""
    if found.trial is not None:
        shutil.rmtree(found.trial, ignore_errors=True)
    with contextlib.suppress(OSError):  # somebody uses it by now, and what is above it
        for folder in made:
            folder.rmdir()


def kind_of(path: Path, mounts: Path = MOUNTS) -> str:
    """The type of the file system that a path is on: ext4, nfs4, lustre."""
    place, best, kind = path.resolve(), -1, "unknown"
    for line in mounts.read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        point = Path(fields.split()[4].encode().decode("unicode_escape"))
        if len(point.parts) >= best and (point == place or point in place.parents):
            best, kind = len(point.parts), rest.split()[0]
    return kind


def sees(trial: Path | None) -> bool:
    """Whether this host sees what rank 0 published; a network file system may take a moment."""
    until = time.monotonic() + PATIENCE
    while trial is not None:
        with contextlib.suppress(OSError):
            return (trial / folders.LATEST / folders.MODEL).read_text() == "second"
        if time.monotonic() > until:
            return False
        time.sleep(LOOK)
    return True


def rows(out: Path, found: Found, blind: list[str]) -> Iterator[Row]:
    """All rows; `blind`: hosts that do not see the folder."""
    if found.problem:
        full = found.free == 0 and found.trial is not None
        remedy = f"make {'room' if full else 'it writable'}, or give another folder: --out DIR"
        yield Row("run folder", f"{out}: a run cannot save there: {found.problem}", BAD, remedy)
        return
    yield place(out, found)
    yield pace(found)
    value = f"a small checkpoint that rank 0 published, twice in {duration(found.published)}"
    if blind:
        value = f"not on {', '.join(few(blind))}: what rank 0 writes to {out}"
    yield assessed("seen by all hosts", value, not blind, COMMON, BAD)


def place(out: Path, found: Found) -> Row:
    """Type and free space."""
    models, free = found.free / BYTES_A_PARAMETER / 1e6, short_size(found.free)
    value = f"{out} on {found.kind}, {free} free: checkpoints of {models:,.0f} million parameters"
    remedy = "make room: a checkpoint has 12 bytes a parameter, and --keep 3 stay"
    if found.kind in MEMORY:
        remedy = "this is the host's memory, and gone with it: give a folder on a disk, --out DIR"
    return assessed("run folder", value, found.free >= LITTLE and found.kind not in MEMORY, remedy)


def pace(found: Found) -> Row:
    """How fast data gets to disk."""
    rate = TRIAL / max(found.synced, 1e-9)
    value = f"{short_size(TRIAL)} brought to disk in {duration(found.synced)}, {short_size(rate)}/s"
    remedy = "train with --async-save, save less often, or take a faster file system"
    return assessed("disk", value, rate >= SLOW, remedy)


def section(where: Ranks, out: Path) -> list[Row]:
    """Try the run folder. Collective."""
    made: list[Path] = []
    found: Found = where.world.comm.broadcast_object(begin(out, made) if where.rank == 0 else None)
    seen = where.of_nodes(lambda: sees(None if found.problem else found.trial))
    if where.rank == 0:
        end(found, made)
    return list(rows(out, found, [name for ok, name in where.named(seen) if not ok]))
