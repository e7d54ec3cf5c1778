"""A rank's spans as events of the Trace Event Format, which Perfetto and chrome://tracing read.

A rank is a process and a track one of its threads. Everything is a complete event ("X": `ts` and `dur` in
microseconds), so the events of a track must nest. Transfers overlap each other; they are dealt out to as many
lanes of a kind as are needed, each of which is a track.
(Trace Event Format, the document of the Chromium project; Perfetto takes the same JSON.)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from zero_mpi.telemetry.spans import STEPS, TRACKS, SpanRecorder

GATHERS, REDUCTIONS, OTHERS = "gathers", "reductions", "other transfers"
KINDS = {"allgather": GATHERS, "reduce_scatter": REDUCTIONS, "allreduce": REDUCTIONS}
FAMILIES = (GATHERS, REDUCTIONS, OTHERS)
FIRST = 1  # the process number of rank 0: viewers take 0 for the idle process of Linux and hide it
LANES = 20  # thread numbers from which on the lanes of a family are
TRAVELS = ("parameters", "gradients")  # the first word of a label whose rest is a unit


class TraceEvent(NamedTuple):
    """Something that took time on a rank, in seconds of one clock. `family`: a track, or one of FAMILIES."""

    family: str
    name: str
    begun: float
    ended: float
    about: dict[str, Any]


def events_of(recorder: SpanRecorder, ended: float) -> Iterator[TraceEvent]:
    """What a rank has recorded, until `ended`, by its own clock; what was still under way says so."""
    seconds, still_open = recorder.watch.seconds, list(recorder.open)  # another thread may be saving
    unfinished = ((*begun, None, recorder.step, None) for begun in still_open)
    for track, name, label, begun, end, step, micro_batch in (*recorder.spans, *unfinished):
        about = {"kind": name, **({} if track == STEPS else about_label(label)), **place(step, micro_batch)}
        if end is None:
            about["unfinished"] = True
        until = ended if end is None else seconds(end)
        yield TraceEvent(track, f"{name} {label}".rstrip(), seconds(begun), until, about)
    for kind, label, nbytes, begun, end, step, micro_batch in recorder.transfers:
        about = {"kind": kind, **about_label(label), "bytes": nbytes, **place(step, micro_batch)}
        if end is None or end > ended:
            about["unfinished"], end = True, ended
        yield TraceEvent(KINDS.get(kind, OTHERS), f"{kind} {label}".rstrip(), begun, end, about)


def place(step: int, micro_batch: int | None) -> dict[str, Any]:
    """Where in the training."""
    return {"step": step} if micro_batch is None else {"step": step, "micro_batch": micro_batch}


def about_label(label: str) -> dict[str, str]:
    """What travels and of which unit, of a transfer's label; of a stage's its scope."""
    first, _, rest = label.partition(" ")
    if first in TRAVELS and rest:
        return {"what": first, "unit": rest}
    return {"unit": label} if label else {}


def lanes(events: Iterable[TraceEvent]) -> Iterator[tuple[int, TraceEvent]]:
    """(lane, event): each in the first lane that is free when it begins; in order of beginnings."""
    free_from: list[float] = []
    for event in sorted(events, key=lambda event: event.begun):
        lane = next((i for i, end in enumerate(free_from) if end <= event.begun), len(free_from))
        free_from[lane : lane + 1] = [event.ended]
        yield lane, event


def threads(events: Sequence[TraceEvent]) -> Iterator[tuple[int, str, TraceEvent]]:
    """(thread number, name of the track, event)."""
    for number, track in enumerate(TRACKS, 1):
        yield from ((number, track, event) for event in events if event.family == track)
    for number, family in enumerate(FAMILIES, 1):
        for lane, event in lanes(event for event in events if event.family == family):
            yield LANES * number + lane, f"{family} {lane + 1}", event


def micro(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)


def as_json(events: Sequence[TraceEvent], rank: int, place: str, origin: float) -> str:
    """A rank's events, and the names of its tracks, as JSON objects with commas between them."""
    names, lines = dict[int, str](), list[dict[str, Any]]()
    for thread, track, event in threads(events):
        names[thread] = track
        begun, ended = micro(event.begun - origin), micro(max(event.begun, event.ended) - origin)
        about = {"name": event.name, "cat": event.family, "ph": "X", "pid": FIRST + rank, "tid": thread}
        lines.append({**about, "ts": begun, "dur": round(ended - begun, 3), "args": event.about})
    # Of two that begin at once the longer one is around the other.
    lines.sort(key=lambda line: (line["tid"], line["ts"], -line["dur"]))
    return ",\n".join(
        json.dumps(line, separators=(",", ":")) for line in (*metadata(rank, place, names), *lines)
    )


def metadata(rank: int, place: str, names: dict[int, str]) -> Iterator[dict[str, Any]]:
    """What a viewer calls a rank and its tracks, and in which order it shows them."""
    process = {"ph": "M", "pid": FIRST + rank}
    yield {"name": "process_name", **process, "args": {"name": f"rank {rank} on {place}"}}
    yield {"name": "process_sort_index", **process, "args": {"sort_index": rank}}
    for thread, name in sorted(names.items()):
        yield {"name": "thread_name", **process, "tid": thread, "args": {"name": name}}
        yield {"name": "thread_sort_index", **process, "tid": thread, "args": {"sort_index": thread}}
