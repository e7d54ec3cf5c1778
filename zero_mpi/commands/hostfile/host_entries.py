"""Hosts and their ranks, in the forms that launchers and batch systems write them. Nothing heavy is imported.

MPICH writes ranks per host as `node1:2`, Open MPI as `node1 slots=2`, and each reads the other's form wrongly
or not at all. Batch systems list a name for each slot (PBS) or for each node (`scontrol show hostnames` of
Slurm). All of these may be mixed. A plain name is one slot; slots of a repeated name are added up at its
first place.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.foreign import show, shown
from zero_mpi.files.open import read_file as read_whole

NAME = re.compile(r"(?!-)[A-Za-z0-9._-]+")  # name of a host, or its IPv4 address
NUMBER = re.compile(r"0{0,99}[1-9][0-9]{0,8}")
MOST_BYTES = 16 << 20  # most bytes of a hostfile
SLOTS, MOST = "slots", "max-slots"
FORMS = "expected HOST, HOST:2 or HOST slots=2 [max-slots=4]"


@dataclass(frozen=True, slots=True)
class HostEntry:
    """Host and its ranks: how many it takes (`slots`), and its maximum where more are requested."""

    name: str
    slots: int = 1
    most: int | None = None


def read_hosts(lines: Iterable[str], where: str) -> list[HostEntry]:
    """Return the hosts of a file called `where`, in order of first lines. UsageError names the line."""
    hosts: dict[str, HostEntry] = {}
    for number, line in enumerate(lines, 1):
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        if text:
            host = read_host(text, f"{where}:{number}")
            hosts[host.name] = merged(hosts[host.name], host) if host.name in hosts else host
    if not hosts:
        raise UsageError(f"{where}: names no host; {FORMS} on each line")
    return list(hosts.values())


def read_host(text: str, place: str) -> HostEntry:
    """Return the host of one line without its comment."""
    entry, *rest = text.split(None, 1)
    name, colon, count = entry.partition(":")
    if not NAME.fullmatch(name) or (colon and not NUMBER.fullmatch(count)):
        raise UsageError(f"{place}: {FORMS}, got {show(text)}")
    given = settings(rest[0], text, place) if rest else {}
    if colon and given:
        raise UsageError(f"{place}: expected one of HOST:2 (MPICH) and slots=2 (Open MPI), got {show(text)}")
    most = given.get(MOST)
    slots = int(count) if colon else given.get(SLOTS, 1)
    if most is not None and most < slots:
        raise UsageError(f"{place}: expected at least as many {MOST} as {SLOTS}, got {show(text)}")
    return HostEntry(name, slots, most)


def settings(rest: str, text: str, place: str) -> Mapping[str, int]:
    """Return the settings after the name: `slots` and `max-slots`, each once, and nothing else."""
    words = rest.lower().replace("_", "-").replace("=", " = ").split()
    found = dict(zip(words[::3], words[2::3], strict=False))
    sound = all(key in (SLOTS, MOST) and NUMBER.fullmatch(value) for key, value in found.items())
    if not sound or len(words) != 3 * len(found) or set(words[1::3]) != {"="}:
        raise UsageError(f"{place}: {FORMS}, got {show(text)}")
    return {key: int(value) for key, value in found.items()}


def merged(first: HostEntry, again: HostEntry) -> HostEntry:
    """Return the sum of two entries of a host; it is limited if both lines say so."""
    limited = first.most is not None and again.most is not None
    most = (first.most or 0) + (again.most or 0) if limited else None
    return replace(first, slots=first.slots + again.slots, most=most)


# Intel MPI heeds the ranks of a host in a file of -machinefile alone.
LINES: Mapping[str, Callable[[HostEntry], str]] = {  # for mpiexec -f, mpirun --hostfile and -machinefile
    "mpich": lambda host: f"{host.name}:{host.slots}",
    "openmpi": lambda host: f"{host.name} {SLOTS}={host.slots}" + f" {MOST}={host.most}" * bool(host.most),
    "impi": lambda host: f"{host.name}:{host.slots}",
}


def read_file(path: str) -> list[HostEntry]:
    """Return the hosts of a file, or of standard input for "-". Raises UsageError."""
    where = "standard input" if path == "-" else shown(path)
    try:
        data = sys.stdin.buffer.read(MOST_BYTES) if path == "-" else read_whole(path, MOST_BYTES)
        return read_hosts(data.decode().splitlines(), where)
    except FileError as error:
        raise UsageError(f"{error}; {FORMS} on each line") from None
    except UnicodeDecodeError:
        raise UsageError(f"{where}: is not text; {FORMS} on each line") from None
