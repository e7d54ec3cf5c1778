"""Finds ranks that are slower than the others, by the seconds that each computes for a micro-batch.

In a step all ranks wait for the slowest one, so step times do not show which rank it was. Its own seconds do:
the time of its micro-batches less its waits for other ranks, as means over the steps since the last record.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

from zero_mpi import device
from zero_mpi.cli.text import plural
from zero_mpi.comm.meter import Meter
from zero_mpi.launch.world import World
from zero_mpi.telemetry import log
from zero_mpi.telemetry.energy import Energy
from zero_mpi.train.observers import Observer, StepMade


class Told(NamedTuple):
    """Figures of a rank; all but the first cover the time since its last report.

    memory    bytes in use now
    seconds   of computing, per micro-batch; None: it had none, or a GPU computes while its host goes on
    waited    seconds in waits for other ranks
    joules    energy of its host, reported by one rank of each; None: another rank reports it, or no counter
    """

    memory: int
    seconds: float | None
    waited: float
    joules: float | None


class RankFigures(Observer):
    """Records the figures of each rank, and names slow ranks, at logged or evaluated steps: collective.

    pace   context to enter around each micro-batch
    say    function that is given the slow ranks as a text, "" if there are none
    """

    def __init__(
        self,
        world: World,
        logs: Callable[[int], bool],
        meter: Meter,
        slow: SlowRanks,
        say: Callable[[str], None],
    ) -> None:
        self.pace = Pace(meter)
        self._world, self._logs, self._slow, self._say = world, logs, slow, say
        self._energy = Energy() if world.node.rank == 0 else None
        self._joules, self._hosts = 0.0, 0

    def ends(self, step: StepMade) -> None:
        if self._energy is not None:
            self._energy.look()
        if not (self._logs(step.number) or "val_loss" in step.record):
            return
        told: list[Told] = self._world.comm.allgather_object(self._tell())
        seconds = [one.seconds for one in told]
        step.record["memory_bytes"] = [one.memory for one in told]
        step.record["micro_batch_seconds"] = seconds
        step.record["waited_seconds"] = [one.waited for one in told]
        if self._world.rank == 0:
            self._say(self._slow.saw(seconds))
        joules = [one.joules for one in told if one.joules is not None]
        if joules:
            step.record["joules"] = sum(joules)
            self._joules, self._hosts = self._joules + sum(joules), len(joules)

    def _tell(self) -> Told:
        at_work = device.in_use()
        computed, waited = self.pace.take()
        joules = None if self._energy is None else self._energy.take()
        return Told(at_work.memory_in_use(), computed if at_work is device.HOST else None, waited, joules)

    def close(self, tokens: int) -> None:
        """Report the energy that the job used, if hosts measure it, for the `tokens` that it trained on."""
        if self._hosts and tokens:
            hosts, each = plural(self._hosts, "host"), self._joules / tokens
            log.info("energy: %.4g kJ of %s, %.3g J per token", self._joules / 1e3, hosts, each)


BEHIND = 0.2  # share of the median's seconds that a rank may be slower
RECORDS = 3  # number of records in a row in which a rank is behind, until it is named


class Pace:
    """Measures the seconds that this rank computes per micro-batch: a context around each."""

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
        """Return the mean of the micro-batches since the last call (None without one), and seconds waited."""
        mean = self._seconds / self._count if self._count else None
        waited, self._waited = self._meter.wait_seconds - self._waited, self._meter.wait_seconds
        self._seconds, self._count = 0.0, 0
        return mean, waited


class SlowRanks:
    """Names each rank that is behind the median of all ranks in several records in a row."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts, self._behind = hosts, Counter[int]()

    def saw(self, seconds: Sequence[float | None]) -> str:
        """Take in each rank's seconds per micro-batch; return the ranks that are slow now, or ""."""
        known = {rank: value for rank, value in enumerate(seconds) if value is not None}
        middle = statistics.median_low(known.values()) if known else 0.0
        now = {rank: value / middle - 1 for rank, value in known.items() if value > (1 + BEHIND) * middle > 0}
        for rank in [rank for rank in self._behind if rank not in now]:
            if self._behind.pop(rank) >= RECORDS:
                log.info("rank %d on %s is no longer slow", rank, self._hosts[rank])
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
            "rank %d on %s is slow: %.4g s per micro-batch, %.0f %% more than the median of ranks (%.4g s), "
            "%d times in a row. Is another program running there? zero-mpi doctor measures all ranks at once",
            *(rank, host, own, 100 * behind, middle, RECORDS),
            extra={"facts": {"rank": rank, "host": host, "behind": round(behind, 3)}},
        )
