"""Formats of text files, cutting of inputs into parts, assignment of parts to ranks, and encoding.

A format (`TEXT_FORMATS`) has a function that weighs the pieces of a file, so that work can be divided, and a
function that yields the texts between two positions in a file. A part becomes a token file.

Nonblocking sums over the ranks (`ProgressSum`) share progress, problems of a rank, and the end of the work.
No rank waits for a sum while it has work, so a rank with a large document delays no other rank.
"""

from __future__ import annotations

import heapq
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zero_mpi.cli.text import percent
from zero_mpi.comm.base import Handle
from zero_mpi.commands.tokenize.work_folder import PartWriter
from zero_mpi.config.settings import BYTE
from zero_mpi.data.conversations.row_sources import open_table
from zero_mpi.data.document_reader import Text, text_documents
from zero_mpi.data.encoded_cache import Batches, Beat
from zero_mpi.data.text_files import HEAD, LINES, TextFilter
from zero_mpi.data.token_formats import MEGATRON_MOST, megatron_dtype
from zero_mpi.data.tokenizers.byte import TextReader
from zero_mpi.data.tokenizers.gguf_tokenizer import run_by
from zero_mpi.errors import FileError, JobError, UsageError, writing
from zero_mpi.files import text_streams
from zero_mpi.files.foreign import quoted, shown
from zero_mpi.files.parse import parse_json
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World
from zero_mpi.telemetry import log
from zero_mpi.telemetry.progress_bar import interval, short, watched

FLAG = "TEXT"  # name of the inputs in messages
ROWS = 256  # rows of Parquet that are read together
FRACTION, SMALLEST, LARGEST = 256, 1 << 20, 1 << 28  # a part has 1 / FRACTION of all bytes, within limits
EVERY, PAUSE = 0.1, 0.01  # seconds between sums; between checks of a rank that has finished
WATCHED, LOGGED = 5.0, 60.0  # seconds between progress lines: on a terminal, in a log

# --------------------------------------------------------------------------------------------- formats


@dataclass(frozen=True)
class InputFile:
    """An input file: its name in the manifest, its path, and the name of its format."""

    name: str
    path: Path
    format: str
    size: int  # size in bytes when the file was inspected
    changed_at: int  # time of its last change before the inspection, in nanoseconds


def check_unchanged(file: InputFile) -> None:
    """Raise JobError if a file has changed since it was inspected."""
    try:
        stat = file.path.stat()
    except OSError as error:
        raise JobError(f"{shown(file.path)}: {error.strerror}; it existed when the job started") from None
    if (stat.st_size, stat.st_mtime_ns) != (file.size, file.changed_at):
        raise JobError(f"{shown(file.path)} changed while it was read: start again when it no longer changes")


class Reading:
    """Settings and counts for reading the texts of one part, or for inspecting files.

    field       name of the field or column that holds the text
    skips       whether invalid lines and rows are left out and counted in `skipped`
    filter      decides which files are text, and has notes on them
    beat        function that is called after each block that is read
    text_bytes  bytes of the texts that were encoded
    """

    def __init__(self, field: str, skips: bool, text_filter: TextFilter, beat: Beat = lambda: None) -> None:
        self.field, self.skips, self.filter, self.beat = field, skips, text_filter, beat
        self.skipped = self.text_bytes = 0
        self._stream: text_streams.TextStream | None = None

    def stream(self, path: Path, first: int) -> text_streams.TextStream:
        """Return the stream of a file. Reuse the open stream unless it has already passed `first`."""
        stream = self._stream
        if stream is None or stream.path != path or not stream.reaches(first):
            self.close()
            stream = self._stream = text_streams.TextStream(path, self.beat)
        return stream

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def bad(self, path: Path, place: str, number: Callable[[], int], problem: object) -> None:
        """Raise FileError for an invalid line or row; with --skip-bad, count it instead."""
        if not self.skips:
            location = f"{shown(path)}, {place} {number():,}"
            raise FileError(f"{location}: {problem}; --skip-bad skips such lines and rows") from None
        self.skipped += 1

    def text_of(self, value: Any) -> bytes:
        """Return the text in the value of a line. Raise ValueError if it has none."""
        if not isinstance(value, dict):
            raise ValueError(f"expected an object with {quoted(self.field)}, found {quoted(value)}")
        if self.field not in value:
            names = ", ".join(quoted(name, 40) for name in list(value)[:5]) or "nothing"
            raise ValueError(f"expected the field {quoted(self.field)}, found {names}; name it with --field")
        if not text_streams.is_text(value[self.field]):
            raise ValueError(f"{self.field}: expected a text, found {quoted(value[self.field])}")
        text: str = value[self.field]
        return text.encode()


class TextFormat(NamedTuple):
    """Format of text files."""

    name: str
    suffixes: tuple[str, ...]  # suffixes of its files, without .gz or .zst
    # Returns approximate bytes of text of the file, or of each row group; None for a file to leave out.
    weights: Callable[[InputFile, Reading], list[int] | None]
    texts: Callable[[InputFile, int, int, Reading], Iterator[Text]]  # yields the texts between two positions
    divisible: bool = False  # whether positions are bytes; if not, they are indices of weights


def _length(file: InputFile, reading: Reading) -> list[int] | None:
    if file.format == TEXT.name:
        with text_streams.TextStream(file.path) as stream:
            if not reading.filter.takes(unpacked_name(file.name), file.path, stream.read(HEAD)):
                return None
    packed = text_streams.packing_of(file.path.name)
    return [text_streams.length_of(file.path, reading.beat) if packed else file.size]


def _whole(file: InputFile, first: int, stop: int, reading: Reading) -> Iterator[Text]:
    packed = text_streams.packing_of(file.path.name)
    limit = max(text_streams.FREE_BYTES, text_streams.MOST_RATIO * file.size)
    most = min(text_streams.MOST_UNPACKED, limit) if packed else MEGATRON_MOST
    with text_streams.TextStream(file.path, reading.beat) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise FileError(
            f"{shown(file.path)}: expected a text (one document) of at most {most:,} bytes, found more: "
            "split it, or write one document per line as JSON Lines"
        )
    reading.filter.read(file.name, data)
    yield file.name, data


def _lines(file: InputFile, first: int, stop: int, reading: Reading) -> Iterator[Text]:
    for place, raw in reading.stream(file.path, first).lines(first, stop):
        if not raw.strip():
            continue
        try:
            if len(raw) > text_streams.MOST:
                raise ValueError(f"expected at most {text_streams.MOST:,} bytes, found more")
            text = reading.text_of(parse_json(raw))
        except ValueError as error:
            reading.bad(file.path, "line", partial(text_streams.line_number, file.path, place), error)
        else:
            yield f"{file.name}@{place}", text


def _group_weights(file: InputFile, reading: Reading) -> list[int]:
    with open_table(file.path) as table:
        schema, place, field = table.schema_arrow, shown(file.path), reading.field
        if field not in schema.names:
            names = shown(", ".join(schema.names), 100) or "none"
            column = f"expected a column {quoted(field)}, found {names}"
            raise FileError(f"{place}: {column}; name it with --field")
        kind = str(schema.field(field).type)
        if kind not in ("string", "large_string"):
            raise FileError(f"{place}: {field}: expected a column of texts, found {shown(kind, 60)}")
        weights = []
        for group in map(table.metadata.row_group, range(table.metadata.num_row_groups)):
            columns = map(group.column, range(group.num_columns))
            sizes = [each.total_uncompressed_size for each in columns if each.path_in_schema == field]
            weights.append(sum(max(size, 0) for size in sizes))
        return weights


def _rows(file: InputFile, first: int, stop: int, reading: Reading) -> Iterator[Text]:
    with open_table(file.path) as table:
        before = sum(table.metadata.row_group(number).num_rows for number in range(first))
        groups = list(range(first, stop))
        batches = table.iter_batches(batch_size=ROWS, row_groups=groups, columns=[reading.field])
        values = chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
        for row, value in enumerate(values, before + 1):
            if text_streams.is_text(value):
                yield f"{file.name}@{row}", value.encode()
            else:
                problem = f"{reading.field}: expected a text, found {quoted(value)}"
                reading.bad(file.path, "row", partial(int, row), problem)


JSON_LINES = TextFormat("JSON Lines", LINES, _length, _lines, divisible=True)
PARQUET = TextFormat("Parquet", (".parquet",), _group_weights, _rows)
TEXT = TextFormat("text", ("",), _length, _whole)
TEXT_FORMATS = {each.name: each for each in (JSON_LINES, PARQUET, TEXT)}  # the first match is used


def unpacked_name(name: str) -> str:
    """Return a file's name without the suffix of its compression, such as .gz."""
    return name[: len(name) - len(text_streams.packing_of(name))]


def format_named(name: str) -> TextFormat:
    """Return the format of a file by its name; plain text if no other format has its suffix."""
    inner = unpacked_name(name).lower()
    form = next(choice for choice in TEXT_FORMATS.values() if inner.endswith(choice.suffixes))
    return TEXT if form is PARQUET and inner != name.lower() else form  # Parquet compresses inside the file


# ----------------------------------------------------------------------------------------------- parts


class FilePiece(NamedTuple):
    """Part of input number `file`, between two positions. `weight` is its approximate bytes of text."""

    file: int
    first: int
    stop: int
    weight: int


class WorkPart(NamedTuple):
    """Pieces of the inputs that become one token file, and the file's name."""

    name: str
    pieces: tuple[FilePiece, ...]

    @property
    def weight(self) -> int:
        return sum(piece.weight for piece in self.pieces)


def cut_parts(
    files: Sequence[InputFile], weights: Sequence[Sequence[int]], size: int | None
) -> list[WorkPart]:
    """Return the parts, each of about `size` bytes, in the order of the inputs.

    A part ends before a piece that would make it too large. A piece that cannot be cut may exceed `size`.
    """
    if size is None:
        size = min(max(sum(map(sum, weights)) // FRACTION, SMALLEST), LARGEST)
    pieces = list[FilePiece]()
    for number, (file, file_weights) in enumerate(zip(files, weights, strict=True)):
        if TEXT_FORMATS[file.format].divisible:
            ends = [*range(size, sum(file_weights), size), sum(file_weights)] if sum(file_weights) else []
            pieces += [FilePiece(number, a, b, b - a) for a, b in pairwise([0, *ends])]
        else:
            pieces += [FilePiece(number, n, n + 1, weight) for n, weight in enumerate(file_weights)]
    parts, total = list[list[FilePiece]](), 0
    for piece in pieces:
        if not parts or total + piece.weight > size:
            parts.append([])
            total = 0
        parts[-1].append(piece)
        total += piece.weight
    width = max(5, len(str(len(parts))))
    return [WorkPart(f"{number:0{width}d}", tuple(group)) for number, group in enumerate(parts)]


def deal(weights: Iterable[int], ranks: int) -> list[list[int]]:
    """Assign weights to ranks, with similar sums. Return the indices that each rank gets, in order."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for place, weight in sorted(enumerate(weights), key=lambda pair: -pair[1]):
        load, rank = loads[0]
        shares[rank].append(place)
        heapq.heapreplace(loads, (load + weight, rank))
    return [sorted(share) for share in shares]


class Amount(NamedTuple):
    """Amount of finished work: weight of pieces, bytes of text, documents and tokens."""

    weight: int = 0
    text_bytes: int = 0
    documents: int = 0
    tokens: int = 0


NOTHING = Amount()


class ProgressSum:
    """Sums of the progress of all ranks. `beat` starts a sum, or reads the result of a finished sum.

    label    name of the work, for the watchdog and the lines of progress
    total    weight of all work; an earlier job has done `before` of it
    stops    function that returns True if this rank must stop
    """

    def __init__(
        self, world: World, watchdog: Watchdog, label: str, total: int,
        before: int = 0, stops: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._world, self._beat, self._stops = world, partial(watchdog.beat, label), stops
        self._label, self._earlier, self._total = label, before, max(total, 1)
        self._amounts, self._sum = np.zeros(len(NOTHING)), np.zeros(0)
        self._handle: Handle | None = None
        self._problem: UsageError | JobError | None = None
        self._is_finished = self._has_ended = self._is_done = False
        self._start = self._last_line = time.monotonic()
        self._due = 0.0

    def run(self, work: Callable[[ProgressSum], None]) -> bool:
        """Call this rank's `work`. Return whether all ranks have completed their work. Collective.

        A problem on one rank stops all ranks and is raised on all ranks.
        """
        try:
            work(self)
        except (UsageError, JobError) as error:
            self._problem = error
        self._is_finished = True
        while self.beat():
            time.sleep(PAUSE)

        def raise_problem() -> None:
            if self._problem is not None:
                raise self._problem

        self._world.run_on_all(raise_problem)
        return self._is_done

    def beat(self, amount: Amount = NOTHING) -> bool:
        """Add the work done since the last call. Return False as soon as all ranks must stop."""
        self._amounts += amount
        if any(amount):
            self._beat()
        is_due = self._is_finished or time.monotonic() >= self._due
        if is_due and self._handle is None and not self._has_ended:
            stops = self._problem is not None or self._stops()
            self._sum = np.array([*self._amounts, self._is_finished, stops], np.float64)
            self._handle = self._world.comm.allreduce(self._sum, "what was done")
            self._due = time.monotonic() + EVERY
        if self._handle is not None:
            self._world.comm.progress()
            if self._handle.test():
                self._handle.wait()
                self._handle = None
                self._take(*self._sum.tolist())
        return not self._has_ended

    def _take(self, weight: float, text_bytes: float, *rest: float) -> None:
        documents, tokens, finished, stops = rest
        self._beat()  # every rank contributed to the sum, so none is stuck
        self._is_done = finished == self._world.size
        self._has_ended = self._is_done or stops > 0
        now = time.monotonic()
        if self._world.rank == 0 and now - self._last_line > (WATCHED if watched() else LOGGED):
            self._last_line, seconds = now, now - self._start
            remaining = self._total - self._earlier - weight
            facts = [percent((self._earlier + weight) / self._total), self._label]
            facts += [f"{short(documents)} documents", f"{short(tokens)} tokens"] if documents else []
            facts += [f"{text_bytes / 1e6 / seconds:.3g} MB/s"]
            facts += [f"{interval(seconds * remaining / weight)} left"] if weight else []
            log.info("%s", "  ".join(facts))


@dataclass(frozen=True)
class Encoding:
    """Settings for making token files, on each rank: the reader of texts, and the command's flags."""

    out: Path
    files: Sequence[InputFile]
    text: TextReader
    options: Namespace

    def reading(self, beat: Beat = lambda: None) -> Reading:
        return Reading(self.options.field, self.options.skip_bad, self.text_filter(), beat)

    def text_filter(self) -> TextFilter:
        return TextFilter(self.options.path, self.options.tokenizer == BYTE, FLAG)


def encode_parts(encoding: Encoding, parts: Sequence[WorkPart], progress: ProgressSum) -> None:
    """Write this rank's parts until they are all written or a rank stops.

    Raises UsageError for a text that cannot be read, JobError for a file that cannot be written.
    """
    reading = encoding.reading(progress.beat)
    text = TextReader(run_by(encoding.text.tokenizer, Batches(progress.beat)), encoding.text.setting)
    with closing(reading), writing():
        for part in parts:
            reading.filter, reading.skipped, reading.text_bytes = encoding.text_filter(), 0, 0
            if not _encode(encoding, text.anew(), part, reading, progress):
                return


def _encode(
    encoding: Encoding, reader: TextReader, part: WorkPart, reading: Reading, progress: ProgressSum
) -> bool:
    """Write a part. Return False if all ranks must stop."""

    def texts() -> Iterator[Text]:
        for piece in part.pieces:
            file = encoding.files[piece.file]
            for name, data in TEXT_FORMATS[file.format].texts(file, piece.first, piece.stop, reading):
                reading.text_bytes += len(data)
                progress.beat(Amount(text_bytes=len(data)))
                yield name, data
            progress.beat(Amount(piece.weight))

    with PartWriter(encoding.out, part.name, megatron_dtype(reader.tokenizer.vocab_size)) as writer:
        for document in text_documents(texts(), reader):
            assert isinstance(document.tokens, np.ndarray), "encoded ids are held"
            writer.add(document.name, document.tokens)
            size = document.tokens.size
            if not progress.beat(Amount(documents=int(size > 0), tokens=size)):
                return False
        for number in {piece.file for piece in part.pieces}:
            check_unchanged(encoding.files[number])
        facts = {"text_bytes": reading.text_bytes, "skipped": reading.skipped}
        writer.finish({**facts, "spelt": dict(reader.spelt), "odd": reading.filter.not_utf8})
    return progress.beat()
