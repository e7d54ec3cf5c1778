"""Save and load any module and its optimizer: one folder with the files of a checkpoint.

The files do not depend on ranks or strategy: tensors have their full shapes and are found by name. The layers
are not in the files; before loading, build the same module.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from zero_mpi.arguments import came, instance, some
from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.gguf.header import pack_file
from zero_mpi.checkpoint.parallel_write import rank_0_of
from zero_mpi.checkpoint.saver import on_root, parts_of, write_files
from zero_mpi.checkpoint.sound import ID, CheckpointFiles, check_digests, open_checkpoint
from zero_mpi.checkpoint.state import (
    ARCHITECTURE,
    Description,
    TrainingProgress,
    check_tensors,
    load_state,
    model_tensors,
    state_tensors,
)
from zero_mpi.checkpoint.weights import WeightSource
from zero_mpi.comm.agree import Facts, agreed
from zero_mpi.errors import JobError, UsageError
from zero_mpi.files.open import exists, is_folder
from zero_mpi.nn.layer import Param
from zero_mpi.optim.optimizer import ShardedOptimizer
from zero_mpi.sharding.module import ShardedModule
from zero_mpi.sharding.precision import FP64
from zero_mpi.sharding.unit import BlockUnit

OURS = {folders.MODEL, folders.OPTIMIZER, folders.AVERAGE}
FOLDER = str | os.PathLike[str]


def save(folder: FOLDER, module: ShardedModule, optimizer: ShardedOptimizer) -> Path:
    """Write parameters, moments and counts of steps into `folder`, for `load`. Collective.

    The folder is written next to its target and renamed: at any moment it is complete or as it was before. It
    must be new, or one that `save` wrote, which is replaced. It holds `model.gguf`, `optimizer.gguf` and, if
    the optimizer keeps an average, `ema.gguf`, float32. Gradients are not saved: call it between steps.
    Returns the folder's path.

    Raises on all ranks: ValueError for a module or optimizer of another class, or another module's optimizer;
    UsageError for a folder with other files, for names and shapes that GGUF does not take (names of up to 33
    bytes, up to 4 dimensions) and if ranks differ; JobError if the system refuses to write.
    """
    instance("save: module", module, ShardedModule, "a ShardedModule")
    description = Description(ARCHITECTURE, {}, {}, {})
    final = Path(agreed(module.comm, "save", partial(look, folder, module, optimizer, description)))
    comm = module.comm.background()
    final = Path(comm.broadcast_object(final))
    steps = optimizer.steps + optimizer.skipped
    scale = module.loss_scale
    progress = TrainingProgress(
        steps,
        skipped=optimizer.skipped,
        updates=optimizer.steps,
        scale_exponent=scale.recorded,
        scale_steps=scale.good_steps,
    )
    parts = parts_of(optimizer, description)
    try:
        on_root(comm, partial(begin, final))
        write_files(rank_0_of(comm), folders.beside(final), optimizer, parts, (progress, description))
        on_root(comm, partial(folders.publish_alone, final))
    except JobError as error:
        if comm.rank == 0:
            shutil.rmtree(folders.beside(final), ignore_errors=True)
        raise JobError(f"save: {error}; {final} is unchanged") from error
    finally:
        comm.close()
    return final


def begin(final: Path) -> None:
    """Make the temporary folder into which `save` writes."""
    folders.restore(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    folders.begin_beside(final)


def look(folder: Any, module: ShardedModule, optimizer: Any, description: Description) -> tuple[str, Facts]:
    """Return the folder without links, and the facts that ranks must share; raise ValueError if invalid."""
    check("save", folder, module, optimizer)
    for tensors in (model_tensors(optimizer, description), state_tensors(optimizer)):
        pack_file(ARCHITECTURE, {}, tensors)
    final = os.path.realpath(folder)
    if module.comm.rank == 0:
        check_place(Path(final))
    return final, {"the folder": os.fspath(folder), "the steps": (optimizer.steps, optimizer.skipped)}


def check_place(final: Path) -> None:
    """Raise UsageError if the place holds anything that `save` did not write: it must not be replaced."""
    if not exists(final):
        return
    if not is_folder(final):
        raise UsageError(f"save: {final}: is a file; use another folder")
    surplus = sorted({path.name for path in final.iterdir()} - OURS)
    if surplus:
        raise UsageError(
            f"save: {final}: expected a new folder, or one with only {folders.MODEL} and "
            f"{folders.OPTIMIZER}, which are replaced; found {some(surplus)}; use another folder"
        )


def load(folder: FOLDER, module: ShardedModule, optimizer: ShardedOptimizer) -> int:
    """Fill parameters, moments and counts of steps from files of `save`. Return the steps. Collective.

    Each rank reads its own slices, at any number of ranks and under any strategy: a run continues with the
    bits of an uninterrupted one. Rates and decay are those of `optimizer`. Accumulated gradients are dropped.
    The steps are all calls of `ShardedAdamW.step`, including skipped ones.

    Raises on all ranks: ValueError for a module or optimizer of another class, or another module's optimizer;
    UsageError for files that are damaged, not a pair, or hold other names or shapes than the module, before
    anything is filled; and UsageError for values that are not finite, possibly after some were filled.
    """
    instance("load: module", module, ShardedModule, "a ShardedModule")
    comm = module.comm

    def opened() -> tuple[CheckpointFiles, Facts]:
        check("load", folder, module, optimizer)
        files = open_checkpoint(Path(folder))
        for file in files.weights.values():
            check_model(file, dict(module.params))
        check_tensors(files, optimizer)
        return files, {"the checkpoint": files.state.metadata[ID]}

    def sound() -> tuple[None, Facts]:
        check_digests(files, comm.rank, comm.size)
        return None, {}

    files: CheckpointFiles = agreed(comm, "load", opened)
    agreed(comm, "load", sound)
    module.drop_gathered()
    module.zero_gradients()
    progress: TrainingProgress = agreed(comm, "load", lambda: (load_state(files, optimizer), {}))
    return progress.step


def check(what: str, folder: Any, module: ShardedModule, optimizer: Any) -> None:
    """Raise ValueError for invalid arguments."""
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise ValueError(f"{what}: folder: expected the name of a folder, got {came(folder)}")
    example = "a ShardedAdamW, whose moments are saved too (parameters only: state_dict, load_state_dict)"
    instance(f"{what}: optimizer", optimizer, ShardedOptimizer, example)
    if optimizer.module is not module:
        raise ValueError(f"{what}: expected the optimizer of this module, got one of another module")
    if module.precision is FP64 and optimizer.average is not None:
        raise UsageError(f"{what}: ema: files hold averages in float32: make it without ema in FP64")
    if any(isinstance(unit.unit, BlockUnit) for unit in module.units):
        raise ValueError(f"{what}: expected float parameters, got quantized ones (stored)")


def check_model(model: WeightSource, params: dict[str, Param]) -> None:
    """Raise UsageError unless the file holds the module's parameters in their shapes, and nothing else."""
    missing = [name for name in params if name not in model.tensors]
    surplus = [name for name in model.tensors if name not in params]
    if missing or surplus:
        raise UsageError(
            f"{model.path}: expected the parameters of the module; missing {some(missing)}; surplus "
            f"{some(surplus)}; create the module as it was saved"
        )
    for name, param in params.items():
        found = tuple(model.tensors[name].shape)
        if found != param.shape:
            raise UsageError(f"{model.path}: {name}: expected shape {param.shape}, found {found}")
