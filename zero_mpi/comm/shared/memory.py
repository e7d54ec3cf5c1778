"""The shared memory of a node's ranks: windows, progress counters, and pools of gradient buffers.

*Windows.* An MPI shared window is created only if there is enough space. The libraries back a window with a
file in /dev/shm that has the full length but no pages yet; if there is no space for a page, its first use
kills the process by SIGBUS, maybe hours later. So free space is checked first, and each rank allocates its
own pages as soon as the window exists, which also puts them near its cores. A failure is raised on all ranks
(with Open MPI alone, one rank fails and the others wait). The file has no name once the window exists, so no
file remains after a crash.

*Counters.* A counter only grows, is written by one rank, and has its own cache line. A writer writes the data
that the counter announces, then a fence, then the counter. A reader uses the opposite order: counter,
fence, data. A load or store of eight aligned bytes is one memory access, so no rank sees half of a number.
"""

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

PLACE = Path("/dev/shm")  # directory in which MPICH and Open MPI keep shared windows
MARGIN = 1 << 20  # bytes that the library may need in addition
POPULATE_WRITE = 23  # Linux 5.14 and later; Python's mmap has no name for it yet
FLOAT = np.dtype(np.float32)

Range = tuple[int, int]  # bytes [start, stop)
Request = tuple[tuple[Partition, ...], tuple[int, ...]]


class NoSharedMemory(UsageError):
    """Error: the ranks cannot share memory; the text gives the reason."""


class NodesApart(NoSharedMemory):
    """Error: the transport does not suit the number of nodes or the ranks on them."""


class Window:
    """Window of `nbytes` bytes of shared memory. Collective; raises NoSharedMemory on all ranks if it fails.

    ranges: byte ranges whose pages this rank allocates.
    """

    def __init__(self, node: Any, nbytes: int, ranges: Iterable[Range] = ()) -> None:
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
        problem = "" if node.allgather(skip) == [skip] * node.Get_size() else "ranks align memory differently"
        problem = problem or populate(memory[skip:], ranges)
        self._memory: Array | None = memory[skip : skip + nbytes]
        self._root = weakref.ref(memory)  # every array made from the window keeps this object alive
        del memory, shared
        try:
            agree(node, problem)
        except NoSharedMemory:
            self.free()
            raise

    def hand_over(self) -> Array:
        """Return the memory as a flat byte array; arrays made from it keep the window in use."""
        assert self._memory is not None, "the memory of a window can be handed over only once"
        memory, self._memory = self._memory, None
        return memory

    @property
    def in_use(self) -> bool:
        return self._root() is not None

    def fence(self) -> None:
        """Order this rank's earlier reads and writes of shared memory before later reads and writes."""
        self._window.Sync()

    def free(self) -> None:
        """Unmap the memory. Collective; no array may use the window any more."""
        self._memory = None
        assert not self.in_use, "arrays still use the window"
        self._window.Unlock_all()
        self._window.Free()


def agree(node: Any, problem: str) -> None:
    """Raise NoSharedMemory on all ranks if any rank has a problem. Collective."""
    first = next((text for text in node.allgather(problem) if text), "")
    if first:
        raise NoSharedMemory(first)


def space_problem(nbytes: int) -> str:
    """Return the reason why `nbytes` do not fit into shared memory now, or an empty text."""
    amount = f"{nbytes / 2**20:.1f} MiB of shared memory"
    try:
        stat = os.statvfs(PLACE)
        free = stat.f_bavail * stat.f_frsize
        if free < nbytes:
            return f"{amount} are needed, but {PLACE} has only {free / 2**20:.1f} MiB free"
        with tempfile.TemporaryFile(dir=PLACE) as probe:  # a quota or a cgroup may allow less
            os.posix_fallocate(probe.fileno(), 0, nbytes)
    except OSError as error:
        return f"{amount} cannot be reserved in {PLACE}: {error.strerror or error}"
    return ""


def populate(memory: Array, ranges: Iterable[Range]) -> str:
    """Allocate the pages of the ranges; return why that failed, or an empty text.

    Unlike a write, madvise returns an error if no page is free. Older kernels do not support this; then only
    the earlier check of free space protects the process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for start, stop in ranges:
        first = memory.ctypes.data + start
        skip = first % mmap.PAGESIZE
        pointer, length = ctypes.c_void_p(first - skip), ctypes.c_size_t(stop - start + skip)
        if stop > start and libc.madvise(pointer, length, POPULATE_WRITE):
            cause = ctypes.get_errno()
            unknown = cause in (errno.EINVAL, errno.ENOSYS)
            return "" if unknown else f"{PLACE} is full: {os.strerror(cause)}"
    return ""


class Counters:
    """Counters (POSTED, SUMMED, WRITTEN, ...) and a table of numbers for each rank.

    Collective; raises NoSharedMemory on all ranks if it fails.
    """

    def __init__(self, node: Any) -> None:
        rank, self._ranks = node.Get_rank(), node.Get_size()
        self._first = rank * WORDS
        self._window = Window(node, RANK_BYTES * self._ranks, [(RANK_BYTES * rank, RANK_BYTES * (rank + 1))])
        self._words = memoryview(self._window.hand_over()).cast("q")
        for word in range(self._first, self._first + WORDS):
            self._words[word] = 0
        self._least = dict.fromkeys(range(POSTED, TABLE, 8), 0)  # counter -> value that all have reached
        self._window.fence()
        node.Barrier()

    def raise_to(self, counter: int, value: int) -> None:
        """Set this rank's counter, visible only after all earlier writes of this rank."""
        self._window.fence()
        self._words[self._first + counter] = value

    def all_reached(self, counter: int, value: int) -> bool:
        """Return whether every rank's counter is at least `value`; the announced data may then be read."""
        if self._least[counter] >= value:
            return True
        for word in range(counter, self._ranks * WORDS, WORDS):
            if self._words[word] < value:
                return False
        self._window.fence()
        self._least[counter] = value
        return True

    def note(self, entry: int, value: int) -> None:
        """Write an entry of this rank's table; `raise_to` then announces it to the other ranks."""
        self._words[self._first + TABLE + entry % ENTRIES] = value

    def noted(self, rank: int, entry: int) -> int:
        return self._words[rank * WORDS + TABLE + entry % ENTRIES]

    def close(self) -> None:
        """Free the memory. Collective."""
        self._words.release()
        self._window.free()

    @property
    def nbytes(self) -> int:
        return self._window.nbytes


class SharedGradientPool(BufferPool):
    """A pool of fixed size: this rank's block of shared memory, cut into buffers of the given lengths.

    `blocks`: the blocks of all ranks, as bytes, all cut in the same way. Ranks may use their buffers in
    different orders. An owner reads gradients where the ranks wrote them.
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
        """Return a free slot, like `BufferPool.take`, but raise an error if none fits."""
        assert any(buffer.size >= size for buffer in self._free), f"no free gradient slot has {size} elements"
        return super().take(size)

    def offset(self, array: Array) -> int | None:
        """Return the byte offset of an array in this rank's block, or None if it is not in the block."""
        first = address(array)
        return first - self.start if self.start <= first < self.stop else None

    def of_rank(self, rank: int, offset: int, array: Array, part: slice) -> Array:
        """Return elements `part` of `rank`'s array at byte `offset`, which has the type of `array`."""
        first, last = (offset + index * array.itemsize for index in (part.start, part.stop))
        return self.blocks[rank][first:last].view(array.dtype)


Allotment = tuple[list[Array], SharedGradientPool]


class NodeMemory:
    """Memory of the ranks of `node`, an MPI communicator that is freed with it.

    A window has the full arrays, which all ranks of the node see, and for each rank a block of slots, which
    this rank writes and other ranks read. `full`, `buffers`: arguments of the first call of `allot`, whose
    memory is allocated now, so that a job fails at its start if space is short. Collective; raises
    NoSharedMemory on all ranks if it fails.
    """

    def __init__(self, node: Any, full: Sequence[Partition], buffers: Sequence[int]) -> None:
        self.node = node
        self.rank, self.size = node.Get_rank(), node.Get_size()
        self._windows: list[Window] = []
        self._pools: weakref.WeakSet[SharedGradientPool] = weakref.WeakSet()
        self._reserve: tuple[Request, Allotment] | None = None
        self._writes = 0  # number of signals by this rank
        try:
            self.counters = Counters(node)
        except NoSharedMemory:
            node.Free()
            raise
        try:
            if full or buffers:
                self._reserve = (tuple(full), tuple(buffers)), self._allot(full, buffers)
        except NoSharedMemory:
            self.close()
            raise

    def allot(self, full: Sequence[Partition], buffers: Sequence[int]) -> Allotment:
        """Return arrays with the lengths of `full`, of which each rank has zeroed its part, and a pool.

        Partitions are over the ranks of the node. Collective; raises NoSharedMemory on all ranks if it fails.
        """
        prepared, self._reserve = self._reserve, None
        if prepared is not None and prepared[0] == (tuple(full), tuple(buffers)):
            return prepared[1]
        prepared = None  # the last reference to its arrays, whose window is freed next
        self._free_unused()
        return self._allot(full, buffers)

    def _allot(self, full: Sequence[Partition], buffers: Sequence[int]) -> Allotment:
        """Create one window: first the full arrays, then a block of buffers for each rank."""
        starts = list(itertools.accumulate((padded(partition.length) for partition in full), initial=0))
        block = sum(map(padded, buffers))
        edges = [starts[-1] + rank * block for rank in range(self.size + 1)]
        slices = [
            (start + FLOAT.itemsize * part.start, start + FLOAT.itemsize * part.stop)
            for start, part in zip(starts, (partition.part(self.rank) for partition in full), strict=False)
        ]
        nbytes = window_bytes((partition.length for partition in full), buffers, self.size)
        window = Window(self.node, nbytes, [*slices, (edges[self.rank], edges[self.rank + 1])])
        memory = window.hand_over()
        for first, last in slices:
            memory[first:last] = 0
        window.fence()
        self.node.Barrier()  # afterwards other ranks may write to the memory that this rank has zeroed
        arrays = [
            memory[start : start + FLOAT.itemsize * partition.length].view(FLOAT)
            for start, partition in zip(starts, full, strict=False)
        ]
        pool = SharedGradientPool([memory[start : start + block] for start in edges[:-1]], self.rank, buffers)
        self._windows.append(window)
        self._pools.add(pool)
        return arrays, pool

    def _free_unused(self) -> None:
        """Free the windows that no rank's arrays use, because their modules are deleted. Collective."""
        usage = self.node.allgather([window.in_use for window in self._windows])
        for window, in_use in zip(self._windows[:], zip(*usage, strict=True), strict=True):
            if not any(in_use):
                window.free()
                self._windows.remove(window)

    def signal_written(self) -> None:
        self._writes += 1
        self.counters.raise_to(WRITTEN, self._writes)

    def all_written(self) -> bool:
        return self.counters.all_reached(WRITTEN, self._writes)

    def find(self, array: Array) -> tuple[SharedGradientPool | None, int]:
        """Return the pool that contains an array, and its byte offset in this rank's block; or None and 0."""
        for pool in self._pools:
            offset = pool.offset(array)
            if offset is not None:
                return pool, offset
        return None, 0

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that all ranks of the node together use now."""
        return self.counters.nbytes + sum(window.nbytes for window in self._windows)

    def close(self) -> None:
        """Free all windows except those with arrays in use, which stay until the process ends. Collective."""
        self._reserve = None
        self._free_unused()
        self.counters.close()
        self.node.Free()
