"""Makes a run of what `resolve` has found: transport, sharded module, optimizer, and where to go on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.state import Description, TrainingProgress, finite, finite_blocks, load_state
from zero_mpi.checkpoint.weights import WeightSource
from zero_mpi.comm import Comm
from zero_mpi.comm.checked import CheckedComm
from zero_mpi.comm.guarded import NumberedComm
from zero_mpi.config.bounds import rate_scales
from zero_mpi.config.settings import Config
from zero_mpi.data import Corpus, HeldOut, StepLoader, Tokenizer
from zero_mpi.launch.world import World
from zero_mpi.models import ModelConfig
from zero_mpi.models.lora import is_adapter
from zero_mpi.sharding import ShardedModule, strategy_named
from zero_mpi.sharding.offload import STATE
from zero_mpi.sharding.optimizer import ShardedAdamW
from zero_mpi.sharding.precision import precision_named
from zero_mpi.telemetry import log
from zero_mpi.train.resolve import RunSpec, make_loaders
from zero_mpi.train.shared_corpus import share_corpus
from zero_mpi.train.transport import choose_transport


@dataclass
class Session:
    """A run that is ready to go on from `progress`.

    transport   what carries between ranks, for people; empty for a lone rank
    nodes       that the transport tells apart, 0 where it does not
    resumed     the checkpoint's folder, if the run goes on from one
    weights     the files that it begins from, by their settings
    """

    config: Config
    comm: Comm
    out: Path
    corpus: Corpus
    model: ModelConfig
    module: ShardedModule
    optimizer: ShardedAdamW
    loader: StepLoader
    held_out: HeldOut
    description: Description
    progress: TrainingProgress
    tokenizer: Tokenizer | None
    notes: list[str]
    transport: str = ""
    nodes: int = 0
    resumed: Path | None = None
    weights: Mapping[str, WeightSource | None] = field(default_factory=dict)


def build(world: World, spec: RunSpec) -> Session:
    """The run that was resolved, ready for its next step. Collective; raises UsageError on all ranks."""
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
    optimizer = make_optimizer(config, module)
    phase("module and optimizer")
    progress = fill_parameters(world, optimizer, spec)
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
        description=spec.description,
        progress=progress,
        tokenizer=spec.tokenizer,
        notes=notes,
        transport=chosen.text,
        nodes=0 if nodes is None else nodes.nodes,
        resumed=None if spec.checkpoint is None else spec.checkpoint.folder,
        weights=spec.weights,
    )


def fill_parameters(world: World, optimizer: ShardedAdamW, spec: RunSpec) -> TrainingProgress:
    """Parameters, and with a checkpoint the moments and how far it is. Collective; raises UsageError."""
    start, init, module = spec.checkpoint, spec.init, optimizer.module
    base = [name for name in module.params if not is_adapter(name)]
    if init is not None and (start is None or spec.model.lora is not None):
        loose = set(base) - spec.model.stored.keys()
        world.together(lambda: module.load_slices(finite(init.read, init.path), loose))
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
    return TrainingProgress()


def make_module(config: Config, model: ModelConfig, comm: Comm) -> ShardedModule:
    """The sharded module of the flags; raises UsageError for a strategy or offload that cannot be had."""
    return ShardedModule(
        model.stages(config.recompute),
        comm,
        strategy_named(config.strategy),
        prefetch=config.prefetch,
        bucket_mb=config.bucket_mb,
        frozen=config.frozen,
        precision=precision_named(config.precision, config.reduce_dtype),
        offload_masters=config.offload == STATE,
        stored=model.stored,
    )


def make_optimizer(config: Config, module: ShardedModule) -> ShardedAdamW:
    """The optimizer of the flags; raises UsageError where moments cannot be offloaded."""
    return ShardedAdamW(
        module,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        lr_scale=rate_scales(config.lr_scale),
        offload=config.offload,
        ema=config.ema,
    )
