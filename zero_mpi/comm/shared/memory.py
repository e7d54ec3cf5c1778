"""The shared memory of a node's ranks: windows, counters of progress, and pools of gradient buffers.

*Windows.* An MPI shared window is made only where there is room for it. The libraries back a window with a
file in /dev/shm that has its length but not its pages; a page for which there is no room ends the process
with SIGBUS, hours later. So free space is checked first, and each rank brings its own pages in as soon as
the window is there, which also puts them next to its cores. A failure is raised on all ranks. The file has no
name once the window is made, so nothing is left behind.

*Counters.* A counter only grows and is written by one rank; it has a cache line of its own. A writer first
writes the data that the counter announces: data, fence, counter; a reader goes the other way: counter, fence,
data. A store or load of eight aligned bytes is one access to memory, so nobody sees half a number.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi.comm.kinds import ENTRIES, POSTED, RANK_BYTES, TABLE, WORDS, WRITTEN, padded, window_bytes
from zero_mpi.comm.partition import Partition
from zero_mpi.comm.start_mpi import MPI
from zero_mpi.device import HOST
from zero_mpi.device.arrays import BufferPool, address
from zero_mpi.device.types import ALIGNMENT, Array
from zero_mpi.errors import UsageError

PLACE = Path("/dev/shm")  # where MPICH and Open MPI keep shared windows
MARGIN = 1 << 20  # bytes that the library may need beside ours
POPULATE_WRITE = 23  # Linux 5.14 and later; mmap has no name for it yet
FLOAT = np.dtype(np.float32)

Range = tuple[int, int]  # bytes [start, stop)
Request = tuple[tuple[Partition, ...], tuple[int, ...]]


class NoSharedMemory(UsageError):
    """The ranks cannot share memory; the text says why."""


class NodesApart(NoSharedMemory):
    """The ranks are on several nodes."""


# ---------------------------------------------------------------------------------------------- windows


class Window:
    """`nbytes` bytes of shared memory; raises NoSharedMemory on all ranks alike. Collective.

    own: the byte ranges that this rank writes first.
    """

    def __init__(self, node: Any, nbytes: int, own: Iterable[Range] = ()) -> None:
        agree(node, space_problem(nbytes + MARGIN) if node.Get_rank() == 0 else "")
        self.nbytes = nbytes
        size = nbytes + ALIGNMENT if node.Get_rank() == 0 else 0
        try:
            self._window = MPI.Win.Allocate_shared(size, 1, comm=node)
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


def space_problem(nbytes: int) -> str:
    """Return why `nbytes` do not fit into shared memory now, or an empty text."""
    needed = f"{nbytes / 2**20:.1f} MiB of shared memory"
    try:
        about = os.statvfs(PLACE)
        free = about.f_bavail * about.f_frsize
        if free < nbytes:
            return f"{needed} are needed, {PLACE} has only {free / 2**20:.1f} MiB free"
        with tempfile.TemporaryFile(dir=PLACE) as probe:  # a quota or a group of processes may allow less
            os.posix_fallocate(probe.fileno(), 0, nbytes)
    except OSError as error:
        return f"{needed} cannot be reserved in {PLACE}: {error.strerror or error}"
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
        place, length = ctypes.c_void_p(first - skipped), ctypes.c_size_t(stop - start + skipped)
        if stop > start and libc.madvise(place, length, POPULATE_WRITE):
            cause = ctypes.get_errno()
            unknown = cause in (errno.EINVAL, errno.ENOSYS)
            return "" if unknown else f"{PLACE} is full: {os.strerror(cause)}"
    return ""


# --------------------------------------------------------------------------------------------- counters


class Counters:
    """The counters POSTED, SUMMED, WRITTEN, ... of each rank, and a table of small numbers beside them.

    Collective; raises NoSharedMemory on all ranks alike.
    """

    def __init__(self, node: Any) -> None:
        rank, self._ranks = node.Get_rank(), node.Get_size()
        self._first = rank * WORDS
        self._window = Window(node, RANK_BYTES * self._ranks, [(RANK_BYTES * rank, RANK_BYTES * (rank + 1))])
        self._words = memoryview(self._window.hand_over()).cast("q")
        for word in range(self._first, self._first + WORDS):
            self._words[word] = 0
        self._seen = dict.fromkeys(range(POSTED, TABLE, 8), 0)  # how far all ranks are known to have come
        self._window.fence()
        node.Barrier()

    def raise_to(self, counter: int, value: int) -> None:
        """Set this rank's counter, after everything that the rank has written so far."""
        self._window.fence()
        self._words[self._first + counter] = value

    def all_reached(self, counter: int, value: int) -> bool:
        """Return whether every rank's counter is `value` or more: then what it stands for may be read."""
        if self._seen[counter] >= value:
            return True
        for word in range(counter, self._ranks * WORDS, WORDS):
            if self._words[word] < value:
                return False
        self._window.fence()
        self._seen[counter] = value
        return True

    def note(self, entry: int, value: int) -> None:
        """Write into this rank's table; a counter that is raised later says that it is there."""
        self._words[self._first + TABLE + entry % ENTRIES] = value

    def noted(self, rank: int, entry: int) -> int:
        """Read from a rank's table."""
        return self._words[rank * WORDS + TABLE + entry % ENTRIES]

    def close(self) -> None:
        """Give the memory back. Collective."""
        self._words.release()
        self._window.free()

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks' counters."""
        return self._window.nbytes


# ---------------------------------------------------------------------------------------------- buffers


class SharedGradientPool(BufferPool):
    """A pool that cannot grow: this rank's block of shared memory, cut into buffers of the given lengths.

    `blocks`: the blocks of all ranks, as bytes; they are cut alike, but ranks may lend in another order.
    An owner adds gradients where they were written.
    """

    def __init__(self, blocks: Sequence[Array], rank: int, lengths: Sequence[int]) -> None:
        super().__init__(where=HOST)
        self.blocks = list(blocks)
        self.start = address(blocks[rank])
        self.stop = self.start + int(blocks[rank].size)
        offset = 0
        for length in lengths:
            self._free.append(blocks[rank][offset : offset + length * FLOAT.itemsize].view(FLOAT))
            offset += padded(length)

    def take(self, size: int) -> Array:
        """Return a free slot, as from a BufferPool, but one that fits must be there."""
        assert any(buffer.size >= size for buffer in self._free), f"no gradient slot of {size} elements left"
        return super().take(size)

    def offset(self, array: Array) -> int | None:
        """Return where in this rank's block an array begins, in bytes; None if it lies elsewhere."""
        first = address(array)
        return first - self.start if self.start <= first < self.stop else None

    def of_rank(self, rank: int, offset: int, array: Array, part: slice) -> Array:
        """Return the elements `part` of the array like `array` that begins at `offset` in `rank`'s block."""
        first, last = (offset + index * array.itemsize for index in (part.start, part.stop))
        return self.blocks[rank][first:last].view(array.dtype)


Allotment = tuple[list[Array], SharedGradientPool]


class NodeMemory:
    """Memory of the ranks of `node`, an MPI communicator that is freed with it.

    A window holds arrays that all ranks of the node see (full), and for each rank a block of buffers that
    it writes and the others read (slots). `full`, `buffers`: arguments of `allot`'s first call, set
    aside at once, so that a job knows at its start whether there is room. Collective; raises NoSharedMemory
    on all ranks alike where there is not enough.
    """

    def __init__(self, node: Any, full: Sequence[Partition], buffers: Sequence[int]) -> None:
        self.node = node
        self.rank, self.size = node.Get_rank(), node.Get_size()
        self._windows: list[Window] = []
        self._pools: weakref.WeakSet[SharedGradientPool] = weakref.WeakSet()
        self._prepared: tuple[Request, Allotment] | None = None
        self._writes = 0  # times that this rank has published
        try:
            self.counters = Counters(node)
        except NoSharedMemory:
            node.Free()
            raise
        try:
            if full or buffers:
                self._prepared = (tuple(full), tuple(buffers)), self._allot(full, buffers)
        except NoSharedMemory:
            self.close()
            raise

    def allot(self, full: Sequence[Partition], buffers: Sequence[int]) -> Allotment:
        """Return zeroed arrays as long as `full`, of which each rank first writes its part; and a pool.

        Partitions are over the ranks of the node. Collective; raises NoSharedMemory on all ranks alike.
        """
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == (tuple(full), tuple(buffers)):
            return prepared[1]
        prepared = None
        self._free_unused()
        return self._allot(full, buffers)

    def _allot(self, full: Sequence[Partition], buffers: Sequence[int]) -> Allotment:
        """Make one window: first the full arrays, then a block of buffers for each rank."""
        starts = list(itertools.accumulate((padded(one.length) for one in full), initial=0))
        block = sum(map(padded, buffers))
        blocks = [starts[-1] + rank * block for rank in range(self.size + 1)]
        slices = [
            (start + FLOAT.itemsize * part.start, start + FLOAT.itemsize * part.stop)
            for start, part in zip(starts, (one.part(self.rank) for one in full), strict=False)
        ]
        nbytes = window_bytes((one.length for one in full), buffers, self.size)
        window = Window(self.node, nbytes, [*slices, (blocks[self.rank], blocks[self.rank + 1])])
        memory = window.hand_over()
        for first, last in slices:
            memory[first:last] = 0
        window.fence()
        self.node.Barrier()  # others may write into what this rank has just made zeros
        arrays = [
            memory[start : start + FLOAT.itemsize * one.length].view(FLOAT)
            for start, one in zip(starts, full, strict=False)
        ]
        pool = SharedGradientPool(
            [memory[start : start + block] for start in blocks[:-1]], self.rank, buffers
        )
        self._windows.append(window)
        self._pools.add(pool)
        return arrays, pool

    def _free_unused(self) -> None:
        """Free the windows in which no rank has an array any more: modules that are gone. Collective."""
        used = self.node.allgather([window.in_use for window in self._windows])
        for window, in_use in zip(self._windows[:], zip(*used, strict=True), strict=True):
            if not any(in_use):
                window.free()
                self._windows.remove(window)

    def signal_written(self) -> None:
        """Announce that this rank has completely written its parts of arrays."""
        self._writes += 1
        self.counters.raise_to(WRITTEN, self._writes)

    def all_written(self) -> bool:
        """Return whether every rank of the node has published as often as this one."""
        return self.counters.all_reached(WRITTEN, self._writes)

    def find(self, array: Array) -> tuple[SharedGradientPool | None, int]:
        """Return the pool that an array is of, and where in this rank's block it begins."""
        for pool in self._pools:
            offset = pool.offset(array)
            if offset is not None:
                return pool, offset
        return None, 0

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that all ranks of the node together have now."""
        return self.counters.nbytes + sum(window.nbytes for window in self._windows)

    def close(self) -> None:
        """Free the windows, but for those in which arrays still lie: these stay to the end of the process."""
        self._prepared = None
        self._free_unused()
        self.counters.close()
        self.node.Free()
