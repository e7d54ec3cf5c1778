"""Lock of a run folder, `OUT/.lock`: the folder belongs to one job at a time, until that job ends.

The process that creates the file holds the folder. The holder, rank 0, keeps a flock on the file, which ends
with the process, and renews its record every few seconds. If the system refuses the flock to another job, the
holder is alive. If it grants the flock, a holder on this machine is dead; other machines' flocks may be
invisible (NFS and Lustre, depending on mount options). A holder on another machine counts as dead if its
record stops changing, by the local clock. The file is then renamed, which only one process can do, and a new
file is made. If a holder that was paused finds a new file, or no folder, it ends its job.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from zero_mpi.errors import JobError, UsageError, naming
from zero_mpi.files.atomic import write_all
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import open_in_place, reason
from zero_mpi.files.parse import parse_json
from zero_mpi.launch.ending import FAILED, end_surely
from zero_mpi.launch.time_limit import find_job
from zero_mpi.telemetry import log, metrics
from zero_mpi.telemetry.events import utc

if TYPE_CHECKING:  # `supervise` reads locks without loading NumPy or MPI
    from zero_mpi.launch.world import World

NAME = ".lock"
EVERY = 2.0  # seconds between signs of life of a holder
POLL = 0.2  # seconds between reads of a file that another job holds
SLOW = 2.0  # seconds; after a longer read, the holder may have been blocked by the file system too
PATIENCE = 20.0  # seconds without a sign of life after which a holder on another machine counts as dead
SETTLE = 5.0  # seconds after which a refused lock counts as held even if the record does not change
LEAVE = 60.0  # seconds for a holder in the same batch job (requeued, or a previous step) to end
GRACE = 3.0  # seconds that a job has to end by itself once its folder is lost
SIZE = 1024  # bytes of a record: always the same number, so that a renewal needs no space on a full disk
ANY = 1 << 62  # any number of hard links of our own file, since a backup may make some
BOOT = Path("/proc/sys/kernel/random/boot_id")
THE_MACHINES = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # errors of the machine, not of --out: status 1


def machine() -> str:
    """Return a text that identifies the running kernel, equal in all containers of a machine."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return platform.node()


@dataclass(frozen=True)
class Record:
    """Content of the lock file: the job that holds the folder."""

    since: str
    job: str = ""
    host: str = field(default_factory=platform.node)
    pid: int = field(default_factory=os.getpid)
    machine: str = field(default_factory=machine)  # machine whose kernel has the flock
    token: str = field(default_factory=lambda: uuid4().hex)  # unique to the job
    beat: int = 0  # number of renewals

    def __str__(self) -> str:
        job = f" ({shown(self.job, 80)})" if self.job else ""
        return f"process {shown(self.pid, 20)} on {shown(self.host, 80)}{job}, since {shown(self.since, 40)}"

    def packed(self) -> bytes:
        return json.dumps(asdict(self)).encode().ljust(SIZE - 1) + b"\n"


def unpacked(raw: bytes) -> Record | None:
    """Return the record in a file's content, for messages and comparisons; None if there is none."""
    with contextlib.suppress(ValueError):
        record = parse_json(raw)
        if isinstance(record, dict) and record.keys() == {f.name for f in fields(Record)}:
            return Record(**record)
    return None


def read(handle: int) -> bytes:
    return os.pread(handle, SIZE, 0)


def write(handle: int, record: Record) -> None:
    """Overwrite the record of a file. Raises OSError."""
    os.lseek(handle, 0, os.SEEK_SET)
    write_all(handle, record.packed())


@contextlib.contextmanager
def opened(path: Path, links: int = 1) -> Iterator[int]:
    """Open a lock file. Raise FileNotFoundError, or UsageError if it is a link, folder or device."""
    try:
        handle = open_in_place(path, os.O_RDWR, links)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EMLINK):
            raise
        text = f"{path}: expected a lock file, found a link, folder or device: remove it"
        raise UsageError(text) from None
    try:
        yield handle
    finally:
        os.close(handle)


def is_held_here(path: Path) -> bool:
    """Return True if a process on this machine holds the folder of this lock file."""
    with contextlib.suppress(OSError, UsageError), opened(path) as handle:
        record = unpacked(read(handle))
        return record is not None and record.machine == machine() and lock(handle) is False
    return False


def lock(handle: int) -> bool | None:
    """Return True if this process gets the file's lock, False if another has it, None without lock support.

    Linux passes a flock on to NFS and Lustre. An fcntl lock would end when any handle of the file is closed.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EACCES) else None
    return True


def is_at(handle: int, path: Path) -> bool:
    """Return True if the path still names the file of this handle."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(handle))
    return False


# ------------------------------------------------------------------------------------------ taking the lock


def create(path: Path, record: Record) -> int | None:
    """Create the file if there is none; return the handle that keeps its lock, or None."""
    try:
        handle = open_in_place(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return None
    try:
        while lock(handle) is False:  # another process is testing the lock
            time.sleep(POLL / 10)
        write(handle, record)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(handle)
        raise
    return handle


def take(path: Path, record: Record) -> int:
    """Lock a folder; return the handle that keeps the lock. Raise UsageError, or OSError with the file name.

    An existing file is read repeatedly, until it is free or a changed record shows that its holder lives.
    """
    last: bytes | None = None  # content of the file when it was last read
    start = last_change = time.monotonic()
    is_logged = False
    with naming(path):
        while (handle := create(path, record)) is None:
            try_start, attempt = time.monotonic(), try_take(path, record)
            if isinstance(attempt, int):
                return attempt
            if attempt is None:
                continue
            locked, raw = attempt
            holder, prior, now = unpacked(raw), unpacked(last or b""), time.monotonic()
            alive = raw != last and holder is not None and prior is not None and prior.token == holder.token
            if raw != last or now - try_start > SLOW:
                last, last_change = raw, now
            silence = now - last_change
            if alive or (locked is False and silence > SETTLE):
                if not (holder and record.job and holder.job == record.job and now - start < LEAVE):
                    job = holder or "the lock file does not say which"
                    raise UsageError(
                        f"--out {path.parent}: another job is using this folder: {job}; wait until it ends, "
                        f"or use another --out; if you are sure that it is dead, delete {path}"
                    )
            elif locked is not False and silence > PATIENCE:
                put_aside(path, raw, record)
            elif locked is not False and not is_logged and (holder or silence > 0):  # lock file is complete
                is_logged = True
                text = f"{path} was left by {holder or 'an unknown job'}"
                log.info("%s: waiting %.0f s for a sign of life", text, PATIENCE)
            time.sleep(POLL)
        return handle


def try_take(path: Path, record: Record) -> int | tuple[bool | None, bytes] | None:
    """Try once: return the handle if we got the lock, else (locked, content); None: the file is gone.

    We get the lock if the system grants it and the holder was on this machine: then the holder is dead.
    """
    with contextlib.suppress(FileNotFoundError), opened(path) as handle:
        locked, raw = lock(handle), read(handle)
        holder = unpacked(raw)
        if not is_at(handle, path):
            return None
        if holder and locked and holder.machine == record.machine:
            write(handle, record)
            return os.dup(handle)  # the lock belongs to both handles
        return locked, raw
    return None  # the holder has just ended


def put_aside(path: Path, raw: bytes, record: Record) -> None:
    """Remove a dead job's file, whose content is `raw`; keep the new file of another job."""
    target = path.with_name(f"{NAME}-{record.token}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, target)
        if target.read_bytes()[:SIZE] != raw:
            with contextlib.suppress(OSError):  # without hard links, the other job makes a new file
                os.link(target, path)
        os.unlink(target)


# ------------------------------------------------------------------------------------------ keeping the lock


class RunLock:
    """Lock of a run folder until `release`. problem: why it is lost; at_loss: called GRACE s later."""

    def __init__(self, path: Path, record: Record, handle: int) -> None:
        self._path, self._own_record = path, record
        # Keep the folder open, so that no new folder gets its inode number.
        self._handles = [handle, os.open(path.parent, os.O_DIRECTORY)]
        self._folder, self.problem = os.fstat(self._handles[1]), ""
        self.at_loss: Callable[[str], object] = lambda problem: None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="zero_mpi lock", daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, out: Path, job: str = "") -> RunLock:
        """Lock an existing folder. Raise UsageError if another job has it, or OSError."""
        path, record = out / NAME, Record(since=utc(), job=job)
        return cls(path, record, take(path, record))

    def release(self) -> None:
        self._ended.set()
        if not self.problem:
            self._thread.join(SLOW)  # limited, because the disk may hang
        with contextlib.suppress(OSError, UsageError), opened(self._path, ANY) as handle:
            record = unpacked(read(handle))
            if record is not None and record.token == self._own_record.token:
                os.unlink(self._path)
        while self._handles:  # the list is empty at a second call
            os.close(self._handles.pop())

    def _renew(self) -> None:
        while not self._ended.wait(EVERY):
            with contextlib.suppress(OSError, UsageError):  # the lock is not lost if the file cannot be read
                self._give_sign()
            if self.problem:
                if not self._ended.wait(GRACE):
                    self.at_loss(self.problem)
                return

    def find_problem(self) -> str:
        """Check the folder now; return the reason if the job has lost it, else an empty text."""
        for pause in (POLL, 0.0):  # checks twice, as a network file system may be wrong for a moment
            try:
                if os.path.samestat(os.stat(self._path.parent), self._folder):
                    return self.problem
            except (FileNotFoundError, NotADirectoryError):
                self._ended.wait(pause)
            except OSError:  # the lock is not lost if the check fails
                return self.problem
        self.problem = f"the run folder {self._path.parent} was moved or removed while the job was using it"
        return self.problem

    def _give_sign(self) -> None:
        """Renew the record if it is ours; create the file again if it is gone but the folder exists."""
        if self.find_problem():
            return
        try:
            # Opened again, because network file systems show writes of other machines after an open.
            with opened(self._path, ANY) as handle:
                record = unpacked(read(handle))
                if record is not None and record.token != self._own_record.token:
                    self.problem = f"the run folder {self._path.parent} was taken over by {record}"
                elif record is not None:
                    self._own_record = replace(self._own_record, beat=self._own_record.beat + 1)
                    write(handle, self._own_record)
        except FileNotFoundError:
            new_handle = create(self._path, self._own_record)
            if new_handle is not None:
                os.close(self._handles[0])
                self._handles[0] = new_handle


def take_folder(world: World, out: Path) -> None:
    """Make the run folder and lock it for this job until its end. Collective.

    Raise UsageError on all ranks if another job uses it, or the folder cannot be written to. From now on
    `world.comm.folder_problem()` says on rank 0 why the folder is no longer the job's.
    """
    lock: RunLock | None = world.on_root(lambda: make_and_take(out))
    if lock is not None:
        world.at_end.append(lambda status, reason: lock.release())
        world.comm.folder_problem = lock.find_problem
        text = "zero_mpi: {}; ending the job".format
        lock.at_loss = lambda reason: end_surely(lambda code: world.end(code, reason, text(reason)), FAILED)


def make_and_take(out: Path) -> RunLock:
    """Make and lock the folder, on rank 0; see `take_folder`."""
    job = find_job()
    try:
        out.mkdir(parents=True, exist_ok=True)
        next(out.iterdir(), None)  # raises an error if the folder cannot be read
        metrics.check(out)
        return RunLock.take(out, "" if job is None else job.name)
    except UsageError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        text = f"--out {shown(out)}: cannot write there: {reason(error)}"
        raise (JobError if getattr(error, "errno", 0) in THE_MACHINES else UsageError)(text) from error
