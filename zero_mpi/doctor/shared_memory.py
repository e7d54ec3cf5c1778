"""Memory that the ranks of a host share: how much there is, whether it works, what killed jobs left in it.

The transport `shared` keeps the model once in it, and for each rank the gradients of a few blocks. Without it
a run goes over messages, which takes longer but gives the same. A job that is killed while MPI starts leaves
segments of the library; they are named here, and the next run of the same user removes them
(`launch.dev_shm`).
"""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass
from fnmatch import filter as filter_names
from pathlib import Path

from zero_mpi.cli.text import FEW, few, plural, short_size
from zero_mpi.doctor.ranks import Ranks
from zero_mpi.doctor.verdicts import NOTE, Row, assessed
from zero_mpi.launch.dev_shm import PLACE, SEGMENTS, left_behind
from zero_mpi.sharding.schedule import REDUCTIONS_IN_FLIGHT

SMALL = 256 << 20  # bytes of shared memory that are few: containers have 64 MiB
TRIAL = 1 << 20  # bytes of the window that is tried
BLOCKS = 12  # of the model by which room is told: its gradients travel block by block
MORE_ROOM = "containers: --shm-size=16g or --ipc=host; else: mount -o remount,size=16g /dev/shm (as root)"


@dataclass(frozen=True)
class SharedMemory:
    """Free bytes of a host, and the files left behind (paths) with their bytes."""

    free: int = 0
    left: tuple[str, ...] = ()
    left_bytes: int = 0


def look() -> SharedMemory:
    """What there is in this host's shared memory."""
    try:
        free = shutil.disk_usage(PLACE).free
    except OSError:
        return SharedMemory()
    left = left_behind(PLACE)
    nbytes = sum(path.stat().st_size for path in left)
    return SharedMemory(free, tuple(map(str, left)), nbytes)


def try_window(where: Ranks) -> str:
    """Why the ranks of this node cannot share memory, or an empty text: a window is made and written to.

    Collective.
    """
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


def largest_model(free: int, ranks: int) -> int:
    """Parameters of a model of `BLOCKS` equal blocks that `ranks` could share in `free` bytes.

    4 bytes for each once, and for each rank the gradients of the blocks that are under way at once.
    """
    slots = ranks * (REDUCTIONS_IN_FLIGHT + 1) / BLOCKS
    return int(free / (4 * (1 + slots)))


def rows(found: list[SharedMemory], problems: list[str], where: Ranks) -> list[Row]:
    """All rows: room, the trial, leftovers; `problems` of the trial, by host."""
    broken = [f"{name}: {text}" for text, name in where.named(problems) if text]
    value = "made, written to and read by all ranks of each host"
    if broken:
        value = f"{'; '.join(few(broken))}: a run would go over messages"
    elif where.node_comm is None:
        value = "not tried: one process without MPI"
    trial = assessed("shared window", value, not broken, MORE_ROOM)
    return [room(found, where), trial, *leftovers(found, where.names)]


def room(found: list[SharedMemory], where: Ranks) -> Row:
    """Free shared memory of the host that has least, and the largest model for it."""
    hosts = [(host.free, len(ranks)) for host, ranks in zip(found, where.nodes, strict=True)]
    models = [largest_model(*host) for host in hosts]
    least = models.index(min(models))
    free, count = hosts[least]
    value = (
        f"{short_size(free)} free in {PLACE} of {where.names[least]}: for {plural(count, 'rank')}, a model "
        f"of {models[least] / 1e6:,.0f} million parameters in {BLOCKS} blocks"
    )
    return assessed("shared memory", value, free >= SMALL, MORE_ROOM)


def leftovers(found: list[SharedMemory], names: tuple[str, ...]) -> list[Row]:
    """Rows for each host where jobs left something."""
    told = []
    for host, name in zip(found, names, strict=True):
        if host.left:
            files = f"{plural(len(host.left), 'file')} that no process uses"
            listed = ", ".join(few([Path(path).name for path in host.left]))
            value = f"{short_size(host.left_bytes)} on {name}, in {files}: {listed}"
            told.append(Row("left in shared memory", value, NOTE, removal(host.left)))
    return told[:FEW]


def removal(paths: tuple[str, ...]) -> str:
    """A command that removes the files; of many, those that no process has mapped."""
    if len(paths) <= FEW:
        return f"rm {' '.join(map(shlex.quote, paths))}"
    names = [Path(path).name for path in paths]
    patterns = [f"{PLACE}/{pattern}" for pattern in SEGMENTS if filter_names(names, pattern)]
    loop = 'do grep -qs "$file" /proc/[0-9]*/maps || rm "$file"; done'
    return f"while no job starts: for file in {' '.join(patterns)}; {loop}"


def section(where: Ranks) -> list[Row]:
    """Shared memory of all hosts. Collective."""
    problems = where.gather(try_window(where) if where.node_comm is not None else "")
    by_node = [next(filter(None, (problems[rank] for rank in ranks)), "") for ranks in where.nodes]
    return rows(where.of_nodes(look), by_node, where)
