"""A training state as a pair of files, at any number of ranks: what they say, and how they are read.

`model.gguf` holds the model and nothing else, so llama.cpp opens it as it is. `optimizer.gguf` holds the
moments of each tensor in full shape and where the run stood. Both hold the same id and the digests of their
tensors, optimizer.gguf also those of the model: what one bit changed, or halves of two checkpoints, shows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.best import Best, read_best
from zero_mpi.checkpoint.checksum import (
    as_lines,
    digest_of_pieces,
    digest_of_state,
    from_lines,
    piece_digests,
)
from zero_mpi.checkpoint.gguf.header import ARCHITECTURE_KEY, pack_key
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.shards import FIRST, SECOND
from zero_mpi.checkpoint.weights import WeightSource
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show
from zero_mpi.files.gguf_keys import GGUFKeys
from zero_mpi.sharding.optimizer import Moments, ShardedAdamW
from zero_mpi.sharding.sharded_state import fill
from zero_mpi.sharding.sharded_unit import ShardedUnit

ARCHITECTURE = "zero_mpi"  # of optimizer.gguf: llama.cpp refuses it politely
FORMAT_VERSION = 2
ID, STATE_DIGEST = "training.checkpoint_id", "training.state_digest"
TENSOR_DIGESTS, MODEL_DIGESTS = "training.tensor_digests", "training.model_digests"
READ_AT_ONCE = 1 << 22  # bytes digested at a time
MOST_SETTINGS = 1 << 20  # letters of JSON in a key


@dataclass(frozen=True)
class TrainingProgress:
    """Where a run stands: steps done, tokens and samples seen, and steps left out for a norm not finite.

    scale_*: of the loss scale (`sharding.loss_scale`); best: evaluation; both where there is one.
    """

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    updates: int = 0
    samples: int = 0
    scale_exponent: int = 0
    scale_steps: int = 0
    best: Best = field(default_factory=Best)


COUNTS = {  # key -> name in TrainingProgress
    "training.iteration_count": "step",
    "training.token_count": "tokens",
    "training.skipped_count": "skipped",
    "optimizer.iteration_count": "updates",
    "training.sample_count": "samples",
}
SCALE_COUNTS = {"training.loss_scale_exponent": "scale_exponent", "training.loss_scale_steps": "scale_steps"}


@dataclass(frozen=True)
class Description:
    """What a checkpoint says beside its tensors.

    model: the GGUF keys of architecture and tokenizer; settings: what must not change on resume; machine:
    what may change but moves bits (threads, library versions); plan: what may change and makes the rest of
    the run another one (learning rates, steps); constants: tensors of the model that are not trained;
    weights: the file of the model, or of adapters alone.
    """

    architecture: str
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    plan: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Array] = field(default_factory=dict)
    weights: str = folders.MODEL

    @property
    def is_adapter(self) -> bool:
        """Whether that is what was trained alone."""
        return self.weights == folders.ADAPTER


# ------------------------------------------------------------------------------------------------- keys


def stamp(
    progress: TrainingProgress, description: Description, model: Mapping[str, str], moments: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys of both files, from the digests of their tensors."""
    shared = {
        STATE_DIGEST: digest_of_state({**model, **moments}),
        "training.iteration_count": np.uint64(progress.step),
        "training.token_count": np.uint64(progress.tokens),
    }
    own = {**description.model, "general.file_type": np.uint32(0), **shared, TENSOR_DIGESTS: as_lines(model)}
    scaled = SCALE_COUNTS if progress.scale_exponent or progress.scale_steps else {}
    counts = {key: np.uint64(getattr(progress, name)) for key, name in {**COUNTS, **scaled}.items()}
    texts = {
        f"training.{name}": json.dumps(dict(getattr(description, name)), sort_keys=True)
        for name in ("settings", "machine", "plan")
    }
    head = {"optimizer.type": "adamw", "optimizer.file_version": np.uint32(FORMAT_VERSION)}
    digests = {TENSOR_DIGESTS: as_lines(moments), MODEL_DIGESTS: as_lines(model)}
    rest = {**head, **counts, **progress.best.keys(), **shared, **texts, **digests}
    name = signature(own, rest)
    return {**own, ID: name}, {**rest, ID: name}


def model_tensors(optimizer: ShardedAdamW, description: Description) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the tensors of the file of weights in the file's order."""
    module, all_of = optimizer.module, not description.is_adapter
    kept = [(name, p.shape) for name, p in module.params.items() if all_of or module.is_trainable(name)]
    return kept + [(name, array.shape) for name, array in description.constants.items()]


def moment_tensors(optimizer: ShardedAdamW) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the tensors of optimizer.gguf in the file's order."""
    module = optimizer.module
    names = [name for name in module.params if module.is_trainable(name)]
    return [(prefix + name, module.params[name].shape) for prefix in (FIRST, SECOND) for name in names]


# ---------------------------------------------------------------------------------------------- checking


def open_checkpoint(folder: Path) -> tuple[GGUFFile, GGUFFile]:
    """The indices of both files; raises UsageError if either is not sound or they are not a pair."""
    model, state = GGUFFile.open(folders.weights_in(folder)), GGUFFile.open(folder / folders.OPTIMIZER)
    check_pair(model, state)
    return model, state


def keys_of(file: WeightSource) -> GGUFKeys:
    """The keys of a file, read with their types."""
    return GGUFKeys(file.metadata, str(file.path))


def check_pair(model: WeightSource, state: GGUFFile) -> None:
    """Raise UsageError unless the files are two halves of one checkpoint that say what was written."""
    version = keys_of(state).whole("optimizer.file_version")
    if version != FORMAT_VERSION:
        raise UsageError(
            f"{state.path}: expected a training state of version {FORMAT_VERSION}, found {version}"
        )
    ids = [keys_of(file).text(ID) for file in (model, state)]
    if None in ids or ids[0] != ids[1]:
        raise UsageError(
            f"{state.path.parent}: {model.path.name} and {folders.OPTIMIZER} are not of one checkpoint "
            f"(ids {show(str(ids[0]))} and {show(str(ids[1]))})"
        )
    check_signature(model, state)


def signature(model: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """The id of a checkpoint: a hash of all other keys of both files, digests of tensors included."""
    total = hashlib.sha256()
    for keys in (model, state):
        for key in sorted(keys.keys() - {ID, ARCHITECTURE_KEY}):
            total.update(pack_key(key, keys[key]))
    return total.hexdigest()[:32]


def check_signature(model: WeightSource, state: GGUFFile) -> None:
    """Raise UsageError unless both files say what was written: sizes, tokenizer, progress, settings, ..."""
    if signature(model.metadata, state.metadata) != state.metadata[ID]:
        raise UsageError(
            f"{state.path.parent}: {model.path.name} or {folders.OPTIMIZER} has a key that is not the one "
            "that was written"
        )
    if from_lines(keys_of(model).texts(TENSOR_DIGESTS)) != from_lines(keys_of(state).texts(MODEL_DIGESTS)):
        raise UsageError(f"{model.path}: the key {TENSOR_DIGESTS} is not the one that was written")


def read_progress(state: GGUFFile) -> TrainingProgress:
    """Where the run stood; raises UsageError if a count is missing."""
    known = COUNTS | {key: name for key, name in SCALE_COUNTS.items() if key in state.metadata}
    counts = {name: read_count(state, key) for key, name in known.items()}
    return TrainingProgress(**counts, best=read_best(keys_of(state)))


def check_digests(model: GGUFFile, state: GGUFFile, rank: int = 0, ranks: int = 1) -> None:
    """Raise UsageError unless both files hold the tensors that were written; this rank's share of them.

    All `ranks` together look at every tensor once.
    """
    expected = [
        (file, name, digests.get(name))
        for file, digests in (
            (model, from_lines(keys_of(state).texts(MODEL_DIGESTS))),
            (state, from_lines(keys_of(state).texts(TENSOR_DIGESTS))),
        )
        for name in [*file.tensors, *(name for name in digests if name not in file.tensors)]
    ]
    for file, name, digest in expected[rank::ranks]:
        if name not in file.tensors or file_digest(file, name) != digest:
            raise UsageError(
                f"{file.path}: tensor {show(name)} is not the one that was written (its checksum differs)"
            )


def file_digest(file: GGUFFile, name: str) -> str:
    """The digest of a tensor as it stands in a file."""
    return digest_of_pieces(piece_digests(piece) for piece in file.raw_pieces(name, READ_AT_ONCE))


def read_json(state: GGUFFile, key: str) -> dict[str, Any]:
    """The object that a key holds as JSON ("training.settings"); raises UsageError if it is not there."""
    raw = keys_of(state).text(key) or ""
    try:
        value = json.loads(raw if len(raw) <= MOST_SETTINGS else "")
        json.dumps(value)  # nested too deeply for that is broken as well
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{state.path}: the key {key} is missing or broken") from error
    if not isinstance(value, dict):
        raise UsageError(f"{state.path}: the key {key} holds {type(value).__name__}, expected an object")
    return value


def check_tensors(state: GGUFFile, optimizer: ShardedAdamW) -> None:
    """Raise UsageError unless the file holds both moments of each trained parameter, and nothing else."""
    expected = dict(moment_tensors(optimizer))
    for name, shape in expected.items():
        info = state.tensors.get(name)
        if info is None or info.shape != shape:
            found = "missing" if info is None else f"of shape {info.shape}"
            raise UsageError(f"{state.path}: {name} is {found}, expected shape {shape}")
    surplus = [name for name in state.tensors if name not in expected]
    if surplus:
        raise UsageError(f"{state.path}: {surplus[0]} is surplus: this run trains no such tensor")


# ----------------------------------------------------------------------------------------------- reading

Read = Callable[[str, int, int], Array]


def finite(read: Read, path: Path) -> Read:
    """read(name, start, stop), which raises UsageError for values that are not finite."""

    def checked(name: str, start: int, stop: int) -> Array:
        values = read(name, start, stop)
        if not np.isfinite(values).all():
            raise UsageError(f"{path}: tensor {name} holds values that are not finite")
        return values

    return checked


def load_checkpoint(folder: Path, optimizer: ShardedAdamW) -> TrainingProgress:
    """Fill parameters and moments from a checkpoint, each rank its own slices. Returns where the run stood.

    Raises UsageError if the files are not sound. Not collective, but every rank must call it.
    """
    return load_state(*open_checkpoint(folder), optimizer)


def load_state(model: GGUFFile, state: GGUFFile, optimizer: ShardedAdamW) -> TrainingProgress:
    """`load_checkpoint` from files whose indices were read already."""
    check_tensors(state, optimizer)
    module, names = optimizer.module, model.tensors if model.path.name == folders.ADAPTER else None
    module.load_slices(finite(model.read, model.path), names)
    for unit in optimizer.units:
        load_moments(unit, optimizer.moments[unit.name], state)
    progress = read_progress(state)
    optimizer.steps, optimizer.skipped = progress.updates, progress.skipped
    scale = module.loss_scale
    if scale.dynamic and any(key in state.metadata for key in SCALE_COUNTS):
        scale.exponent, scale.good_steps = progress.scale_exponent, progress.scale_steps
    return progress


def read_count(state: GGUFFile, key: str) -> int:
    """A count of the state; raises UsageError if it is not there."""
    value = keys_of(state).whole(key)
    if value is None:
        raise UsageError(f"{state.path}: the key {key} is missing or no count")
    return value


def load_moments(unit: ShardedUnit, moments: Moments, state: GGUFFile) -> None:
    """Fill one unit's moments from the file."""
    read = finite(state.read, state.path)
    for prefix, target in ((FIRST, moments.first), (SECOND, moments.second)):
        fill(unit, target, unit.updated[2], lambda name, *part, prefix=prefix: read(prefix + name, *part))
