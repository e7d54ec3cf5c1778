"""Handles of transfers of device memory, and a wrapper for threads that may push them inside MPI."""

from __future__ import annotations

from typing import Any

from zero_mpi.comm.base import Comm, Handle
from zero_mpi.comm.gpu.streams import GpuStreams
from zero_mpi.comm.progressing import ProgressingHandle, ProgressingWrapper
from zero_mpi.comm.wrapper import CommWrapper
from zero_mpi.device.types import Array
from zero_mpi.telemetry import spans


class Result:
    """Result of a transfer: the mark behind its last copy or sum, and the arrays that these read.

    The arrays must live until the device is done with them: otherwise their memory would be given away.
    """

    mark: Any = None

    def __init__(self, *arrays: Array | None) -> None:
        self.arrays = arrays


class StreamHandle(ProgressingHandle):
    """A transfer of device memory; after `wait`, later computing follows it, in the order of the device."""

    def __init__(
        self,
        comm: ProgressingWrapper,
        streams: GpuStreams,
        inner: Handle,
        result: Result,
        kind: str,
        label: str,
    ) -> None:
        super().__init__(comm, inner)
        self.kind, self.label = kind, label  # also where nothing had to be waited for
        self._streams, self._result = streams, result

    def test(self) -> bool:
        if not super().test():
            return False
        mark = self._result.mark  # none after an error, which `wait` raises
        return mark is None or bool(mark.done)

    def wait(self) -> None:
        super().wait()
        recorder = spans.active
        stall = None if recorder is None else recorder.begin(spans.STALLS, self.kind, self.label)
        self._streams.join(self._result.mark)  # the host does not wait, the device may
        if recorder is not None and stall is not None:
            recorder.end(stall)
        self._result.arrays = ()


class DeviceAdoptingWrapper(CommWrapper):
    """A transport for the host whose caller may, inside the library, push messages of device memory."""

    def __init__(self, inner: Comm, streams: GpuStreams) -> None:
        self._comm, self._streams = inner, streams
        super().__init__(inner)

    @property
    def _inner(self) -> Comm:  # whatever is forwarded goes through here
        self._streams.adopt()
        return self._comm

    @_inner.setter
    def _inner(self, inner: Comm) -> None:
        self._comm = inner
