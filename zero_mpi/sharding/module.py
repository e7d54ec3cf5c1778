"""A model whose parameters, gradients or both are sharded over ranks.

`ShardedModule.schedule` holds a rank's actions in a step as lists, which can be printed; `actions.run`
executes them. A single rank runs the same code. Gradients are summed and never divided, so divide the loss by
the tokens of the full step. Parameters have the same names and full shapes under every strategy.

This class does not check its arguments. `zero_mpi.compat.ShardedModule`, which scripts use, checks arguments
and the order of calls.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.arguments import whole
from zero_mpi.comm import AllOf, Comm, Handle
from zero_mpi.comm.agree import Facts, agreed
from zero_mpi.device.arrays import BufferPool, Scalar
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.nn.layer import Param, Stage, initial_values, stage_params
from zero_mpi.nn.loss import HeadLoss, loss_with
from zero_mpi.ops import chunk_squares
from zero_mpi.sharding.actions import Actions, run
from zero_mpi.sharding.gradients import accumulates_locally, make_gradients
from zero_mpi.sharding.graphs import graphs_for
from zero_mpi.sharding.layout import Layout, LayoutConfig, is_trainable, lay_out, layout_facts
from zero_mpi.sharding.norm import SquaresSum, runs_of
from zero_mpi.sharding.parameters import BlockParameters, Context, ReadBytes, make_parameters, masters_on_host
from zero_mpi.sharding.passes import MicroBatch, tallies_of
from zero_mpi.sharding.precision import FLOAT32, FP64, LossScale, Precision
from zero_mpi.sharding.schedule import Schedule
from zero_mpi.sharding.strategy import Strategy
from zero_mpi.sharding.unit import Unit
from zero_mpi.telemetry import spans

Read = Callable[[str, int, int], Array]  # (name, start, stop) -> this range of the flattened parameter


class ShardedUnit:
    """A rank's part of a unit. Gathers and releases do nothing if every rank keeps the full parameters.

    `memory`: float32 memory that all ranks share, for the parameters, or for the summed gradient if every
    rank updates all parameters; or None.
    """

    def __init__(self, unit: Unit, context: Context, memory: Array | None = None) -> None:
        self.unit, self.name = unit, unit.name
        self.parameters = parameters = make_parameters(unit, context, memory)
        self.gradient = gradient = make_gradients(unit, context, memory)
        self.partition, self.part = parameters.partition, parameters.part
        self.start_gather, self.wait_gather = parameters.start_gather, parameters.wait_gather
        self.release, self.weights = parameters.release, parameters.views
        self.start_reduce, self.wait_reduce = gradient.start_reduce, gradient.wait_reduce
        self.gradients = gradient.views

    @property
    def updated(self) -> tuple[Array, Array, slice]:
        """Arrays for the optimizer: parameters, gradients, and the range of the unit that they hold."""
        gradient = self.gradient.sum if self.gradient.full is None else self.gradient.full
        return self.parameters.master, gradient, self.parameters.master_part


class ShardedModule:
    """The stages of a model on the ranks of `comm`, split into units by `config`.

    offload_masters   in low precision on a GPU: keep float32 parameters in the host's memory; the optimizer
                      then needs offload="state"
    auxiliary         name -> scale of an auxiliary loss, which replaces the scale that its layers declare

    The module can compute once all parameters have values. The constructor is collective. All ranks raise
    UsageError for a precision that the transport cannot reduce, and for arguments that differ between ranks.
    """

    comm: Comm
    strategy: Strategy

    def __init__(
        self,
        stages: Sequence[Stage],
        comm: Comm,
        config: LayoutConfig,
        *,
        offload_masters: bool = False,
        auxiliary: Mapping[str, float] | None = None,
    ) -> None:
        def prepare() -> tuple[tuple[Layout, Callable[[int], Array] | None], Facts]:
            self.stages, checked = self.checked(stages, config)
            check_reduction(comm, checked.precision, bool(checked.stored))
            masters = masters_on_host(checked.precision) if offload_masters else None
            layout, self.tallies = lay_out(self.stages, checked), tallies_of(self.stages, auxiliary)
            facts = layout_facts(self.stages, checked, layout.units)
            facts |= {"exact": comm.exact, "offload_masters": bool(offload_masters)}
            return (layout, masters), facts | {"auxiliary": self.tallies.scales}

        layout, masters = agreed(comm, f"this {type(self).__name__}", prepare)
        config = layout.config
        self.params, self.comm, self.strategy = stage_params(self.stages), comm, config.strategy
        self.config, self.precision = config, config.precision
        self.loss_scale = LossScale(config.precision.scales_loss)
        self.uses, self.parts, self.schedule = layout.uses, layout.parts, layout.schedule
        # Transport of the ranks among which shards are divided: a node's ranks if every node has a replica.
        by_node = comm.replicates_by_node and not self.strategy.shards_moments
        self.group = comm.shard_group() if self.strategy.within_nodes or by_node else comm
        memory = self.group.memory(layout.full(self.group.size), layout.buffers, layout.gathers)
        pools = memory.gathers, memory.buffers, BufferPool()
        self.parameter_pool, self.gradient_pool, self.unpacked_pool = pools
        context = Context(self.group, self.strategy, *pools, self.precision, masters)
        self._units_read = context.units_read
        units = layout.with_owners(self.group.size).units
        self.units = [ShardedUnit(unit, context, full) for unit, full in zip(units, memory.full, strict=True)]
        self._forward: MicroBatch | None = None  # the micro-batch whose backward is next
        self._synced, self._graphs = False, graphs_for(self)

    @cached_property
    def _homes(self) -> dict[str, list[ShardedUnit]]:
        """Parameter -> its units; a stacked parameter may have several, in order."""
        homes: dict[str, list[ShardedUnit]] = {}
        for unit in self.units:
            for name in unit.unit.params:
                homes.setdefault(name, []).append(unit)
        return homes

    def checked(self, stages: Sequence[Stage], config: LayoutConfig) -> tuple[list[Stage], LayoutConfig]:
        """Return the constructor's arguments; subclasses check them here."""
        return list(stages), config

    def is_trainable(self, name: str) -> bool:
        return is_trainable(name, self.config.frozen) and not self.params[name].buffer

    # ---------------------------------------------------------------------------------- a micro-batch

    def forward(self, x: Any, training: bool | None = None) -> Any:
        """Return the model's output for x; both are None on a rank without a micro-batch in this round.

        x may be `nn.Packed`: rows of several documents. The values for backward are kept if `training`.
        """
        self._begin()
        micro_batch = MicroBatch(self, x, keeps=bool(training))
        run(self.schedule.forward if training else self.schedule.inference, self.units, micro_batch)
        y, micro_batch.x = micro_batch.x, None
        self._forward = micro_batch if training else None
        return y

    def backward(self, dy: Any, *, contributors: int | None = None, last: bool = True) -> Any:
        """Add this micro-batch's gradients, start their reduction, and return dx of the first trained stage.

        `contributors`: ranks from this number on have no micro-batch in this round and pass dy = None.
        `last`: whether this is the step's last round, the only one that reduces with NO_SHARD and fast.
        """
        assert self._forward is not None, "call forward(x, training=True) before backward"
        micro_batch, self._forward = self._forward, None
        micro_batch.dy = self.loss_scale.times(dy) if dy is not None and self.loss_scale.dynamic else dy
        spans.restart()
        self._descend(self._schedule_of(last).backward, micro_batch, contributors, last)
        return micro_batch.dy

    def forward_backward(
        self, x: Any, targets: Any, scale: float = 1.0, *, contributors: int | None = None, last: bool = True
    ) -> Scalar | None:
        """Run forward, loss and backward of a micro-batch; return its loss.

        `targets`: a `HeadLoss`, or ids; the loss is then `scale` times their cross-entropy. The last stage
        runs forward and backward together, so its layer need not hold all logits (`Layer.loss`). A rank
        without a micro-batch passes None for x and targets, and gets None.
        """

        def work(x: Any, loss: HeadLoss | None, actions: Actions) -> Scalar | None:
            micro_batch = MicroBatch(self, x, loss_of=loss)
            self._descend(actions, micro_batch, contributors, last)
            return micro_batch.loss

        self._begin()
        loss, actions = loss_with(targets, scale), self._schedule_of(last).training
        return work(x, loss, actions) if self._graphs is None else self._graphs.run(x, loss, actions, work)

    def losses(self, x: Any, loss_of: HeadLoss | None, *, adapted: bool = True) -> list[Scalar]:
        """Return the losses of a micro-batch's parts, without a backward; [] if x and loss_of are None.

        If `adapted` is false, the products of LoRA adapters are left out.
        """
        self._begin()
        micro_batch = MicroBatch(self, x, keeps=False, loss_of=loss_of, adapted=adapted)
        run(self.schedule.evaluation, self.units, micro_batch)
        return micro_batch.losses

    def _begin(self) -> None:
        self._forward = None
        spans.restart()

    def _schedule_of(self, last: bool) -> Schedule:
        """Return a round's schedule. If each rank sums its micro-batches, only the last round reduces."""
        defers = not last and accumulates_locally(self.comm, self.strategy)
        return self.schedule.without_reductions if defers else self.schedule

    def _descend(
        self, actions: Actions, micro_batch: MicroBatch, contributors: int | None, last: bool
    ) -> None:
        micro_batch.contributors = self.comm.size if contributors is None else contributors
        run(actions, self.units, micro_batch)
        self.tallies.rounds.append(micro_batch.batch.sums)
        spans.lap(spans.BETWEEN, "after")
        self._synced = False

    # ------------------------------------------------------------------------------------ around a step

    def drop_gathered(self) -> None:
        """Release gathered arrays whose shards are about to change, and a forward that had no backward.

        If ranks share parameters, the call returns when no rank reads them any more. An update needs no
        barrier: the norm waits for a value that each rank sends after its last use of any unit. Other
        writers, such as loading, may have no norm before them and need a barrier. All ranks agree on whether
        a barrier is needed, because all of them, with or without a micro-batch, wait for the same gathers.
        """
        self._forward = None
        for unit in self.units:
            unit.release()
            unit.parameters.wait_update()
        if self._units_read:
            self.group.barrier_readers()
            self._units_read.clear()

    def overlapped_sync_gradients(self) -> Handle:
        """Complete the step's reductions; under NO_SHARD, the returned handle waits for full gradients."""
        for unit in self.schedule.reductions:
            self.units[unit].wait_reduce()
        handles = [] if self._synced else [unit.gradient.start_gather() for unit in self.units]
        self._synced = True
        return AllOf(handles)

    @cached_property
    def _squares(self) -> SquaresSum:
        runs = runs_of([sharded.unit for sharded in self.units], self.params, self.group.size)
        return SquaresSum(runs, self.group.rank)

    def gradient_norm(self) -> float:
        """Return the Euclidean norm of the full summed gradient, without the loss scale. Collective.

        Its bits do not depend on ranks, units or strategy (see `norm`). Tied parameters count once.
        """
        squares = []
        for unit in self.units:
            unit.wait_reduce()
            if unit.unit.trainable and unit.gradient.sum.size:
                squares.append(chunk_squares(unit.gradient.sum, unit.unit.quantum))
        total = self.group.sum_vector(self._squares.part(squares))
        self._units_read.clear()  # the sum is complete only after all ranks have reached this point
        return math.sqrt(self._squares.total(total)) / self.loss_scale.factor

    def start_updates(self) -> None:
        """Signal that all units are updated, and start gathers on ranks that keep the full parameters."""
        self.group.signal_written()
        if self.strategy.shards_moments:  # otherwise every rank has updated all parameters
            for unit in self.units:
                if unit.unit.trainable:
                    unit.parameters.start_update()

    def publish(self) -> None:
        """Send the values written into master shards to all ranks, rounded in low precision. Collective."""
        for unit in self.units:
            unit.parameters.publish()
        self.group.signal_written()

    def update_buffers(self) -> None:
        """Let layers update their buffers, except frozen ones, from sums over the step. Collective."""
        buffers = {name: param for name, param in self.params.items() if param.buffer}
        names = [name for name in buffers if is_trainable(name, self.config.frozen)]
        if names:
            sums, values = self.tallies.sums(self.comm), self._values_of(buffers)
            for layer in {id(stage.layer): stage.layer for stage in self.stages}.values():
                layer.update(values, sums)
            self.load_slices(lambda name, start, stop: values[name].reshape(-1)[start:stop], names)

    def _values_of(self, params: Mapping[str, Param]) -> dict[str, Array]:
        """Return full parameters on the host, a sum to which ranks add their elements. Collective."""
        sum_unit = Unit("values", params, 1, False)
        total = np.zeros(sum_unit.length)
        for unit in dict.fromkeys(unit for name in params for unit in self._homes[name]):
            for segment in unit.unit.segments(unit.part):
                if segment.name in params:
                    values = device.in_use().to_host(unit.parameters.master_shard[segment.where])
                    start = sum_unit.offsets[segment.name] + segment.offset
                    total[start : start + values.size] = values
        total = self.group.sum_vector(total).astype(self.precision.master)
        return sum_unit.views(total)

    def zero_gradients(self) -> None:
        self.tallies.rounds.clear()
        for unit in self.units:
            unit.gradient.reset()

    # ------------------------------------------------------------------------------------------- values

    def initialize(self, seed: int, names: Collection[str] | None = None) -> None:
        """Fill all parameters, or those in `names`, with values that depend only on (seed, name). Collective.

        Ranks need equal seeds, except under NO_SHARD if `DDP.broadcast_parameters` follows.
        """

        def prepare() -> tuple[int, dict[str, object]]:
            number = whole("initialize: seed", seed)
            return number, {"seed": number if self.strategy.shards_moments else "of each rank"}

        seed = agreed(self.comm, "initialize", prepare)
        self.load_slices(lambda name, *bounds: initial_values(name, self.params[name], seed, *bounds), names)

    def load_slices(self, read: Read, names: Collection[str] | None = None) -> None:
        """Fill this rank's part of all parameters, or of the named parameters, by read(name, start, stop).

        Collective if ranks share parameters and have used them.
        """
        self.drop_gathered()
        try:
            for unit in self.units:
                if names is None or not unit.unit.params.keys().isdisjoint(names):
                    for target, part in unit.parameters.load_targets:
                        fill(unit, target, part, read, names)
        finally:  # also after an error, so that other ranks do not wait forever
            self.group.signal_written()

    def load_stored(self, read: ReadBytes) -> None:
        """Fill parameters in quantized blocks by read(name, start, out); see `load_slices`.

        `read` fills `out`, (bytes,) uint8, with the stored bytes of a tensor from `start` on.
        """
        self.drop_gathered()
        try:
            for unit in self.units:
                if isinstance(unit.parameters, BlockParameters):
                    unit.parameters.load(read)
        finally:
            self.group.signal_written()


def fill(
    unit: ShardedUnit, target: Array, part: slice, read: Read, names: Collection[str] | None = None
) -> None:
    """Write values of `read` into `target`, the `part` of a unit; only parameters `names`, if given."""
    for segment in unit.unit.segments(part):
        if names is None or segment.name in names:
            size = segment.where.stop - segment.where.start
            values = read(segment.name, segment.offset, segment.offset + size)
            device.in_use().copy(target[segment.where], values)


def check_reduction(comm: Comm, precision: Precision, stored: bool = False) -> None:
    """Raise UsageError for float64 on GPUs or with quantized blocks, and for dtypes that MPI cannot add."""
    if precision is FP64 and (device.in_use().name != "cpu" or stored):
        raise UsageError("--precision fp64 needs the CPU and no parameters in quantized blocks; use fp32")
    if not comm.exact and precision.reduce.itemsize < FLOAT32.itemsize:
        raise UsageError(
            f"--precision {precision.name} with --reduction fast: the MPI library does not add "
            f"{precision.reduce.name}; use --reduction exact, or --reduce-dtype fp32"
        )
