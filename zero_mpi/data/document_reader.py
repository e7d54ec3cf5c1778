"""Turns files of text, ids or conversations into documents, which hold ids.

A document is a text file, a token file or a conversation. The bytes of a text are encoded and closed by an
eos token (by a bos if the tokenizer has no eos). The ids of a token file are taken unchanged. A conversation
has the form and the end that its chat template writes.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from zero_mpi.data.conversations.chat_template import NO_INPUTS, TemplateInputs
from zero_mpi.data.conversations.formats import BadRows, are_conversations, holds_conversations, holds_pairs
from zero_mpi.data.conversations.tokenized import ANSWERS, ConversationReader, Totals
from zero_mpi.data.documents import Document, Remark, in_groups
from zero_mpi.data.encoded_cache import Batches, Encode, Files, Reading, read_documents
from zero_mpi.data.text_files import HEAD, TextFilter, collect_files, library_files, named
from zero_mpi.data.token_formats import read_tokens, token_files
from zero_mpi.data.tokenizers.byte import PARSE, TextReader, Tokenizer
from zero_mpi.data.tokenizers.gguf_tokenizer import run_by
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import LONGEST, shown
from zero_mpi.files.open import is_folder, refusing

Text = tuple[str, bytes]
"""Name and bytes of a text."""

_ENCODED = 1 << 23  # bytes of documents encoded together: enough to use all threads, but little memory


def separator(tokenizer: Tokenizer) -> int | None:
    """Return the id that closes a document: eos, or else bos, which also begins the next document."""
    return tokenizer.bos if tokenizer.eos is None else tokenizer.eos


def separator_notes(tokenizer: Tokenizer) -> Iterator[str]:
    if separator(tokenizer) is None:
        yield "the tokenizer has neither EOS nor BOS: documents are not separated"


def text_documents(texts: Iterable[Text], reader: TextReader) -> Iterator[Document]:
    """Yield each text, encoded and closed, in order. Texts are held in memory in groups of a few MiB.

    An empty document stays empty, because a model learns nothing from a separator alone.
    """
    last, mark = separator(reader.tokenizer), PARSE.encode() if reader.parses else b""
    for group in in_groups(texts, lambda text: len(text[1]), _ENCODED):
        for (name, raw), ids in zip(group, reader.encode([raw for _, raw in group]), strict=True):
            closed = np.append(ids, ids.dtype.type(last)) if ids.size and last is not None else ids
            yield Document(name, closed, hashlib.sha256(raw).digest() + mark)


@dataclass(frozen=True)
class DocumentReader:
    """Reader of documents, with the values of the flags that say how to read files."""

    tokenizer: Tokenizer | None  # None: only token files can be read
    vocab_size: int
    any_bytes: bool = False  # files that the user names are read unchanged, even if they are not text
    control_tokens: str | None = None  # see `TextReader`
    bos: int | None = None  # id that begins each window of text and each conversation
    loss_on: str = ANSWERS  # the tokens of conversations that the loss counts: "answers" or "all"
    packs: bool = False  # windows hold full documents; a document may then be shorter than the context
    skip_bad: bool = False  # leaves out invalid rows of conversations, with a note
    inputs: TemplateInputs = NO_INPUTS
    preferences: str = ""  # name of the loss that needs pairs; "" for other losses
    batches: Batches = field(default_factory=Batches)

    @cached_property
    def text(self) -> TextReader:
        """Reader of texts. Raises UsageError without a tokenizer, or if it has more tokens than the model."""
        if self.tokenizer is None:
            raise UsageError("text needs a tokenizer: use token files for --data")
        if self.vocab_size < (size := self.tokenizer.vocab_size):
            raise UsageError(f"the tokenizer has {size} tokens, but the model has only {self.vocab_size}")
        return TextReader(run_by(self.tokenizer, self.batches), self.control_tokens)

    def documents(self, flag: str, paths: Sequence[str]) -> Reading:
        """Return all documents that are not empty. Raise UsageError if there is none."""
        candidates, notes = self._read(flag, paths)
        documents = [document for document in candidates if document.tokens.size]
        if not documents:
            problem = f"{flag} contains neither text nor tokens: {named(paths, LONGEST)}"
            raise UsageError("; ".join([problem, *(note for note in notes if not isinstance(note, Remark))]))
        return documents, notes

    def bos_of(self, paths: Sequence[str]) -> int | None:
        """Return the bos id of windows; None for token files, whose ids are taken unchanged."""
        return None if token_files(collect_files(paths)) else self.bos

    def _read(self, flag: str, paths: Sequence[str]) -> Reading:
        files = collect_files(paths, flag) if paths else library_files()
        self._check_pairs(flag, files)
        tokens = token_files(files)
        if tokens:
            return self._tokens(tokens), []
        encode = self._encode(flag, files, paths)
        return read_documents(files, self._settings(paths), self.vocab_size, encode, self.batches)

    def _check_pairs(self, flag: str, files: Files) -> None:
        """Raise UsageError for pairs without a preference loss, or for other data with such a loss."""
        labels = self.preferences == "kto"
        for _, path in files:
            if self.preferences and not holds_pairs(path, labels):
                label = ", or prompt, completion and label" * labels
                raise UsageError(
                    f"--loss {self.preferences}: expected rows with chosen and rejected{label} as .jsonl; "
                    f"{flag} {shown(path)} holds other data"
                )
            if not self.preferences and holds_pairs(path) and not holds_conversations(path):
                raise UsageError(
                    f"{flag} {shown(path)} holds pairs of a chosen and a rejected answer: they need training "
                    "with a preference loss such as --loss dpo"
                )

    def _tokens(self, files: Files) -> list[Document]:
        """Return the documents of token files without reading the files into memory."""
        documents = [read_tokens(name, path, self.vocab_size) for name, path in files]
        silent = [document.name for document in documents if document.ends is None]
        if self.packs and silent:
            raise UsageError(
                f"--packing documents: {shown(silent[0])} does not mark the ends of documents: use text, or "
                "token files of Megatron or Arrow"
            )
        return documents

    def _encode(self, flag: str, files: Files, paths: Sequence[str]) -> Encode:
        if self.preferences or are_conversations(files):
            loss_on = ANSWERS if self.preferences else self.loss_on
            reader = ConversationReader(self.text.tokenizer, loss_on, self.bos, self.inputs)
            return lambda notes: _conversations(files, reader, self, notes)
        text, takes = self.text, TextFilter(paths, self.any_bytes, flag)
        return lambda notes: _text_documents(files, takes, text.anew(), notes)

    def _settings(self, paths: Sequence[str]) -> dict[str, object]:
        """Return all settings that, together with the files, determine the ids."""
        files = sorted(os.path.realpath(path) for path in paths if not is_folder(path))
        return self.text.tokenizer.metadata() | {
            "any bytes": self.any_bytes,
            "control tokens": self.control_tokens,
            "loss on": self.loss_on,
            "bos": self.bos,
            "template": (dict(self.inputs.variables), *self.inputs[1:]),
            "skip bad": self.skip_bad,
            "preferences": self.preferences,
            "named": files,
        }


def _conversations(
    files: Files, reader: ConversationReader, flags: DocumentReader, notes: list[str]
) -> Iterator[Document]:
    """Yield each conversation as its template writes it. A pair is one document, the better side first.

    Conversations in which no token counts, and pairs with a side that has no answer, are skipped.
    """
    totals, bad = Totals(), BadRows() if flags.skip_bad else None
    if flags.preferences:
        rows = reader.read_pairs(files, bad, flags.preferences == "kto")
    else:
        rows = ([conversation] for conversation in reader.read(files, bad))
    for row in rows:
        sides = [side for side in row if side is not None]
        for side in sides:
            totals.add(side.name, side.facts)
        if not all(side.counted.any() for side in sides):
            continue
        if not flags.preferences:
            yield Document(sides[0].name, sides[0].ids, sides[0].digest, sides[0].counted)
            continue
        ids = np.concatenate([side.ids for side in sides])
        counted = np.concatenate([side.counted for side in sides])
        ends = np.cumsum([0 if side is None else len(side.ids) for side in row], dtype=np.int64)
        digest = hashlib.sha256(b"".join(side.digest for side in sides) + ends.tobytes()).digest()
        yield Document(sides[0].name, ids, digest, counted, ends)
    notes += map(Remark, totals.remarks())
    notes += [*totals.cautions(), *(bad.notes() if bad else ())]


def _text_documents(
    files: Files, text_filter: TextFilter, reader: TextReader, notes: list[str]
) -> Iterator[Document]:
    """Yield text files as encoded documents, each with the separator at its end."""

    def texts() -> Iterator[Text]:
        for name, path in files:
            with refusing("--data", path, "cannot be read"), path.open("rb") as file:
                head = file.read(HEAD)
                if not text_filter.takes(name, path, head):
                    continue
                raw = head + file.read()
            text_filter.read(name, raw)
            yield name, raw

    yield from text_documents(texts(), reader)
    notes += [*text_filter.notes(), *reader.notes(), *separator_notes(reader.tokenizer)]
