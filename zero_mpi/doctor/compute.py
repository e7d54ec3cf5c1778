"""How fast each rank multiplies matrices while all others do, and which host is behind.

A step takes as long as its slowest rank. A host may be slow because it is older, hot, throttled, or because
somebody else computes on it; the products are those of a model, float32 with the threads that a job has. Then
the same in bfloat16, and what libraries choose for the processor: a BLAS may be held below it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi import environment, ops
from zero_mpi.cli.text import few, plural
from zero_mpi.doctor.ranks import Ranks
from zero_mpi.doctor.verdicts import NOTE, Row, assessed
from zero_mpi.environment import portable
from zero_mpi.errors import UsageError
from zero_mpi.launch.consistency import blas, check_pins
from zero_mpi.ops import trial
from zero_mpi.ops.low_precision import BFLOAT16

EDGE = 384  # of the matrices: as wide as a small model, half a megabyte each
BEHIND = 0.8  # of the median host's rate
PINS = ("OPENBLAS_CORETYPE", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
UNITS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # of x86-64, the best first, as Linux names them


def square_product(kind: Any) -> Callable[[], object]:
    """A product of matrices of EDGE, by what layers use."""
    a, b = (np.random.default_rng(seed).random((EDGE, EDGE), np.float32).astype(kind) for seed in (1, 2))
    out = np.zeros_like(a)
    return lambda: ops.linear_backward_x(a, b, out)


def calls_a_second(seconds: float, call: Callable[[], object]) -> float:
    """How often something can be called in a second, found over `seconds` and at least one call."""
    begun, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - begun < seconds:
        call()
        count += 1
    return count / (time.perf_counter() - begun)


def rate(seconds: float, product: Callable[[], object]) -> float:
    """Floating-point operations a second of this rank in such products, over `seconds`."""
    product()  # starts the library's threads
    return 2.0 * EDGE**3 * calls_a_second(seconds, product)


def rows(rates: list[float], where: Ranks) -> list[Row]:
    """The rates, and the hosts that are behind: of an even number the faster middle one is the median."""
    hosts = [statistics.mean(rates[rank] for rank in ranks) for ranks in where.nodes]
    median = statistics.median_high(hosts)
    shares = [f"{name} at {100 * host / median:.0f} % of the median" for host, name in where.named(hosts)]
    slow = [share for share, host in zip(shares, hosts, strict=True) if host < BEHIND * median]
    spread = " to ".join(dict.fromkeys((gigaflops(min(rates)), gigaflops(max(rates)))))
    all_ranks = f"{spread} GFLOP/s a rank, {gigaflops(sum(rates))} in all (fp32 products, all at once)"
    if len(hosts) == 1:
        return [Row("speed", all_ranks)]
    value = f"the slowest has {100 * min(hosts) / median:.0f} % of the median"
    if slow:
        value = f"{', '.join(few(slow))}: all ranks wait for it"
    remedy = "leave it out of the job; look there for other programs (top), heat and a lower clock"
    return [Row("speed", all_ranks), assessed("uneven hosts", value, not slow, remedy)]


def gigaflops(rate: float) -> str:
    """A rate for people."""
    return f"{rate / 1e9:.{0 if rate >= 1e10 else 1}f}"


# --------------------------------------------------------------------------------- bfloat16, BLAS and bits


def units(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The processor's units for products, the best first; empty where the system does not tell."""
    flags = environment.of_processor("flags", cpuinfo).split()
    return [unit for unit in UNITS if unit in flags]


def pinned(found: list[str], environ: dict[str, str], library: str) -> list[Row]:
    """A row for each variable that holds a library below what the processor has."""
    there = ", ".join(found) or "units that are not known"
    rest = f"on a processor with {there}; BLAS: {library}"
    remedy = "take {} out of the environment, unless it is meant: products may be half as fast"
    held = [name for name in PINS if environ.get(name)]
    return [Row(name, f"{environ[name]}, {rest}", NOTE, remedy.format(name)) for name in held]


def low_row(rates: list[float], wide: float, about: tuple[str, str]) -> Row:
    """The row of bfloat16: rates of ranks, 0 where nothing multiplies it, and the median of float32."""
    library, reason = about
    value = f"--precision bf16 would be slower than fp32: {reason or 'some ranks have no library'}"
    if min(rates):
        median = statistics.median(rates)
        value = f"{library}: {gigaflops(median)} GFLOP/s a rank, {median / wide:.1f} times fp32"
    return Row("bf16", value)


def bits_row(trials: list[str], blas: str, fault: str) -> Row:
    """The row of what the ranks' bits depend on, from the trial of each and what keeps pins from holding."""
    kinds = len(set(trials))
    trial = f"trial {trials[0]}" + (f" and {plural(kinds - 1, 'other')} among the ranks" if kinds > 1 else "")
    value = f"native, the best code for each processor; {trial}"
    if portable.asked() == portable.PORTABLE:
        value = fault or f"portable, {portable.LEVEL} ({blas}, compiled for {portable.TARGET}); {trial}"
    remedy = "give --bits portable, or hosts of one kind" if not fault else "see docs/exact.md"
    return assessed("bits", value, fine=kinds == 1 and not fault, remedy=remedy)


def pins_fault() -> str:
    """Why this rank's bits are not portable though that is asked for; empty where they are."""
    try:
        if portable.asked() == portable.PORTABLE:
            check_pins()
    except UsageError as error:
        return str(error)
    return ""


def section(where: Ranks, seconds: float, figures: dict[str, object]) -> list[Row]:
    """Measure on all ranks at once; notes `flops_per_second_per_rank`, the median. Collective."""
    where.world.node_by_node(ops.prepare)
    where.comm.barrier()
    rates = where.gather(rate(seconds, square_product(np.float32)))
    figures["flops_per_second_per_rank"] = statistics.median(rates)
    figures["flops_per_second_slowest_rank"] = min(rates)
    return rows(rates, where)


def kernels(where: Ranks, seconds: float, figures: dict[str, Any]) -> list[Row]:
    """Measure products of bfloat16 on all ranks at once, after those of float32. Collective."""
    about = ops.products(BFLOAT16)
    where.comm.barrier()
    rates = where.gather(rate(seconds, square_product(BFLOAT16)) if about[0] else 0.0)
    figures["bf16_flops_per_second_per_rank"] = statistics.median(rates)
    faults = list(filter(None, where.gather(pins_fault())))
    told = [low_row(rates, figures["flops_per_second_per_rank"], about)]
    told.append(bits_row(where.gather(trial.digest()), blas(), faults[0] if faults else ""))
    return told if portable.active else [*told, *pinned(units(), dict(os.environ), blas())]
