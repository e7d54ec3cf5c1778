"""A transport that keeps a record of what was started; that of a script also belongs to one thread.

By the record ranks find out, when they have waited for a while, that they wait for different things or for a
rank that has ended (`launch.watchdog`). Collectives of two threads have no order, so ranks would pair those
of one with those of the other: in a script whoever comes second is refused.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple

from zero_mpi.comm.base import Comm
from zero_mpi.comm.meter import collective
from zero_mpi.comm.notifying import NotifyingWrapper
from zero_mpi.comm.partition import Partition
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError

MOST_KEPT = 128  # collectives of a communicator that are remembered


class Started(NamedTuple):
    """A collective that this rank has started: its number, and what must be the same on all ranks."""

    number: int
    kind: str
    label: str
    detail: Any  # how many elements, or what there is to say instead

    @property
    def text(self) -> str:
        detail = f"{self.detail} elements" if isinstance(self.detail, int) else self.detail
        return collective((self.kind, self.label)) + (f" ({detail})" if detail else "")


Record = deque[Started]  # the last collectives of a communicator


class ThreadError(UsageError):
    """A second thread has started a collective."""


class CollectiveRecords:
    """The last collectives that this process has started.

    of_comms   one record for each communicator, in the order in which all ranks made them
    threads    that have started a collective of a script, or wanted to
    ended      the exit status of a rank that will start nothing more; None before
    """

    def __init__(self) -> None:
        self.of_comms: list[Record] = []
        self.threads: set[int] = set()
        self.ended: int | None = None


records = CollectiveRecords()  # those of this process


class NumberedComm(NotifyingWrapper):
    """The transport `inner`, with a record of its collectives."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self._record: Record = deque(maxlen=MOST_KEPT)
        records.of_comms.append(self._record)
        self._number = 0  # of the next collective

    def beside(self, other: Comm) -> Comm:
        return type(self)(other)

    def on_collective(self, kind: str, label: str = "", *about: Array | Partition | str) -> None:
        what = about[0] if about else ""
        self._record.append(Started(self._number, kind, label, getattr(what, "size", what)))
        self._number += 1


class GuardedComm(NumberedComm):
    """The same for a script. Raises ThreadError where another thread starts a collective than the first did.

    A thread that has ended leaves it to the next.
    """

    _thread = 0  # that starts collectives

    def on_collective(self, kind: str, label: str = "", *about: Array | Partition | str) -> None:
        """Write a collective down; raise ThreadError if this thread may not start it."""
        if threading.get_ident() != self._thread:
            self._take_over(collective((kind, label)))
        super().on_collective(kind, label, *about)

    def _take_over(self, what: str) -> None:
        """The collectives are this thread's from now on, if nobody else has them."""
        me = threading.current_thread()
        assert me.ident is not None
        records.threads.add(me.ident)
        owner = next((thread for thread in threading.enumerate() if thread.ident == self._thread), None)
        if owner is not None:
            raise ThreadError(
                f"rank {self.rank}: thread {me.name!r} starts {what}, but the collectives of this "
                f"communicator are those of thread {owner.name!r}: those of two threads have no order that "
                "ranks could share; use a communicator and its modules in one thread, and for another thread "
                "make one more by connect(), on all ranks in the same order"
            )
        self._thread = me.ident
