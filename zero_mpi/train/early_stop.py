"""Early stopping: ends a run after `--patience` evaluations without a new best validation loss.

The loss is that of all ranks, so they end together without a message. Checkpoints store the count, so
a resumed run decides as one that was never stopped. OUT/best names the best checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.state import Best, read_best
from zero_mpi.checkpoint.weights import keys_of
from zero_mpi.errors import UsageError, writing
from zero_mpi.files.foreign import shown
from zero_mpi.telemetry import events, log
from zero_mpi.telemetry.events import Events
from zero_mpi.train.observers import Observer, StepMade
from zero_mpi.train.setup import Session


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

    def tell(self, step: int, out: Path, told: Events) -> None:
        """Report at the end of a run which step was best, and whether lack of improvement ended the run."""
        if self.best == Best():
            return
        ended = f"stopped early after step {step}, {reason(self.best)}" if self.is_over() else "done"
        log.info("%s; %s", ended, self.described(out))
        if self.is_over():
            told.reason = f"stopped early, {reason(self.best)}"
            about = {"val_loss": self.best.loss, "best_step": self.best.step} if self.best.step else {}
            told.note(events.EARLY_STOP, evaluations=self.best.since, **about)

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


def begin(session: Session) -> None:
    """Let OUT/best name the best checkpoint of the run that now resumes, or nothing. Only for one rank.

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
