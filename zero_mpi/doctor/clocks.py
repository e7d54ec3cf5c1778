"""How far the hosts' clocks are apart (`comm.clock_sync`).

Times in records come from rank 0; with other clocks far off, the records of batch system and job do not fit
together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from zero_mpi.cli.text import duration
from zero_mpi.comm.clock_sync import answer, ask
from zero_mpi.doctor.ranks import Ranks
from zero_mpi.doctor.verdicts import Row, assessed

FAR = 1.0  # seconds
Known = tuple[float, float]  # seconds ahead of rank 0's clock, at most so many wrong


def now() -> float:
    """This host's clock."""
    return time.time()


def offsets(where: Ranks) -> list[Known]:
    """Of each node but the first. Collective; the answers are on all ranks."""
    found: list[Known] = []
    for ranks in where.nodes[1:]:
        if where.rank == 0:
            offset = ask(where.world.mpi.COMM_WORLD, ranks[0], now)
            found.append((offset.ahead, offset.wrong))
        elif where.rank == ranks[0]:
            answer(where.world.mpi.COMM_WORLD, now)
    shared: list[Known] = where.world.comm.broadcast_object(found)
    return shared


def rows(found: list[Known], names: tuple[str, ...]) -> Iterator[Row]:
    """The worst clock; `names` of the nodes that were asked."""
    if not found:
        yield Row("clocks", "one host, one clock")
        return
    (ahead, wrong), name = max(zip(found, names, strict=True), key=lambda entry: abs(entry[0][0]))
    value = f"at most {duration(abs(ahead))} apart: {name} (known to {duration(wrong)})"
    remedy = "let all hosts follow one clock: chronyd, or timedatectl set-ntp true"
    yield assessed("clocks", value, abs(ahead) <= FAR, remedy)


def section(where: Ranks) -> list[Row]:
    """Compare the clocks of all hosts. Collective."""
    return list(rows(offsets(where), where.names[1:]))
