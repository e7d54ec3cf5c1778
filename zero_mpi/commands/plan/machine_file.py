"""Files with the speeds of a machine: the JSON of `zero-mpi doctor`, and a TOML description."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from zero_mpi.cli.parser import nearest
from zero_mpi.config.toml import read_tables
from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.foreign import quoted, show, shown
from zero_mpi.files.open import read_file
from zero_mpi.files.parse import parse_json
from zero_mpi.plan.machine import Disk, Level, Link

DOCTOR = {  # name -> its place in the doctor's JSON
    "alpha_node": "links.node.alpha_seconds",
    "beta_node": "links.node.beta_seconds_per_byte",
    "alpha": "links.between.alpha_seconds",
    "beta": "links.between.beta_seconds_per_byte",
    "flops": "flops_per_second_per_rank",
    "bf16_flops": "bf16_flops_per_second_per_rank",
    "memory": "memory_bytes_per_rank",
}
MOST_DOCTOR = 16 << 20  # bytes of a doctor's JSON
LARGEST = 1e30  # upper bound of any rate
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


def read_doctor(path: Path) -> dict[str, float]:
    """Return the numbers of a doctor's JSON by the names of flags, without those it did not measure."""
    place = f"--doctor {shown(path)}"
    try:
        found: Any = parse_json(read_file(path, MOST_DOCTOR))
    except FileError as error:
        raise UsageError(f"--doctor {error}") from None
    except ValueError as error:
        raise UsageError(f"{place}: not the JSON of zero-mpi doctor: {error}") from None
    known = dict[str, float]()
    for name, keys in DOCTOR.items():
        value = found
        for key in keys.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST:
                raise UsageError(f"{place}: {keys} is {shown(value)}; expected a number of at least 0")
            known[name] = float(value)
    if not known:
        raise UsageError(f"{place}: no speed in it; expected keys such as links.node.alpha_seconds")
    return known


@dataclass(frozen=True)
class MachineFile:
    """Contents of a machine file; numbers: by the names of flags, for a rank."""

    ranks: int  # ranks of a node
    numbers: dict[str, float]
    levels: tuple[Level, ...]
    disk: Disk | None


def read_machine(path: Path) -> MachineFile:
    """Read a file that describes a machine; raises UsageError that names the file and the key."""
    place = f"--machine {shown(path)}"
    found = read_tables("--machine", path)
    refuse_unknown(place, found, (*TABLES, "network"))
    node, rates, disk = (
        checked(f"{place}: [{name}]", found.get(name), keys) if name in found or name != "disk" else None
        for name, keys in TABLES.items()
    )
    assert node is not None and rates is not None, "only a disk may be missing"  # noqa: PT018
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
    """Yield the levels of the network from the inside out; each joins more nodes than the one before."""
    if not isinstance(found, list) or not found:
        raise UsageError(f"{place}: [[network]]: expected a table for each level, found {came(found)}")
    tables = []
    for number, table in enumerate(found, 1):
        where = f"{place}: [[network]] {number}"
        last = number == len(found)
        if last and isinstance(table, dict) and "nodes" in table:
            raise UsageError(f"{where}: nodes: not for the last level, which joins all nodes; leave it out")
        tables.append(checked(where, table, {key: LEVEL[key] for key in LEVEL if key != "nodes" or not last}))
    for number, (inner, outer) in enumerate(pairwise(tables[:-1]), 2):
        if outer["nodes"] <= inner["nodes"]:
            raise UsageError(
                f"{place}: [[network]] {number}: nodes is {outer['nodes']}: expected more than the "
                f"{inner['nodes']} of the level before; levels go from the inside out"
            )
    for table in tables:
        link = Link(table["alpha_seconds"], 1 / table["bytes_per_second"])
        yield Level(table["name"], table.get("nodes"), link)


def refuse_unknown(place: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise UsageError for an unknown key."""
    for key in table:
        if key not in known:
            meant = nearest(key, known) or f"; expected {', '.join(known)}"
            raise UsageError(f"{place}: {show(key)} is not a key{meant}")


def checked(place: str, table: Any, keys: Mapping[str, type]) -> dict[str, Any]:
    """Return the values of a table in the order of `keys`, its only keys; raises UsageError."""
    if not isinstance(table, dict):
        raise UsageError(f"{place}: expected a table with {', '.join(keys)}, found {came(table)}")
    refuse_unknown(place, table, tuple(keys))
    values = dict[str, Any]()
    for key, kind in keys.items():
        value: Any = table.get(key)
        fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
        if not fits or (kind is not str and not 1 / LARGEST < value < LARGEST):
            raise UsageError(f"{place}: {key}: expected {SAID[kind]}, found {came(value)}")
        values[key] = kind(value)
    return values


def came(value: Any) -> str:
    """Return a value of a file as text for an error."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    return "nothing" if value is None else quoted(value)
