"""How fast each rank multiplies matrices while all others do, and which host is behind.

A step takes as long as its slowest rank. A host may be slow because it is older, hot, throttled, or because
somebody else computes on it; the products are those of a model, float32 with the threads that a job has.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from zero_mpi import ops
from zero_mpi.cli.text import few
from zero_mpi.doctor.ranks import Ranks
from zero_mpi.doctor.verdicts import Row, assessed

EDGE = 384  # of the matrices: as wide as a small model, half a megabyte each
BEHIND = 0.8  # of the median host's rate


def square_product(kind: Any) -> Callable[[], object]:
    """A product of matrices of EDGE, by what layers use."""
    a, b = (np.random.default_rng(seed).random((EDGE, EDGE), np.float32).astype(kind) for seed in (1, 2))
    out = np.zeros_like(a)
    return lambda: ops.linear_backward_x(a, b, out)


def rate(seconds: float, product: Callable[[], object]) -> float:
    """Floating-point operations a second of this rank in such products, over `seconds`."""
    product()  # starts the library's threads
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        product()
        count += 1
    return count * 2.0 * EDGE**3 / (time.perf_counter() - begun)


def rows(rates: list[float], where: Ranks) -> list[Row]:
    """The rates, and the hosts that are behind: of an even number the faster middle one is the median."""
    hosts = [statistics.mean(rates[rank] for rank in ranks) for ranks in where.nodes]
    median = statistics.median_high(hosts)
    slow = [
        f"{name} at {100 * host / median:.0f} % of the median"
        for name, host in zip(where.names, hosts, strict=True)
        if host < BEHIND * median
    ]
    least, most = (gigaflops(of(rates)) for of in (min, max))
    spread = f"{most}" if least == most else f"{least} to {most}"
    all_ranks = f"{spread} GFLOP/s a rank, {gigaflops(sum(rates))} in all (fp32 products, all at once)"
    found = [Row("speed", all_ranks)]
    if slow or len(hosts) > 1:
        value = f"the slowest has {100 * min(hosts) / median:.0f} % of the median"
        if slow:
            value = f"{', '.join(few(slow))}: all ranks wait for it"
        remedy = "leave it out of the job; look there for other programs (top), heat and a lower clock"
        found.append(assessed("uneven hosts", value, not slow, remedy))
    return found


def gigaflops(rate: float) -> str:
    """A rate for people."""
    return f"{rate / 1e9:.{0 if rate >= 1e10 else 1}f}"


def section(where: Ranks, seconds: float, figures: dict[str, object]) -> list[Row]:
    """Measure on all ranks at once; notes `flops_per_second_per_rank`, the median. Collective."""
    where.world.node_by_node(ops.prepare)
    where.comm.barrier()
    rates = where.gather(rate(seconds, square_product(np.float32)))
    figures["flops_per_second_per_rank"] = statistics.median(rates)
    figures["flops_per_second_slowest_rank"] = min(rates)
    return rows(rates, where)
