"""Arrays in the memory of a CUDA driver, made without CuPy, and the device interface for transports.

The arrays have only the attributes that `comm.gpu.exchanges.GpuStreams` uses; mpi4py finds their memory by
`__cuda_array_interface__`. There are no kernels: sums are computed on the host from copies. A process
that uses such an address on the host crashes, on a GPU and on the simulated driver of a CUDA-aware MPI.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

from zero_mpi.comm.gpu.probe import Driver
from zero_mpi.device import Marker
from zero_mpi.device.ordered_sum import ordered_sum

ALIGNMENT = 256
ROOM = 64 << 20  # bytes of one allocation; large, as the simulated driver tracks only a few allocations


class DriverArray:
    """Flat array at an address of the device."""

    def __init__(self, address: int, size: int, dtype: Any) -> None:
        self.address, self.size, self.dtype = address, size, np.dtype(dtype)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,)

    def __getitem__(self, part: slice) -> DriverArray:
        start, stop, step = part.indices(self.size)
        assert step == 1
        return DriverArray(self.address + start * self.itemsize, max(0, stop - start), self.dtype)

    def view(self, dtype: Any) -> DriverArray:
        return DriverArray(self.address, self.nbytes // np.dtype(dtype).itemsize, dtype)

    def reshape(self, shape: int) -> DriverArray:
        assert shape == -1
        return self

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False), "version": 3}


class DriverSide:
    """Device interface that transports use; all work is complete when its call returns."""

    def __init__(self) -> None:
        self.driver = Driver()
        self._threads = threading.local()
        self.adopt()
        self._next = self._end = 0
        self.taken = 0  # number of arrays that were allocated

    def adopt(self) -> None:
        if not hasattr(self._threads, "adopted"):
            self.driver.open()
            self._threads.adopted = True

    def begin(self) -> Marker:
        return Marker()

    def follow(self, mark: Marker) -> None:
        pass

    def mark(self) -> Marker:
        return Marker()

    def join(self, mark: Marker) -> None:
        pass

    def empty(self, size: int, dtype: Any) -> DriverArray:
        array = DriverArray(self._next, size, dtype)
        needed = -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if self._next + needed > self._end:
            self._next = self._allocate(max(ROOM, needed))
            self._end = self._next + max(ROOM, needed)
            return self.empty(size, dtype)
        self._next += needed
        self.taken += 1
        return array

    def _allocate(self, nbytes: int) -> int:
        self.adopt()
        address = ctypes.c_uint64()
        self.driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def upload(self, values: np.ndarray) -> DriverArray:
        array = self.empty(values.size, values.dtype)
        self.write(array, values)
        return array

    def write(self, array: DriverArray, values: np.ndarray) -> None:
        assert (values.size, values.dtype) == (array.size, array.dtype)
        values = np.ascontiguousarray(values)
        if array.nbytes:
            place, source = ctypes.c_uint64(array.address), ctypes.c_void_p(values.ctypes.data)
            self.driver("cuMemcpyHtoD_v2", place, source, ctypes.c_size_t(array.nbytes))
            self.driver("cuCtxSynchronize")

    def download(self, array: DriverArray) -> np.ndarray:
        values = np.empty(array.size, array.dtype)
        if array.nbytes:
            target, place = ctypes.c_void_p(values.ctypes.data), ctypes.c_uint64(array.address)
            self.driver("cuCtxSynchronize")
            self.driver("cuMemcpyDtoH_v2", target, place, ctypes.c_size_t(array.nbytes))
        return values

    def copy(self, target: DriverArray, source: DriverArray) -> None:
        self.adopt()
        if target.nbytes and target.address != source.address:
            places = ctypes.c_uint64(target.address), ctypes.c_uint64(source.address)
            self.driver("cuMemcpyDtoD_v2", *places, ctypes.c_size_t(target.nbytes))
            self.driver("cuCtxSynchronize")

    def add(self, out: DriverArray, parts: list[DriverArray], accumulate: bool) -> None:
        self.adopt()
        total = self.download(out)
        ordered_sum(total, [self.download(part) for part in parts], accumulate)
        self.write(out, total)
