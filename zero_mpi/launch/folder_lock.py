"""`OUT/.lock`: a run folder belongs to one job at a time, and to nobody once that job is dead.

The file says who holds the folder; whoever makes it, which one process can, has it. The holder keeps a flock
on it, which dies with the process, and renews it every few seconds. A lock that is refused is believed. One
that is granted is believed only of a holder on this machine: between machines locks may be unknown (NFS,
Lustre, by how they are mounted) or count on each by itself. There a holder is dead when its record stands
still, by the clock of the one who watches. Its file is then renamed, which one process can, and a new one is
made. A holder that was only stopped sees that, and ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from zero_mpi.errors import UsageError, naming
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import open_in_place
from zero_mpi.files.parse import parse_json
from zero_mpi.telemetry import log

NAME = ".lock"
EVERY = 2.0  # seconds between signs of life of a holder
LOOK = 0.2  # seconds between looks at a file that somebody has
SLOW = 2.0  # seconds for a look: the file system hangs, and a holder that stands still may be waiting for it
PATIENCE = 20.0  # seconds without a sign of life after which a holder on another machine is dead
SETTLE = 5.0  # seconds without one after which a refused lock is called held all the same
LEAVE = 60.0  # seconds that a holder of the same batch job, requeued or the step before, has to end
ROOM = 1024  # bytes of a record: always as many, so that a renewal needs no room on a full disk
BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """What only processes under one kernel have in common; containers on one host do."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return platform.node()


@dataclass(frozen=True)
class Record:
    """Who holds a folder: for people host, process, batch job (or nothing) and time of start.

    machine: whose system has the lock; token: no other job's; beat: counts the signs of life.
    """

    since: str
    job: str = ""
    host: str = field(default_factory=platform.node)
    pid: int = field(default_factory=os.getpid)
    machine: str = field(default_factory=machine)
    token: str = field(default_factory=lambda: uuid4().hex)
    beat: int = 0

    def __str__(self) -> str:
        job = f" ({shown(self.job, 80)})" if self.job else ""
        return f"process {self.pid} on {shown(self.host, 80)}{job}, since {shown(self.since, 40)}"

    def packed(self) -> bytes:
        """The record as it stands in the file."""
        return json.dumps(asdict(self)).encode().ljust(ROOM - 1) + b"\n"


def unpacked(raw: bytes) -> Record | None:
    """The record in a file; None for anything else."""
    try:
        said: Any = parse_json(raw)
        record = Record(**said)
    except (TypeError, ValueError):
        return None
    kinds = {name: int if name in ("pid", "beat") else str for name in asdict(record)}
    return record if all(type(said[name]) is kind for name, kind in kinds.items() if name in said) else None


class HeldError(UsageError):
    """Another job has the folder."""


# ------------------------------------------------------------------------------------------------ the file


def find(path: Path, links: int = 1) -> int:
    """Open the file that is there; FileNotFoundError. UsageError if it is none, or has more hard links."""
    try:
        return open_in_place(path, os.O_RDWR, links)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EMLINK):
            raise
    raise UsageError(f"{path}: expected the file of a job, found a link, folder or device: remove it")


def read(handle: int) -> bytes:
    """What a file says."""
    return os.pread(handle, ROOM, 0)


def write(handle: int, record: Record) -> None:
    """Let a file say it, in one write."""
    raw = record.packed()
    if os.pwrite(handle, raw, 0) != len(raw):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def lock(handle: int) -> bool | None:
    """Whether the system gives this process the lock of a file; None: it has no locks here.

    Of the kinds that there are, flock is the one that Linux hands on to NFS and Lustre and that another
    handle's end does not drop; fcntl's goes when any part of the process closes the file.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EACCES) else None
    return True


def is_at(handle: int, path: Path) -> bool:
    """Whether a path still names the file of a handle."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(handle))


# ------------------------------------------------------------------------------------------------ to get it


def create(path: Path, mine: Record) -> int | None:
    """Make the file ours, if there is none: the handle that keeps its lock, or None."""
    try:
        handle = open_in_place(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return None
    try:
        while lock(handle) is False:  # somebody looks whether it is locked
            time.sleep(LOOK / 10)
        write(handle, mine)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(handle)
        raise
    return handle


def take(path: Path, mine: Record) -> int:
    """Return the handle that keeps the lock of a folder. Raises HeldError, or OSError with the file's name.

    A file that is there is looked at again and again, until it is free, or its holder is seen to live.
    """
    seen: bytes | None = None  # what it said at the look before
    begun = since = time.monotonic()
    is_told = False
    with naming(path):
        while (handle := create(path, mine)) is None:
            started, found = time.monotonic(), look(path, mine)
            if isinstance(found, int):
                return found
            if found is None:
                continue
            locked, raw = found
            holder, was, now = unpacked(raw), unpacked(seen or b""), time.monotonic()
            lives = raw != seen and holder is not None and was is not None and was.token == holder.token
            if raw != seen or now - started > SLOW:
                seen, since = raw, now
            quiet = now - since
            if lives or (locked is False and quiet > SETTLE):
                if not (holder and mine.job and holder.job == mine.job and now - begun < LEAVE):
                    raise held(path, holder)
            elif locked is not False and quiet > PATIENCE:
                put_aside(path, raw, mine)
            elif locked is not False and not is_told and (holder or quiet > 0):  # it is not only being made
                is_told = True
                left = f"{path} was left by {holder or 'a job that is not known'}"
                log.info("%s: waiting %.0f s for a sign of life", left, PATIENCE)
            time.sleep(LOOK)
        return handle


def look(path: Path, mine: Record) -> int | tuple[bool | None, bytes] | None:
    """Look once: the handle if the file is ours now, else if it is locked and what it says; None: it went.

    It is ours where the lock was granted, and so went with a holder on this machine.
    """
    try:
        handle = find(path)
    except FileNotFoundError:  # its holder has just ended
        return None
    try:
        locked, raw = lock(handle), read(handle)
        holder = unpacked(raw)
        if not is_at(handle, path):
            return None
        if holder and (holder.token == mine.token or (locked and holder.machine == mine.machine)):
            write(handle, mine)
            kept, handle = handle, -1
            return kept
        return locked, raw
    finally:
        if handle >= 0:
            os.close(handle)


def put_aside(path: Path, raw: bytes, mine: Record) -> None:
    """Remove the file of a dead job, which says `raw`; where another one was faster, its file stays."""
    aside = path.with_name(f"{NAME}-{mine.token}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        if aside.read_bytes()[:ROOM] != raw:
            with contextlib.suppress(OSError):  # without links: it makes a new one
                os.link(aside, path)
        os.unlink(aside)


def held(path: Path, holder: Record | None) -> HeldError:
    """The error that says who has the folder."""
    who = str(holder) if holder else "its file does not say who"
    return HeldError(
        f"--out {path.parent}: another job is at work in this folder: {who}; wait for its "
        f"end or use another --out; if it is dead, remove {path} and start again"
    )
