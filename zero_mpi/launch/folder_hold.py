"""A job has its run folder from before it touches anything there until its end (`folder_lock` has the file).

Rank 0 holds it and the others are told. While the job runs a thread gives signs of life and sees whether the
folder is still ours: it may have been moved, removed, or taken over while the process was stopped. Then the
job writes no more there, and ends: after its step, or a little later wherever it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from zero_mpi.errors import JobError, UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import reason
from zero_mpi.launch import folder_lock
from zero_mpi.launch.ending import FAILED, end_surely
from zero_mpi.launch.folder_lock import EVERY, LOOK, NAME, SLOW, Record, create, find, read, unpacked, write
from zero_mpi.launch.time_limit import find_job
from zero_mpi.launch.world import World
from zero_mpi.telemetry import metrics
from zero_mpi.telemetry.events import utc

ANY = 1 << 62  # hard links of our own file: a backup may have made them
GRACE = 3.0  # seconds that a job has to end by itself once its folder is lost
THE_MACHINES = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # what another --out is no remedy for: status 1


class RunLock:
    """Folder that is ours from `take` to `release`. lost: why not any more; at_loss: called GRACE later."""

    def __init__(self, path: Path, mine: Record, handle: int) -> None:
        self._path, self._mine, self._handle = path, mine, handle
        self._kept = os.open(path.parent, os.O_DIRECTORY)  # so that no later folder gets its inode's number
        self._folder, self.lost = os.fstat(self._kept), ""
        self.at_loss: Callable[[], object] = lambda: None
        os.register_at_fork(after_in_child=self._forget)
        self._over, self._thread = threading.Event(), threading.Thread(target=self._renew, daemon=True)
        self._thread.name = "zero_mpi lock"
        self._thread.start()

    @classmethod
    def take(cls, out: Path, job: str = "") -> RunLock:
        """The lock of a folder that is there. Raises UsageError if another job has it, or OSError."""
        path, mine = out / NAME, Record(since=utc(), job=job)
        return cls(path, mine, folder_lock.take(path, mine))

    def release(self) -> None:
        """Let the folder go."""
        self._over.set()
        if not self.lost:
            self._thread.join(SLOW)  # the disk may hang
        with contextlib.suppress(OSError, UsageError), self._record() as (_, record):
            if record is not None and record.token == self._mine.token:
                os.unlink(self._path)
        self._forget()

    def _forget(self) -> None:
        """Close file and folder; also in a child, which would keep the lock when this process is dead."""
        handles, self._handle, self._kept = (self._handle, self._kept), -1, -1
        for handle in handles:
            with contextlib.suppress(OSError):
                os.close(handle)

    @contextlib.contextmanager
    def _record(self) -> Iterator[tuple[int, Record | None]]:
        """The file, opened anew: what others wrote is seen so over a network, and ours reaches its server."""
        handle = find(self._path, ANY)
        try:
            yield handle, unpacked(read(handle))
        finally:
            os.close(handle)

    def _renew(self) -> None:
        while not self._over.wait(EVERY):
            with contextlib.suppress(OSError, UsageError):  # what cannot be read tells nothing
                self._give_sign()
            if self.lost:
                if not self._over.wait(GRACE):
                    self.at_loss()
                return

    def look(self) -> str:
        """Return why the folder is not ours any more, by a look of this moment; empty while it is."""
        for pause in (LOOK, 0.0):  # a network file system may be wrong for a moment
            try:
                if os.path.samestat(os.stat(self._path.parent), self._folder):
                    return self.lost
            except (FileNotFoundError, NotADirectoryError):
                self._over.wait(pause)
            except OSError:  # what cannot be looked at tells nothing
                return self.lost
        self.lost = f"the run folder {self._path.parent} was moved or removed while the job was at work in it"
        return self.lost

    def _give_sign(self) -> None:
        """Renew the record, if it is ours; make the file again where it is gone and the folder is not."""
        if self.look():
            return
        try:
            with self._record() as (handle, record):
                if record is not None and record.token != self._mine.token:
                    self.lost = f"the run folder {self._path.parent} was taken over by {record}"
                elif record is not None:
                    self._mine = replace(self._mine, beat=record.beat + 1)
                    write(handle, self._mine)
        except FileNotFoundError:
            new = create(self._path, self._mine)
            if new is not None:
                os.close(self._handle)
                self._handle = new


class Hold:
    """The run folder of a job, as each rank has it; on rank 0 with its lock."""

    def __init__(self, world: World, lock: RunLock | None) -> None:
        self._world, self._lock = world, lock

    @property
    def lost(self) -> str:
        """Why this rank knows the folder to be ours no more; empty while it is."""
        return self._lock.lost if self._lock is not None else ""

    def look(self) -> str:
        """Return the same by a look of this moment."""
        return self._lock.look() if self._lock is not None else ""

    def check(self, problem: str = "") -> None:
        """Raise JobError on all ranks if the folder is lost, or rank 0 has a problem with it. Collective."""
        said = self._world.comm.broadcast_object(self.look() or problem)
        if said:
            raise JobError(said)


def take_folder(world: World, out: Path) -> Hold:
    """Make the run folder and let this job have it until its end. Collective.

    Raises UsageError on all ranks if another job is at work there, or the folder cannot be written to.
    """
    lock: RunLock | None = world.on_root(lambda: take(out))
    if lock is not None:
        world.at_end.append(lambda status, reason: lock.release())
        world.comm.lost = lock.look
        text = "zero_mpi: {}; ending the job".format
        lock.at_loss = lambda: end_surely(lambda code: world.end(code, lock.lost, text(lock.lost)), FAILED)
    return Hold(world, lock)


def take(out: Path) -> RunLock:
    """`take_folder` on rank 0."""
    job = find_job()
    try:
        out.mkdir(parents=True, exist_ok=True)
        next(out.iterdir(), None)  # it can be read as well
        metrics.check(out)
        return RunLock.take(out, "" if job is None else job.name)
    except OSError as error:
        text = f"--out {shown(out)}: cannot write there: {reason(error)}"
        raise (JobError if error.errno in THE_MACHINES else UsageError)(text) from error
    except UsageError:
        raise
    except ValueError as error:  # a NUL byte
        raise UsageError(f"--out {shown(out)}: {error}") from error
