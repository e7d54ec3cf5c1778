"""The work of all ranks: prepared, done, and brought to its end."""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple

from zero_mpi.cli.text import elapsed, plural, short_size
from zero_mpi.data.bin_tokens import megatron_dtype
from zero_mpi.data.text_documents import separator_notes
from zero_mpi.data.text_files import named
from zero_mpi.data.text_filter import TextFilter
from zero_mpi.data.token_folder import UNFINISHED
from zero_mpi.errors import JobError, UsageError, writing
from zero_mpi.files.foreign import LONGEST, shown
from zero_mpi.files.open import is_folder
from zero_mpi.launch.folder_hold import Hold
from zero_mpi.launch.stopping import STEPS, signals
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World
from zero_mpi.telemetry import log
from zero_mpi.telemetry.progress_bar import short
from zero_mpi.tokenize.encode_parts import Encoding, encode_parts
from zero_mpi.tokenize.part_files import COUNTS
from zero_mpi.tokenize.parts import WorkPart, cut_parts, dealt, part_size
from zero_mpi.tokenize.progress import WorkDisplay, work_under_pulse
from zero_mpi.tokenize.survey import FLAG, Looked, as_inputs, as_plan, look_at_files
from zero_mpi.tokenize.work_folder import Table, WorkFolder

MEBIBYTE = 1 << 20
LOOKING, WRITING = "looking at the files", "writing token files"
TRAIN = "mpirun -n 8 python -m zero_mpi.train --data"


class NamedPart(NamedTuple):
    """A part, and the name of its files."""

    part: WorkPart
    name: str


class Work(NamedTuple):
    """What is to be written: all parts, those that are missing, and the inputs for the manifest."""

    encoding: Encoding
    parts: list[NamedPart]
    missing: list[NamedPart]
    inputs: list[Table]


def prepare(
    world: World, encoding: Encoding, folder: WorkFolder | None, part_mb: float | None, watchdog: Watchdog
) -> Work | None:
    """Look at the inputs and cut them; None where the folder is complete. Collective; raises UsageError.

    `folder` is on rank 0.
    """
    known = world.from_root(lambda: folder and folder.known(encoding.files))
    moved = partial(watchdog.beat, LOOKING)
    looked, filters = look_at_files(world, encoding.files, known, encoding.reading(), moved)
    watchdog.beat("reading what is there already")
    parts = named_parts(encoding, looked, part_mb)
    inputs = as_inputs(encoding.files, looked)

    def begin() -> set[str] | None:
        assert folder is not None, "rank 0 has it"
        say_left_out(encoding, filters)
        with writing():
            folder.begin(as_plan(encoding.files, looked), inputs, encoding.text.tokenizer)
        if folder.is_complete:
            log.info("%s", f"{shown(encoding.out)} was complete: {train_on(encoding)}")
            return None
        found = {each.name for each in parts if folder.record(each.name) is None}
        of = f"of {len(parts):,}, from {plural(len(inputs), 'file')}"
        log.info("%s", f"{plural(len(found), 'part')} to write {of}")
        return found

    missing = world.from_root(begin)
    if missing is None:
        return None
    world.together(lambda: check_shared(encoding))
    return Work(encoding, parts, [each for each in parts if each.name in missing], inputs)


def named_parts(encoding: Encoding, looked: list[Looked], part_mb: float | None) -> list[NamedPart]:
    """All parts, under names in their order."""
    weights = [each.weights for each in looked]
    size = part_size(sum(map(sum, weights))) if part_mb is None else int(part_mb * MEBIBYTE)
    parts = cut_parts(encoding.files, weights, size)
    width = max(5, len(str(len(parts))))
    return [NamedPart(part, f"{part.number:0{width}d}") for part in parts]


def check_shared(encoding: Encoding) -> None:
    """Raise UsageError on a rank that does not see what rank 0 has written."""
    if not is_folder(encoding.out / UNFINISHED):
        raise UsageError(f"--out {shown(encoding.out)}: expected a folder that the hosts of all ranks share")


def write_parts(world: World, work: Work, hold: Hold, watchdog: Watchdog) -> float | None:
    """Write the parts that are missing; the seconds it took, None if it was stopped. Collective.

    Raises on all ranks what went wrong on any.
    """
    shares = dealt([part.weight for part, _ in work.missing], world.size)
    display = display_of(work) if world.rank == 0 else None
    mine, begun = [work.missing[place] for place in shares[world.rank]], time.monotonic()
    signals.enter(STEPS)
    is_done = work_under_pulse(
        world,
        partial(encode_parts, work.encoding, mine),
        display,
        partial(watchdog.beat, WRITING),
        stops=lambda: bool(signals.caught or hold.lost),
    )
    hold.check()
    return time.monotonic() - begun if is_done else None


def display_of(work: Work) -> WorkDisplay:
    """What shows the work, of which another job may have done a part."""
    total, missing = (sum(part.weight for part, _ in parts) for parts in (work.parts, work.missing))
    return WorkDisplay(total - missing, total)


def say_stopped(folder: WorkFolder, work: Work) -> None:
    """Say how much is done of a work that was stopped."""
    done = sum(folder.record(each.name) is not None for each in work.parts)
    log.info(
        "%s", f"stopped: {done} of {plural(len(work.parts), 'part')} are complete; the same command goes on"
    )


def finish_folder(folder: WorkFolder, work: Work, about: Table, seconds: float) -> None:
    """Write the manifest, and say what there is now. Raises UsageError where there is nothing."""
    records = [folder.record(each.name) for each in work.parts]
    found = [record for record in records if record is not None]
    if len(found) != len(records):
        raise JobError(f"{shown(work.encoding.out)}: the records of parts were removed under the job")
    counts = {name: sum(each[name] for each in found) for name in COUNTS}
    say_found(work.encoding, found)
    if not counts["documents"]:
        folder.drop()
        raise UsageError(f"{FLAG} holds no text: {named(work.encoding.named, LONGEST)}")
    tokenizer = work.encoding.text.tokenizer
    manifest = {
        **about,
        "inputs": work.inputs,
        "ids": megatron_dtype(tokenizer.vocab_size).name,
        **counts,
        "files": [file for each in found for file in each["files"]],
    }
    with writing():
        folder.end(manifest)
    new = {each.name for each in work.missing}
    fresh = sum(record["tokens"] for each, record in zip(work.parts, found, strict=True) if each.name in new)
    say_done(work.encoding, manifest, f"{short(fresh / max(seconds, 1e-9))} tokens/s in {elapsed(seconds)}")


def say_done(encoding: Encoding, manifest: Table, speed: str) -> None:
    """The line at the end."""
    pairs = len(manifest["files"]) // 2
    log.info(
        "%s",
        f"{shown(encoding.out)}: {plural(manifest['documents'], 'document')}, {manifest['tokens']:,} tokens "
        f"of {short_size(manifest['text_bytes'])} in {plural(pairs, 'token file')}, {speed}; "
        f"{train_on(encoding)}",
    )


def train_on(encoding: Encoding) -> str:
    """What to do next."""
    return f"{TRAIN} {shown(encoding.out)} trains on them"


def say_left_out(encoding: Encoding, filters: list[TextFilter]) -> None:
    """Warn of files that are not read, or read though they are no text."""
    joint = encoding.text_filter()
    joint.out = sorted(name for each in filters for name in each.out)
    joint.taken = sorted(name for each in filters for name in each.taken)
    for note in joint.notes():
        log.tell(log.Caution(note))


def say_found(encoding: Encoding, records: list[Table]) -> None:
    """Warn of what was found in the texts."""
    joint, reader = encoding.text_filter(), encoding.text.anew()
    joint.odd = [name for record in records for name in record["odd"]]
    for record in records:
        reader.spelt.update(record["spelt"])
    for note in (*joint.notes(), *reader.notes(), *separator_notes(reader.tokenizer)):
        log.tell(log.Caution(note))
    skipped = sum(record["skipped"] for record in records)
    if skipped:
        log.tell(log.Caution(f"lines and rows without a text left out: {skipped:,}"))
