"""Memory, shared memory, processor time and limits of each host, and other programs that compute there.

The transport `shared` keeps the model in memory that the ranks of a host share. Without it a run goes over
messages: slower, with the same bits. A job that is killed while MPI starts leaves segments of the library
there; the next run of the same user removes them (`launch.dev_shm`).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zero_mpi.cli.text import FEW, few, plural, short_size
from zero_mpi.commands.doctor.ranks import NOTE, Ranks, Row, assessed
from zero_mpi.launch.dev_shm import PLACE, WITH_UCX, left_behind
from zero_mpi.launch.limits import Limits, look
from zero_mpi.plan.rank_memory import programs

LEAST_MEMORY = 512 << 20  # bytes per rank, of which interpreter and libraries take 100 MiB
LEAST_LOCKED = 64 << 20  # bytes; networks with remote memory access lock their buffers
SPARE_FILES = 64  # files beside a connection to each other rank
PROC = Path("/proc")
LOOKS, PAUSE = 4, 0.02  # the fewest threads of some looks count, so that a short one is not in it
SMALL = 256 << 20  # bytes of a small shared memory: containers have 64 MiB
TRIAL = 1 << 20  # bytes of the window that is tried
MORE_ROOM = "containers: --shm-size=16g or --ipc=host; else: mount -o remount,size=16g /dev/shm (as root)"


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
    limit = f"; a control group limits a host to {short_size(tight.group_memory or 0)}" if tight else ""
    own = short_size(programs(most) + most * WITH_UCX)
    value = f"{short_size(each)} for each rank{limit}; Python, libraries and MPI need {own} per host"
    remedy = "request more from the batch system (Slurm: --mem), or start fewer ranks per host"
    return assessed("memory", value, each >= LEAST_MEMORY, remedy)


def limits(found: list[Limits], where: Ranks) -> Iterator[Row]:
    """Yield the rows of the limits that would harm a job."""
    unlimited, size = "ulimit -{} unlimited, in the job script", where.size
    for host, name in where.named(found):
        if host.group_cores is not None and host.group_cores < host.cores:
            value = f"a control group allows {host.group_cores:g} of {plural(host.cores, 'core')} on {name}"
            remedy = "start at most that many ranks times threads, or raise it (containers: --cpus)"
            yield Row("processor time", value, NOTE, remedy)
        if host.address_space is not None:
            value = f"address space of {short_size(host.address_space)} on {name}: shared memory needs more"
            yield Row("limits", value, NOTE, unlimited.format("v"))
        if host.data is not None:
            value = f"private memory of {short_size(host.data)} for a rank on {name}"
            yield Row("limits", value, NOTE, unlimited.format("d"))
        if host.locked is not None and host.locked < LEAST_LOCKED:
            value = f"locked memory of {short_size(host.locked)} on {name}: too little for its fast network"
            remedy = f"{unlimited.format('l')}; under Slurm, PropagateResourceLimits=NONE"
            yield Row("limits", value, NOTE, remedy)
        if host.files is not None and host.files < size + SPARE_FILES:
            value = f"{plural(host.files, 'open file')} on {name}, for {plural(size, 'rank')}"
            yield Row("limits", value, NOTE, f"ulimit -n {max(4096, 2 * size)}")


# ------------------------------------------------------------------------------------------------- load


def load(where: Ranks) -> Iterator[Row]:
    """Check for programs of others, with which the measurements would share the cores. Collective."""
    seen = where.of_nodes(lambda: (busy_threads(), os.cpu_count() or 1))
    remedy = "the speeds below are measured while they run: wait until they end, or use another host"
    for ranks, (threads, cores), name in zip(map(len, where.nodes), seen, where.names, strict=True):
        if threads > max(cores, ranks):
            others = f"{threads - ranks} threads of other programs run on {name}"
            yield Row("load", f"{others}, with {ranks} ranks of this job on {cores} cores", NOTE, remedy)


def busy_threads() -> int:
    """Count threads of the host that run or wait for a core: the fewest in some looks; 0: unknown."""
    found = list[int]()
    for _ in range(LOOKS):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found.append(int((PROC / "loadavg").read_text().split()[3].partition("/")[0]))
        time.sleep(PAUSE)
    return min(found, default=0)


# ------------------------------------------------------------------------------------------ shared memory


@dataclass(frozen=True)
class SharedMemory:
    """Free bytes of a host, and the paths and bytes of files left behind."""

    free: int = 0
    left: tuple[str, ...] = ()
    left_bytes: int = 0


def shared_memory(where: Ranks) -> list[Row]:
    """Check shared memory of all hosts. Collective."""
    problems = where.gather(try_window(where) if where.node_comm is not None else "")
    by_node = [next(filter(None, (problems[rank] for rank in ranks)), "") for ranks in where.nodes]
    return shared_rows(where.of_nodes(look_at_shared), by_node, where)


def look_at_shared() -> SharedMemory:
    """Look at this host's shared memory."""
    try:
        free = shutil.disk_usage(PLACE).free
    except OSError:
        return SharedMemory()
    left = left_behind(PLACE)
    return SharedMemory(free, tuple(map(str, left)), sum(path.stat().st_size for path in left))


def try_window(where: Ranks) -> str:
    """Return why the ranks of this node cannot share memory, or an empty text. Collective."""
    from zero_mpi.comm.shared.memory import NoSharedMemory, Window  # needs an MPI library

    node, here = where.node_comm, len(where.nodes[where.node])
    try:
        made = Window(node, TRIAL, [(0, TRIAL)] if where.place == 0 else [])
    except NoSharedMemory as error:
        return str(error)
    memory = made.hand_over()
    memory[where.place :: here] = where.place % 251
    made.fence()
    node.Barrier()
    made.fence()
    others = [place for place in range(here) if (memory[place::here] != place % 251).any()]
    node.Barrier()  # nobody frees memory that another rank still reads
    del memory
    made.free()
    return f"writes of {plural(len(others), 'rank')} did not arrive" if others else ""


def shared_rows(found: list[SharedMemory], problems: list[str], where: Ranks) -> list[Row]:
    """Return all rows, given each host's memory and the problem that its trial had."""
    hosts = zip(found, map(len, where.nodes), where.names, strict=True)
    least, ranks, name = min(hosts, key=lambda host: host[0].free / host[1])
    value = f"{short_size(least.free)} free in {PLACE} of {name}, for {plural(ranks, 'rank')}"
    room = assessed("shared memory", value, least.free >= SMALL, MORE_ROOM)
    broken = [f"{name}: {text}" for text, name in where.named(problems) if text]
    value = "created, written and read by all ranks of each host"
    if broken:
        value = f"{'; '.join(few(broken))}: a run would use messages"
    elif where.node_comm is None:
        value = "not tried: one process without MPI"
    trial = assessed("shared window", value, not broken, MORE_ROOM)
    return [room, trial, *[left(host, name) for host, name in where.named(found) if host.left][:FEW]]


def left(host: SharedMemory, name: str) -> Row:
    """Return the row of a host where jobs left something."""
    files = f"{plural(len(host.left), 'file')} that no process uses"
    listed = ", ".join(few([Path(path).name for path in host.left]))
    value = f"{short_size(host.left_bytes)} on {name}, in {files}: {listed}"
    by_hand = f"rm {' '.join(map(shlex.quote, host.left[:FEW]))}"
    remedy = f"{by_hand}; the next zero_mpi.train of the same user there removes them too"
    return Row("left in shared memory", value, NOTE, remedy)
