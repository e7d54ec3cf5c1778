"""Compares each collective with what the other ranks start, before it starts (`--check-collectives`).

All ranks must start the same collectives in the same order. One that does not leaves the others waiting, or
mixes bytes of one buffer with those of another. Here each rank first describes what it is about to start; the
digests of these texts are brought together over communicators of their own, and if one differs all ranks
learn which rank starts what. The collectives themselves, and so their bits, are those of the transport below.
"""

from __future__ import annotations

import hashlib

import numpy as np

from zero_mpi.comm.agree import odd_one
from zero_mpi.comm.base import Comm
from zero_mpi.comm.meter import collective
from zero_mpi.comm.notifying import NotifyingWrapper
from zero_mpi.comm.partition import Partition
from zero_mpi.comm.spin_wait import wait_until
from zero_mpi.device.types import Array
from zero_mpi.errors import JobError

DIGEST = 16  # bytes


class CheckedComm(NotifyingWrapper):
    """The transport `inner`, whose collectives are compared first. Collective.

    Every collective raises JobError on all ranks where they start different ones.
    """

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self._control = inner.background()
        self._number = 0  # of the next collective

    def beside(self, other: Comm) -> Comm:
        return CheckedComm(other)

    def on_collective(self, kind: str, label: str = "", *about: Array | Partition | str) -> None:
        """Raise JobError on all ranks unless all of them start this."""
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
        """Whether all ranks describe the same; what is under way below is pushed on meanwhile."""
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
    """The facts that all ranks must share, in words: how many of what an array has, how a buffer is cut."""
    if isinstance(about, str):
        return about
    if isinstance(about, Partition):
        return f"{about.length} cut for {about.parts} at multiples of {about.quantum}"
    return f"{about.size} {about.dtype.name}"
