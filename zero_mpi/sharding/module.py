"""A model whose parameters, gradients or both are spread over ranks.

`ShardedModule.schedule` is what a rank does in a step, as lists of actions: print it. `actions.run` follows
them. One rank takes the same path. Gradients are summed, never divided: scale the loss by one over the tokens
of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.arguments import came, instance, some, whole
from zero_mpi.comm import AllOf, Comm, Handle
from zero_mpi.comm.agree import agreed
from zero_mpi.device.arrays import BufferPool, Scalar
from zero_mpi.device.types import Array
from zero_mpi.nn.layer import Stage
from zero_mpi.nn.loss import HeadLoss, loss_with
from zero_mpi.sharding.actions import GATHERING, Actions, run, without
from zero_mpi.sharding.block_unit import Stored
from zero_mpi.sharding.gradients import accumulates_locally
from zero_mpi.sharding.layout import BUCKET_MB, is_trainable
from zero_mpi.sharding.loss_scale import LossScale
from zero_mpi.sharding.module_arguments import check_arguments
from zero_mpi.sharding.parameters import Context, Views, joined
from zero_mpi.sharding.passes import GivenGradients, Pass
from zero_mpi.sharding.precision import FP32, Precision
from zero_mpi.sharding.schedule import Schedule
from zero_mpi.sharding.sharded_state import ShardedState
from zero_mpi.sharding.sharded_unit import ShardedUnit
from zero_mpi.sharding.strategy import FULL_SHARD, Strategy
from zero_mpi.sharding.tallies import Tallies
from zero_mpi.telemetry import spans

NONE = "there are no gradients yet"
SOME = "gradients of the step's last round are missing"
ALL = "all rounds are done"


class ShardedModule(ShardedState):
    """The stages of a model over the ranks of `comm`, under a strategy.

    stages      list of Stage(scope, layer); parameters of one scope travel together
    strategy    FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_SHARD
    prefetch    how many stages ahead parameters are gathered (FULL_SHARD, HYBRID_SHARD)
    bucket_mb   size of a unit in MiB where units are cut by bytes (NO_SHARD)
    frozen      name patterns ("blk.0.*"): no gradient, no moments, no reduction for these
    by_rows     one unit a parameter, cut between rows (dimension 0), where the strategy shards anything
    precision   FP32, BF16 or FP16: the type of gathered parameters, activations and gradients on their way

    offload_masters   in low precision on a GPU: keep float32 parameters in the host's memory; the optimizer
                needs offload="state" then
    stored      name -> BlockKind of frozen parameters that stay in the blocks of a file; on CPUs. They are
                filled by `load_stored`, gathered as bytes and unpacked where layers read them
    whole       name patterns of matrices that lie undivided on one rank each, as Muon needs them
    auxiliary   name -> scale of an auxiliary loss in the objective, in place of what its layer declares

    It takes no micro-batch before `initialize`, a load, or `broadcast_updated_params` after writing in place
    has given all parameters values. Making one is collective. Raises ValueError for impossible arguments, and
    UsageError for a precision that the transport cannot reduce and where ranks differ, on all ranks.
    """

    rounds_open = NONE  # the state of the gradients, checked before a use
    forgotten = 0  # how often gradients were forgotten: counts of rounds then begin anew

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
        stored: Stored | None = None,
        whole: Sequence[str] = (),
        auxiliary: Mapping[str, float] | None = None,
    ) -> None:
        instance("ShardedModule: comm", comm, Comm, "a communicator, from connect()")
        options = {"prefetch": prefetch, "bucket_mb": bucket_mb, "frozen": frozen, "by_rows": by_rows}
        options |= {"precision": precision, "offload_masters": offload_masters, "stored": stored}
        options |= {"whole": whole, "auxiliary": auxiliary}
        given = agreed(
            comm, f"this {type(self).__name__}", lambda: check_arguments(stages, comm, strategy, **options)
        )
        self.stages, self.frozen, layout = given.stages, given.frozen, given.layout
        self._uses, self.schedule, self.tallies = layout.uses, layout.schedule, Tallies(given.tallies)
        owners = comm.shard_group() if owned_by_nodes(comm, strategy) else comm
        memory = owners.memory(layout.wholes(strategy, owners.size), layout.buffers, layout.gathers)
        self.parameter_pool, self.gradient_pool = memory.gathers, memory.buffers
        self.unpacked_pool = BufferPool()
        context = Context(
            owners, strategy, memory.gathers, memory.buffers, precision, given.masters, self.unpacked_pool
        )
        dealt = layout.dealt(owners.size).units
        units = [ShardedUnit(unit, context, room) for unit, room in zip(dealt, memory.wholes, strict=True)]
        super().__init__(given.params, units, comm, strategy, owners, LossScale.start(precision.scales_loss))
        self.precision, self.by_rows = precision, bool(by_rows)
        self._forward: Pass | None = None  # whose backward is to come
        self._synced = False

    def is_trainable(self, name: str) -> bool:
        """Return whether a parameter is no buffer, and no frozen pattern matches its name."""
        return is_trainable(name, self.frozen) and not self.params[name].buffer

    # ---------------------------------------------------------------------------------- a micro-batch

    def forward(self, x: Any, training: bool | None = None) -> Any:
        """Return the model's output for x, on the host or the device; keep data for backward if `training`.

        If it is None, `is_training` decides. A rank that has no micro-batch in this round passes
        None: it joins the collectives and gets None. x may be `nn.Packed`: rows of several documents each.
        """
        self._begin()
        training = self.is_training if training is None else training
        micro_batch = Pass(self, x, keeps=training)
        run(self.schedule.forward if training else self.schedule.inference, self.units, micro_batch)
        y, micro_batch.x = micro_batch.x, None
        self._forward = micro_batch if training else None
        return y

    def backward(self, dy: Any, *, contributors: int | None = None, last: bool = True) -> Any:
        """Return dx of the first trained stage; add this micro-batch's gradients, start their reduction.

        `contributors`: ranks from this number on had no micro-batch in this round and pass dy = None.
        `last`: whether this is the step's last round; only NO_SHARD with fast reduction defers to it.
        """
        if self._forward is None:
            raise ValueError("backward needs a forward(x, training=True) before it")
        if (dy is None) != self._forward.is_idle:
            idle = self._forward.is_idle
            raise ValueError(
                f"backward: the forward before it had {'no' if idle else 'an'} input; expected "
                f"{'None' if idle else 'a gradient of its output'}, got {came(dy)}"
            )
        micro_batch, self._forward = self._forward, None
        micro_batch.contributors = self._contributors(contributors)
        micro_batch.dy = self.loss_scale.times(dy) if dy is not None and self.loss_scale.dynamic else dy
        spans.restart()
        self._descend(self._schedule_of(last).backward, micro_batch, last)
        return micro_batch.dy

    def forward_backward(
        self,
        x: Any,
        targets: Any,
        scale: float = 1.0,
        *,
        contributors: int | None = None,
        last: bool = True,
    ) -> Scalar | None:
        """Run forward, loss and backward of a micro-batch. Return the loss: a `HeadLoss` in place of targets,
        or `scale` times the cross-entropy of the output as logits.

        The last stage runs both ways at once, so its layer need not hold all logits (`Layer.loss`). A rank
        without a micro-batch passes None for x and targets, and gets None. Otherwise as forward and backward.
        """
        self._begin()
        micro_batch = Pass(self, x, loss_of=loss_with(targets, scale))
        micro_batch.contributors = self._contributors(contributors)
        self._descend(self._schedule_of(last).training, micro_batch, last)
        return micro_batch.loss

    def add_gradients(
        self, gradients: Mapping[str, Array] | None, *, contributors: int | None = None, last: bool = True
    ) -> None:
        """Add gradients by name, as a backward would; None: this rank has none in this round. Collective."""
        self._begin()
        micro_batch = GivenGradients(self, gradients)
        micro_batch.contributors = self._contributors(contributors)
        self._descend(without(GATHERING, self._schedule_of(last).backward), micro_batch, last)

    def evaluate(self, x: Any, targets: Any, scale: float = 1.0) -> Scalar | None:
        """Return the loss alone, without what backward would need; None for a rank without a micro-batch."""
        losses = self.losses(x, loss_with(targets, scale))
        return losses[0] if losses else None

    def losses(self, x: Any, loss_of: HeadLoss | None, *, adapted: bool = True) -> list[Scalar]:
        """Return the losses of a micro-batch's parts. None of it is kept for a backward.

        A rank without a micro-batch passes None twice, and gets no losses. Unless `adapted`, the products of
        adapters are left out.
        """
        self._begin()
        micro_batch = Pass(self, x, keeps=False, loss_of=loss_of, adapted=adapted)
        run(self.schedule.evaluation, self.units, micro_batch)
        return micro_batch.losses

    def _begin(self) -> None:
        """Begin a micro-batch. Raises ValueError while there are parameters that nothing has given values."""
        if self.unfilled:
            raise ValueError(
                f"the parameters {some(sorted(self.unfilled))} have no values yet: call initialize, "
                "load_state_dict or zero_mpi.load first, or broadcast_updated_params after writing to them"
            )
        self._forward = None
        spans.restart()

    def _schedule_of(self, last: bool) -> Schedule:
        """Return a round's schedule: where micro-batches are summed on the rank, only the last reduces."""
        defers = not last and accumulates_locally(self.comm, self.strategy)
        return self.schedule.without_reductions if defers else self.schedule

    def _contributors(self, given: int | None) -> int:
        return whole(
            "backward: contributors", self.comm.size if given is None else given, 0, self.comm.size + 1
        )

    def _descend(self, actions: Actions, micro_batch: Pass, last: bool) -> None:
        self.rounds_open = ALL if last else SOME
        run(actions, self.units, micro_batch)
        self.tallies.add(micro_batch.batch)
        spans.lap(spans.BETWEEN, "after")
        self._synced = False

    def weights_of(self, stage: int) -> Views:
        """Return the gathered parameters of a stage's units, by name."""
        return joined([self.units[unit].weights() for unit in self._uses[stage]])

    def factors(self) -> Mapping[str, float]:
        """Return the factors of auxiliary losses in the scaled objective, by name."""
        return self.tallies.factors(self.loss_scale.factor)

    def gradients_of(self, stage: int) -> Views:
        """Return the gradients that a stage's backward adds to, by name; none of what is frozen."""
        return joined([self.units[unit].gradients() for unit in self._uses[stage]])

    # ------------------------------------------------------------------------------------ around a step

    def prefetch_forward_params(self) -> None:
        """Start the gathers of the next forward now, for example while a batch is being read.

        Raises ValueError if that has been done since the last forward, or if nothing is ever gathered.
        """
        if not self.strategy.shards_parameters:
            raise ValueError(
                f"prefetch: strategy {self.strategy.name} keeps full parameters, so there is nothing to "
                "gather"
            )
        if self.has_pending_prefetch:
            raise ValueError("prefetch: already started; run forward before the next prefetch")
        for unit in self.schedule.first_gathers:
            self.units[unit].start_gather()

    @property
    def has_pending_prefetch(self) -> bool:
        """Return whether gathered parameters wait for a forward to begin."""
        return (
            self.strategy.shards_parameters
            and self._forward is None
            and any(unit.parameters.is_gathered for unit in self.units)
        )

    def drop_gathered(self) -> None:
        """Give up what was gathered, and a forward whose backward has not come: both are out of date."""
        super().drop_gathered()
        self._forward = None

    def overlapped_sync_gradients(self) -> Handle:
        """Complete the step's reductions, and start what else gradients need; `wait` on the result.

        Only NO_SHARD has such a rest, the gather of the summed slices.
        """
        for unit in self.schedule.reductions:
            self.units[unit].wait_reduce()
        handles = [] if self._synced else [unit.gradient.start_gather() for unit in self.units]
        self._synced = True
        return AllOf(handles)

    def sync_gradients(self) -> None:
        """Return when `gradients` are the sums over all ranks and micro-batches of the step."""
        self.overlapped_sync_gradients().wait()

    def start_updates(self) -> None:
        """Announce an update of all units, and start to bring it to ranks that keep the whole."""
        self.owners.signal_written()
        if self.strategy.shards_moments:  # otherwise every rank has updated everything
            for unit in self.units:
                if unit.unit.trainable:
                    unit.parameters.start_update()

    def update_buffers(self) -> None:
        """Let layers update their buffers by the sums of the step, except frozen ones. Collective."""
        buffers = [name for name, param in self.params.items() if param.buffer]
        names = [name for name in buffers if is_trainable(name, self.frozen)]
        if names:
            sums, to_host = self.tallies.sums(self.comm), device.in_use().to_host
            values = {name: np.array(to_host(self.all_gather_param(name))) for name in buffers}
            for layer in {id(stage.layer): stage.layer for stage in self.stages}.values():
                layer.update(values, sums)
            self.load_slices(lambda name, start, stop: values[name].reshape(-1)[start:stop], names)

    def zero_gradients(self) -> None:
        """Forget the step's gradients."""
        self.tallies.forget()
        self.rounds_open, self.forgotten = NONE, self.forgotten + 1
        for unit in self.units:
            unit.gradient.reset()

    def check_gradients(self, what: str) -> None:
        """Raise ValueError unless all gradients of the step, which `what` needs, are complete."""
        if self.rounds_open != ALL:
            raise ValueError(
                f"{what}: {self.rounds_open}; call GradAccum.accumulate, or forward and backward, for every "
                "round of the step before it"
            )

    def gradients(self) -> Iterator[tuple[str, Array]]:
        """Yield (unit, this rank's slice of its summed gradient) where trained, after `sync_gradients`."""
        for unit in self.units:
            if unit.unit.trainable:
                yield unit.name, unit.gradient.sum

    def named_gradients(self) -> Iterator[tuple[str, Array]]:
        """Yield (name, this rank's elements of the summed gradient, flat), after `sync_gradients`."""
        for unit in self.units:
            if unit.unit.trainable:
                for segment in unit.unit.segments(unit.parameters.elements):
                    yield segment.name, unit.gradient.sum[segment.where]

    @property
    def module(self) -> list[Stage]:
        """The model that is sharded."""
        return self.stages

    def into_inner(self) -> tuple[list[Stage], dict[str, Array]]:
        """Return the model and its whole parameters, on every rank: leaves sharding behind. Collective."""
        return self.stages, self.state_dict()


def owned_by_nodes(comm: Comm, strategy: Strategy) -> bool:
    """Return whether slices are dealt out to the ranks of each node instead of to all."""
    return strategy.within_nodes or (comm.replicates_by_node and not strategy.shards_moments)
