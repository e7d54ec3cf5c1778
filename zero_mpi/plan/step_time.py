"""Time of a step: computing, transfers that cannot be hidden, and latency.

The module replays the events of a simulated step on a clock. Computing advances the clock. A transfer begins
when its link is free and completes some time later, while the rank computes; a wait moves the clock to that
time. The waiting time is exposed communication. Inside one node a transfer is a copy by the ranks' own cores,
so no transfer is hidden there, unless GPUs compute. All ranks are assumed to be as fast as rank 0.

Collectives follow the alpha-beta model of Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005. Sums that pass from node to node are pipelined: a unit crosses
every link once, or twice if every node needs the sum.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from zero_mpi.comm import kinds
from zero_mpi.comm.kinds import EXACT_CHUNK, chain_chunk
from zero_mpi.plan import rank_memory
from zero_mpi.plan import simulate as script
from zero_mpi.plan.case import Case
from zero_mpi.plan.machine import Link, Machine
from zero_mpi.plan.traffic import FLAGS
from zero_mpi.sharding.unit import BYTES

UPDATE_PASSES = 7  # AdamW reads parameter, gradient and both moments, and writes three of them
SHORT = 512 << 10  # bytes; MPICH gathers shorter data in a tree


class Cost(NamedTuple):
    """Seconds of a transfer: on the busiest link, where transfers queue, and on all other links."""

    busy: float
    after: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on rank 0, and floating-point operations of its products."""

    seconds: float
    computation: float
    communication: float  # total seconds of all transfers
    exposed: float  # seconds in which the rank waits for transfers
    flop: float


def plus(a: StepTime, b: StepTime, times: float = 1.0) -> StepTime:
    return StepTime(*(x + times * y for x, y in zip(astuple(a), astuple(b), strict=True)))


class Player:
    """Simulated clock, which events advance. `now` is its time in seconds; `time` is the StepTime so far."""

    def __init__(self, case: Case, machine: Machine) -> None:
        self.case, self.machine = case, machine
        self.overlaps = case.nodes > 1 or case.on_gpu
        self.now = self.computed = self.communicated = self.exposed = self.flop = 0.0
        self._link_free = 0.0
        self._complete: dict[tuple[str, int], float] = {}  # transfer -> time when it is complete
        self._costs: dict[tuple[str, int], Cost] = {}

    @property
    def time(self) -> StepTime:
        return StepTime(self.now, self.computed, self.communicated, self.exposed, self.flop)

    def play(self, events: Iterable[script.StepEvent]) -> None:
        for event in events:
            if event.kind == script.COMPUTE:
                self.compute(event.flop, event.moved_bytes)
            elif event.kind == script.WAIT:
                self.wait(self._complete.pop((event.transfer, event.unit), 0.0))
            elif event.kind in script.TRANSFERS:
                self.start(event.kind, event.unit)
            elif event.kind == script.UPDATE:
                self.update(sum(self.case.updated(unit, count) for unit, count in self.case.trained_slices))
            else:
                self.sum_vector(event.kind)

    def compute(self, flop: float, moved: float) -> None:
        seconds = flop / self.machine.flops + moved / self.machine.moves
        self.flop += flop
        self.now += seconds
        self.computed += seconds

    def start(self, kind: str, unit: int) -> None:
        key = kind, unit
        if key not in self._costs:
            self._costs[key] = unit_cost(self.case, self.machine, unit, kind)
        busy, after = self._costs[key]
        self.communicated += busy + after
        self._link_free = max(self._link_free, self.now) + busy
        self._complete[key] = self._link_free + after
        if not self.overlaps:
            self.wait(self._complete.pop(key))

    def wait(self, time: float) -> None:
        delay = max(0.0, time - self.now)
        self.exposed += delay
        self.now += delay

    def sum_vector(self, kind: str) -> None:
        """Replay a sum of numbers over ranks: losses, log-probabilities, or squares of the gradient."""
        case = self.case
        numbers = case.log_probabilities + (kind == script.TOTAL) * (case.rounds.micro_batches + FLAGS)
        if kind == script.NORM:
            numbers = case.squares
            self.compute(0.0, BYTES * sum(count for _, count in case.trained_slices))
            if case.hybrid:
                case = replace(case, ranks=case.owners, nodes=1)
        seconds = allreduce_seconds(case, self.machine, rank_memory.NUMBER * numbers)
        self.communicated += seconds
        self.wait(self.now + seconds)

    def update(self, elements: int) -> None:
        """Replay AdamW, with rounding in low precision, while offloaded states move to the GPU and back."""
        kinds, start = self.case.precision, self.now
        self.compute(0.0, elements * (UPDATE_PASSES * BYTES + kinds.compute.itemsize * kinds.is_low))
        seconds = self.case.offloaded_arrays * BYTES * elements / self.machine.host_link
        self.communicated += seconds
        self.wait(start + seconds)


def step_time(case: Case, machine: Machine) -> StepTime:
    """Return the time of a step that is not the first."""
    machine = machine.joining(case.nodes)
    rounds = len(case.rounds)
    if rounds <= script.MOST_ROUNDS:
        return second_step(case, machine)
    most, fewer = (
        second_step(replace(case, batch_size=count * case.ranks * case.micro_batch), machine)
        for count in (script.MOST_ROUNDS, script.MOST_ROUNDS - 1)
    )
    return plus(most, plus(most, fewer, -1.0), rounds - script.MOST_ROUNDS)


def second_step(case: Case, machine: Machine) -> StepTime:
    """Return the time of the second step of the simulation."""
    player = Player(case, machine)
    first, second = script.simulate(case).steps
    player.play(first)
    warmup = player.time
    player.play(second)
    return plus(player.time, warmup, -1.0)


def tokens_per_second(case: Case, time: StepTime) -> float:
    """Return the tokens per second of all ranks together."""
    return case.tokens / time.seconds if time.seconds else float("inf")


def slowest(case: Case, machine: Machine) -> Link:
    return machine.between if case.nodes > 1 else machine.node


def gather_seconds(case: Case, machine: Machine, unit: int, itemsize: int) -> float:
    """Return the seconds to gather a unit on all its owners; with shared memory no data are sent."""
    if case.shares_full or case.ranks == 1:
        return 0.0
    partition = case.partitions[unit]
    shard, length = itemsize * partition.counts[0], itemsize * partition.length
    if case.hybrid:
        return ring_seconds(case.per_node, machine.node, shard, length)
    if case.shares_gathers and case.strategy.shards_parameters:  # ranks of a node share its link
        node_bytes = itemsize * partition.bounds[case.per_node]
        return ring_seconds(case.nodes, machine.between, node_bytes, length, rings=node_bytes // shard)
    return ring_seconds(case.ranks, slowest(case, machine), shard, length)


def ring_seconds(members: int, link: Link, part: int, total: int, rings: int = 1) -> float:
    """Return the seconds to pass parts around a ring until each member has all; short data use a tree.

    The longest part has `part` bytes. In a ring it crosses all links; in a tree a member gets at most `total`
    bytes. Several `rings` divide the bytes over the same links, and their messages overlap.
    """
    steps, short = members - 1, total < SHORT * rings
    transfer = (min(steps * part, total) if short else steps * part) * link.beta
    latency = (steps.bit_length() if short else steps) * link.alpha
    return max(transfer, latency + transfer / rings)


def reduce_seconds(case: Case, machine: Machine, unit: int) -> float:
    """Return the seconds to sum a unit's gradient into slices, with direct messages to owners."""
    if case.ranks == 1 or case.transport == kinds.SERIAL:
        return 0.0
    partition, mates, itemsize = case.partitions[unit], case.per_node, case.reduce_bytes
    count = partition.counts[0]
    addition = count * (case.ranks * itemsize + BYTES) / machine.moves
    if case.transport == kinds.SHARED:  # the owner reads the memory of other ranks
        return machine.node.alpha + max(addition, itemsize * count * (case.ranks - 1) * machine.node.beta)
    inside = itemsize * count * (mates - 1) * machine.node.beta
    between = itemsize * mates * max(0, partition.length - count * mates) * machine.between.beta
    chunks = -(-count // EXACT_CHUNK)
    return chunks * slowest(case, machine).alpha + max(inside, between) + addition * case.exact


def chain_cost(case: Case, machine: Machine, length: int, count: int) -> Cost:
    """Return the cost of passing a unit's sum from node to node in chunks, and back if all nodes need it.

    On the way back, inner nodes send in both directions. Sums are float32; a chunk is no longer than its
    owner's slice of `count` elements. The last chunk crosses all links, which send chunks of other lanes and
    of the next unit meanwhile.
    """
    link, hops, nbytes = machine.between, case.nodes - 1, BYTES * length
    chunk = BYTES * min(chain_chunk(case.nodes), count)
    links = hops * (link.alpha + chunk * link.beta)
    addition = length / case.per_node * (case.per_node * case.reduce_bytes + BYTES) / machine.moves
    way = nbytes * link.beta
    back = way if case.nodes > 2 else 0.0  # two nodes send in opposite directions
    if case.hybrid:
        return Cost(way + addition + back, 2 * links)
    return Cost(way + addition + back / case.nodes, links)  # sums return only to their owners


def allreduce_seconds(case: Case, machine: Machine, nbytes: int) -> float:
    """Return the seconds to sum a vector on all ranks in place: a reduction into slices and their gather."""
    if case.ranks == 1:
        return 0.0
    link, depth = slowest(case, machine), (case.ranks - 1).bit_length()
    if nbytes < SHORT:
        return depth * (link.alpha + nbytes * link.beta)
    mates, parts = (case.per_node, case.nodes) if case.nodes > 1 else (1, case.ranks)
    return 2 * (depth * link.alpha + mates * nbytes * (1 - 1 / parts) * link.beta)


def unit_cost(case: Case, machine: Machine, unit: int, kind: str) -> Cost:
    """Return the cost of one transfer of a unit: a gather, or its reduction."""
    if kind in (script.GATHER, script.GATHER_SUMS):
        itemsize = case.sum_bytes if kind == script.GATHER_SUMS else case.kept_bytes(unit)
        return Cost(gather_seconds(case, machine, unit, itemsize))
    if kind == script.ALLREDUCE:
        return Cost(allreduce_seconds(case, machine, case.sum_bytes * case.partitions[unit].length))
    if case.passes_sums:
        partition = case.partitions[unit]
        return chain_cost(case, machine, partition.length, partition.counts[0])
    return Cost(reduce_seconds(case, machine, unit))
