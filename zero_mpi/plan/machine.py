"""What a machine can do, as numbers: what a message takes in a node and between nodes, how fast a rank is.

They come from the JSON that `zero_mpi.doctor` writes, from flags, or are assumed; a report says which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import read_file
from zero_mpi.files.parse import parse_json


@dataclass(frozen=True)
class Link:
    """A message of n bytes takes alpha + beta n seconds."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Machine:
    """node: between ranks of a node; between: a node's link, which its ranks share.

    flops    floating-point operations a second of a rank's matrix products, while all ranks compute
    moves    bytes a second of a rank in everything else
    memory   bytes for a rank, or None: not known
    host_link   bytes a second from a GPU to its host, and as many back at the same time
    """

    node: Link
    between: Link
    flops: float
    moves: float
    memory: int | None = None
    host_link: float = 4e10


# 10 Gbit between nodes; what one core reaches, the last as fitted to the steps in docs/benchmarks.md.
ASSUMED = Machine(Link(5e-6, 2.5e-10), Link(3e-5, 8e-10), flops=5e10, moves=12e9)
# Units for bfloat16: twice the rate of products in float32, as measured in docs/benchmarks.md.
ASSUMED_BF16 = replace(ASSUMED, flops=2 * ASSUMED.flops)
# GPUs of 2023 and their networks by data sheets, at shares that are often reached: not measured here.
GPU_LINKS = Link(2e-5, 1 / 4e10), Link(3e-5, 1 / 2e10)
ASSUMED_GPU = Machine(*GPU_LINKS, flops=4e14, moves=3e12)  # products of low precision
ASSUMED_GPU_FP32 = Machine(*GPU_LINKS, flops=4e13, moves=3e12)
DOCTOR = {  # flag -> where the doctor has it
    "alpha_node": ("links", "node", "alpha_seconds"),
    "beta_node": ("links", "node", "beta_seconds_per_byte"),
    "alpha": ("links", "between", "alpha_seconds"),
    "beta": ("links", "between", "beta_seconds_per_byte"),
    "flops": ("flops_per_second_per_rank",),
    "bf16_flops": ("bf16_flops_per_second_per_rank",),
    "memory": ("memory_bytes_per_rank",),
}
MOST_DOCTOR = 16 << 20  # bytes of a doctor's JSON
LARGEST = 1e30  # no rate is so large
POSITIVE = ("flops", "memory_bandwidth", "memory", "host_bandwidth")


def read_doctor(path: Path) -> dict[str, float]:
    """The numbers of a doctor's JSON by the names of flags; those it did not measure are left out."""
    place = shown(path)
    try:
        found: Any = parse_json(read_file(path, MOST_DOCTOR))
    except FileError as error:
        raise UsageError(f"--doctor {error}") from None
    except ValueError as error:
        raise UsageError(f"--doctor {place}: not the JSON of zero_mpi.doctor: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"--doctor {place}: expected a JSON object of zero_mpi.doctor, found another value")
    numbers = {name: number_at(path, found, keys) for name, keys in DOCTOR.items()}
    if not any(value is not None for value in numbers.values()):
        raise UsageError(f"--doctor {place}: no rate in it; expected keys such as links.node.alpha_seconds")
    return {name: value for name, value in numbers.items() if value is not None}


def number_at(path: Path, found: Mapping[str, Any], keys: tuple[str, ...]) -> float | None:
    """The number at a path of keys, None where there is none; raises UsageError for anything else."""
    value: Any = found
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST:
        found_at = f"--doctor {shown(path)}: {'.'.join(keys)} is {shown(value)}"
        raise UsageError(f"{found_at}; expected a number from 0 up")
    return float(value)


def machine_of(numbers: Mapping[str, float], base: Machine = ASSUMED) -> Machine:
    """What is assumed with what is known put in; raises UsageError for a number that cannot be."""
    for name, value in numbers.items():
        if not 0 <= value < math.inf or (name in POSITIVE and value == 0):
            least = "more than 0" if name in POSITIVE else "at least 0"
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: expected {least}")
    node = Link(numbers.get("alpha_node", base.node.alpha), numbers.get("beta_node", base.node.beta))
    between = Link(numbers.get("alpha", base.between.alpha), numbers.get("beta", base.between.beta))
    memory = numbers.get("memory")
    return replace(
        base,
        node=node,
        between=between,
        flops=numbers.get("flops", base.flops),
        moves=numbers.get("memory_bandwidth", base.moves),
        memory=None if memory is None else int(memory),
        host_link=numbers.get("host_bandwidth", base.host_link),
    )


def assumed(on_gpu: bool, precision: str) -> Machine:
    """What is taken for numbers that nobody gave; in bf16 a processor is taken to have units for it."""
    if on_gpu:
        return ASSUMED_GPU_FP32 if precision == "fp32" else ASSUMED_GPU
    return ASSUMED_BF16 if precision == "bf16" else ASSUMED
