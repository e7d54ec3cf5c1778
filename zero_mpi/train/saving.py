"""Decides when a run saves, and reports its checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from zero_mpi.checkpoint.saver import Saver
from zero_mpi.checkpoint.state import TrainingProgress
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.telemetry import events, log
from zero_mpi.telemetry.events import Events
from zero_mpi.telemetry.metrics import Records
from zero_mpi.train.observers import Observer, StepMade
from zero_mpi.train.setup import Session

SAVE_SECONDS = 600.0  # seconds between saves, where no number of steps is given
SAVE_PAUSE = 10  # least pause, in durations of the longest save so far: saves take at most a tenth
SAVE_MARGIN = 1.5  # durations of the longest save that are left for the last save before the time is up
SHORTEST_SAVE = 1.0  # seconds
SLOW_DISK = 200e6  # bytes per second; assumed rate of the first save


class Saving(Observer):
    """Writes checkpoints, keeps the watchdog quiet meanwhile, and announces complete ones."""

    def __init__(self, session: Session, watchdog: Watchdog, told: Events, records: Records) -> None:
        config = session.config
        self.saver = Saver(
            session.out,
            session.optimizer,
            session.description,
            keep=config.keep,
            parallel=config.checkpoint_io == "parallel",
            writers_per_node=config.writers_per_node,
            background=config.async_save,
            tick=self._tick,
        )
        log.debug("checkpoints: %s", self.saver.writers.about)
        self._every, self._session, self._watchdog, self._events = config.save_every, session, watchdog, told
        self._records = records
        self._runs_wait = False
        self.saved_step = session.progress.step if session.resumed is not None else -1
        self._saved_at, self.time_has_come = time.monotonic(), False

    def ends(self, step: StepMade) -> None:
        self.announce()

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint follows step `step`; all ranks agree."""
        if self._every is None:
            return self.time_has_come
        return self._every > 0 and step % self._every == 0

    def clock_says_so(self) -> bool:
        """Return whether it is time to save by this rank's clock, where no number of steps is given."""
        pause = max(SAVE_SECONDS, SAVE_PAUSE * self.saver.longest)
        return time.monotonic() - self._saved_at >= pause

    def seconds_needed(self) -> float:
        """Return the seconds that the last checkpoint may take before the run's time is up."""
        files = 3 + (self._session.config.ema is not None)  # parameters, two moments, their average
        state = files * sum(unit.parameters.nbytes_whole for unit in self._session.module.units)
        return SAVE_MARGIN * max(SHORTEST_SAVE, self.saver.longest or state / SLOW_DISK)

    def save(self, progress: TrainingProgress) -> None:
        """Write a checkpoint of the step just done, or begin to. Collective."""
        with self._waiting(progress.step):
            self.saver.save(progress)
        self.saved_step, self._saved_at = progress.step, time.monotonic()
        self.announce()

    def wait(self, step: int) -> None:
        """Wait until every checkpoint that was begun is on disk. Collective; raises errors on all ranks."""
        with self._waiting(step):
            self.saver.wait()

    @contextlib.contextmanager
    def _waiting(self, step: int) -> Iterator[None]:
        """Count the save's work as progress while the run waits for a checkpoint."""
        self._runs_wait = True
        self._watchdog.beat(f"saving step {step}")
        yield
        self._runs_wait = False

    def _tick(self, what: str) -> None:
        """Report that a save makes progress; a thread may call this."""
        if self._runs_wait:
            self._watchdog.beat(f"saving: {what}")

    def announce(self) -> None:
        """Announce the checkpoints that are complete."""
        for saved in self.saver.finished():
            self._records.saved(saved.step, saved.id, saved.digest)
            log.info("saved %s in %.1f s, state %s", saved.folder, saved.seconds, saved.digest[:16])
            self._events.note(
                events.SAVED,
                step=saved.step,
                folder=saved.folder.name,
                digest=saved.digest,
                seconds=round(saved.seconds, 3),
                bytes=bytes_in(saved.folder),
            )


def bytes_in(folder: Path) -> int:
    """Return the bytes of the files in a folder; 0 where it is gone already."""
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0
