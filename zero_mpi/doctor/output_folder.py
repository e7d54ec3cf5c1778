"""The file system of the run folder: what it is, how fast it is, whether a checkpoint can be published there.

Rank 0 does with small files what a save does (`checkpoint.folders`): a folder gets its name, is replaced, and
`latest` is pointed to it. Every host then looks for what rank 0 wrote, since each rank reads its own part of
a checkpoint, and where hosts may write one file at once (`files.file_systems`) they do, for the speed of all.
Nothing of it stays.
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
from zero_mpi.checkpoint.output_file import OutputFile
from zero_mpi.checkpoint.writers import assigned
from zero_mpi.cli.text import duration, few, short_size
from zero_mpi.doctor.ranks import Ranks
from zero_mpi.doctor.verdicts import BAD, NOTE, Row, assessed
from zero_mpi.errors import explain
from zero_mpi.files.file_systems import (
    UNKNOWN,
    FileSystem,
    StripeLayout,
    file_system,
    layout_of,
    stripe_hints,
)

TRIAL, BLOCK = 16 << 20, 1 << 20  # bytes that are written and brought to disk, and in one call
LONGEST = 5.0  # seconds after which no more is written
LARGE = 16 << 30  # bytes of a file whose stripes are asked for
PATIENCE, LOOK = 3.0, 0.05  # seconds that a host is given to see a file, and between looks
SLOW = 20e6  # bytes a second
LITTLE = 1 << 30  # bytes free
BYTES_A_PARAMETER = 12  # in a checkpoint
COMMON = "the run folder must be on a file system that all hosts mount at the same path: --out DIR"


@dataclass
class Found:
    """What rank 0 saw. problem: why a run could not save there; trial: the folder to look for.

    hints: what a checkpoint would ask for, and `layout` what a file got that asked for it
    """

    system: FileSystem = UNKNOWN
    free: int = 0
    written: int = 0  # bytes brought to disk, TRIAL unless that took too long, and the seconds of it
    synced: float = 0.0
    hints: dict[str, str] = field(default_factory=dict)
    layout: StripeLayout | None = None
    published: float = 0.0  # seconds to publish a small checkpoint
    problem: str = ""
    trial: Path | None = None


def begin(out: Path, made: list[Path]) -> Found:
    """Try everything that one rank can; the trial folder stays. `made` gets the folders to remove again."""
    found = Found()
    try:
        made += [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
        found.system, found.free = file_system(out), shutil.disk_usage(out).free
        trial = out / f".doctor-{os.getpid()}-{time.time_ns()}"
        trial.mkdir()
        found.trial = trial
        found.written, found.synced = write(trial / "bytes")
        begun = time.perf_counter()
        publish(trial)
        found.published = time.perf_counter() - begun
    except OSError as error:
        found.problem = f"{error.filename or out}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            found.free = 0
    return found


def write(path: Path, place: int = 0, new: bool = True) -> tuple[int, float]:
    """(bytes, seconds) of a range of a file, written and brought to disk."""
    data, begun, done = os.urandom(BLOCK), time.perf_counter(), 0
    file = OutputFile(path, new)
    with contextlib.closing(file):
        while done < TRIAL and time.perf_counter() - begun < LONGEST:
            file.write_at(place + done, data)
            done += BLOCK
    return done, time.perf_counter() - begun


def write_together(where: Ranks, found: Found) -> list[tuple[int, float] | str]:
    """(bytes, seconds) or what went wrong, of all hosts at once if they may write one file. Collective."""
    if found.problem or not found.system.hosts or len(where.nodes) == 1:
        return []
    path = (found.trial or Path()) / "bytes"

    def one() -> tuple[int, float] | str:
        try:
            return write(path, where.node * TRIAL, new=False)
        except OSError as error:
            return explain(error)

    where.comm.barrier()
    return where.of_nodes(one)


def try_stripes(where: Ranks, out: Path, found: Found) -> None:
    """Ask for the stripes of a large file, and look what it got."""
    found.hints = stripe_hints(out, LARGE, len(where.nodes))
    path = (found.trial or out) / "stripes"
    if found.hints:
        where.comm.create_file(path, found.hints)
    with contextlib.suppress(OSError):
        OutputFile(path).close()
    found.layout = layout_of(path)


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
    if found.system.striped:
        yield stripes(out, found)
    value = f"a small checkpoint that rank 0 published, twice in {duration(found.published)}"
    if blind:
        value = f"not on {', '.join(few(blind))}: what rank 0 writes to {out}"
    yield assessed("seen by all hosts", value, not blind, COMMON, BAD)


def place(out: Path, found: Found) -> Row:
    """Type and free space."""
    models, free = found.free / BYTES_A_PARAMETER / 1e6, short_size(found.free)
    value = f"{out} on {found.system.kind}, {free} free: checkpoints of {models:,.0f} million parameters"
    remedy = "make room: a checkpoint has 12 bytes a parameter, and --keep 3 stay"
    if not found.system.lasting:
        remedy = "this is the host's memory, and gone with it: give a folder on a disk, --out DIR"
    return assessed("run folder", value, found.free >= LITTLE and found.system.lasting, remedy)


def pace(found: Found) -> Row:
    """How fast data gets to disk."""
    rate = found.written / max(found.synced, 1e-9)
    value = f"{short_size(found.written)} brought to disk in {duration(found.synced)}, {short_size(rate)}/s"
    remedy = "train with --async-save, save less often, or take a faster file system"
    return assessed("disk", value, rate >= SLOW, remedy)


def stripes(out: Path, found: Found) -> Row:
    """The stripes of a new file, whether the folder has them or they were asked for."""
    wanted = found.hints.get("striping_factor", "")
    how = f"of {wanted} that MPI-IO was asked for" if wanted else "as the folder has them"
    value = f"of a large file, {how}: {found.layout or 'not to be read'}"
    remedy = f"this MPI library does not ask Lustre for stripes: lfs setstripe -c {wanted} -S 4M {out}"
    return assessed(
        "stripes", value, not wanted or (found.layout is not None and found.layout.stripes > 1), remedy
    )


def writers(where: Ranks, found: Found, together: list[tuple[int, float] | str]) -> Row:
    """Who writes a checkpoint with --checkpoint-io parallel, and how fast all hosts do at once."""
    nodes = [number for _, number in sorted((r, n) for n, ranks in enumerate(where.nodes) for r in ranks)]
    count = len(set(assigned(nodes, found.system)))
    value = f"{count} of {where.size} with --checkpoint-io parallel"
    problems = [text for text in together if isinstance(text, str)]
    if problems:
        return Row("writers", f"{value}: {problems[0]}", NOTE, "train with --checkpoint-io gather")
    times = [time for time in together if not isinstance(time, str)]
    if times:
        rate = sum(nbytes for nbytes, _ in times) / max(max(seconds for _, seconds in times), 1e-9)
        value += f"; {len(times)} hosts at once: {short_size(rate)}/s"
    return Row("writers", value)


def section(where: Ranks, out: Path) -> list[Row]:
    """Try the run folder. Collective."""
    made: list[Path] = []
    mine = begin(out, made) if where.rank == 0 else Found()
    if mine.trial and mine.system.striped and not mine.problem:
        try_stripes(where, out, mine)
    found: Found = where.world.comm.broadcast_object(mine)
    together = write_together(where, found)
    seen = where.of_nodes(lambda: sees(None if found.problem else found.trial))
    if where.rank == 0:
        end(found, made)
    told = list(rows(out, found, [name for ok, name in where.named(seen) if not ok]))
    return told if found.problem else [*told[:-1], writers(where, found, together), told[-1]]
