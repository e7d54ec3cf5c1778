"""Keys, tensors and reading of a training state's files, which are identical at any number of ranks.

`model.gguf` holds only the model, so llama.cpp opens it without conversion. The same is true of `ema.gguf`,
which exists if the run keeps a moving average. `optimizer.gguf` holds the optimizer states of each tensor in
full shape, and the progress of the run. `checkpoint.sound` checks the files against each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from zero_mpi import device
from zero_mpi.arguments import some
from zero_mpi.checkpoint import folders, sound
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.tensor_file import CHUNK
from zero_mpi.checkpoint.weights import WeightSource, keys_of
from zero_mpi.comm import Comm, Partition
from zero_mpi.device import Marker
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import GGUFKeys
from zero_mpi.ops.block_kinds import BLOCK_KINDS
from zero_mpi.optim.optimizer import ShardedOptimizer
from zero_mpi.sharding.module import ShardedUnit, fill
from zero_mpi.sharding.parameters import ReadBytes
from zero_mpi.sharding.precision import FLOAT32, FP64
from zero_mpi.sharding.unit import Unit

MASTER = "optimizer.master."  # prefix of names of float64 parameters; model.gguf has them in float32
Run = tuple[str, int, Array]  # name of a tensor, index of the first element, elements
LOSS, STEP, SINCE = (f"training.best_{name}" for name in ("val_loss", "iteration", "evaluations_since"))


@dataclass(frozen=True)
class Best:
    """The lowest validation loss of a run so far."""

    loss: float = math.inf  # in nats; infinite before the first evaluation
    step: int = 0  # steps done when this loss was measured; 0: none was measured
    since: int = 0  # number of evaluations after this one

    def after(self, step: int, loss: float) -> Best:
        """Return the best loss after an evaluation that gave `loss` after `step`. NaN is never better."""
        return Best(loss, step) if loss < self.loss else replace(self, since=self.since + 1)

    def is_of(self, step: int) -> bool:
        """Return whether the lowest loss comes from the evaluation after `step`."""
        return 0 < step == self.step

    def is_used_up(self, patience: int | None) -> bool:
        """Return whether the last `patience` evaluations did not improve the loss; None: no limit."""
        return patience is not None and self.since >= patience

    def keys(self) -> dict[str, Any]:
        """Return these values as keys of a checkpoint; {} if there was no evaluation."""
        loss = {LOSS: np.float64(self.loss)} if self.step else {}
        return {} if self == Best() else {**loss, STEP: np.uint64(self.step), SINCE: np.uint64(self.since)}


def read_best(keys: GGUFKeys) -> Best:
    loss = keys.number(LOSS)
    return Best(math.inf if loss is None else loss, keys.integer(STEP) or 0, keys.integer(SINCE) or 0)


ARCHITECTURE = "zero_mpi"  # with this value, llama.cpp refuses optimizer.gguf with a clear message
MOST_SETTINGS = 1 << 20  # maximum number of characters of the JSON text in a key


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a run. `skipped` is the number of steps whose gradient norm was not finite."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    updates: int = 0
    samples: int = 0
    scale_exponent: int | None = None  # exponent of the loss scale (`sharding.precision`); None: no scale
    scale_steps: int = 0
    best: Best = field(default_factory=Best)


COUNTS = {  # key -> attribute of TrainingProgress
    "training.iteration_count": "step",
    "training.token_count": "tokens",
    "training.skipped_count": "skipped",
    "optimizer.iteration_count": "updates",
    "training.sample_count": "samples",
}
SCALE_COUNTS = {"training.loss_scale_exponent": "scale_exponent", "training.loss_scale_steps": "scale_steps"}


@dataclass(frozen=True)
class Description:
    """Facts about a run that its checkpoints record, apart from tensors and progress."""

    architecture: str
    model: Mapping[str, Any]  # GGUF keys of the architecture and the tokenizer
    settings: Mapping[str, Any]  # settings that a resume must keep
    machine: Mapping[str, Any]  # facts that may change the last bits (threads, versions of libraries)
    plan: Mapping[str, Any] = field(default_factory=dict)  # settings that a resume may change (rates)
    constants: Mapping[str, Array] = field(default_factory=dict)  # tensors of the model that are not trained
    weights: str = folders.MODEL  # file name of the model or adapters

    @property
    def is_adapter(self) -> bool:
        return self.weights == folders.ADAPTER


# ------------------------------------------------------------------------------------------------- keys

STATE = "optimizer"  # role of optimizer.gguf


def stamp(
    progress: TrainingProgress,
    description: Description,
    digests: Mapping[str, Mapping[str, str]],
    optimizer: str = "adamw",
) -> dict[str, dict[str, Any]]:
    """Return the keys of each file by role, given digests of its tensors. The last role is `optimizer`."""
    shared = {
        sound.STATE_DIGEST: sound.digest_of_files(digests),
        "training.iteration_count": np.uint64(progress.step),
        "training.token_count": np.uint64(progress.tokens),
    }
    model = {**description.model, "general.file_type": np.uint32(0), **shared}
    files = {
        role: {**model, sound.TENSOR_DIGESTS: sound.as_lines(entries)} for role, entries in digests.items()
    }
    scale_counts = {} if progress.scale_exponent is None else SCALE_COUNTS
    counts = {key: np.uint64(getattr(progress, name)) for key, name in {**COUNTS, **scale_counts}.items()}
    texts = {
        f"training.{name}": json.dumps(dict(getattr(description, name)), sort_keys=True)
        for name in ("settings", "machine", "plan")
    }
    head = {"optimizer.type": optimizer, "optimizer.file_version": np.uint32(sound.FORMAT_VERSION)}
    lines = {sound.TENSOR_DIGESTS: sound.as_lines(digests[STATE])}
    lines |= {key: sound.as_lines(digests[role]) for role, key in sound.DIGESTS.items() if role in digests}
    files[STATE] = {**head, **counts, **progress.best.keys(), **shared, **texts, **lines}
    name = sound.signature(*files.values())
    return {role: {**keys, sound.ID: name} for role, keys in files.items()}


def model_tensors(optimizer: ShardedOptimizer, description: Description) -> list[tuple[str, tuple[int, ...]]]:
    """Return (name, shape) of each tensor in the weights file, in order."""
    module, full = optimizer.module, not description.is_adapter
    params = [(name, p.shape) for name, p in module.params.items() if full or module.is_trainable(name)]
    return params + [(name, array.shape) for name, array in description.constants.items()]


def state_tensors(optimizer: ShardedOptimizer) -> list[tuple[str, tuple[int, ...], GGMLQuantizationType]]:
    """Return (name, shape, type) of each tensor in optimizer.gguf, in order."""
    params, holders = optimizer.module.params, dict[str, set[str]]()
    wide = optimizer.module.precision is FP64
    kind = GGMLQuantizationType.F64 if wide else GGMLQuantizationType.F32
    for state, _, names in optimizer.kept_states():
        holders.setdefault(state, set()).update(names)
    masters = [(f"{MASTER}{name}", param.shape, kind) for name, param in params.items() if wide]
    return masters + [
        (f"optimizer.{state}.{name}", param.shape, kind)
        for state, names in holders.items()
        for name, param in params.items()
        if name in names
    ]


# ------------------------------------------------------------------------------------------------ slices


@dataclass(frozen=True)
class Contribution:
    """One rank's slice of a unit's values. A tensor in the file is named `prefix` + the parameter's name."""

    prefix: str
    unit: Unit
    partition: Partition
    values: Array
    names: frozenset[str] | None = None  # parameters that have this value; None: all

    def on_host(self, part: slice) -> Array:
        """Return a range of this rank's slice in host memory, as a view, or as a copy from the GPU."""
        return device.in_use().to_host(self.values[part])

    def runs(self, start: int, values: Array) -> Iterator[Run]:
        """Split `values`, the unit's buffer from `start` on, into runs. A run is part of one tensor."""
        for segment in self.unit.segments(slice(start, start + values.size)):
            if self.names is not None and segment.name not in self.names:
                continue
            yield self.prefix + segment.name, segment.offset, values[segment.where]

    @property
    def by_pieces(self) -> bool:
        """True if slices begin and end at borders of pieces, so that each rank can hash its own slice."""
        return bool(self.unit.quantum * self.values.itemsize % sound.PIECE_BYTES == 0)


def parameters_of(optimizer: ShardedOptimizer, trained: bool = False) -> list[Contribution]:
    """Return the float32 slices of all parameters, or only of `trained` ones. Waits for pending gathers."""
    units = optimizer.units if trained else optimizer.module.units
    for unit in units:
        unit.wait_gather()
    parts = masters(optimizer.module.comm, "", units)
    return [replace(part, values=part.values.astype(FLOAT32, copy=False)) for part in parts]


def masters(comm: Comm, prefix: str, units: Iterable[ShardedUnit]) -> list[Contribution]:
    """Return views of this rank's slices of the parameters of units, float32 or float64."""
    triples = [(unit, unit.parameters.master, unit.parameters.master_part) for unit in units]
    return [contribution(comm, prefix, *triple) for triple in triples]


def averages_of(optimizer: ShardedOptimizer, trained: bool = False) -> list[Contribution]:
    """Return views of the slices of averages, and also of frozen parameters unless `trained`."""
    comm, values = optimizer.module.comm, optimizer.averages()
    frozen = [] if trained else [unit for unit in optimizer.module.units if not unit.unit.trainable]
    for unit in frozen:
        unit.wait_gather()
    units = [(unit, values[unit.name], unit.updated[2]) for unit in optimizer.units]
    return masters(comm, "", frozen) + [contribution(comm, "", *triple) for triple in units]


def states_of(optimizer: ShardedOptimizer) -> list[Contribution]:
    """Return views of the slices of float64 masters, if there are any, followed by each optimizer state."""
    units = optimizer.module.units if optimizer.module.precision is FP64 else []
    return masters(optimizer.module.comm, MASTER, units) + [
        replace(contribution(optimizer.module.comm, f"optimizer.{state}.", unit, values, part), names=names)
        for state, unit, names in optimizer.kept_states()
        for values, part in [(optimizer.states[unit.name][state], optimizer.state_part(unit))]
    ]


def contribution(comm: Comm, prefix: str, unit: ShardedUnit, values: Array, part: slice) -> Contribution:
    """Return this rank's slice of `values`, which hold `part` of the unit: the slice or the full unit.

    If every node has all slices, only the ranks of the first node contribute them.
    """
    ends = unit.partition.bounds[1:]
    first = unit.part.start - part.start
    shard = values[first : first + unit.part.stop - unit.part.start]
    partition = replace(unit.partition, parts=comm.size, ends=ends + ends[-1:] * (comm.size - len(ends)))
    return Contribution(prefix, unit.unit, partition, shard if comm.rank < len(ends) else shard[:0])


class Snapshot:
    """Copies of contributions, so that training can continue during a save. Buffers are reused."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str, str], Array] = {}
        self.complete: Any = Marker()  # event that is done once the device has made the last copies

    def take(self, role: str, contributions: Sequence[Contribution]) -> list[Contribution]:
        """Return copies of the contributions to a file. Their values are valid once `complete` is done."""
        copies = [replace(source, values=self._buffer(role, source)) for source in contributions]
        pairs = [(copy.values, source.values) for copy, source in zip(copies, contributions, strict=True)]
        self.complete = device.in_use().fetch(pairs)
        return copies

    def _buffer(self, role: str, contribution: Contribution) -> Array:
        key, values = (role, contribution.prefix, contribution.unit.name), contribution.values
        if key not in self._buffers:
            self._buffers[key] = device.in_use().pinned(values.nbytes).view(values.dtype)
        return self._buffers[key]


# ----------------------------------------------------------------------------------------------- reading


def read_progress(state: GGUFFile) -> TrainingProgress:
    """Return the progress of the run. Raise UsageError if the file lacks a count."""
    fields = COUNTS | {key: name for key, name in SCALE_COUNTS.items() if key in state.metadata}
    keys, counts = keys_of(state), dict[str, int]()
    for key, name in fields.items():
        if (count := keys.integer(key)) is None:
            raise UsageError(f"{state.path}: the key {key} is missing or not a count")
        counts[name] = count
    return TrainingProgress(**counts, best=read_best(keys))


def read_json(state: GGUFFile, key: str) -> dict[str, Any]:
    """Return the JSON object in a key ("training.settings"). Raise UsageError if it is missing or invalid."""
    raw = keys_of(state).text(key) or ""
    if len(raw) > MOST_SETTINGS:
        limit = f"at most {MOST_SETTINGS} characters"
        raise UsageError(f"{state.path}: the key {key}: expected {limit}, found {len(raw)}")
    try:
        value = json.loads(raw)
        json.dumps(value)  # raises RecursionError for too many nested levels
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{state.path}: the key {key} is missing or broken") from error
    if not isinstance(value, dict):
        raise UsageError(f"{state.path}: the key {key} holds {type(value).__name__}, expected an object")
    return value


def check_tensors(files: sound.CheckpointFiles, optimizer: ShardedOptimizer) -> None:
    """Raise UsageError unless the files hold the tensors of `state_tensors`, and averages if, and only if,
    the optimizer keeps them."""
    state, average = files.state, files.average
    if (average is None) != (optimizer.ema is None):
        problem = "no moving average, expected one" if average is None else "a moving average, expected none"
        raise UsageError(f"{state.path.parent}: found {problem}: use the ema setting of the saved run")
    expected = state_tensors(optimizer)
    expect_tensors(state, {name: shape for name, shape, _ in expected}, {kind for *_, kind in expected})
    if average is not None:
        expect_tensors(average, {name: spec.shape for name, spec in files.model.tensors.items()})


def expect_tensors(
    file: WeightSource, shapes: Mapping[str, tuple[int, ...]], kinds: Collection[GGMLQuantizationType] = ()
) -> None:
    """Raise UsageError unless a file holds tensors with exactly these names and shapes, and no others.

    `kinds`: permitted types; () permits all types.
    """
    missing = [name for name in shapes if name not in file.tensors]
    surplus = [name for name in file.tensors if name not in shapes]
    if missing or surplus:
        raise UsageError(
            f"{file.path}: expected the tensors of this module; missing {some(missing)}; surplus "
            f"{some(surplus)}; create the module as it was saved"
        )
    for name, shape in shapes.items():
        spec = file.tensors[name]
        if spec.shape != shape or spec.type not in (kinds or [spec.type]):
            actual = f"found {spec.shape} of type {spec.type.name}"
            raise UsageError(f"{file.path}: {name}: expected shape {shape}, {actual}")


Read = Callable[[str, int, int], Array]


def finite(read: Read, path: Path) -> Read:
    """Return a function read(name, start, stop) that raises UsageError for values that are not finite."""

    def checked(name: str, start: int, stop: int) -> Array:
        values = read(name, start, stop)
        if not np.isfinite(values).all():
            raise UsageError(f"{path}: tensor {name} holds values that are not finite")
        return values

    return checked


def read_state(file: GGUFFile, name: str, start: int, stop: int) -> Array:
    """Return elements [start, stop) of an optimizer state, as float64 if the file has float64."""
    if file.tensors[name].type != GGMLQuantizationType.F64:
        return file.read(name, start, stop)
    out = np.empty(stop - start)
    file.read_bytes(name, out.itemsize * start, out.view(np.uint8))
    return out


def load_state(files: sound.CheckpointFiles, optimizer: ShardedOptimizer) -> TrainingProgress:
    """Fill this rank's slices of parameters and moments from a checkpoint. Return the progress of the run.

    Call it on all ranks. Raises UsageError if the files are damaged.
    """
    check_tensors(files, optimizer)
    model, state = files.model, files.state
    module, names = optimizer.module, model.tensors if model.path.name == folders.ADAPTER else None
    read = finite(partial(read_state, state), state.path)
    if module.precision is FP64:
        module.load_slices(lambda name, *at: read(MASTER + name, *at))
    else:
        module.load_slices(finite(model.read, model.path), names)
    for key, unit, holders in optimizer.kept_states():
        target, part = optimizer.states[unit.name][key], optimizer.state_part(unit)
        fill(unit, target, part, lambda name, *at, key=key: read(f"optimizer.{key}.{name}", *at), holders)
    for unit in optimizer.units:
        if optimizer.ema is not None and files.average is not None:
            read_average = finite(files.average.read, files.average.path)
            fill(unit, optimizer.average[unit.name], unit.updated[2], read_average)
    progress, scale = read_progress(state), module.loss_scale
    optimizer.steps, optimizer.skipped = progress.updates, progress.skipped
    if scale.dynamic and progress.scale_exponent is not None:
        scale.exponent, scale.good_steps = progress.scale_exponent, progress.scale_steps
    return progress


def finite_blocks(file: GGUFFile) -> ReadBytes:
    """Return a function read(name, start, out) of stored bytes that raises UsageError for inf or NaN."""
    values = finite(file.read, file.path)

    def read(name: str, start: int, out: Array) -> None:
        kind, size = BLOCK_KINDS[file.tensors[name].type.name], file.tensors[name].size
        first, last = start // kind.nbytes, -(-(start + out.size) // kind.nbytes)
        for at in range(first * kind.elements, last * kind.elements, CHUNK):
            values(name, at, min(at + CHUNK, last * kind.elements, size))
        file.read_bytes(name, start, out)

    return read
