"""Checks of the rules of every timeline, and functions that build a timeline by hand."""

import json
from collections import defaultdict

NANOSECOND = 1.1e-3  # in microseconds; times are rounded to a nanosecond


def lasting(events):
    return [event for event in events if event["ph"] == "X"]


def check_events(events):
    """Check the rules of the format, as Perfetto and chrome://tracing read it."""
    tracks = defaultdict(list)
    for event in events:
        assert event.keys() >= {"name", "ph", "pid", "args"}
        assert event["ph"] in ("X", "M")
        assert event["pid"] >= 1, "viewers hide process 0"
        assert ("ts" in event) == (event["ph"] == "X"), "names hold at any time"
        if event["ph"] == "X":
            assert event["ts"] >= 0 <= event["dur"], event
            assert event["args"]["step"] >= 1
            tracks[event["pid"], event["tid"]].append(event)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == tracks.keys(), "each track has a name, and no name is without a track"
    assert len({(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}) == len(named)
    for track in tracks.values():
        check_nesting(track)


def check_nesting(track):
    """Check that two events of a track are nested or disjoint."""
    around = []
    for event in sorted(track, key=lambda event: (event["ts"], -event["dur"])):
        end = event["ts"] + event["dur"]
        while around and around[-1] <= event["ts"] + NANOSECOND:
            around.pop()
        assert not around or end <= around[-1] + NANOSECOND, event
        around.append(end)


def event(rank, family, kind, begun, ended, *, step=1, **fields):
    args = {"kind": kind, "step": step, **fields}
    times = {"ts": begun, "dur": ended - begun}
    return {"name": kind, "cat": family, "ph": "X", "pid": rank + 1, "tid": 1, **times, "args": args}


def save(path, events, **fields):
    head = json.dumps({"otherData": {"zero_mpi": "0", **fields}})[:-1]
    path.write_text(f'{head},\n"traceEvents":[\n' + ",\n".join(map(json.dumps, events)) + "\n]}\n")
    return path
