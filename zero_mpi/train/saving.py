"""When a run saves, and what it says of that."""

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

SAVE_SECONDS = 600.0  # between saves, where no number of steps is given
SAVE_PAUSE = 10  # times the longest save so far, at least: large checkpoints take no more than a tenth
SAVE_MARGIN = 1.5  # times the longest save so far is left for the last one before the time is up
SHORTEST_SAVE = 1.0  # seconds
SLOW_DISK = 200e6  # bytes a second; what the first save is taken to write


class Saving(Observer):
    """Writes checkpoints, keeps the watchdog quiet meanwhile, and announces those that are complete."""

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
        """Whether a checkpoint follows step `step`; all ranks agree."""
        if self._every is None:
            return self.time_has_come
        return self._every > 0 and step % self._every == 0

    def clock_says_so(self) -> bool:
        """Whether it is time to save by this rank's clock, where no number of steps is given."""
        pause = max(SAVE_SECONDS, SAVE_PAUSE * self.saver.longest)
        return time.monotonic() - self._saved_at >= pause

    def seconds_needed(self) -> float:
        """What the last checkpoint may take before the run's time is up."""
        files = 3 + (self._session.config.ema is not None)  # parameters, two moments, their average
        state = files * self._session.module.replicated_memory_bytes
        return SAVE_MARGIN * max(SHORTEST_SAVE, self.saver.longest or state / SLOW_DISK)

    def save(self, progress: TrainingProgress) -> None:
        """Write a checkpoint of the step just done, or begin to. Collective."""
        with self._waiting(progress.step):
            self.saver.save(progress)
        self.saved_step, self._saved_at = progress.step, time.monotonic()
        self.announce()

    def wait(self, step: int) -> None:
        """Return when all that was begun is on disk. Collective; raises what failed on all ranks."""
        with self._waiting(step):
            self.saver.wait()

    @contextlib.contextmanager
    def _waiting(self, step: int) -> Iterator[None]:
        """While the run waits for a checkpoint, what the save gets done counts as progress."""
        self._runs_wait = True
        self._watchdog.beat(f"saving step {step}")
        yield
        self._runs_wait = False

    def _tick(self, what: str) -> None:
        """A save gets on; it may be a thread's that says so."""
        if self._runs_wait:
            self._watchdog.beat(f"saving: {what}")

    def announce(self) -> None:
        """Say which checkpoints are complete."""
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
    """The bytes of the files in a folder; 0 where it is gone already."""
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0
