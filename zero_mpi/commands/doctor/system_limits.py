"""Memory, processor time and limits of each host, and other programs that compute there."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from zero_mpi.cli.text import FEW, plural, short_size
from zero_mpi.commands.doctor.ranks import Ranks
from zero_mpi.commands.doctor.verdicts import NOTE, Row, assessed
from zero_mpi.launch.dev_shm import WITH_UCX
from zero_mpi.launch.limits import Limits, look
from zero_mpi.plan.rank_memory import programs

LEAST_MEMORY = 512 << 20  # bytes a rank, of which interpreter and libraries take 100 MiB
LEAST_LOCKED = 64 << 20  # bytes; networks with remote memory access lock their buffers
SPARE_FILES = 64  # beside a connection to each other rank
PROC = Path("/proc")
LOOKS, PAUSE = 4, 0.02  # the fewest threads of some looks count, so that a short one is not in it


# ------------------------------------------------------------------------------------------------ limits


def section(where: Ranks) -> list[Row]:
    """Check the limits of all hosts; notes `memory_bytes_per_rank`. Collective."""
    found = where.of_nodes(look)
    where.figures["memory_bytes_per_rank"] = memory_per_rank(found, where)
    return [memory(found, where), *list(limits(found, where))[:FEW]]


def memory_per_rank(found: list[Limits], where: Ranks) -> int:
    """Return the bytes that every rank can have if all ranks of its host take as much."""
    return min(limits.memory // len(ranks) for limits, ranks in zip(found, where.nodes, strict=True))


def memory(found: list[Limits], where: Ranks) -> Row:
    """Return the row of memory."""
    each, most = memory_per_rank(found, where), max(map(len, where.nodes))
    tight = next((limits for limits in found if limits.memory != limits.available), None)
    limit = f"; a control group allows a host {short_size(tight.group_memory or 0)}" if tight else ""
    own = short_size(programs(most) + most * WITH_UCX)
    value = f"{short_size(each)} for each rank{limit}; of a host, interpreters, libraries and MPI take {own}"
    remedy = "ask the batch system for more (Slurm: --mem), or start fewer ranks a host"
    return assessed("memory", value, each >= LEAST_MEMORY, remedy)


def limits(found: list[Limits], where: Ranks) -> Iterator[Row]:
    """Yield rows of the limits that would harm a job."""
    unlimited = "ulimit -{} unlimited, in the job script"
    for host, name in where.named(found):
        if host.group_cores is not None and host.group_cores < host.cores:
            value = f"a control group allows {host.group_cores:g} of {plural(host.cores, 'core')} on {name}"
            remedy = "start no more ranks times threads than that, or raise it (containers: --cpus)"
            yield Row("processor time", value, NOTE, remedy)
        if host.address_space is not None:
            value = f"address space of {short_size(host.address_space)} on {name}: shared memory needs much"
            yield Row("limits", value, NOTE, unlimited.format("v"))
        if host.data is not None:
            value = f"private memory of {short_size(host.data)} for a rank on {name}"
            yield Row("limits", value, NOTE, unlimited.format("d"))
        if host.locked is not None and host.locked < LEAST_LOCKED:
            value = f"locked memory of {short_size(host.locked)} on {name}: too little for its fast network"
            remedy = f"{unlimited.format('l')}; under Slurm, PropagateResourceLimits=NONE"
            yield Row("limits", value, NOTE, remedy)
        if host.files is not None and host.files < where.size + SPARE_FILES:
            value = f"{plural(host.files, 'open file')} on {name}, for {plural(where.size, 'rank')}"
            yield Row("limits", value, NOTE, f"ulimit -n {max(4096, 2 * where.size)}")


# ------------------------------------------------------------------------------------------------- load


def load(where: Ranks) -> Iterator[Row]:
    """Check for programs of others, which the measurements would share the cores with. Collective."""
    seen = where.of_nodes(lambda: (busy_threads(), os.cpu_count() or 1))
    for ranks, (threads, cores), name in zip(where.nodes, seen, where.names, strict=True):
        yield from crowd(threads, cores, len(ranks), name)


def busy_threads() -> int:
    """Count threads of the host that run or wait for a core: the fewest in some looks; 0: unknown."""
    found = list[int]()
    for _ in range(LOOKS):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found.append(int((PROC / "loadavg").read_text().split()[3].partition("/")[0]))
        time.sleep(PAUSE)
    return min(found, default=0)


def crowd(threads: int, cores: int, ranks: int, name: str) -> list[Row]:
    """Return the row of a host where more threads run than it has cores or ranks."""
    value = f"{threads - ranks} threads of others run on {name}, beside {ranks} of ours on {cores} cores"
    remedy = "what follows is measured beside them: wait for their end, or take another host"
    return [Row("load", value, NOTE, remedy)] if threads > max(cores, ranks) else []
