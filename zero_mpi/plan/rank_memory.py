"""Bytes that the largest rank holds, by what they are for; every size comes from the runtime's own layout.

Rank 0 is the largest: it owns the longest slice of every unit. They lie on its device; what a rank with a GPU
keeps in the host's memory is told apart. Beside what is listed a process has its interpreter and libraries
(some 100 MB; a CUDA context and the kernels of libraries), the tokens of the corpus, and whatever the MPI
library takes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from zero_mpi.comm.scratch import Reductions
from zero_mpi.comm.shared.gradient_pool import padded
from zero_mpi.comm.shared.words import RANK_BYTES
from zero_mpi.plan.case import Case
from zero_mpi.plan.simulate import KERNELS, simulate
from zero_mpi.sharding.offload import OF_MOMENTS, OF_STATE, ROOMS, piece_of
from zero_mpi.sharding.schedule import REDUCTIONS_IN_FLIGHT
from zero_mpi.sharding.unit import BYTES, Unit

ROUNDS = 2  # from the second on every round finds the buffers that it needs
NUMBER = 8  # bytes of a float64 or an int64


@dataclass(frozen=True)
class Memory:
    """Bytes on rank 0.

    parameters, gradients, moments   kept between rounds and steps: slices, or wholes where replicated; where
                    a node shares one copy, this rank's part of it; a moving average counts as a moment
    masters         the parameters in float32, where `parameters` are rounded copies of them
    rooms           on the GPU, for moments that pass through it
    gathered        units that are whole for a while
    unpacked        what is made for layers of gathered blocks
    gradient_buffers  gradients of a micro-batch before they are reduced
    activations, logits   what layers keep and make, in memory that is used again
    transport       slices that arrive in a reduction
    tables          where chunks lie, which ones decay, their sums of squares
    workspace       of the GPU's library of matrix products
    snapshot        copies while a checkpoint is written in the background
    node_shared     not of a rank: what the ranks of a node need in /dev/shm together
    host            not on the device: pinned memory of a rank with a GPU, and its snapshot
    """

    parameters: int
    masters: int
    gradients: int
    moments: int
    rooms: int
    gathered: int
    unpacked: int
    gradient_buffers: int
    activations: int
    logits: int
    transport: int
    tables: int
    workspace: int
    snapshot: int
    node_shared: int
    host: int

    @property
    def total(self) -> int:
        """Of the rank, on its device."""
        return int(sum(asdict(self).values())) - self.node_shared - self.host

    @property
    def state(self) -> int:
        """What lasts from step to step."""
        return self.parameters + self.masters + self.gradients + self.moments


def plan_memory(case: Case) -> Memory:
    """The memory of a case."""
    seen = simulate(case, ROUNDS)
    slices = [partition.counts[0] for partition in case.partitions]
    units = list(zip(case.layout.units, slices, strict=True))
    buffers = sum(padded(length) for length in case.layout.buffers)
    gathers = sum(padded(length) for length in case.layout.gathers)
    kinds, trained = case.precision, [(unit, own) for unit, own in units if unit.trainable]
    averages = case.ema is not None
    moments = (2 + averages) * BYTES * sum(updated(case, unit, own) for unit, own in trained)
    snapshot = BYTES * sum(own * copies(case, unit) for unit, own in units) * case.async_save
    rounded = [(unit, own) for unit, own in units if not unit.room_unpacked(kinds.compute)]
    masters = BYTES * sum(updated(case, unit, own) for unit, own in rounded) * kinds.is_low
    on_host = moments * case.offloads + masters * case.offloads_masters
    on_host += snapshot * case.on_gpu + case.transport.pinned(case.ranks)
    return Memory(
        parameters=sum(
            unit.kept_bytes(kinds.compute) * kept_parameters(case, unit, own) for unit, own in units
        ),
        masters=0 if case.offloads_masters else masters,
        gradients=BYTES * sum(kept_gradients(case, unit, own) for unit, own in trained),
        moments=0 if case.offloads else moments,
        rooms=rooms(case, trained) if case.offloads else 0,
        gathered=-(-gathers // case.per_node) if case.shares_gathers else seen.gathered,
        unpacked=seen.unpacked,
        gradient_buffers=buffers if case.shares_slots else seen.gradient_buffers,
        activations=seen.activations,
        logits=seen.logits,
        transport=case.transport.scratch(reductions(case)),
        tables=tables(case, units),
        workspace=KERNELS[case.device].workspace,
        snapshot=0 if case.on_gpu else snapshot,
        node_shared=node_shared(case, gathers, buffers),
        host=on_host,
    )


def copies(case: Case, unit: Unit) -> int:
    """How often a slice is copied for the files of a checkpoint; an average has the frozen ones as well."""
    average = case.ema is not None and (unit.trainable or case.model.lora is None)
    whole = 1 if unit.trainable or case.model.lora is None else 0
    return whole + average + 2 * unit.trainable


def kept_parameters(case: Case, unit: Unit, own: int) -> int:
    """Elements of a unit's parameters on rank 0; what ranks share counts by slices."""
    return own if keeps_slices(case) else unit.dealt[0]


def keeps_slices(case: Case) -> bool:
    """Whether a rank counts its slices of parameters alone."""
    shared = case.shares_wholes and case.strategy.shards_moments
    return shared or case.strategy.shards_parameters


def kept_gradients(case: Case, unit: Unit, own: int) -> int:
    """Elements of a unit's summed gradient on rank 0."""
    if case.strategy.shards_moments or case.shares_wholes:
        return own
    if not case.allreduces:
        return unit.length + own  # the slice is summed beside the whole, into which it is gathered
    return unit.length


def updated(case: Case, unit: Unit, own: int) -> int:
    """Elements of a unit that rank 0's optimizer works on."""
    return own if case.strategy.shards_moments else unit.length


def rooms(case: Case, trained: list[tuple[Unit, int]]) -> int:
    """Bytes of the rooms that what is offloaded passes through."""
    pieces = [min(updated(case, unit, own), piece_of(unit.quantum)) for unit, own in trained]
    arrays = OF_STATE if case.offloads_masters else OF_MOMENTS
    return ROOMS * arrays * BYTES * max(pieces, default=0)


def tables(case: Case, units: list[tuple[Unit, int]]) -> int:
    """Numbers a chunk: its place (of slices), whether it decays (of what is updated), squares twice."""
    places = sum(-(-own // unit.quantum) for unit, own in units if unit.trainable)
    decaying = sum(-(-updated(case, unit, own) // unit.quantum) for unit, own in units if unit.trainable)
    return NUMBER * (places + decaying + 2 * chunks(case))


def chunks(case: Case) -> int:
    """Chunks of the whole gradient, over which its norm is summed."""
    return sum(unit.length // unit.quantum for unit in case.layout.units if unit.trainable)


def reductions(case: Case) -> Reductions:
    """What the transport of a case is asked to reduce."""
    units, rounds = zip(case.layout.units, case.partitions, strict=True), case.rounds
    slices = tuple(partition.counts[0] for unit, partition in units if unit.trainable)
    return Reductions(
        ranks=case.ranks,
        nodes=case.nodes,
        per_node=case.per_node,
        slices=slices,
        itemsize=case.reduce_bytes,
        in_flight=min(REDUCTIONS_IN_FLIGHT, len(slices)),
        contributors=tuple(sorted({rounds.contributors(0), rounds.contributors(len(rounds) - 1)})),
        exact=case.exact,
        accumulates=case.strategy.shards_moments and len(rounds) > 1,
        replicated=case.hybrid,
    )


def node_shared(case: Case, gathers: int, buffers: int) -> int:
    """Bytes of a node's shared windows: wholes or gathered units once, gradients of each rank, counters."""
    if not case.shares_slots:
        return 0
    wholes = case.layout.wholes(case.strategy, case.owners) if case.shares_wholes else []
    once = gathers if case.shares_gathers else sum(padded(whole.length) for whole in wholes)
    return max(1, once + case.per_node * buffers) + RANK_BYTES * case.per_node
