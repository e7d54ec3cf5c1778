"""Speeds of a machine: links within and between nodes, and a rank's rates of computing and memory.

The numbers come from the JSON of `zero-mpi doctor`, from a TOML file or from flags. Missing numbers are
assumed; a report says which numbers are assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from zero_mpi.cli.parser import nearest
from zero_mpi.cli.text import seconds
from zero_mpi.config.toml import read_tables
from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.foreign import quoted, show, shown
from zero_mpi.files.open import read_file
from zero_mpi.files.parse import parse_json


@dataclass(frozen=True)
class Link:
    """Link on which a message of n bytes takes alpha + beta n seconds."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Level:
    """Level of a network: `link` joins nodes in groups of up to `nodes` nodes (None: all nodes)."""

    name: str
    nodes: int | None
    link: Link


@dataclass(frozen=True)
class Machine:
    """Known or assumed speeds and sizes of a machine."""

    node: Link  # link between ranks of a node
    between: Link  # link between nodes, which the ranks of a node share
    flops: float  # FLOP per second of a rank's matmuls while all ranks compute
    moves: float  # bytes per second of a rank in all other operations
    memory: int | None = None  # bytes available to a rank; None: not known
    host_link: float = 4e10  # bytes per second between a GPU and its host, in each direction
    levels: tuple[Level, ...] = ()  # innermost first; empty: `between` joins all nodes

    def joining(self, nodes: int) -> Machine:
        """Return the machine for `nodes` nodes, with the link of the outermost level that they use."""
        levels = (level for level in self.levels if level.nodes is None or nodes <= level.nodes)
        return replace(self, between=next(levels).link) if self.levels else self


# 10 Gbit/s between nodes, and the rates of one core; `moves` is fitted to the steps in docs/benchmarks.md.
ASSUMED = Machine(Link(5e-6, 2.5e-10), Link(3e-5, 8e-10), flops=5e10, moves=12e9)
# CPU with bfloat16 units: twice the float32 rate of products, as measured in docs/benchmarks.md.
ASSUMED_BF16 = replace(ASSUMED, flops=2 * ASSUMED.flops)
# GPUs of 2023 and their networks: typical fractions of the data sheets' rates, not measured.
GPU_LINKS = Link(2e-5, 1 / 4e10), Link(3e-5, 1 / 2e10)
ASSUMED_GPU = Machine(*GPU_LINKS, flops=4e14, moves=3e12)  # matmul rate in low precision
ASSUMED_GPU_FP32 = replace(ASSUMED_GPU, flops=4e13)
LOW = ASSUMED_BF16, ASSUMED_GPU  # machines whose `flops` apply to low precision


def billions(rate: float) -> str:
    return f"{rate / 1e9:.3g}"


def bandwidth(beta: float) -> str:
    """Return a bandwidth as text, from seconds per byte."""
    return f"{1e-9 / beta:.3g} GB/s" if beta else "no time per byte"


RATES = {  # name -> path in `Machine`, function for its text in a report, unit
    "flops": ("flops", billions, "GFLOP/s per rank"),
    "memory_bandwidth": ("moves", billions, "GB/s per rank"),
    "host_bandwidth": ("host_link", billions, "GB/s to the host"),
    "alpha_node": ("node.alpha", seconds, "in a node"),
    "beta_node": ("node.beta", bandwidth, "in a node"),
    "alpha": ("between.alpha", seconds, "between nodes"),
    "beta": ("between.beta", bandwidth, "between nodes"),
}


def assumed(on_gpu: bool, precision: str) -> Machine:
    """Return the assumed machine; for bf16 on CPUs, one with bfloat16 units."""
    if on_gpu:
        return ASSUMED_GPU_FP32 if precision == "fp32" else ASSUMED_GPU
    return ASSUMED_BF16 if precision == "bf16" else ASSUMED


def machine_of(numbers: Mapping[str, float], base: Machine = ASSUMED) -> Machine:
    """Return machine `base` with the values in `numbers`."""
    for name, number in numbers.items():
        if name == "memory":
            base = replace(base, memory=int(number))
        else:
            field, _, part = RATES[name][0].partition(".")
            speed: Any = replace(getattr(base, field), **{part: number}) if part else number
            base = replace(base, **{field: speed})
    return base


# ------------------------------------------------------------------------------------------------- files

DOCTOR = {  # name -> path in the doctor's JSON
    "alpha_node": "links.node.alpha_seconds",
    "beta_node": "links.node.beta_seconds_per_byte",
    "alpha": "links.between.alpha_seconds",
    "beta": "links.between.beta_seconds_per_byte",
    "flops": "flops_per_second_per_rank",
    "bf16_flops": "bf16_flops_per_second_per_rank",
    "memory": "memory_bytes_per_rank",
}
MOST_DOCTOR = 16 << 20  # maximum bytes of a doctor's JSON
LARGEST = 1e30  # upper bound of any rate
LINK: dict[str, type] = {"alpha_seconds": float, "bytes_per_second": float}
TABLES: dict[str, dict[str, type]] = {  # table -> key -> type of its number, all above 0
    "node": {"ranks": int, "memory_bytes": int, **LINK},
    "rates": dict.fromkeys(
        ("fp32_flops_per_second", "bf16_flops_per_second", "memory_bytes_per_second"), float
    ),
}
LEVEL: dict[str, type] = {"name": str, "nodes": int, **LINK}
EXPECTED: dict[type, str] = {int: "a whole number above 0", float: "a number above 0", str: "a string"}


def read_doctor(path: Path) -> dict[str, float]:
    """Return the measured numbers of a doctor's JSON, by the names in `DOCTOR`; a speed of 0 is left out."""
    place = f"--doctor {shown(path)}"
    try:
        report: Any = parse_json(read_file(path, MOST_DOCTOR))
    except FileError as error:
        raise UsageError(f"--doctor {error}") from None
    except ValueError as error:
        raise UsageError(f"{place}: not the JSON of zero-mpi doctor: {error}") from None
    speeds = dict[str, float]()
    for name, keys in DOCTOR.items():
        value = report
        for key in keys.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST:
                raise UsageError(f"{place}: {keys} is {shown(value)}; expected a number of at least 0")
            if value or "seconds" in keys:
                speeds[name] = float(value)
    if not speeds:
        raise UsageError(f"{place}: it contains no speed; expected keys such as links.node.alpha_seconds")
    return speeds


class MachineFile(NamedTuple):
    """Contents of a machine file. `numbers` are named as in `RATES` and `DOCTOR`."""

    ranks: int  # ranks of a node
    numbers: dict[str, float]
    levels: tuple[Level, ...]


def read_machine(path: Path) -> MachineFile:
    """Return the contents of a machine file; raise UsageError naming the file and the invalid key."""
    place = f"--machine {shown(path)}"
    tables = read_tables("--machine", path)
    refuse_unknown(place, tables, (*TABLES, "network"))
    node, rates = (checked(f"{place}: [{name}]", tables.get(name), keys) for name, keys in TABLES.items())
    levels = read_levels(place, tables.get("network"))
    numbers = {
        "alpha_node": node["alpha_seconds"],
        "beta_node": 1 / node["bytes_per_second"],
        "alpha": levels[0].link.alpha,
        "beta": levels[0].link.beta,
        "flops": rates["fp32_flops_per_second"],
        "bf16_flops": rates["bf16_flops_per_second"],
        "memory_bandwidth": rates["memory_bytes_per_second"],
        "memory": node["memory_bytes"] / node["ranks"],
    }
    return MachineFile(node["ranks"], numbers, tuple(levels))


def read_levels(place: str, network: Any) -> list[Level]:
    """Return the levels of the network, innermost first; each level has more nodes than the previous one."""
    if not isinstance(network, list) or not network:
        raise UsageError(f"{place}: [[network]]: expected a table for each level, found {came(network)}")
    levels = list[Level]()
    for number, table in enumerate(network, 1):
        prefix, last = f"{place}: [[network]] {number}", number == len(network)
        if last and isinstance(table, dict) and "nodes" in table:
            raise UsageError(f"{prefix}: nodes: leave it out of the last level, which joins all nodes")
        level = checked(prefix, table, {key: LEVEL[key] for key in LEVEL if key != "nodes" or not last})
        nodes, previous = level.get("nodes"), levels[-1].nodes if levels else 0
        if nodes is not None and previous is not None and nodes <= previous:
            raise UsageError(
                f"{prefix}: nodes is {nodes}: expected more than the {previous} of the previous level; list "
                "levels from the innermost to the outermost"
            )
        link = Link(level["alpha_seconds"], 1 / level["bytes_per_second"])
        levels.append(Level(level["name"], nodes, link))
    return levels


def refuse_unknown(place: str, table: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise UsageError for an unknown key."""
    for key in table:
        if key not in keys:
            hint = nearest(key, keys) or f"; expected {', '.join(keys)}"
            raise UsageError(f"{place}: {show(key)} is not a key{hint}")


def checked(place: str, table: Any, keys: Mapping[str, type]) -> dict[str, Any]:
    """Return a table's values in the order of `keys`; raise UsageError for an unknown key or a bad value."""
    if not isinstance(table, dict):
        raise UsageError(f"{place}: expected a table with {', '.join(keys)}, found {came(table)}")
    refuse_unknown(place, table, tuple(keys))
    values = dict[str, Any]()
    for key, kind in keys.items():
        value: Any = table.get(key)
        fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
        if not fits or (kind is not str and not 1 / LARGEST < value < LARGEST):
            raise UsageError(f"{place}: {key}: expected {EXPECTED[kind]}, found {came(value)}")
        values[key] = kind(value)
    return values


def came(value: Any) -> str:
    """Return a value of a file as text for an error message."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    return "nothing" if value is None else quoted(value)
