"""From files and folders to two token streams, one to train on and one held out.

A corpus is an ordered list of documents: text files, whose bytes are encoded and closed by an eos token (a
bos if the tokenizer has no eos), token files, whose ids are taken as they are, or conversations, each as its
chat template writes and ends it. Whole documents are held out, so no text is on both sides. Its sha256 covers
names and bytes of the documents, wherever they lie and however they are split: a checkpoint records it, and a
resume on other data is noticed. With no path named, the corpus is Python's own standard library: real text
that is on every machine.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zero_mpi.data.control_tokens import PARSE, TextReader
from zero_mpi.data.conversations.formats import are_conversations
from zero_mpi.data.conversations.tokenized import ANSWERS, ConversationReader
from zero_mpi.data.documents import Document, Stream, Tokens, stream_of
from zero_mpi.data.file_kinds import HEAD
from zero_mpi.data.loader import permutation
from zero_mpi.data.text_files import are_tokens, collect_files, named, stdlib_files, stdlib_root, unreadable
from zero_mpi.data.text_filter import TextFilter
from zero_mpi.data.token_file import read_token_file
from zero_mpi.data.tokenizers.byte import Tokenizer
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import LONGEST

_HELD_OUT_STREAM = 0x68656C64  # keeps this draw apart from every other use of the user's seed
_BLOCK = 1 << 20  # ids looked at together
_ENCODED = 1 << 23  # bytes of documents encoded together: enough for all threads, little beside the ids


@dataclass(frozen=True, eq=False)
class Corpus:
    """What training reads, and what is known about it."""

    train: Stream
    val: Stream  # held out; may be empty, and `notes` say why
    sha256: str  # over names and bytes of all documents in order, whatever the split
    documents: int
    val_documents: int  # held out whole; 0 where the tail of a single document is held out
    notes: tuple[str, ...]  # what was left out and why, for the user
    vocab_size: int


_Documents = list[Document]
_Reading = tuple[_Documents, list[str]]  # documents, and notes on what was left out


class _Reader(NamedTuple):
    """How documents are read: the flags that say what files mean."""

    text: TextReader | None
    vocab: int
    any_bytes: bool
    loss_on: str
    packs: bool

    def documents(self, flag: str, paths: Sequence[str]) -> _Reading:
        """Every document that holds something; raises UsageError where none does."""
        read, notes = self._read(paths)
        documents = [document for document in read if document.tokens.size]
        if not documents:
            nothing = f"{flag} holds no text and no tokens: {named(paths, LONGEST)}"
            raise UsageError("; ".join([nothing, *notes]))
        return documents, notes

    def _read(self, paths: Sequence[str]) -> _Reading:
        root = stdlib_root()
        library = ((p.relative_to(root).as_posix(), p) for p in stdlib_files())
        files = collect_files(paths) if paths else list(library)
        if are_tokens(files):
            if self.packs:
                raise UsageError(
                    "--packing documents: --data are token files, which do not tell where documents end: use "
                    "text"
                )
            return [Document(name, *read_token_file(path, self.vocab, _BLOCK)) for name, path in files], []
        if self.text is None:
            raise UsageError("text cannot be read without a tokenizer: give --data as token files (1-D .npy)")
        if self.vocab < self.text.tokenizer.vocab_size:
            size = self.text.tokenizer.vocab_size
            raise UsageError(f"the tokenizer has {size} tokens, the model's vocabulary {self.vocab}")
        if are_conversations(files):
            return _conversations(files, ConversationReader(self.text.tokenizer, self.loss_on))
        return _text_documents(files, TextFilter(paths, self.any_bytes), self.text)


def _conversations(files: Sequence[tuple[str, Path]], reader: ConversationReader) -> _Reading:
    """Each conversation as a document, as its template ends it; none of which nothing counts."""
    documents, left_out = list[Document](), 0
    for found in reader.read(files):
        if found.counted.any():
            documents.append(Document(found.name, found.ids, found.digest, found.counted))
        else:
            left_out += 1
    return documents, [f"conversations without an answer left out: {left_out:,}"] if left_out else []


def _text_documents(
    files: Sequence[tuple[str, Path]], text_filter: TextFilter, reader: TextReader
) -> _Reading:
    """Text files encoded, eos behind each."""
    documents = [
        document for texts in _groups(_texts(files, text_filter)) for document in _encoded(texts, reader)
    ]
    notes = [*text_filter.notes(), *reader.notes()]
    if _separator(reader.tokenizer) is None:
        notes.append("the tokenizer has neither eos nor bos: nothing stands between documents")
    return documents, notes


def _texts(files: Sequence[tuple[str, Path]], text_filter: TextFilter) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of the text files."""
    for name, path in files:
        try:
            with path.open("rb") as file:
                head = file.read(HEAD)
                if not text_filter.takes(name, path, head):
                    continue
                data = head + file.read()
        except OSError as error:
            unreadable(error)
        text_filter.read(name, data)
        yield name, data


def _groups(texts: Iterable[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """Texts in their order, in groups of about `_ENCODED` bytes."""
    group, size = list[tuple[str, bytes]](), 0
    for name, data in texts:
        group.append((name, data))
        size += len(data)
        if size >= _ENCODED:
            yield group
            group, size = [], 0
    yield group


def _separator(tokenizer: Tokenizer) -> int | None:
    """What closes a document. A bos in the place of a missing eos still says where the next one begins."""
    return tokenizer.bos if tokenizer.eos is None else tokenizer.eos


def _encoded(texts: Sequence[tuple[str, bytes]], reader: TextReader) -> Iterator[Document]:
    """An empty file stays empty: an eos alone teaches nothing. No bos comes first: the eos before will do."""
    last, mark = _separator(reader.tokenizer), PARSE.encode() if reader.parses else b""
    for (name, data), ids in zip(texts, reader.encode([data for _, data in texts]), strict=True):
        closed = np.append(ids, ids.dtype.type(last)) if ids.size and last is not None else ids
        yield Document(name, closed, hashlib.sha256(data).digest() + mark)


def _blocks(ids: Tokens) -> Iterator[tuple[int, Tokens]]:
    """`ids` in pieces, each with its start: a mapped file of any size passes through little memory."""
    for start in range(0, len(ids), _BLOCK):
        yield start, ids[start : start + _BLOCK]


def load_corpus(
    paths: Sequence[str],
    *,
    val_fraction: float,
    context: int,
    seed: int,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    any_bytes: bool = False,
    control_tokens: str | None = None,
    loss_on: str = ANSWERS,
    packs: bool = False,
    val_paths: Sequence[str] = (),
) -> Corpus:
    """The corpus behind `paths` (none: Python's standard library), `val_fraction` of its tokens held out.

    `val_paths`: what is held out instead. `any_bytes`: a file that is named is taken as it is, text or not.
    `control_tokens`: what the spelling of one in text means, "parse" or "plain"; None: plain, with a note.
    Token files need no tokenizer and ignore both. `loss_on`: what counts of conversations, "answers" or
    "all". `packs`: windows hold whole documents, so they need not be as long as `context`; those of
    conversations do anyway. A single token file stays a mapped view; several, or text, are held in memory.
    Raises UsageError for what the user can mend: paths, fraction, files, sizes.
    """
    if not 0 <= val_fraction < 1:
        raise UsageError(f"--val-fraction must be at least 0 and below 1, not {val_fraction}")
    text = None if tokenizer is None else TextReader(tokenizer, control_tokens)
    reader = _Reader(text, vocab_size, any_bytes, loss_on, packs)
    documents, notes = reader.documents("--data", paths)
    total = sum(document.tokens.size for document in documents)
    least = 2 if packs or documents[0].counted is not None else context + 1
    if total < least:
        need = f"context {context} needs at least {least} tokens, the data holds {total}"
        raise UsageError(f"{need}: use a smaller --context or more --data")
    if val_paths:
        return _with(documents, *reader.documents("--val-data", val_paths), least, notes, vocab_size)
    train, val = _hold_out(documents, val_fraction, seed)
    if val_fraction and (refusal := _too_small(train, val, least)):
        train, val, notes = documents, [], [*notes, refusal]
    whole, streams = len(val) if len(documents) > 1 else 0, (stream_of(train), stream_of(val))
    return Corpus(*streams, _digest(documents), len(documents), whole, tuple(notes), vocab_size)


def _with(
    train: _Documents, val: _Documents, more: list[str], least: int, notes: list[str], vocab: int
) -> Corpus:
    """A corpus of which other data are held out; raises UsageError where these have no window."""
    held = sum(document.tokens.size for document in val)
    if held < least:
        raise UsageError(f"--val-data holds {held} tokens, a window takes {least}: give more of it")
    both = hashlib.sha256(f"{_digest(train)} {_digest(val)}".encode()).hexdigest()
    said = [*notes, *(f"--val-data: {note}" for note in more)]
    count = len(train) + len(val)
    return Corpus(stream_of(train), stream_of(val), both, count, len(val), tuple(said), vocab)


def _hold_out(documents: _Documents, fraction: float, seed: int) -> tuple[_Documents, _Documents]:
    """Training and held-out documents, each in the order of the corpus; the tail of one that is alone."""
    if fraction == 0:
        return documents, []
    if len(documents) == 1:
        (alone,) = documents
        ids, counted = alone.tokens, alone.counted
        cut = ids.size - math.ceil(fraction * ids.size)
        sides = ((ids[part], None if counted is None else counted[part]) for part in np.s_[:cut, cut:])
        train, val = (alone._replace(tokens=tokens, counted=counts) for tokens, counts in sides)
        return [train], [val]
    held = _draw([document.tokens.size for document in documents], fraction, seed)
    left = [document for place, document in enumerate(documents) if place not in held]
    return left, [documents[place] for place in sorted(held)]


def _draw(sizes: list[int], fraction: float, seed: int) -> set[int]:
    """Documents in an order drawn from `seed` until they hold `fraction` of all tokens; one always stays.

    One that would make them more than twice that is passed over, and the smallest of those is taken only if
    the others do not reach it: or a draw that begins with a giant would hold out nearly everything.
    """
    goal, tokens = fraction * sum(sizes), 0
    order, held = permutation(len(sizes), seed, _HELD_OUT_STREAM).tolist(), list[int]()
    for place in order:
        if tokens < goal and tokens + sizes[place] <= 2 * goal:
            held.append(place)
            tokens += sizes[place]
    if tokens < goal:
        passed = set(order) - set(held)
        held.append(min((place for place in order if place in passed), key=sizes.__getitem__))
    return set(held[: len(sizes) - 1])


def _too_small(train: _Documents, val: _Documents, least: int) -> str:
    """Why this split serves nobody, for the user; empty if both sides have a window of `least` tokens."""
    left, held = (sum(document.tokens.size for document in side) for side in (train, val))
    if left < least:
        return f"no held-out set: it would leave {left} tokens to train on, a window takes {least}"
    if held < least:
        return (
            f"no held-out set: it would have {held} tokens, a window takes {least}; "
            "use a larger --val-fraction or a smaller --context"
        )
    return ""


def _digest(documents: Sequence[Document]) -> str:
    """sha256 over (length of name, name, digest) of each: no two lists of documents read alike."""
    total = hashlib.sha256()
    for document in documents:
        name = os.fsencode(document.name)
        total.update(len(name).to_bytes(8, "little") + name + document.digest)
    return total.hexdigest()


def unigram_entropy(tokens: Tokens) -> float:
    """Nats per token of the distribution of the ids in `tokens` (1-D): what the best order-0 model of this
    very text reaches, hence what a trained model has to beat. NaN for no tokens.
    """
    counts = np.zeros(0, np.int64)
    for _, block in _blocks(tokens):
        fresh = np.bincount(block, minlength=counts.size)
        fresh[: counts.size] += counts
        counts = fresh
    shares = counts[counts > 0] / len(tokens) if len(tokens) else np.array([np.nan])
    return float(-(shares * np.log(shares)).sum())
