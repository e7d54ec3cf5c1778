"""The shared memory of a node's ranks: windows, cut into what a module keeps there, and counters beside them.

A window holds arrays that all ranks of the node see (wholes), and for each rank a block of buffers that it
writes and the others read (slots). The first request is set aside at once, so that a job knows at its
start whether there is room.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

from zero_mpi.comm.partition import Partition
from zero_mpi.comm.shared.counters import Counters
from zero_mpi.comm.shared.gradient_pool import FLOAT, SharedGradientPool, padded, window_bytes
from zero_mpi.comm.shared.window import NoSharedMemory, Window
from zero_mpi.comm.shared.words import WRITTEN
from zero_mpi.device.types import Array

Request = tuple[tuple[Partition, ...], tuple[int, ...]]
Allotment = tuple[list[Array], SharedGradientPool]


class NodeMemory:
    """Memory of the ranks of `node`, an MPI communicator that is given up with it.

    `wholes`, `buffers`: arguments of the first call of `allot`. Collective; raises NoSharedMemory on all
    ranks alike where there is not enough.
    """

    def __init__(self, node: Any, wholes: Sequence[Partition], buffers: Sequence[int]) -> None:
        self.node = node
        self.rank, self.size = node.Get_rank(), node.Get_size()
        self._windows: list[Window] = []
        self._pools: list[weakref.ref[SharedGradientPool]] = []
        self._prepared: tuple[Request, Allotment] | None = None
        self._writes = 0  # times that this rank has published
        try:
            self.counters = Counters(node)
        except NoSharedMemory:
            node.Free()
            raise
        try:
            if wholes or buffers:
                self._prepared = (tuple(wholes), tuple(buffers)), self._allot(wholes, buffers)
        except NoSharedMemory:
            self.close()
            raise

    def allot(self, wholes: Sequence[Partition], buffers: Sequence[int]) -> Allotment:
        """Return zeroed arrays as long as `wholes`, of which each rank first writes its part; and a pool.

        Partitions are over the ranks of the node. Collective; raises NoSharedMemory on all ranks alike.
        """
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == (tuple(wholes), tuple(buffers)):
            return prepared[1]
        prepared = None
        self._free_unused()
        return self._allot(wholes, buffers)

    def _allot(self, wholes: Sequence[Partition], buffers: Sequence[int]) -> Allotment:
        """Make one window: first the wholes, then a block of buffers for each rank."""
        starts = list(itertools.accumulate((padded(whole.length) for whole in wholes), initial=0))
        block = sum(padded(length) for length in buffers)
        blocks = [starts[-1] + rank * block for rank in range(self.size + 1)]
        slices = [
            (start + FLOAT.itemsize * part.start, start + FLOAT.itemsize * part.stop)
            for start, part in zip(starts, (whole.part(self.rank) for whole in wholes), strict=False)
        ]
        nbytes = window_bytes((whole.length for whole in wholes), buffers, self.size)
        window = Window(self.node, nbytes, [*slices, (blocks[self.rank], blocks[self.rank + 1])])
        memory = window.hand_over()
        for first, last in slices:
            memory[first:last] = 0
        window.fence()
        self.node.Barrier()  # others may write into what this rank has just made zeros
        arrays = [
            memory[start : start + FLOAT.itemsize * whole.length].view(FLOAT)
            for start, whole in zip(starts, wholes, strict=False)
        ]
        ranks = [memory[start : start + block] for start in blocks[:-1]]
        pool = SharedGradientPool(ranks, self.rank, buffers)
        self._windows.append(window)
        self._pools = [known for known in self._pools if known() is not None] + [weakref.ref(pool)]
        return arrays, pool

    def _free_unused(self) -> None:
        """Free the windows in which no rank has an array any more: modules that are gone. Collective."""
        used = self.node.allgather([window.in_use for window in self._windows])
        for window, in_use in zip(self._windows[:], zip(*used, strict=True), strict=True):
            if not any(in_use):
                window.free()
                self._windows.remove(window)

    def signal_written(self) -> None:
        """Announce that this rank has completely written its parts of wholes."""
        self._writes += 1
        self.counters.raise_to(WRITTEN, self._writes)

    def all_written(self) -> bool:
        """Return whether every rank of the node has published as often as this one."""
        return self.counters.all_reached(WRITTEN, self._writes)

    def find(self, array: Array) -> tuple[SharedGradientPool | None, int]:
        """Return the pool that an array is of, and where in this rank's block it begins."""
        for known in self._pools:
            pool = known()
            offset = None if pool is None else pool.offset(array)
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
