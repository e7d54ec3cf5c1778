"""A machine that a file describes, so that a plan can be made far from it: TOML, as in examples/machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from zero_mpi.cli.parser import nearest
from zero_mpi.config.toml import read_tables
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import quoted, show, shown
from zero_mpi.plan.machine import LARGEST, Disk, Level, Link

LINK: dict[str, type] = {"alpha_seconds": float, "bytes_per_second": float}
TABLES: dict[str, dict[str, type]] = {  # table -> key -> type of its number, all above 0
    "node": {"ranks": int, "memory_bytes": int, **LINK},
    "rates": dict.fromkeys(
        ("fp32_flops_per_second", "bf16_flops_per_second", "memory_bytes_per_second"), float
    ),
    "disk": {"bytes_per_second": float, "bytes_per_second_per_writer": float},
}
LEVEL: dict[str, type] = {"name": str, "nodes": int, **LINK}
SAID: dict[type, str] = {int: "a whole number above 0", float: "a number above 0", str: "a text"}


@dataclass(frozen=True)
class MachineFile:
    """What a file says; numbers: by the names of flags, for a rank."""

    ranks: int  # of a node
    numbers: dict[str, float]
    levels: tuple[Level, ...]
    disk: Disk | None


def read_machine(path: Path) -> MachineFile:
    """What a file says of a machine; raises UsageError that names the file and the key."""
    place = f"--machine {shown(path)}"
    found = read_tables("--machine", path)
    refuse_unknown(place, "", found, (*TABLES, "network"))
    tables = {
        name: checked(f"{place}: [{name}]", found.get(name), keys)
        for name, keys in TABLES.items()
        if name in found or name != "disk"
    }
    node, rates, disk = tables["node"], tables["rates"], tables.get("disk")
    levels = tuple(read_levels(place, found.get("network")))
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
    return MachineFile(node["ranks"], numbers, levels, Disk(*disk.values()) if disk else None)


def read_levels(place: str, found: Any) -> Iterator[Level]:
    """The levels of the network from the inside out, each of which joins more nodes than the one before."""
    if not isinstance(found, list) or not found:
        raise UsageError(f"{place}: [[network]]: expected a table for each level, found {came(found)}")
    tables = []
    for number, table in enumerate(found):
        last = number == len(found) - 1
        keys = {key: kind for key, kind in LEVEL.items() if key != "nodes" or not last}
        where = f"{place}: [[network]] {number + 1}"
        if last and isinstance(table, dict) and "nodes" in table:
            raise UsageError(f"{where}: nodes: expected none, for the last level joins all; leave it out")
        tables.append(checked(where, table, keys))
    for number, (inner, outer) in enumerate(pairwise(tables[:-1]), 2):
        if outer["nodes"] <= inner["nodes"]:
            raise UsageError(
                f"{place}: [[network]] {number}: nodes is {outer['nodes']}: expected more than the "
                f"{inner['nodes']} of the level before; levels go from the inside out"
            )
    for table in tables:
        link = Link(table["alpha_seconds"], 1 / table["bytes_per_second"])
        yield Level(table["name"], table.get("nodes"), link)


def refuse_unknown(place: str, where: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise UsageError for a key that is none."""
    for key in table:
        if key not in known:
            meant = nearest(key, known) or f"; expected {', '.join(known)}"
            raise UsageError(f"{place}:{where} {show(key)} is not a key{meant}")


def checked(place: str, table: Any, keys: Mapping[str, type]) -> dict[str, Any]:
    """The values of a table in the order of `keys`, which are all that it has; raises UsageError."""
    if not isinstance(table, dict):
        raise UsageError(f"{place}: expected a table with {', '.join(keys)}, found {came(table)}")
    refuse_unknown(place, "", table, tuple(keys))
    return {key: value_of(f"{place}: {key}", table.get(key), kind) for key, kind in keys.items()}


def value_of(place: str, value: Any, kind: type) -> Any:
    """A value of a type, a number within bounds; raises UsageError."""
    kinds = (int, float) if kind is float else kind
    fits = isinstance(value, kinds) and not isinstance(value, bool)
    if not fits or (kind is not str and not 1 / LARGEST < value < LARGEST):
        raise UsageError(f"{place}: expected {SAID[kind]}, found {came(value)}")
    return kind(value)


def came(value: Any) -> str:
    """What is in a file, for an error."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    return "nothing" if value is None else quoted(value)
