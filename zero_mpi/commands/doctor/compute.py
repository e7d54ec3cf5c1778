"""The rate of each rank's matrix products while all others multiply too, and the bits of their results.

A step takes as long as its slowest rank. A host may be slow because it is older, hot or throttled, or because
other programs compute on it. The products are those of a model, with the threads that a job has.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from zero_mpi import ops
from zero_mpi.cli.text import few, plural
from zero_mpi.commands.doctor.ranks import Ranks
from zero_mpi.commands.doctor.verdicts import Row, assessed
from zero_mpi.environment import portable
from zero_mpi.errors import UsageError
from zero_mpi.launch.consistency import blas, check_pins
from zero_mpi.ops import trial
from zero_mpi.ops.low_precision import BFLOAT16

EDGE = 384  # of the matrices: as wide as a small model, half a megabyte each
BEHIND = 0.8  # of the median host's rate
THOROUGH, QUICK = 0.5, 0.2  # seconds of a measurement


def square_product(kind: Any) -> Callable[[], object]:
    """Make a product of matrices of EDGE, computed as layers do."""
    a, b = (np.random.default_rng(seed).random((EDGE, EDGE), np.float32).astype(kind) for seed in (1, 2))
    out = np.zeros_like(a)
    return lambda: ops.linear_backward_x(a, b, out)


def rate(seconds: float, product: Callable[[], object]) -> float:
    """Return this rank's floating-point operations a second, over `seconds` and at least one product."""
    product()  # starts the library's threads
    begun, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - begun < seconds:
        product()
        count += 1
    return 2.0 * EDGE**3 * count / (time.perf_counter() - begun)


def section(where: Ranks) -> Iterator[Row]:
    """Measure on all ranks at once; notes the rates of the median and the slowest rank. Collective."""
    where.world.node_by_node(ops.prepare)
    where.comm.barrier()
    rates = where.gather(rate(QUICK if where.options.quick else THOROUGH, square_product(np.float32)))
    where.figures["flops_per_second_per_rank"] = statistics.median(rates)
    where.figures["flops_per_second_slowest_rank"] = min(rates)
    return rows(rates, where)


def rows(rates: list[float], where: Ranks) -> Iterator[Row]:
    """Yield the rates, and the hosts that are behind; of two hosts the faster one is the median."""
    spread = " to ".join(dict.fromkeys((gigaflops(min(rates)), gigaflops(max(rates)))))
    all_at_once = f"{spread} GFLOP/s a rank, {gigaflops(sum(rates))} in all (fp32 products, all at once)"
    yield Row("speed", all_at_once)
    hosts = [statistics.mean(rates[rank] for rank in ranks) for ranks in where.nodes]
    if len(hosts) == 1:
        return
    shares = [100 * host / statistics.median_high(hosts) for host in hosts]
    slow = [f"{name} at {x:.0f} % of the median" for x, name in where.named(shares) if x < 100 * BEHIND]
    value = f"the slowest has {min(shares):.0f} % of the median"
    if slow:
        value = f"{', '.join(few(slow))}: all ranks wait for it"
    remedy = "leave it out of the job; look there for other programs (top), heat and a lower clock"
    yield assessed("uneven hosts", value, not slow, remedy)


def gigaflops(flops: float) -> str:
    """Return a rate in GFLOP/s, as text."""
    return f"{flops / 1e9:.{0 if flops >= 1e10 else 1}f}"


def kernels(where: Ranks) -> list[Row]:
    """Measure bfloat16 on all ranks at once, after float32, and compare the ranks' bits. Collective."""
    library, reason = ops.products(BFLOAT16)
    seconds = QUICK if where.options.quick else THOROUGH
    where.comm.barrier()
    rates = where.gather(rate(seconds, square_product(BFLOAT16)) if library else 0.0)
    median = where.figures["bf16_flops_per_second_per_rank"] = statistics.median(rates)
    value = f"--precision bf16 would be slower than fp32: {reason or 'some ranks have no library'}"
    if min(rates):
        times = median / where.figures["flops_per_second_per_rank"]
        value = f"{library}: {gigaflops(median)} GFLOP/s a rank, {times:.1f} times fp32"
    faults = list(filter(None, where.gather(pins_fault())))
    return [Row("bf16", value), bits_row(where.gather(trial.digest()), blas(), faults[0] if faults else "")]


def bits_row(trials: list[str], library: str, fault: str) -> Row:
    """Return the row of the ranks' bits, given each rank's trial and what keeps --bits from holding."""
    kinds = len(set(trials))
    value = f"trial {trials[0]}" + (f" and {plural(kinds - 1, 'other')} among the ranks" if kinds > 1 else "")
    how = "native, the best code for each processor"
    if portable.asked() == portable.PORTABLE:
        how = f"portable, {portable.LEVEL} ({library}, compiled for {portable.TARGET})"
    remedy = "give --bits portable, or hosts of one kind" if not fault else "see docs/exact.md"
    return assessed("bits", fault or f"{how}; {value}", kinds == 1 and not fault, remedy)


def pins_fault() -> str:
    """Return why this rank's bits are not portable though --bits asks for it, or an empty text."""
    try:
        if portable.asked() == portable.PORTABLE:
            check_pins()
    except UsageError as error:
        return str(error)
    return ""
