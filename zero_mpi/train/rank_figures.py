"""What each rank tells of itself at steps that are logged: memory, seconds computed and waited, energy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zero_mpi import device
from zero_mpi.cli.text import plural
from zero_mpi.comm.meter import Meter
from zero_mpi.launch.world import World
from zero_mpi.telemetry import log
from zero_mpi.telemetry.energy import Energy
from zero_mpi.train.observers import Observer, StepMade
from zero_mpi.train.slow_ranks import Pace, SlowRanks


class Told(NamedTuple):
    """The figures of a rank; all but the first since it told the last ones.

    memory    bytes in use now
    seconds   of computing, for a micro-batch; None: it had none, or a GPU computes while its host goes on
    waited    seconds in waits for other ranks
    joules    of its host, by one rank of each; None: another rank's matter, or the host does not tell
    """

    memory: int
    seconds: float | None
    waited: float
    joules: float | None


class RankFigures(Observer):
    """Records what each rank tells, and names slow ones, at steps that are logged or evaluated: collective.

    pace   is to be entered around each micro-batch
    say    is given the slow ranks as a text, "" where none is
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
        """Say what energy the job took, where hosts tell, for the `tokens` that it was trained on."""
        if self._hosts and tokens:
            hosts, each = plural(self._hosts, "host"), self._joules / tokens
            log.info("energy: %.4g kJ of %s, %.3g J a token", self._joules / 1e3, hosts, each)
