"""History of a run: compares its files with each other and finds the segments that can be recomputed.

Rank 0 reads the chain and metrics.jsonl line by line, the checkpoints and `latest`. All ranks check
the tensors of checkpoints. A segment begins at an existing checkpoint or at the initial weights. It ends at
the next checkpoint that exists, so it may include steps whose checkpoints `--keep` has removed. It may
also end at the last record of a job.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.sound import ID, check_digests, open_checkpoint
from zero_mpi.checkpoint.weights import keys_of
from zero_mpi.comm.agree import Differs
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import quoted, shown
from zero_mpi.files.open import exists, read_lines
from zero_mpi.launch.world import World
from zero_mpi.telemetry import proof, status
from zero_mpi.telemetry.metrics import MARK, METRICS, record_of
from zero_mpi.telemetry.proof import ID as NAME
from zero_mpi.train.description import FACTS, MACHINE, SETTINGS

MOST_JOBS = 1 << 14  # maximum number of jobs of a run; the settings of all jobs are kept in memory
Record = Mapping[str, Any]
Steps = tuple[int, int]  # start, last step


@contextmanager
def differing() -> Iterator[None]:
    """Convert a UsageError for an invalid file, raised in the `with` block, to Differs."""
    try:
        yield
    except UsageError as error:
        raise Differs(str(error)) from error


@dataclass(frozen=True)
class Segment:
    """Consecutive steps that can be recomputed."""

    start: int  # the segment begins with the checkpoint of this step; 0: the initial weights
    last: int
    ends: bool  # whether there is a checkpoint of the last step
    run: int  # index in `History.runs` of the job that computed the steps

    @property
    def text(self) -> str:
        return f"steps {self.start + 1} to {self.last}"


@dataclass
class History:
    """Events of a run, in order, and the segments that follow from them."""

    folders: Mapping[int, Path]  # existing checkpoints, by step
    runs: list[Record] = field(default_factory=list)  # for each job, what its line of the chain records
    segments: list[Segment] = field(default_factory=list)  # segments that can be recomputed
    saved: list[int] = field(default_factory=list)  # steps of checkpoints, as saves and resumes recorded them
    last: int = -1  # the last step
    head: str = ""  # head of the chain after its last line; "" without a chain
    notes: list[str] = field(default_factory=list)  # notes for the user
    _start: int = 0
    _start_exists: bool = False
    _tip: tuple[int, Any] = (-1, None)

    @property
    def kept(self) -> list[int]:
        return [step for step in self.saved if step in self.folders]

    def id_of(self, step: int) -> str | None:
        """Return the id of a step's checkpoint, or None if there is none. Raise Differs if it is damaged."""
        if step not in self.folders:
            return None
        with differing():
            return keys_of(open_checkpoint(self.folders[step]).state).text(ID)

    def begin(self, step: int, run: Mapping[str, Any]) -> None:
        """Record that a job starts at a step. Raise Differs if no job can start there."""
        origin = run.get(proof.ORIGIN)
        continues = origin == proof.CHAIN and step == self.last
        if continues and step == self._tip[0]:
            origin = self._tip[1]
        goes_on = continues or (step, origin) == self._tip
        if step < self.last or (step == 0) != (origin is None):
            raise Differs(f"no job can begin at step {step} from {quoted(origin)} after step {self.last}")
        if len(self.runs) == MOST_JOBS:
            raise Differs(f"expected at most {MOST_JOBS} jobs of a run")
        begins_here = self._start_exists and self._start == step
        if not goes_on or not (begins_here or run.get(SETTINGS) == self.runs[-1].get(SETTINGS)):
            self.close(self.last, ends=False)
            self._start = step
            self._start_exists = origin is None or self.id_of(step) == origin
            if origin is not None and self._start_exists and step not in self.saved:
                self.saved.append(step)
        self.last, self._tip = step, (step, origin)
        self.runs.append(run)

    def record(self, step: int) -> None:
        """Add a step. Raise Differs if it does not follow the last step."""
        if not self.runs or step != self.last + 1:
            raise Differs(f"step {step} follows step {self.last}")
        self.last = step

    def save(self, step: int, name: object) -> None:
        """Add the checkpoint of a step, maybe an earlier step. Raise Differs if its step or id is wrong."""
        in_order = (self.saved or [-1])[-1] < step and self._start <= step <= self.last
        if not self.runs or not in_order:
            raise Differs(f"a checkpoint of step {step} follows step {self.last}")
        saved_id = self.id_of(step)
        if saved_id is not None and saved_id != name:
            raise Differs(
                f"the checkpoint of step {step} has the id {quoted(saved_id)}, expected {quoted(name)}"
            )
        self.saved.append(step)
        self._tip = step, name
        if saved_id is not None:
            self.close(step, ends=True)
            self._start, self._start_exists = step, True

    def close(self, step: int, *, ends: bool) -> None:
        if self._start_exists and step > self._start:
            self.segments.append(Segment(self._start, step, ends, len(self.runs) - 1))


def gaps(segments: Sequence[Segment], first: int, last: int) -> list[Steps]:
    """Return (start, last) of each sequence of steps between `first` and `last` that is in no segment."""
    ranges, reached = [], first
    for segment in [*segments, Segment(last, last, False, 0)]:
        if segment.start > reached:
            ranges.append((reached, segment.start))
        reached = segment.last
    return ranges


def steps_of(segments: Sequence[Segment]) -> list[Steps]:
    """Return (start, last) of each segment, in order. Adjacent segments are merged."""
    ranges: list[Steps] = []
    for segment in segments:
        start = ranges.pop()[0] if ranges and ranges[-1][1] == segment.start else segment.start
        ranges.append((start, segment.last))
    return ranges


class Records:
    """Reader of a run's records, one by one. `next_record` is {} after the last record."""

    def __init__(self, run: Path) -> None:
        self._rest = records_of(run)
        self.next_record: Record = next(self._rest, {})

    @property
    def step(self) -> int:
        return int(self.next_record.get("step", 0))

    def take(self) -> Record:
        """Return the next record, and read the record after it into `next_record`."""
        record, self.next_record = self.next_record, next(self._rest, {})
        return record


def records_of(run: Path) -> Iterator[Record]:
    """Yield the records of a run folder, in the order of the file. Yield none if the file does not exist."""
    if exists(run / METRICS):
        yield from filter(None, map(record_of, read_lines(run / METRICS, MARK, "a file of records")))


def read_history(run: Path, expect: str | None) -> History:
    """Return a run's history. Raise Differs if files contradict each other, UsageError without a chain."""
    records, history = Records(run), History(dict(folders.steps(run)))
    ended = status.read_status(run / status.NAME).get("state") in (status.DONE, status.STOPPED)
    if not exists(run / proof.PROOF):
        raise UsageError(f"{shown(run)}: nothing to verify: expected the run's {proof.PROOF}")
    follow(run, records, history, ended)
    if expect is not None and history.head != expect:
        raise Differs(f"{proof.PROOF} ends in {history.head}, expected {shown(expect)}")
    history.close(history.last, ends=False)
    name = folders.link_target(run, folders.LATEST)
    latest = folders.STEP_FOLDER.fullmatch(name)
    if latest and int(latest[1]) not in history.saved and (ended or int(latest[1]) > history.last):
        raise Differs(f"{folders.LATEST} names {shown(name)}, which is not in the records")
    if strays := [path.name for step, path in history.folders.items() if step not in history.saved]:
        suffix = " and more" * (len(strays) > 8)
        history.notes.append(f"checkpoints that are not in the chain: {', '.join(strays[:8])}{suffix}")
    if missing := len(history.saved) - len(history.kept):
        history.notes.append(f"{missing} of {len(history.saved)} checkpoints no longer exist")
    return history


def follow(run: Path, records: Records, history: History, ended: bool) -> None:
    """Add the lines of a chain. Raise Differs if they contradict the records in metrics.jsonl.

    If `ended`, the last job ended normally, and the last line of each file must be complete.
    """
    try:
        with closing(proof.read_proof(run / proof.PROOF)) as lines:
            for line in lines:
                try:
                    note_line(line, records, history)
                except Differs as difference:
                    raise Differs(f"{proof.PROOF}, line {line.number}: {difference}") from None
                history.head = line.head
    except proof.Broken as broken:
        if ended or not broken.torn:
            raise Differs(f"{proof.PROOF}, {broken}") from None
        history.notes.append(f"the last line of {proof.PROOF} is cut off, as after a kill")
    if not history.head:
        raise Differs(f"{proof.PROOF} has no line")
    if records.step:
        problem = f"{METRICS} has a record of step {records.step} after the last step in {proof.PROOF}"
        problem += f", step {history.last}"
        if ended or records.step != history.last + 1:
            raise Differs(problem)
        history.notes.append(f"{problem}, as after a kill: only recomputation checks this record")
        history.record(records.step)


def note_line(line: proof.Line, records: Records, history: History) -> None:
    """Add a line of the chain. Raise Differs if it cannot follow the lines before it."""
    if line.kind == proof.RUN:
        if not all(isinstance(line.value.get(part), dict) for part in (SETTINGS, FACTS, MACHINE)):
            raise Differs(f"expected {SETTINGS}, {FACTS} and {MACHINE} of a run")
        first = max(history.last, 0) + 1
        if line.step >= first:
            missing = f"steps {first} to {line.step} are not in {proof.PROOF}"
            history.notes.append(f"{missing}: they are not checked")
            while 0 < records.step <= line.step:
                records.take()
        history.begin(line.step, line.value)
    elif line.kind == proof.CHECKPOINT:
        history.save(line.step, line.value.get(NAME))
    elif line.kind == proof.RECORD:
        history.record(line.step)
        if records.step != line.step:
            actual = f"one of step {records.step}" if records.step else "the end"
            raise Differs(f"expected a record of step {line.step} in {METRICS}, found {actual}")
        if difference := other(proof.bits_of(records.take()), line.value):
            name, actual, recorded = difference
            raise Differs(f"step {line.step}: {METRICS} has {name} {actual}, the chain {recorded}")


def other(record: Record, reference: Record) -> tuple[str, str, str] | None:
    """Return the first difference between two records: a name, and its two values as text."""
    for name in dict.fromkeys((*reference, *record)):
        if record.get(name) != reference.get(name) or (name in record) != (name in reference):
            first, second = (quoted(side[name]) if name in side else "none" for side in (record, reference))
            return name, first, second
    return None


def check_tensors(run: Path, step: int, world: World) -> None:
    """Raise Differs if this rank's share of a checkpoint's tensors has changed since it was written."""
    with differing():
        files = open_checkpoint(folders.step_folder(run, step))
        check_digests(files, world.rank, world.size, world.meter.beat)
