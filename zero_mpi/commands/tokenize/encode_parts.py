"""Inputs cut into parts by their bytes alone, the assignment of parts to ranks, and their encoding.

Each part becomes a token file. Parts are dealt out before the work begins, the heaviest first, each to the
rank that has least so far. Texts are encoded as training does it, and written document by document.

Nonblocking sums over ranks report progress, a problem of any rank, and the end of the work (`ProgressSum`).
One begins as soon as the last one has reached all ranks, so a rank in a large document delays no
other, and all ranks learn from the same sum that the work ends.
"""

from __future__ import annotations

import heapq
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zero_mpi.cli.text import percent
from zero_mpi.comm.base import Handle
from zero_mpi.commands.tokenize.text_formats import FLAG, TEXT_FORMATS, InputFile, Reading, check_unchanged
from zero_mpi.commands.tokenize.work_folder import PartWriter
from zero_mpi.config.settings import BYTE
from zero_mpi.data.document_reader import Text, text_documents
from zero_mpi.data.encoded_cache import Batches
from zero_mpi.data.text_files import TextFilter
from zero_mpi.data.token_formats import megatron_dtype
from zero_mpi.data.tokenizers.byte import TextReader
from zero_mpi.data.tokenizers.gguf_tokenizer import run_by
from zero_mpi.errors import JobError, UsageError, writing
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World
from zero_mpi.telemetry import log
from zero_mpi.telemetry.progress_bar import interval, short, watched

FRACTION, LEAST, MOST = 256, 1 << 20, 1 << 28  # 1 / FRACTION of all bytes; limits in bytes
EVERY, PAUSE = 0.1, 0.01  # seconds between sums, and between looks of a finished rank
WATCHED, LOGGED = 5.0, 60.0  # seconds between lines, for a person who watches and for a log


class FilePiece(NamedTuple):
    """Piece of input number `file`, from place `first` to `stop`. weight: bytes of text, or nearly."""

    file: int
    first: int
    stop: int
    weight: int


class WorkPart(NamedTuple):
    """Part that becomes one token file, with that file's name."""

    name: str
    pieces: tuple[FilePiece, ...]

    @property
    def weight(self) -> int:
        return sum(piece.weight for piece in self.pieces)


def cut_parts(
    files: Sequence[InputFile], weights: Sequence[Sequence[int]], size: int | None
) -> list[WorkPart]:
    """Return the parts, of about `size` bytes each, in the order of the inputs.

    A part ends before a piece that would make it larger; a piece that cannot be cut may be larger alone.
    """
    if size is None:
        size = min(max(sum(map(sum, weights)) // FRACTION, LEAST), MOST)
    pieces = list[FilePiece]()
    for number, (file, found) in enumerate(zip(files, weights, strict=True)):
        if TEXT_FORMATS[file.format].divisible:
            ends = [*range(size, sum(found), size), sum(found)] if sum(found) else []
            pieces += [FilePiece(number, a, b, b - a) for a, b in pairwise([0, *ends])]
        else:
            pieces += [FilePiece(number, n, n + 1, weight) for n, weight in enumerate(found)]
    parts, held = list[list[FilePiece]](), 0
    for piece in pieces:
        if not parts or held + piece.weight > size:
            parts.append([])
            held = 0
        parts[-1].append(piece)
        held += piece.weight
    width = max(5, len(str(len(parts))))
    return [WorkPart(f"{number:0{width}d}", tuple(each)) for number, each in enumerate(parts)]


def dealt(weights: Iterable[int], ranks: int) -> list[list[int]]:
    """Return the indices of the weights that each rank gets, in order."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for place, weight in sorted(enumerate(weights), key=lambda each: -each[1]):
        load, rank = loads[0]
        shares[rank].append(place)
        heapq.heapreplace(loads, (load + weight, rank))
    return [sorted(share) for share in shares]


class Amount(NamedTuple):
    """Weight of pieces, bytes of text, documents and tokens that were done."""

    weight: int = 0
    text_bytes: int = 0
    documents: int = 0
    tokens: int = 0


NOTHING = Amount()


class ProgressSum:
    """Work of all ranks, and the sums of its progress: `beat` begins and takes them.

    what     the work, as the watchdog names it
    total    weight of the work, of which an earlier job has done `before`
    stops    whether this rank wants all to stop
    """

    def __init__(
        self, world: World, watchdog: Watchdog, what: str, total: int,
        before: int = 0, stops: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._world, self._moved, self._stops = world, partial(watchdog.beat, what), stops
        self._what, self._before, self._total = what, before, max(total, 1)
        self._mine, self._sum = np.zeros(len(NOTHING)), np.zeros(0)
        self._handle: Handle | None = None
        self._finished = self._has_problem = self._over = self._is_done = False
        self._begun = self._said = time.monotonic()
        self._due = 0.0

    def run(self, work: Callable[[ProgressSum], None]) -> bool:
        """Let each rank do its `work`; returns whether all came to the end of it. Collective.

        A problem of one rank stops all, and is raised on all.
        """
        problems = list[Exception]()
        try:
            work(self)
        except (UsageError, JobError) as error:
            self._has_problem = True
            problems.append(error)
        self._finished = True
        while self.beat():
            time.sleep(PAUSE)

        def raise_first() -> None:
            for problem in problems:
                raise problem

        self._world.together(raise_first)
        return self._is_done

    def beat(self, amount: Amount = NOTHING) -> bool:
        """Add the work done since the last call; return False once all ranks are to stop."""
        self._mine += amount
        if any(amount):
            self._moved()
        if not self._over and self._handle is None and (self._finished or time.monotonic() >= self._due):
            stops = self._has_problem or self._stops()
            self._sum = np.array([*self._mine, self._finished, stops], np.float64)
            self._handle = self._world.comm.allreduce(self._sum, "what was done")
            self._due = time.monotonic() + EVERY
        if self._handle is not None:
            self._world.comm.progress()
            if self._handle.test():
                self._handle.wait()
                self._handle = None
                self._take(*self._sum.tolist())
        return not self._over

    def _take(self, weight: float, text_bytes: float, *rest: float) -> None:
        documents, tokens, finished, stops = rest
        self._moved()  # all ranks are alive
        self._is_done = finished == self._world.size
        self._over = self._is_done or stops > 0
        now = time.monotonic()
        if self._world.rank == 0 and now - self._said > (WATCHED if watched() else LOGGED):
            self._said, seconds = now, now - self._begun
            left = self._total - self._before - weight
            facts = [percent((self._before + weight) / self._total), self._what]
            facts += [f"{short(documents)} documents", f"{short(tokens)} tokens"] if documents else []
            facts += [f"{text_bytes / 1e6 / seconds:.3g} MB/s"]
            facts += [f"{interval(seconds * left / weight)} left"] if weight else []
            log.info("%s", "  ".join(facts))


@dataclass(frozen=True)
class Encoding:
    """Settings by which each rank makes token files: the encoder `text` and the command's `options`."""

    out: Path
    files: Sequence[InputFile]
    text: TextReader
    options: Namespace

    def reading(self) -> Reading:
        return Reading(self.options.field, self.options.skip_bad, self.text_filter())

    def text_filter(self) -> TextFilter:
        return TextFilter(self.options.path, self.options.tokenizer == BYTE, FLAG)


def encode_parts(encoding: Encoding, parts: Sequence[WorkPart], progress: ProgressSum) -> None:
    """Write parts as long as all ranks go on.

    Raises UsageError for a text that cannot be read, JobError for a file that cannot be written.
    """
    reading = encoding.reading()
    reading.beat = progress.beat
    text = TextReader(run_by(encoding.text.tokenizer, Batches(progress.beat)), encoding.text.asked)
    with closing(reading), writing():
        for part in parts:
            reading.filter, reading.skipped = encoding.text_filter(), 0
            if not _encode(encoding, text.anew(), part, reading, progress):
                return


def _encode(
    encoding: Encoding, reader: TextReader, part: WorkPart, reading: Reading, progress: ProgressSum
) -> bool:
    """Write a part; return False if all ranks are to stop, perhaps because of this one."""
    total = 0

    def texts() -> Iterator[Text]:
        nonlocal total
        for piece in part.pieces:
            file = encoding.files[piece.file]
            for name, data in TEXT_FORMATS[file.format].texts(file, piece.first, piece.stop, reading):
                total += len(data)
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
        spelt, odd = dict(reader.spelt), reading.filter.odd
        writer.finish({"text_bytes": total, "skipped": reading.skipped, "spelt": spelt, "odd": odd})
    return progress.beat()
