"""Hosts, the cores that each rank may use, and the threads that it starts on them.

Three things go wrong: more ranks than cores, where a rank that waits for a message keeps the core from the
rank that would send it; ranks bound to fewer cores than they have threads, or several to one core while
others idle; and ranks dealt out over the hosts in turn, so that neighbours are on different hosts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zero_mpi import environment, ops
from zero_mpi.cli.text import FEW, few, plural, ranges, ranks, span
from zero_mpi.commands.doctor.ranks import Ranks
from zero_mpi.commands.doctor.software import is_on
from zero_mpi.commands.doctor.verdicts import NOTE, Row
from zero_mpi.launch.consistency import mpi_library

VARIABLES = {"MPICH": "MPIR_", "Open MPI": "OMPI_"}  # how a library's variables begin, by how its name does
IN_TURN = (
    "MPICH: -ppn N or host:N in the host file; Open MPI: --map-by ppr:N:node; Slurm: --distribution=block"
)
BIND = (
    "bind each rank to its own cores: mpiexec -bind-to core (MPICH), --bind-to core --map-by core "
    "(Open MPI), --cpu-bind=cores (srun); or do not bind at all"
)


@dataclass(frozen=True)
class Seat:
    """A rank's cores and threads, who chose the threads, whether it yields, the CPU quota."""

    cores: tuple[int, ...]
    threads: int
    threads_were_set: bool
    yields: bool
    quota: float | None = None


@dataclass(frozen=True)
class NodeSeats:
    """The ranks of a host."""

    name: str
    ranks: tuple[int, ...]
    seats: tuple[Seat, ...]

    @property
    def cores(self) -> list[int]:
        return sorted({core for seat in self.seats for core in seat.cores})

    @property
    def usable(self) -> int:
        """The number of cores whose time its ranks may use: all of them, or the CPU quota."""
        quotas = [int(seat.quota) for seat in self.seats if seat.quota is not None]
        return max(1, min([len(self.cores), *quotas]))

    @property
    def is_crowded(self) -> bool:
        return len(self.ranks) > self.usable


def section(where: Ranks) -> list[Row]:
    """Check hosts, cores and threads of all ranks. Collective."""
    library = mpi_library(where.world) if where.world.mpi is not None else ""
    seats = where.gather(look(library))
    found = [NodeSeats(name, of, tuple(seats[rank] for rank in of)) for of, name in where.named(where.nodes)]
    return [*hosts(found), order(found), crowding(found, library), binding(found), threads(found)]


def look(library: str, environ: Mapping[str, str] = os.environ) -> Seat:
    """Return this rank's seat."""
    yields = all(is_on(environ, name) for name in yielding(library))
    cores, threads = tuple(sorted(os.sched_getaffinity(0))), ops.use_threads()
    return Seat(cores, threads, environment.threads_were_set, yields, environment.quota())


def yielding(library: str) -> dict[str, str]:
    """Return the settings by which a library's ranks hand their core over while they wait."""
    own = tuple(start for name, start in VARIABLES.items() if library.startswith(name))
    return {name: value for name, value in environment.YIELDING.items() if name.startswith(own)}


def hosts(found: list[NodeSeats]) -> Iterator[Row]:
    """Yield a row for each host; of many, the first ones."""
    for node in found[:FEW]:
        cores = f"{plural(len(node.cores), 'core')} ({ranges(node.cores)})"
        bound = f"{span(len(seat.cores) for seat in node.seats)} for each rank"
        yield Row(f"host {node.name}", f"{ranks(node.ranks)} on {cores}, {bound}")
    if rest := found[FEW:]:
        yield Row("hosts", f"{len(rest):,} more, {span(len(node.ranks) for node in rest)} ranks on each")


def order(found: list[NodeSeats]) -> Row:
    """Check that the ranks of a host follow each other, and are as many on each."""
    counts = [len(node.ranks) for node in found]
    odd = [
        f"{node.name} has {ranks(node.ranks)}"
        for node in found
        if node.ranks[-1] - node.ranks[0] >= len(node.ranks)
    ]
    if odd:
        value = f"{', '.join(few(odd))}: neighbours are on different hosts, and more goes over the network"
        return Row("order of ranks", value, NOTE, IN_TURN)
    value = f"{min(counts)} to {max(counts)} ranks on a host: a transport that knows hosts needs equally many"
    if min(counts) < max(counts):
        return Row("order of ranks", value, NOTE, f"start the same number on each host; {IN_TURN}")
    return Row("order of ranks", "those of a host follow each other")


def crowding(found: list[NodeSeats], library: str) -> Row:
    """Check that no host has more ranks than cores, unless its ranks yield."""
    title, crowded = "ranks and cores", [node for node in found if node.is_crowded]
    if not crowded:
        return Row(title, "no host has more ranks than cores")
    each = [f"{plural(len(n.ranks), 'rank')} on {plural(n.usable, 'core')} of {n.name}" for n in crowded]
    text = ", ".join(few(each))
    if all(seat.yields for node in crowded for seat in node.seats):
        remedy = f"fine for a trial; for speed start at most {min(node.usable for node in crowded)} a host"
        return Row(title, f"{text}; a rank that waits hands its core over", NOTE, remedy)
    value = f"{text}, and a rank that waits keeps its core: 10 to 100 times slower"
    settings = " ".join(f"{name}={value}" for name, value in yielding(library).items())
    return Row(title, value, NOTE, f"export {settings}, or start fewer ranks a host")


def binding(found: list[NodeSeats]) -> Row:
    """Check that no ranks are bound to one core while another core has none."""
    shared = list[str]()
    for node in found:
        bound: dict[tuple[int, ...], list[int]] = {}
        for rank, seat in zip(node.ranks, node.seats, strict=True):
            bound.setdefault(seat.cores, []).append(rank)
        shared += [
            f"{ranks(which)} of {node.name} share {plural(len(cores), 'core')} ({ranges(cores)})"
            for cores, which in bound.items()
            if len(which) > len(cores) and not node.is_crowded
        ]
    value = f"{', '.join(few(shared))} while other cores are free"
    return Row("binding", value, NOTE, BIND) if shared else Row("binding", "no ranks must share a core")


def threads(found: list[NodeSeats]) -> Row:
    """Check that the threads of a host's ranks fit its cores."""
    value = f"{span(seat.threads for node in found for seat in node.seats)} for each rank"
    for node in found:
        most = min([max(1, node.usable // len(node.ranks)), *(len(seat.cores) for seat in node.seats)])
        if max(seat.threads for seat in node.seats) > most:
            cores = f"{plural(most, 'core')} for each of {plural(len(node.ranks), 'rank')} on {node.name}"
            was_set = any(seat.threads_were_set for seat in node.seats)
            names = [name for name in environment.THREADS if was_set and name in os.environ]
            remedy = f"unset {' '.join(names)}" if names else "do not set the threads"
            value += f", but {cores}: up to 10 times slower"
            return Row("threads", value, NOTE, f"{remedy}, or train with --threads {most}")
    for node in found:
        free = node.usable - sum(seat.threads for seat in node.seats)
        if free > 0:
            value += f"; {free} of {plural(node.usable, 'core')} of {node.name} idle"
            more = "start more ranks, or train with --threads auto (other last bits than with one thread)"
            return Row("threads", value, NOTE, more)
    return Row("threads", value)
