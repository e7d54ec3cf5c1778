"""A training state as a pair of files, at any number of ranks.

`model.gguf` holds the model and nothing else, so llama.cpp opens it as it is. `optimizer.gguf` holds the
moments of each tensor in full shape, where the run stood, and the sha256 of every tensor of the model file,
which binds the two. Rank 0 writes; one unit at a time is brought to it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi.arrays import Array
from zero_mpi.checkpoint import manager
from zero_mpi.checkpoint.reader import GGUFFile
from zero_mpi.checkpoint.writer import GGUFStream
from zero_mpi.comm import Comm
from zero_mpi.errors import UsageError
from zero_mpi.optim import Moments, ShardedAdamW
from zero_mpi.sharding.shard import ShardedUnit
from zero_mpi.sharding.state import fill, parameters_of

FIRST, SECOND = "optimizer.adam.first_moments.", "optimizer.adam.second_moments."
ARCHITECTURE = "zero_mpi"  # of optimizer.gguf: llama.cpp refuses it politely
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Progress:
    """Where a run stands: steps done, tokens seen, and steps left out for a norm that was not finite."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    updates: int = 0


@dataclass(frozen=True)
class Description:
    """What a checkpoint says beside its tensors.

    model: the GGUF keys of architecture and tokenizer; settings: what must not change on resume; machine:
    what may change but moves bits (threads, library versions).
    """

    architecture: str
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]


def save_checkpoint(
    out: Path, optimizer: ShardedAdamW, progress: Progress, description: Description, keep: int = 0
) -> Path:
    """Write OUT/step-NNNNNNNN and point OUT/latest to it. Collective. Returns the folder.

    Raises OSError, with the file's name, on rank 0 where writing fails; what was there before stays.
    """
    root = optimizer.module.comm.rank == 0
    folder = manager.begin(out, progress.step) if root else Path()
    checksums = write_model(folder / manager.MODEL, optimizer, progress, description)
    write_optimizer(folder / manager.OPTIMIZER, optimizer, progress, description, checksums)
    if root:
        manager.publish(out, progress.step, folder, keep)
    optimizer.module.comm.barrier()
    return manager.step_folder(out, progress.step)


def write_model(
    path: Path, optimizer: ShardedAdamW, progress: Progress, description: Description
) -> dict[str, str]:
    """Write the parameters as a GGUF model. Collective. Returns each tensor's sha256 on rank 0."""
    module = optimizer.module
    metadata = {
        **description.model,
        "general.file_type": np.uint32(0),
        "training.iteration_count": np.uint64(progress.step),
        "training.token_count": np.uint64(progress.tokens),
        "training.checkpoint_id": checkpoint_id(progress, description),
    }
    shapes = [(name, param.shape) for name, param in module.params.items()]
    tensors = module.collect(parameters_of)
    return write_stream(path, module.comm, description.architecture, metadata, shapes, tensors)


def write_optimizer(
    path: Path,
    optimizer: ShardedAdamW,
    progress: Progress,
    description: Description,
    checksums: Mapping[str, str],
) -> None:
    """Write the moments, in full shape, and the state of the run. Collective."""
    module = optimizer.module
    names = [name for name in module.params if module.is_trainable(name)]
    metadata = {
        "optimizer.type": "adamw",
        "optimizer.file_version": np.uint32(FORMAT_VERSION),
        "optimizer.iteration_count": np.uint64(progress.updates),
        "training.iteration_count": np.uint64(progress.step),
        "training.token_count": np.uint64(progress.tokens),
        "training.skipped_count": np.uint64(progress.skipped),
        "training.checkpoint_id": checkpoint_id(progress, description),
        "training.settings": json.dumps(description.settings, sort_keys=True),
        "training.machine": json.dumps(description.machine, sort_keys=True),
        "training.model_sha256": [f"{digest} {name}" for name, digest in checksums.items()],
    }
    shapes = [(prefix + name, module.params[name].shape) for prefix in (FIRST, SECOND) for name in names]
    tensors = (
        (prefix + name, array)
        for prefix, source in ((FIRST, first_of(optimizer)), (SECOND, second_of(optimizer)))
        for name, array in module.collect(source, names)
    )
    write_stream(path, module.comm, ARCHITECTURE, metadata, shapes, tensors)


def write_stream(
    path: Path,
    comm: Comm,
    architecture: str,
    metadata: Mapping[str, Any],
    shapes: list[tuple[str, tuple[int, ...]]],
    tensors: Iterator[tuple[str, Array | None]],
) -> dict[str, str]:
    """Rank 0 writes the tensors as they come; the others only take part in bringing them there."""
    if comm.rank != 0:
        for _ in tensors:
            pass
        return {}
    with GGUFStream(path, architecture, dict(metadata), shapes) as stream:
        for name, array in tensors:
            assert array is not None, "rank 0 is where tensors are collected"
            stream.write(name, array)
    return stream.checksums


def checkpoint_id(progress: Progress, description: Description) -> str:
    """The same in both files of a pair, and for the same run at the same step: no clock, no chance."""
    text = json.dumps([asdict(progress), dict(description.settings)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def first_of(optimizer: ShardedAdamW) -> Callable[[ShardedUnit], tuple[Array, bool]]:
    """A source for `collect`: the first moments."""
    return lambda unit: (optimizer.moments[unit.name].first, not unit.strategy.shards_moments)


def second_of(optimizer: ShardedAdamW) -> Callable[[ShardedUnit], tuple[Array, bool]]:
    """A source for `collect`: the second moments."""
    return lambda unit: (optimizer.moments[unit.name].second, not unit.strategy.shards_moments)


def open_checkpoint(folder: Path) -> tuple[GGUFFile, GGUFFile]:
    """The indices of both files; raises UsageError if either is not sound or they are not a pair."""
    model, state = GGUFFile.open(folder / manager.MODEL), GGUFFile.open(folder / manager.OPTIMIZER)
    ids = [file.metadata.get("training.checkpoint_id") for file in (model, state)]
    if ids[0] is None or ids[0] != ids[1]:
        raise UsageError(
            f"{folder}: {manager.MODEL} and {manager.OPTIMIZER} are not of one checkpoint "
            f"(ids {ids[0]} and {ids[1]})"
        )
    return model, state


def check_pair(model: GGUFFile, state: GGUFFile) -> None:
    """Raise UsageError unless the model file has the very bytes that were written beside the state."""
    for entry in state.metadata.get("training.model_sha256", []):
        digest, _, name = entry.partition(" ")
        if hashlib.sha256(model.tensor(name).data).hexdigest() != digest:
            raise UsageError(
                f"{model.path}: tensor {name} is not the one that {manager.OPTIMIZER} belongs to"
            )


def read_json(state: GGUFFile, key: str) -> dict[str, Any]:
    """The object that a key holds as JSON ("training.settings"); raises UsageError if it is not there."""
    try:
        value = json.loads(state.metadata[key])
    except (KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{state.path}: the key {key} is missing or broken") from error
    if not isinstance(value, dict):
        raise UsageError(f"{state.path}: the key {key} holds {type(value).__name__}, expected an object")
    return value


def check_tensors(state: GGUFFile, optimizer: ShardedAdamW) -> None:
    """Raise UsageError unless the file holds both moments of every trained parameter in its shape."""
    module = optimizer.module
    for name, param in module.params.items():
        for prefix in (FIRST, SECOND) if module.is_trainable(name) else ():
            info = state.tensors.get(prefix + name)
            if info is None or info.shape != param.shape:
                found = "missing" if info is None else f"of shape {info.shape}"
                raise UsageError(f"{state.path}: {prefix + name} is {found}, expected shape {param.shape}")


def load_checkpoint(folder: Path, optimizer: ShardedAdamW) -> Progress:
    """Fill parameters and moments from a checkpoint, each rank its own slices. Returns where the run stood.

    Raises UsageError if the files are not sound. Not collective, but every rank must call it.
    """
    model, state = open_checkpoint(folder)
    check_tensors(state, optimizer)
    optimizer.module.load_slices(model.read)
    for unit in optimizer.units:
        load_moments(unit, optimizer.moments[unit.name], state)
    count = {key: int(state.metadata.get(key, 0)) for key in COUNTS}
    progress = Progress(*(count[key] for key in COUNTS))
    optimizer.steps, optimizer.skipped = progress.updates, progress.skipped
    return progress


COUNTS = (  # in the order of Progress
    "training.iteration_count",
    "training.token_count",
    "training.skipped_count",
    "optimizer.iteration_count",
)


def load_moments(unit: ShardedUnit, moments: Moments, state: GGUFFile) -> None:
    """Fill one unit's moments from the file."""
    part = unit.updated[2]
    for prefix, target in ((FIRST, moments.first), (SECOND, moments.second)):
        fill(unit, target, part, partial(read_moment, state, prefix))


def read_moment(state: GGUFFile, prefix: str, name: str, start: int, stop: int) -> Array:
    """Elements [start, stop) of a parameter's moment."""
    return state.read(prefix + name, start, stop)
