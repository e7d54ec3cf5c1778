"""The end of a run that gets no better: `--patience` evaluations without a new best held-out loss.

The loss is that of all ranks, so they end together without a word. The account goes into the checkpoints, and
a run that goes on from one decides as one that was never stopped. OUT/best names the best checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.sound import keys_of
from zero_mpi.checkpoint.state import Best, read_best
from zero_mpi.errors import UsageError, writing
from zero_mpi.files.foreign import shown
from zero_mpi.telemetry import events, log
from zero_mpi.telemetry.events import Events
from zero_mpi.train.observers import Observer, StepMade
from zero_mpi.train.setup import Session


class EarlyStop(Observer):
    """Keeps the account of evaluations, and says when there is no use in going on.

    best   so far, those of the jobs before included
    """

    def __init__(self, best: Best, patience: int | None) -> None:
        self.best, self._patience, self._step = best, patience, 0

    def ends(self, step: StepMade) -> None:
        loss = step.record.get("val_loss")
        if self._patience is not None and loss is not None:
            # After a step without a finite loss nothing is saved, and what is not saved is not the best.
            self.best = self.best.after(step.number, loss if math.isfinite(step.loss) else math.nan)
        self._step = step.number

    def is_best(self) -> bool:
        """Whether the step just made is the best so far, and is to be saved for that; all ranks agree."""
        return self.best.is_of(self._step)

    def is_over(self) -> bool:
        """Whether the run ends here; all ranks agree."""
        return self.best.is_used_up(self._patience)

    def tell(self, step: int, out: Path, told: Events) -> None:
        """Say at the end of a run what the best was, and whether it ended for want of a better one."""
        if self.best == Best():
            return
        ended = f"stopped early after step {step}, {reason(self.best)}" if self.is_over() else "done"
        log.info("%s; %s", ended, self.described(out))
        if self.is_over():
            told.reason = f"stopped early, {reason(self.best)}"
            about = {"val_loss": self.best.loss, "best_step": self.best.step} if self.best.step else {}
            told.note(events.EARLY_STOP, evaluations=self.best.since, **about)

    def described(self, out: Path) -> str:
        """The best loss and where its checkpoint is, for people."""
        if not self.best.step:
            return "no validation loss was finite"
        link, loss = out / folders.BEST, f"{self.best.loss:.4f} nats a token"
        place = shown(link) if link.is_symlink() else "its checkpoint is not in this folder"
        return f"the best validation loss is {loss}, of step {self.best.step}: {place}"


def reason(best: Best) -> str:
    """Why a run ends before its last step."""
    times = "1 evaluation" if best.since == 1 else f"{best.since} evaluations"
    return f"after {times} without a new best"


def begin(session: Session) -> None:
    """Let OUT/best name the best checkpoint of the run that now goes on, or nothing. For one rank.

    Raises UsageError where something that is no link stands in its place, JobError where it cannot be made.
    """
    link = session.out / folders.BEST
    if not link.is_symlink() and link.exists() and session.config.patience is not None:
        raise UsageError(f"--patience: {shown(link)} is no link, expected one or nothing: move it away")
    best = session.progress.best
    with writing():
        folders.point_best(session.out, best.step if is_there(session.out, best) else 0)


def is_there(out: Path, best: Best) -> bool:
    """Whether the best checkpoint is in a run folder, and no other one of the same step."""
    try:
        state = GGUFFile.open(folders.step_folder(out, best.step) / folders.OPTIMIZER)
        return best.step > 0 and read_best(keys_of(state)) == replace(best, since=0)
    except (UsageError, OSError):
        return False
