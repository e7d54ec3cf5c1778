"""Decides when a run saves, and reports its checkpoints."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.saver import Saver
from zero_mpi.checkpoint.state import Best, TrainingProgress, read_best
from zero_mpi.checkpoint.weights import keys_of
from zero_mpi.errors import UsageError, writing
from zero_mpi.files.foreign import shown
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

    def __init__(self, session: Session, watchdog: Watchdog, sink: Events, records: Records) -> None:
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
        self._every, self._session, self._watchdog, self._events = config.save_every, session, watchdog, sink
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


class EarlyStop(Observer):
    """Counts evaluations without improvement, and decides when to stop.

    best   the best evaluation so far, earlier jobs of the run included
    """

    def __init__(self, best: Best, patience: int | None) -> None:
        self.best, self._patience, self._step = best, patience, 0

    def ends(self, step: StepMade) -> None:
        loss = step.record.get("val_loss")
        if self._patience is not None and loss is not None:
            # A step without a finite loss is not saved, and a step that is not saved cannot be the best.
            self.best = self.best.after(step.number, loss if math.isfinite(step.loss) else math.nan)
        self._step = step.number

    def is_best(self) -> bool:
        """Return whether the step just made is the best so far and must be saved for it; all ranks agree."""
        return self.best.is_of(self._step)

    def is_over(self) -> bool:
        """Return whether the run ends here; all ranks agree."""
        return self.best.is_used_up(self._patience)

    def report(self, step: int, out: Path, sink: Events) -> None:
        """Report at the end of a run which step was best, and whether lack of improvement ended the run."""
        if self.best == Best():
            return
        ended = f"stopped early after step {step}, {reason(self.best)}" if self.is_over() else "done"
        log.info("%s; %s", ended, self.described(out))
        if self.is_over():
            sink.reason = f"stopped early, {reason(self.best)}"
            about = {"val_loss": self.best.loss, "best_step": self.best.step} if self.best.step else {}
            sink.note(events.EARLY_STOP, evaluations=self.best.since, **about)

    def described(self, out: Path) -> str:
        """Return the best loss and the place of its checkpoint, for messages."""
        if not self.best.step:
            return "no validation loss was finite"
        link, loss = out / folders.BEST, f"{self.best.loss:.4f} nats per token"
        place = shown(link) if link.is_symlink() else "its checkpoint is not in this folder"
        return f"the best validation loss is {loss}, of step {self.best.step}: {place}"


def reason(best: Best) -> str:
    """Return why a run ends before its last step."""
    times = "1 evaluation" if best.since == 1 else f"{best.since} evaluations"
    return f"after {times} without improvement"


def point_best(session: Session) -> None:
    """Point OUT/best to the best checkpoint of the resumed run, or remove it. Called on one rank.

    Raises UsageError if something other than a link is in its place, JobError if the link cannot be made.
    """
    link = session.out / folders.BEST
    if not link.is_symlink() and link.exists() and session.config.patience is not None:
        raise UsageError(f"--patience: {shown(link)} is not a link: move it away")
    best = session.progress.best
    with writing():
        folders.point_best(session.out, best.step if is_there(session.out, best) else 0)


def is_there(out: Path, best: Best) -> bool:
    """Return whether the best checkpoint is in a run folder, and no other checkpoint of the same step."""
    try:
        state = GGUFFile.open(folders.step_folder(out, best.step) / folders.OPTIMIZER)
        return best.step > 0 and read_best(keys_of(state)) == replace(best, since=0)
    except (UsageError, OSError):
        return False
