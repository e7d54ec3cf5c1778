"""Builds a run from its specification: transport, sharded module, optimizer and progress."""

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import repeat, zip_longest
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.checkpoint.mixes import MIXES, known_type
from zero_mpi.checkpoint.state import Read, TrainingProgress, finite, finite_blocks, load_state
from zero_mpi.checkpoint.weights import gguf_of, weights_digest
from zero_mpi.comm import Comm, SerialComm, kinds
from zero_mpi.comm.gpu import select
from zero_mpi.comm.guarded import CheckedComm, NumberedComm
from zero_mpi.config.bounds import rate_scales
from zero_mpi.config.optimizer import auxiliary_scales, rules_of, whole_matrices
from zero_mpi.config.settings import Config
from zero_mpi.data import Corpus, HeldOut, StepLoader
from zero_mpi.data.documents import Stream, TokenSpans
from zero_mpi.device.types import Array
from zero_mpi.errors import JobError, UsageError, writing
from zero_mpi.files.atomic import write_whole
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import read_file
from zero_mpi.launch.consistency import own_source
from zero_mpi.launch.world import World
from zero_mpi.models import ModelConfig
from zero_mpi.nn.adapters import FIRST
from zero_mpi.nn.linear import is_adapter
from zero_mpi.ops import ggml
from zero_mpi.ops.rounding import round_to
from zero_mpi.optim.optimizer import ShardedOptimizer
from zero_mpi.sharding.layout import LayoutConfig, lay_out
from zero_mpi.sharding.module import ShardedModule
from zero_mpi.sharding.parameters import STATE
from zero_mpi.sharding.precision import BFLOAT16, precision_named
from zero_mpi.sharding.strategy import strategy_named
from zero_mpi.telemetry import log
from zero_mpi.train.objective import DistillObjective, Objective, PreferenceObjective
from zero_mpi.train.resolve import RunSpec, make_loaders

SIDES = ("parts", "held_out")
REFERENCE_FILE, MOST_REFERENCE = "reference.bin", 1 << 40  # the reference's log-probabilities; maximum bytes
NOT_SHARED = (
    "without shared memory the ranks of a node exchange messages, which is slower; enlarge /dev/shm "
    "(containers: --shm-size)"
)


# ------------------------------------------------------------------------------------------- transport


@dataclass(frozen=True)
class TransportChoice:
    """Result of choosing a transport. reason: why it was chosen; fast: whether MPI may compute sums."""

    comm: Comm
    reason: str = ""
    fast: bool = False

    @property
    def text(self) -> str:
        """Description of the transport for messages; "" for a single rank."""
        lone = self.comm.size == 1 and self.comm.kind in (kinds.SERIAL, kinds.MPI)
        if lone and not self.reason:
            return ""
        exact = ", still exact" if self.comm.exact and self.fast else ""
        return self.comm.about + exact + (f", because {self.reason}" if self.reason else "")


def choose_transport(world: World, config: Config, model: ModelConfig, notes: list[str]) -> TransportChoice:
    """Return the transport; add warnings to `notes`. Raise UsageError if --transport fails. Collective."""
    exact, on_gpu = config.reduction == "exact", device.in_use().name == "cuda"
    if on_gpu:
        comm, reason = select.choose(config.transport, world.size, exact)
        return TransportChoice(comm, reason, not exact)
    kinds.check_flag(config.transport, on_gpu)
    if world.mpi is None or (world.size == 1 and config.transport == kinds.AUTO):
        return TransportChoice(SerialComm())
    from zero_mpi.comm.nodes.comm import Needs, NodesComm
    from zero_mpi.comm.nodes.hybrid import MPIComm
    from zero_mpi.comm.shared.comm import SharedComm
    from zero_mpi.comm.shared.memory import NodesApart, NoSharedMemory

    if config.transport == kinds.MPI.flag:
        return TransportChoice(MPIComm(exact=exact))
    layout = lay_out(model.stages(config.recompute), layout_config(config, model))

    def on_nodes_of(ranks: int) -> Needs:
        if layout.config.strategy.within_nodes or not layout.config.strategy.shards_moments:
            return Needs(full=layout.full(ranks), buffers=layout.buffers)
        return Needs(buffers=layout.buffers, gathers=layout.gathers)

    try:
        try:
            full = layout.full(world.size)
            return TransportChoice(SharedComm(full=full, buffers=layout.buffers), fast=not exact)
        except NodesApart:
            return TransportChoice(NodesComm(needs=on_nodes_of), fast=not exact)
    except NoSharedMemory as error:
        if not isinstance(error, NodesApart):
            notes.append(log.Caution(NOT_SHARED))
        elif config.transport != kinds.AUTO:
            text = f"--transport {config.transport}: {error}; use --transport auto or mpi"
            raise UsageError(text) from error
        return TransportChoice(MPIComm(exact=exact), str(error))


def layout_config(config: Config, model: ModelConfig) -> LayoutConfig:
    """Return the settings, taken from the flags, for the layout of a model over ranks."""
    return LayoutConfig(
        strategy_named(config.strategy),
        prefetch=config.stages_ahead(device.in_use().name == "cuda"),
        bucket_mb=config.bucket_mb,
        frozen=config.frozen,
        precision=precision_named(config.precision, config.reduce_dtype),
        stored=model.stored,
        whole=whole_matrices(config.optimizer, model),
    )


# ------------------------------------------------------------------------------------------- data


def share_corpus(comm: Comm, corpus: Corpus | None, notes: list[str]) -> Corpus:
    """Return rank 0's corpus on every rank, so that all train on the same text. Collective.

    Arrays that stay in files are not sent if all ranks can read the files; a note says if they cannot.
    """
    header, local = None, list[Any]()
    if corpus is not None:
        parts = [part for side in SIDES for part in getattr(corpus, side)]
        local = [array for part in parts for array in vars(part.stream).values()]
        header = with_streams(corpus, repeat(None)), [*map(array_form, local)]
    rest, forms = comm.broadcast_object(header)
    in_files = [form for form in forms if isinstance(form, TokenSpans)]
    if in_files and (problem := find_unreadable(comm, in_files)):
        notes.append(problem)
        forms = [(form.dtype.str, form.size) if isinstance(form, TokenSpans) else form for form in forms]
    arrays = [
        broadcast(comm, array, form, f"corpus array {number}") if isinstance(form, tuple) else form
        for number, (array, form) in enumerate(zip_longest(local, forms))
    ]
    width = len(fields(Stream))
    streams = iter([Stream(*arrays[first : first + width]) for first in range(0, len(arrays), width)])
    return with_streams(rest, streams)


def with_streams(corpus: Corpus, streams: Iterator[Any]) -> Corpus:
    """Return the corpus with the given streams, in the order of its parts."""
    parts: dict[str, Any] = {
        side: tuple(part._replace(stream=next(streams)) for part in getattr(corpus, side)) for side in SIDES
    }
    return replace(corpus, **parts)


def array_form(ids: Any) -> TokenSpans | tuple[str, int] | None:
    """Return what is sent first: None, TokenSpans that stay in files, or dtype and size for a broadcast."""
    stays = ids is None or (isinstance(ids, TokenSpans) and ids.stays_in_files)
    return ids if stays else (ids.dtype.str, ids.size)


def find_unreadable(comm: Comm, in_files: Sequence[TokenSpans]) -> str:
    """Return a message if some rank cannot read the files, else "". Equal on all ranks. Collective."""
    views = comm.allgather_object((platform.node(), files_digest(in_files)))
    rank = next((rank for rank, (_, digest) in enumerate(views) if digest != views[0][1]), None)
    if rank is None:
        return ""
    nbytes = sum(spans.size * spans.dtype.itemsize for spans in in_files)
    path = next(span.path for spans in in_files for span in spans.spans)
    return (
        f"rank {rank} on {views[rank][0]} cannot see {shown(path)}, which rank 0 on {views[0][0]} reads. So "
        f"each rank keeps {nbytes / 2**20:,.0f} MiB of token ids; to save memory, use a folder that all "
        "hosts share (for text: ZERO_MPI_CACHE)"
    )


def files_digest(in_files: Sequence[TokenSpans]) -> str:
    """Return a fingerprint of the files as this rank sees them; "" if it cannot read them."""
    try:
        return " ".join(spans.sampled_digest().hex() for spans in in_files)
    except JobError:
        return ""


def broadcast(comm: Comm, local: Any, form: tuple[str, int], label: str) -> np.ndarray[Any, Any]:
    """Return rank 0's array, which may be in files, as an array in memory on every rank. Collective."""
    if comm.size == 1 and isinstance(local, np.ndarray):
        return np.ascontiguousarray(local)
    kind, size = form
    array = local.read_all() if isinstance(local, TokenSpans) else np.empty(size, kind)
    if isinstance(local, np.ndarray):
        array[...] = local
    comm.broadcast(array, label=label).wait()
    return array


# ------------------------------------------------------------------------------------------- the run


@dataclass(frozen=True, kw_only=True)
class Session(RunSpec):
    """A run that is ready for the next step after `progress`. Each rank has the text."""

    corpus: Corpus
    loader: StepLoader
    comm: Comm
    module: ShardedModule
    optimizer: ShardedOptimizer
    held_out: HeldOut
    objective: Objective
    progress: TrainingProgress
    transport: str  # description of the transport between ranks; "" for a single rank
    nodes: int  # number of nodes, or 0 if the transport does not distinguish nodes


def build(world: World, spec: RunSpec) -> Session:
    """Return the session of a resolved run. Raise UsageError on all ranks if this fails. Collective."""
    notes, config = list(spec.notes), spec.config
    choice = choose_transport(world, config, spec.model, notes)
    comm, topology = choice.comm, getattr(choice.comm, "topology", None)
    if config.check_collectives:
        comm = CheckedComm(comm)
    if comm.size > 1:
        comm = NumberedComm(comm)
    corpus = share_corpus(comm, spec.corpus, notes)
    loader, held_out = make_loaders(config, corpus)
    module = make_module(config, spec.model, comm)
    optimizer = make_optimizer(config, module, spec.model)
    objective = make_objective(config, module, loader, held_out, corpus.parts[0].stream)
    keep_reference(world, optimizer, spec, objective)
    progress = fill_parameters(world, optimizer, spec)
    attributes: dict[str, Any] = vars(spec) | {"corpus": corpus, "loader": loader, "notes": tuple(notes)}
    return Session(
        **attributes,
        comm=comm,
        module=module,
        optimizer=optimizer,
        held_out=held_out,
        objective=objective,
        progress=progress,
        transport=choice.text,
        nodes=0 if topology is None else topology.nodes,
    )


def make_module(config: Config, model: ModelConfig, comm: Comm) -> ShardedModule:
    """Return the module that the flags describe. Raise UsageError for an impossible strategy or offload."""
    stages, masters = model.stages(config.recompute), config.offload == STATE
    scales = auxiliary_scales(model, config)
    layout = layout_config(config, model)
    return ShardedModule(stages, comm, layout, offload_masters=masters, auxiliary=scales)


def make_objective(
    config: Config, module: ShardedModule, loader: StepLoader, held_out: HeldOut, stream: Stream
) -> Objective:
    """Return the objective that the flags choose. `stream`: text that the teacher must have predicted."""
    if config.teacher is not None:
        return DistillObjective(module, loader, stream, config.teacher, config.teacher_weight)
    if config.preference is None:
        return Objective(module, loader)
    return PreferenceObjective(module, loader, held_out, config.preference, config.base_is_reference)


def make_optimizer(config: Config, module: ShardedModule, model: ModelConfig) -> ShardedOptimizer:
    """Return the optimizer that the flags choose. Raise UsageError if its state cannot be offloaded."""
    if known_type(config.qat or "") in MIXES:
        ggml.library(f"--qat {config.qat}")
    products = BFLOAT16 if module.precision.compute == BFLOAT16 else np.float32
    return ShardedOptimizer(
        module,
        rules_of(config, model, products),
        lr=config.lr,
        weight_decay=config.weight_decay,
        lr_scale=rate_scales(config.lr_scale),
        offload=config.offload,
        ema=config.ema,
    )


def fill_parameters(world: World, optimizer: ShardedOptimizer, spec: RunSpec) -> TrainingProgress:
    """Fill the parameters, and the optimizer's state if a run resumes. Return the progress. Collective."""
    start, init, module = spec.checkpoint, spec.init, optimizer.module
    adapters = set(filter(is_adapter, module.params))
    if init is not None and (start is None or spec.model.lora is not None):
        names = module.params.keys() - adapters - spec.model.stored.keys()
        read = finite(init.read, init.path)
        kinds = {} if spec.model.lora is None else dict(spec.model.lora.rounding)
        types = {name: kind for name, kind in kinds.items() if name + FIRST not in module.params}
        world.run_on_all(lambda: module.load_slices(rounded(read, types), names))
    file = None if init is None else gguf_of(init)
    if file is not None and spec.model.stored:
        world.run_on_all(lambda: module.load_stored(finite_blocks(file)))
    if start is not None:
        progress: TrainingProgress = world.run_on_all(lambda: load_state(start.files, optimizer))
        return progress
    adapter = spec.adapter
    if adapter is not None:
        world.run_on_all(lambda: module.load_slices(finite(adapter.read, adapter.path), adapter.tensors))
    elif init is None or spec.model.lora is not None:
        module.initialize(spec.config.seed, None if init is None else adapters)
    optimizer.begin()
    return TrainingProgress()


def rounded(read: Read, kinds: Mapping[str, str]) -> Read:
    """Return `read` with rounding to each tensor's type in `kinds`. Each range must have full blocks."""

    def rounding(name: str, start: int, stop: int) -> Array:
        values = read(name, start, stop)
        if name in kinds:
            round_to(kinds[name], values, values)
        return values

    return rounding


def keep_reference(world: World, optimizer: ShardedOptimizer, spec: RunSpec, objective: Objective) -> None:
    """Give the objective its numbers of the initial model, read from a file in OUT or computed. Collective.

    The file begins with a digest over its numbers, the run's inputs and the package. Raises UsageError if
    computing fails.
    """
    if not objective.keeps:
        return
    path = spec.out / REFERENCE_FILE
    weights = [None if file is None else weights_digest(file) for file in spec.weights.values()]
    inputs = repr((sorted(spec.description.settings.items()), weights, own_source())).encode()

    def read() -> np.ndarray[Any, Any] | None:
        with suppress(OSError, UsageError):
            raw = read_file(path, MOST_REFERENCE)
            if hashlib.sha256(inputs + raw[32:]).digest() == raw[:32]:
                return np.frombuffer(raw, "<f8", offset=32)
        return None

    def write() -> None:
        body = numbers.astype("<f8").tobytes()
        if path.parent.is_dir():
            with writing():
                write_whole(path, hashlib.sha256(inputs + body).digest() + body)

    numbers: Any = world.run_on_root(read)
    if numbers is None:
        fill_parameters(world, optimizer, replace(spec, checkpoint=None))
        numbers = objective.keep()
        world.on_root(write)
    objective.use(numbers)
