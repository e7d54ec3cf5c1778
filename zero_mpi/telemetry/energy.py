"""Energy that a host has used, where it tells: counters of Intel's and AMD's processors, or of Cray's nodes.

Linux shows the processors' (RAPL) below /sys/class/powercap, mostly to root alone: one counter a socket,
which has its cores in it, and on some machines one for its memory. A Cray's counter is the whole node's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
CRAY = Path("/sys/cray/pm_counters/energy")
UNREADABLE = OSError, ValueError, IndexError
COUNTED = ("package", "dram")  # beginnings of the names of zones that are no part of each other


@dataclass
class Counter:
    """A file with a count that begins again at 0 after `most`; 0: it never does."""

    path: Path
    joules: float  # of one
    most: int = 0
    last: int = 0

    def used(self) -> float:
        """Joules since the last call; OSError or ValueError where it cannot be read."""
        now = int(self.path.read_text().split()[0])
        since, self.last = now - self.last, now
        return (since + self.most if since < 0 else since) * self.joules


class Energy:
    """Joules of this host, if it tells."""

    def __init__(self) -> None:
        self._joules, self._counters = 0.0, list[Counter]()
        for found in (cray, rapl):
            if not self._counters:
                with suppress(*UNREADABLE):
                    self._counters = list(found())
        self.look()
        self._joules = 0.0

    def look(self) -> None:
        """Count what was used since the last look: to be called often, for processors' counters go round."""
        try:
            self._joules += sum(counter.used() for counter in self._counters)
        except UNREADABLE:
            self._counters = []

    def take(self) -> float | None:
        """Joules since the last call or the beginning; None: the host does not tell, or not this user."""
        joules, self._joules = self._joules, 0.0
        return joules if self._counters else None


def cray() -> Iterator[Counter]:
    """The counter of a Cray's node, in joules."""
    if CRAY.exists():
        yield Counter(CRAY, 1.0)


def rapl() -> Iterator[Counter]:
    """Those of sockets and their memory, in millionths of a joule."""
    for zone in sorted(POWERCAP.glob("intel-rapl:*")):
        if (zone / "name").read_text().startswith(COUNTED):
            yield Counter(zone / "energy_uj", 1e-6, int((zone / "max_energy_range_uj").read_text()))
