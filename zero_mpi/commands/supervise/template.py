"""Command that is supervised: placeholders for hosts and ranks, and the folder of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from zero_mpi.commands.hostfile.command import LINES, HostEntry
from zero_mpi.errors import UsageError

PLACEHOLDERS = HOSTFILE, HOSTS, NODES, RANKS = "{hostfile}", "{hosts}", "{nodes}", "{ranks}"
DEFAULT_OUT = "runs/default"  # of train


@dataclass(frozen=True)
class Template:
    """The words of a command; `form` is that of its hostfile."""

    words: tuple[str, ...]
    form: str

    @property
    def takes_hosts(self) -> bool:
        """Return whether the command has a placeholder."""
        return any(name in word for word in self.words for name in PLACEHOLDERS)

    def fill(self, hosts: Sequence[HostEntry], folder: Path) -> tuple[str, ...]:
        """Return the words for some hosts; the hostfile is written into `folder`."""
        if not self.takes_hosts:
            return self.words
        path = folder / "hosts"
        path.write_text("".join(f"{LINES[self.form](host)}\n" for host in hosts))
        names = ",".join(host.name for host in hosts)
        values = (str(path), names, str(len(hosts)), str(ranks_of(hosts)))
        words = list(self.words)
        for placeholder, value in zip(PLACEHOLDERS, values, strict=True):
            words = [word.replace(placeholder, value) for word in words]
        return tuple(words)

    def resuming(self) -> Template:
        """Return the command that goes on from the run's own newest checkpoint, whatever it began from."""
        words, is_given = list(self.words), False
        for number, word in enumerate(words):
            if word == "--resume" and number + 1 < len(words):
                words[number + 1], is_given = "auto", True
            elif word.startswith("--resume="):
                words[number], is_given = "--resume=auto", True
        if self._is_training() and not is_given:
            words += ["--resume", "auto"]
        return Template(tuple(words), self.form)

    def out(self) -> Path | None:
        """Return the folder of the run, or None if the command does not train; raises UsageError."""
        given = [after for word, after in pairwise((*self.words, "")) if word == "--out"]
        given += [word.removeprefix("--out=") for word in self.words if word.startswith("--out=")]
        if given:
            return Path(given[-1])
        if any(word.partition("=")[0] == "--config" for word in self.words):
            raise UsageError(
                "--run: expected the folder of the run, for the command has --config and no --out"
            )
        return Path(DEFAULT_OUT) if self._is_training() else None

    def _is_training(self) -> bool:
        names = [Path(word).name for word in self.words]
        return "zero_mpi.train" in names or ("zero-mpi", "train") in pairwise(names)


def ranks_of(hosts: Sequence[HostEntry]) -> int:
    """Return how many ranks some hosts take."""
    return sum(host.slots for host in hosts)
