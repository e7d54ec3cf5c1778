"""`OUT/proof.jsonl`: the claims of a run, as a chain of lines that nobody can change unnoticed.

    {"step": 0, "run": {...}, "chain": HEX}      what the bits of the steps from here on depend on
    {"step": 1, "record": {...}, "chain": HEX}   the part of a record of metrics.jsonl that is bits, not time
    {"step": 1, "saved": {...}, "chain": HEX}    the id of a checkpoint, which stands for its full content

HEX is the sha256 over the head of the chain and the line without HEX. The HEX of a run or a record is the
next head, so the last head stands for all that was computed. The line of a checkpoint is bound to its
place and leaves the head as it is. Runs of the same bits have the same head: it depends on no rank,
strategy, transport, folder, time or checkpoint. In chains of 0.1.0 a checkpoint ("checkpoint", not
"saved") made a new head. A resume drops the lines after its checkpoint, as it does in metrics.jsonl.
"""

import hashlib
import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from zero_mpi.errors import FileError, naming
from zero_mpi.files.atomic import append_whole
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import MOST_LINE, exists, open_file, open_in_place, reason
from zero_mpi.files.parse import parse_json

PROOF = "proof.jsonl"
RUN, RECORD, CHECKPOINT, SAVED = "run", "record", "checkpoint", "saved"
KINDS = (RUN, RECORD, CHECKPOINT, SAVED)
CHAIN = "chain"  # origin of a job that resumes, with other settings, from the state that the chain leads to
FIRST = "0" * 64  # head before the first line
ID, ORIGIN = "id", "from"  # id of a checkpoint; id of the one that a run resumes from
MOST_STEPS = 1 << 52  # upper bound of a step
# Fields of a record that are equal in all jobs of the same run; others depend on machines, ranks and time.
BITS = (
    *("loss", "grad_norm", "lr", "tokens", "skipped", "val_loss", "val_losses", "val_loss_before"),
    *("balance_loss", "z_loss", "load_least", "load_most"),
)


class Broken(ValueError):
    """Line that is not the next one of a chain: its number, and why."""

    def __init__(self, number: int, why: str, *, torn: bool = False) -> None:
        super().__init__(f"line {number}: {why}")
        self.torn = torn


class Line(NamedTuple):
    """Line of a chain, SAVED read as CHECKPOINT. head: of the chain after the line; end: its end in bytes."""

    number: int
    step: int
    kind: str
    value: dict[str, Any]
    head: str
    end: int


class JobStart(NamedTuple):
    """Start of a job: the step, what its bits depend on, and the id of the checkpoint, if from one."""

    step: int
    run: Mapping[str, Any]
    origin: str | None = None
    state: str | None = None
    own: bool = False  # whether that checkpoint is in this run folder


def bits_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a record that is bits."""
    return {name: record[name] for name in BITS if name in record}


# ----------------------------------------------------------------------------------------------- reading


def read_proof(path: Path) -> Generator[Line, None, None]:
    """Yield the lines of a chain, one held at a time; raise Broken at the first that is not the next.

    Raises FileError if the file cannot be read.
    """
    head, end, number = FIRST, 0, 0
    try:
        with BufferedReader(open_file(path, "a file of lines")) as file:
            while raw := file.readline(MOST_LINE):  # a longer line comes without its end
                number += 1
                line = opened(number, raw, head, end)
                head, end = line.head, line.end
                yield line
    except OSError as error:
        raise FileError(f"{shown(path)}: cannot be read: {reason(error)}") from None


def opened(number: int, raw: bytes, before: str, start: int) -> Line:
    """Return the line that comes after the head `before`; raises Broken for anything else."""
    if not raw.endswith(b"\n"):
        raise Broken(number, "it has no line end", torn=True)
    body, mark, tail = raw.rpartition(b', "chain": "')
    body += b"}"
    if not mark or tail != f'{digest_after(before, body)}"}}\n'.encode():
        raise Broken(number, "it does not follow the line before: a line was changed, added or removed")
    try:
        entry = parse_json(body, unique=True)
    except ValueError as error:
        raise Broken(number, str(error)) from None
    kind = next((kind for kind in KINDS if isinstance(entry, dict) and kind in entry), None)
    step = entry.get("step") if kind else None
    if kind is None or type(step) is not int or not 0 <= step <= MOST_STEPS or type(entry[kind]) is not dict:
        raise Broken(number, "expected a step and a run, record or save entry")
    head = before if kind == SAVED else digest_after(before, body)
    return Line(number, step, CHECKPOINT if kind == SAVED else kind, entry[kind], head, start + len(raw))


def digest_after(before: str, body: bytes) -> str:
    """Return the digest of a line that follows one with the digest `before`."""
    return hashlib.sha256(before.encode() + b"\n" + body).hexdigest()


# ----------------------------------------------------------------------------------------------- writing


@dataclass
class ProofPrefix:
    """Part of a chain that stays at a resume."""

    head: str = FIRST
    end: int = 0
    at: int = -1  # the last step
    tip: tuple[int, Any] = (-1, None)  # step and id of the last checkpoint
    run: Mapping[str, Any] | None = None
    late: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)  # saved, after a dropped line


def kept_up_to(path: Path, step: int) -> ProofPrefix:
    """Return the sound lines of a file up to a step; none if the run begins at its first step. FileError."""
    kept, over = ProofPrefix(), False
    if step == 0 or not exists(path):
        return kept
    try:
        for line in read_proof(path):
            if line.kind == CHECKPOINT and line.step <= step:
                kept.tip = line.step, line.value.get(ID)
                if over:
                    kept.late.append((line.step, line.value))
            over |= line.step > step - (line.kind == RUN)  # a job that began at this step made no step
            if not over:
                kept.head, kept.end, kept.at = line.head, line.end, max(kept.at, line.step)
                if line.kind == RUN:
                    kept.run = {key: value for key, value in line.value.items() if key != ORIGIN}
    except Broken:
        pass  # cut off by a kill, or changed by somebody: the chain is valid up to here
    return kept


class Proof:
    """Writer of the file, on rank 0. Raises OSError. head: the digest of everything computed so far."""

    def __init__(self, path: Path, beginning: JobStart) -> None:
        kept = kept_up_to(path, beginning.step)
        self.head = kept.head
        self._file = open(path, "ab", buffering=0, opener=open_in_place)  # noqa: SIM115 (closed by close)
        self._file.truncate(kept.end)
        for step, value in kept.late:
            self._append(step, SAVED, value)
        self._begin(kept, beginning)

    def _begin(self, kept: ProofPrefix, now: JobStart) -> None:
        """Continue after the kept lines; add a RUN line unless the run simply resumes from its checkpoint."""
        run = json.loads(json.dumps(now.run))
        goes_on = kept.tip == (now.step, now.origin)
        if kept.at == now.step and now.own and kept.tip[0] < now.step:  # killed before it wrote this line
            self._append(now.step, SAVED, {ID: now.origin, "state": now.state})
            goes_on = True
        if kept.at != now.step or not goes_on:
            self._append(now.step, RUN, {ORIGIN: now.origin, **run})
        elif kept.run != run:
            self._append(now.step, RUN, {ORIGIN: CHAIN, **run})

    def record(self, step: int, record: Mapping[str, Any]) -> None:
        self._append(step, RECORD, bits_of(record))

    def saved(self, step: int, name: str, state: str) -> None:
        self._append(step, SAVED, {ID: name, "state": state})

    def _append(self, step: int, kind: str, value: Mapping[str, Any]) -> None:
        body = json.dumps({"step": step, kind: value})
        digest = digest_after(self.head, body.encode())
        append_whole(self._file, f'{body[:-1]}, "chain": "{digest}"}}\n'.encode())
        self.head = self.head if kind == SAVED else digest

    def close(self) -> None:
        with naming(self._file.name):
            self._file.close()
