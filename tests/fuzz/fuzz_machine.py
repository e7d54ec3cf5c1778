"""Machines in TOML that lie, given to `plan --machine`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from random import Random
from typing import Any

import wild
from fuzz_toml import as_toml

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "machines"
# Of a size that a node has room for a few of: the plan looks for the largest that fits.
MODEL = ["--layers", "8", "--dim", "4096", "--heads", "8", "--context", "1024", "--vocab-size", "300"]


def described(random: Random) -> dict[str, Any]:
    return tomllib.loads((EXAMPLES / random.choice(["small.toml", "large.toml"])).read_text())


def command(random: Random, folder: Path, machine: dict[str, Any] | bytes) -> list[str]:
    raw = machine if isinstance(machine, bytes) else as_toml(machine).encode()
    (folder / "machine.toml").write_bytes(raw)
    asked = random.choice([["--sweep", "--most-ranks", "4"]] * 4 + [["--ranks", "4"]])
    return ["-m", "zero_mpi", "plan", *MODEL, *asked, "--strategy", "full-shard", "--machine", "machine.toml"]


def types(random: Random, folder: Path) -> list[str]:
    """Values of other types and sizes, and keys that are none, anywhere."""
    machine = described(random)
    for _ in range(random.choice([1, 1, 3])):
        places = [machine, *machine.values(), *machine["network"]]
        tables = [table for table in places if isinstance(table, dict) and table]
        table = random.choice(tables)
        name = random.choice([*table] * 3 + [wild.name(random, list(table))])
        table[name] = wild.value(random)
        if not isinstance(machine.get("network"), list):
            break
    return command(random, folder, machine)


def missing(random: Random, folder: Path) -> list[str]:
    """A key or a table that is not there, or levels in another order."""
    machine = described(random)
    table = random.choice([machine, machine["node"], machine["rates"], random.choice(machine["network"])])
    if random.random() < 0.7:
        del table[random.choice(list(table))]
    else:
        random.shuffle(machine["network"])
    return command(random, folder, machine)


def broken(random: Random, folder: Path) -> list[str]:
    raw = as_toml(described(random)).encode()
    cut = raw[: random.randrange(len(raw) + 1)]
    return command(
        random, folder, random.choice([cut, wild.edited(random, raw), raw + raw, b"[[network]]\n" * 9999])
    )


def places(random: Random, folder: Path) -> list[str]:
    args = command(random, folder, described(random))
    (folder / "machine.toml").unlink()
    wild.special(random, folder / "machine.toml")
    return args


def sound(random: Random, folder: Path) -> list[str]:
    return command(random, folder, described(random))


CASES = {"sound": sound, "types": types, "missing": missing, "broken": broken, "places": places}
