"""Saves the checkpoints of a run, one at a time, either directly or in a thread while training continues.

For a background save, each rank keeps a copy of its slices until they are written. If a save fails, all ranks
raise the error: in `save`, or in the next `wait`, which the caller must call once `failed` is true.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from zero_mpi.arguments import came, instance, some
from zero_mpi.checkpoint import folders, sound, state
from zero_mpi.checkpoint.gguf.header import pack_file
from zero_mpi.checkpoint.parallel_write import (
    Content,
    Digests,
    Writers,
    agree_on,
    rank_0_of,
    write_together,
    writers_for,
)
from zero_mpi.comm import Comm
from zero_mpi.comm.agree import Facts, agreed
from zero_mpi.errors import JobError, UsageError, explain
from zero_mpi.files.atomic import partial_of
from zero_mpi.files.open import exists, is_folder
from zero_mpi.optim.optimizer import ShardedOptimizer
from zero_mpi.sharding.module import ShardedModule
from zero_mpi.sharding.precision import FP64
from zero_mpi.sharding.unit import BlockUnit
from zero_mpi.telemetry import spans

Parts = dict[str, list[state.Contribution]]  # role of a file -> contributions to it


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint. Its id and digest are valid only on rank 0."""

    folder: Path
    step: int
    digest: str  # digest of all tensors, equal at any number of ranks
    id: str  # hash of the keys of all files, which include the digests
    seconds: float


class Saver:
    """Writes checkpoints to OUT/step-NNNNNNNN and points the link OUT/latest to the newest one.

    keep         number of checkpoints to keep, apart from the best one; 0: all
    parallel     whether several ranks write: as many as suit the file system, or `writers_per_node` per node
    if given; otherwise all ranks send their slices to rank 0, which writes
    background   whether `save` returns immediately; at most one checkpoint is written at a time
    tick         function that gets a description of the current work, for a watchdog

    prepare      function that rank 0 calls before it writes; it makes OUT, or returns why not to write
    """

    def __init__(
        self,
        out: Path,
        optimizer: ShardedOptimizer,
        description: state.Description,
        *,
        keep: int = 0,
        parallel: bool = False,
        writers_per_node: int | None = None,
        background: bool = False,
        tick: Callable[[str], None] = lambda work: None,
    ) -> None:
        self.out, self.optimizer, self.description, self.keep = out, optimizer, description, keep
        self.background, self.tick = background, tick
        self.comm = optimizer.module.comm.background()  # its waits sleep instead of spinning
        self.writers = writers_for(self.comm, out, writers_per_node) if parallel else rank_0_of(self.comm)
        self.longest = 0.0
        self.prepare: Callable[[], str | None] = partial(out.mkdir, parents=True, exist_ok=True)
        self._snapshot = state.Snapshot()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._checkpoints: list[SavedCheckpoint] = []

    def save(self, progress: state.TrainingProgress) -> None:
        """Save the state. Raise JobError on all ranks if this or the last save has failed. Collective."""
        self.wait()
        parts = parts_of(self.optimizer, self.description)
        if not self.background:
            with spans.during(spans.CHECKPOINT, "save", f"step {progress.step}"):
                self._checkpoints.append(self._write(progress, parts))
            return
        with spans.during(spans.CHECKPOINT, "copy"):
            copies = {role: self._snapshot.take(role, part) for role, part in parts.items()}
        run = partial(self._write_behind, progress, copies)
        self._thread = threading.Thread(target=run, name="zero_mpi saver", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """True if a background save failed on this rank. Then `wait` raises the error on all ranks."""
        return self._error is not None

    def wait(self) -> None:
        """Wait until no save is in progress. If the save failed, raise its error on all ranks. Collective."""
        if self._thread is not None:
            with spans.during(spans.CHECKPOINT, "wait for the background save"):
                self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait for the save in progress, and close its transport. Collective."""
        self.wait()
        self.writers.close()
        self.comm.close()

    def new_checkpoints(self) -> list[SavedCheckpoint]:
        """Return the checkpoints that have become complete since the last call."""
        checkpoints = self._checkpoints[:]
        del self._checkpoints[: len(checkpoints)]
        return checkpoints

    def _write_behind(self, progress: state.TrainingProgress, parts: Parts) -> None:
        try:
            with spans.during(spans.BACKGROUND, "save", f"step {progress.step}"):
                self._snapshot.complete.wait()
                self._checkpoints.append(self._write(progress, parts))
        except BaseException as error:  # `wait` raises it
            self._error = error

    def _write(self, progress: state.TrainingProgress, parts: Parts) -> SavedCheckpoint:
        start = time.monotonic()
        final = folders.step_folder(self.out, progress.step)
        folder = partial_of(final)
        try:
            on_root(self.comm, partial(folders.begin, final), self.prepare)
            keys = write_files(
                self.writers, folder, self.optimizer, self.description, progress, parts, self.tick
            )
            self.tick(f"publishing step {progress.step}")
            is_best = progress.best.is_of(progress.step)
            publish = partial(folders.publish, self.out, progress.step, folder, self.keep, is_best)
            on_root(self.comm, publish, self.prepare)
        except JobError as error:
            if self.comm.rank == 0:
                folders.remove_tree(folder)
            link = self.out / folders.LATEST
            rest = f"{link} is {link.readlink()}" if link.is_symlink() else "no earlier checkpoint exists"
            text = f"saving the checkpoint of step {progress.step} failed: {error}; {rest}"
            raise JobError(text) from error
        seconds = time.monotonic() - start
        self.longest = max(self.longest, seconds)
        return SavedCheckpoint(final, progress.step, keys[sound.STATE_DIGEST], keys[sound.ID], seconds)


def parts_of(optimizer: ShardedOptimizer, description: state.Description) -> Parts:
    """Return this rank's contributions to each file of a checkpoint, as views, in the files' order."""
    trained = description.is_adapter
    average = {sound.AVERAGE: state.averages_of(optimizer, trained)} if optimizer.ema is not None else {}
    return {
        sound.MODEL: state.parameters_of(optimizer, trained),
        **average,
        state.STATE: state.states_of(optimizer),
    }


def write_files(
    writers: Writers,
    folder: Path,
    optimizer: ShardedOptimizer,
    description: state.Description,
    progress: state.TrainingProgress,
    parts: Parts,
    tick: Callable[[str], None] = lambda work: None,
) -> Mapping[str, Any]:
    """Write all files into `folder`: slices of all ranks, the progress and the description.

    Collective. Returns the state's keys (valid on rank 0). Raises JobError on all ranks if a write fails.
    """
    names = {sound.MODEL: description.weights, sound.AVERAGE: folders.AVERAGE}
    architecture, tensors = description.architecture, state.model_tensors(optimizer, description)
    contents = [
        Content(folder / names[role], architecture, tensors, part, description.constants)
        for role, part in parts.items()
        if role in names
    ]
    states = state.state_tensors(optimizer)
    contents.append(Content(folder / folders.OPTIMIZER, state.ARCHITECTURE, states, parts[state.STATE]))

    def keys(*digests: Digests) -> list[dict[str, Any]]:
        by_role = dict(zip(parts, digests, strict=True))
        return list(state.stamp(progress, description, by_role, optimizer.type).values())

    return write_together(writers, contents, keys, tick=tick)[-1]


def on_root(comm: Comm, action: Callable[[], object], prepare: Callable[[], str | None] = str) -> None:
    """Call action() on rank 0. Raise JobError on all ranks if it fails or prepare() refuses. Collective."""
    problem = None
    if comm.rank == 0:
        try:
            problem = prepare()
            if not problem:
                action()
        except OSError as error:
            problem = explain(error)
    agree_on(comm, problem)


FILES = {folders.MODEL, folders.OPTIMIZER, folders.AVERAGE}
FOLDER = str | os.PathLike[str]


def save(folder: FOLDER, module: ShardedModule, optimizer: ShardedOptimizer) -> Path:
    """Write parameters, moments and step counts into `folder`, from which `load` reads them. Collective.

    Data is written next to the target and renamed, so the target is always complete or unchanged. The target
    is a new folder, or a folder that `save` wrote, which is then replaced. It gets `model.gguf`,
    `optimizer.gguf` and, if the optimizer keeps an average, `ema.gguf` in float32. Gradients are not saved,
    so call `save` between steps. Returns the folder's path.

    Raises on all ranks: ValueError for a module or optimizer of another class, or another module's optimizer;
    UsageError for a folder with other files, for names of more than 33 bytes or shapes of more than 4
    dimensions, which GGUF does not accept, and if ranks differ; JobError if a file cannot be written.
    """
    description = state.Description(state.ARCHITECTURE, {}, {}, {})
    instance("save: module", module, ShardedModule, "a ShardedModule")
    path: str = agreed(module.comm, "save", partial(resolve, folder, module, optimizer, description))
    comm = module.comm.background()
    final = Path(comm.broadcast_object(path))
    old, staging = folders.moved_aside(final), partial_of(final)

    def publish() -> None:
        folders.put(staging, final)
        folders.remove_tree(staging)
        folders.remove_tree(old)

    steps, skipped, scale = optimizer.steps, optimizer.skipped, module.loss_scale
    counts: dict[str, Any] = {"scale_exponent": scale.stored_exponent, "scale_steps": scale.good_steps}
    progress = state.TrainingProgress(steps + skipped, skipped=skipped, updates=steps, **counts)
    parts = parts_of(optimizer, description)
    try:
        on_root(comm, partial(begin, final))
        write_files(rank_0_of(comm), staging, optimizer, description, progress, parts)
        on_root(comm, publish)
    except JobError as error:
        if comm.rank == 0:
            folders.remove_tree(staging)
        raise JobError(f"save: {error}; {final} is unchanged") from error
    finally:
        comm.close()
    return final


def begin(final: Path) -> None:
    """Make the temporary folder of `save`. If an earlier call moved the checkpoint aside, move it back."""
    old = folders.moved_aside(final)
    if old.exists() and not final.exists():
        old.rename(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    folders.begin(final)


def resolve(
    folder: Any, module: ShardedModule, optimizer: Any, description: state.Description
) -> tuple[str, Facts]:
    """Check the arguments. Return the folder with links resolved, and facts that all ranks compare."""
    check("save", folder, module, optimizer)
    for tensors in (state.model_tensors(optimizer, description), state.state_tensors(optimizer)):
        pack_file(state.ARCHITECTURE, {}, tensors)
    final = os.path.realpath(folder)
    if module.comm.rank == 0:
        check_place(Path(final))
    return final, {"the folder": os.fspath(folder), "the steps": (optimizer.steps, optimizer.skipped)}


def check_place(final: Path) -> None:
    """Raise UsageError if the path holds anything that `save` did not write, because it would be lost."""
    if not exists(final):
        return
    if not is_folder(final):
        raise UsageError(f"save: {final}: is a file; use another folder")
    surplus = sorted({path.name for path in final.iterdir()} - FILES)
    if surplus:
        raise UsageError(
            f"save: {final}: expected a new folder, or one with only {folders.MODEL} and "
            f"{folders.OPTIMIZER}, which are replaced; found {some(surplus)}; use another folder"
        )


def load(folder: FOLDER, module: ShardedModule, optimizer: ShardedOptimizer) -> int:
    """Fill parameters, moments and step counts from files that `save` wrote. Return the step. Collective.

    Each rank reads its own slices, so the number of ranks and the strategy may differ from those of the save.
    A resumed run computes the same bits as an uninterrupted run. Learning rates and weight decay are those of
    `optimizer`. Accumulated gradients are dropped. The step counts skipped steps of `ShardedAdamW.step` too.

    Raises on all ranks: ValueError for a module or optimizer of another class, or another module's optimizer;
    UsageError, before anything is filled, if files are damaged, do not match, or have other names or shapes
    than the module; and UsageError for values that are not finite, possibly after some were filled.
    """
    instance("load: module", module, ShardedModule, "a ShardedModule")
    comm = module.comm

    def open_files() -> tuple[sound.CheckpointFiles, Facts]:
        check("load", folder, module, optimizer)
        files = sound.open_checkpoint(Path(folder))
        state.expect_tensors(files.model, {name: param.shape for name, param in module.params.items()})
        state.check_tensors(files, optimizer)
        return files, {"the checkpoint": files.state.metadata[sound.ID]}

    def verify() -> tuple[None, Facts]:
        sound.check_digests(files, comm.rank, comm.size)
        return None, {}

    files: sound.CheckpointFiles = agreed(comm, "load", open_files)
    agreed(comm, "load", verify)
    module.drop_gathered()
    module.zero_gradients()
    progress: state.TrainingProgress = agreed(comm, "load", lambda: (state.load_state(files, optimizer), {}))
    return progress.step


def check(name: str, folder: Any, module: ShardedModule, optimizer: Any) -> None:
    """Raise ValueError for invalid arguments or quantized parameters, UsageError for an average in FP64."""
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise ValueError(f"{name}: folder: expected the name of a folder, got {came(folder)}")
    example = "a ShardedAdamW, whose moments are saved too (parameters only: state_dict, load_state_dict)"
    instance(f"{name}: optimizer", optimizer, ShardedOptimizer, example)
    if optimizer.module is not module:
        raise ValueError(f"{name}: expected the optimizer of this module, got one of another module")
    if module.precision is FP64 and optimizer.ema is not None:
        raise UsageError(f"{name}: ema: files hold averages in float32: use an optimizer without ema in FP64")
    if any(isinstance(unit.unit, BlockUnit) for unit in module.units):
        raise ValueError(f"{name}: expected float parameters, got quantized ones (stored)")
