"""Wrappers of transports that record or compare each collective before it starts.

`NumberedComm` records the collectives that were started. Ranks that have waited for a while find in the
records whether they wait for different collectives or for a rank that has ended (`launch.watchdog`).
`GuardedComm`, for scripts, also belongs to one thread: collectives of two threads have no order, so ranks
could mix them up. `CheckedComm` (`--check-collectives`) compares the collectives that ranks are about to
start: digests are gathered over separate communicators, and if one differs, all ranks learn which rank starts
which collective. The wrapped transport runs the collectives, so results do not change.
"""

import hashlib
import threading
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from zero_mpi.comm.agree import odd_one
from zero_mpi.comm.base import Comm, wait_until
from zero_mpi.comm.meter import collective
from zero_mpi.comm.partition import Partition
from zero_mpi.comm.wrapper import CommWrapper
from zero_mpi.device.types import Array
from zero_mpi.errors import JobError, UsageError

MOST_KEPT = 128  # maximum number of collectives in a communicator's record
DIGEST = 16  # bytes of a digest


class Started(NamedTuple):
    """A collective that this rank has started: its number, and facts that must be equal on all ranks."""

    number: int
    kind: str
    label: str
    detail: Any  # number of elements, or another description

    @property
    def text(self) -> str:
        detail = f"{self.detail} elements" if isinstance(self.detail, int) else self.detail
        return collective((self.kind, self.label)) + (f" ({detail})" if detail else "")


Record = deque[Started]  # the last collectives of a communicator


class ThreadError(UsageError):
    """Error: a second thread tried to start a collective of the same communicator."""


class CollectiveRecords:
    """Records of the last collectives that this process has started.

    of_comms   records of the communicators, which all ranks make in the same order
    threads    identifiers of a script's threads that have started a collective, or have tried to
    ended      exit status of a rank that will start no more collectives; None before that
    """

    def __init__(self) -> None:
        self.of_comms: list[Record] = []
        self.threads: set[int] = set()
        self.ended: int | None = None


records = CollectiveRecords()  # the records of this process


class NumberedComm(CommWrapper):
    """The transport `inner` with a record of its collectives."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self._record: Record = deque(maxlen=MOST_KEPT)
        records.of_comms.append(self._record)
        self._number = 0  # number of the next collective

    def wrap(self, comm: Comm) -> Comm:
        return type(self)(comm)

    def on_collective(self, kind: str, label: str = "", *arguments: Array | Partition | str) -> None:
        argument = arguments[0] if arguments else ""
        self._record.append(Started(self._number, kind, label, getattr(argument, "size", argument)))
        self._number += 1


class GuardedComm(NumberedComm):
    """NumberedComm for scripts. Raises ThreadError if a second thread starts a collective.

    After the first thread has ended, another thread may start collectives.
    """

    _thread = 0  # identifier of the thread that owns this communicator

    def on_collective(self, kind: str, label: str = "", *arguments: Array | Partition | str) -> None:
        caller = threading.current_thread()
        assert caller.ident is not None
        if caller.ident != self._thread:
            records.threads.add(caller.ident)
            owner = next((thread for thread in threading.enumerate() if thread.ident == self._thread), None)
            if owner is not None:
                raise ThreadError(
                    f"rank {self.rank}: thread {caller.name!r} starts {collective((kind, label))}, but this "
                    f"communicator belongs to thread {owner.name!r}: collectives of two threads have no "
                    "common order on all ranks; use each communicator and its modules in one thread, and "
                    "create another one for a second thread with connect(), on all ranks in the same order"
                )
            self._thread = caller.ident
        super().on_collective(kind, label, *arguments)


class CheckedComm(CommWrapper):
    """The transport `inner`; ranks compare each collective before it starts. Collective.

    If ranks start different collectives, all ranks raise JobError.
    """

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self._control = inner.background()
        self._number = 0  # number of the next collective

    def wrap(self, comm: Comm) -> Comm:
        return CheckedComm(comm)

    def on_collective(self, kind: str, label: str = "", *arguments: Array | Partition | str) -> None:
        text = collective((kind, label)) + (f" ({', '.join(map(spelled, arguments))})" if arguments else "")
        number, self._number = self._number, self._number + 1
        with self.meter.waiting(f"the check before {kind}", label):
            if self._all_equal(text):
                return
            texts = self._control.allgather_object(text)
        odd = odd_one(texts)
        assert odd is not None, "digests differ, but texts do not"
        rank, usual = odd
        majority = "rank 0 starts" if len(texts) == 2 else f"{texts.count(usual)} of {len(texts)} ranks start"
        raise JobError(
            f"the ranks start different collectives: number {number} (from 0) is {texts[rank]} on rank "
            f"{rank}, where {majority} {usual}"
        )

    def _all_equal(self, text: str) -> bool:
        """Return whether all ranks have the same text; advance the transfers of `inner` meanwhile."""
        digest = np.frombuffer(hashlib.sha256(text.encode()).digest()[:DIGEST], np.uint8)
        codes = np.empty(DIGEST * self._control.size, np.uint8)
        handle = self._control.allgather(digest, codes, Partition(codes.size, self._control.size), "digests")

        def arrived() -> bool:
            self._inner.progress()
            return handle.test()

        wait_until(arrived, crowded=True)
        handle.wait()
        return bool((codes.reshape(-1, DIGEST) == codes[:DIGEST]).all())

    def close(self) -> None:
        self.on_collective("close")
        self._control.close()
        self._inner.close()


def spelled(argument: Array | Partition | str) -> str:
    """Return the properties of an argument that must be equal on all ranks, such as an array's size."""
    if isinstance(argument, str):
        return argument
    if isinstance(argument, Partition):
        return f"{argument.length} divided among {argument.parts} at multiples of {argument.quantum}"
    return f"{argument.size} {argument.dtype.name}"
