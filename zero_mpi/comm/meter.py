"""What communication costs a rank, and what it waits for: bytes given to others, seconds spent standing.

A wait is `with meter.waiting("allgather", label):`. It leaves behind, in two plain attributes, what is waited
for and since when, so that a thread which watches the process can tell it at any moment, also while the main
thread is inside the MPI library. All meters of the process are known by `meters()`.
"""

from __future__ import annotations

import time
import weakref
from types import TracebackType

from zero_mpi.telemetry import spans

_known: list[weakref.ref[Meter]] = []


class Meter:
    """Counts from the start of a transport; take the difference over a step.

    wait_seconds   in waits for transfers and for other ranks; what is done in a wait to complete a transfer
                   (adding pieces of a reduction) is part of it, what moves while layers compute is not
    sent_bytes     slices of parameters, gradients and vectors given to other ranks, in a message or, where
                   memory is shared, by letting them read (gathers are free there)
    what           the collective of the last wait: its kind, and the label of what travels
    changed        when that wait began, or ended if nothing is waited for now; of `time.perf_counter`
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
        """Whether a thread stands in a wait now."""
        return self._depth > 0

    def beat(self) -> None:
        """Note that this rank gets on without waiting for another one."""
        self.changed = time.perf_counter()

    def waiting(self, kind: str, label: str = "") -> Meter:
        """A context to wait in, which notes the collective (`kind`) and what travels (`label`)."""
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
        """The bytes that were counted since the last call."""
        nbytes, self._accounted = self.sent_bytes - self._accounted, self.sent_bytes
        return nbytes

    def transfer(self, kind: str, label: str) -> spans.OpenTransfer | None:
        """The record of a transfer that begins now and gives what was just counted; None: nobody records."""
        recorder = spans.active
        return None if recorder is None else recorder.transfer(kind, label, self.account())


def meters() -> list[Meter]:
    """The meters of this process that are in use, the oldest first."""
    return [meter for known in _known if (meter := known()) is not None]


def collective(what: tuple[str, str]) -> str:
    """A collective by its kind and label, for people."""
    return " of ".join(part for part in what if part)
