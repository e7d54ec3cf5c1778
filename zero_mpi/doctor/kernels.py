"""What multiplies matrices here: a BLAS that is held below the processor, and products of bfloat16."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

from zero_mpi import environment, ops, portable
from zero_mpi.cli.text import plural
from zero_mpi.doctor import compute
from zero_mpi.doctor.ranks import Ranks
from zero_mpi.doctor.verdicts import Row, assessed
from zero_mpi.errors import UsageError
from zero_mpi.launch.consistency import blas, check_pins
from zero_mpi.ops import trial
from zero_mpi.ops.low_precision import BFLOAT16

PINS = ("OPENBLAS_CORETYPE", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
UNITS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # of x86-64, the best first, as Linux names them


def units(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The processor's units for products, the best first; empty where the system does not tell."""
    flags = environment.of_processor("flags", cpuinfo).split()
    return [unit for unit in UNITS if unit in flags]


def pinned(found: list[str], environ: dict[str, str], library: str) -> list[Row]:
    """A row for each variable that holds a library below what the processor has."""
    there = ", ".join(found) or "units that are not known"
    return [
        assessed(
            name,
            f"{environ[name]}, on a processor with {there}; BLAS: {library}",
            fine=False,
            remedy=f"take {name} out of the environment, unless it is meant: products may be half as fast",
        )
        for name in PINS
        if environ.get(name)
    ]


def low_row(rates: list[float], wide: float, about: tuple[str, str]) -> Row:
    """The row of bfloat16: rates of ranks, 0 where nothing multiplies it, and the median of float32."""
    library, reason = about
    if not min(rates):
        return Row(
            "bf16", f"--precision bf16 would be slower than fp32: {reason or 'some ranks have no library'}"
        )
    median = statistics.median(rates)
    return Row(
        "bf16", f"{library}: {compute.gigaflops(median)} GFLOP/s a rank, {median / wide:.1f} times fp32"
    )


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
    if portable.asked() != portable.PORTABLE:
        return ""
    try:
        check_pins()
    except UsageError as error:
        return str(error)
    return ""


def section(where: Ranks, seconds: float, figures: dict[str, object]) -> list[Row]:
    """Measure products of bfloat16 on all ranks at once, after those of float32. Collective."""
    there = bool(ops.products(BFLOAT16)[0])
    where.comm.barrier()
    rates = where.gather(compute.rate(seconds, compute.square_product(BFLOAT16)) if there else 0.0)
    figures["bf16_flops_per_second_per_rank"] = statistics.median(rates)
    wide: Any = figures["flops_per_second_per_rank"]
    rows = [low_row(rates, wide, ops.products(BFLOAT16))]
    faults = list(filter(None, where.gather(pins_fault())))
    rows.append(bits_row(where.gather(trial.digest()), blas(), faults[0] if faults else ""))
    return rows if portable.active else [*rows, *pinned(units(), dict(os.environ), blas())]
