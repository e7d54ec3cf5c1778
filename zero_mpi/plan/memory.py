"""Bytes that the largest rank holds, by what they are for; every size comes from the runtime's own layout.

Rank 0 is the largest: it owns the longest slice of every unit. They lie on its device; what a rank with a GPU
keeps in the host's memory is told apart. Beside what is listed a process has its interpreter and libraries
(some 100 MB; a CUDA context and the kernels of libraries), the tokens of the corpus, and whatever the MPI
library takes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from zero_mpi.comm.shared.slots import padded
from zero_mpi.plan.case import NODES, SERIAL, SHARED, Case
from zero_mpi.plan.simulate import kernels_of, rehearse
from zero_mpi.sharding.offload import OF_MOMENTS, OF_STATE, ROOMS, piece_of
from zero_mpi.sharding.schedule import REDUCTIONS_IN_FLIGHT
from zero_mpi.sharding.unit import BYTES, Unit

# Of transports that cannot be imported without MPI; a test compares.
EXACT_PIECE, DEPTH = 1 << 18, 2  # comm.mpi: elements of a slice at a time, pieces in flight
RELAY_PIECE, RELAY_DEPTH = 1 << 17, 4  # comm.nodes.chain_sum: the same, of sums that travel from node to node
AWARE_PIECE, AWARE_DEPTH = 1 << 20, 2  # comm.gpu.cuda_aware: elements of a slice, rounds
STAGE, LEAST_STAGE, STAGED_DEPTH, ALIGNED = 8 << 20, 64 << 10, 3, 1024  # comm.gpu.staged: bytes, rounds
TRANSFERS = 4  # comm.gpu.comm: under way at once
COUNTERS = 8 * 104  # comm.shared.counters: bytes of a rank
PAGE = 4096
ROUNDS = 2  # from the second on every round finds the buffers that it needs
NUMBER = 8  # bytes of a float64 or an int64


@dataclass(frozen=True)
class Memory:
    """Bytes on rank 0.

    parameters, gradients, moments   kept between rounds and steps: slices, or wholes where replicated; where
                    a node shares one copy, this rank's part of it
    masters         the parameters in float32, where `parameters` are rounded copies of them
    rooms           on the GPU, for moments that pass through it
    gathered        units that are whole for a while
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
    seen = rehearse(case, ROUNDS)
    slices = [partition.counts[0] for partition in case.partitions]
    units = list(zip(case.layout.units, slices, strict=True))
    buffers = sum(padded(length) for length in case.layout.buffers)
    gathers = sum(padded(length) for length in case.layout.gathers)
    kinds, trained = case.precision, [(unit, own) for unit, own in units if unit.trainable]
    moments = 2 * BYTES * sum(updated(case, unit, own) for unit, own in trained)
    snapshot = BYTES * sum(own * (3 if unit.trainable else 1) for unit, own in units) * case.async_save
    masters = BYTES * sum(updated(case, unit, own) for unit, own in units) * kinds.is_low
    on_host = moments * case.offloads + masters * case.offloads_masters
    on_host += snapshot * case.on_gpu + pinned(case)
    return Memory(
        parameters=case.compute_bytes * sum(kept_parameters(case, unit, own) for unit, own in units),
        masters=0 if case.offloads_masters else masters,
        gradients=BYTES * sum(kept_gradients(case, unit, own) for unit, own in trained),
        moments=0 if case.offloads else moments,
        rooms=rooms(case, trained) if case.offloads else 0,
        gathered=-(-gathers // case.per_node) if case.shares_gathers else seen.gathered,
        gradient_buffers=buffers if case.shares_slots else seen.gradient_buffers,
        activations=seen.activations,
        logits=seen.logits,
        transport=arriving(case),
        tables=tables(case, units),
        workspace=kernels_of(case).workspace,
        snapshot=0 if case.on_gpu else snapshot,
        node_shared=node_shared(case, gathers, buffers),
        host=on_host,
    )


def kept_parameters(case: Case, unit: Unit, own: int) -> int:
    """Elements of a unit's parameters on rank 0; what ranks share counts by slices."""
    shared = case.shares_wholes and case.strategy.shards_moments
    return own if shared or case.strategy.shards_parameters else unit.length


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
    places = sum(-(-own // unit.quantum) for unit, own in units)
    decaying = sum(-(-updated(case, unit, own) // unit.quantum) for unit, own in units if unit.trainable)
    return NUMBER * (places + decaying + 2 * chunks(case))


def chunks(case: Case) -> int:
    """Chunks of the whole gradient, over which its norm is summed."""
    return sum(unit.length // unit.quantum for unit in case.layout.units if unit.trainable)


def arriving(case: Case) -> int:
    """Bytes of what reductions receive before it is added."""
    if case.ranks == 1 or case.transport in (SERIAL, SHARED):
        return 0
    if case.on_gpu:
        return device_scratch(case)
    if case.hybrid or (case.transport == NODES and case.strategy.shards_moments):
        return relay_scratch(case)
    return exact_scratch(case) if case.exact else fast_scratch(case)


def relay_scratch(case: Case) -> int:
    """Pieces of sums that come from the node before, and of the node's gradients where no memory is shared.

    A lane carries a slice of each node's owners, or where every node has all of them the rank's own.
    """
    carried = longest_slice(case) * (1 if case.hybrid else case.nodes)
    pieces = min(RELAY_DEPTH, -(-carried // RELAY_PIECE))
    posted = 0 if case.shares_slots else case.per_node - 1  # of the node's other ranks, as they travel
    sizes = BYTES + posted * case.reduce_bytes
    return in_flight(case) * pieces * min(RELAY_PIECE, longest_slice(case)) * sizes


def exact_scratch(case: Case) -> int:
    """Pages that pieces of the other ranks' slices lie in, while an exact reduction over messages adds them.

    Each reduction under way has up to two pieces of every contributor; rounds with fewer contributors have
    rooms of their own. A room has places of EXACT_PIECE elements; shorter slices touch their beginnings.
    """
    longest = longest_slice(case)
    place = -(-min(longest, EXACT_PIECE) * case.reduce_bytes // PAGE) * PAGE
    rooms = min(DEPTH, -(-longest // EXACT_PIECE)) * in_flight(case)
    return rooms * place * sum(count - 1 for count in contributor_counts(case))


def device_scratch(case: Case) -> int:
    """On a GPU, rooms for pieces of the other ranks' slices, for each reduction under way."""
    itemsize, others = case.reduce_bytes, case.ranks - 1
    if case.stages:
        place, depth = staged_piece(case) // itemsize // ALIGNED * ALIGNED, STAGED_DEPTH
    else:
        place, depth = AWARE_PIECE, AWARE_DEPTH
    return in_flight(case) * depth * others * place * itemsize


def staged_piece(case: Case) -> int:
    """Bytes of pinned memory for a piece of one other rank."""
    return max(LEAST_STAGE, STAGE // (case.ranks - 1))


def pinned(case: Case) -> int:
    """Bytes of the host that transfers go through, for as many as may be under way."""
    if not case.stages or case.ranks == 1:
        return 0
    return TRANSFERS * STAGED_DEPTH * 2 * staged_piece(case) * (case.ranks - 1)


def fast_scratch(case: Case) -> int:
    """A slice that arrives, where it is added to that of earlier rounds."""
    if not case.strategy.shards_moments or len(case.rounds) == 1:
        return 0  # the first round's arrives where it stays
    return BYTES * longest_slice(case) * in_flight(case)


def longest_slice(case: Case) -> int:
    """Elements of rank 0's largest slice of what is reduced."""
    sizes = zip(case.layout.units, case.partitions, strict=True)
    return max((partition.counts[0] for unit, partition in sizes if unit.trainable), default=0)


def in_flight(case: Case) -> int:
    """Reductions under way at once, at most."""
    return min(REDUCTIONS_IN_FLIGHT, sum(unit.trainable for unit in case.layout.units))


def contributor_counts(case: Case) -> list[int]:
    """The different numbers of ranks that have a micro-batch in some round."""
    rounds = case.rounds
    return sorted({rounds.contributors(0), rounds.contributors(len(rounds) - 1)})


def node_shared(case: Case, gathers: int, buffers: int) -> int:
    """Bytes of a node's shared windows: wholes or gathered units once, gradients of each rank, counters."""
    if not case.shares_slots:
        return 0
    wholes = case.layout.wholes(case.strategy, case.owners) if case.shares_wholes else []
    once = gathers if case.shares_gathers else sum(padded(whole.length) for whole in wholes)
    return max(1, once + case.per_node * buffers) + COUNTERS * case.per_node
