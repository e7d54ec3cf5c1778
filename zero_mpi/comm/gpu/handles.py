"""What those get who start transfers of device memory, and those whose thread meets them in the library."""

from __future__ import annotations

from typing import Any

from zero_mpi.comm.base import Comm, Handle
from zero_mpi.comm.gpu.streams import Side
from zero_mpi.comm.pushing import Pushed, Pushing
from zero_mpi.comm.wrapper import Forwarding
from zero_mpi.device.types import Array
from zero_mpi.telemetry import spans


class Ended:
    """What a transfer leaves behind: the mark behind its last copy or sum, and the arrays that these read.

    They must not go before the device is done with them: their memory would be given to somebody else.
    """

    mark: Any = None

    def __init__(self, *arrays: Array | None) -> None:
        self.arrays = arrays


class Joined(Pushed):
    """A transfer of device memory; whoever waits for it lets computing go on after it, on the device."""

    def __init__(self, comm: Pushing, side: Side, inner: Handle, ended: Ended, kind: str, label: str) -> None:
        super().__init__(comm, inner)
        self.kind, self.label = kind, label  # also where nothing had to be waited for
        self._side, self._ended = side, ended

    def test(self) -> bool:
        if not super().test():
            return False
        mark = self._ended.mark  # none after an error, which `wait` raises
        return mark is None or bool(mark.done)

    def wait(self) -> None:
        super().wait()
        recorder = spans.active
        stall = None if recorder is None else recorder.begin(spans.STALLS, self.kind, self.label)
        self._side.join(self._ended.mark)  # the host does not wait, the device may
        if recorder is not None and stall is not None:
            recorder.end(stall)
        self._ended.arrays = ()


class OfAnotherThread(Forwarding):
    """A transport for the host whose caller may, inside the library, push messages of device memory."""

    def __init__(self, inner: Comm, side: Side) -> None:
        self._comm, self._side = inner, side
        super().__init__(inner)

    @property
    def _inner(self) -> Comm:  # whatever is forwarded goes through here
        self._side.adopt()
        return self._comm

    @_inner.setter
    def _inner(self, inner: Comm) -> None:
        self._comm = inner
