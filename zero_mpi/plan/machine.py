"""What a machine can do, as numbers: what a message takes in a node and between nodes, how fast a rank is.

They come from the JSON that `zero-mpi doctor` writes, from a file that describes a machine (`machine_file`),
from flags, or are assumed; a report says which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero_mpi.cli.text import seconds
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
class Level:
    """A level of the network between nodes: so many nodes (None: all) reach each other over such links."""

    name: str
    nodes: int | None
    link: Link


@dataclass(frozen=True)
class Disk:
    """Bytes a second of all who write, and of each."""

    rate: float
    writer_rate: float


@dataclass(frozen=True)
class Machine:
    """What is known or assumed of a machine."""

    node: Link  # between ranks of a node
    between: Link  # of a node, which its ranks share
    flops: float  # operations a second of a rank's matrix products, while all ranks compute
    moves: float  # bytes a second of a rank in everything else
    memory: int | None = None  # bytes for a rank; None: not known
    host_link: float = 4e10  # bytes a second from a GPU to its host, and as many back at the same time
    levels: tuple[Level, ...] = ()  # from the inside out; none: `between` joins all nodes
    disk: Disk | None = None

    def joining(self, nodes: int) -> Machine:
        """The machine with the links of the outermost level that so many nodes need between them."""
        needed = (level for level in self.levels if level.nodes is None or nodes <= level.nodes)
        return replace(self, between=next(needed).link) if self.levels else self


# 10 Gbit between nodes; what one core reaches, the last as fitted to the steps in docs/benchmarks.md.
ASSUMED = Machine(Link(5e-6, 2.5e-10), Link(3e-5, 8e-10), flops=5e10, moves=12e9)
# Units for bfloat16: twice the rate of products in float32, as measured in docs/benchmarks.md.
ASSUMED_BF16 = replace(ASSUMED, flops=2 * ASSUMED.flops)
# GPUs of 2023 and their networks by data sheets, at shares that are often reached: not measured here.
GPU_LINKS = Link(2e-5, 1 / 4e10), Link(3e-5, 1 / 2e10)
ASSUMED_GPU = Machine(*GPU_LINKS, flops=4e14, moves=3e12)  # products of low precision
ASSUMED_GPU_FP32 = Machine(*GPU_LINKS, flops=4e13, moves=3e12)
LOW = ASSUMED_BF16, ASSUMED_GPU  # of low precision
DOCTOR = {  # name -> where the doctor has it
    "alpha_node": "links.node.alpha_seconds",
    "beta_node": "links.node.beta_seconds_per_byte",
    "alpha": "links.between.alpha_seconds",
    "beta": "links.between.beta_seconds_per_byte",
    "flops": "flops_per_second_per_rank",
    "bf16_flops": "bf16_flops_per_second_per_rank",
    "memory": "memory_bytes_per_rank",
}
MOST_DOCTOR = 16 << 20  # bytes of a doctor's JSON
LARGEST = 1e30  # no rate is so large


def billions(rate: float) -> str:
    """So many a second, in 10^9."""
    return f"{rate / 1e9:.3g}"


def bandwidth(beta: float) -> str:
    """Bytes a second, from seconds a byte."""
    return f"{1e-9 / beta:.3g} GB/s" if beta else "no time a byte"


RATES = {  # flag -> field of `Machine` and of a link there, what the flag is, how a report tells it
    "flops": ("flops", "floating-point operations a second of a rank's products", billions, "GFLOP/s a rank"),
    "memory_bandwidth": ("moves", "bytes a second of a rank in everything else", billions, "GB/s a rank"),
    "host_bandwidth": ("host_link", "bytes a second to a GPU's host, each way", billions, "GB/s to the host"),
    "alpha_node": ("node.alpha", "least seconds of a message in a node", seconds, "in a node"),
    "beta_node": ("node.beta", "seconds a byte between ranks of a node", bandwidth, "in a node"),
    "alpha": ("between.alpha", "least seconds of a message between nodes", seconds, "between nodes"),
    "beta": ("between.beta", "seconds a byte over a node's link", bandwidth, "between nodes"),
}


def read_doctor(path: Path) -> dict[str, float]:
    """The numbers of a doctor's JSON by the names of flags; those it did not measure are left out."""
    place = shown(path)
    try:
        found: Any = parse_json(read_file(path, MOST_DOCTOR))
    except FileError as error:
        raise UsageError(f"--doctor {error}") from None
    except ValueError as error:
        raise UsageError(f"--doctor {place}: not the JSON of zero-mpi doctor: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"--doctor {place}: expected a JSON object of zero-mpi doctor, found another value")
    numbers = {name: number_at(place, found, keys) for name, keys in DOCTOR.items()}
    known = {name: value for name, value in numbers.items() if value is not None}
    if not known:
        raise UsageError(f"--doctor {place}: no rate in it; expected keys such as links.node.alpha_seconds")
    return known


def number_at(place: str, found: Any, keys: str) -> float | None:
    """The number at a path of keys, None where there is none; raises UsageError for anything else."""
    for key in keys.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < LARGEST:
        raise UsageError(f"--doctor {place}: {keys} is {shown(found)}; expected a number from 0 up")
    return float(found)


def machine_of(numbers: Mapping[str, float], base: Machine = ASSUMED) -> Machine:
    """What is assumed with what is known put in; raises UsageError for a number that cannot be."""
    for name, value in numbers.items():
        field, _, of_link = (RATES[name][0] if name in RATES else name).partition(".")
        if not 0 <= value < math.inf or (not of_link and value == 0):
            least = "at least 0" if of_link else "more than 0"
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: expected {least}")
        changed: Any = replace(getattr(base, field), **{of_link: value}) if of_link else value
        changes: dict[str, Any] = {field: int(value) if field == "memory" else changed}
        base = replace(base, **changes)
    return base


def assumed(on_gpu: bool, precision: str) -> Machine:
    """What is taken for numbers that nobody gave; in bf16 a processor is taken to have units for it."""
    if on_gpu:
        return ASSUMED_GPU_FP32 if precision == "fp32" else ASSUMED_GPU
    return ASSUMED_BF16 if precision == "bf16" else ASSUMED
