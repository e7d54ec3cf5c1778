"""How far the hosts' clocks are apart (`comm.clock_sync`).

Times in records come from rank 0; with other clocks far off, the records of batch system and job do not fit
together.
"""

from __future__ import annotations

import time

from zero_mpi.cli.text import duration
from zero_mpi.comm.clock_sync import offset_of_node
from zero_mpi.doctor.ranks import Ranks
from zero_mpi.doctor.verdicts import Row, assessed

FAR = 1.0  # seconds
now = time.time  # this host's clock
Known = tuple[float, float]  # seconds ahead of rank 0's clock, at most so many wrong


def offsets(where: Ranks) -> list[Known]:
    """Of each node but the first. Collective; the answers are on all ranks."""
    if len(where.nodes) == 1:
        return []
    found = where.gather(offset_of_node(where.world.mpi.COMM_WORLD, where.node_comm, now)[:2])
    return [found[ranks[0]] for ranks in where.nodes[1:]]


def rows(found: list[Known], names: tuple[str, ...]) -> list[Row]:
    """The worst clock; `names` of the nodes that were asked."""
    if not found:
        return [Row("clocks", "one host, one clock")]
    (ahead, wrong), name = max(zip(found, names, strict=True), key=lambda entry: abs(entry[0][0]))
    value = f"at most {duration(abs(ahead))} apart: {name} (known to {duration(wrong)})"
    remedy = "let all hosts follow one clock: chronyd, or timedatectl set-ntp true"
    return [assessed("clocks", value, abs(ahead) <= FAR, remedy)]
