"""Versions on all ranks, launcher, settings of the MPI library; hosts, the cores and threads of each rank.

A launcher of another MPI starts N jobs of one rank instead of one job of N ranks; nothing else shows it.
With cores three things go wrong: more ranks than cores, where a rank that waits for a message keeps the core
from the rank that would send it; ranks bound to fewer cores than they have threads, or several to one core
while others idle; and ranks dealt out over the hosts in turn, so that neighbours are on different hosts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from zero_mpi import environment, ops
from zero_mpi.cli.text import FEW, few, plural, ranges, ranks, span
from zero_mpi.commands.doctor.ranks import BAD, NOTE, Ranks, Row, assessed
from zero_mpi.launch.consistency import installation, mpi_library, split_into
from zero_mpi.ops.code_cache import installed

LAUNCHERS = {  # the first variable that is set names it; inside an allocation Slurm's are always there
    "OMPI_COMM_WORLD_RANK": "mpirun of Open MPI",
    "PALS_RANKID": "mpiexec of PALS",
    "MV2_COMM_WORLD_RANK": "mpirun of MVAPICH2",
    "I_MPI_HYDRA_UUID": "mpiexec of Intel MPI",
    "HYDI_CONTROL_FD": "mpiexec of MPICH",
    "SLURM_STEP_NUM_TASKS": "srun",
    "PMI_RANK": "mpiexec of MPICH",
    "PMIX_RANK": "a PMIx launcher",
}
ASYNC_PROGRESS = ("MPIR_CVAR_ASYNC_PROGRESS", "MPICH_ASYNC_PROGRESS", "I_MPI_ASYNC_PROGRESS")
VARIABLES = {"MPICH": "MPIR_", "Open MPI": "OMPI_"}  # prefix of variables, by prefix of the library's name
OFF = ("", "0", "no", "false", "off")
SAME_MPI = (
    "use the mpirun of the MPI that mpi4py loads (above); with srun, --mpi=pmi2 for MPICH and --mpi=pmix for "
    "Open MPI"
)
FAST = "pip install 'zero-mpi[fast]', and leave ZERO_MPI_OPS and NUMBA_DISABLE_JIT unset"
IN_TURN = (
    "MPICH: -ppn N or host:N in the host file; Open MPI: --map-by ppr:N:node; Slurm: --distribution=block"
)
BIND = (
    "bind each rank to its own cores: mpiexec -bind-to core (MPICH), --bind-to core --map-by core "
    "(Open MPI), --cpu-bind=cores (srun); or do not bind at all"
)


# ---------------------------------------------------------------------------------------------- versions


def versions(where: Ranks) -> list[Row]:
    """Compare what a job compares before it starts, and mpi4py, which may differ. Collective."""
    mine = installation(where.world) | {"mpi4py": installed("mpi4py") or "none"}
    found = where.gather(mine)
    return [version(name, [each.get(name, "none") for each in found]) for name in mine]


def version(name: str, values: list[str]) -> Row:
    """Return the row of one name, given the value on each rank."""
    first, others = values[0], dict[str, list[int]]()
    for rank, value in enumerate(values):
        if value != first:
            others.setdefault(value, []).append(rank)
    if others:
        text = ", ".join(few([f"{value} on {ranks(which)}" for value, which in others.items()]))
        remedy = "install the same versions on all hosts, and start all ranks from one environment"
        if name == "BLAS":
            remedy = "use identical hosts, or set the same OPENBLAS_CORETYPE on all ranks"
        return Row(name, f"{first}, but {text}", NOTE if name == "mpi4py" else BAD, remedy)
    if name == "operations" and first == "numpy":
        return Row(name, "plain NumPy, several times slower than compiled kernels", NOTE, FAST)
    return Row(name, " ".join(first.split(", package")[0].split()))  # Open MPI's version text is longer


def library(where: Ranks) -> Iterator[Row]:
    """Check launcher, thread level and progress threads. Collective."""
    yield launcher(where.size)
    yield thread_level(where.world.mpi)
    yield progress(where.gather([name for name in ASYNC_PROGRESS if is_on(os.environ, name)]))


def launcher(size: int, environ: Mapping[str, str] = os.environ) -> Row:
    """Return the row of the launcher."""
    name = next((name for variable, name in LAUNCHERS.items() if variable in environ), "none")
    if alone := split_into(size, environ):
        value = f"{name} started {alone} processes, but each is a job of one rank"
        return Row("launcher", value, BAD, SAME_MPI)
    return Row("launcher", f"{name}, {plural(size, 'rank')}")


def thread_level(mpi: object) -> Row:
    """Return the row of the library's thread level; `mpi` is None without a library."""
    if mpi is None:
        remedy = "pip install 'zero-mpi[mpich]', or mpi4py built on the MPI of your site"
        return Row("MPI threads", "no MPI library can be loaded: one process only", NOTE, remedy)
    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    level = {getattr(mpi, f"THREAD_{name}"): name.lower() for name in names}[mpi.Query_thread()]  # type: ignore[attr-defined]
    if level == "multiple":
        return Row("MPI threads", level)
    value = f"{level}: transfers progress only between layers, because only one thread may call MPI"
    return Row("MPI threads", value, NOTE, "use an MPI built with MPI_THREAD_MULTIPLE")


def progress(found: Iterable[Iterable[str]]) -> Row:
    """Return the row of a setting that makes blocking calls twenty times slower, given those on each rank."""
    name = next((name for names in found for name in names), "")
    value = f"{name} is set: blocking calls take many times longer" if name else "the MPI library starts none"
    return assessed("progress threads", value, not name, f"unset {name}")


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """Tell whether a switch is set to something that means on."""
    return environ.get(name, "").lower() not in OFF


# ------------------------------------------------------------------------------------------------- cores


@dataclass(frozen=True)
class Seat:
    """Cores and threads of a rank, who chose the threads, whether it yields, the CPU quota."""

    cores: tuple[int, ...]
    threads: int
    threads_were_set: bool
    yields: bool
    quota: float | None = None


@dataclass(frozen=True)
class NodeSeats:
    """Ranks of a host."""

    name: str
    ranks: tuple[int, ...]
    seats: tuple[Seat, ...]

    @property
    def cores(self) -> list[int]:
        return sorted({core for seat in self.seats for core in seat.cores})

    @property
    def usable(self) -> int:
        """Number of cores whose time its ranks may use: all of them, or the CPU quota."""
        quotas = [int(seat.quota) for seat in self.seats if seat.quota is not None]
        return max(1, min([len(self.cores), *quotas]))

    @property
    def is_crowded(self) -> bool:
        return len(self.ranks) > self.usable


def cores(where: Ranks) -> list[Row]:
    """Check hosts, cores and threads of all ranks. Collective."""
    name = mpi_library(where.world) if where.world.mpi is not None else ""
    seats = where.gather(look(name))
    found = [NodeSeats(host, of, tuple(seats[rank] for rank in of)) for of, host in where.named(where.nodes)]
    return [*hosts(found), order(found), crowding(found, name), binding(found), threads(found)]


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
    odd = [node for node in found if node.ranks[-1] - node.ranks[0] >= len(node.ranks)]
    if odd:
        which = ", ".join(few([f"{node.name} has {ranks(node.ranks)}" for node in odd]))
        value = f"{which}: neighbouring ranks are on different hosts, which adds network traffic"
        return Row("order of ranks", value, NOTE, IN_TURN)
    if min(counts) < max(counts):
        value = f"{min(counts)} to {max(counts)} ranks: transports that use nodes need equal numbers"
        return Row("order of ranks", value, NOTE, f"start the same number on each host; {IN_TURN}")
    return Row("order of ranks", "ranks of a host are consecutive")


def crowding(found: list[NodeSeats], library: str) -> Row:
    """Check that no host has more ranks than cores, unless its ranks yield."""
    title, crowded = "ranks and cores", [node for node in found if node.is_crowded]
    if not crowded:
        return Row(title, "no host has more ranks than cores")
    each = [f"{plural(len(n.ranks), 'rank')} on {plural(n.usable, 'core')} of {n.name}" for n in crowded]
    text = ", ".join(few(each))
    if all(seat.yields for node in crowded for seat in node.seats):
        remedy = f"fine for a test; for speed start at most {min(node.usable for node in crowded)} per host"
        return Row(title, f"{text}; a waiting rank yields its core", NOTE, remedy)
    value = f"{text}, and a waiting rank keeps its core: 10 to 100 times slower"
    settings = " ".join(f"{name}={value}" for name, value in yielding(library).items())
    return Row(title, value, NOTE, f"export {settings}, or start fewer ranks per host")


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
    value = f"{', '.join(few(shared))} while other cores are free" if shared else "no rank shares a core"
    return assessed("binding", value, not shared, BIND)


def threads(found: list[NodeSeats]) -> Row:
    """Check that the threads of a host's ranks fit its cores."""
    value, idle = f"{span(seat.threads for node in found for seat in node.seats)} for each rank", ""
    for node in found:
        most = min([max(1, node.usable // len(node.ranks)), *(len(seat.cores) for seat in node.seats)])
        if max(seat.threads for seat in node.seats) > most:
            cores = f"{plural(most, 'core')} for each of {plural(len(node.ranks), 'rank')} on {node.name}"
            was_set = any(seat.threads_were_set for seat in node.seats)
            names = [name for name in environment.THREADS if was_set and name in os.environ]
            remedy = f"unset {' '.join(names)}" if names else "do not set the number of threads"
            value += f", but {cores}: up to 10 times slower"
            return Row("threads", value, NOTE, f"{remedy}, or train with --threads {most}")
        free = node.usable - sum(seat.threads for seat in node.seats)
        if free > 0 and not idle:
            idle = f"; {free} of {plural(node.usable, 'core')} of {node.name} idle"
    more = "start more ranks, or train with --threads auto (other last bits than with one thread)"
    return assessed("threads", value + idle, not idle, more)
