"""A rank's parts: texts are read, encoded as training does it, and written, document by document."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from zero_mpi.data.bin_tokens import megatron_dtype
from zero_mpi.data.control_tokens import TextReader
from zero_mpi.data.encoded_cache import Batches
from zero_mpi.data.text_documents import Text, text_documents
from zero_mpi.data.text_filter import TextFilter
from zero_mpi.data.tokenizers.gguf_tokenizer import run_by
from zero_mpi.errors import writing
from zero_mpi.tokenize.part_files import PartWriter
from zero_mpi.tokenize.parts import WorkPart
from zero_mpi.tokenize.pulse import Amount, Pulse
from zero_mpi.tokenize.survey import FLAG, check_unchanged
from zero_mpi.tokenize.text_formats import TEXT_FORMATS, InputFile, Reading


@dataclass(frozen=True)
class Encoding:
    """How texts become token files, on each rank.

    text    what encodes
    field, skip_bad    as `Reading` has them
    named, any_bytes   as `TextFilter` has them
    """

    out: Path
    files: Sequence[InputFile]
    text: TextReader
    field: str
    skip_bad: bool
    named: Sequence[str]
    any_bytes: bool

    def reading(self) -> Reading:
        """A reading that has found nothing yet."""
        return Reading(self.field, self.skip_bad, self.text_filter())

    def text_filter(self) -> TextFilter:
        """A filter that has found nothing yet."""
        return TextFilter(self.named, self.any_bytes, FLAG)


class PartTexts:
    """The texts of a part; counts what was read of it since it was asked last."""

    def __init__(self, part: WorkPart, files: Sequence[InputFile], reading: Reading) -> None:
        self._part, self._files, self._reading = part, files, reading
        self._weight = self._bytes = 0

    def __iter__(self) -> Iterator[Text]:
        for piece in self._part.pieces:
            file = self._files[piece.file]
            for name, data in TEXT_FORMATS[file.format].texts(file, piece.first, piece.stop, self._reading):
                self._bytes += len(data)
                yield name, data
            self._weight += piece.weight

    def amount(self) -> Amount:
        """What was read since the last call."""
        found = Amount(self._weight, self._bytes)
        self._weight = self._bytes = 0
        return found


def encode_parts(encoding: Encoding, parts: Sequence[tuple[WorkPart, str]], pulse: Pulse) -> None:
    """Write parts under their names, as long as all ranks go on.

    Raises UsageError for a text that cannot be read, JobError for a file that cannot be written.
    """
    reading = encoding.reading()
    reading.beat = pulse.beat
    text = TextReader(run_by(encoding.text.tokenizer, Batches(pulse.beat)), encoding.text.asked)
    encoding = replace(encoding, text=text)
    with closing(reading), writing():
        for part, name in parts:
            with closing(_encoded(encoding, part, name, reading)) as amounts:
                for amount in amounts:
                    if not pulse.beat(amount):
                        return


def _encoded(encoding: Encoding, part: WorkPart, name: str, reading: Reading) -> Generator[Amount]:
    """Write a part; what was done of it, document by document."""
    reading.begin(encoding.text_filter())
    texts, reader, read = PartTexts(part, encoding.files, reading), encoding.text.anew(), 0
    with PartWriter(encoding.out, name, megatron_dtype(encoding.text.tokenizer.vocab_size)) as writer:
        for document in text_documents(texts, reader):
            assert isinstance(document.tokens, np.ndarray), "encoded ids are held"
            writer.add(document.name, document.tokens)
            done = texts.amount()
            read += done.text_bytes
            yield done._replace(documents=int(len(document.tokens) > 0), tokens=len(document.tokens))
        done = texts.amount()
        read += done.text_bytes
        for number in {piece.file for piece in part.pieces}:
            check_unchanged(encoding.files[number])
        about = {
            "text_bytes": read,
            "skipped": reading.skipped,
            "spelt": dict(reader.spelt),
            "odd": reading.filter.odd,
        }
        writer.finish(about)
    yield done
