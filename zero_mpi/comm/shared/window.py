"""Memory that all ranks of a node see: an MPI shared window, made only where there is room for it.

The libraries back a window with a file in /dev/shm that has its length but not its pages; a page for which
there is no room ends the process with SIGBUS, hours later. So the room is looked for first, and each rank
brings its own pages in as soon as the window is there, which also puts them next to its cores. A failure is
raised on all ranks. The file has no name once the window is made, so nothing is left behind.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi.comm.start_mpi import MPI
from zero_mpi.device.types import ALIGNMENT, Array
from zero_mpi.errors import UsageError

PLACE = Path("/dev/shm")  # where MPICH and Open MPI keep shared windows
MARGIN = 1 << 20  # bytes that the library may need beside ours
POPULATE_WRITE = 23  # Linux 5.14 and later; mmap has no name for it yet

Range = tuple[int, int]  # bytes [start, stop)


class NoSharedMemory(UsageError):
    """The ranks cannot share memory; the text says why."""


class NodesApart(NoSharedMemory):
    """The ranks are on several nodes."""


class Window:
    """`nbytes` bytes of shared memory; raises NoSharedMemory on all ranks alike. Collective.

    own: the byte ranges that this rank writes first.
    """

    def __init__(self, node: Any, nbytes: int, own: Iterable[Range] = ()) -> None:
        agree(node, room_problem(nbytes + MARGIN) if node.Get_rank() == 0 else "")
        self.nbytes = nbytes
        mine = nbytes + ALIGNMENT if node.Get_rank() == 0 else 0
        try:
            self._window = MPI.Win.Allocate_shared(mine, 1, comm=node)
        except MPI.Exception as error:
            raise NoSharedMemory(f"the MPI library cannot create a shared window ({error})") from error
        self._window.Lock_all(MPI.MODE_NOCHECK)
        shared: Any = self._window.Shared_query(0)[0]
        memory = np.frombuffer(shared, np.uint8)
        skip = -memory.ctypes.data % ALIGNMENT
        problem = "" if node.allgather(skip) == [skip] * node.Get_size() else "it is aligned differently"
        problem = problem or populate(memory[skip:], own)
        self._kept: Array | None = memory[skip : skip + nbytes]
        self._root = weakref.ref(memory)  # every array that is made of the window keeps this one alive
        del memory, shared
        try:
            agree(node, problem)
        except NoSharedMemory:
            self.free()
            raise

    def hand_over(self) -> Array:
        """Return the memory as a flat array of bytes; the window lives as long as arrays made of it."""
        assert self._kept is not None, "the memory of a window is handed over once"
        memory, self._kept = self._kept, None
        return memory

    @property
    def in_use(self) -> bool:
        """Return whether some array of this rank lies in the window."""
        return self._root() is not None

    def fence(self) -> None:
        """Order this rank's reads and writes of shared memory: those before come before those after."""
        self._window.Sync()

    def free(self) -> None:
        """Unmap the memory. Collective; no array may lie in it any more."""
        self._kept = None
        assert not self.in_use, "arrays still lie in the window"
        self._window.Unlock_all()
        self._window.Free()


def agree(node: Any, problem: str) -> None:
    """Raise NoSharedMemory on all ranks, if one has a problem. Collective."""
    found = next((text for text in node.allgather(problem) if text), "")
    if found:
        raise NoSharedMemory(found)


def room_problem(nbytes: int) -> str:
    """Return why `nbytes` do not fit into shared memory now, or an empty text."""
    try:
        about = os.statvfs(PLACE)
        free = about.f_bavail * about.f_frsize
        if free < nbytes:
            return f"{mebibytes(nbytes)} of shared memory are needed, {PLACE} has only {mebibytes(free)} free"
        with tempfile.TemporaryFile(dir=PLACE) as probe:  # a quota or a group of processes may allow less
            os.posix_fallocate(probe.fileno(), 0, nbytes)
    except OSError as error:
        cause = error.strerror or error
        return f"{mebibytes(nbytes)} of shared memory cannot be reserved in {PLACE}: {cause}"
    return ""


def populate(memory: Array, own: Iterable[Range]) -> str:
    """Bring in the pages of the ranges; return why that cannot be done, or an empty text.

    Unlike a write, the call returns an error where there is no page. An older kernel does not know the call:
    then the check before the window was made must do.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for start, stop in own:
        first = memory.ctypes.data + start
        skipped = first % mmap.PAGESIZE
        length = stop - start + skipped
        if stop > start and libc.madvise(
            ctypes.c_void_p(first - skipped), ctypes.c_size_t(length), POPULATE_WRITE
        ):
            return "" if unknown_call() else f"{PLACE} is full: {os.strerror(ctypes.get_errno())}"
    return ""


def unknown_call() -> bool:
    """Return whether the kernel refused a call because it does not have it."""
    return ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS)


def mebibytes(nbytes: int) -> str:
    """Return a number of bytes as text, in MiB."""
    return f"{nbytes / 2**20:.1f} MiB"
