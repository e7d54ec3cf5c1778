"""`zero-mpi tokenize`: reads the flags and, on all ranks, completes a folder of token files."""

import hashlib
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from zero_mpi import __version__, environment
from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import plural, seconds, size
from zero_mpi.commands.tokenize import encode_parts as work
from zero_mpi.commands.tokenize.work_folder import Table, WorkFolder, read_record
from zero_mpi.config.bounds import within
from zero_mpi.config.command_line import add_settings
from zero_mpi.config.inputs import fingerprint, tokenizer_from_file
from zero_mpi.config.settings import BYTE, Config
from zero_mpi.data import ByteTokenizer, Tokenizer
from zero_mpi.data.corpus import UNFINISHED
from zero_mpi.data.document_reader import separator, separator_notes
from zero_mpi.data.text_files import TOKENIZER, collect_files, library_files, named, unreadable
from zero_mpi.data.token_formats import megatron_dtype
from zero_mpi.data.tokenizers.byte import TextReader
from zero_mpi.errors import JobError, UsageError, writing
from zero_mpi.files.foreign import LONGEST, shown
from zero_mpi.files.gguf_keys import TOKENIZER as KIND
from zero_mpi.files.open import is_folder, open_file
from zero_mpi.launch.consistency import SAME_FILES, check_installation, same
from zero_mpi.launch.ending import REQUEUE
from zero_mpi.launch.folder_lock import take_folder
from zero_mpi.launch.stopping import PREPARING, STEPS, signals
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World, run
from zero_mpi.telemetry import log
from zero_mpi.telemetry.progress_bar import short

OPTIONS = ("field", "skip_bad", "control_tokens", "part_mb")  # flags that change the bytes of the token files
THREADS = "RAYON_NUM_THREADS"  # variable that limits the threads of the package `tokenizers`
LEAST_PART_MB, MOST_PART_MB = 0.001, 16384
MEBIBYTE = BLOCK = 1 << 20
COUNTS = ("documents", "tokens", "text_bytes", "skipped")
EXAMPLES = """\
Examples:

  mpirun -n 8 zero-mpi tokenize my-texts --tokenizer MODEL.gguf
  mpirun -n 8 zero-mpi tokenize a.jsonl.zst --tokenizer tokenizer.json
  mpirun -n 8 python -m zero_mpi.train --data tokens"""


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="zero-mpi tokenize",
        description="Convert text to token files (Megatron's .bin and .idx) for zero_mpi.train --data. The "
        "files are the same at any number of ranks. The same command resumes a job that was stopped.",
        epilog=EXAMPLES,
    )
    inputs = "text or .jsonl (also as .gz or .zst), .parquet, or folders (default: Python's library)"
    size = "MiB of text per token file (default: 1/256 of all, from 1 to 256)"
    field = "JSON field or Parquet column with the text (default: text)"
    add = parser.add_argument
    add("path", nargs="*", metavar=work.FLAG, help=inputs)
    add("--tokenizer", required=True, metavar="FILE", help="GGUF file, tokenizer.json, or byte")
    add("--out", default="tokens", metavar="DIR", help="folder for the token files")
    add("--field", metavar="NAME", default="text", help=field)
    add("--skip-bad", action="store_true", help="skip and count lines or rows without text")
    add_settings(parser, {"control_tokens": "", "timeout": ""})
    add("--part-mb", type=float, metavar="X", help=size)
    return parser


def read_options(arguments: Sequence[str]) -> Namespace:
    """Return the flags. Raise UsageError if a value is out of range."""
    options = make_parser().parse_args(arguments)
    if options.part_mb is not None and not LEAST_PART_MB <= options.part_mb <= MOST_PART_MB:
        raise UsageError(f"--part-mb {options.part_mb:g}: expected {LEAST_PART_MB} to {MOST_PART_MB}")
    options.timeout = within("timeout", Config.timeout if options.timeout is None else options.timeout, 0)
    return options


def command(world: World, arguments: Sequence[str]) -> int:
    """Write the missing parts of the folder and the manifest. Return the exit status."""
    check_installation(world)
    options = world.run_on_all(lambda: read_options(arguments))
    log.install(world.rank, world.size)

    def prepare() -> tuple[Tokenizer, dict[str, object]]:
        path = options.tokenizer
        local = ByteTokenizer() if path == BYTE else tokenizer_from_file(Path(path))
        return local, {"the flags": sorted(vars(options).items()), "the tokenizer": fingerprint(local)}

    tokenizer: Tokenizer = same(world.comm, prepare, SAME_FILES)
    watchdog = Watchdog(world.rank, options.timeout, world.kill)
    try:
        return tokenize(world, options, tokenizer, watchdog)
    finally:
        watchdog.stop()


def tokenize(world: World, options: Namespace, tokenizer: Tokenizer, watchdog: Watchdog) -> int:
    """Write the missing parts of the folder and the manifest. Return the exit status. Collective."""
    watchdog.beat("finding the files")
    files, out = world.run_on_root(lambda: input_files(options.path, options.out)), Path(options.out)
    take_folder(world, out)
    watchdog.gather(out, world.comm)
    signals.enter(PREPARING)
    encoding = work.Encoding(out, files, TextReader(tokenizer, options.control_tokens), options)
    folder: WorkFolder = world.on_root(lambda: WorkFolder(out, settings_of(options, tokenizer)))
    inputs, weights = inspect_files(world, encoding, watchdog)
    watchdog.beat("reading existing parts")
    size = None if options.part_mb is None else int(options.part_mb * MEBIBYTE)
    parts = work.cut_parts(files, weights, size)
    missing = world.run_on_root(lambda: begin(folder, encoding, parts, inputs))
    if missing is None:
        return 0
    world.run_on_all(lambda: check_shared(out))
    start, new = time.monotonic(), [part for part in parts if part.name in missing]
    share = work.deal([part.weight for part in new], world.size)[world.rank]
    total, remaining = (sum(part.weight for part in group) for group in (parts, new))
    signals.enter(STEPS)
    progress = work.ProgressSum(
        world, watchdog, "writing token files", total, total - remaining,
        lambda: bool(signals.name or world.comm.folder_problem()),
    )  # fmt: skip
    is_done = progress.run(partial(work.encode_parts, encoding, [new[place] for place in share]))
    world.check()
    watchdog.beat("writing the manifest")
    if is_done:
        world.on_root(lambda: finish(folder, encoding, parts, missing, time.monotonic() - start))
        return 0
    if world.rank == 0:
        count = sum(read_record(out, part.name) is not None for part in parts)
        state = f"{count} of {plural(len(parts), 'part')} are complete"
        log.info("%s", f"stopped: {state}; run the same command to continue")
    signals.name = signals.name or "a signal to another rank"
    return REQUEUE


def check_shared(out: Path) -> None:
    """Raise UsageError if this rank does not see the files that rank 0 wrote."""
    if not is_folder(out / UNFINISHED):
        raise UsageError(f"--out {shown(out)}: expected a folder that the hosts of all ranks share")


def settings_of(options: Namespace, tokenizer: Tokenizer) -> Table:
    """Return all settings that affect the token files, except the inputs."""
    return {
        "zero_mpi": __version__,
        "tokenizer": {
            "file": TOKENIZER,
            "kind": BYTE if isinstance(tokenizer, ByteTokenizer) else str(tokenizer.metadata().get(KIND)),
            "vocabulary": tokenizer.vocab_size,
            "digest": fingerprint(tokenizer),
            "closes_documents": separator(tokenizer),
        },
        "options": {name: getattr(options, name) for name in OPTIONS},
    }


def input_files(paths: Sequence[str], out: str) -> list[work.InputFile]:
    """Return the input files. Raise UsageError for invalid paths, or if `out` is inside an input folder."""
    for argument in paths:
        inner, outer = os.path.realpath(out), os.path.realpath(argument)
        if os.path.commonpath([inner, outer]) == outer:
            raise UsageError(f"--out {shown(out)}: is inside TEXT {shown(argument)}: use a folder outside it")
    files = list[work.InputFile]()
    for name, path in collect_files(paths, work.FLAG) if paths else library_files():
        try:
            stat = path.stat()
        except OSError as error:
            unreadable(error)
        format_name = work.format_named(name).name
        files.append(work.InputFile(name, path, format_name, stat.st_size, stat.st_mtime_ns))
    return files


def inspect_files(
    world: World, encoding: work.Encoding, watchdog: Watchdog
) -> tuple[list[Table], list[list[int]]]:
    """Inspect all files, each on one rank. Raise UsageError for an unreadable file. Collective.

    Return the inputs for the manifest, and the weights of each file's pieces ([] for a file without text).
    """
    files, reading = encoding.files, encoding.reading()
    sizes, facts = [file.size for file in files], dict[int, tuple[str, list[int]]]()

    def inspect_here(progress: work.ProgressSum) -> None:
        for number in work.deal(sizes, world.size)[world.rank]:
            if not progress.beat():
                return  # the rank with the problem raises the error
            weights = work.TEXT_FORMATS[files[number].format].weights(files[number], reading)
            if weights is not None:
                facts[number] = digest_of(files[number], progress), weights

    work.ProgressSum(world, watchdog, "looking at the files", sum(sizes)).run(inspect_here)
    results, union = world.results(lambda: (facts, reading.filter)), encoding.text_filter()
    for share, local in results:
        facts |= share
        union.skipped, union.raw = sorted([*union.skipped, *local.skipped]), sorted([*union.raw, *local.raw])
    if world.rank == 0:
        warn(union.notes())
    inputs: list[Table] = [
        {"name": file.name, "format": file.format, "bytes": file.size, "sha256": facts[number][0]}
        for number, file in enumerate(files)
        if number in facts
    ]
    return inputs, [facts[number][1] if number in facts else [] for number in range(len(sizes))]


def digest_of(file: work.InputFile, progress: work.ProgressSum) -> str:
    """Return the sha256 of a file. Raise UsageError if it cannot be read, JobError if it has changed."""
    digest = hashlib.sha256()
    with open_file(file.path) as raw:
        try:
            while block := raw.read(BLOCK):
                digest.update(block)
                progress.beat(work.Amount(len(block), len(block)))
        except OSError as error:
            error.filename = file.path
            unreadable(error)
    work.check_unchanged(file)
    return digest.hexdigest()


def begin(
    folder: WorkFolder, encoding: work.Encoding, parts: list[work.WorkPart], inputs: list[Table]
) -> set[str] | None:
    """Write the plan on rank 0. Return the names of missing parts, or None if the folder is complete."""
    with writing():
        folder.begin(inputs, encoding.text.tokenizer)
    if folder.is_complete:
        log.info("%s", f"{shown(encoding.out)} is already complete: {train_on(encoding)}")
        return None
    missing = {part.name for part in parts if read_record(encoding.out, part.name) is None}
    scope = f"of {len(parts):,}, from {plural(len(inputs), 'file')}"
    log.info("%s", f"{plural(len(missing), 'part')} to write {scope}")
    return missing


def finish(
    folder: WorkFolder, encoding: work.Encoding, parts: list[work.WorkPart], new: set[str], elapsed: float
) -> None:
    """Write the manifest and log the result. Raise UsageError if the inputs contain no text."""
    index = {part.name: record for part in parts if (record := read_record(folder.out, part.name))}
    if len(index) != len(parts):
        raise JobError(f"{shown(folder.out)}: records of parts were removed during the job")
    records, out = list(index.values()), shown(folder.out)
    counts = {name: sum(each[name] for each in records) for name in COUNTS}
    warn(notes_on(encoding, records))
    if not counts["documents"]:
        folder.clear()
        (folder.out / TOKENIZER).unlink()
        raise UsageError(f"{work.FLAG} contains no text: {named(encoding.options.path, LONGEST)}")
    files = [file for each in records for file in each["files"]]
    ids = megatron_dtype(encoding.text.tokenizer.vocab_size).name
    with writing():
        folder.end({"ids": ids, **counts, "files": files})
    rate = short(sum(index[name]["tokens"] for name in new) / max(elapsed, 1e-9))
    total = f"{plural(counts['documents'], 'document')}, {counts['tokens']:,} tokens"
    text = f"{size(counts['text_bytes'])} in {plural(len(files) // 2, 'token file')}"
    log.info("%s", f"{out}: {total} of {text}, {rate} tokens/s in {seconds(elapsed)}; {train_on(encoding)}")


def notes_on(encoding: work.Encoding, records: Sequence[Table]) -> Iterator[str]:
    """Yield the notes on the texts of all parts, which have these records."""
    union, reader = encoding.text_filter(), encoding.text.anew()
    for record in records:
        union.not_utf8 += record["odd"]
        reader.spelt.update(record["spelt"])
    yield from (*union.notes(), *reader.notes(), *separator_notes(reader.tokenizer))
    if skipped := sum(record["skipped"] for record in records):
        yield f"skipped lines and rows without text: {skipped:,}"


def warn(notes: Iterable[str]) -> None:
    for note in notes:
        log.log_note(log.Caution(note))


def train_on(encoding: work.Encoding) -> str:
    """Return a hint for the user: the command that trains on the folder."""
    return f"train on it with mpirun -n 8 python -m zero_mpi.train --data {shown(encoding.out)}"


def main() -> None:
    signals.listen()
    os.environ.setdefault(THREADS, str(environment.cores_per_rank()))  # ranks share the cores of a node
    run("tokenize", command, sys.argv[1:])
