"""Saving: decides when a run writes a checkpoint, and reports complete checkpoints."""

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
from zero_mpi.cli.text import plural
from zero_mpi.errors import UsageError, writing
from zero_mpi.files.foreign import shown
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.telemetry import events, log
from zero_mpi.telemetry.events import Events
from zero_mpi.telemetry.metrics import Records
from zero_mpi.train.observers import Observer, StepMade
from zero_mpi.train.setup import Session

SAVE_SECONDS = 600.0  # seconds between saves without --save-every
SAVE_PAUSE = 10  # minimum pause between saves, as a multiple of the longest save
SAVE_MARGIN = 1.5  # time reserved for the last save, as a multiple of the longest save
SHORTEST_SAVE = 1.0  # minimum seconds that a save is assumed to take
SLOW_DISK = 200e6  # bytes per second that the first save is assumed to write


class Saving(Observer):
    """Observer that writes checkpoints, reports progress to the watchdog and announces new checkpoints."""

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
        log.debug("checkpoints: %s", self.saver.writers.description)
        self._every, self._session, self._watchdog, self._events = config.save_every, session, watchdog, sink
        self._records = records
        self._runs_wait = False
        self.saved_step = session.progress.step if session.resumed is not None else -1
        self._saved_at, self.time_has_come = time.monotonic(), False

    def ends(self, step: StepMade) -> None:
        self.announce()

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after step `step`. The answer is the same on all ranks."""
        if self._every is None:
            return self.time_has_come
        return self._every > 0 and step % self._every == 0

    def clock_says_so(self) -> bool:
        """Return whether this rank's clock says that a save is due; --save-every overrides the clock."""
        pause = max(SAVE_SECONDS, SAVE_PAUSE * self.saver.longest)
        return time.monotonic() - self._saved_at >= pause

    def seconds_needed(self) -> float:
        """Return the seconds to reserve for the last checkpoint before the time limit."""
        files = 3 + (self._session.config.ema is not None)  # parameters, two moments, moving average
        state = files * sum(unit.parameters.nbytes_full for unit in self._session.module.units)
        return SAVE_MARGIN * max(SHORTEST_SAVE, self.saver.longest or state / SLOW_DISK)

    def save(self, progress: TrainingProgress) -> None:
        """Write a checkpoint of the current step, or with --async-save begin to write it. Collective."""
        with self._waiting(progress.step):
            self.saver.save(progress)
        self.saved_step, self._saved_at = progress.step, time.monotonic()
        self.announce()

    def wait(self, step: int) -> None:
        """Wait until all checkpoints are on disk. Raise their errors on all ranks. Collective."""
        with self._waiting(step):
            self.saver.wait()

    @contextlib.contextmanager
    def _waiting(self, step: int) -> Iterator[None]:
        """Let the work of a save, done in the `with` block, count as progress for the watchdog."""
        self._runs_wait = True
        self._watchdog.beat(f"saving step {step}")
        yield
        self._runs_wait = False

    def _tick(self, label: str) -> None:
        """Report progress of a save to the watchdog. Any thread may call this."""
        if self._runs_wait:
            self._watchdog.beat(f"saving: {label}")

    def announce(self) -> None:
        for save in self.saver.new_checkpoints():
            self._records.saved(save.step, save.id, save.digest)
            log.info("saved %s in %.1f s, state %s", save.folder, save.seconds, save.digest[:16])
            self._events.note(
                events.SAVED,
                step=save.step,
                folder=save.folder.name,
                digest=save.digest,
                seconds=round(save.seconds, 3),
                bytes=bytes_in(save.folder),
            )


def bytes_in(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0


class EarlyStop(Observer):
    """Observer that counts evaluations without improvement and decides when to stop early.

    best   the best evaluation of the run so far, including earlier jobs
    unit   unit of the loss, for messages
    """

    def __init__(self, best: Best, patience: int | None, unit: str) -> None:
        self.best, self._patience, self._unit, self._step = best, patience, unit, 0

    def ends(self, step: StepMade) -> None:
        loss = step.record.get("val_loss")
        if self._patience is not None and loss is not None:
            # A step without a finite loss is not saved, so it cannot be the best step.
            self.best = self.best.after(step.number, loss if math.isfinite(step.loss) else math.nan)
        self._step = step.number

    def is_best(self) -> bool:
        """Return whether the last step is the best so far and must be saved. Equal on all ranks."""
        return self.best.is_of(self._step)

    def is_over(self) -> bool:
        """Return whether the run stops early now. The answer is the same on all ranks."""
        return self.best.is_used_up(self._patience)

    def report(self, step: int, out: Path, sink: Events) -> None:
        """At the end of a run, report which step is best and whether the run stopped early."""
        if self.best == Best():
            return
        outcome = f"stopped early after step {step}, {reason(self.best)}" if self.is_over() else "done"
        log.info("%s; %s", outcome, self.described(out))
        if self.is_over():
            sink.reason = f"stopped early, {reason(self.best)}"
            fields = {"val_loss": self.best.loss, "best_step": self.best.step} if self.best.step else {}
            sink.note(events.EARLY_STOP, evaluations=self.best.since, **fields)

    def described(self, out: Path) -> str:
        """Return a text with the best loss and the link to its checkpoint."""
        if not self.best.step:
            return "no validation loss was finite"
        link, loss = out / folders.BEST, f"{self.best.loss:.4f}{self._unit}"
        place = shown(link) if link.is_symlink() else "its checkpoint is not in this folder"
        return f"the best validation loss is {loss}, of step {self.best.step}: {place}"


def reason(best: Best) -> str:
    return f"after {plural(best.since, 'evaluation')} without improvement"


def point_best(session: Session) -> None:
    """Make OUT/best a link to the best checkpoint of the resumed run, or remove it. One rank calls this.

    Raises UsageError if --patience is given and OUT/best is not a link, JobError if the link cannot be made.
    """
    link = session.out / folders.BEST
    if not link.is_symlink() and link.exists() and session.config.patience is not None:
        raise UsageError(f"--patience: {shown(link)} is not a link: move it away")
    best = session.progress.best
    with writing():
        folders.point_best(session.out, best.step if is_there(session.out, best) else 0)


def is_there(out: Path, best: Best) -> bool:
    """Return whether the run folder has the best checkpoint, and not another checkpoint of that step."""
    try:
        state = GGUFFile.open(folders.step_folder(out, best.step) / folders.OPTIMIZER)
        return best.step > 0 and read_best(keys_of(state)) == replace(best, since=0)
    except (UsageError, OSError):
        return False
