"""Limits of a process and its host: memory, CPU time, files.

Containers and batch systems set limits with control groups, which the usual system calls do not report. A
process that exceeds the memory limit is killed; a process that exceeds its CPU quota is stopped for the rest
of each period, usually a tenth of a second.
"""

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
INFINIBAND = Path("/sys/class/infiniband")
NO_LIMIT = 1 << 60  # the older interface shows "no limit" as a number near 2^63

_import_time = time.monotonic()


class Limits(NamedTuple):
    """Limits of a process and its host, in bytes or files; None: no limit."""

    available: int  # memory available without swapping, by the system's estimate
    group_memory: int | None  # limit of the control group
    group_free: int | None  # unused part of the limit of the control group
    address_space: int | None
    data: int | None  # limit of private writable memory
    locked: int | None  # limit of locked memory, which some networks need
    files: int | None

    @property
    def memory(self) -> int:
        return self.available if self.group_free is None else min(self.available, self.group_free)


def read_limits() -> Limits:
    """Return the limits of this process."""
    names = ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_MEMLOCK", "RLIMIT_NOFILE")
    limits = [resource.getrlimit(getattr(resource, name))[0] for name in names]
    space, data, locked, files = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if not (INFINIBAND.is_dir() and any(INFINIBAND.iterdir())):
        locked = None
    return Limits(available_memory(), *group_limits()[:2], space, data, locked, files)


def available_memory() -> int:
    """Return MemAvailable of /proc/meminfo in bytes; without it, all physical memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return next(sizes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def process_age(process: int | str = "self") -> float:
    """Return the seconds since the start of a process; for this process that includes imports."""
    try:
        ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # /proc or the clock is missing
        return time.monotonic() - _import_time


def group_limits(groups: Path = GROUPS, file: Path = OWN) -> tuple[int | None, int | None, float | None]:
    """Return our control groups' tightest limits: memory limit and free memory (bytes), CPU quota (cores)."""
    memory: list[tuple[int, int]] = []  # (bytes left, limit)
    cores: list[float] = []
    for folder in folders(groups, file):
        limit = first_number(folder, "memory.max", "memory.limit_in_bytes")
        if limit is not None and limit < NO_LIMIT:
            memory.append((max(0, limit - used_bytes(folder)), limit))
        quota = processor_time(folder)
        if quota is not None:
            cores.append(quota)
    free, limit = min(memory, default=(None, None))
    return limit, free, min(cores, default=None)


def folders(groups: Path, file: Path) -> Iterator[Path]:
    """Yield the folders of our control groups, from the innermost to the root of each hierarchy.

    In a container, the mounted root may be the container's group, while `file` has the host's path.
    """
    try:
        text = file.read_text()
    except OSError:
        return
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and not {"cpu", "memory"} & set(controllers.split(",")):
            continue
        roots = [groups / controllers] if controllers else [groups, groups / "unified"]
        for root in roots:
            group = root / path.strip("/")
            for folder in (group, *group.parents):
                if folder.is_dir():
                    yield folder
                if folder == root:
                    break


def first_number(folder: Path, *names: str) -> int | None:
    """Return the number in the first file that exists; None if it has no number, or no file exists."""
    for name in names:
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def used_bytes(folder: Path) -> int:
    """Return the bytes that a control group uses, without reclaimable file caches."""
    total = first_number(folder, "memory.current", "memory.usage_in_bytes") or 0
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return total
    return max(0, total - int(stat.get("total_inactive_file", stat.get("inactive_file", 0))))


def processor_time(folder: Path) -> float | None:
    """Return the CPU quota of a control group in cores; None: no limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        numbers = [first_number(folder, f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        return numbers[0] / numbers[1] if numbers[0] and numbers[1] else None
    return int(quota) / int(period) if quota.isdigit() else None
