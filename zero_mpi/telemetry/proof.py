"""`OUT/proof.jsonl`: what a run claims, as a chain of lines that nobody changes unseen.

    {"step": 0, "run": {...}, "chain": HEX}         what the bits of the steps from here on depend on
    {"step": 1, "record": {...}, "chain": HEX}      of a record of metrics.jsonl what is bits, not time
    {"step": 1, "checkpoint": {...}, "chain": HEX}  the id of a checkpoint, which stands for all that is in it

HEX is the sha256 over the HEX of the line before and the line without it, so the last one stands for all: the
head. Nothing in it depends on ranks, strategy, transport, folder or time, so runs of the same bits have the
same file. At a resume what comes after the checkpoint goes, as it goes from metrics.jsonl.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from zero_mpi.errors import FileError
from zero_mpi.files.atomic import append_whole
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import MOST_LINE, exists, open_file, open_in_place, reason
from zero_mpi.files.parse import parse_json

PROOF = "proof.jsonl"
RUN, RECORD, CHECKPOINT = "run", "record", "checkpoint"
KINDS = (RUN, RECORD, CHECKPOINT)
COPIES = "copies in memory"  # the origin of a job that goes on from these (`--peer-checkpoint`)
FIRST = "0" * 64  # what stands before the first line
ID, ORIGIN = "id", "from"  # of a checkpoint; of the one that a run goes on from
MOST_STEPS = 1 << 52  # a larger number is no step
# What of a record any job of the same run has to get; all else is of machines, ranks and time.
BITS = ("loss", "grad_norm", "lr", "tokens", "skipped", "val_loss", "val_losses", "val_loss_before")


class Broken(ValueError):
    """A line is not the next one of a chain: its number, and why."""

    def __init__(self, number: int, why: str, *, torn: bool = False) -> None:
        super().__init__(f"line {number}: {why}")
        self.torn = torn


class Line(NamedTuple):
    """A line of a chain. head: its digest; end: where it ends in the file, in bytes."""

    number: int
    step: int
    kind: str
    value: dict[str, Any]
    head: str
    end: int


class JobStart(NamedTuple):
    """What a job starts from: the step, what its bits depend on, and the id of the checkpoint, if from one.

    own: whether that is a checkpoint of this run folder.
    """

    step: int
    run: Mapping[str, Any]
    origin: str | None = None
    state: str | None = None
    own: bool = False


def bits_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """What of a record is bits."""
    return {name: record[name] for name in BITS if name in record}


# ----------------------------------------------------------------------------------------------- reading


def read_proof(path: Path) -> Generator[Line, None, None]:
    """The lines of a chain, one held at a time; raises Broken at the first that is not the next one."""
    head, end = FIRST, 0
    for number, raw in enumerate(raw_lines(path), 1):
        line = opened(number, raw, head, end)
        head, end = line.head, line.end
        yield line


def raw_lines(path: Path) -> Iterator[bytes]:
    """The lines of a regular file with their ends; of one that is too long come pieces. FileError."""
    try:
        with BufferedReader(open_file(path, "a file of lines")) as file:
            while raw := file.readline(MOST_LINE):
                yield raw
    except OSError as error:
        raise FileError(f"{shown(path)}: cannot be read: {reason(error)}") from None


def opened(number: int, raw: bytes, before: str, start: int) -> Line:
    """The line that comes after one with the digest `before`; raises Broken for anything else."""
    if not raw.endswith(b"\n"):
        raise Broken(number, "it has no end", torn=True)
    body, mark, tail = raw.rpartition(b', "chain": "')
    body += b"}"
    if not mark or tail != f'{digest_after(before, body)}"}}\n'.encode():
        raise Broken(number, "it is not the one that followed: a line was changed, added, moved or removed")
    try:
        entry = parse_json(body, unique=True)
    except ValueError as error:
        raise Broken(number, str(error)) from None
    kind = next((kind for kind in KINDS if isinstance(entry, dict) and kind in entry), None)
    step = entry.get("step") if kind else None
    if kind is None or type(step) is not int or not 0 <= step <= MOST_STEPS or type(entry[kind]) is not dict:
        raise Broken(number, "expected a step, and what was run, recorded or saved then")
    return Line(number, step, kind, entry[kind], digest_after(before, body), start + len(raw))


def digest_after(before: str, body: bytes) -> str:
    """The digest of a line that follows one of the digest `before`."""
    return hashlib.sha256(before.encode() + b"\n" + body).hexdigest()


# ----------------------------------------------------------------------------------------------- writing


@dataclass
class Kept:
    """What stays of a chain at a resume. at: the last step that it knows of; tip: the state of a checkpoint
    that it knows last, and its step.
    """

    head: str = FIRST
    end: int = 0
    at: int = -1
    tip: tuple[int, Any] = (-1, None)
    run: Mapping[str, Any] | None = None


def kept_until(path: Path, step: int) -> Kept:
    """The sound lines of a file up to a step; none where the run begins at its first one. FileError."""
    kept = Kept()
    if step == 0 or not exists(path):
        return kept
    try:
        for line in read_proof(path):
            if line.step > step:
                break
            kept.head, kept.end, kept.at = line.head, line.end, line.step
            if line.kind == RUN:
                kept.run = {key: value for key, value in line.value.items() if key != ORIGIN}
                kept.tip = line.step, line.value.get(ORIGIN)
            elif line.kind == CHECKPOINT:
                kept.tip = line.step, line.value.get(ID)
    except Broken:
        pass  # what a kill cut off, or what somebody has changed: from here on nothing is held by it
    return kept


def knows(path: Path, head: str, step: int) -> bool:
    """Whether a sound line up to a step has this digest. FileError where the file cannot be read."""
    try:
        return exists(path) and any(line.head == head for line in read_proof(path) if line.step <= step)
    except Broken:
        return False


class Proof:
    """Writes the file, for rank 0; OSError where it cannot. head: the digest of the last line."""

    def __init__(self, path: Path, beginning: JobStart) -> None:
        kept = kept_until(path, beginning.step)
        self.head = kept.head
        self._file = open(path, "ab", buffering=0, opener=open_in_place)  # noqa: SIM115 (closed by close)
        self._file.truncate(kept.end)
        self._waiting = deque[list[Any]]()  # lines [step, kind, value] whose turn has not come
        self._begin(kept, beginning)

    def _begin(self, kept: Kept, now: JobStart) -> None:
        """Go on where the lines that stay end; say so, unless the run simply goes on from its checkpoint."""
        run = json.loads(json.dumps(now.run))
        reached = kept.at == now.step
        goes_on = kept.tip == (now.step, now.origin) or now.origin == COPIES
        if reached and now.own and kept.tip[0] < now.step:  # a kill came between the checkpoint and its line
            self._append(now.step, CHECKPOINT, {ID: now.origin, "state": now.state})
        elif not reached or not goes_on:
            run = {ORIGIN: now.origin, **run}
            self._append(now.step, RUN, run)
            return
        if kept.run != run:
            self._append(now.step, RUN, {ORIGIN: now.origin, **run})

    def record(self, step: int, record: Mapping[str, Any]) -> None:
        """Add what of a step's record is bits."""
        self._add([step, RECORD, bits_of(record)])

    def saving(self, step: int) -> None:
        """A checkpoint is being written: its line comes here, whatever is recorded until it is complete."""
        self._add([step, CHECKPOINT, None])

    def saved(self, step: int, name: str, state: str) -> None:
        """The checkpoint of a step is complete, with this id and digest of its tensors."""
        for entry in self._waiting:
            if entry[:2] == [step, CHECKPOINT]:
                entry[2] = {ID: name, "state": state}
        self._write()

    def _add(self, entry: list[Any]) -> None:
        self._waiting.append(entry)
        self._write()

    def _write(self) -> None:
        while self._waiting and self._waiting[0][2] is not None:
            self._append(*self._waiting[0])
            self._waiting.popleft()

    def _append(self, step: int, kind: str, value: Mapping[str, Any]) -> None:
        body = json.dumps({"step": step, kind: value})
        head = digest_after(self.head, body.encode())
        append_whole(self._file, f'{body[:-1]}, "chain": "{head}"}}\n'.encode())
        self.head = head

    def sync(self) -> None:
        """Bring it to disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Add no more lines."""
        self._file.close()
