"""What a run folder claims, its files held to each other: the chain, metrics.jsonl, checkpoints, `latest`.

All of it is read by rank 0, a line at a time; the tensors of the checkpoints are looked at by all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.sound import ID, check_digests, keys_of, open_checkpoint
from zero_mpi.commands.verify.findings import Differs, differing
from zero_mpi.commands.verify.stretches import Story, Stretch
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import quoted, shown
from zero_mpi.files.open import exists, read_lines
from zero_mpi.launch.world import World
from zero_mpi.telemetry import status
from zero_mpi.telemetry.metrics import MARK, METRICS, record_of
from zero_mpi.telemetry.proof import CHECKPOINT, PROOF, RECORD, RUN, Broken, Line, bits_of, read_proof
from zero_mpi.telemetry.proof import ID as NAME
from zero_mpi.train.identity import FACTS, MACHINE, SETTINGS

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """What a run says of itself, after its files were held to each other.

    head      the digest of the chain's last line; empty where there is no chain
    runs      what each job said that its bits depend on; empty texts of one that said nothing
    stretches  what can be computed again
    saved     steps of checkpoints that are there
    steps     the last step
    notes     what is worth to know
    """

    head: str
    runs: Sequence[Mapping[str, Any]]
    stretches: Sequence[Stretch]
    saved: Sequence[int]
    steps: int
    notes: list[str] = field(default_factory=list)


class RecordFile:
    """The records of a run one after the other, of which the next can be looked at."""

    def __init__(self, run: Path) -> None:
        self._rest = records_of(run)
        self._ahead = next(self._rest, None)

    @property
    def step(self) -> int:
        """The step of the next record; 0 where there is none."""
        return 0 if self._ahead is None else int(self._ahead["step"])

    def take(self) -> Record:
        """The next record, and go on to the one after it."""
        assert self._ahead is not None, "asked for where there is one"
        taken, self._ahead = self._ahead, next(self._rest, None)
        return taken

    def pass_over(self, step: int) -> int:
        """Leave out those up to a step. Returns how many there were."""
        count = 0
        while 0 < self.step <= step:
            self.take()
            count += 1
        return count


def records_of(run: Path) -> Iterator[Record]:
    """The records of a run folder, in the order of the file; none where there is no such file."""
    if exists(run / METRICS):
        yield from filter(None, map(record_of, read_lines(run / METRICS, MARK, "a file of records")))


class Checkpoints:
    """The checkpoints of a run folder; each is opened when it is asked for."""

    def __init__(self, run: Path) -> None:
        self.folders = dict(folders.steps(run))

    def id_of(self, step: int) -> str | None:
        """The id of the checkpoint of a step, None where there is none; raises Differs for a damaged one."""
        if step not in self.folders:
            return None
        with differing():
            return keys_of(open_checkpoint(self.folders[step]).state).text(ID)


def examine(run: Path, expect: str | None) -> Claim:
    """What a run folder says; Differs where it contradicts itself, UsageError where it says nothing."""
    records, there = RecordFile(run), Checkpoints(run)
    story, notes = Story(there.id_of), list[str]()
    ended = status.read_status(run / status.NAME).get("state") in (status.DONE, status.STOPPED)
    if exists(run / PROOF):
        head = follow(run, records, story, notes, ended)
    elif not records.step:
        raise UsageError(f"{shown(run)}: nothing to verify: neither {PROOF} nor records in {METRICS}")
    else:
        head = ""
        notes.append(f"there is no {PROOF}: the run has no chain, so records are held to computing alone")
        retell(records, story, there)
    if expect is not None and head != expect:
        raise Differs(f"{PROOF} ends in {head or 'nothing'}, expected {shown(expect)}")
    story.end()
    notes += check_links(run, there, story, ended)
    saved = [step for step in story.saved if step in there.folders]
    return Claim(head, story.runs, story.stretches, saved, story.at, notes)


def follow(run: Path, records: RecordFile, story: Story, notes: list[str], ended: bool) -> str:
    """Tell the story of a chain, whose records are those of metrics.jsonl. Returns the chain's head.

    `ended`: the last job came to its end, so the last line of each file is whole. Raises Differs.
    """
    head = ""
    try:
        with closing(read_proof(run / PROOF)) as lines:
            for line in lines:
                try:
                    tell(line, records, story, notes)
                except Differs as difference:
                    raise Differs(f"{PROOF}, line {line.number}: {difference}") from None
                head = line.head
    except Broken as broken:
        if ended or not broken.torn:
            raise Differs(f"{PROOF}, {broken}") from None
        notes.append(f"the last line of {PROOF} was cut off, as by a kill")
    if not head:
        raise Differs(f"{PROOF} has no line")
    if records.step:
        after = f"{METRICS} has a record of step {records.step} after the last of {PROOF}, step {story.at}"
        if ended or records.step != story.at + 1:
            raise Differs(after)
        notes.append(f"{after}, as after a kill: it is held to computing alone")
        story.record(records.step)
    return head


def tell(line: Line, records: RecordFile, story: Story, notes: list[str]) -> None:
    """Tell of a line of the chain; raises Differs where it cannot be so."""
    if line.kind == RUN:
        if not all(isinstance(line.value.get(part), dict) for part in (SETTINGS, FACTS, MACHINE)):
            raise Differs(f"expected {SETTINGS}, {FACTS} and {MACHINE} of a run")
        if line.step > max(story.at, 0):
            records.pass_over(line.step)
            first = max(story.at, 0) + 1
            notes.append(f"steps {first} to {line.step} are not in {PROOF}: they are held to nothing")
        story.begin(line.step, line.value)
    elif line.kind == CHECKPOINT:
        story.save(line.step, line.value.get(NAME))
    elif line.kind == RECORD:
        story.record(line.step)
        if records.step != line.step:
            found = f"one of step {records.step}" if records.step else "the end"
            raise Differs(f"expected a record of step {line.step} in {METRICS}, found {found}")
        difference = other(bits_of(records.take()), line.value)
        if difference:
            name, found, said = difference
            raise Differs(f"step {line.step}: {METRICS} has {name} {found}, the chain {said}")


def retell(records: RecordFile, story: Story, there: Checkpoints) -> None:
    """Tell the story of a run without a chain, by its records and checkpoints; raises Differs."""
    first = records.step - 1
    story.begin(first, {} if first == 0 else {"from": there.id_of(first) or ""})
    while records.step:
        step = int(records.take()["step"])
        try:
            story.record(step)
        except Differs as difference:
            raise Differs(f"{METRICS}: {difference}") from None
        if step in there.folders:
            story.save(step, there.id_of(step))


def other(found: Record, expected: Record) -> tuple[str, str, str] | None:
    """The first part of a record that is another one: its name, and both values for people."""
    for name in dict.fromkeys((*expected, *found)):
        if found.get(name) != expected.get(name) or (name in found) != (name in expected):
            mine, theirs = (quoted(one[name]) if name in one else "none" for one in (found, expected))
            return name, mine, theirs
    return None


def check_links(run: Path, there: Checkpoints, story: Story, ended: bool) -> Iterator[str]:
    """Notes on checkpoints that the chain does not tell of; raises Differs if `latest` names one."""
    name = folders.named(run, folders.LATEST)
    latest = folders.STEP_FOLDER.fullmatch(name)
    if latest and int(latest[1]) not in story.saved and (ended or int(latest[1]) > story.at):
        raise Differs(f"{folders.LATEST} names {shown(name)}, which the records do not tell of")
    untold = [there.folders[step].name for step in there.folders if step not in story.saved]
    if untold:
        yield f"not of this run, or given up by it: {', '.join(untold[:8])}{' and more' * (len(untold) > 8)}"
    gone = [step for step in story.saved if step not in there.folders]
    if gone:
        yield f"{len(gone)} of {len(story.saved)} checkpoints are not there any more"


def check_tensors(run: Path, step: int, world: World) -> None:
    """Raise Differs unless a checkpoint holds the tensors that were written; this rank's share of them."""
    with differing():
        files = open_checkpoint(folders.step_folder(run, step))
        check_digests(files, world.rank, world.size, world.meter.beat)
