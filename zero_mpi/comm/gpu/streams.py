"""Where communication meets the work of a GPU: the one place that joins streams and events with transfers.

A rank computes on one stream. What a transfer copies or adds goes to a stream beside it, `streams`, and what
the staged transport brings to the host to a third one, so that both copy engines are at work. A transfer
begins when all that the computing stream was asked for before is done (`begin`): that covers who made what is
sent, and who still reads what is about to be overwritten. At its end computing waits for the side stream
(`join`), on the GPU and not on the host, which so goes on to launch what comes next.

MPI and CUDA keep the device of a thread; any thread may push a transfer, so each adopts the GPU first.
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
        """A mark behind what was computed so far."""
        return self._gpu.mark()

    def follow(self, mark: CudaMark) -> None:
        """Let what the streams are asked for from now on come after a mark, without anybody waiting."""
        self.stream.wait_event(mark.event)

    def mark(self) -> CudaMark:
        """A mark behind what the streams were asked for so far."""
        return self._mark(self.stream)

    def fetched(self) -> CudaMark:
        """A mark behind what is on its way to the host."""
        return self._mark(self._down)

    def _mark(self, stream: Any) -> CudaMark:
        self.adopt()
        event = self._gpu.cupy.cuda.Event(block=True, disable_timing=True)
        event.record(stream)
        return CudaMark(event, self._gpu)

    def join(self, mark: CudaMark) -> None:
        """Let what is computed from now on come after a mark of these streams."""
        self._gpu.wait_for(mark)

    # -------------------------------------------------------------------------- memory and work

    def empty(self, size: int, dtype: Any) -> Array:
        """A flat array of the device, kept for ever."""
        self.adopt()
        with self._gpu.stream:  # of its memory, in which what was computed before may not be over
            room = self._gpu.empty(size, dtype)
        self.follow(self.begin())
        return room

    def pinned(self, nbytes: int) -> Array:
        """Bytes of the host that the GPU copies from and to at full speed, and by itself."""
        self.adopt()
        memory = self._gpu.cupy.cuda.PinnedMemory(nbytes)  # CuPy's pool would take the next power of two
        return np.ndarray((nbytes,), np.uint8, self._gpu.cupy.cuda.PinnedMemoryPointer(memory, 0))

    def copy(self, target: Array, source: Array) -> None:
        """target[...] = source, both on the device."""
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
        """`device.ordered_sum` by a kernel."""
        self.adopt()
        ordered_sum_on_gpu(out, parts, accumulate, self.stream)
