"""Other programs that compute on the cores to which our ranks are bound.

Open MPI binds ranks to cores from the first one on. Two jobs that are started on one machine by two launchers
are then bound to the same cores and share them, while others idle.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from zero_mpi.cli.text import few, ranges
from zero_mpi.doctor.ranks import Ranks
from zero_mpi.doctor.verdicts import NOTE, Row

PROC = Path("/proc")
LOOKS, PAUSE = 4, 0.02  # a process counts that is seen running in most looks
Neighbour = tuple[int, str, tuple[int, ...]]  # process, name, cores


def look(ours: Collection[int], cores: tuple[int, ...]) -> list[Neighbour]:
    """Processes beside `ours` that keep running on some of `cores` and may not use others."""
    if len(cores) == (os.cpu_count() or 1):
        return []  # we are not bound, so nobody is in the way for long
    seen: Counter[Neighbour] = Counter()
    for _ in range(LOOKS):
        seen.update(found for found in running() if found[0] not in ours and set(found[2]) <= set(cores))
        time.sleep(PAUSE)
    return sorted(neighbour for neighbour, times in seen.items() if times > LOOKS // 2)


def busy_threads() -> int:
    """Threads of the host that run or wait for a core, ours too: the fewest in some looks; 0: unknown."""
    found = list[int]()
    for _ in range(LOOKS):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found.append(int((PROC / "loadavg").read_text().split()[3].partition("/")[0]))
        time.sleep(PAUSE)
    return min(found, default=0)


def running() -> Iterator[Neighbour]:
    """The processes that are on a core or wait for one."""
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            name, _, rest = (folder / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
            if rest.split()[0] == "R":
                process = int(folder.name)
                yield process, name, tuple(sorted(os.sched_getaffinity(process)))


def rows(found: list[list[Neighbour]], names: tuple[str, ...]) -> list[Row]:
    """The row, from what the first rank of each host saw."""
    busy = [
        f"{name} ({process}) on {ranges(cores)} of {host}"
        for host, neighbours in zip(names, found, strict=True)
        for process, name, cores in neighbours
    ]
    remedy = "a second job of Open MPI? start both with --bind-to none, or give each its own --cpu-set"
    value = f"bound to our cores and busy: {', '.join(few(busy))}"
    return [Row("neighbours", value, NOTE, remedy)] if busy else []


def crowd(seen: tuple[int, int], ranks: int, name: str) -> list[Row]:
    """The row of a host where more threads run than it has cores: `seen` are both numbers."""
    threads, cores = seen
    value = f"{threads - ranks} threads of others run on {name}, beside {ranks} of ours on {cores} cores"
    remedy = "what follows is measured beside them: wait for their end, or take another host"
    return [Row("load", value, NOTE, remedy)] if threads > max(cores, ranks) else []


def section(where: Ranks) -> list[Row]:
    """Who is in the way. Collective."""
    seen = where.of_nodes(lambda: (busy_threads(), os.cpu_count() or 1))
    crowds = [r for n, name in enumerate(where.names) for r in crowd(seen[n], len(where.nodes[n]), name)]
    seats = where.gather((os.getpid(), os.sched_getaffinity(0)))
    ours, bound = zip(*(seats[rank] for rank in where.nodes[where.node]), strict=True)
    cores = tuple(sorted(set().union(*bound)))
    return [*crowds, *rows(where.of_nodes(lambda: look(ours, cores)), where.names)]
