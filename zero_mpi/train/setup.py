"""Builds a run from what `resolve` found: transport, sharded module, optimizer, and where to resume."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.mixes import MIXES, known_type
from zero_mpi.checkpoint.state import Description, Read, TrainingProgress, finite, finite_blocks, load_state
from zero_mpi.checkpoint.weights import WeightSource, weights_digest
from zero_mpi.comm import Comm
from zero_mpi.comm.guarded import CheckedComm, NumberedComm
from zero_mpi.config.bounds import rate_scales
from zero_mpi.config.optimizer import auxiliary_scales, rules_of
from zero_mpi.config.settings import Config
from zero_mpi.data import Corpus, HeldOut, StepLoader, Tokenizer
from zero_mpi.data.documents import Stream
from zero_mpi.data.token_spans import TokenSpans
from zero_mpi.device.types import Array
from zero_mpi.errors import JobError, UsageError, writing
from zero_mpi.files.atomic import write_whole
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import read_file
from zero_mpi.launch.world import World
from zero_mpi.models import ModelConfig
from zero_mpi.models.lora import is_adapter
from zero_mpi.nn.low_rank import FIRST
from zero_mpi.ops import ggml
from zero_mpi.ops.rounding import round_to
from zero_mpi.optim.optimizer import ShardedOptimizer
from zero_mpi.sharding import ShardedModule
from zero_mpi.sharding.host_masters import STATE
from zero_mpi.sharding.precision import BFLOAT16
from zero_mpi.telemetry import log
from zero_mpi.train.distill import DistillObjective
from zero_mpi.train.objective import Objective
from zero_mpi.train.preferences import PreferenceObjective
from zero_mpi.train.resolve import RunSpec, make_loaders
from zero_mpi.train.transport import choose_transport, layout_config

Place = tuple[str, int, str]  # side of the corpus, number of the part, name of what its stream has there
SIDES = ("parts", "held_out")
KEPT, MOST_KEPT = "reference.bin", 1 << 40  # what an objective keeps of the initial model; bytes


def share_corpus(comm: Comm, corpus: Corpus | None, notes: list[str]) -> Corpus:
    """Return rank 0's corpus on every rank, so all train on the same text. Collective; adds to `notes`."""
    about, own = None, dict[Place, Any]()
    if corpus is not None:
        own = {
            (side, number, name): array
            for side in SIDES
            for number, part in enumerate(getattr(corpus, side))
            for name, array in vars(part.stream).items()
        }
        bare = {side: tuple(part._replace(stream=None) for part in getattr(corpus, side)) for side in SIDES}
        about = {place: described(x) for place, x in own.items() if x is not None}, vars(corpus) | bare
    found, rest = comm.broadcast_object(about)
    in_files = {place: x for place, x in found.items() if isinstance(x, TokenSpans)}
    if in_files and (problem := unseen(comm, in_files)):
        notes.append(problem)
        found |= {place: (spans.dtype.str, spans.size) for place, spans in in_files.items()}
    streams: dict[tuple[str, int], dict[str, Any]] = {}
    for place, what in found.items():
        *side, name = place
        streams.setdefault(tuple(side), {})[name] = (
            what
            if isinstance(what, TokenSpans)
            else broadcast(comm, own.get(place), what, f"corpus {' '.join(map(str, place))}")
        )
    for side in SIDES:
        rest[side] = tuple(
            part._replace(stream=Stream(**streams[side, number])) for number, part in enumerate(rest[side])
        )
    return Corpus(**rest)


def described(ids: Any) -> TokenSpans | tuple[str, int]:
    """Return what other ranks must know of an array before they have it, or all of one kept in files."""
    return ids if isinstance(ids, TokenSpans) and ids.stays else (ids.dtype.str, ids.size)


def unseen(comm: Comm, in_files: dict[Place, TokenSpans]) -> str:
    """Return why ranks cannot read the files themselves, alike on all; "" where they can. Collective."""
    told = comm.allgather_object((platform.node(), looked_at(in_files)))
    expected = told[0][1]
    rank = next((rank for rank, (_, seen) in enumerate(told) if seen != expected), None)
    if rank is None:
        return ""
    nbytes = sum(spans.size * spans.dtype.itemsize for spans in in_files.values())
    path = next(span.path for spans in in_files.values() for span in spans.spans)
    return (
        f"rank {rank} on {told[rank][0]} cannot see {shown(path)}, which rank 0 on {told[0][0]} reads. So "
        f"each rank keeps {nbytes / 2**20:,.0f} MiB of token ids; to save memory, use a folder that all "
        "hosts share (for text: ZERO_MPI_CACHE)"
    )


def looked_at(in_files: dict[Place, TokenSpans]) -> str:
    """Return a fingerprint of the ids' files as this rank sees them; empty if they cannot be read."""
    try:
        return " ".join(in_files[place].sampled_digest().hex() for place in sorted(in_files))
    except JobError:
        return ""


def broadcast(comm: Comm, own: Any, described: tuple[str, int], label: str) -> np.ndarray[Any, Any]:
    """Return an array of rank 0, held or in files, as one that every rank holds. Collective."""
    kind, size = described
    if comm.size == 1 and isinstance(own, np.ndarray):
        return np.ascontiguousarray(own)
    array = own.held() if isinstance(own, TokenSpans) else np.empty(size, kind)
    if isinstance(own, np.ndarray):
        array[...] = own
    comm.broadcast(array, label=label).wait()
    return array


@dataclass
class Session:
    """Run that is ready to continue from `progress`.

    transport   description of the transport between ranks; empty for a single rank
    nodes       number of nodes that the transport tells apart, 0 where it does not
    resumed     folder of the checkpoint, if the run resumes from one
    weights     files of the initial weights, by setting
    """

    config: Config
    comm: Comm
    out: Path
    corpus: Corpus
    model: ModelConfig
    module: ShardedModule
    optimizer: ShardedOptimizer
    loader: StepLoader
    held_out: HeldOut
    objective: Objective
    description: Description
    progress: TrainingProgress
    tokenizer: Tokenizer | None
    notes: list[str]
    transport: str = ""
    nodes: int = 0
    resumed: Path | None = None
    weights: Mapping[str, WeightSource | None] = field(default_factory=dict)


def build(world: World, spec: RunSpec) -> Session:
    """Return the resolved run, ready for its next step. Collective; raises UsageError on all ranks."""
    phase, notes, config = log.Phases(), list(spec.notes), spec.config
    chosen = choose_transport(world, config, spec.model, notes)
    comm, nodes = chosen.comm, getattr(chosen.comm, "topology", None)
    phase("transport")
    if config.check_collectives:
        comm = CheckedComm(comm)
    if comm.size > 1:
        comm = NumberedComm(comm)
    corpus = share_corpus(comm, spec.corpus, notes)
    loader, held_out = make_loaders(config, corpus)
    phase("text to all ranks")
    module = make_module(config, spec.model, comm)
    optimizer = make_optimizer(config, module, spec.model)
    phase("module and optimizer")
    objective = make_objective(config, module, loader, held_out, corpus.parts[0].stream)
    progress = fill(world, optimizer, spec, objective)
    phase("parameters")
    return Session(
        config=config,
        comm=comm,
        out=spec.out,
        corpus=corpus,
        model=spec.model,
        module=module,
        optimizer=optimizer,
        loader=loader,
        held_out=held_out,
        objective=objective,
        description=spec.description,
        progress=progress,
        tokenizer=spec.tokenizer,
        notes=notes,
        transport=chosen.text,
        nodes=0 if nodes is None else nodes.nodes,
        resumed=None if spec.checkpoint is None else spec.checkpoint.folder,
        weights=spec.weights,
    )


def fill_parameters(world: World, optimizer: ShardedOptimizer, spec: RunSpec) -> TrainingProgress:
    """Fill parameters, and states from a checkpoint; return progress. Collective; raises UsageError."""
    start, init, module = spec.checkpoint, spec.init, optimizer.module
    base = [name for name in module.params if not is_adapter(name)]
    if init is not None and (start is None or spec.model.lora is not None):
        loose = set(base) - spec.model.stored.keys()
        read = finite(init.read, init.path)
        kinds = {} if spec.model.lora is None else dict(spec.model.lora.rounding)
        seen = {name: kind for name, kind in kinds.items() if name + FIRST not in module.params}
        world.together(lambda: module.load_slices(rounded(read, seen), loose))
    if isinstance(init, GGUFFile) and spec.model.stored:
        world.together(lambda: module.load_stored(finite_blocks(init)))
    if start is not None:
        progress: TrainingProgress = world.together(lambda: load_state(start.files, optimizer))
        return progress
    adapter = spec.adapter
    if adapter is not None:
        world.together(lambda: module.load_slices(finite(adapter.read, adapter.path), adapter.tensors))
    elif init is None or spec.model.lora is not None:
        module.initialize(spec.config.seed, None if init is None else set(module.params) - set(base))
    optimizer.begin()
    return TrainingProgress()


def rounded(read: Read, kinds: Mapping[str, str]) -> Read:
    """Return a read(name, start, stop) that rounds tensors to their types; slices end between blocks."""

    def rounding(name: str, start: int, stop: int) -> Array:
        values = read(name, start, stop)
        if name in kinds:
            round_to(kinds[name], values, values)
        return values

    return rounding


def make_module(config: Config, model: ModelConfig, comm: Comm) -> ShardedModule:
    """Return the sharded module of the flags; raises UsageError for an impossible strategy or offload."""
    stages, masters = model.stages(config.recompute), config.offload == STATE
    scales = auxiliary_scales(model, config.balance_loss, config.z_loss, config.lora is not None)
    layout = layout_config(config, model)
    return ShardedModule(stages, comm, layout, offload_masters=masters, auxiliary=scales)


def fill(world: World, optimizer: ShardedOptimizer, spec: RunSpec, objective: Objective) -> TrainingProgress:
    """Fill parameters and states, and give the objective what it keeps of the initial model; return progress.

    That is read from the run's folder, or computed from the initial weights. Collective; raises UsageError.
    """
    if objective.keeps:
        weights = [None if file is None else weights_digest(file) for file in spec.weights.values()]
        about = repr((sorted(spec.description.settings.items()), weights)).encode()
        kept = world.from_root(lambda: read_kept(spec.out / KEPT, about))
        if kept is None:
            fill_parameters(world, optimizer, replace(spec, checkpoint=None))
            kept = objective.keep()
            world.on_root(lambda: write_kept(spec.out / KEPT, about, kept))
        objective.use(kept)
    return fill_parameters(world, optimizer, spec)


def read_kept(path: Path, about: bytes) -> np.ndarray[Any, Any] | None:
    """Return what is kept of this initial model; None if it is not there or damaged."""
    with suppress(OSError, UsageError):
        raw = read_file(path, MOST_KEPT)
        if hashlib.sha256(about + raw[32:]).digest() == raw[:32]:
            return np.frombuffer(raw, "<f8", offset=32)
    return None


def write_kept(path: Path, about: bytes, kept: np.ndarray[Any, Any]) -> None:
    """Write what is kept of the initial model, if the run has a folder."""
    data = kept.astype("<f8").tobytes()
    if path.parent.is_dir():
        with writing():
            write_whole(path, hashlib.sha256(about + data).digest() + data)


def make_objective(
    config: Config, module: ShardedModule, loader: StepLoader, held_out: HeldOut, stream: Stream
) -> Objective:
    """Return the loss of the flags."""
    if config.teacher is not None:
        return DistillObjective(module, loader, stream, config.teacher, config.teacher_weight)
    if config.preference is None:
        return Objective(module, loader)
    starts_at_zero = config.lora is not None and config.lora_init is None
    return PreferenceObjective(module, loader, held_out, config.preference, starts_at_zero)


def make_optimizer(config: Config, module: ShardedModule, model: ModelConfig) -> ShardedOptimizer:
    """Return the optimizer of the flags; raises UsageError if its states cannot be offloaded."""
    betas = (config.beta1, config.beta2)
    if known_type(config.qat or "") in MIXES:
        ggml.library(f"--qat {config.qat}")
    products = BFLOAT16 if module.precision.compute == BFLOAT16 else np.float32
    return ShardedOptimizer(
        module,
        rules_of(config.optimizer, model, betas, config.eps, products, None if config.lora else config.qat),
        lr=config.lr,
        weight_decay=config.weight_decay,
        lr_scale=rate_scales(config.lr_scale),
        offload=config.offload,
        ema=config.ema,
    )
