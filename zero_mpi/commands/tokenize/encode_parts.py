"""A rank's parts: texts are read, encoded as training does it, and written, document by document."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from zero_mpi.commands.tokenize.parts import WorkPart
from zero_mpi.commands.tokenize.progress import Amount, Pulse
from zero_mpi.commands.tokenize.text_formats import FLAG, TEXT_FORMATS, InputFile, Reading, check_unchanged
from zero_mpi.commands.tokenize.work_folder import PartWriter
from zero_mpi.config.inputs import BYTE
from zero_mpi.data.control_tokens import TextReader
from zero_mpi.data.document_reader import Text, text_documents
from zero_mpi.data.encoded_cache import Batches
from zero_mpi.data.file_kinds import TextFilter
from zero_mpi.data.token_formats import megatron_dtype
from zero_mpi.data.tokenizers.gguf_tokenizer import run_by
from zero_mpi.errors import writing

TOLD = 64  # documents, of which the pulse hears together


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
            with closing(_encoded(encoding, part, reading)) as amounts:
                for amount in amounts:
                    if not pulse.beat(amount):
                        return


def _encoded(encoding: Encoding, part: WorkPart, reading: Reading) -> Generator[Amount]:
    """Write a part; yields what was done of it, some documents at a time."""
    reading.begin(encoding.text_filter())
    reader, weight, nbytes, total, documents, tokens = encoding.text.anew(), 0, 0, 0, 0, 0

    def texts() -> Iterator[Text]:
        nonlocal weight, nbytes, total
        for piece in part.pieces:
            file = encoding.files[piece.file]
            for name, data in TEXT_FORMATS[file.format].texts(file, piece.first, piece.stop, reading):
                nbytes, total = nbytes + len(data), total + len(data)
                yield name, data
            weight += piece.weight

    with PartWriter(encoding.out, part.name, megatron_dtype(encoding.text.tokenizer.vocab_size)) as writer:
        for document in text_documents(texts(), reader):
            assert isinstance(document.tokens, np.ndarray), "encoded ids are held"
            writer.add(document.name, document.tokens)
            documents, tokens = documents + (document.tokens.size > 0), tokens + document.tokens.size
            if documents == TOLD:
                done = Amount(weight, nbytes, documents, tokens)
                weight = nbytes = documents = tokens = 0
                yield done
        for number in {piece.file for piece in part.pieces}:
            check_unchanged(encoding.files[number])
        spelt, odd = dict(reader.spelt), reading.filter.odd
        writer.finish({"text_bytes": total, "skipped": reading.skipped, "spelt": spelt, "odd": odd})
    yield Amount(weight, nbytes, documents, tokens)
