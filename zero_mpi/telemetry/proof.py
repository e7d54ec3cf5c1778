"""`OUT/proof.jsonl`: hash chain over the results of a run; a changed line is detected.

    {"step": 0, "run": {...}, "chain": HEX}      all facts that the bits of the following steps depend on
    {"step": 1, "record": {...}, "chain": HEX}   the reproducible fields of a record of metrics.jsonl
    {"step": 1, "saved": {...}, "chain": HEX}    the id of a checkpoint, which is a digest of its content

HEX is the sha256 of the chain's head and the line without its HEX. The HEX of a run or record line is the
next head of the chain, so the last head is a digest of all results. A checkpoint's line depends on the head
before it and does not change the head. Bit-identical runs have the same head, which does not depend on ranks,
strategy, transport, folder, time or checkpoints. In version 0.1.0, a checkpoint's line (key "checkpoint", not
"saved") also made a new head. A resume drops the lines after its checkpoint, as it does in metrics.jsonl.
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
CHAIN = "chain"  # origin of a job that continues at the end of the chain with changed settings
FIRST = "0" * 64  # head before the first line
ID, ORIGIN = "id", "from"  # keys: id of a checkpoint; id of the checkpoint from which a run resumes
MOST_STEPS = 1 << 52  # upper bound of a step
# Fields of a record that are reproducible; all other fields depend on machines, ranks or time.
BITS = (
    *("loss", "grad_norm", "lr", "tokens", "skipped", "val_loss", "val_losses", "val_loss_before"),
    *("balance_loss", "z_loss", "load_least", "load_most"),
)


class Broken(ValueError):
    """Error: a line does not continue the chain. The text has the line's number and the reason."""

    def __init__(self, number: int, cause: str, *, torn: bool = False) -> None:
        super().__init__(f"line {number}: {cause}")
        self.torn = torn


class Line(NamedTuple):
    """Line of a chain; SAVED lines have kind CHECKPOINT. head: head after the line; end: its end offset."""

    number: int
    step: int
    kind: str
    value: dict[str, Any]
    head: str
    end: int


class JobStart(NamedTuple):
    """Start of a job: step, facts that determine its bits, and id of the checkpoint from which it resumes."""

    step: int
    run: Mapping[str, Any]
    origin: str | None = None
    state: str | None = None
    own: bool = False  # True if that checkpoint is in this run folder


def bits_of(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in BITS if name in record}


# ----------------------------------------------------------------------------------------------- reading


def read_proof(path: Path) -> Generator[Line, None, None]:
    """Yield the lines of a chain, reading one at a time; raise Broken for a line that does not continue it.

    Raises FileError if the file cannot be read.
    """
    head, end, number = FIRST, 0, 0
    try:
        with BufferedReader(open_file(path, "a file of lines")) as file:
            while raw := file.readline(MOST_LINE):  # a longer line is read without its line end
                number += 1
                line = parse_line(number, raw, head, end)
                head, end = line.head, line.end
                yield line
    except OSError as error:
        raise FileError(f"{shown(path)}: cannot be read: {reason(error)}") from None


def parse_line(number: int, raw: bytes, previous: str, start: int) -> Line:
    """Parse and return a line; raise Broken unless it continues the chain from the head `previous`."""
    if not raw.endswith(b"\n"):
        raise Broken(number, "it has no line end", torn=True)
    body, mark, tail = raw.rpartition(b', "chain": "')
    body += b"}"
    if not mark or tail != f'{digest_after(previous, body)}"}}\n'.encode():
        raise Broken(number, "it does not follow the line before: a line was changed, added or removed")
    try:
        entry = parse_json(body, unique=True)
    except ValueError as error:
        raise Broken(number, str(error)) from None
    kind = next((kind for kind in KINDS if isinstance(entry, dict) and kind in entry), None)
    step = entry.get("step") if kind else None
    if kind is None or type(step) is not int or not 0 <= step <= MOST_STEPS or type(entry[kind]) is not dict:
        raise Broken(number, "expected a step and a run, record or save entry")
    head = previous if kind == SAVED else digest_after(previous, body)
    return Line(number, step, CHECKPOINT if kind == SAVED else kind, entry[kind], head, start + len(raw))


def digest_after(head: str, body: bytes) -> str:
    return hashlib.sha256(head.encode() + b"\n" + body).hexdigest()


# ----------------------------------------------------------------------------------------------- writing


@dataclass
class ProofPrefix:
    """Part of a chain that a resumed run keeps."""

    head: str = FIRST
    end: int = 0
    step: int = -1  # the last step
    tip: tuple[int, Any] = (-1, None)  # step and id of the last checkpoint
    run: Mapping[str, Any] | None = None
    late_saves: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)  # saves after dropped lines


def valid_prefix(path: Path, step: int) -> ProofPrefix:
    """Return the valid chain up to a step; empty for step 0. Raise FileError if the file cannot be read."""
    prefix, is_past = ProofPrefix(), False
    if step == 0 or not exists(path):
        return prefix
    try:
        for line in read_proof(path):
            if line.kind == CHECKPOINT and line.step <= step:
                prefix.tip = line.step, line.value.get(ID)
                if is_past:
                    prefix.late_saves.append((line.step, line.value))
            is_past |= line.step > step - (line.kind == RUN)  # drops a job that began at this step
            if not is_past:
                prefix.head, prefix.end, prefix.step = line.head, line.end, max(prefix.step, line.step)
                if line.kind == RUN:
                    prefix.run = {key: value for key, value in line.value.items() if key != ORIGIN}
    except Broken:
        pass  # a kill cut off a line, or a line was changed: the chain is valid up to here
    return prefix


class Proof:
    """Writer of the file, on rank 0. Raises OSError if a write fails. head: digest of all results so far."""

    def __init__(self, path: Path, beginning: JobStart) -> None:
        prefix = valid_prefix(path, beginning.step)
        self.head = prefix.head
        self._file = open(path, "ab", buffering=0, opener=open_in_place)  # noqa: SIM115 (closed by close)
        self._file.truncate(prefix.end)
        for step, value in prefix.late_saves:
            self._append(step, SAVED, value)
        self._begin(prefix, beginning)

    def _begin(self, prefix: ProofPrefix, start: JobStart) -> None:
        """Continue after the kept lines; add a RUN line unless the run simply resumes from its checkpoint."""
        run = json.loads(json.dumps(start.run))
        goes_on = prefix.tip == (start.step, start.origin)
        if prefix.step == start.step and start.own and prefix.tip[0] < start.step:  # a kill lost this line
            self._append(start.step, SAVED, {ID: start.origin, "state": start.state})
            goes_on = True
        if prefix.step != start.step or not goes_on:
            self._append(start.step, RUN, {ORIGIN: start.origin, **run})
        elif prefix.run != run:
            self._append(start.step, RUN, {ORIGIN: CHAIN, **run})

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
