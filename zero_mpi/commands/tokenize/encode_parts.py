"""Inputs cut into parts by their bytes alone, who writes which, and how a rank encodes its own.

Each part becomes a token file. Parts are dealt out before the work begins, the heaviest first, each to the
rank that has least so far. Texts are encoded as training does it, and written document by document.
"""

from __future__ import annotations

import heapq
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zero_mpi.commands.tokenize.progress import Amount, Pulse
from zero_mpi.commands.tokenize.text_formats import FLAG, TEXT_FORMATS, InputFile, Reading, check_unchanged
from zero_mpi.commands.tokenize.work_folder import PartWriter
from zero_mpi.config.inputs import BYTE
from zero_mpi.data.bin_tokens import megatron_dtype
from zero_mpi.data.control_tokens import TextReader
from zero_mpi.data.encoded_cache import Batches
from zero_mpi.data.text_documents import Text, text_documents
from zero_mpi.data.text_filter import TextFilter
from zero_mpi.data.tokenizers.gguf_tokenizer import run_by
from zero_mpi.errors import writing

FRACTION, LEAST, MOST = 256, 1 << 20, 1 << 28  # of all bytes in a part; bytes


class FilePiece(NamedTuple):
    """Piece of input number `file`, from place `first` to `stop`. weight: bytes of text, or nearly."""

    file: int
    first: int
    stop: int
    weight: int


class WorkPart(NamedTuple):
    """Part that becomes one token file, with the name of that."""

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
    parts, held = list[list[FilePiece]](), 0
    for piece in _pieces(files, weights, size):
        if not parts or held + piece.weight > size:
            parts.append([])
            held = 0
        parts[-1].append(piece)
        held += piece.weight
    width = max(5, len(str(len(parts))))
    return [WorkPart(f"{number:0{width}d}", tuple(pieces)) for number, pieces in enumerate(parts)]


def _pieces(files: Sequence[InputFile], weights: Sequence[Sequence[int]], size: int) -> Iterator[FilePiece]:
    for number, (file, found) in enumerate(zip(files, weights, strict=True)):
        if TEXT_FORMATS[file.format].divisible:
            total = sum(found)
            for first in range(0, total, size):
                stop = min(first + size, total)
                yield FilePiece(number, first, stop, stop - first)
        else:
            for place, weight in enumerate(found):
                yield FilePiece(number, place, place + 1, weight)


def dealt(weights: Iterable[int], ranks: int) -> list[list[int]]:
    """Return the places of weights that each rank gets, in their order."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for place, weight in sorted(enumerate(weights), key=lambda each: -each[1]):
        load, rank = loads[0]
        shares[rank].append(place)
        heapq.heapreplace(loads, (load + weight, rank))
    return [sorted(share) for share in shares]


@dataclass(frozen=True)
class Encoding:
    """Settings by which each rank makes token files: the encoder `text` and the command's `options`."""

    out: Path
    files: Sequence[InputFile]
    text: TextReader
    options: Namespace

    def reading(self) -> Reading:
        """Return a reading that has found nothing yet."""
        return Reading(self.options.field, self.options.skip_bad, self.text_filter())

    def text_filter(self) -> TextFilter:
        """Return a filter that has found nothing yet."""
        return TextFilter(self.options.path, self.options.tokenizer == BYTE, FLAG)


def encode_parts(encoding: Encoding, parts: Sequence[WorkPart], pulse: Pulse) -> None:
    """Write parts as long as all ranks go on.

    Raises UsageError for a text that cannot be read, JobError for a file that cannot be written.
    """
    reading = encoding.reading()
    reading.beat = pulse.beat
    text = TextReader(run_by(encoding.text.tokenizer, Batches(pulse.beat)), encoding.text.asked)
    encoding = replace(encoding, text=text)
    with closing(reading), writing():
        for part in parts:
            reading.begin(encoding.text_filter())
            if not _encode(encoding, part, reading, pulse):
                return


def _encode(encoding: Encoding, part: WorkPart, reading: Reading, pulse: Pulse) -> bool:
    """Write a part; returns False where all ranks are to stop, of which it may be the cause."""
    reader, total = encoding.text.anew(), 0

    def texts() -> Iterator[Text]:
        nonlocal total
        for piece in part.pieces:
            file = encoding.files[piece.file]
            for name, data in TEXT_FORMATS[file.format].texts(file, piece.first, piece.stop, reading):
                total += len(data)
                pulse.beat(Amount(text_bytes=len(data)))
                yield name, data
            pulse.beat(Amount(piece.weight))

    with PartWriter(encoding.out, part.name, megatron_dtype(encoding.text.tokenizer.vocab_size)) as writer:
        for document in text_documents(texts(), reader):
            assert isinstance(document.tokens, np.ndarray), "encoded ids are held"
            writer.add(document.name, document.tokens)
            size = document.tokens.size
            if not pulse.beat(Amount(documents=int(size > 0), tokens=size)):
                return False
        for number in {piece.file for piece in part.pieces}:
            check_unchanged(encoding.files[number])
        spelt, odd = dict(reader.spelt), reading.filter.odd
        writer.finish({"text_bytes": total, "skipped": reading.skipped, "spelt": spelt, "odd": odd})
    return pulse.beat()
