"""Meters of a rank's communication: bytes given to others, seconds spent waiting, and the current wait.

A wait is `with meter.waiting("allgather", label):`. It records in two plain attributes what is waited for
and since when, so that a thread which watches the process can tell it at any moment, also while the main
thread is inside the MPI library. `meters()` lists all meters of the process.
"""

from __future__ import annotations

import time
import weakref
from types import TracebackType

from zero_mpi.telemetry import spans

_known: list[weakref.ref[Meter]] = []


class Meter:
    """Counters since the start of a transport; take the difference over a step.

    wait_seconds   seconds in waits for transfers and other ranks, with the work in a wait that completes one
                   (adding chunks of a reduction), without transfers that move while layers compute
    sent_bytes     slices of parameters, gradients and vectors given to other ranks, in a message or, where
                   memory is shared, by letting them read (gathers are free there)
    what           the collective of the last wait: its kind, and the label of what travels
    changed        `time.perf_counter` when that wait began, or ended if nothing is waited for now
    """

    def __init__(self) -> None:
        self.wait_seconds, self.sent_bytes = 0.0, 0
        self.what: tuple[str, str] = ("", "")
        self.changed = time.perf_counter()
        self._depth = self._accounted = 0
        _known[:] = [known for known in _known if known() is not None]
        _known.append(weakref.ref(self))

    @property
    def waits(self) -> bool:
        """Return whether a thread stands in a wait now."""
        return self._depth > 0

    def beat(self) -> None:
        """Note that this rank gets on without waiting for another one."""
        self.changed = time.perf_counter()

    def waiting(self, kind: str, label: str = "") -> Meter:
        """Return a context to wait in, which notes the collective (`kind`) and what travels (`label`)."""
        if self._depth == 0:  # a wait may lead to another one; the outer one is what the caller wants
            self.what = kind, label
        return self

    def __enter__(self) -> None:
        if self._depth == 0:
            self.changed = time.perf_counter()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            now = time.perf_counter()
            self.wait_seconds += now - self.changed
            recorder = spans.active
            if recorder is not None:
                recorder.waited(*self.what, self.changed, now)
            self.changed = now

    def account(self) -> int:
        """Return the bytes that were counted since the last call."""
        nbytes, self._accounted = self.sent_bytes - self._accounted, self.sent_bytes
        return nbytes

    def transfer(self, kind: str, label: str) -> spans.OpenTransfer | None:
        """Return the record of a transfer that begins now, with the bytes just counted; None: no recorder."""
        recorder = spans.active
        return None if recorder is None else recorder.transfer(kind, label, self.account())


def meters() -> list[Meter]:
    """Return the meters of this process that are in use, the oldest first."""
    return [meter for known in _known if (meter := known()) is not None]


def collective(what: tuple[str, str]) -> str:
    """Return the name of a collective from its kind and label, for messages."""
    return " of ".join(part for part in what if part)
