"""Which rank is slower than the others, by the seconds that each computes for a micro-batch.

In a step all wait for the slowest rank, so steps do not tell which one it was. A rank's own seconds do: those
of its micro-batches less those in which it waits for others, as means over the steps since the last record.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from zero_mpi.comm.meter import Meter
from zero_mpi.telemetry import log

BEHIND = 0.2  # of the median's seconds, that a rank may take longer
RECORDS = 3  # in a row in which a rank is behind, until it is named


class Pace:
    """Seconds that this rank computes for a micro-batch: a context around each."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._seconds, self._count, self._began = 0.0, 0, 0.0
        self._waited = meter.wait_seconds

    def _now(self) -> float:
        return time.perf_counter() - self._meter.wait_seconds

    def __enter__(self) -> None:
        self._began = self._now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._seconds += self._now() - self._began
        self._count += 1

    def take(self) -> tuple[float | None, float]:
        """The mean of the micro-batches since the last call, None if there was none; seconds waited since."""
        mean = self._seconds / self._count if self._count else None
        waited, self._waited = self._meter.wait_seconds - self._waited, self._meter.wait_seconds
        self._seconds, self._count = 0.0, 0
        return mean, waited


class SlowRanks:
    """Names each rank that is behind the median of all in several records in a row."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts, self._behind = hosts, Counter[int]()

    def saw(self, seconds: Sequence[float | None]) -> str:
        """Take in each rank's seconds a micro-batch; returns the ranks that are slow now, "" for none."""
        known = {rank: value for rank, value in enumerate(seconds) if value is not None}
        middle = statistics.median_low(known.values()) if known else 0.0
        now = {rank: value / middle - 1 for rank, value in known.items() if value > (1 + BEHIND) * middle > 0}
        for rank in [rank for rank in self._behind if rank not in now]:
            if self._behind.pop(rank) >= RECORDS:
                log.info("rank %d on %s keeps up again", rank, self._hosts[rank])
        for rank, behind in now.items():
            self._behind[rank] += 1
            if self._behind[rank] == RECORDS:
                self._name(rank, behind, known[rank], middle)
        return "; ".join(
            f"rank {rank} on {self._hosts[rank]}, {behind:.0%} behind"
            for rank, behind in now.items()
            if self._behind[rank] >= RECORDS
        )

    def _name(self, rank: int, behind: float, own: float, middle: float) -> None:
        host = self._hosts[rank]
        log.warning(
            "rank %d on %s is slow: %.4g s a micro-batch, %.0f %% more than the median of ranks (%.4g s), "
            "%d times in a row: does something else run there? zero-mpi doctor measures all ranks at once",
            *(rank, host, own, 100 * behind, middle, RECORDS),
            extra={"facts": {"rank": rank, "host": host, "behind": round(behind, 3)}},
        )
