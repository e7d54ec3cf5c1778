"""A model whose parameters, gradients or both are spread over ranks: the two loops and their transfers.

`ShardedModule.forward` and `.backward` walk over the stages; every start and every wait of a transfer is a
line in them. One rank takes the same path. Gradients are summed, never divided: scale the loss by one
over the tokens of the whole step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from zero_mpi import device, spans
from zero_mpi.arrays import Array, Scalar
from zero_mpi.comm import Comm, Handle
from zero_mpi.errors import UsageError
from zero_mpi.nn.layer import Param, Stage, stage_params
from zero_mpi.sharding.layout import BUCKET_MB, REDUCTIONS_IN_FLIGHT, is_trainable, lay_out
from zero_mpi.sharding.loss_scale import LossScale
from zero_mpi.sharding.offload import masters_on_host
from zero_mpi.sharding.precision import FLOAT32, FP32, Precision
from zero_mpi.sharding.schedule import StagePlan
from zero_mpi.sharding.shard import ShardedUnit, Views, accumulates_locally
from zero_mpi.sharding.state import ShardedState
from zero_mpi.sharding.strategy import FULL_SHARD, Strategy


class ShardedModule(ShardedState):
    """The stages of a model over the ranks of `comm`, under a strategy.

    stages      list of Stage(scope, layer); parameters of one scope travel together
    strategy    FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_SHARD
    prefetch    how many stages ahead parameters are gathered (FULL_SHARD, HYBRID_SHARD)
    bucket_mb   size of a unit in MiB where units are cut by bytes (NO_SHARD)
    frozen      name patterns ("blk.0.*"): no gradient, no moments, no reduction for these
    by_rows     one unit a parameter, cut between rows (dimension 0)
    precision   FP32, BF16 or FP16: the type of gathered parameters, activations and gradients on their way

    offload_masters   in low precision on a GPU: keep float32 parameters in the host's memory; the optimizer
                needs offload="state" then

    Parameters start as zeros; `initialize` or `load_state_dict` fills them. Raises ValueError for
    impossible arguments, UsageError for a precision that the transport cannot reduce.
    """

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
    ) -> None:
        if prefetch < 0 or bucket_mb <= 0:
            raise ValueError(f"expected prefetch >= 0 and bucket_mb > 0, got {prefetch} and {bucket_mb}")
        self.stages, self.frozen = list(stages), tuple(frozen)
        params = stage_params(self.stages)
        check_patterns(self.frozen, params)
        layout = lay_out(
            self.stages,
            strategy,
            prefetch=prefetch,
            bucket_mb=bucket_mb,
            frozen=frozen,
            by_rows=by_rows,
            precision=precision,
        )
        check_reduction(comm, precision)
        masters = masters_on_host(precision) if offload_masters else None
        self._uses, self.schedule = layout.uses, layout.schedule
        owners = comm.node_owners() if owned_by_nodes(comm, strategy) else comm
        memory = owners.memory(layout.wholes(strategy, owners.size), layout.buffers, layout.gathers)
        self.parameter_pool, self.gradient_pool = pools = memory.gathers, memory.buffers
        units = [
            ShardedUnit(unit, owners, strategy, *pools, whole, precision, masters)
            for unit, whole in zip(layout.units, memory.wholes, strict=True)
        ]
        super().__init__(params, units, comm, strategy, owners, LossScale.start(precision.scales_loss))
        self.precision = precision
        self._saved: list[Any] | None = None
        self._reducing: deque[ShardedUnit] = deque()
        self._synced = False

    def is_trainable(self, name: str) -> bool:
        """Whether no frozen pattern matches the parameter's name."""
        return is_trainable(name, self.frozen)

    # -------------------------------------------------------------------------------------- two loops

    def forward(self, x: Any, training: bool = True) -> Any:
        """The model's output for x, on the host or the device; keeps what backward needs if `training`.

        A rank that has no micro-batch in this round passes None: it joins the collectives and gets None.
        """
        plans = self.schedule.forward if training else self.schedule.evaluate
        x, saved = self._ascend(x, plans, training)
        self._saved = saved if training else None
        return x

    def _ascend(self, x: Any, plans: Sequence[StagePlan], training: bool) -> tuple[Any, list[Any]]:
        """The output of the first stages, as many as there are plans, and what backward needs of each."""
        saved: list[Any] = []
        x = None if x is None else device.in_use().from_host(x)
        record = spans.active
        if record is not None:
            record.restart()
        for stage, uses, plan in zip(self.stages, self._uses, plans, strict=False):
            self._start_and_wait(plan)
            kept = None
            if x is not None:
                weights = self._weights(uses)
                if record is not None:
                    record.lap(spans.MOVES, "before", stage.scope)
                x, kept = stage.layer.forward(weights, x)
                if record is not None:
                    record.lap(spans.COMPUTE, "forward", stage.scope)
            saved.append(kept if training else None)
            self._release(plan)
            self.owners.progress()
        return x, saved

    def backward(self, dy: Any, *, contributors: int | None = None, last: bool = True) -> Any:
        """dx of the first trained stage; adds this micro-batch's gradients and starts their reduction.

        `contributors`: ranks from this number on had no micro-batch in this round and pass dy = None.
        `last`: whether this is the step's last round; only NO_SHARD with fast reduction defers to it.
        """
        if self._saved is None:
            raise ValueError("backward needs a forward(x, training=True) before it")
        saved, self._saved = self._saved, None
        if dy is not None and self.loss_scale.dynamic:
            dy = self.loss_scale.times(dy)
        if spans.active is not None:
            spans.active.restart()
        return self._descend(dy, saved, contributors, last)

    def _descend(self, dy: Any, saved: list[Any], contributors: int | None, last: bool) -> Any:
        """Backward of as many stages as something was saved of."""
        idle = dy is None
        record = spans.active
        for number in range(len(saved) - 1, self.schedule.last_backward - 1, -1):
            stage, uses, plan = self.stages[number], self._uses[number], self.schedule.backward[number]
            self._start_and_wait(plan)
            if not idle:
                kept, saved[number] = saved[number], None  # activations go as soon as they are used
                weights = self._weights(uses) if plan.need else {}
                gradients = self._gradients(uses)
                if record is not None:
                    record.lap(spans.MOVES, "before", stage.scope)
                dy = stage.layer.backward(weights, kept, dy, gradients)
                if record is not None:
                    record.lap(spans.COMPUTE, "backward", stage.scope)
            self._finish_stage(plan, contributors, last)
        if record is not None:
            record.lap(spans.MOVES, "after")
        self._synced = False
        return dy

    def _finish_stage(self, plan: StagePlan, contributors: int | None, last: bool) -> None:
        self._release(plan)
        self._start_reductions(plan, self.comm.size if contributors is None else contributors, last)
        self.owners.progress()

    def forward_backward(
        self, x: Any, targets: Any, scale: float, *, contributors: int | None = None, last: bool = True
    ) -> Scalar | None:
        """Forward, cross-entropy of the output as logits, and backward, of one micro-batch. Returns the loss.

        The last stage runs both ways at once, so its layer need not hold all logits (`Layer.loss`). A rank
        without a micro-batch passes None for x and targets, and gets None. Otherwise as those two.
        """
        loss, dy = None, None
        y, saved = self._ascend(x, self.schedule.forward[:-1], training=True)
        self._saved = None
        stage, uses, plan = self.stages[-1], self._uses[-1], self.schedule.backward[-1]
        self._start_and_wait(self.schedule.forward[-1])
        self._start_and_wait(plan)
        record = spans.active
        if y is not None:
            targets, factor = device.in_use().from_host(targets), self.loss_scale.factor
            weights, gradients = self._weights(uses), self._gradients(uses)
            if record is not None:
                record.lap(spans.MOVES, "before", stage.scope)
            loss, dy = stage.layer.loss(weights, y, targets, scale * factor, gradients)
            loss = loss / factor
            if record is not None:
                record.lap(spans.COMPUTE, "loss", stage.scope)
        self._release(self.schedule.forward[-1])
        self._finish_stage(plan, contributors, last)
        self._descend(dy, saved, contributors, last)
        return loss

    def evaluate(self, x: Any, targets: Any, scale: float) -> Scalar | None:
        """The loss alone, without what backward would need; None for a rank without a micro-batch."""
        *plans, plan = self.schedule.evaluate
        y, _ = self._ascend(x, plans, training=False)
        self._saved, loss = None, None
        self._start_and_wait(plan)
        if y is not None:
            layer, targets = self.stages[-1].layer, device.in_use().from_host(targets)
            loss = layer.evaluate(self._weights(self._uses[-1]), y, targets, scale)
        self._release(plan)
        self.owners.progress()
        return loss

    def _start_and_wait(self, plan: StagePlan) -> None:
        if self.strategy.shards_parameters:
            for unit in plan.start:
                self.units[unit].start_gather()
        for unit in plan.need:
            self.units[unit].wait_gather()

    def _release(self, plan: StagePlan) -> None:
        if self.strategy.shards_parameters:
            for unit in plan.drop:
                self.units[unit].release()

    def _start_reductions(self, plan: StagePlan, contributors: int, last: bool) -> None:
        if not last and accumulates_locally(self.comm, self.strategy):
            return
        for number in plan.reduce:
            while len(self._reducing) >= REDUCTIONS_IN_FLIGHT:
                self._reducing.popleft().wait_reduce()
            self.units[number].start_reduce(contributors)
            self._reducing.append(self.units[number])

    def _weights(self, uses: tuple[int, ...]) -> Views:
        if len(uses) == 1:
            return self.units[uses[0]].weights()
        return {name: view for unit in uses for name, view in self.units[unit].weights().items()}

    def _gradients(self, uses: tuple[int, ...]) -> Views:
        if len(uses) == 1:
            return self.units[uses[0]].gradients()
        return {name: view for unit in uses for name, view in self.units[unit].gradients().items()}

    # ------------------------------------------------------------------------------------ around a step

    def prefetch_forward_params(self) -> None:
        """Start the gathers of the next forward now, for example while a batch is being read.

        Raises ValueError if that has been done since the last forward, or if nothing is ever gathered.
        """
        if not self.strategy.shards_parameters:
            raise ValueError(
                f"prefetch: strategy {self.strategy.name} keeps parameters whole, nothing to gather"
            )
        if self.has_pending_prefetch:
            raise ValueError("prefetch: already started; run forward before the next prefetch")
        for unit in self.schedule.forward[0].start:
            self.units[unit].start_gather()

    @property
    def has_pending_prefetch(self) -> bool:
        """Whether gathered parameters wait for a forward to begin."""
        return (
            self.strategy.shards_parameters
            and self._saved is None
            and any(unit.gathered for unit in self.units)
        )

    def drop_gathered(self) -> None:
        """Give up what was gathered, and a forward whose backward has not come: both are out of date."""
        super().drop_gathered()
        self._saved = None

    def overlapped_sync_gradients(self) -> Handle:
        """Complete the step's reductions, and start what else gradients need; `wait` on the result.

        Only NO_SHARD has such a rest, the gather of the summed slices.
        """
        while self._reducing:
            self._reducing.popleft().wait_reduce()
        handles = [] if self._synced else [unit.start_gradient_gather() for unit in self.units]
        self._synced = True
        return AllOf(handles)

    def sync_gradients(self) -> None:
        """Return when `gradients` are the sums over all ranks and micro-batches of the step."""
        self.overlapped_sync_gradients().wait()

    def broadcast_updated_params(self) -> None:
        """After the slices were updated: say so, and start to bring them to ranks that keep the whole.

        The next forward waits for each unit where it needs it.
        """
        self.owners.publish()
        if self.strategy.shards_moments and not self.strategy.shards_parameters:
            for unit in self.units:
                if unit.unit.trainable:
                    unit.start_update()

    def zero_gradients(self) -> None:
        """Forget the step's gradients."""
        self._reducing.clear()
        for unit in self.units:
            unit.reset()

    def gradients(self) -> Iterator[tuple[str, Array]]:
        """(unit, this rank's slice of its summed gradient) for trainable units, after `sync_gradients`."""
        for unit in self.units:
            if unit.unit.trainable:
                yield unit.name, unit.gradient

    @property
    def module(self) -> list[Stage]:
        """The model that is sharded."""
        return self.stages

    def into_inner(self) -> tuple[list[Stage], dict[str, Array]]:
        """The model and its whole parameters, on every rank: leaves sharding behind. Collective."""
        return self.stages, self.state_dict()


class AllOf(Handle):
    """Several transfers as one."""

    def __init__(self, handles: list[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()

    def test(self) -> bool:
        return sum(not handle.test() for handle in self._handles) == 0  # each must be pushed on


def owned_by_nodes(comm: Comm, strategy: Strategy) -> bool:
    """Whether slices are dealt out to the ranks of each node instead of to all."""
    return strategy.within_nodes or (comm.replicates_by_node and not strategy.shards_moments)


def check_reduction(comm: Comm, precision: Precision) -> None:
    """Raise UsageError where the transport leaves sums to the library, which has none of low types."""
    if not comm.exact and precision.reduce != FLOAT32:
        raise UsageError(
            f"--precision {precision.name} with --reduction fast: the MPI library does not add "
            f"{precision.reduce.name}; use --reduction exact, or --reduce-dtype fp32"
        )


def check_patterns(patterns: Sequence[str], params: Mapping[str, Param]) -> None:
    """Raise ValueError for a pattern that matches nothing: most likely a slip of the pen."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in params):
            raise ValueError(
                f"frozen pattern {pattern!r} matches no parameter; names are like "
                f"{', '.join(list(params)[:3])}"
            )
