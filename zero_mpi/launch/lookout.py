"""Ranks of a script that wait for what will never come, found within seconds.

No collective knows that the others will never start it. But a rank that has waited for a while, or has ended,
leaves a note of the collectives that it has started in a folder that all ranks see, and reads those of the
others. What was started stays so: if two ranks have started different collectives under one number, or one
has ended before a collective that another has started, then no patience helps, and the first who sees it says
so in one line and ends the job. While ranks get on no file is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_mpi.comm.agree import odd_one
from zero_mpi.comm.guarded import CollectiveRecords, Started
from zero_mpi.comm.meter import meters
from zero_mpi.files.foreign import shown
from zero_mpi.launch.ending import DRAIN, FAILED, end_surely, say
from zero_mpi.launch.hang_report import named

LOOK = 0.25  # seconds between looks
LOOKS, NOTES = 0.5, 2.0  # seconds of one wait after which a rank looks for notes, and leaves its own
ENDED = "-ended"  # how the name of a note ends whose rank will start nothing more


@dataclass(frozen=True)
class Note:
    """What a rank has started on each communicator, its last collectives; `ended`: its status, if it has."""

    started: Sequence[Sequence[Started]]
    ended: int | None = None

    def number(self, comm: int) -> int:
        """The number of the next collective that the rank would start on a communicator."""
        started = self.started[comm] if comm < len(self.started) else ()
        return started[-1].number + 1 if started else 0

    def at(self, comm: int, number: int) -> Started | None:
        """What it started under a number; None if it has not, or that was long ago."""
        started = self.started[comm] if comm < len(self.started) else ()
        place = number - (self.number(comm) - len(started))
        return started[place] if 0 <= place < len(started) else None


@dataclass(frozen=True)
class Verdict:
    """Why no patience helps, and the status that the job is to have."""

    reason: str
    status: int = FAILED


def verdict(notes: Mapping[int, Note]) -> Verdict | None:
    """What the notes of some ranks, by their numbers, say about all; None as long as nothing is wrong."""
    return different(notes) or left_waiting(notes)


def different(notes: Mapping[int, Note]) -> Verdict | None:
    """Two ranks have started different collectives under one number."""
    for comm in range(max((len(note.started) for note in notes.values()), default=0)):
        having = [note for note in notes.values() if comm < len(note.started)]
        first = min(note.number(comm) - len(note.started[comm]) for note in having)
        for number in range(first, max(note.number(comm) for note in having)):
            texts = {rank: start.text for rank, note in notes.items() if (start := note.at(comm, number))}
            odd = odd_one(list(texts.values())) if texts else None
            if odd is not None:
                rank, usual = list(texts)[odd[0]], odd[1]
                alike = named(other for other in texts if texts[other] == usual)
                return Verdict(
                    f"the ranks start different collectives: number {number} (from 0) is "
                    f"{shown(texts[rank])} on rank {rank} and {shown(usual)} on {alike}; all ranks must "
                    "start the same in the same order"
                )
    return None


def left_waiting(notes: Mapping[int, Note]) -> Verdict | None:
    """A rank has ended before a collective that others have started."""
    ended = [rank for rank, note in notes.items() if note.ended is not None]
    for rank in sorted(ended, key=lambda rank: (not notes[rank].ended, rank)):  # one that failed, if any
        for comm in range(max(len(note.started) for note in notes.values())):
            number, status = notes[rank].number(comm), notes[rank].ended
            waiting = [r for r, note in notes.items() if note.ended is None and note.number(comm) > number]
            if waiting:
                start = notes[min(waiting)].at(comm, number)
                what = shown(start.text) if start else f"collective {number}"
                return Verdict(
                    f"rank {rank} has ended with exit status {status}, while {named(waiting)} "
                    f"{'wait' if len(waiting) > 1 else 'waits'} for it in {what}",
                    status or FAILED,
                )
    return None


class Notes:
    """The folder for the notes of one job. Raises OSError."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._mine = folder / f"{rank:06d}"

    def leave(self, note: Note) -> None:
        """Put down this rank's, in place of an older one."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        partial = self.folder / f".{self._mine.name}"
        partial.write_text(json.dumps([note.started, note.ended]))
        partial.replace(self._ended if note.ended is not None else self._mine)

    @property
    def _ended(self) -> Path:
        return self._mine.with_name(f"{self._mine.name}{ENDED}")

    def take_back(self) -> None:
        """This rank gets on, or all have come to their ends; the last one to go removes the folder."""
        with contextlib.suppress(OSError):
            self._mine.unlink(missing_ok=True)
            self._ended.unlink(missing_ok=True)
            self.folder.rmdir()  # fails while others are there

    def read(self, *, all_ranks: bool) -> dict[int, Note]:
        """Notes of those who have ended, and of the first other one who waits; or of all."""
        try:
            names = sorted(set(os.listdir(self.folder)) - {self._mine.name})
        except OSError:
            return {}
        waiting = [name for name in names if name.isdigit()]
        chosen = [name for name in names if name.endswith(ENDED)] + (waiting if all_ranks else waiting[:1])
        notes: dict[int, Note] = {}
        for name in chosen:
            with contextlib.suppress(OSError, ValueError):  # one that was taken back just now
                notes[int(name.removesuffix(ENDED))] = parsed((self.folder / name).read_text())
        return dict(sorted(notes.items()))

    def claim(self) -> bool:
        """Whether this rank is the one to speak: the first that asks."""
        with contextlib.suppress(OSError):  # it has asked; or has spoken, and all is cleared
            os.close(os.open(self.folder / "speaker", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        return False

    def clear(self) -> None:
        """Remove all of it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def parsed(text: str) -> Note:
    """A note from its file."""
    started, ended = json.loads(text)
    return Note([[Started(*start) for start in of_comm] for of_comm in started], ended)


class Lookout:
    """A thread that looks for notes while this rank waits and leaves one; `kill` ends all and clears them."""

    def __init__(self, notes: Notes, records: CollectiveRecords, kill: Callable[[int], object]) -> None:
        self._notes, self._records, self._kill = notes, records, kill
        self._over = threading.Event()
        self._left_at: float | None = None  # since when this rank waited as it left its note
        threading.Thread(target=self._watch, name="zero_mpi lookout", daemon=True).start()

    def note(self, ended: int | None = None) -> Note:
        """What this rank has started so far."""
        return Note([list(record) for record in list(self._records.records)], ended)

    def stop(self) -> None:
        """Stop looking for waits in vain."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(LOOK):
            since = max((meter.changed for meter in meters() if meter.waits), default=None)
            if self._left_at not in (None, since):
                self._left_at = None
                self._notes.take_back()
            if since is not None and time.perf_counter() - since > LOOKS:
                with contextlib.suppress(OSError):  # no files: the watchdog is left
                    self._look(since)

    def _look(self, since: float) -> None:
        mine, others = self.note(), self._notes.read(all_ranks=False)
        has_ended = any(note.ended is not None for note in others.values())
        if self._left_at is None and (has_ended or time.perf_counter() - since > NOTES):
            self._notes.leave(mine)
            self._left_at = since
        outcome = verdict({self._notes.rank: mine, **others})
        if outcome is not None:
            self._speak(outcome, mine)

    def _speak(self, outcome: Verdict, mine: Note) -> None:
        """One line, and the end of the job, unless another rank is at it."""
        if not self._notes.claim():
            self._over.set()
            return
        time.sleep(LOOK)  # so that who has come to the same point may be named too
        outcome = verdict({**self._notes.read(all_ranks=True), self._notes.rank: mine}) or outcome
        say(f"zero_mpi: {outcome.reason}; ending the job")
        time.sleep(DRAIN)
        end_surely(self._kill, outcome.status)
