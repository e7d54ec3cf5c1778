"""`OUT/.lock`: a run folder belongs to one job at a time, and to nobody once that job is dead.

The file says who holds the folder; whoever makes it, which one process can, has it. The holder keeps a lock
of the system on it, which dies with the process, and renews it every few seconds. A lock that is refused is
believed. One that is granted is believed only of a holder on this machine: between machines locks may be
unknown (NFS, Lustre, by how they are mounted) or count on each by itself. There a holder is dead when its
record stands still, by the clock of the one who watches: no two clocks are compared. Whoever takes over then
writes its name and waits: of two at once, the one written last stays (Fischer's mutual exclusion, in Lamport,
"A fast mutual exclusion algorithm", 1987). A holder that was only stopped sees that, and ends.
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
CLAIM = 3.0  # seconds that a record must stand where no lock can be believed; more than EVERY
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


def make(path: Path) -> int:
    """A new file, of which this process is the only maker; FileExistsError."""
    return open_in_place(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


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


class Taking:
    """Tries to make the file ours, look by look."""

    def __init__(self, path: Path, mine: Record) -> None:
        self.path, self.mine = path, mine
        self._seen: tuple[bytes, int, int] | None = None  # the record, and what else moves with a renewal
        self._begun, self._since = time.monotonic(), 0.0
        self._told = False

    def take(self) -> int:
        """The handle that keeps the lock. Raises HeldError, or OSError with the file's name."""
        with naming(self.path):
            while (handle := self.look()) is None:
                time.sleep(LOOK)
            return handle

    def look(self) -> int | None:
        """One look: the handle if the file is ours now, None if it is to be looked at again."""
        try:
            return self._fill(make(self.path))
        except FileExistsError:
            pass
        try:
            handle = find(self.path)
        except FileNotFoundError:  # its holder has just ended
            return None
        kept = False
        try:
            kept = self._judge(handle)
        finally:
            if not kept:
                os.close(handle)
        return handle if kept else None

    def _fill(self, handle: int) -> int | None:
        """A file that this process has made: lock it, then say whose it is."""
        try:
            while lock(handle) is False:  # somebody looks whether it is locked
                if read(handle):  # this process stood still for so long that another took it for dead
                    os.close(handle)
                    return None
                time.sleep(LOOK / 10)
            write(handle, self.mine)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            os.close(handle)
            raise
        return handle

    def _judge(self, handle: int) -> bool:
        """Whether the file of another job is ours now."""
        begun = time.monotonic()
        locked, raw, about = lock(handle), read(handle), os.fstat(handle)
        if not is_at(handle, self.path):
            return False
        holder = unpacked(raw)
        if locked and holder is not None and holder.machine == self.mine.machine:
            write(handle, self.mine)  # it is dead, and its lock went with it
            return True
        quiet = self._quiet((raw, about.st_mtime_ns, about.st_ino), holder, begun)
        if locked is False and quiet > SETTLE:
            self._refuse(holder, f", though it gives no sign of life for {quiet:.0f} s")
        if locked is False or quiet <= PATIENCE:
            if holder or quiet > 0:  # one that says nothing at the first look is only being made
                self._tell(holder, locked)
            return False
        return self._claim(handle)

    def _quiet(self, sight: tuple[bytes, int, int], holder: Record | None, begun: float) -> float:
        """Seconds without a sign of life; HeldError at the first one."""
        before, self._seen = self._seen, sight
        now = time.monotonic()
        if before is not None and before != sight and holder is not None:
            known = unpacked(before[0])
            if known is not None and known.token == holder.token:
                self._refuse(holder)
        if before != sight or now - begun > SLOW:
            self._since = now
        return now - self._since

    def _claim(self, handle: int) -> bool:
        """Take over from a holder that is dead as far as can be seen; False if another one did."""
        write(handle, self.mine)
        os.fsync(handle)
        time.sleep(CLAIM)
        try:
            again = find(self.path)  # a network file system shows at an opening what others have written
        except FileNotFoundError:
            return False
        try:
            found = unpacked(read(again))
        finally:
            os.close(again)
        return found is not None and found.token == self.mine.token

    def _refuse(self, holder: Record | None, more: str = "") -> None:
        """Raise HeldError; not at once if the holder is of this very batch job, which may be ending it."""
        mine = self.mine.job and holder is not None and holder.job == self.mine.job
        if mine and time.monotonic() - self._begun < LEAVE:
            return
        who = str(holder) if holder else "its file does not say who"
        raise HeldError(
            f"--out {self.path.parent}: another job is at work in this folder: {who}{more}; wait for its "
            f"end or use another --out; if it is dead, remove {self.path} and start again"
        )

    def _tell(self, holder: Record | None, locked: bool | None) -> None:
        """Say once why it takes a while."""
        if self._told or locked is False:
            return
        self._told = True
        log.info(
            "%s was left by %s: waiting %.0f s for a sign of life",
            self.path, holder or "a job that is not known", PATIENCE,
        )  # fmt: skip
