"""Hosts, the cores that each rank may use there, and the threads that it starts on them.

Three things go wrong: more ranks than cores, where a rank that spins for a message keeps the core from the
one that would send it; ranks bound to fewer cores than they have threads, or several to one core while others
idle; and ranks dealt out over the hosts in turn, so that neighbours in the order of ranks are on two hosts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from threadpoolctl import threadpool_info

from zero_mpi import environment
from zero_mpi.doctor.mpi_library import set_in
from zero_mpi.doctor.ranks import Ranks
from zero_mpi.doctor.table import FEW, NOTE, Row, few, plural, ranges, ranks
from zero_mpi.launch.consistency import mpi_library

YIELDING = {  # by how the library's name begins
    "MPICH": ("MPIR_CVAR_ENABLE_HEAVY_YIELD", "MPIR_CVAR_ALLGATHERV_PIPELINE_MSG_SIZE"),
    "Open MPI": ("OMPI_MCA_mpi_yield_when_idle",),
}
IN_TURN = (
    "MPICH: -ppn N or host:N in the host file; Open MPI: --map-by ppr:N:node; Slurm: --distribution=block"
)


@dataclass(frozen=True)
class Seat:
    """Where a rank runs: the cores that it may use, its BLAS threads, who chose them, whether it yields."""

    cores: tuple[int, ...]
    threads: int
    threads_were_set: bool
    yields: bool


@dataclass(frozen=True)
class Node:
    """The ranks of a host, and the cores that any of them may use."""

    name: str
    ranks: tuple[int, ...]
    seats: tuple[Seat, ...]

    @property
    def cores(self) -> list[int]:
        """All cores of its ranks."""
        return sorted({core for seat in self.seats for core in seat.cores})

    @property
    def is_crowded(self) -> bool:
        """Whether there are more ranks than cores."""
        return len(self.ranks) > len(self.cores)


def look(library: str, environ: Mapping[str, str] = os.environ) -> Seat:
    """This rank's seat."""
    threads = max((pool["num_threads"] for pool in threadpool_info()), default=1)
    names = next((names for start, names in YIELDING.items() if library.startswith(start)), ())
    yields = all(set_in(environ, name) for name in names)
    return Seat(tuple(sorted(os.sched_getaffinity(0))), threads, environment.threads_were_set, yields)


def nodes(where: Ranks, seats: Sequence[Seat]) -> list[Node]:
    """The hosts with their ranks' seats."""
    return [
        Node(name, ranks, tuple(seats[rank] for rank in ranks))
        for name, ranks in zip(where.names, where.nodes, strict=True)
    ]


def rows(found: list[Node], library: str) -> list[Row]:
    """All rows about hosts, cores and threads."""
    return [*hosts(found), order(found), crowding(found, library), binding(found), threads(found)]


def hosts(found: list[Node]) -> Iterator[Row]:
    """A row for each host; of many, the first ones."""
    for node in found[:FEW]:
        sizes = sorted({len(seat.cores) for seat in node.seats})
        bound = f"{'-'.join(map(str, {sizes[0]: 0, sizes[-1]: 0}))} for each rank"
        yield Row(
            f"host {node.name}",
            f"{ranks(node.ranks)} on {plural(len(node.cores), 'core')} ({ranges(node.cores)}), {bound}",
        )
    rest = found[FEW:]
    if rest:
        counts = sorted({len(node.ranks) for node in rest})
        each = "-".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        yield Row("hosts", f"{len(rest):,} more, {each} ranks on each")


def order(found: list[Node]) -> Row:
    """Whether the ranks of a host follow each other, and are as many on each."""
    odd = [node for node in found if node.ranks[-1] - node.ranks[0] >= len(node.ranks)]
    counts = sorted({len(node.ranks) for node in found})
    if not odd and len(counts) > 1:
        return Row(
            "order of ranks",
            f"{counts[0]} to {counts[-1]} ranks on a host: a transport that knows hosts needs equally many",
            NOTE,
            f"start the same number on each host; {IN_TURN}",
        )
    if not odd:
        return Row("order of ranks", "those of a host follow each other")
    text = ", ".join(few([f"{node.name} has {ranks(node.ranks)}" for node in odd]))
    return Row(
        "order of ranks",
        f"{text}: neighbours are on different hosts, and more goes over the network than need be",
        NOTE,
        IN_TURN,
    )


def crowding(found: list[Node], library: str) -> Row:
    """Whether there are more ranks than cores, and if so, whether they yield."""
    crowded = [node for node in found if node.is_crowded]
    if not crowded:
        return Row("ranks and cores", "no host has more ranks than cores")
    text = ", ".join(
        few(
            [f"{plural(len(n.ranks), 'rank')} on {plural(len(n.cores), 'core')} of {n.name}" for n in crowded]
        )
    )
    if all(seat.yields for node in crowded for seat in node.seats):
        most = min(len(node.cores) for node in crowded)
        remedy = f"fine for a trial; for speed start at most {most} a host"
        return Row("ranks and cores", f"{text}; a rank that waits hands its core over", NOTE, remedy)
    names = next((names for start, names in YIELDING.items() if library.startswith(start)), ())
    settings = " ".join(f"{name}={environment.YIELDING[name]}" for name in names)
    return Row(
        "ranks and cores",
        f"{text}, and a rank that waits keeps its core: 10 to 100 times slower",
        NOTE,
        f"export {settings}, or start fewer ranks a host",
    )


def binding(found: list[Node]) -> Row:
    """Whether several ranks are bound to one core while another core has none."""
    shared = [text for node in found if not node.is_crowded for text in heaped(node)]
    if not shared:
        return Row("binding", "no ranks are bound to a core that they must share")
    return Row(
        "binding",
        f"{', '.join(few(shared))} while other cores are free",
        NOTE,
        "bind each rank to its own cores: mpiexec -bind-to core (MPICH), --bind-to core --map-by core "
        "(Open MPI), --cpu-bind=cores (srun); or do not bind at all",
    )


def heaped(node: Node) -> Iterator[str]:
    """Groups of ranks that are bound to the same cores, fewer than they are."""
    for cores, count in Counter(seat.cores for seat in node.seats).items():
        if count > len(cores):
            which = [rank for rank, seat in zip(node.ranks, node.seats, strict=True) if seat.cores == cores]
            yield f"{ranks(which)} of {node.name} share {plural(len(cores), 'core')} ({ranges(cores)})"


def threads(found: list[Node]) -> Row:
    """Whether the BLAS threads of a host's ranks fit its cores."""
    counts = sorted({seat.threads for node in found for seat in node.seats})
    value = f"{'-'.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} for each rank"
    for node in found:
        room = max(1, len(node.cores) // len(node.ranks))
        room = min([room, *(len(seat.cores) for seat in node.seats)])
        if max(seat.threads for seat in node.seats) > room:
            return too_many(node, room, value)
    idle = [node for node in found if sum(seat.threads for seat in node.seats) < len(node.cores)]
    if not idle:
        return Row("BLAS threads", value)
    node = idle[0]
    free = len(node.cores) - sum(seat.threads for seat in node.seats)
    return Row(
        "BLAS threads",
        f"{value}; {free} of {plural(len(node.cores), 'core')} of {node.name} idle",
        NOTE,
        "start more ranks, or train with --threads auto (other last bits than with one thread)",
    )


def too_many(node: Node, room: int, value: str) -> Row:
    """The row of more threads than cores, and how to get rid of them."""
    chosen = any(seat.threads_were_set for seat in node.seats)
    names = [name for name in environment.THREADS if name in os.environ] if chosen else []
    remedy = f"unset {' '.join(names)}" if names else "do not set the threads"
    cores = f"{plural(room, 'core')} for each of {plural(len(node.ranks), 'rank')} on {node.name}"
    return Row(
        "BLAS threads",
        f"{value}, but {cores}: up to 10 times slower",
        NOTE,
        f"{remedy}, or train with --threads {room}",
    )


def section(where: Ranks) -> list[Row]:
    """Hosts, cores and threads of all ranks. Collective."""
    name = mpi_library(where.world) if where.world.mpi is not None else ""
    return rows(nodes(where, where.gather(look(name))), name)
