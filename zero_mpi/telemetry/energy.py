"""Energy meter of a host, by the counters of Intel and AMD processors or of Cray nodes.

Linux has the processors' counters (RAPL) in /sys/class/powercap, usually readable only by root: one for each
socket with its cores, and on some machines one for its memory. A Cray's counter covers the node.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
CRAY = Path("/sys/cray/pm_counters/energy")
UNREADABLE = OSError, ValueError, IndexError
COUNTED = ("package", "dram")  # name prefixes of zones to add up, which do not overlap


@dataclass
class Counter:
    """Energy counter in a file; it restarts at 0 after `most` (0: never)."""

    path: Path
    joules: float  # joules per count
    most: int = 0
    last: int = 0

    def used(self) -> float:
        """Return the joules used since the last call; raise an UNREADABLE error for a bad file."""
        now = int(self.path.read_text().split()[0])
        delta, self.last = now - self.last, now
        return (delta + self.most if delta < 0 else delta) * self.joules


class Energy:
    """Energy meter of this host, if the host has counters."""

    def __init__(self) -> None:
        self._joules, self._counters = 0.0, [Counter(CRAY, 1.0)] if CRAY.exists() else []
        with suppress(*UNREADABLE):
            for zone in sorted(POWERCAP.glob("intel-rapl:*")) if not self._counters else ():
                if (zone / "name").read_text().startswith(COUNTED):
                    most = int((zone / "max_energy_range_uj").read_text())
                    self._counters.append(Counter(zone / "energy_uj", 1e-6, most))
        self.count()
        self.take()

    def count(self) -> None:
        """Add the energy used since the last call; call this often, because the counters wrap around."""
        try:
            self._joules += sum(counter.used() for counter in self._counters)
        except UNREADABLE:
            self._counters = []

    def take(self) -> float | None:
        """Return the joules since the last call or the start; None if there are no readable counters."""
        joules, self._joules = self._joules, 0.0
        return joules if self._counters else None
