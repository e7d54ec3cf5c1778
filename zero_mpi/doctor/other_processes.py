"""Other programs that compute on the cores to which our ranks are bound.

Open MPI binds ranks to cores from the first one on. Two jobs that are started on one machine by two launchers
are then bound to the same cores and share them, while others idle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from zero_mpi.doctor.ranks import Ranks
from zero_mpi.doctor.table import NOTE, Row, few, ranges

PROC = Path("/proc")
LOOKS, PAUSE = 4, 0.02  # a process counts that is seen running in most looks
Neighbour = tuple[int, str, tuple[int, ...]]  # process, name, cores


def look(ours: Collection[int], cores: tuple[int, ...], proc: Path = PROC) -> list[Neighbour]:
    """Processes beside `ours` that keep running on some of `cores` and may not use others."""
    if len(cores) == (os.cpu_count() or 1):
        return []  # we are not bound, so nobody is in the way for long
    seen: dict[Neighbour, int] = {}
    for _ in range(LOOKS):
        for neighbour in running(proc):
            if neighbour[0] not in ours and set(neighbour[2]) <= set(cores):
                seen[neighbour] = seen.get(neighbour, 0) + 1
        time.sleep(PAUSE)
    return sorted(neighbour for neighbour, times in seen.items() if times > LOOKS // 2)


def running(proc: Path) -> Iterator[Neighbour]:
    """The processes that are on a core or wait for one."""
    for folder in proc.glob("[0-9]*"):
        try:
            text = (folder / "status").read_text()
        except OSError:
            continue  # it has ended
        about = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
        if about.get("State", "").startswith("R"):
            yield int(folder.name), about.get("Name", ""), numbers(about.get("Cpus_allowed_list", ""))


def numbers(text: str) -> tuple[int, ...]:
    """0, 1, 2, 5 of `0-2,5`."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def rows(found: list[list[Neighbour]], names: tuple[str, ...]) -> list[Row]:
    """The row, from what the first rank of each host saw."""
    busy = [
        f"{name} ({process}) on {ranges(cores)} of {host}"
        for host, neighbours in zip(names, found, strict=True)
        for process, name, cores in neighbours
    ]
    if not busy:
        return []
    return [
        Row(
            "neighbours",
            f"bound to our cores and busy: {', '.join(few(busy))}",
            NOTE,
            "a second job of Open MPI? start both with --bind-to none, or give each its own --cpu-set",
        )
    ]


def section(where: Ranks) -> list[Row]:
    """Who is in the way. Collective."""
    mine = tuple(sorted(os.sched_getaffinity(0)))
    seats = where.gather((os.getpid(), mine))
    here = [seats[rank] for rank in where.nodes[where.node]]
    ours = {process for process, _ in here}
    cores = tuple(sorted({core for _, bound in here for core in bound}))
    found = where.of_nodes(lambda: look(ours, cores))
    return rows(found, where.names)
