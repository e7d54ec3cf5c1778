"""`zero-mpi hostfile FILE --for mpich|openmpi`: prints a hostfile in the form that a launcher reads.

For ranks per host, MPICH expects `node1:2` and Open MPI `node1 slots=2`. Each of them reads the other form
wrongly or not at all. Batch systems list a name for each slot (PBS) or for each node (`scontrol show
hostnames` of Slurm). An input may mix all of these forms. A name alone is one slot. The slots of a repeated
name are added up.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import write
from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.foreign import show, shown
from zero_mpi.files.open import read_file

NUMBER = "0{0,99}[1-9][0-9]{0,8}"
LINE = re.compile(  # a full line: a name or IPv4 address, with or without slots
    rf"(?P<name>(?!-)[A-Za-z0-9._-]+)(:(?P<count>{NUMBER})|(?P<rest>(\s+(max[-_])?slots\s*=\s*{NUMBER})*))",
    re.ASCII | re.IGNORECASE,
)
SLOTS = re.compile(rf"\sslots\s*=\s*({NUMBER})", re.IGNORECASE)
MOST_BYTES = 16 << 20  # maximum size of a hostfile in bytes
FORMS = "expected HOST, HOST:2 or HOST slots=2"


@dataclass(frozen=True, slots=True)
class HostEntry:
    """A host with its number of ranks (`slots`)."""

    name: str
    slots: int = 1


def read_hosts(lines: Iterable[str], source: str) -> list[HostEntry]:
    """Return the hosts in a file called `source`, in order. Raise UsageError naming an invalid line."""
    hosts = Counter[str]()
    for number, line in enumerate(lines, 1):
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        if not text:
            continue
        match = LINE.fullmatch(text)
        counts = SLOTS.findall(match["rest"] or "") if match else []
        if match is None or len(counts) > 1:
            raise UsageError(f"{source}:{number}: {FORMS}, got {show(text)}")
        hosts[match["name"]] += int(match["count"] or [*counts, "1"][0])
    if not hosts:
        raise UsageError(f"{source}: names no host; {FORMS} on each line")
    return [HostEntry(name, slots) for name, slots in hosts.items()]


# Intel MPI reads ranks per host only from a file that -machinefile names.
LINES: Mapping[str, Callable[[HostEntry], str]] = {  # for mpiexec -f, mpirun --hostfile and -machinefile
    "mpich": lambda host: f"{host.name}:{host.slots}",
    "openmpi": lambda host: f"{host.name} slots={host.slots}",
    "impi": lambda host: f"{host.name}:{host.slots}",
}


def hosts_in(path: str) -> list[HostEntry]:
    """Return the hosts in a file, or in standard input for "-". Raise UsageError for an invalid file."""
    source = "standard input" if path == "-" else shown(path)
    try:
        data = sys.stdin.buffer.read(MOST_BYTES) if path == "-" else read_file(path, MOST_BYTES)
        return read_hosts(data.decode().splitlines(), source)
    except FileError as error:
        raise UsageError(f"{error}; {FORMS} on each line") from None
    except UnicodeDecodeError:
        raise UsageError(f"{source}: is not text; {FORMS} on each line") from None


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="zero-mpi hostfile",
        description="Write a hostfile for a launcher.",
        epilog="Examples, in a PBS job and a Slurm job:\n\n"
        "  zero-mpi hostfile $PBS_NODEFILE --for openmpi\n"
        "  scontrol show hostnames | zero-mpi hostfile - --for mpich",
    )
    parser.add_argument("file", help="hostfile of any launcher, or list of names; -: standard input")
    parser.add_argument("--for", dest="launcher", choices=tuple(LINES), required=True, help="launcher")
    return parser


def command(world: object, arguments: Sequence[str]) -> int:
    options = make_parser().parse_args(arguments)
    write(map(LINES[options.launcher], hosts_in(options.file)))
    return 0


def main() -> None:
    from zero_mpi.launch.world import run  # imports NumPy, which `supervise` must not load

    run("hostfile", command, alone=True)
