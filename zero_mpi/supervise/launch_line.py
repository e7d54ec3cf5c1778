"""The command that is supervised: what it says of hosts, ranks and the run, and the same with others.

What stands between the launcher's name and the program's (a python, a shell, a script) is the launcher's;
flags of the run stand behind. A command without a launcher that is known is started again as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from zero_mpi.errors import UsageError
from zero_mpi.files.open import read_file
from zero_mpi.files.parse import parse_toml

SRUN = "srun"
LAUNCHER = re.compile(r"mpirun|mpiexec|(mpirun|mpiexec)[.-]\w+|prterun|orterun|srun")
PROGRAM = re.compile(r"python[\d.]*|zero-mpi|(ba|da|k|z)?sh|env|.+\.(py|sh)")
HOSTFILE = ("-f", "-hostfile", "--hostfile", "-machinefile", "--machinefile")
MACHINEFILE = "-machinefile"  # of all launchers; of Intel MPI's the only one that heeds the ranks of a host
HOSTS = ("-hosts", "--hosts", "-host", "--host", "-H")  # names on the line
RANKS = ("-n", "-np", "--n", "--np", "--ntasks")
NODES, NODE_LIST = ("-N", "--nodes"), ("-w", "--nodelist")  # of srun
PER_HOST = ("-ppn", "--ppn", "-perhost", "-npernode", "--npernode", "--ntasks-per-node")
OF_MPIRUN = ("-N", "--N")  # so Open MPI calls these as well
# Files and words that say which rank goes where: with other hosts they would be wrong.
PLACED = (
    "-configfile",
    "--configfile",
    "-app",
    "--app",
    "-rankfile",
    "--rankfile",
    "-rf",
    "--multi-prog",
    "-hosts-group",
)
PARTS = ":"  # between programs that make one job
MAPPED = re.compile(r"ppr:(\d+):node\b")  # Open MPI's --map-by
AGENT = ("-launcher-exec", "-bootstrap-exec", "plm_ssh_agent", "plm_rsh_agent")  # in the place of ssh
TRAIN, SCRIPT = "train", "zero-mpi"
DEFAULT_OUT, AUTO = "runs/default", "auto"  # of train
MOST_SETTINGS = 1 << 20  # bytes of the file of --config


@dataclass(frozen=True)
class Place:
    """Where the value of a flag stands: `words[index]` behind `prefix`."""

    index: int
    prefix: str
    value: str


@dataclass(frozen=True)
class LaunchLine:
    """The words of a command; those of the launcher are from `begin` to `end`, or there are none."""

    words: tuple[str, ...]
    begin: int
    end: int

    @classmethod
    def of(cls, words: Sequence[str]) -> LaunchLine:
        """The command as it was given."""
        names = [Path(word).name for word in words]
        begin = next((i for i, name in enumerate(names) if LAUNCHER.fullmatch(name)), 0)
        if not names or not LAUNCHER.fullmatch(names[begin]):
            return cls(tuple(words), 0, 0)
        after = range(begin + 1, len(names))
        end = next((i for i in after if PROGRAM.fullmatch(names[i])), len(names))
        return cls(tuple(words), begin, end)

    @property
    def launcher(self) -> str:
        """The name of the launcher; empty where none is known."""
        return Path(self.words[self.begin]).name if self.end else ""

    # ------------------------------------------------------------------------------ what it says

    def hostfile(self) -> str:
        """The hostfile that the launcher is given; empty where none is."""
        found = self._of_launcher(HOSTFILE)
        return found.value if found else ""

    def hosts(self) -> str:
        """The hosts that the launcher is given by name, with commas between them; empty where none are."""
        found = self._of_launcher(NODE_LIST if self.launcher == SRUN else HOSTS)
        return found.value if found else ""

    def placed(self) -> str:
        """The word with which the command itself says which rank goes where; empty where hosts can change."""
        of_launcher = self.words[self.begin + 1 : self.end]
        placing = (*PLACED, *(HOSTS if self.hostfile() else ()))
        found = next((word for word in of_launcher if word.partition("=")[0] in placing), "")
        return found or (PARTS if PARTS in self.words[self.begin :] else "")

    def nodes(self) -> int | None:
        """How many nodes srun is asked for; None where it is left open."""
        found = self._of_launcher(NODES) if self.launcher == SRUN else None
        return int(found.value) if found and re.fullmatch("0*[1-9][0-9]{0,8}", found.value) else None

    def ranks(self) -> int | None:
        """How many ranks are asked for."""
        return number_at(self._of_launcher(RANKS))

    def per_host(self) -> int | None:
        """How many ranks are asked for on each host."""
        mapped = next(filter(None, map(MAPPED.search, self.words[self.begin : self.end])), None)
        names = PER_HOST if self.launcher == SRUN else (*PER_HOST, *OF_MPIRUN)
        return int(mapped[1]) if mapped else number_at(self._of_launcher(names))

    def agent(self) -> str:
        """What reaches another host, as ssh does."""
        found = self._of_launcher(AGENT)
        return found.value if found else ""

    def out(self) -> Path | None:
        """The folder of the run; None where the command is none of `train`, and names none."""
        found = self._of_run("--out")
        if found:
            return Path(found.value)
        said = self._settings().get("out")
        if isinstance(said, str):
            return Path(said)
        return Path(DEFAULT_OUT) if self._is_training() else None

    # ------------------------------------------------------------------------- the same with others

    def resuming(self) -> LaunchLine:
        """The command that goes on from its own newest checkpoint, whatever it began from."""
        found = self._of_run("--resume")
        if found:
            return self._with(found, AUTO)
        if self._settings().get("resume", AUTO) != AUTO:
            return replace(self, words=(*self.words, "--resume", AUTO))
        return self

    def over(self, hostfile: str, ranks: int | None) -> LaunchLine:
        """The command with another hostfile and, where it says how many ranks, as many of them."""
        found = self._of_launcher(HOSTFILE)
        line = self._with(found, hostfile) if found else self._inserted(MACHINEFILE, hostfile)
        return line._with_ranks(ranks)

    def among(self, names: Sequence[str], ranks: int) -> LaunchLine:
        """The command on those of the hosts that it names itself."""
        found = self._of_launcher(HOSTS)
        assert found is not None, "it names hosts"
        left = [entry for entry in found.value.split(",") if entry.partition(":")[0] in names]
        return self._with(found, ",".join(left))._with_ranks(ranks)

    def by_srun(self, names: Sequence[str], ranks: int) -> LaunchLine:
        """The command of srun on these nodes of its job."""
        wanted = {NODES: str(len(names)), NODE_LIST: ",".join(names), RANKS: str(ranks)}
        line = self
        for flags, value in wanted.items():
            found = line._of_launcher(flags)
            line = line._with(found, value) if found else line._inserted(f"{flags[-1]}={value}")
        return line

    # ------------------------------------------------------------------------------------ how

    def _of_launcher(self, names: Sequence[str]) -> Place | None:
        return self._find(names, range(self.begin + 1, self.end))

    def _of_run(self, name: str) -> Place | None:
        return self._find((name,), range(len(self.words) - 1, self.end - 1, -1))

    def _find(self, names: Sequence[str], where: range) -> Place | None:
        """The first such flag on the way."""
        for index in where:
            name, equals, value = self.words[index].partition("=")
            if name in names and equals:
                return Place(index, f"{name}=", value)
            if name in names and index + 1 < len(self.words):
                return Place(index + 1, "", self.words[index + 1])
            if name[:2] in names and self.launcher == SRUN:  # -n4
                return Place(index, name[:2], self.words[index][2:])
        return None

    def _with(self, place: Place, value: str) -> LaunchLine:
        words = [*self.words]
        words[place.index] = place.prefix + value
        return replace(self, words=tuple(words))

    def _with_ranks(self, ranks: int | None) -> LaunchLine:
        found = self._of_launcher(RANKS)
        return self if found is None or ranks is None else self._with(found, str(ranks))

    def _inserted(self, *words: str) -> LaunchLine:
        """With words right behind the launcher's name."""
        before, after = self.words[: self.begin + 1], self.words[self.begin + 1 :]
        return replace(self, words=(*before, *words, *after), end=self.end + len(words))

    def _is_training(self) -> bool:
        names = [Path(word).name for word in self.words]
        return f"zero_mpi.{TRAIN}" in names or (SCRIPT, TRAIN) in pairwise(names)

    def _settings(self) -> dict[str, object]:
        """The settings of the file of --config; what is wrong with it the run will say."""
        found = self._of_run("--config")
        try:
            return parse_toml(read_file(found.value, MOST_SETTINGS)) if found else {}
        except ValueError:  # FileError is one
            return {}


def number_at(place: Place | None) -> int | None:
    """The number that a flag of the launcher has. Raises UsageError for what is none."""
    if place is None:
        return None
    if not place.value.isdecimal() or len(place.value) > 9 or int(place.value) == 0:
        raise UsageError(f"the launcher's number of ranks: expected a number from 1, found {place.value!r}")
    return int(place.value)
