"""What the world is told of a job as a whole: `status.json`, and the starts and ends in `events.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero_mpi.launch.ending import BAD_USAGE, REQUEUE
from zero_mpi.launch.folder_lock import Hold
from zero_mpi.launch.stopping import was_stopped_early
from zero_mpi.launch.world import World
from zero_mpi.telemetry import events
from zero_mpi.telemetry.events import Events
from zero_mpi.telemetry.metrics import METRICS, last_step
from zero_mpi.telemetry.proof import MOST_STEPS
from zero_mpi.telemetry.status import DONE, FAILED, STOPPED, Status
from zero_mpi.train.summary import Start


class Outcome:
    """The status and the events of a run as one rank writes them, up to the end of the job.

    `folder`: what lets this job write there; where it is lost, nothing is written any more.
    """

    def __init__(self, out: Path, world: World, steps: int, folder: Hold | None = None) -> None:
        self.folder = folder or Hold(world, None)
        self.status = Status(out, world.rank, world.size, steps, self.folder.look)
        self.events = Events(out, world.rank, self.folder.look)
        self._out, self._before = out, dict[str, Any]()
        world.at_end.append(self.end)

    def open(self) -> None:
        """Say that the job runs; what the job before it has left is read before that."""
        self.status.begin()
        self._before = self.status.before()
        reported = self._before.get("step")  # it is renewed now and then; a record is made at every step
        step = reported if type(reported) is int and reported <= MOST_STEPS else 0
        self._before["step"] = max(step, last_step(self._out / METRICS))

    @property
    def follows_a_stop(self) -> bool:
        """Whether a batch system stopped the job before this one before its first step; rank 0 knows."""
        return was_stopped_early(str(self._before.get("reason", "")))

    def begin(self, start: Start) -> None:
        """Rank 0 writes down what starts, and from where."""
        session, before = start.session, self._before
        self.events.begin(session.progress.step, before, **start.fields())
        if session.resumed is not None:
            ranks = {"from_ranks": before["ranks"]} if "ranks" in before else {}
            self.events.note(events.RESUMED, folder=session.resumed.name, **ranks)

    def at(self, step: int) -> None:
        """So many steps are done."""
        self.status.at(step)
        self.events.at(step)

    def end(self, code: int, reason: str) -> None:
        """What an exit status means."""
        if code == BAD_USAGE:
            self.status.refused(reason)
            return
        state = {0: DONE, REQUEUE: STOPPED}.get(code, FAILED)
        reason = reason or self.events.reason  # why the run was stopped after a step
        self.status.end(state, reason)
        self.events.end(state, reason)
