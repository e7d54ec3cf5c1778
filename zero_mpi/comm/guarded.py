"""Transports that are notified of each collective before another one starts it.

`NumberedComm` keeps a record of what was started. From it, ranks that have waited for a while find out that
they wait for different things or for a rank that has ended (`launch.watchdog`). `GuardedComm`, a
script's, also belongs to one thread: collectives of two threads have no order, so ranks would pair those of
one with those of the other. `CheckedComm` (`--check-collectives`) compares what the ranks are about to
start: digests of it are gathered over communicators of their own, and if one differs all ranks learn which
rank starts what. The collectives themselves, and so their bits, are those of the transport below.
"""

from __future__ import annotations

import hashlib
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from zero_mpi.comm.agree import odd_one
from zero_mpi.comm.base import Comm, Handle
from zero_mpi.comm.meter import collective
from zero_mpi.comm.partition import Partition, Piece
from zero_mpi.comm.spin_wait import wait_until
from zero_mpi.comm.wrapper import CommWrapper
from zero_mpi.device.types import Array
from zero_mpi.errors import JobError, UsageError

MOST_KEPT = 128  # collectives of a communicator that are remembered
DIGEST = 16  # bytes


def _heard(name: str, about: Callable[..., tuple[str, ...]] = lambda *given: ()) -> Any:
    """Make a method that reports a collective, then hands it on; `about`: what arguments must have alike."""

    def method(self: NotifyingWrapper, *given: Any, **named: Any) -> Any:
        self.on_collective(name, "", *about(*given, **named))
        return getattr(self._inner, name)(*given, **named)

    return method


class NotifyingWrapper(CommWrapper):
    """Wrapper that hands every call on to `inner`; `on_collective` sees those that are collective first."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.sums_in_place, self.replicates_by_node = inner.sums_in_place, inner.replicates_by_node
        self._owners: tuple[Comm, Comm] | None = None  # the inner transport's, and their wrapper

    @abstractmethod
    def on_collective(self, kind: str, label: str = "", *about: Array | Partition | str) -> None:
        """Note that a collective is about to start; ranks must have `about` alike. Arrays come as they are:
        their size and type must be alike, and most implementations need not spell them out."""

    @abstractmethod
    def beside(self, other: Comm) -> Comm:
        """Wrap another transport of these ranks, or of some of them, in the same way. Collective."""

    # -------------------------------------------------------------------------------------- on arrays

    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        self.on_collective(
            "allgather", label, full, partition, "its slices in place" if shard is None else "from slices"
        )
        return self._inner.allgather(shard, full, partition, label)

    def reduce_scatter(
        self,
        full: Array,
        out: Array,
        partition: Partition,
        *,
        contributors: int | None = None,
        accumulate: bool = False,
        label: str = "",
    ) -> Handle:
        given = f"{self.size if contributors is None else contributors} contributors"
        how = "added to what is there" if accumulate else "from zero"
        self.on_collective("reduce_scatter", label, full, partition, given, how)
        return self._inner.reduce_scatter(
            full, out, partition, contributors=contributors, accumulate=accumulate, label=label
        )

    def allreduce(self, array: Array, label: str = "") -> Handle:
        self.on_collective("allreduce", label, array)
        return self._inner.allreduce(array, label)

    def broadcast(self, array: Array, root: int = 0, label: str = "") -> Handle:
        self.on_collective("broadcast", label, array, f"root {root}")
        return self._inner.broadcast(array, root, label)

    def gather(
        self, part: Array | None, room: Array | None, piece: Piece, root: int = 0, label: str = ""
    ) -> None:
        self.on_collective("gather", label, f"elements {piece.start} to {piece.stop}", f"root {root}")
        self._inner.gather(part, room, piece, root, label)

    # ------------------------------------------------------------------------------------ on anything

    sum_vector = _heard("sum_vector", lambda values: (f"shape {np.shape(values)}",))  # sent as float64
    gather_object = _heard("gather_object", lambda value, root=0: (f"root {root}",))
    broadcast_object = _heard("broadcast_object", lambda value, root=0: (f"root {root}",))
    allgather_object, barrier, barrier_readers, clock_offset, nodes, close = map(
        _heard, ("allgather_object", "barrier", "barrier_readers", "clock_offset", "nodes", "close")
    )
    memory = _heard(
        "memory",
        lambda wholes, buffers, gathers=(): (
            f"wholes {[whole.length for whole in wholes]}",
            f"buffers {list(buffers)}",
            f"gathers {list(gathers)}",
        ),
    )

    def background(self) -> Comm:
        self.on_collective("background")
        return self.beside(self._inner.background())

    def split(self, group: int) -> Comm:
        self.on_collective("split")
        return self.beside(self._inner.split(group))

    def shard_group(self) -> Comm:
        self.on_collective("shard_group")
        owners = self._inner.shard_group()
        if owners is self._inner:
            return self
        if self._owners is None or self._owners[0] is not owners:
            self._owners = owners, self.beside(owners)
        return self._owners[1]

    def signal_written(self) -> None:
        self._inner.signal_written()

    def wait_written(self) -> None:
        self._inner.wait_written()


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
    threads    the threads that have started a collective of a script, or tried to
    ended      the exit status of a rank that will start nothing more; None before
    """

    def __init__(self) -> None:
        self.of_comms: list[Record] = []
        self.threads: set[int] = set()
        self.ended: int | None = None


records = CollectiveRecords()  # the records of this process


class NumberedComm(NotifyingWrapper):
    """The transport `inner`, with a record of its collectives."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self._record: Record = deque(maxlen=MOST_KEPT)
        records.of_comms.append(self._record)
        self._number = 0  # number of the next collective

    def beside(self, other: Comm) -> Comm:
        return type(self)(other)

    def on_collective(self, kind: str, label: str = "", *about: Array | Partition | str) -> None:
        what = about[0] if about else ""
        self._record.append(Started(self._number, kind, label, getattr(what, "size", what)))
        self._number += 1


class GuardedComm(NumberedComm):
    """NumberedComm for a script. Raises ThreadError if another thread than the first starts a collective.

    After a thread has ended, the next one may take over.
    """

    _thread = 0  # identifier of the thread that starts collectives

    def on_collective(self, kind: str, label: str = "", *about: Array | Partition | str) -> None:
        """Record a collective; raise ThreadError if this thread may not start it."""
        if threading.get_ident() != self._thread:
            self._take_over(collective((kind, label)))
        super().on_collective(kind, label, *about)

    def _take_over(self, what: str) -> None:
        """Give the collectives to this thread from now on, if no other running thread has them."""
        me = threading.current_thread()
        assert me.ident is not None
        records.threads.add(me.ident)
        owner = next((thread for thread in threading.enumerate() if thread.ident == self._thread), None)
        if owner is not None:
            raise ThreadError(
                f"rank {self.rank}: thread {me.name!r} starts {what}, but this communicator belongs to "
                f"thread {owner.name!r}: collectives of two threads have no common order on all ranks; use "
                "each communicator and its modules in one thread, and create another one for a second "
                "thread with connect(), on all ranks in the same order"
            )
        self._thread = me.ident


class CheckedComm(NotifyingWrapper):
    """The transport `inner`, whose collectives are compared first. Collective.

    Every collective raises JobError on all ranks where they start different ones.
    """

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self._control = inner.background()
        self._number = 0  # number of the next collective

    def beside(self, other: Comm) -> Comm:
        return CheckedComm(other)

    def on_collective(self, kind: str, label: str = "", *about: Array | Partition | str) -> None:
        """Raise JobError on all ranks unless all of them start this collective."""
        details = ", ".join(map(spelled, about))
        mine = f"{collective((kind, label))} ({details})" if about else collective((kind, label))
        number, self._number = self._number, self._number + 1
        with self.meter.waiting(f"the check before {kind}", label):
            if self._all_equal(mine):
                return
            texts = self._control.allgather_object(mine)
        odd = odd_one(texts)
        assert odd is not None, "digests differ and texts do not"
        rank, usual = odd
        others = "rank 0 starts" if len(texts) == 2 else f"{texts.count(usual)} of {len(texts)} ranks start"
        raise JobError(
            f"the ranks start different collectives: number {number} (from 0) is {texts[rank]} on rank "
            f"{rank}, where {others} {usual}"
        )

    def _all_equal(self, mine: str) -> bool:
        """Return whether all ranks describe the same; push the transfers of `inner` meanwhile."""
        digest = np.frombuffer(hashlib.sha256(mine.encode()).digest()[:DIGEST], np.uint8)
        found = np.empty(DIGEST * self._control.size, np.uint8)
        handle = self._control.allgather(digest, found, Partition(found.size, self._control.size), "digests")

        def arrived() -> bool:
            self._inner.progress()
            return handle.test()

        wait_until(arrived, crowded=True)
        handle.wait()
        return bool((found.reshape(-1, DIGEST) == found[:DIGEST]).all())

    def close(self) -> None:
        self.on_collective("close")
        self._control.close()
        self._inner.close()


def spelled(about: Array | Partition | str) -> str:
    """Return the facts that all ranks must share, in words: an array's size and type, a buffer's cuts."""
    if isinstance(about, str):
        return about
    if isinstance(about, Partition):
        return f"{about.length} cut for {about.parts} at multiples of {about.quantum}"
    return f"{about.size} {about.dtype.name}"
