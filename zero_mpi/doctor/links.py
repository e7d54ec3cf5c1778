"""Latency and bandwidth of what a job does between ranks: gathers and exact reductions, by size.

Measured are the runtime's own transports. *Inside a node* its ranks share memory and, for comparison, send
messages; all nodes do so at once. *Between nodes* each rank exchanges its stripe of a buffer with the ranks
of the same place on the other nodes, all places at once, as far as every node has them: what is told is the
link of a node. A time is the median over repeats of the slowest rank.

In the fits, bytes are what a rank gives to others (between nodes: a node), (P - 1) / P of the buffer among P,
as `sent_bytes` counts them; messages are those that follow each other, the depth of a tree for a gather and
one for a reduction, which goes straight to the owners. Over shared memory a gather moves nothing: there only
reductions count. Seconds are alpha * messages + beta * bytes (R. W. Hockney, The communication challenge for
MPP, Parallel Computing 20, 1994), so that what is told holds for other numbers of ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from zero_mpi.cli.text import duration, short_size
from zero_mpi.comm import Comm, Partition, kinds
from zero_mpi.doctor.ranks import Ranks
from zero_mpi.doctor.verdicts import Row, assessed
from zero_mpi.plan.machine import Link

GATHER, REDUCE = "all-gather", "reduce-scatter"
MESSAGES, SHARED = kinds.MPI.name, kinds.SHARED.name
QUANTUM = 256  # elements at whose multiples slices end, so that those of the smallest buffer are not empty
FEWEST, MOST = 3, 60  # repeats
LEAST = 1 << 10  # bytes of the smallest buffer
NAME_IT = (
    "if the hosts have a faster network, name its interface: MPICH -iface NAME or UCX_NET_DEVICES, "
    "Open MPI --mca btl_tcp_if_include NAME; else train with large batches"
)
SLOW_LINK, LATE = 125e6, 1e-3  # bytes a second (1 Gbit/s) and seconds: worth a look at the network's settings
Operation = Callable[[], object]


class Measurement(NamedTuple):
    """A time: how many messages in turn, how many bytes given away, seconds; bytes of the buffer."""

    messages: float
    nbytes: float
    seconds: float
    buffer: int = 0


Times = list[Measurement]


@dataclass(frozen=True)
class Effort:
    """How much to measure: the largest buffer, by how much sizes grow, seconds to repeat a measurement."""

    most: int
    factor: int
    budget: float

    def sizes(self) -> Iterator[int]:
        """Bytes of whole buffers; the last one is the largest that was asked for."""
        nbytes = LEAST
        while nbytes < self.most:
            yield nbytes
            nbytes *= self.factor
        yield self.most


@dataclass(frozen=True)
class Way:
    """A transport among groups of `parts` ranks; None on a rank that takes no part.

    stripes: how many groups share the link that is measured, and a buffer among them.
    """

    name: str
    comm: Comm | None
    parts: int
    stripes: int = 1


# --------------------------------------------------------------------------------------------- measuring


def seconds_of(where: Ranks, operation: Operation | None, budget: float) -> float:
    """The median of what the slowest rank takes. Collective, also for ranks without an operation."""
    timed(where, operation)  # the first one makes connections
    longest = max(where.gather(timed(where, operation)))
    repeats = min(MOST, max(FEWEST, int(budget / max(longest, 1e-9))))
    mine = [timed(where, operation) for _ in range(repeats)]
    slowest: list[float] = [max(together) for together in zip(*where.gather(mine), strict=True)]
    return statistics.median(slowest)


def timed(where: Ranks, operation: Operation | None) -> float:
    """Seconds of an operation that all ranks begin together; 0 without one."""
    where.comm.barrier()
    if operation is None:
        return 0.0
    begun = time.perf_counter()
    operation()
    return time.perf_counter() - begun


def measure(where: Ranks, way: Way, effort: Effort) -> dict[str, Times]:
    """Times by operation. Collective."""
    found: dict[str, Times] = {GATHER: [], REDUCE: []}
    for nbytes in effort.sizes():
        operations = prepare(way, nbytes // 4 // way.stripes)
        if not all(where.gather(way.comm is None or bool(operations))):
            break  # no room for it on some node
        for name, times in found.items():
            seconds = seconds_of(where, operations.get(name), effort.budget)
            given = nbytes * (way.parts - 1) / way.parts
            tree = name == GATHER and way.name != SHARED
            in_turn = (way.parts - 1).bit_length() if tree else 1
            times.append(Measurement(in_turn, given, seconds, nbytes))
    return found


def prepare(way: Way, length: int) -> dict[str, Operation]:
    """The operations on a buffer of `length` elements; none where there is no room or nothing to do."""
    if way.comm is None:
        return {}
    parts = way.comm.size
    partition = Partition(length, parts, min(QUANTUM, max(1, length // parts)))
    if way.name == SHARED:
        return shared(way.comm, partition)
    comm, whole = way.comm, np.ones(length, np.float32)
    mine = np.zeros(partition.counts[comm.rank], np.float32)
    return {
        GATHER: lambda: comm.allgather(None, whole, partition).wait(),
        REDUCE: lambda: comm.reduce_scatter(whole, mine, partition).wait(),
    }


def shared(comm: Comm, partition: Partition) -> dict[str, Operation]:
    """Operations over shared memory: a gather is to say that one has written and to see that all have."""
    from zero_mpi.comm.shared.window import NoSharedMemory

    try:
        memory = comm.memory([partition], [partition.length])
    except NoSharedMemory:
        return {}
    pool = memory.buffers
    slot, mine = pool.take(partition.length), np.zeros(partition.counts[comm.rank], np.float32)
    slot.fill(1)

    def gather() -> None:
        comm.signal_written()
        comm.wait_written()

    def reduce() -> None:
        assert pool.peak_lent == 1, "the pool has to live: what is of no pool goes over messages"
        comm.reduce_scatter(slot, mine, partition).wait()

    return {GATHER: gather, REDUCE: reduce}


# ------------------------------------------------------------------------------------- inside and between


def inside(where: Ranks) -> Iterator[Way]:
    """The ways among the ranks of a node, of which one has to be closed before the next."""
    from zero_mpi.comm.mpi import MPIComm
    from zero_mpi.comm.shared.comm import SharedComm
    from zero_mpi.comm.shared.window import NoSharedMemory

    parts, alone = max(map(len, where.nodes)), len(where.nodes[where.node]) == 1
    for name, transport in ((SHARED, SharedComm), (MESSAGES, MPIComm)):
        try:
            comm: Comm | None = None if alone else transport(where.node_comm)
        except NoSharedMemory:
            comm = None
        if any(where.gather(comm is not None)):
            yield Way(name, comm, parts)
        if comm is not None:
            comm.close()


def between(where: Ranks) -> Iterator[Way]:
    """The way between nodes."""
    from zero_mpi.comm.mpi import MPIComm

    mpi: Any = where.world.mpi
    stripes = min(map(len, where.nodes))
    takes_part = where.place < stripes
    group = mpi.COMM_WORLD.Split(where.place if takes_part else mpi.UNDEFINED, where.rank)
    comm = MPIComm(group) if takes_part else None
    yield Way(MESSAGES, comm, len(where.nodes), stripes)
    if comm is not None:
        comm.close()
        group.Free()


# --------------------------------------------------------------------------------------- the model, and rows


def fit(points: Sequence[Measurement]) -> Link:
    """The line with the least squares of relative errors, so that short calls count as much as long ones.

    Where the best one would be negative in one of the two, that one is 0 and the other the best without it.
    """
    costs = np.array([(point.messages / point.seconds, point.nbytes / point.seconds) for point in points])
    flat, steep = costs.sum(0) / (costs**2).sum(0)  # each without the other
    (alpha, beta), _, rank, _ = np.linalg.lstsq(costs, np.ones(len(costs)))
    if rank < 2 or beta < 0:  # all of one size, or the longer ones took no longer
        return Link(float(flat), 0.0)
    return Link(float(alpha), float(beta)) if alpha >= 0 else Link(0.0, float(steep))


def keys(*times: Times) -> dict[str, float]:
    """The fit of some operations' times, as it stands in the JSON file."""
    link = fit([point for found in times for point in found])
    return {"alpha_seconds": link.alpha, "beta_seconds_per_byte": link.beta}


def as_json(times: dict[str, Times]) -> dict[str, object]:
    """All times of a way as they stand in the JSON file."""
    return {
        kind.replace("-", "_"): {
            **keys(found),
            "sizes": [{"bytes": point.buffer, "seconds": point.seconds} for point in found],
        }
        for kind, found in times.items()
    }


def rows(place: str, way: str, times: dict[str, Times]) -> Iterator[Row]:
    """A row for each operation: times by size, and the fit."""
    for kind, found in times.items():
        link = fit(found)
        text = ", ".join(f"{short_size(point.buffer)} {duration(point.seconds)}" for point in found)
        moved = "nothing is moved" if kind == GATHER and way == SHARED else speed(link)
        yield Row(f"{kind} {place}", f"{way}: {text}; latency {duration(link.alpha)}, {moved}")


def speed(link: Link) -> str:
    """Bytes a second for people."""
    return f"{short_size(1 / link.beta)}/s" if link.beta else "too fast to tell"


def judged(found: dict[str, Any]) -> Row:
    """The row about the network between nodes."""
    link = Link(found["alpha_seconds"], found["beta_seconds_per_byte"])
    value = f"latency {duration(link.alpha)}, {speed(link)} for the link of a node"
    return assessed("network", value, link.alpha < LATE and link.beta * SLOW_LINK <= 1, NAME_IT)


def section(where: Ranks, effort: Effort, figures: dict[str, Any]) -> Iterator[Row]:
    """Measure all links; notes `links`. Collective: all ranks must run it to its end."""
    links = figures["links"] = dict[str, Any](node=None, between=None)
    if where.size == 1:
        yield Row("links", "one rank has nobody to talk to")
        return
    if len(where.nodes) < where.size:
        links["node"] = yield from measured(where, "in node", inside(where), effort)
    if len(where.nodes) > 1:
        links["between"] = yield from measured(where, "between", between(where), effort)
        yield judged(links["between"])


def measured(where: Ranks, place: str, ways: Iterator[Way], effort: Effort) -> Any:
    """Rows of some ways; returns what the JSON file says of them: the first is the one that a job takes."""
    told: dict[str, Any] = {}
    for way in ways:
        times = measure(where, way, effort)
        if not times[REDUCE]:
            continue  # no room for the smallest buffer
        yield from rows(place, way.name, times)
        moving = [times[REDUCE]] if way.name == SHARED else times.values()
        told = told or {"transport": way.name, **keys(*moving), "ways": {}}
        told["ways"][way.name] = as_json(times)
    return told
