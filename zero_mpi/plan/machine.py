"""Speeds of a machine as numbers: what a message takes in a node and between nodes, how fast a rank is.

They come from files (`commands.plan.machine_file`), from flags, or are assumed; a report names the source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zero_mpi.cli.text import seconds
from zero_mpi.errors import UsageError


@dataclass(frozen=True)
class Link:
    """Link over which a message of n bytes takes alpha + beta n seconds."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Level:
    """Level of the network between nodes: up to `nodes` nodes (None: all) are joined by such links."""

    name: str
    nodes: int | None
    link: Link


@dataclass(frozen=True)
class Disk:
    """Bytes per second of all writers together, and of each writer."""

    rate: float
    writer_rate: float


@dataclass(frozen=True)
class Machine:
    """Known or assumed speeds and sizes of a machine."""

    node: Link  # link between ranks of a node
    between: Link  # link of a node, which its ranks share
    flops: float  # operations per second of a rank's matrix products, while all ranks compute
    moves: float  # bytes per second of a rank in all other operations
    memory: int | None = None  # bytes for a rank; None: not known
    host_link: float = 4e10  # bytes per second from a GPU to its host, and as many back at the same time
    levels: tuple[Level, ...] = ()  # from the inside out; empty: `between` joins all nodes
    disk: Disk | None = None

    def joining(self, nodes: int) -> Machine:
        """Return the machine with the links of the outermost level that `nodes` nodes need between them."""
        needed = (level for level in self.levels if level.nodes is None or nodes <= level.nodes)
        return replace(self, between=next(needed).link) if self.levels else self


# 10 Gbit between nodes; what one core reaches, the last as fitted to the steps in docs/benchmarks.md.
ASSUMED = Machine(Link(5e-6, 2.5e-10), Link(3e-5, 8e-10), flops=5e10, moves=12e9)
# Units for bfloat16: twice the rate of products in float32, as measured in docs/benchmarks.md.
ASSUMED_BF16 = replace(ASSUMED, flops=2 * ASSUMED.flops)
# GPUs of 2023 and their networks by data sheets, at shares that are often reached: not measured here.
GPU_LINKS = Link(2e-5, 1 / 4e10), Link(3e-5, 1 / 2e10)
ASSUMED_GPU = Machine(*GPU_LINKS, flops=4e14, moves=3e12)  # products of low precision
ASSUMED_GPU_FP32 = replace(ASSUMED_GPU, flops=4e13)
LOW = ASSUMED_BF16, ASSUMED_GPU  # assumed machines for low precision


def billions(rate: float) -> str:
    """Return a rate as text, in 10^9 per second."""
    return f"{rate / 1e9:.3g}"


def bandwidth(beta: float) -> str:
    """Return a bandwidth as text, from seconds per byte."""
    return f"{1e-9 / beta:.3g} GB/s" if beta else "no time per byte"


RATES = {  # flag -> field of `Machine` and of a link in it, help of the flag, form in a report
    "flops": ("flops", "matmul speed per rank, in FLOP/s", billions, "GFLOP/s per rank"),
    "memory_bandwidth": ("moves", "memory bandwidth per rank, in bytes/s", billions, "GB/s per rank"),
    "host_bandwidth": (
        "host_link",
        "bandwidth between GPU and host, in bytes/s each way",
        billions,
        "GB/s to the host",
    ),
    "alpha_node": ("node.alpha", "latency of a message inside a node, in seconds", seconds, "in a node"),
    "beta_node": ("node.beta", "seconds per byte between ranks of a node", bandwidth, "in a node"),
    "alpha": ("between.alpha", "latency of a message between nodes, in seconds", seconds, "between nodes"),
    "beta": ("between.beta", "seconds per byte over a node's link", bandwidth, "between nodes"),
}


def assumed(on_gpu: bool, precision: str) -> Machine:
    """Return the values assumed for missing numbers; in bf16 a processor is assumed to have units for it."""
    if on_gpu:
        return ASSUMED_GPU_FP32 if precision == "fp32" else ASSUMED_GPU
    return ASSUMED_BF16 if precision == "bf16" else ASSUMED


def machine_of(numbers: Mapping[str, float], base: Machine = ASSUMED) -> Machine:
    """Return the assumed machine with known numbers put in; raises UsageError for an impossible number."""
    for name, value in numbers.items():
        field, _, of_link = (RATES[name][0] if name in RATES else name).partition(".")
        if not 0 <= value < math.inf or (not of_link and value == 0):
            least = "at least 0" if of_link else "more than 0"
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: expected {least}")
        changed: Any = replace(getattr(base, field), **{of_link: value}) if of_link else value
        changes: dict[str, Any] = {field: int(value) if field == "memory" else changed}
        base = replace(base, **changes)
    return base
