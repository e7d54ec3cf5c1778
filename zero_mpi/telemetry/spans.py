"""Spans: named intervals of a rank's work, recorded for a timeline.

`active` is the recorder; it is None if nothing is recorded, and instrumented code checks only that. A span is
a tuple in a list that only grows; the timeline is computed from it after the last step. Computing is
stamped by the clock of the device (`device.stopwatch`), since the host only launches work on a GPU; waits and
transfers are stamped by the host's clock. `train.timeline` starts recorders on all ranks.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAX_SPANS = 100_000  # limit on the spans and transfers of a rank: about 20 MB in memory, 110 MB while written

# The tracks of a rank. A span's label is the scope of a stage, a unit, or a folder.
STEPS = "steps"  # steps, and inside them micro-batches and evaluations
COMPUTE = "compute"  # forward and backward of a stage, the loss
OPTIMIZER = "optimizer"  # computing the norm and the update
BETWEEN = "between stages"  # work of the main thread on transfers: start, advance, sum and release them
WAITS = "waits"  # waits for transfers and for other ranks
STALLS = "stalls"  # waits of a GPU for a transfer of its memory
DATA = "data"  # reading micro-batches
CHECKPOINT = "checkpoint"
BACKGROUND = "checkpoint behind training"  # work of the saving thread
BACKGROUND_WAITS = "waits behind training"
TRACKS = (STEPS, COMPUTE, OPTIMIZER, BETWEEN, WAITS, STALLS, DATA, CHECKPOINT, BACKGROUND, BACKGROUND_WAITS)
OF_DEVICE = (STEPS, COMPUTE, OPTIMIZER, BETWEEN, STALLS)  # tracks stamped by the device's clock

Span = tuple[str, str, str, Any, Any, int, int | None]  # track, name, label, stamps, step, micro-batch
Open = list[Any]  # track, name, label, stamp of the beginning
OpenTransfer = list[Any]  # kind, label, bytes, start, end (None: not yet), step, micro-batch
ENDED = 4  # index of the end in a transfer


class SpanRecorder:
    """Recorder of the spans and transfers of this rank.

    watch               clock of the device; a stamp is the time when all work queued so far is done
    step, micro_batch   current numbers, stored in each new span
    ends_in             the step in which recording ended because there were too many spans, or None
    open                unfinished spans of `during`
    """

    def __init__(self, watch: Any) -> None:
        self.watch, self.spans, self.transfers = watch, list[Span](), list[OpenTransfer]()
        self.step, self._in_step = 1, False
        self.micro_batch: int | None = None
        self.ends_in: int | None = None
        self.open: list[Open] = []
        self._main = threading.get_ident()
        self._stamp = watch.stamp
        self._lap = self._step_begin = self._stamp()

    # ------------------------------------------------------------------------------ on the main thread

    def restart(self) -> None:
        self._lap = self._stamp()

    def lap(self, track: str, name: str, label: str = "") -> None:
        now = self._stamp()
        self.spans.append((track, name, label, self._lap, now, self.step, self.micro_batch))
        self._lap = now

    def begin_step(self, number: int) -> None:
        """Record that a step begins, and that the previous step ends."""
        now = self._stamp()
        if self._in_step:
            self.end_steps(now)
        self.step, self._step_begin, self._in_step = number, now, True

    def end_steps(self, now: Any = None) -> None:
        """Record that the last step ends; if no step was begun, the full recording is one step."""
        if self.ends_in is None:  # otherwise the step is incomplete
            ended = self._stamp() if now is None else now
            self.spans.append((STEPS, "step", str(self.step), self._step_begin, ended, self.step, None))
            self._stay_bounded()

    def begin_micro_batch(self, number: int | None) -> None:
        self.micro_batch = number
        self._stay_bounded()

    def _stay_bounded(self) -> None:
        """Stop recording at MAX_SPANS to limit memory; one micro-batch may exceed the limit."""
        if len(self.spans) + len(self.transfers) > MAX_SPANS and self.ends_in is None:
            self.ends_in = self.step
            stop()

    # ---------------------------------------------------------------------------------- on any thread

    def begin(self, track: str, name: str, label: str = "") -> Open:
        span = [track, name, label, self._stamp_of(track)]
        self.open.append(span)
        return span

    def end(self, begun: Open) -> None:
        now = self._stamp_of(begun[0])
        self.open.remove(begun)
        self.spans.append((*begun, now, self.step, self.micro_batch))

    def waited(self, kind: str, label: str, begun: float, ended: float) -> None:
        track = WAITS if threading.get_ident() == self._main else BACKGROUND_WAITS
        self.spans.append((track, kind, label, begun, ended, self.step, self.micro_batch))

    def transfer(self, kind: str, label: str, nbytes: int) -> OpenTransfer:
        """Record and return a transfer that begins; `end` records its completion, once per part."""
        transfer = [kind, label, nbytes, time.perf_counter(), None, self.step, self.micro_batch]
        self.transfers.append(transfer)
        return transfer

    def _stamp_of(self, track: str) -> Any:
        return self._stamp() if track in OF_DEVICE else time.perf_counter()


active: SpanRecorder | None = None


def start(watch: Any) -> SpanRecorder:
    global active
    active = SpanRecorder(watch)
    return active


def stop() -> None:
    global active
    active = None


def end(transfer: OpenTransfer | None) -> None:
    if transfer is not None:
        transfer[ENDED] = time.perf_counter()


@contextmanager
def during(track: str, name: str, label: str = "") -> Iterator[None]:
    """Return a context that is recorded as a span."""
    recorder = active
    begun = recorder.begin(track, name, label) if recorder is not None else []
    try:
        yield
    finally:
        if recorder is not None:
            recorder.end(begun)


@contextmanager
def computing(name: str, label: str) -> Iterator[None]:
    """Return a context that records a stage's computing; the time before it is recorded as BETWEEN."""
    recorder = active
    if recorder is not None:
        recorder.lap(BETWEEN, "before", label)
    try:
        yield
    finally:
        if recorder is not None:
            recorder.lap(COMPUTE, name, label)


def restart() -> None:
    """Begin now the interval that the next `lap` records, if a recorder is active."""
    if active is not None:
        active.restart()


def lap(track: str, name: str, label: str = "") -> None:
    """Record the interval since the last `lap` or `restart` as a span, if a recorder is active."""
    if active is not None:
        active.lap(track, name, label)
