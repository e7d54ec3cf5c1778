"""What the world is told of a job as a whole: `status.json`, and the starts and ends in `events.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero_mpi import events
from zero_mpi.events import Events
from zero_mpi.launch import BAD_USAGE, REQUEUE, World
from zero_mpi.records import METRICS, last_step
from zero_mpi.status import DONE, FAILED, STOPPED, Status
from zero_mpi.summary import Start


class Outcome:
    """Both files as one rank sees them; it listens for the end of the job."""

    def __init__(self, out: Path, world: World, steps: int) -> None:
        self.status, self.events = Status(out, world.rank, world.size, steps), Events(out, world.rank)
        self._out, self._before = out, dict[str, Any]()
        world.at_end.append(self.end)

    def open(self) -> None:
        """The job runs; what one before it has left is looked at before it is written over."""
        self.status.begin()
        self._before = self.status.before()
        told = self._before.get("step")  # it is renewed now and then; a record is made at every step
        self._before["step"] = max(told if isinstance(told, int) else 0, last_step(self._out / METRICS))

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
        self.status.end(state, reason)
        self.events.end(state, reason)
