"""Speed of products on each rank and of messages between ranks, and the bits of results.

A step takes as long as its slowest rank. A host may be slow because it is older, hot or throttled, or because
other programs compute on it. The products are those of a model, with the threads that a job has, while all
others multiply too.
Ranks pass a small and a large message on in a ring, all rings at once: the ranks of each node, and the ranks
of the same place on all nodes, as far as every node has them. So the ranks of a node share its link, and the
large message is cut among them. A time is the median over repeats of the slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from zero_mpi import ops
from zero_mpi.cli.text import duration, few, plural, short_size
from zero_mpi.commands.doctor.ranks import Ranks, Row, assessed
from zero_mpi.environment import portable
from zero_mpi.errors import UsageError
from zero_mpi.launch.consistency import blas, check_pins
from zero_mpi.ops import trial
from zero_mpi.ops.low_precision import BFLOAT16

EDGE = 384  # edge of the matrices: as wide as a small model, half a megabyte each
BEHIND = 0.8  # share of the median host's rate
PRODUCTS, MESSAGES = (0.5, 0.2), (0.2, 0.02)  # seconds of a measurement, without and with --quick
SMALL = 64  # bytes of the message that measures latency
BUFFERS = 4  # number of buffers of the largest size that a rank must have memory for
FEWEST, MOST = 3, 60  # repeats
NAME_IT = (
    "if the hosts have a faster network, select its interface: MPICH -iface NAME or UCX_NET_DEVICES, Open "
    "MPI --mca btl_tcp_if_include NAME; otherwise train with large batches"
)
SLOW_LINK, LATE = (
    125e6,
    1e-3,
)  # bytes per second (1 Gbit/s) and seconds: worth a look at the network's settings


# ----------------------------------------------------------------------------------------------- products


def square_product(kind: Any) -> Callable[[], object]:
    """Make a product of matrices of EDGE, computed as layers do."""
    a, b = (np.random.default_rng(seed).random((EDGE, EDGE), np.float32).astype(kind) for seed in (1, 2))
    out = np.zeros_like(a)
    return lambda: ops.linear_backward_x(a, b, out)


def rate(seconds: float, product: Callable[[], object]) -> float:
    """Return this rank's floating-point operations per second, over `seconds` and at least one product."""
    product()  # starts the library's threads
    begun, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - begun < seconds:
        product()
        count += 1
    return 2.0 * EDGE**3 * count / (time.perf_counter() - begun)


def products(where: Ranks) -> Iterator[Row]:
    """Measure on all ranks at once; notes the rates of the median and the slowest rank. Collective."""
    where.world.node_by_node(ops.prepare)
    where.comm.barrier()
    rates = where.gather(rate(PRODUCTS[where.options.quick], square_product(np.float32)))
    where.figures["flops_per_second_per_rank"] = statistics.median(rates)
    where.figures["flops_per_second_slowest_rank"] = min(rates)
    return rows(rates, where)


def rows(rates: list[float], where: Ranks) -> Iterator[Row]:
    """Yield the rates, and the hosts that are behind; of two hosts the faster one is the median."""
    spread = " to ".join(dict.fromkeys((gigaflops(min(rates)), gigaflops(max(rates)))))
    total = f"{gigaflops(sum(rates))} in total (fp32 matmuls, all ranks at once)"
    yield Row("speed", f"{spread} GFLOP/s per rank, {total}")
    hosts = [statistics.mean(rates[rank] for rank in ranks) for ranks in where.nodes]
    if len(hosts) == 1:
        return
    shares = [100 * host / statistics.median_high(hosts) for host in hosts]
    slow = [f"{name} at {x:.0f} % of the median" for x, name in where.named(shares) if x < 100 * BEHIND]
    value = f"the slowest has {min(shares):.0f} % of the median"
    if slow:
        value = f"{', '.join(few(slow))}: all ranks wait for it"
    remedy = "exclude it from the job, or check it for other programs (top), heat and a lower clock"
    yield assessed("uneven hosts", value, not slow, remedy)


def gigaflops(flops: float) -> str:
    """Return a rate in GFLOP/s, as text."""
    return f"{flops / 1e9:.{0 if flops >= 1e10 else 1}f}"


def kernels(where: Ranks) -> list[Row]:
    """Measure bfloat16 on all ranks at once, after float32, and compare the ranks' bits. Collective."""
    library, reason = ops.products(BFLOAT16)
    where.comm.barrier()
    seconds = PRODUCTS[where.options.quick]
    rates = where.gather(rate(seconds, square_product(BFLOAT16)) if library else 0.0)
    median = where.figures["bf16_flops_per_second_per_rank"] = statistics.median(rates)
    value = f"--precision bf16 would be slower than fp32: {reason or 'some ranks have no library'}"
    if min(rates):
        times = median / where.figures["flops_per_second_per_rank"]
        value = f"{library}: {gigaflops(median)} GFLOP/s per rank, {times:.1f} times fp32"
    faults = list(filter(None, where.gather(pins_fault())))
    return [Row("bf16", value), bits_row(where.gather(trial.digest()), blas(), faults[0] if faults else "")]


def bits_row(trials: list[str], library: str, fault: str) -> Row:
    """Return the row of the ranks' bits, given each rank's trial and what keeps --bits from holding."""
    kinds = len(set(trials))
    value = f"trial {trials[0]}" + (f" and {plural(kinds - 1, 'other')} among the ranks" if kinds > 1 else "")
    how = "native, fastest kernels for each CPU"
    if portable.asked() == portable.PORTABLE:
        how = f"portable, {portable.LEVEL} ({library}, compiled for {portable.TARGET})"
    remedy = "use --bits portable, or identical hosts" if not fault else "see docs/exact.md"
    return assessed("bits", fault or f"{how}; {value}", kinds == 1 and not fault, remedy)


def pins_fault() -> str:
    """Return why this rank's bits are not portable though --bits asks for it, or an empty text."""
    try:
        if portable.asked() == portable.PORTABLE:
            check_pins()
    except UsageError as error:
        return str(error)
    return ""


# ----------------------------------------------------------------------------------------------- messages


class Ring(NamedTuple):
    """Ranks to send to and receive from (None: takes no part), and how many rings share a link."""

    after: int | None
    before: int | None
    sharing: int = 1


def inside(where: Ranks) -> Ring:
    """Return the ring of this rank's node."""
    ranks, place = where.nodes[where.node], where.place
    return Ring(None, None) if len(ranks) == 1 else Ring(ranks[(place + 1) % len(ranks)], ranks[place - 1])


def between(where: Ranks) -> Ring:
    """Return the ring of the ranks of this rank's place on all nodes."""
    nodes, node, place = where.nodes, where.node, where.place
    sharing = min(map(len, nodes))
    if place >= sharing:
        return Ring(None, None, sharing)
    return Ring(nodes[(node + 1) % len(nodes)][place], nodes[node - 1][place], sharing)


def links(where: Ranks) -> Iterator[Row]:
    """Measure all links; notes `links`. Collective."""
    largest(where)
    found = where.figures["links"] = dict[str, Any](node=None, between=None)
    if len(where.nodes) < where.size:
        found["node"] = measure(where, inside(where))
        yield Row("link in a node", text_of(found["node"]))
    if len(where.nodes) > 1:
        found["between"] = measure(where, between(where))
        yield network(found["between"])
    if where.size == 1:
        yield Row("links", "not measured: only one rank")


def largest(where: Ranks) -> int:
    """Return the bytes of --max-mb; raises UsageError if a rank has no memory for a few such buffers."""
    mebibytes, memory = where.options.max_mb, where.figures["memory_bytes_per_rank"]
    if mebibytes * 2**20 * BUFFERS > memory:
        most = memory // BUFFERS >> 20
        has = f"a rank has {memory >> 20} MiB of memory"
        raise UsageError(f"--max-mb {mebibytes:g}: expected at most {most}: {has}")
    return int(mebibytes * 2**20)


def measure(where: Ranks, ring: Ring) -> dict[str, float]:
    """Return the seconds of a message and seconds of a byte over a link. Collective."""
    large = max(largest(where) // ring.sharing, SMALL + 1)
    alpha = seconds_of(where, ring, SMALL)
    beta = max(seconds_of(where, ring, large) - alpha, 0.0) / (large * ring.sharing)
    return {"alpha_seconds": alpha, "beta_seconds_per_byte": beta}


def seconds_of(where: Ranks, ring: Ring, nbytes: int) -> float:
    """Return the seconds in which every rank passes on `nbytes`. Collective."""
    mine, theirs = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

    def once() -> float:
        where.comm.barrier()
        begun = time.perf_counter()
        if ring.after is not None:
            where.world.mpi.COMM_WORLD.Sendrecv(mine, ring.after, recvbuf=theirs, source=ring.before)
        return time.perf_counter() - begun

    once()  # makes connections
    budget = MESSAGES[where.options.quick]
    repeats = min(MOST, max(FEWEST, int(budget / max(*where.gather(once()), 1e-9))))
    times = where.gather([once() for _ in range(repeats)])
    return float(statistics.median(max(together) for together in zip(*times, strict=True)))


def text_of(link: dict[str, float]) -> str:
    """Return a link's latency and bandwidth as text."""
    beta = link["beta_seconds_per_byte"]
    return f"latency {duration(link['alpha_seconds'])}, {short_size(1 / beta) + '/s' if beta else 'no limit'}"


def network(link: dict[str, float]) -> Row:
    """Return the row of the network between nodes."""
    fine = link["alpha_seconds"] < LATE and link["beta_seconds_per_byte"] * SLOW_LINK <= 1
    return assessed("network", f"{text_of(link)} per node", fine, NAME_IT)
