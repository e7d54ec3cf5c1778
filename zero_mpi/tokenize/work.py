"""The work of all ranks: look at the inputs, write the missing parts, write the manifest."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from zero_mpi.cli.text import elapsed, plural, short_size
from zero_mpi.data.bin_tokens import megatron_dtype
from zero_mpi.data.text_documents import separator_notes
from zero_mpi.data.text_files import TOKENIZER, collect_files, library_files, named, unreadable
from zero_mpi.data.text_filter import TextFilter
from zero_mpi.data.token_folder import UNFINISHED
from zero_mpi.errors import JobError, UsageError, writing
from zero_mpi.files.foreign import LONGEST, shown
from zero_mpi.files.open import is_folder, open_file
from zero_mpi.launch.folder_hold import Hold
from zero_mpi.launch.stopping import STEPS, signals
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World
from zero_mpi.telemetry import log
from zero_mpi.telemetry.progress_bar import short
from zero_mpi.tokenize.encode_parts import Encoding, encode_parts
from zero_mpi.tokenize.parts import WorkPart, cut_parts, dealt
from zero_mpi.tokenize.progress import Amount, Pulse, work_together
from zero_mpi.tokenize.text_formats import (
    FLAG,
    TEXT_FORMATS,
    InputFile,
    check_unchanged,
    format_named,
)
from zero_mpi.tokenize.work_folder import Table, WorkFolder, read_record

MEBIBYTE = BLOCK = 1 << 20
COUNTS = ("documents", "tokens", "text_bytes", "skipped")
LOOKING, WRITING = "looking at the files", "writing token files"
TRAIN = "mpirun -n 8 python -m zero_mpi.train --data"
Found = dict[int, tuple[str, list[int]]]  # of input number N: its sha256, and the weights of its pieces


class Work(NamedTuple):
    """All parts, those that are missing, and the inputs for the manifest."""

    parts: list[WorkPart]
    missing: list[WorkPart]
    inputs: list[Table]


def found_files(paths: Sequence[str], out: str) -> list[InputFile]:
    """Return the files that the flags name; raises UsageError, also where `out` is in a folder of these."""
    for given in paths:
        inner, outer = os.path.realpath(out), os.path.realpath(given)
        if os.path.commonpath([inner, outer]) == outer:
            raise UsageError(f"--out {shown(out)}: lies in {FLAG} {shown(given)}: use a folder beside it")
    files = list[InputFile]()
    for name, path in collect_files(paths, FLAG) if paths else library_files():
        try:
            about = path.stat()
        except OSError as error:
            unreadable(error)
        files.append(InputFile(name, path, format_named(name).name, about.st_size, about.st_mtime_ns))
    return files


def look_at_files(world: World, encoding: Encoding, watchdog: Watchdog) -> tuple[Found, list[TextFilter]]:
    """Look at all files, each by one rank; leaves out those that are no text. Collective; UsageError."""
    sizes = [file.size for file in encoding.files]
    reading, found = encoding.reading(), Found()

    def look(pulse: Pulse) -> None:
        reading.beat = pulse.beat
        for number in dealt(sizes, world.size)[world.rank]:
            file = encoding.files[number]
            if not pulse.beat():
                return  # another rank raises
            weights = TEXT_FORMATS[file.format].weights(file, reading)
            if weights is not None:
                found[number] = digest_of(file, pulse), weights

    work_together(world, watchdog, LOOKING, look, total=sum(sizes))
    all_found = world.results(lambda: (found, reading.filter))
    joint = {number: each for theirs, _ in all_found for number, each in theirs.items()}
    return joint, [text_filter for _, text_filter in all_found]


def digest_of(file: InputFile, pulse: Pulse) -> str:
    """Return the sha256 of a file; raises UsageError if it cannot be read, JobError if it changes."""
    digest = hashlib.sha256()
    with open_file(file.path) as raw:
        try:
            while block := raw.read(BLOCK):
                digest.update(block)
                pulse.beat(Amount(len(block), len(block)))
        except OSError as error:
            error.filename = file.path
            unreadable(error)
    check_unchanged(file)
    return digest.hexdigest()


def prepare(world: World, encoding: Encoding, folder: WorkFolder | None, watchdog: Watchdog) -> Work | None:
    """Look at the inputs and cut them; None where the folder is complete. Collective; raises UsageError.

    `folder` is on rank 0.
    """
    found, filters = look_at_files(world, encoding, watchdog)
    watchdog.beat("reading what is there already")
    files, part_mb = encoding.files, encoding.options.part_mb
    weights = [found[number][1] if number in found else [] for number in range(len(files))]
    parts = cut_parts(files, weights, None if part_mb is None else int(part_mb * MEBIBYTE))
    inputs: list[Table] = [
        {"name": file.name, "format": file.format, "bytes": file.size, "sha256": found[number][0]}
        for number, file in enumerate(files)
        if number in found
    ]

    def begin() -> set[str] | None:
        assert folder is not None, "rank 0 has it"
        say_left_out(encoding, filters)
        with writing():
            folder.begin(inputs, encoding.text.tokenizer)
        if folder.is_complete:
            log.info("%s", f"{shown(encoding.out)} was complete: {train_on(encoding)}")
            return None
        missing = {part.name for part in parts if read_record(encoding.out, part.name) is None}
        of = f"of {len(parts):,}, from {plural(len(inputs), 'file')}"
        log.info("%s", f"{plural(len(missing), 'part')} to write {of}")
        return missing

    missing = world.from_root(begin)
    if missing is None:
        return None
    world.together(lambda: check_shared(encoding.out))
    return Work(parts, [part for part in parts if part.name in missing], inputs)


def check_shared(out: Path) -> None:
    """Raise UsageError on a rank that does not see what rank 0 has written."""
    if not is_folder(out / UNFINISHED):
        raise UsageError(f"--out {shown(out)}: expected a folder that the hosts of all ranks share")


def write_parts(world: World, encoding: Encoding, work: Work, hold: Hold, watchdog: Watchdog) -> float | None:
    """Write the missing parts; returns the seconds it took, None if it was stopped. Collective.

    Raises on all ranks what went wrong on any.
    """
    total, left = (sum(part.weight for part in parts) for parts in (work.parts, work.missing))
    share = dealt([part.weight for part in work.missing], world.size)[world.rank]
    mine, begun = [work.missing[place] for place in share], time.monotonic()
    signals.enter(STEPS)
    is_done = work_together(
        world,
        watchdog,
        WRITING,
        partial(encode_parts, encoding, mine),
        before=total - left,
        total=total,
        stops=lambda: bool(signals.caught or hold.lost),
    )
    hold.check()
    return time.monotonic() - begun if is_done else None


def say_stopped(out: Path, work: Work) -> None:
    """Say how much of a stopped work is complete."""
    done = sum(read_record(out, part.name) is not None for part in work.parts)
    parts = plural(len(work.parts), "part")
    log.info("%s", f"stopped: {done} of {parts} are complete; the same command goes on")


def finish_folder(folder: WorkFolder, encoding: Encoding, work: Work, seconds: float) -> None:
    """Write the manifest, and say what there is now. Raises UsageError where there is nothing."""
    found = {part.name: record for part in work.parts if (record := read_record(folder.out, part.name))}
    if len(found) != len(work.parts):
        raise JobError(f"{shown(folder.out)}: the records of parts were removed under the job")
    records, out = list(found.values()), shown(folder.out)
    counts = {name: sum(each[name] for each in records) for name in COUNTS}
    say_found(encoding, records)
    if not counts["documents"]:
        folder.clear()
        (folder.out / TOKENIZER).unlink()
        raise UsageError(f"{FLAG} holds no text: {named(encoding.options.path, LONGEST)}")
    files = [file for each in records for file in each["files"]]
    ids = megatron_dtype(encoding.text.tokenizer.vocab_size).name
    with writing():
        folder.end({**folder.about, "inputs": work.inputs, "ids": ids, **counts, "files": files})
    fresh = sum(found[part.name]["tokens"] for part in work.missing) / max(seconds, 1e-9)
    made = f"{plural(counts['documents'], 'document')}, {counts['tokens']:,} tokens"
    size = f"{short_size(counts['text_bytes'])} in {plural(len(files) // 2, 'token file')}"
    speed = f"{short(fresh)} tokens/s in {elapsed(seconds)}"
    log.info("%s", f"{out}: {made} of {size}, {speed}; {train_on(encoding)}")


def train_on(encoding: Encoding) -> str:
    """Return the advice at the end."""
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
    for record in records:
        joint.odd += record["odd"]
        reader.spelt.update(record["spelt"])
    for note in (*joint.notes(), *reader.notes(), *separator_notes(reader.tokenizer)):
        log.tell(log.Caution(note))
    skipped = sum(record["skipped"] for record in records)
    if skipped:
        log.tell(log.Caution(f"lines and rows without a text left out: {skipped:,}"))
