"""Streams and events for transfers: the one module where communication meets the work of a GPU.

A rank computes on one stream. Copies and sums of transfers go to a stream beside it, `stream`, and copies of
the staged transport to the host go to a third one, so that both copy engines are at work. A transfer begins
when all work asked of the computing stream before is done (`begin`): this includes the work that made the
data to send, and work that still reads memory to be overwritten. At its end the computing stream waits for
the side stream (`join`), on the GPU and not on the host, so the host goes on to launch what comes next.

MPI and CUDA keep a device per thread; any thread may push a transfer, so each adopts the GPU first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zero_mpi.device import Cuda, CudaMark
from zero_mpi.device.ordered_sum import ordered_sum_on_gpu
from zero_mpi.device.types import Array


class GpuStreams:
    """The side streams of the GPU in use.

    Transports ask no more of an array than `size`, `dtype`, `itemsize`, `nbytes`, slices `[start:stop]`,
    `view(uint8)` and `__cuda_array_interface__` (or DLPack), by which mpi4py finds its memory.
    """

    def __init__(self, gpu: Cuda) -> None:
        self._gpu, self._runtime = gpu, gpu.cupy.cuda.runtime
        self.adopt()
        self.stream = gpu.cupy.cuda.Stream(non_blocking=True)
        self._down = gpu.cupy.cuda.Stream(non_blocking=True)  # to the host

    def adopt(self) -> None:
        """Make this thread use the GPU; called once a thread, whose current stream stays what it is."""
        self._gpu.choose()

    # ------------------------------------------------------------------------- order of streams

    def begin(self) -> CudaMark:
        """Return a mark behind what was computed so far."""
        return self._gpu.mark()

    def follow(self, mark: CudaMark) -> None:
        """Order later work of the streams after a mark, without blocking any thread."""
        self.stream.wait_event(mark.event)

    def mark(self) -> CudaMark:
        """Return a mark behind all work that the side stream was asked for so far."""
        return self._mark(self.stream)

    def fetched(self) -> CudaMark:
        """Return a mark behind the copies that are on their way to the host."""
        return self._mark(self._down)

    def _mark(self, stream: Any) -> CudaMark:
        self.adopt()
        event = self._gpu.cupy.cuda.Event(block=True, disable_timing=True)
        event.record(stream)
        return CudaMark(event, self._gpu)

    def join(self, mark: CudaMark) -> None:
        """Order later computing after a mark of these streams."""
        self._gpu.wait_for(mark)

    # -------------------------------------------------------------------------- memory and work

    def empty(self, size: int, dtype: Any) -> Array:
        """Return a flat array of the device, kept forever."""
        self.adopt()
        with self._gpu.stream:  # its memory may still be in use by earlier computing
            room = self._gpu.empty(size, dtype)
        self.follow(self.begin())
        return room

    def pinned(self, nbytes: int) -> Array:
        """Return pinned host memory, from and to which the GPU copies at full speed and asynchronously."""
        self.adopt()
        memory = self._gpu.cupy.cuda.PinnedMemory(nbytes)  # CuPy's pool would take the next power of two
        return np.ndarray((nbytes,), np.uint8, self._gpu.cupy.cuda.PinnedMemoryPointer(memory, 0))

    def copy(self, target: Array, source: Array) -> None:
        """Copy: target[...] = source, both on the device."""
        if target.data.ptr != source.data.ptr:
            kind = self._runtime.memcpyDeviceToDevice
            self._move(target.data.ptr, source.data.ptr, target.nbytes, kind, self.stream)

    def fetch(self, target: Array, source: Array) -> None:
        """Copy from the device into pinned memory of the same size."""
        kind = self._runtime.memcpyDeviceToHost
        self._move(target.ctypes.data, source.data.ptr, target.nbytes, kind, self._down)

    def bring(self, target: Array, source: Array) -> None:
        """Copy from pinned memory to the device."""
        kind = self._runtime.memcpyHostToDevice
        self._move(target.data.ptr, source.ctypes.data, target.nbytes, kind, self.stream)

    def _move(self, target: int, source: int, nbytes: int, kind: int, stream: Any) -> None:
        if nbytes:
            self.adopt()
            self._runtime.memcpyAsync(target, source, nbytes, kind, stream.ptr)

    def add(self, out: Array, parts: list[Array], accumulate: bool) -> None:
        """Sum `parts` into `out` as `device.ordered_sum` does, by a kernel."""
        self.adopt()
        ordered_sum_on_gpu(out, parts, accumulate, self.stream)
