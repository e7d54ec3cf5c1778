"""Timeline of all ranks in one file: every rank records spans, and rank 0 writes them to the file.

Clocks: all ranks of a host read the same clock. The offsets of other hosts' clocks are measured when
recording starts and when it ends; times between are corrected for a constant drift. Recording
changes no bit and no order of collectives, because the collectives of this module run before the first
recorded step and after the last. Each rank makes its part of the text and sends it in chunks, so rank 0 needs
memory for only one chunk.

The file is in the Trace Event Format of the Chromium project, which Perfetto and chrome://tracing read. A
rank is shown as a process, and a track as one of its threads. All spans are complete events ("X": `ts` and
`dur` in microseconds), so the events of a track must be nested. Transfers overlap, so each kind of transfer
has as many lanes as it needs, and each lane is a track.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from zero_mpi import __version__, device
from zero_mpi.arguments import instance
from zero_mpi.comm import Comm
from zero_mpi.comm.agree import run_on_all
from zero_mpi.comm.clock_sync import clock_offset
from zero_mpi.comm.meter import meters
from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.atomic import partial_of, replacing, write_to_disk
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import check_target, is_file, open_in_place, reason, refusing
from zero_mpi.telemetry import spans
from zero_mpi.telemetry.log import Caution, log_note
from zero_mpi.telemetry.spans import STEPS, TRACKS, SpanRecorder

CHUNK = 4 << 20  # bytes of text in one message
AFTER = 2  # default number of steps before the first recorded step, for warm-up
COUNT = 3  # default number of recorded steps
GATHERS, REDUCTIONS, OTHERS = "gathers", "reductions", "other transfers"
KINDS = {"allgather": GATHERS, "reduce_scatter": REDUCTIONS, "allreduce": REDUCTIONS}
FAMILIES = (GATHERS, REDUCTIONS, OTHERS)
FIRST = 1  # process number of rank 0; viewers hide process 0
LANES = 20  # thread number of the first lane of a family
TRAVELS = ("parameters", "gradients")  # after these words, the label of a transfer names a unit


@contextmanager
def tracing(comm: Comm, path: str | Path) -> Iterator[Timeline]:
    """Record a timeline of the ranks of `comm` in a `with` block and write it to `path`. Collective.

    Use it in custom training loops. Call `step` when a step starts; otherwise all is recorded as one step:

        with tracing(comm, "trace.json.gz") as timeline:
            for step in range(10):
                timeline.step(step + 1)
                ...

    A file named .gz is compressed. Raises UsageError on all ranks if the file cannot be written.
    """
    instance("tracing: comm", comm, Comm, "a communicator, from connect()")
    instance("tracing: path", path, str | PathLike, "the name of a file")
    check_place(comm, Path(path))
    timeline = Timeline(comm, Path(path))
    try:
        yield timeline
        problem = timeline.write()
    finally:
        spans.stop()
    if problem:
        raise UsageError(problem)


class Timeline:
    """A recording on all ranks of `comm`, from its creation until `write`. Collective."""

    def __init__(self, comm: Comm, path: Path) -> None:
        self.comm, self.path = comm, path
        self.nbytes = self.count = 0  # bytes in the file, number of spans in it
        self.ends_in: int | None = None  # the step at which a rank had too many spans, or None
        self._clock = clock_offset(comm)
        for meter in meters():
            meter.account()  # so that transfers before now do not count
        self.recorder = spans.start(device.in_use().stopwatch())

    def step(self, number: int) -> None:
        """Record that step `number` (from 1) starts, and that the step before it ends."""
        self.recorder.begin_step(number)

    def write(self) -> str:
        """Stop recording and write the file. Return the problem if this fails, else "". Collective."""
        self.recorder.end_steps()
        spans.stop()
        comm, (events, clock_error) = self.comm, self._events()
        first = min(event.start for event in events)
        answers = comm.allgather_object((first, clock_error, len(events), self.recorder.ends_in))
        begins, errors, counts, ends = zip(*answers, strict=True)
        self.count, self.ends_in = sum(counts), min((step for step in ends if step is not None), default=None)
        facts = {"zero_mpi": __version__, "ranks": comm.size, "clock_error_us": round(1e6 * max(errors), 3)}
        head = json.dumps({"displayTimeUnit": "ms", "otherData": facts | {"ends_in": self.ends_in}})
        parts = self._parts(as_json(events, comm.rank, platform.node() or "localhost", min(begins)))
        problem = ""
        if comm.rank == 0:
            beginning = f'{head[:-1]},\n"traceEvents":[\n'.encode()
            try:
                self.nbytes = write_parts(self.path, chain([beginning], parts, [b"\n]}\n"]))
            except OSError as error:
                problem = f"the timeline {self.path} cannot be written: {reason(error)}"
        for _ in parts:  # rank 0 receives the remaining parts after an error; other ranks send here
            pass
        return str(comm.broadcast_object(problem))

    def _events(self) -> tuple[list[TraceEvent], float]:
        """Return this rank's events in times of rank 0's clock, and the clocks' error. Collective."""
        now, begin, end = time.perf_counter(), self._clock, clock_offset(self.comm)
        drift = (end.lead - begin.lead) / (end.at - begin.at)

        def correct(seconds: float) -> float:
            return seconds - begin.lead - drift * (seconds - begin.at)

        events = [
            event._replace(start=correct(event.start), end=correct(event.end))
            for event in events_of(self.recorder, now)
        ]
        return events, max(begin.error, end.error)

    def _parts(self, text: str) -> Iterator[bytes]:
        """Yield the text of all ranks in chunks, on rank 0. Asking for the next chunk is collective."""
        for rank, size in enumerate(self.comm.allgather_object(len(text))):
            for start in range(0, size, CHUNK):
                chunk = text[start : start + CHUNK] if self.comm.rank == rank else ""
                yield "".join(self.comm.gather_object(chunk) or ()).encode()
            if rank + 1 < self.comm.size:
                yield b",\n"


def write_parts(path: Path, parts: Iterable[bytes]) -> int:
    """Write a file completely or not at all, compressed if named .gz. Return its size in bytes."""
    with (
        replacing(path) as partial,
        open(partial, "wb", opener=open_in_place) as plain,
        gzip.open(plain, "wb", 5) if path.suffix == ".gz" else nullcontext(plain) as file,
    ):
        file.writelines(parts)
    return path.stat().st_size


def check_place(comm: Comm, path: Path) -> None:
    """Raise UsageError on all ranks if rank 0 cannot write to `path`. Collective.

    Other output may go to a device (`files.atomic.write_output`). But a timeline is written in chunks to a
    temporary file that is then renamed, so the target must be a file.
    """

    def check() -> None:
        if comm.rank == 0:
            check_target("--trace", path, "cannot write there")
            if os.path.exists(path) and not is_file(path):
                raise FileError(f"--trace {shown(path)}: expected the name of a file, found a device or pipe")
            with refusing("--trace", path, "cannot write there"):
                write_to_disk(partial_of(path), b"")
                partial_of(path).unlink()

    run_on_all(comm, check)


class Tracer:
    """Recorder for `--trace`: a timeline of steps [first, stop) of a run. All methods are collective.

    path    file for the timeline; None: nothing is recorded
    steps   (first, stop); None: COUNT steps, after AFTER steps that are not recorded
    step    number of steps that were done before this job

    Raises UsageError on all ranks if the file cannot be written.
    """

    def __init__(self, comm: Comm, path: str | None, steps: tuple[int, int] | None, step: int) -> None:
        self._comm, self._path = comm, None if path is None else Path(path)
        self.first, self.stop = steps or (step + AFTER + 1, step + AFTER + 1 + COUNT)
        self._timeline: Timeline | None = None
        self._recorded_steps = 0, 0  # first and last step of the timeline
        if self._path is not None:
            check_place(comm, self._path)

    def reach(self, step: int) -> None:
        if self._timeline is not None and step >= self.stop:
            self._write()
        if self._path is not None and self._timeline is None and self.first <= step < self.stop:
            self._timeline = Timeline(self._comm, self._path)
        if self._timeline is not None:
            self._timeline.step(step)
            self._recorded_steps = self._recorded_steps[0] or step, step

    def end(self, step: int) -> None:
        """Stop recording after the last step of the job."""
        if self._timeline is not None:
            self._write()
            if step + 1 < self.stop:
                self._say(Caution(f"the run ended before step {self.stop - 1}, the last step to trace"))
        elif self._path is not None and not self._recorded_steps[0]:
            cause = f"--trace-steps {self.first}:{self.stop} has no step of this run"
            self._say(Caution(f"no timeline: the run ended after step {step}, and {cause}"))

    def _write(self) -> None:
        timeline, self._timeline = self._timeline, None
        assert timeline is not None
        problem, (first, last), path = timeline.write(), self._recorded_steps, timeline.path
        if problem:
            self._say(Caution(problem))
            return
        size = f"{timeline.nbytes / 1e6:.2f} MB, {timeline.count:,} spans"
        self._say(f"timeline of steps {first} to {last}: {path} ({size})")
        self._say(f"open it at ui.perfetto.dev, or run zero-mpi trace {path}")
        if timeline.ends_in is not None:
            cause = f"a rank had more than {spans.MAX_SPANS:,} spans"
            self._say(Caution(f"the timeline ends in step {timeline.ends_in}: {cause}"))

    def _say(self, note: str) -> None:
        if self._comm.rank == 0:
            log_note(note)


# ------------------------------------------------------------------------------------------- the events


class TraceEvent(NamedTuple):
    """Event with start and end on a rank, in seconds of one clock. `family`: a track, or one of FAMILIES."""

    family: str
    name: str
    start: float
    end: float
    args: dict[str, Any]


def events_of(recorder: SpanRecorder, now: float) -> Iterator[TraceEvent]:
    """Yield a rank's events until `now`, in times of its clock. Events that have not ended are marked."""
    seconds, open_spans = recorder.watch.seconds, list(recorder.open)  # copied: another thread may change it
    unfinished = ((*begun, None, recorder.step, None) for begun in open_spans)
    for track, name, label, begun, end, step, micro_batch in (*recorder.spans, *unfinished):
        args = event_args(name, "" if track == STEPS else label, step, micro_batch)
        if end is None:
            args["unfinished"] = True
        stop = now if end is None else seconds(end)
        yield TraceEvent(track, f"{name} {label}".rstrip(), seconds(begun), stop, args)
    for kind, label, nbytes, begun, end, step, micro_batch in recorder.transfers:
        args = event_args(kind, label, step, micro_batch) | {"bytes": nbytes}
        if end is None or end > now:
            args["unfinished"], end = True, now
        yield TraceEvent(KINDS.get(kind, OTHERS), f"{kind} {label}".rstrip(), begun, end, args)


def event_args(kind: str, label: str, step: int, micro_batch: int | None) -> dict[str, Any]:
    """Return the kind of an event, the unit or scope that its label names, its step and micro-batch."""
    first, _, rest = label.partition(" ")
    unit = {"what": first, "unit": rest} if first in TRAVELS and rest else {"unit": label} if label else {}
    args = {"kind": kind, **unit, "step": step}
    return args if micro_batch is None else args | {"micro_batch": micro_batch}


def lanes(events: Iterable[TraceEvent]) -> Iterator[tuple[int, TraceEvent]]:
    """Yield (lane, event) in order of starts. An event gets the first lane that is free when it starts."""
    free_from: list[float] = []
    for event in sorted(events, key=lambda event: event.start):
        lane = next((i for i, end in enumerate(free_from) if end <= event.start), len(free_from))
        free_from[lane : lane + 1] = [event.end]
        yield lane, event


def as_json(events: Sequence[TraceEvent], rank: int, place: str, origin: float) -> str:
    """Return a rank's events, and names for its tracks, as JSON objects separated by commas.

    Times are in microseconds and rounded to nanoseconds.
    """
    rows = [
        (1 + TRACKS.index(event.family), event.family, event) for event in events if event.family in TRACKS
    ]
    for number, family in enumerate(FAMILIES, 1):
        for lane, event in lanes(event for event in events if event.family == family):
            rows.append((LANES * number + lane, f"{family} {lane + 1}", event))
    names, lines, process = dict[int, str](), list[dict[str, Any]](), {"ph": "M", "pid": FIRST + rank}
    for thread, track, event in rows:
        names[thread] = track
        begin = round(1e6 * (event.start - origin), 3)
        end = round(1e6 * (max(event.start, event.end) - origin), 3)
        entry = {"name": event.name, "cat": event.family, "ph": "X", "pid": FIRST + rank, "tid": thread}
        lines.append({**entry, "ts": begin, "dur": round(end - begin, 3), "args": event.args})
    # Of two events that start at the same time, the longer one encloses the other.
    lines.sort(key=lambda line: (line["tid"], line["ts"], -line["dur"]))
    head = [{"name": "process_name", **process, "args": {"name": f"rank {rank} on {place}"}}]
    head.append({"name": "process_sort_index", **process, "args": {"sort_index": rank}})
    for thread, name in sorted(names.items()):
        head.append({"name": "thread_name", **process, "tid": thread, "args": {"name": name}})
        head.append({"name": "thread_sort_index", **process, "tid": thread, "args": {"sort_index": thread}})
    return ",\n".join(json.dumps(line, separators=(",", ":")) for line in (*head, *lines))
