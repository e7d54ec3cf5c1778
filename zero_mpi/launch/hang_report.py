"""Ranks that stand still tell each other where, through small files in the run directory.

No message could do it: whoever should answer may be inside the MPI library, and nothing is to travel while a
job gets on. So a rank that has stood still for long makes a folder and signs there, others that find it sign
as well, and in the end one of them reads it. A rank that was stopped, or whose host is lost, has not signed:
that is how it is known. Ages are corrected by the file system's clock, since hosts differ in theirs. What an
earlier job left is told by its name and ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

from zero_mpi.comm.base import Comm
from zero_mpi.files.open import read_file
from zero_mpi.files.parse import parse_json

FOLDER = ".ranks"
MOST = 1 << 20  # bytes of what a rank has signed
STACKS = 4  # ranks at most whose stacks are shown


@dataclass(frozen=True)
class RankState:
    """Where a rank stands.

    doing     what its main thread is at, such as "step 3"
    waits     the collective that it waits in; empty: in none
    last      the last one that it has left
    seconds   since when nothing of this has changed
    stacks    of its threads
    """

    doing: str
    waits: str
    last: str
    seconds: float
    stacks: str = ""

    @property
    def place(self) -> str:
        """Where the rank stands: one text for all ranks that stand there."""
        if self.waits:
            return f"{self.doing}, waiting in {self.waits}"
        return f"{self.doing}, in no collective" + (f" since it left {self.last}" if self.last else "")


class RankReports:
    """The folder of a job, as one rank uses it. `job` is a text that no other job has. Raises OSError."""

    def __init__(self, out: Path, rank: int, job: str, folder: str = FOLDER) -> None:
        self._folder, self._rank = out / folder, rank
        self._job = sha256(job.encode()).hexdigest()[:12]
        self._file = self._folder / f"{self._job}-{rank:05d}"

    def is_on(self) -> bool:
        """Whether some rank has signed."""
        return self._folder.exists()

    def sign(self, standing: RankState) -> None:
        """Say where this rank stands now."""
        self._folder.mkdir(exist_ok=True)
        partial = self._folder / f".{self._file.name}"
        partial.write_text(json.dumps(asdict(standing)))
        partial.replace(self._file)

    def leave(self) -> None:
        """Take this rank's note back, for it gets on; the last one to leave removes the folder."""
        self._file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are there
            self._folder.rmdir()

    def claim(self) -> bool:
        """Whether this rank is the one to speak for all: the first that asks, after it has signed."""
        try:
            os.close(os.open(self._folder / f"{self._job}-speaker", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except (FileExistsError, FileNotFoundError):  # another one speaks; or has spoken, and all is cleared
            return False
        return True

    def read(self) -> dict[int, RankState]:
        """rank -> where it stands, of those that have signed. This rank has just done so."""
        found, now = {}, self._file.stat().st_mtime
        for path in self._folder.glob(f"{self._job}-*[0-9]"):
            with contextlib.suppress(OSError, ValueError):  # one that left just now
                standing = standing_of(parse_json(read_file(path, MOST)))
                behind = max(0.0, now - path.stat().st_mtime)
                found[int(path.name.rpartition("-")[2])] = replace(
                    standing, seconds=standing.seconds + behind
                )
        return found

    def clear(self) -> None:
        """Remove the folder, of whatever job: at once, so that nobody finds half of it."""
        aside = self._folder.with_name(f"{self._folder.name}-{self._job}")
        with contextlib.suppress(OSError):
            self._folder.rename(aside)
        for folder in self._folder.parent.glob(f"{self._folder.name}-{'[0-9a-f]' * 12}"):
            shutil.rmtree(folder, ignore_errors=True)


def reports_in(out: Path, comm: Comm) -> tuple[RankReports, list[str]]:
    """The reports of a job in its folder, and process and host of each rank. Collective."""
    places = comm.allgather_object(f"process {os.getpid()} on {platform.node()}")
    reports = RankReports(out, comm.rank, job=comm.broadcast_object(f"{places[0]}, {time.time_ns()}"))
    if comm.rank == 0:
        reports.clear()  # what a job left that was killed while it stood still
    return reports, places


def standing_of(said: object) -> RankState:
    """What a rank has signed; ValueError for what none would sign."""
    if isinstance(said, dict):
        texts = {name: said.get(name) for name in ("doing", "waits", "last", "stacks")}
        seconds = said.get("seconds")
        if all(isinstance(text, str) for text in texts.values()) and isinstance(seconds, int | float):
            return RankState(**texts, seconds=min(max(float(seconds), 0.0), 1e9))  # type: ignore[arg-type]
    raise ValueError("nothing that a rank signs")


def verdict(found: Mapping[int, RankState], ranks: int) -> str:
    """Whom the others wait for, as far as it can be told, in a few words."""
    missing = [rank for rank in range(ranks) if rank not in found]
    if missing:
        return f"no sign of life from {named(missing)}"
    elsewhere = [rank for rank, standing in found.items() if not standing.waits]
    if elsewhere:
        first = found[min(elsewhere)]
        return f"{named(elsewhere)} in no collective ({first.doing}, for {first.seconds:.1f} s)"
    groups = grouped(found)
    if len(groups) > 1:
        rest = "; --check-collectives names the first that differ"
        return f"the ranks wait in {len(groups)} different collectives" + rest
    return f"all ranks wait in the same collective ({found[min(found)].place})"


def report(found: Mapping[int, RankState], places: Sequence[str]) -> list[str]:
    """Lines that say where each rank stands. `places`: process and host of all ranks, for people."""
    lines = [
        f"{placed([rank], places)}: no sign of life: stopped, ended, or cut off with its host"
        for rank in range(len(places))
        if rank not in found
    ]
    for group in grouped(found):
        ages = sorted(found[rank].seconds for rank in group)
        spread = f"{ages[0]:.1f}" + (f" to {ages[-1]:.1f}" if len(group) > 1 else "")
        lines.append(f"{placed(group, places)}: {found[group[0]].place}, for {spread} s")
    return lines


def shown_stacks(found: Mapping[int, RankState]) -> str:
    """The stacks of one rank of each place, but not of more than a few."""
    ranks = [group[0] for group in grouped(found)[:STACKS]]
    return "".join(f"stacks of {named([rank])}:\n{found[rank].stacks.rstrip()}\n" for rank in ranks)


def grouped(found: Mapping[int, RankState]) -> list[list[int]]:
    """The ranks that stand at the same place together; first those in no collective, then small groups."""
    groups = defaultdict[str, list[int]](list)
    for rank in sorted(found):
        groups[found[rank].place].append(rank)
    return sorted(groups.values(), key=lambda group: (bool(found[group[0]].waits), len(group)))


def placed(ranks: Sequence[int], places: Sequence[str]) -> str:
    """Ranks by their numbers; one alone with its process and host."""
    return named(ranks) + (f" ({places[ranks[0]]})" if len(ranks) == 1 else "")


def named(ranks: Iterable[int]) -> str:
    """ "rank 1" or "ranks 0, 2-5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(runs) > 1 or len(runs[0]) > 1 else ''} {text}"
