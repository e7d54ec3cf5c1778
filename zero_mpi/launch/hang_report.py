"""Ranks that stand still tell each other where, through small files in a folder that all of them see.

No message could do it: whoever should answer may be inside the MPI library, and nothing is to travel while a
job gets on. So a rank that has waited for a while makes a folder and signs there, others that find it sign
as well, and each looks at what the others have started. That stays so: if two ranks have started different
collectives under one number, or one has ended before a collective that another has started, then no patience
helps (`in_vain`). A rank that was stopped, or whose host is lost, has not signed: that is how it is known.
Ages are corrected by the file system's clock, since hosts differ in theirs. What an earlier job left is told
by its name and ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

from zero_mpi.cli.text import ranks as named
from zero_mpi.comm.agree import odd_one
from zero_mpi.comm.base import Comm
from zero_mpi.comm.guarded import Started
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import read_file
from zero_mpi.files.parse import parse_json
from zero_mpi.launch.ending import FAILED

FOLDER = ".ranks"
MOST = 1 << 22  # bytes of what a rank has signed
STACKS = 4  # ranks at most whose stacks are shown
ENDED = "-ended"  # how the name of a file ends whose rank will start nothing more


@dataclass(frozen=True)
class RankState:
    """Where a rank stands.

    doing     what its main thread is at, such as "step 3"
    waits     the collective that it waits in; empty: in none
    last      the last one that it has left
    seconds   since when nothing of this has changed
    stacks    of its threads
    started   the last collectives that it has started, by communicator
    ended     its exit status, if it will start nothing more
    """

    doing: str
    waits: str
    last: str
    seconds: float
    stacks: str = ""
    started: Sequence[Sequence[Started]] = ()
    ended: int | None = None

    def number(self, comm: int) -> int:
        """Return the number of the next collective that the rank would start on a communicator."""
        started = self.started[comm] if comm < len(self.started) else ()
        return started[-1].number + 1 if started else 0

    def at(self, comm: int, number: int) -> Started | None:
        """Return what it started under a number; None if it has not, or that was long ago."""
        started = self.started[comm] if comm < len(self.started) else ()
        place = number - (self.number(comm) - len(started))
        return started[place] if 0 <= place < len(started) else None

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
        self._out, self._signed = os.stat(out), self._file

    def is_on(self) -> bool:
        """Whether some rank has signed."""
        return self._folder.exists()

    def sign(self, standing: RankState) -> None:
        """Say where this rank stands now."""
        if not os.path.samestat(os.stat(self._folder.parent), self._out):
            raise FileNotFoundError(self._folder.parent)  # another folder has taken its place
        self._folder.mkdir(mode=0o700, exist_ok=True)
        partial = self._folder / f".{self._file.name}"
        partial.write_text(json.dumps(asdict(standing)))
        self._signed = self._file.with_name(f"{self._file.name}{ENDED * (standing.ended is not None)}")
        partial.replace(self._signed)

    def leave(self) -> None:
        """Take this rank's files back, for it gets on; the last one to leave removes the folder."""
        with contextlib.suppress(OSError):  # others are there
            self._signed.unlink(missing_ok=True)
            self._folder.rmdir()

    def claim(self) -> bool:
        """Whether this rank is the one to speak for all: the first that asks, after it has signed."""
        try:
            os.close(os.open(self._folder / f"{self._job}-speaker", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except (FileExistsError, FileNotFoundError):  # another one speaks; or has spoken, and all is cleared
            return False
        return True

    def read(self, *, few: bool = False) -> dict[int, RankState]:
        """Return rank -> where it stands, of those that have signed.

        few: of those that have ended, and of the first rank and the next below this one, to compare it with
        """
        paths = {int(path.name.split("-")[1]): path for path in self._folder.glob(f"{self._job}-[0-9]*")}
        if few:
            others = paths.keys() - {self._rank}
            waiting = sorted(rank for rank in others if not paths[rank].name.endswith(ENDED))
            kept = {*waiting[:1], *[rank for rank in waiting if rank < self._rank][-1:]}
            paths = {rank: paths[rank] for rank in others if rank in kept or rank not in waiting}
        found, now = dict[int, RankState](), 0.0
        for rank, path in sorted(paths.items()):
            with contextlib.suppress(OSError, ValueError):  # one that left just now
                now = now or self._signed.stat().st_mtime
                standing = standing_of(parse_json(read_file(path, MOST)))
                behind = max(0.0, now - path.stat().st_mtime)
                found[rank] = replace(standing, seconds=standing.seconds + behind)
        return found

    def clear(self) -> None:
        """Remove the folder, of whatever job: at once, so that nobody finds half of it."""
        aside = self._folder.with_name(f"{self._folder.name}-{self._job}")
        with contextlib.suppress(OSError):
            self._folder.rename(aside)
        for folder in self._folder.parent.glob(f"{self._folder.name}-{'[0-9a-f]' * 12}"):
            shutil.rmtree(folder, ignore_errors=True)


def reports_in(out: Path, comm: Comm, folder: str = FOLDER) -> tuple[RankReports, list[str]]:
    """The reports of a job in its folder, and process and host of each rank. Collective."""
    places = comm.allgather_object(f"process {os.getpid()} on {platform.node()}")
    reports = RankReports(out, comm.rank, comm.broadcast_object(f"{places[0]}, {time.time_ns()}"), folder)
    if comm.rank == 0:
        reports.clear()  # what a job left that was killed while it stood still
    return reports, places


def standing_of(said: object) -> RankState:
    """Return what a rank has signed; ValueError for what none would sign."""
    with contextlib.suppress(TypeError, KeyError, AttributeError):
        started = [[Started(*start) for start in of_comm] for of_comm in said["started"]]  # type: ignore[index]
        found = RankState(**said | {"started": started})  # type: ignore[operator]
        starts = [start for of_comm in started for start in of_comm]
        numbers = [found.ended or 0, *(start.number for start in starts)]
        texts = [found.doing, found.waits, found.last, found.stacks]
        texts += [text for start in starts for text in (start.kind, start.label)]
        if {*map(type, texts)} == {str} and {*map(type, numbers)} == {int}:
            return replace(found, seconds=min(max(float(found.seconds), 0.0), 1e9))
    raise ValueError("nothing that a rank signs")


# ------------------------------------------------------------------------------------- waits in vain


@dataclass(frozen=True)
class Vain:
    """Why no patience helps, and the status that the job is to have."""

    reason: str
    status: int = FAILED


def in_vain(found: Mapping[int, RankState]) -> Vain | None:
    """Return why ranks wait for what will never come, as far as these ranks show it; None if they do not."""
    return different(found) or left_waiting(found)


def different(found: Mapping[int, RankState]) -> Vain | None:
    """Find two ranks that have started different collectives under one number."""
    for comm in range(max((len(state.started) for state in found.values()), default=0)):
        having = [state for state in found.values() if comm < len(state.started)]
        first = min(state.number(comm) - len(state.started[comm]) for state in having)
        for number in range(first, max(state.number(comm) for state in having)):
            texts = {rank: start.text for rank, state in found.items() if (start := state.at(comm, number))}
            odd = odd_one(list(texts.values())) if texts else None
            if odd is not None:
                rank, usual = list(texts)[odd[0]], odd[1]
                alike = named([other for other in texts if texts[other] == usual])
                return Vain(
                    f"the ranks start different collectives: number {number} (from 0) is "
                    f"{shown(texts[rank])} on rank {rank} and {shown(usual)} on {alike}; all ranks must "
                    "start the same in the same order"
                )
    return None


def left_waiting(found: Mapping[int, RankState]) -> Vain | None:
    """Find a rank that has ended before a collective that others have started."""
    ended = [rank for rank, state in found.items() if state.ended is not None]
    for rank in sorted(ended, key=lambda rank: (not found[rank].ended, rank)):  # one that failed, if any
        for comm in range(max(len(state.started) for state in found.values())):
            number, status = found[rank].number(comm), found[rank].ended
            waiting = [r for r, each in found.items() if each.ended is None and each.number(comm) > number]
            if waiting:
                start = found[min(waiting)].at(comm, number)
                what = shown(start.text) if start else f"collective {number}"
                return Vain(
                    f"rank {rank} has ended with exit status {status}, while {named(waiting)} "
                    f"{'wait' if len(waiting) > 1 else 'waits'} for it in {what}",
                    status or FAILED,
                )
    return None


# -------------------------------------------------------------------------------------- what is said


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
