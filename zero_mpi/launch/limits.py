"""What the system lets a process have: memory, processor time, files, locked memory.

Containers and batch systems set limits by control groups, which do not show in the numbers that programs ask
for: a process that passes the memory limit is killed, one that passes its share of processor time is stopped
for the rest of each tenth of a second.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GROUPS, OWN, MEMINFO = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/meminfo")
INFINIBAND = Path("/sys/class/infiniband")
NO_LIMIT = 1 << 60  # the older interface writes a number near 2^63 for none


@dataclass(frozen=True)
class Limits:
    """Limits of a process and its host, in bytes, cores and files; None for no limit."""

    available: int  # memory that can be had without swapping, as the system says
    group_memory: int | None  # limit of the control group
    group_room: int | None  # what is left of it
    group_cores: float | None
    address_space: int | None
    data: int | None  # private memory that can be written to
    locked: int | None  # only where a network asks for locked memory
    files: int | None
    cores: int

    @property
    def memory(self) -> int:
        """Bytes that can be had on this host."""
        return self.available if self.group_room is None else min(self.available, self.group_room)


def look() -> Limits:
    """The limits of this process."""
    memory, room, cores = group_limits()
    return Limits(
        available=available_memory(),
        group_memory=memory,
        group_room=room,
        group_cores=cores,
        address_space=soft(resource.RLIMIT_AS),
        data=soft(resource.RLIMIT_DATA),
        locked=soft(resource.RLIMIT_MEMLOCK) if INFINIBAND.is_dir() and any(INFINIBAND.iterdir()) else None,
        files=soft(resource.RLIMIT_NOFILE),
        cores=len(os.sched_getaffinity(0)),
    )


def soft(which: int) -> int | None:
    """The limit in force, or None."""
    limit = resource.getrlimit(which)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def available_memory(meminfo: Path = MEMINFO) -> int:
    """MemAvailable of /proc/meminfo in bytes."""
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def group_limits(groups: Path = GROUPS, own: Path = OWN) -> tuple[int | None, int | None, float | None]:
    """(memory limit, what is left of it, cores) of our control groups and those above them: the tightest."""
    memory: list[tuple[int, int]] = []  # (left, limit)
    cores: list[float] = []
    for folder in folders(groups, own):
        limit = first_number(folder, "memory.max", "memory.limit_in_bytes")
        if limit is not None and limit < NO_LIMIT:
            memory.append((max(0, limit - used(folder)), limit))
        quota = processor_time(folder)
        if quota is not None:
            cores.append(quota)
    room, limit = min(memory, default=(None, None))
    return limit, room, min(cores, default=None)


def folders(groups: Path, own: Path) -> Iterator[Path]:
    """The folders of our control groups, from the innermost to the root of each hierarchy.

    In a container its own group may be the root of what is mounted, and the path in `own` that of the host.
    """
    try:
        text = own.read_text()
    except OSError:
        return
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        roots = [groups / controllers] if controllers else [groups, groups / "unified"]
        for root in roots:
            inside = root / path.strip("/")
            for folder in (inside, *inside.parents):
                if folder.is_dir():
                    yield folder
                if folder == root:
                    break


def first_number(folder: Path, *names: str) -> int | None:
    """The number in the first of the files that there is; None if it says that there is no limit."""
    for name in names:
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def used(folder: Path) -> int:
    """Bytes of a group that cannot be taken back from caches of files."""
    total = first_number(folder, "memory.current", "memory.usage_in_bytes") or 0
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return total
    return max(0, total - int(stat.get("total_inactive_file", stat.get("inactive_file", 0))))


def processor_time(folder: Path) -> float | None:
    """How many cores' time a group may use."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        numbers = [first_number(folder, f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        return numbers[0] / numbers[1] if numbers[0] and numbers[1] else None
    return int(quota) / int(period) if quota.isdigit() else None
