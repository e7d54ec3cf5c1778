"""A transport whose waiting ranks must also push the transfers of others.

So whoever waits goes on pushing everything that is in progress: another rank may need it to get as far.
"""

from __future__ import annotations

from collections.abc import Callable

from zero_mpi import environment
from zero_mpi.comm.base import DONE, Handle
from zero_mpi.comm.spin_wait import wait_until
from zero_mpi.comm.transfer import MessageComm
from zero_mpi.comm.wrapper import CommWrapper


class ProgressingWrapper(CommWrapper):
    """Wrapper that forwards to `inner`, and pushes all transfers while it waits."""

    def __init__(self, inner: MessageComm, ranks_here: int) -> None:
        super().__init__(inner)
        self._library = inner
        self._crowded = ranks_here > environment.node_cores()

    def wait_until(self, ready: Callable[[], bool], kind: str, label: str = "") -> None:
        """Push the transfers in progress until `ready()`; `kind` and `label` name what is waited for."""

        def pushed() -> bool:
            self.progress()
            if ready():
                return True
            self._library.poke_progress()
            return False

        with self.meter.waiting(kind, label):
            wait_until(pushed, self._crowded)

    def wrapped(self, inner: Handle) -> Handle:
        return DONE if inner is DONE else ProgressingHandle(self, inner)


class ProgressingHandle(Handle):
    """A transfer whose wait pushes all other transfers too."""

    def __init__(self, comm: ProgressingWrapper, inner: Handle) -> None:
        self._comm, self._inner, self.kind, self.label = comm, inner, inner.kind, inner.label

    def test(self) -> bool:
        self._comm.progress()
        return self._inner.test()

    def wait(self) -> None:
        if not self._inner.test():
            self._comm.wait_until(self._inner.test, self.kind, self.label)
        self._inner.wait()  # complete: an error comes out
