"""What the system lets a process have: memory, processor time, files, locked memory.

`environment.control_groups` has those that containers and batch systems set.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from zero_mpi import environment
from zero_mpi.environment.control_groups import group_limits

MEMINFO = Path("/proc/meminfo")
INFINIBAND = Path("/sys/class/infiniband")

_imported = time.monotonic()


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
        cores=environment.cores(),
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


def process_age(process: int | str = "self") -> float:
    """Return the seconds since a process was started; for this one imports are included."""
    try:
        started = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # no such file system, no such clock
        return time.monotonic() - _imported
