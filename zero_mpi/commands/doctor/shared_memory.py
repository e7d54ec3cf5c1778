"""Memory that the ranks of a host share: how much is free, whether it works, what killed jobs left in it.

The transport `shared` keeps the model in it. Without it a run goes over messages: slower, with the same bits.
A job that is killed while MPI starts leaves segments of the library; the next run of the same user removes
them (`launch.dev_shm`).
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zero_mpi.cli.text import FEW, few, plural, short_size
from zero_mpi.commands.doctor.ranks import Ranks
from zero_mpi.commands.doctor.verdicts import NOTE, Row, assessed
from zero_mpi.launch.dev_shm import PLACE, left_behind

SMALL = 256 << 20  # bytes of shared memory that are few: containers have 64 MiB
TRIAL = 1 << 20  # bytes of the window that is tried
MORE_ROOM = "containers: --shm-size=16g or --ipc=host; else: mount -o remount,size=16g /dev/shm (as root)"


@dataclass(frozen=True)
class SharedMemory:
    """Free bytes of a host, and the paths and bytes of files left behind."""

    free: int = 0
    left: tuple[str, ...] = ()
    left_bytes: int = 0


def look() -> SharedMemory:
    """Look at this host's shared memory."""
    try:
        free = shutil.disk_usage(PLACE).free
    except OSError:
        return SharedMemory()
    left = left_behind(PLACE)
    nbytes = sum(path.stat().st_size for path in left)
    return SharedMemory(free, tuple(map(str, left)), nbytes)


def try_window(where: Ranks) -> str:
    """Return why the ranks of this node cannot share memory, or an empty text. Collective."""
    from zero_mpi.comm.shared.window import NoSharedMemory, Window  # needs an MPI library

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
    node.Barrier()  # nobody frees what another still reads
    del memory
    made.free()
    return f"what {plural(len(others), 'rank')} wrote did not arrive" if others else ""


def rows(found: list[SharedMemory], problems: list[str], where: Ranks) -> list[Row]:
    """Return all rows, given each host's memory and the problem that its trial had."""
    broken = [f"{name}: {text}" for text, name in where.named(problems) if text]
    value = "made, written to and read by all ranks of each host"
    if broken:
        value = f"{'; '.join(few(broken))}: a run would go over messages"
    elif where.node_comm is None:
        value = "not tried: one process without MPI"
    trial = assessed("shared window", value, not broken, MORE_ROOM)
    return [room(found, where), trial, *list(leftovers(found, where.names))[:FEW]]


def room(found: list[SharedMemory], where: Ranks) -> Row:
    """Return the row of the host that has least free shared memory a rank."""
    hosts = zip(found, where.nodes, where.names, strict=True)
    least, ranks, name = min(hosts, key=lambda host: host[0].free / len(host[1]))
    value = f"{short_size(least.free)} free in {PLACE} of {name}, for {plural(len(ranks), 'rank')}"
    return assessed("shared memory", value, least.free >= SMALL, MORE_ROOM)


def leftovers(found: list[SharedMemory], names: tuple[str, ...]) -> Iterator[Row]:
    """Yield rows of the hosts where jobs left something."""
    for host, name in zip(found, names, strict=True):
        if host.left:
            files = f"{plural(len(host.left), 'file')} that no process uses"
            listed = ", ".join(few([Path(path).name for path in host.left]))
            value = f"{short_size(host.left_bytes)} on {name}, in {files}: {listed}"
            by_hand = f"rm {' '.join(map(shlex.quote, host.left[:FEW]))}"
            remedy = f"{by_hand}; the next zero_mpi.train of the same user there removes all"
            yield Row("left in shared memory", value, NOTE, remedy)


def section(where: Ranks) -> list[Row]:
    """Check shared memory of all hosts. Collective."""
    problems = where.gather(try_window(where) if where.node_comm is not None else "")
    by_node = [next(filter(None, (problems[rank] for rank in ranks)), "") for ranks in where.nodes]
    return rows(where.of_nodes(look), by_node, where)
