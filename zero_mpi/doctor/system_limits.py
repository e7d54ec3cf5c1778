"""What the system lets the ranks of each host have, held against what they need."""

from __future__ import annotations

from collections.abc import Iterator

from zero_mpi.cli.text import few, plural, short_size
from zero_mpi.doctor.ranks import Ranks
from zero_mpi.doctor.verdicts import NOTE, Row, assessed
from zero_mpi.launch.dev_shm import WITH_UCX
from zero_mpi.launch.limits import Limits, look
from zero_mpi.plan.resident import programs

LEAST_MEMORY = 512 << 20  # bytes a rank, of which interpreter and libraries take 100 MiB
LEAST_LOCKED = 64 << 20  # bytes; networks with remote memory access lock their buffers
SPARE_FILES = 64  # beside a connection to each other rank


def rows(found: list[Limits], where: Ranks) -> list[Row]:
    """All rows, from the limits of the first rank of each host."""
    return [memory(found, where), *processors(found, where), *processes(found, where)]


def memory_per_rank(found: list[Limits], where: Ranks) -> int:
    """Bytes that every rank can have, where all of its host take as much."""
    return min(limits.memory // len(ranks) for limits, ranks in zip(found, where.nodes, strict=True))


def memory(found: list[Limits], where: Ranks) -> Row:
    """What there is for a rank."""
    each, most = memory_per_rank(found, where), max(map(len, where.nodes))
    tight = next((limits for limits in found if limits.memory != limits.available), None)
    limit = f"; a control group allows a host {short_size(tight.group_memory or 0)}" if tight else ""
    own = short_size(programs(most) + most * WITH_UCX)
    value = f"{short_size(each)} for each rank{limit}; of a host, interpreters, libraries and MPI take {own}"
    remedy = "ask the batch system for more (Slurm: --mem), or start fewer ranks a host"
    return assessed("memory", value, each >= LEAST_MEMORY, remedy)


def processors(found: list[Limits], where: Ranks) -> Iterator[Row]:
    """Where less processor time is to be had than there are cores."""
    short = [
        f"{limits.group_cores:g} of {plural(limits.cores, 'core')} on {name}"
        for limits, name in where.named(found)
        if limits.group_cores is not None and limits.group_cores < limits.cores
    ]
    if short:
        remedy = "start no more ranks times threads than that, or raise it (containers: --cpus)"
        yield Row("processor time", f"a control group allows {', '.join(few(short))}", NOTE, remedy)


def processes(found: list[Limits], where: Ranks) -> Iterator[Row]:
    """Limits of a process that would bite."""
    for limits, name in where.named(found):
        if limits.address_space is not None:
            value = f"address space of {short_size(limits.address_space)} on {name}: shared memory needs much"
            yield Row("limits", value, NOTE, "ulimit -v unlimited, in the job script")
        if limits.data is not None:
            value = f"private memory of {short_size(limits.data)} for a rank on {name}"
            yield Row("limits", value, NOTE, "ulimit -d unlimited, in the job script")
        if limits.locked is not None and limits.locked < LEAST_LOCKED:
            value = f"locked memory of {short_size(limits.locked)} on {name}: too little for its fast network"
            yield Row("limits", value, NOTE, "ulimit -l unlimited; under Slurm, PropagateResourceLimits=NONE")
        if limits.files is not None and limits.files < where.size + SPARE_FILES:
            value = f"{plural(limits.files, 'open file')} on {name}, for {plural(where.size, 'rank')}"
            yield Row("limits", value, NOTE, f"ulimit -n {max(4096, 2 * where.size)}")


def section(where: Ranks, figures: dict[str, object]) -> list[Row]:
    """The limits of all hosts; notes `memory_bytes_per_rank`. Collective."""
    found = where.of_nodes(look)
    figures["memory_bytes_per_rank"] = memory_per_rank(found, where)
    return rows(found, where)
