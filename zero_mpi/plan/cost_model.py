"""How long a collective takes, from the sizes and the machine's links: the alpha-beta model.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005. A gather
is a ring, or for short ones a tree; the exact reduction over messages sends each slice straight to its owner,
so a node's link carries the slices of all its ranks. Sums that travel from node to node are a pipeline, in
which every link carries a unit once; while the last piece of one is on its way, the next unit's begin.
"""

from __future__ import annotations

from zero_mpi.comm import kinds
from zero_mpi.comm.scratch import EXACT_PIECE, chain_piece
from zero_mpi.plan.case import Case
from zero_mpi.plan.line import Cost
from zero_mpi.plan.machine import Link, Machine
from zero_mpi.plan.simulate import ALLREDUCE, GATHER, GATHER_SUMS
from zero_mpi.sharding.unit import BYTES

SHORT = 512 << 10  # bytes; up to here MPICH gathers in a tree


def slowest(case: Case, machine: Machine) -> Link:
    """The link that all ranks wait for."""
    return machine.between if case.nodes > 1 else machine.node


def gather_seconds(case: Case, machine: Machine, unit: int, itemsize: int) -> float:
    """To bring a unit together on all its owners. Where memory is shared there is nothing to bring."""
    if case.shares_wholes or case.ranks == 1:
        return 0.0
    partition = case.partitions[unit]
    own, length = itemsize * partition.counts[0], itemsize * partition.length
    if case.hybrid:
        return ring_seconds(case.per_node, machine.node, own, length)
    if case.shares_gathers and case.strategy.shards_parameters:  # lanes, which share their node's link
        of_node = itemsize * partition.bounds[case.per_node]
        return ring_seconds(case.nodes, machine.between, of_node, length, rings=of_node // own)
    return ring_seconds(case.ranks, slowest(case, machine), own, length)


def ring_seconds(members: int, link: Link, part: int, whole: int, rings: int = 1) -> float:
    """To pass parts on in a ring until every member has the whole, or a short one in a tree; bytes.

    `part`: the longest. In a ring it passes one link after the other; no member of a tree gets more than all.
    Of several `rings` over the same links each has its share of the bytes, and while a message of one is on
    its way the links carry the others'.
    """
    steps, short = members - 1, whole < SHORT * rings
    moved = (min(steps * part, whole) if short else steps * part) * link.beta
    latency = (steps.bit_length() if short else steps) * link.alpha
    return max(moved, latency + moved / rings)


def reduce_cost(case: Case, machine: Machine, unit: int) -> Cost:
    """To sum a unit's gradient into slices."""
    if case.passes_sums:
        own = case.partitions[unit].counts[0]
        return chain_cost(case, machine, case.partitions[unit].length, own)
    return Cost(reduce_seconds(case, machine, unit))


def reduce_seconds(case: Case, machine: Machine, unit: int) -> float:
    """The same where every slice comes to its owner straight."""
    if case.ranks == 1 or case.transport == kinds.SERIAL:
        return 0.0
    own, itemsize = case.partitions[unit].counts[0], case.reduce_bytes
    added = own * (case.ranks * itemsize + BYTES) / machine.moves
    if case.transport == kinds.SHARED:  # the owner reads what the others wrote
        return machine.node.alpha + max(added, itemsize * own * (case.ranks - 1) * machine.node.beta)
    return exchange_seconds(case, machine, unit) + added * case.exact


def exchange_seconds(case: Case, machine: Machine, unit: int) -> float:
    """To send every slice of a unit to its owner."""
    partition, mates = case.partitions[unit], case.per_node
    own, itemsize = partition.counts[0], case.reduce_bytes
    inside = itemsize * own * (mates - 1) * machine.node.beta
    between = itemsize * mates * max(0, partition.length - own * mates) * machine.between.beta
    pieces = -(-own // EXACT_PIECE)
    return pieces * slowest(case, machine).alpha + max(inside, between)


def chain_cost(case: Case, machine: Machine, length: int, own: int) -> Cost:
    """To pass the sum of a unit from node to node in pieces; where all nodes want it, back as well.

    A node between two others then sends both ways over its link, and the last of these is where sums turn.
    Sums are float32; no piece is longer than the slice of its owner, which has `own` elements. The last piece
    has to pass all links, which meanwhile carry other lanes' pieces and the next unit's.
    """
    link, hops, nbytes = machine.between, case.nodes - 1, BYTES * length
    piece = BYTES * min(chain_piece(case.nodes), own)
    links = hops * (link.alpha + piece * link.beta)
    added = length / case.per_node * (case.per_node * case.reduce_bytes + BYTES) / machine.moves
    way = nbytes * link.beta
    back = way if case.nodes > 2 else 0.0  # two nodes send each a way of its own
    if case.hybrid:
        return Cost(way + added, back, 2 * links)
    return Cost(way + added + back / case.nodes, after=links)  # sums that come back to their owners


def allreduce_seconds(case: Case, machine: Machine, nbytes: int) -> float:
    """To sum a vector on all ranks, in place: a reduction into slices and a gather of them."""
    if case.ranks == 1:
        return 0.0
    link, depth = slowest(case, machine), (case.ranks - 1).bit_length()
    if nbytes < SHORT:
        return depth * (link.alpha + nbytes * link.beta)
    sharing, parts = (case.per_node, case.nodes) if case.nodes > 1 else (1, case.ranks)
    return 2 * (depth * link.alpha + sharing * nbytes * (1 - 1 / parts) * link.beta)


def unit_cost(case: Case, machine: Machine, unit: int, kind: str) -> Cost:
    """One transfer of a unit: a gather, or its reduction."""
    if kind in (GATHER, GATHER_SUMS):
        itemsize = BYTES if kind == GATHER_SUMS else case.kept_bytes(unit)
        return Cost(gather_seconds(case, machine, unit, itemsize))
    if kind == ALLREDUCE:
        return Cost(allreduce_seconds(case, machine, BYTES * case.partitions[unit].length))
    return reduce_cost(case, machine, unit)
