"""Modules for scripts: the engine's class with checks, `DDP`, and a row-sharded linear layer."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, Self

from zero_mpi import device
from zero_mpi.arguments import array, came, instance, number, same_names, some
from zero_mpi.arguments import whole as whole_number
from zero_mpi.comm import Comm
from zero_mpi.comm.agree import agreed
from zero_mpi.device.arrays import Scalar, namespace
from zero_mpi.device.types import Array
from zero_mpi.nn.layer import Layer, Param, Stage, stage_params
from zero_mpi.nn.linear import Linear
from zero_mpi.nn.loss import loss_with
from zero_mpi.ops.block_kinds import BlockKind
from zero_mpi.sharding import module as engine
from zero_mpi.sharding.actions import GATHERING, Actions, Turn, without
from zero_mpi.sharding.layout import BUCKET_MB, LayoutConfig, check_patterns, is_trainable
from zero_mpi.sharding.parameters import ReadBytes, State
from zero_mpi.sharding.passes import MicroBatch
from zero_mpi.sharding.precision import FP32, FP64, Precision
from zero_mpi.sharding.schedule import Indices
from zero_mpi.sharding.strategy import FULL_SHARD, NO_SHARD, Strategy

NOTHING = "there are no gradients yet"
SOME = "gradients of the step's last round are missing"
ALL = "all rounds are done"


@dataclass(frozen=True)
class ShardInfo:
    """Part of a parameter that a rank owns: elements [offset, offset + size), or rows if `by_rows`."""

    full_shape: tuple[int, ...]
    offset: int
    size: int
    by_rows: bool = False


class Unmatched(NamedTuple):
    """Names that only the module has (`missing`) and names that only a loaded state has (`unexpected`)."""

    missing: list[str]
    unexpected: list[str]


class ShardedModule(engine.ShardedModule):
    """A model, given as a list of Stage(scope, layer), that is sharded over the ranks of `comm`.

    `LayoutConfig` and `engine.ShardedModule` describe the other arguments. Before the first micro-batch, all
    parameters need values, from `initialize`, a load, or `broadcast_updated_params` after writing in place.
    The constructor is collective. All ranks raise ValueError for invalid arguments, and UsageError if the
    transport cannot sum arrays in `precision` or arguments differ between ranks.
    """

    rounds_open = NOTHING  # state of the step's gradients: NOTHING, SOME or ALL
    forgotten = 0  # number of times that gradients were cleared, which restarts the rounds
    is_training: bool = True  # whether `forward` keeps values for backward by default

    def __init__(
        self,
        stages: Sequence[Stage],
        comm: Comm,
        strategy: Strategy = FULL_SHARD,
        *,
        prefetch: int = 1,
        bucket_mb: float = BUCKET_MB,
        frozen: Sequence[str] = (),
        by_rows: bool = False,
        precision: Precision = FP32,
        offload_masters: bool = False,
        stored: Mapping[str, BlockKind] | None = None,
        whole: Sequence[str] = (),
        auxiliary: Mapping[str, float] | None = None,
    ) -> None:
        instance("ShardedModule: comm", comm, Comm, "a communicator, from connect()")
        config = LayoutConfig(strategy, prefetch, bucket_mb, frozen, by_rows, precision, stored or {}, whole)
        super().__init__(stages, comm, config, offload_masters=offload_masters, auxiliary=auxiliary)
        self.unfilled = set(self.params)  # names of parameters that have no values yet

    def checked(self, stages: Sequence[Stage], config: LayoutConfig) -> tuple[list[Stage], LayoutConfig]:
        """Return a module's arguments in their final types; raise ValueError for invalid arguments."""
        instance("ShardedModule: strategy", config.strategy, Strategy, "a Strategy such as FULL_SHARD")
        instance("ShardedModule: precision", config.precision, Precision, "a Precision such as FP32")
        prefetch = whole_number("ShardedModule: prefetch", config.prefetch, least=0)
        bucket_mb = number("ShardedModule: bucket_mb", config.bucket_mb, above=0)
        by_rows = bool(config.by_rows) and not config.strategy.buckets
        config = replace(config, prefetch=prefetch, bucket_mb=bucket_mb, by_rows=by_rows)
        stages = list_of_stages(stages)
        params = stage_params(stages)
        if not params:
            raise ValueError("ShardedModule: expected a model with parameters, got stages that have none")
        frozen = list_of_patterns("frozen", config.frozen, params)
        undivided = list_of_patterns("whole", config.whole, params)
        if undivided and config.by_rows:
            raise ValueError("ShardedModule: whole: by_rows splits parameters by rows; use one of the two")
        config = replace(config, frozen=frozen, whole=undivided)
        check_stored(config, params)
        return stages, config

    # ------------------------------------------------------------------------------------ a micro-batch

    def train(self, mode: bool = True) -> Self:
        """Make `forward` keep values for backward, unless `mode` is False. Call on all ranks. Return self."""
        instance("train: mode", mode, bool, "True or False")
        self.is_training = mode
        return self

    def eval(self) -> Self:
        """Make `forward` compute outputs only. `GradAccum` trains in either mode. Return self."""
        return self.train(False)

    def forward(self, x: Any, training: bool | None = None) -> Any:
        """Return the model's output for x. If `training` is None, `is_training` decides."""
        return super().forward(x, self.is_training if training is None else training)

    def backward(self, dy: Any, *, contributors: int | None = None, last: bool = True) -> Any:
        """Compute gradients and return dx of the first trained stage; see `engine.ShardedModule`."""
        if self._forward is None:
            raise ValueError("backward needs a forward(x, training=True) before it")
        idle = self._forward.is_idle
        if (dy is None) != idle:
            raise ValueError(
                f"backward: the previous forward had {'no' if idle else 'an'} input; expected "
                f"{'None' if idle else 'a gradient of its output'}, got {came(dy)}"
            )
        return super().backward(dy, contributors=contributors, last=last)

    def evaluate(self, x: Any, targets: Any, scale: float = 1.0) -> Scalar | None:
        """Return the loss without keeping values for backward; None on a rank without a micro-batch."""
        losses = self.losses(x, loss_with(targets, scale))
        return losses[0] if losses else None

    def add_gradients(
        self, gradients: Mapping[str, Array] | None, *, contributors: int | None = None, last: bool = True
    ) -> None:
        """Add gradients by name, like a backward; pass None on a rank without gradients. Collective."""
        self._begin()
        actions = without(GATHERING, self._schedule_of(last).backward)
        self._descend(actions, ExternalGradients(self, gradients), contributors, last)

    def _begin(self) -> None:
        if self.unfilled:
            raise ValueError(
                f"the parameters {some(sorted(self.unfilled))} have no values yet: call initialize, "
                "load_state_dict or zero_mpi.load first, or broadcast_updated_params after writing to them"
            )
        super()._begin()

    def _descend(
        self, actions: Actions, micro_batch: MicroBatch, contributors: int | None, last: bool
    ) -> None:
        if contributors is not None:
            contributors = whole_number("backward: contributors", contributors, 0, self.comm.size + 1)
        self.rounds_open = ALL if last else SOME
        super()._descend(actions, micro_batch, contributors, last)

    def prefetch_forward_params(self) -> None:
        """Start the gathers of the next forward now, for example while a batch is being read."""
        if not self.strategy.shards_parameters:
            raise ValueError(f"prefetch: {self.strategy.name} keeps full parameters: nothing to gather")
        if self.has_pending_prefetch:
            raise ValueError("prefetch: already started; run forward before the next prefetch")
        for unit in self.schedule.first_gathers:
            self.units[unit].start_gather()

    @property
    def has_pending_prefetch(self) -> bool:
        """True if gathers have started for a forward that has not begun."""
        started = any(unit.parameters.state is not State.SHARDED for unit in self.units)
        return self.strategy.shards_parameters and self._forward is None and started

    # -------------------------------------------------------------------------------------- gradients

    def sync_gradients(self) -> None:
        """Wait until `gradients` are summed over all ranks and micro-batches of the step."""
        self.overlapped_sync_gradients().wait()

    def zero_gradients(self) -> None:
        self.rounds_open, self.forgotten = NOTHING, self.forgotten + 1
        super().zero_gradients()

    def check_gradients(self, what: str) -> None:
        """Raise ValueError unless all gradients of the step are computed; `what` names the caller."""
        if self.rounds_open != ALL:
            raise ValueError(
                f"{what}: {self.rounds_open}; call GradAccum.accumulate, or forward and backward, for every "
                "round of the step first"
            )

    def gradients(self) -> Iterator[tuple[str, Array]]:
        """Yield (unit name, local shard of the summed gradient) of trained units, after `sync_gradients`."""
        for unit in self.units:
            if unit.unit.trainable:
                yield unit.name, unit.gradient.sum

    def named_gradients(self) -> Iterator[tuple[str, Array]]:
        """Yield (name, this rank's elements of the summed gradient, flat), after `sync_gradients`."""
        for unit in self.units:
            for segment in unit.unit.segments(unit.part) if unit.unit.trainable else ():
                yield unit.unit.label(segment.name), unit.gradient.sum[segment.where]

    # ------------------------------------------------------------------------------------- parameters

    def load_slices(self, read: engine.Read, names: Collection[str] | None = None) -> None:
        wrong = [names] if isinstance(names, str) else [x for x in names or () if x not in self.params]
        if wrong:
            raise ValueError(f"names: expected a list of names of parameters, got {some(wrong)}")
        super().load_slices(read, names)
        self.unfilled.difference_update(self.params if names is None else names)

    def load_stored(self, read: ReadBytes) -> None:
        super().load_stored(read)
        self.unfilled.difference_update(self.config.stored)

    def load_state_dict(self, state: Mapping[str, Array], strict: bool = True) -> Unmatched:
        """Fill parameters from full arrays by name. Collective.

        Missing and unknown names raise ValueError; if not `strict`, they are ignored and returned.
        """
        instance("load_state_dict", state, Mapping, "a mapping of names to arrays")
        if strict:
            same_names("load_state_dict: the state does not fit the model", state, self.params)
        names = [name for name in self.params if name in state]
        for name in names:
            array(f"load_state_dict: {name}", state[name], self.params[name].shape)
        self.load_slices(lambda name, start, stop: state[name].reshape(-1)[start:stop], names)
        missing = [name for name in self.params if name not in state]
        return Unmatched(missing, [name for name in state if name not in self.params])

    def update_shards(self, flat: Array) -> None:
        """Set this rank's shards, in the order of `parameters`, from one flat array. Collective."""
        shards = self.parameters()
        size = sum(int(shard.size) for shard in shards)
        array("update_shards", flat)
        if flat.ndim != 1 or flat.size != size:
            expected = f"a flat array of {size} elements, the shards of rank {self.comm.rank}"
            raise ValueError(f"update_shards: expected {expected}, got shape {tuple(flat.shape)}")
        self.drop_gathered()
        start = 0
        for shard in shards:
            device.in_use().copy(shard, flat[start : start + shard.size])
            start += shard.size
        self.broadcast_updated_params()

    def broadcast_updated_params(self) -> None:
        """Send values written into `parameters` to all ranks, rounded to the precision. Collective."""
        self.drop_gathered()
        self.unfilled.clear()
        self.publish()

    def parameters(self) -> list[Array]:
        """Return this rank's shard of each unit, flat, padding included; writing to it changes the model.

        Call `drop_gathered` before and `broadcast_updated_params` after writing, on all ranks.
        """
        return [unit.parameters.master_shard for unit in self.units]

    def named_parameters(self) -> Iterator[tuple[str, Array]]:
        """Yield (name, flat view of this rank's elements) for each parameter that it partly owns."""
        for unit in self.units:
            shard = unit.parameters.master_shard
            for segment in unit.unit.segments(unit.part):
                yield unit.unit.label(segment.name), shard[segment.where]

    def shard_info(self) -> dict[str, ShardInfo]:
        """Return the part of each parameter that this rank owns, by name, in model order."""
        sizes = {label: int(values.size) for label, values in self.named_parameters()}
        by_rows, infos = self.config.by_rows, {}
        for name in self.params:
            for unit in self._homes[name]:
                part, param = unit.unit, unit.unit.params[name]
                row, label = prod(param.shape[1:]) if by_rows else 1, part.label(name)
                starts = [segment.offset for segment in part.segments(unit.part) if segment.name == name]
                start = starts[0] - part.firsts.get(name, 0) if starts else 0
                infos[label] = ShardInfo(param.shape, start // row, sizes.get(label, 0) // row, by_rows)
        return infos

    def all_gather_param(self, name: str) -> Array:
        """Return a copy of a full parameter on every rank, on the device of its shards. Collective."""
        if not isinstance(name, str) or name not in self._homes:
            few = ", ".join(list(self.params)[:3])
            raise ValueError(f"parameter {came(name)} is not known; names are like {few}")
        parts = [unit.parameters.copy_of(name) for unit in self._homes[name]]
        return parts[0] if len(parts) == 1 else namespace(parts[0]).concatenate(parts)

    def state_dict(self) -> dict[str, Array]:
        """Return a copy of every full parameter by name: each rank holds the full model. Collective."""
        return {name: self.all_gather_param(name) for name in self.params}

    def into_inner(self) -> tuple[list[Stage], dict[str, Array]]:
        """Return the stages, and all full parameters by name, on every rank. Collective."""
        return self.stages, self.state_dict()

    @property
    def module(self) -> list[Stage]:
        return self.stages

    @property
    def shard_memory_bytes(self) -> int:
        """Bytes of parameters that this rank keeps between steps."""
        return sum(unit.parameters.nbytes for unit in self.units)

    @property
    def replicated_memory_bytes(self) -> int:
        """Bytes of parameters that a rank would keep without sharding."""
        return sum(unit.parameters.nbytes_full for unit in self.units)


class DDP(ShardedModule):
    """`ShardedModule` with NO_SHARD; buckets of `bucket_mb` MiB are filled in reverse order of parameters."""

    def __init__(
        self, stages: Sequence[Stage], comm: Comm, *, bucket_mb: float = BUCKET_MB, frozen: Sequence[str] = ()
    ) -> None:
        super().__init__(stages, comm, NO_SHARD, bucket_mb=bucket_mb, frozen=frozen)

    def broadcast_parameters(self, root: int = 0) -> None:
        """Send the parameters of `root` to all ranks; raise ValueError if `root` is invalid. Collective."""
        name, size = "broadcast_parameters", self.comm.size
        root = agreed(self.comm, name, lambda: (whole_number(f"{name}: root", root, 0, size), {"root": root}))
        for unit in self.units:
            self.comm.broadcast(unit.parameters.master, root, f"parameters {unit.name}").wait()
            unit.parameters.round()
        self.unfilled.clear()


class ShardedLinear(ShardedModule):
    """A linear layer y (..., O) = x (..., C) W^T + b, with `NAME.weight` and `NAME.bias` sharded by rows.

    Between `forward` and `backward`, no parameter stays gathered. `backward` returns dx.
    """

    def __init__(
        self, comm: Comm, inputs: int, outputs: int, *, bias: bool = True, name: str = "linear"
    ) -> None:
        instance("ShardedLinear: name", name, str, "a text")
        sizes = [whole_number("ShardedLinear: inputs and outputs", n, least=1) for n in (inputs, outputs)]
        layer = Linear(name, *sizes, bias=bias)
        super().__init__([Stage(name, layer)], comm, FULL_SHARD, prefetch=0, by_rows=True)

    def forward(self, x: Any, training: bool | None = None) -> Any:
        """Return the output y for x; release the gathered rows immediately."""
        y = super().forward(x, training)
        for unit in self.units:
            unit.release()
        return y

    def backward(self, dy: Any, *, contributors: int | None = None, last: bool = True) -> Any:
        """Return the gradient dx; gather the rows again and start the reduction of their gradients."""
        for unit in self.units:
            unit.start_gather()
        return super().backward(dy, contributors=contributors, last=last)


class ExternalGradients(MicroBatch):
    """Micro-batch of a script that computes its own gradients. Backward adds each gradient once."""

    def __init__(self, module: ShardedModule, gradients: Mapping[str, Array] | None) -> None:
        super().__init__(module, None)
        self._by_name, self._added_units, self.is_idle = gradients or {}, set[int](), False

    def backward(self, stage: int) -> None:
        """Add the gradients of all units that the stage uses; a unit is reduced after its last stage."""
        self._add(self.module.uses[stage])

    def turn(self, turn: Turn) -> None:
        self._add(turn.adds)

    def _add(self, numbers: Indices) -> None:
        for unit in (self.module.units[index] for index in {*numbers} - self._added_units if self._by_name):
            for name, total in unit.gradients().items():
                first = unit.unit.firsts.get(name, 0)
                gradient = self._by_name[name].reshape(-1)[first : first + total.size]
                gradient = device.in_use().from_host(gradient).reshape(total.shape)
                total += (gradient * self.module.loss_scale.factor).astype(total.dtype)
        self._added_units.update(numbers)


def list_of_stages(stages: Any) -> list[Stage]:
    """Return a model's stages as a list; raise ValueError for an empty list or other values."""
    expected = "a list of Stage(scope, layer), such as model.stages()"
    if isinstance(stages, str | Mapping | Stage | Layer) or not hasattr(stages, "__iter__"):
        raise ValueError(f"ShardedModule: stages: expected {expected}, got {came(stages)}")
    entries = list(stages)
    if not entries:
        raise ValueError(f"ShardedModule: stages: expected {expected}, got none")
    for i, stage in enumerate(entries):
        instance(f"ShardedModule: stages[{i}]", stage, Stage, "a Stage(scope, layer)")
        instance(f"ShardedModule: stages[{i}].scope", stage.scope, str, "a name")
        instance(f"ShardedModule: stages[{i}].layer", stage.layer, Layer, "a Layer")
    return entries


def list_of_patterns(what: str, patterns: Any, params: Mapping[str, Param]) -> tuple[str, ...]:
    """Return name patterns as a tuple; raise ValueError for other values and for patterns without a match."""
    if isinstance(patterns, str) or not isinstance(patterns, Sequence | set | frozenset):
        raise ValueError(f"ShardedModule: {what}: expected a list of name patterns, got {came(patterns)}")
    for pattern in patterns:
        instance(f"ShardedModule: {what}", pattern, str, "name patterns")
    ordered = tuple(patterns if isinstance(patterns, Sequence) else sorted(patterns))
    check_patterns(what, ordered, params)
    return ordered


def check_stored(config: LayoutConfig, params: Mapping[str, Param]) -> None:
    """Raise ValueError for parameters that cannot be kept in quantized blocks."""
    if not config.stored or config.precision is FP64:  # the engine raises an error for FP64 with `stored`
        return
    instance("ShardedModule: stored", config.stored, Mapping, "a mapping of names to BlockKind")
    if config.by_rows or device.in_use().name != "cpu":
        raise ValueError("ShardedModule: stored: expected parameters on CPUs, not sharded by rows")
    for name, kind in config.stored.items():
        instance(f"ShardedModule: stored: {name}", kind, BlockKind, "a BlockKind")
        if name not in params or is_trainable(name, config.frozen):
            raise ValueError(f"ShardedModule: stored: {came(name)}: expected the name of a frozen parameter")
        if params[name].size % kind.elements:
            raise ValueError(f"ShardedModule: stored: {name}: expected blocks of {kind.elements} elements")
