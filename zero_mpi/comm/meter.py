"""Meters of a rank's communication: bytes sent to other ranks, seconds spent waiting, and the current wait.

A wait is written `with meter.waiting("allgather", label):`. A wait records the collective and the start time
in two attributes. So a thread that watches the process can read them at any time, even while the main
thread is inside the MPI library. `meters()` lists all meters of the process.
"""

from __future__ import annotations

import time
import weakref
from types import TracebackType

from zero_mpi.telemetry import spans

_references: list[weakref.ref[Meter]] = []


class Meter:
    """Counters since the start of a transport. A step's cost is the difference of two readings.

    wait_seconds   seconds in waits for transfers and other ranks, including work that completes a transfer
                   (adding chunks of a reduction), but not transfers that proceed while layers compute
    sent_bytes     bytes of parameters, gradients and vectors that other ranks receive as messages or read in
                   shared memory; gathers in shared memory count as 0 bytes
    call           collective of the last wait: its kind, and the label of the data
    changed        `time.perf_counter` at the start of that wait, or at its end if it has ended
    """

    def __init__(self) -> None:
        self.wait_seconds, self.sent_bytes = 0.0, 0
        self.call: tuple[str, str] = ("", "")
        self.changed = time.perf_counter()
        self._depth = self._reported = 0
        _references[:] = [ref for ref in _references if ref() is not None]
        _references.append(weakref.ref(self))

    @property
    def waits(self) -> bool:
        return self._depth > 0

    def beat(self) -> None:
        """Record that this rank makes progress without waiting for another rank."""
        self.changed = time.perf_counter()

    def waiting(self, kind: str, label: str = "") -> Meter:
        """Return a context for a wait, which records the collective's `kind` and the `label` of its data."""
        if self._depth == 0:  # waits may be nested; the outermost counts
            self.call = kind, label
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
                recorder.waited(*self.call, self.changed, now)
            self.changed = now

    def account(self) -> int:
        """Return the bytes that this rank has sent since the last call."""
        nbytes, self._reported = self.sent_bytes - self._reported, self.sent_bytes
        return nbytes

    def transfer(self, kind: str, label: str) -> spans.OpenTransfer | None:
        """Return the timeline's record of a transfer that begins now; None if there is no recorder."""
        recorder = spans.active
        return None if recorder is None else recorder.transfer(kind, label, self.account())


def meters() -> list[Meter]:
    """Return the meters in use in this process, oldest first."""
    return [meter for ref in _references if (meter := ref()) is not None]


def collective(parts: tuple[str, str]) -> str:
    """Return the name of a collective from its kind and label, for messages."""
    return " of ".join(part for part in parts if part)
