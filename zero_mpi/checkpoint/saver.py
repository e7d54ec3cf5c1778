"""Saves the checkpoints of a run, one at a time: now, or by a thread while training goes on.

In the background each rank keeps a copy of its slices until they are written. A failure is raised on all
ranks together: by `save` itself, or by the next `wait`, to which `failed` calls.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.checksum import digest_of_state
from zero_mpi.checkpoint.parallel_write import Content, Digests, agree_on, write_pair
from zero_mpi.checkpoint.shards import Contribution, Snapshot, moments_of, parameters_of
from zero_mpi.checkpoint.state import (
    ARCHITECTURE,
    Description,
    Progress,
    model_tensors,
    moment_tensors,
    sign,
)
from zero_mpi.errors import JobError, explain
from zero_mpi.sharding.optimizer import ShardedAdamW
from zero_mpi.telemetry import spans

Parts = tuple[list[Contribution], list[Contribution]]


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint; `digest` is of all its tensors, the same at any number of ranks."""

    folder: Path
    step: int
    digest: str
    seconds: float


class Saver:
    """Writes OUT/step-NNNNNNNN and points OUT/latest to it. Every method named collective is.

    keep         checkpoints that stay, 0 for all
    parallel     all ranks write their own ranges by MPI-IO; otherwise rank 0 writes what it is sent
    background   `save` returns at once, and at most one checkpoint is under way
    tick         is told what is going on, for a watchdog
    """

    def __init__(
        self,
        out: Path,
        optimizer: ShardedAdamW,
        description: Description,
        *,
        keep: int = 0,
        parallel: bool = False,
        background: bool = False,
        tick: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.out, self.optimizer, self.description, self.keep = out, optimizer, description, keep
        self.parallel, self.background, self.tick = parallel, background, tick
        self.comm = optimizer.module.comm.background()  # ranks that wait leave the cores to those that work
        self.longest = 0.0
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._finished: list[Saved] = []

    def save(self, progress: Progress) -> None:
        """Save the state as it is now. Collective; JobError on all ranks if this or the one before failed."""
        self.wait()
        parts = parameters_of(self.optimizer), moments_of(self.optimizer)
        if not self.background:
            with spans.during(spans.CHECKPOINT, "save", f"step {progress.step}"):
                self._finished.append(self._write(progress, parts))
            return
        with spans.during(spans.CHECKPOINT, "copy"):
            copies = self._snapshot.take(parts[0]), self._snapshot.take(parts[1])
        run = partial(self._write_behind, progress, copies)
        self._thread = threading.Thread(target=run, name="zero_mpi saver", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether this rank knows of a failure in the background, to be raised by `wait` on all ranks."""
        return self._error is not None

    def wait(self) -> None:
        """Return when nothing is under way. All ranks call it; raises what went wrong, on all of them."""
        if self._thread is not None:
            with spans.during(spans.CHECKPOINT, "wait for the save behind training"):
                self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait, and give up the transport. Collective."""
        self.wait()
        self.comm.close()

    def finished(self) -> list[Saved]:
        """What was completed since the last call."""
        done = self._finished[:]
        del self._finished[: len(done)]
        return done

    def _write_behind(self, progress: Progress, parts: Parts) -> None:
        try:
            with spans.during(spans.BEHIND, "save", f"step {progress.step}"):
                self._finished.append(self._write(progress, parts))
        except BaseException as error:  # raised where the run waits for it
            self._error = error

    def _write(self, progress: Progress, parts: Parts) -> Saved:
        begun, root = time.monotonic(), self.comm.rank == 0
        folder = self.out / f".{folders.step_folder(self.out, progress.step).name}.partial"
        digests: dict[str, str] = {}
        try:
            self._on_root(partial(folders.begin, self.out, progress.step))
            self._write_files(progress, parts, folder, digests)
            self.tick(f"publishing step {progress.step}")
            self._on_root(partial(folders.publish, self.out, progress.step, folder, self.keep))
        except JobError as error:
            if root:
                shutil.rmtree(folder, ignore_errors=True)
            text = f"saving the checkpoint of step {progress.step} failed: {error}; {self._rest()}"
            raise JobError(text) from error
        seconds = time.monotonic() - begun
        self.longest = max(self.longest, seconds)
        final = folders.step_folder(self.out, progress.step)
        return Saved(final, progress.step, digest_of_state(digests), seconds)

    def _write_files(self, progress: Progress, parts: Parts, folder: Path, digests: Digests) -> None:
        description = self.description
        tensors = model_tensors(self.optimizer, description), moment_tensors(self.optimizer)
        contents = (
            Content(
                folder / folders.MODEL, description.architecture, tensors[0], parts[0], description.constants
            ),
            Content(folder / folders.OPTIMIZER, ARCHITECTURE, tensors[1], parts[1]),
        )

        def keys(model: Digests, moments: Digests) -> tuple[dict[str, object], dict[str, object]]:
            digests.update({**model, **moments})
            return sign(progress, description, model, moments)

        write_pair(self.comm, contents, keys, parallel=self.parallel, tick=self.tick)

    def _on_root(self, action: Callable[[], object]) -> None:
        """action() on rank 0; if the system refuses, all ranks raise JobError."""
        problem = None
        if self.comm.rank == 0:
            try:
                action()
            except OSError as error:
                problem = explain(error)
        agree_on(self.comm, problem)

    def _rest(self) -> str:
        """What is there all the same, for the message."""
        link = self.out / folders.LATEST
        return f"{link} is {link.readlink()}" if link.is_symlink() else "there is no earlier one"


def save_checkpoint(
    out: Path, optimizer: ShardedAdamW, progress: Progress, description: Description, keep: int = 0
) -> Path:
    """Write OUT/step-NNNNNNNN and point OUT/latest to it. Collective. Returns the folder.

    Raises JobError on all ranks where writing fails; what was there before stays.
    """
    saver = Saver(out, optimizer, description, keep=keep)
    saver.save(progress)
    saver.close()
    return folders.step_folder(out, progress.step)
