"""Builds a run from its configuration: data, model, sharded module, optimizer, and where to go on from.

What only one rank need look at (folders, files) rank 0 looks at; a fault is raised on all ranks alike.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from zero_mpi import device, environment, ops
from zero_mpi.checkpoint.huggingface.folder import HuggingFaceFolder
from zero_mpi.checkpoint.state import Description, TrainingProgress, finite, load_state
from zero_mpi.checkpoint.weights import WeightSource
from zero_mpi.comm import Comm
from zero_mpi.comm.checked import CheckedComm
from zero_mpi.config.bounds import thread_count
from zero_mpi.config.defaults import settled
from zero_mpi.config.inputs import (
    BYTE,
    carried_keys,
    carrying,
    choose_tokenizer,
    model_from_flags,
    open_init,
    passed_over,
    read_model,
)
from zero_mpi.config.remarks import remarks, threads_within
from zero_mpi.config.settings import Config
from zero_mpi.data import Corpus, EvalLoader, StepLoader, Tokenizer, Windows, load_corpus
from zero_mpi.errors import UsageError
from zero_mpi.launch.consistency import check_inputs
from zero_mpi.launch.world import World
from zero_mpi.models import ModelConfig
from zero_mpi.sharding import ShardedModule, strategy_named
from zero_mpi.sharding.offload import STATE
from zero_mpi.sharding.optimizer import ShardedAdamW
from zero_mpi.sharding.precision import precision_named
from zero_mpi.telemetry import log
from zero_mpi.train import same_bits
from zero_mpi.train.description import describe, what_was_read
from zero_mpi.train.resume import Start, check_resume, find_start
from zero_mpi.train.transport import choose_transport


@dataclass
class Session:
    """A run that is ready to go on from `progress`.

    transport   what carries between ranks, for people; empty for a lone rank
    nodes       that the transport tells apart, 0 where it does not
    resumed     the checkpoint's folder, if the run goes on from one
    """

    config: Config
    comm: Comm
    out: Path
    corpus: Corpus
    model: ModelConfig
    module: ShardedModule
    optimizer: ShardedAdamW
    loader: StepLoader
    held_out: EvalLoader
    description: Description
    progress: TrainingProgress
    tokenizer: Tokenizer | None
    notes: list[str]
    transport: str = ""
    nodes: int = 0
    resumed: Path | None = None


def prepare(world: World, config: Config) -> Session:
    """The session of a configuration. Collective; raises UsageError on all ranks alike."""
    phase, threads = log.Phases(), world.together(lambda: set_threads(config))
    out, notes = Path(config.out), list[str]()
    start = find_start(world, config, out, notes)
    phase("checkpoints looked at")
    init, tokenizer, model = open_model(world, config, notes)
    check_inputs(world, what_was_read(config, start, init, model, tokenizer))
    config = settled(config, model)  # on all ranks alike, for they have read the same model
    phase("model and tokenizer")
    chosen = choose_transport(world, config, model, notes)
    comm, nodes = chosen.comm, getattr(chosen.comm, "topology", None)
    phase("transport")
    if config.check_collectives:
        comm = CheckedComm(comm)
    corpus = share_corpus(world, comm, world.on_root(lambda: read_corpus(config, model, tokenizer)))
    phase("data")
    module = make_module(config, model, comm)
    optimizer = make_optimizer(config, module)
    phase("module and optimizer")
    machine = try_operations(world, config, threads, notes)
    phase("operations")
    description = world.together(lambda: describe(config, model, corpus, tokenizer, init, machine))
    notes += map(log.Caution, [*corpus.notes, *passed_over(init)])
    if start is not None:
        world.on_root(lambda: check_resume(start, description, notes))
    progress = fill_parameters(world, optimizer, start, init, config.seed)
    if start is not None:
        notes.append(f"resuming from {start.folder} at step {progress.step}")
    phase("parameters")
    return Session(
        config=config,
        comm=comm,
        out=out,
        corpus=corpus,
        model=model,
        module=module,
        optimizer=optimizer,
        loader=StepLoader(
            Windows(corpus.train, config.context),
            batch_size=config.batch_size,
            micro_batch=config.micro_batch,
            seed=config.seed,
        ),
        held_out=EvalLoader(Windows(corpus.val, config.context), config.micro_batch, config.eval_windows),
        description=description,
        progress=progress,
        tokenizer=tokenizer,
        notes=notes,
        transport=chosen.text,
        nodes=0 if nodes is None else nodes.nodes,
        resumed=None if start is None else start.folder,
    )


def fill_parameters(
    world: World, optimizer: ShardedAdamW, start: Start | None, init: WeightSource | None, seed: int
) -> TrainingProgress:
    """Parameters, and with a checkpoint the moments and how far it is. Collective; raises UsageError."""
    progress = TrainingProgress()
    if start is not None:
        progress = world.together(lambda: load_state(start.model, start.state, optimizer))
    elif init is not None:
        world.together(lambda: optimizer.module.load_slices(finite(init.read, init.path)))
    else:
        optimizer.module.initialize(seed)
    return progress


def open_model(
    world: World, config: Config, notes: list[str]
) -> tuple[WeightSource | None, Tokenizer | None, ModelConfig]:
    """What `--init` names, the tokenizer of the text, the model's sizes. Collective; raises UsageError.

    `notes` is told what flags do here that may not be what was meant.
    """
    init: WeightSource | None = world.together(lambda: open_init(config))
    given: ModelConfig | None = world.together(lambda: init and read_model(init))
    tokenizer: Tokenizer | None = world.together(lambda: choose_tokenizer(config, init, given))
    model: ModelConfig = given or world.together(lambda: model_from_flags(config, tokenizer))
    if config.context > model.context_length:
        raise UsageError(f"--context {config.context}: the model of --init has {model.context_length}")
    notes += remarks(config, is_text=tokenizer is not None)
    if tokenizer is None and isinstance(init, HuggingFaceFolder):  # data of ids
        init = carrying(init, world.share(world.on_root(partial(carried_keys, init, model))))
    return init, tokenizer, model


def set_threads(config: Config) -> int:
    """Set the BLAS threads of this rank and return their number; exact mode has one unless told otherwise."""
    wanted = threads_within(thread_count(config.threads))
    if wanted is None and environment.threads_were_set:
        return blas_threads()
    if wanted == 0:
        wanted = environment.cores_per_rank()
    threadpool_limits(wanted or 1)
    return wanted or 1


def choose_device(world: World, name: str) -> None:
    """Compute on what `--device` names from now on (`device.use`). Collective."""
    on_node = world.rank_on_node()
    world.together(lambda: device.use(name, on_node))


def blas_threads() -> int:
    """The threads that BLAS has now."""
    from threadpoolctl import threadpool_info

    return max((pool["num_threads"] for pool in threadpool_info()), default=1)


def read_corpus(config: Config, model: ModelConfig, tokenizer: Tokenizer | None) -> Corpus:
    """The data of the flags."""
    return load_corpus(
        config.data,
        val_fraction=config.val_fraction,
        context=config.context,
        seed=config.seed,
        tokenizer=tokenizer,
        vocab_size=model.vocab_size,
        any_bytes=config.tokenizer == BYTE,
    )


def share_corpus(world: World, comm: Comm, corpus: Corpus | None) -> Corpus:
    """Rank 0's corpus on every rank: all train on the same text, and files are read once. Collective."""
    about = None
    if corpus is not None:
        parts = {
            name: (getattr(corpus, name).dtype.str, getattr(corpus, name).size) for name in ("train", "val")
        }
        rest = {f.name: getattr(corpus, f.name) for f in dataclasses.fields(Corpus) if f.name not in parts}
        about = parts, rest
    parts, rest = comm.broadcast_object(about)
    arrays: dict[str, Any] = {}
    for name, (kind, size) in parts.items():
        array = np.empty(size, kind)
        if corpus is not None and comm.size == 1:
            array = np.ascontiguousarray(getattr(corpus, name))
        elif corpus is not None:  # a copy like the others': a mapped file could change under one rank only
            array[...] = getattr(corpus, name)
        comm.broadcast(array, label=f"corpus {name}").wait()
        arrays[name] = array
    return Corpus(**arrays, **rest)


def make_module(config: Config, model: ModelConfig, comm: Comm) -> ShardedModule:
    """The sharded module of the flags; a frozen pattern that matches nothing is bad usage."""
    try:
        module = ShardedModule(
            model.stages(config.recompute),
            comm,
            strategy_named(config.strategy),
            prefetch=config.prefetch,
            bucket_mb=config.bucket_mb,
            frozen=config.freeze,
            precision=precision_named(config.precision, config.reduce_dtype),
            offload_masters=config.offload == STATE,
        )
    except UsageError:  # of the strategy
        raise
    except ValueError as error:
        raise UsageError(f"--freeze: {error}") from error
    if not any(unit.unit.trainable for unit in module.units):
        raise UsageError(f"--freeze {' '.join(config.freeze)}: leaves no parameter to train")
    return module


def make_optimizer(config: Config, module: ShardedModule) -> ShardedAdamW:
    """The optimizer of the flags; raises UsageError where moments cannot be offloaded."""
    return ShardedAdamW(
        module,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        offload=config.offload,
    )


def try_operations(world: World, config: Config, threads: int, notes: list[str]) -> dict[str, Any]:
    """Compile or load the operations and see that they have the same bits on all ranks. Collective.

    Returns what rank 0 computes with, for one description of all: where bits agree, names may differ. Raises
    UsageError on all ranks where bits differ in exact mode.
    """
    world.node_by_node(lambda: ops.prepare(announce if world.rank == 0 else None))
    mine = world.together(lambda: same_bits.machine(threads))
    same_bits.check_bits(world, mine, config.reduction == "exact", notes)
    machine: dict[str, Any] = world.share(mine)
    return machine


def announce(text: str) -> None:
    """Say at once what takes a while."""
    log.info("%s", text)
