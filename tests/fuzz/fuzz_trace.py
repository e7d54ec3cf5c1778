"""Faulty timelines for `trace`: wrong types of events, compression bombs, sparse and special files."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import timelines
import wild

TRACKS = ("steps", "compute", "optimizer", "between stages", "waits", "data")
TRACKS += ("checkpoint", "gathers", "stalls")
COMMAND = ["-m", "zero_mpi", "trace"]


def time_line(random: Random) -> dict[str, Any]:
    events = []
    for rank in range(random.choice([1, 2, 3])):
        events.append({"name": "process_name", "ph": "M", "pid": rank + 1, "args": {"name": f"rank {rank}"}})
        for step in range(1, random.choice([2, 3])):
            start = 100.0 * step
            events.append(timelines.event(rank, "steps", "step", start, start + 100, step=step))
            for _ in range(random.choice([0, 3, 20])):
                time = start + random.uniform(0, 90)
                fields = {"unit": "blk.0", "bytes": random.randrange(1000)}
                family = random.choice(TRACKS[1:])
                events.append(timelines.event(rank, family, "allgather", time, time + 5, step=step, **fields))
    fields = {"zero_mpi": "0.1.0", "ranks": 2, "clock_error_us": 1.5, "ends_in": None}
    return {"displayTimeUnit": "ms", "otherData": fields, "traceEvents": events}


def named(random: Random, folder: Path, raw: bytes) -> list[str]:
    packed = random.random() < 0.3
    path = folder / ("trace.json.gz" if packed else "trace.json")
    path.write_bytes(gzip.compress(raw, 1) if packed else raw)
    return [*COMMAND, path.name]


def as_lines(random: Random, content: Any) -> bytes:
    """Return a timeline with an event on each line, as a run writes it, or other values as JSON."""
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        return wild.as_text(content, random)
    head = wild.as_text({name: value for name, value in content.items() if name != "traceEvents"}, random)
    events = b",\n".join(wild.as_text(event, random) for event in content["traceEvents"])
    return head[:-1] + b',\n"traceEvents":[\n' + events + b"\n]}\n"


def types(random: Random, folder: Path) -> list[str]:
    return named(random, folder, as_lines(random, wild.changed_json(random, time_line(random))))


def broken(random: Random, folder: Path) -> list[str]:
    if random.random() < 0.6:
        return named(random, folder, wild.broken_json(random, time_line(random)))
    raw = json.dumps(time_line(random), indent=random.choice([None, 1])).encode()
    blanks = b" " * random.choice([262_130, 262_144, 500_000, 2_000_000])
    place = random.choice([raw.find(b"["), raw.find(b"{"), raw.rfind(b","), raw.rfind(b"]")])
    return named(random, folder, raw[:place] + blanks + raw[place:])


def bombs(random: Random, folder: Path) -> list[str]:
    raw = as_lines(random, time_line(random))
    head, tail = raw[:-4], b"\n]}\n"
    event = b",\n" + json.dumps(timelines.event(0, "compute", "forward", 100, 101)).encode()
    kinds: list[Callable[[], bytes]] = [
        lambda: b"\0" * (100 << 20),
        lambda: b" " * (100 << 20) + raw,
        lambda: b"[" * (50 << 20),
        lambda: b'{"traceEvents": [' + b"[]," * (20 << 20),
        lambda: head + b",\n1" * (20 << 20) + tail,
        lambda: head + event * random.choice([1000, 20_000, 400_000]) + tail,
        lambda: b'{"a": "' + b"x" * (100 << 20) + b'"}',
        lambda: raw[:-1] + b', "b": 1' * (5 << 20) + b"}",
        lambda: gzip.compress(b"\0" * (100 << 20), 1),
    ]
    path = folder / "trace.json.gz"
    path.write_bytes(gzip.compress(random.choice(kinds)(), random.choice([1, 1, 9])))
    if random.random() < 0.3:
        os.truncate(path, int(path.stat().st_size * random.random()))
    return [*COMMAND, path.name]


def places(random: Random, folder: Path) -> list[str]:
    path = folder / "trace.json"
    kind = random.randrange(4)
    if kind == 0:
        wild.special(random, path)
    elif kind == 1:
        path.write_bytes(as_lines(random, time_line(random)))
        os.truncate(path, 8 << 30)
    elif kind == 2:
        path.write_bytes(gzip.compress(as_lines(random, time_line(random))))
        os.truncate(path, 8 << 30)
    else:
        name = wild.text(random).encode(errors="ignore").decode().replace("\0", "")[:60_000] or "x"
        return [*COMMAND, *random.choice([[name], [name, name], [name] * 3])]
    return [*COMMAND, path.name]


def sound(random: Random, folder: Path) -> list[str]:
    return named(random, folder, as_lines(random, time_line(random)))


CASES = {"sound": sound, "types": types, "broken": broken, "bombs": bombs, "places": places}
