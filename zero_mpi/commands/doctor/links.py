"""Latency and bandwidth of messages between ranks, inside nodes and between them.

Ranks pass a small and a large message on in a ring, all rings at once: the ranks of each node, and the ranks
of the same place on all nodes, as far as every node has them. So the ranks of a node share its link, and the
large message is cut among them. A time is the median over repeats of the slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from zero_mpi.cli.text import duration, short_size
from zero_mpi.commands.doctor.ranks import Ranks
from zero_mpi.commands.doctor.verdicts import Row, assessed
from zero_mpi.errors import UsageError

SMALL = 64  # bytes of the message that tells latency
BUFFERS = 4  # of the largest size that a rank must have memory for
FEWEST, MOST = 3, 60  # repeats
THOROUGH, QUICK = 0.2, 0.02  # seconds of a measurement
NAME_IT = (
    "if the hosts have a faster network, name its interface: MPICH -iface NAME or UCX_NET_DEVICES, "
    "Open MPI --mca btl_tcp_if_include NAME; else train with large batches"
)
SLOW_LINK, LATE = 125e6, 1e-3  # bytes a second (1 Gbit/s) and seconds: worth a look at the network's settings


class Ring(NamedTuple):
    """The ranks to send to and receive from (None: takes no part), and how many rings share a link."""

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
    budget = QUICK if where.options.quick else THOROUGH
    repeats = min(MOST, max(FEWEST, int(budget / max(*where.gather(once()), 1e-9))))
    times = where.gather([once() for _ in range(repeats)])
    return float(statistics.median(max(together) for together in zip(*times, strict=True)))


def measure(where: Ranks, ring: Ring) -> dict[str, float]:
    """Return seconds of a message and seconds of a byte over a link. Collective."""
    large = max(largest(where) // ring.sharing, SMALL + 1)
    alpha = seconds_of(where, ring, SMALL)
    beta = max(seconds_of(where, ring, large) - alpha, 0.0) / (large * ring.sharing)
    return {"alpha_seconds": alpha, "beta_seconds_per_byte": beta}


def largest(where: Ranks) -> int:
    """Return the bytes of --max-mb; raises UsageError if a rank has no memory for a few such buffers."""
    mebibytes, memory = where.options.max_mb, where.figures["memory_bytes_per_rank"]
    if mebibytes * 2**20 * BUFFERS > memory:
        most = memory // BUFFERS >> 20
        has = f"a rank has {memory >> 20} MiB of memory"
        raise UsageError(f"--max-mb {mebibytes:g}: expected at most {most}: {has}")
    return int(mebibytes * 2**20)


def section(where: Ranks) -> Iterator[Row]:
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
        yield Row("links", "one rank has nobody to talk to")


def text_of(link: dict[str, float]) -> str:
    """Return a link's latency and bandwidth as text."""
    beta = link["beta_seconds_per_byte"]
    return f"latency {duration(link['alpha_seconds'])}, {short_size(1 / beta) + '/s' if beta else 'no limit'}"


def network(link: dict[str, float]) -> Row:
    """Return the row of the network between nodes."""
    fine = link["alpha_seconds"] < LATE and link["beta_seconds_per_byte"] * SLOW_LINK <= 1
    return assessed("network", f"{text_of(link)} for the link of a node", fine, NAME_IT)
