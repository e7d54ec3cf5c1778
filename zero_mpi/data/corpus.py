"""Turns files and folders into token streams for training and for validation.

Each source of `--data` has an ordered list of documents. Full documents are held out (a single document is
split), so no text is in both streams. The corpus has a sha256 of its documents' names and bytes, not of their
location or the split. A checkpoint records the sha256, so a resume on other data is noticed. Without a path,
the corpus is Python's own standard library: real text that every machine has.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data.document_reader import DocumentReader
from zero_mpi.data.documents import Document, Stream, stream_of
from zero_mpi.data.loader import permutation
from zero_mpi.data.text_files import MANIFEST, TOKENIZER, collect_files
from zero_mpi.data.token_formats import token_files
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import is_file, is_folder

LEAST_SHARE = 1e-3  # smallest share of all samples, so that every block of samples contains all sources
_SHARE = re.compile(r"(?P<path>.+)=(?P<share>[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)", re.DOTALL)


class DataSource(NamedTuple):
    """Source in `--data`: paths that are read as one corpus, and their share of all samples."""

    name: str
    paths: list[str]
    share: float = 1.0


def sources_of(paths: Sequence[str]) -> list[DataSource]:
    """Return the sources of `--data`: one for each `PATH=SHARE`, or one that holds all paths.

    An existing path that looks like `PATH=SHARE` is taken as a path. Shares are relative to their sum. Raises
    UsageError if only some paths have a share, for a repeated path, and for a share below `LEAST_SHARE`.
    """
    matches = [None if os.path.exists(path) else _SHARE.fullmatch(path) for path in paths]
    shares = {match["path"]: float(match["share"]) for match in matches if match is not None}
    if not shares:
        return [DataSource("", list(paths))]
    if len(shares) != len(paths):
        missing = next((path for path, match in zip(paths, matches, strict=True) if match is None), "")
        problem = f"{shown(missing)} has none" if missing else "a path comes twice"
        raise UsageError(f"--data: expected PATH=SHARE for each path or for none; {problem}")
    total = sum(shares.values())
    for path, share in shares.items():
        if not 0 < share >= LEAST_SHARE * total or not total < np.inf:
            raise UsageError(
                f"--data {shown(path)}={share:g}: expected a share of at least {LEAST_SHARE:g} of all "
                f"shares, whose sum is {total:g}"
            )
    names = [Path(path).name or path for path in shares]
    for place, name in enumerate(names):  # a repeated NAME becomes NAME-2, or the next number that is free
        numbered = (f"{name}-{number}" for number in count(2))
        names[place] = next(each for each in chain([name], numbered) if each not in names[:place])
    return [
        DataSource(name, [path], share / total)
        for name, (path, share) in zip(names, shares.items(), strict=True)
    ]


def files_of(data: Sequence[str]) -> list[tuple[str, Path]]:
    """Return (name, path) of every file of all sources, as `collect_files` does."""
    return [file for source in sources_of(data) for file in collect_files(source.paths)]


def holds_token_files(data: Sequence[str]) -> bool:
    """Return whether all sources are token files. Raise UsageError if a source mixes them with text."""
    files = [token_files(collect_files(source.paths)) for source in sources_of(data)]  # checks all sources
    return all(files)


UNFINISHED = ".tokenize"  # folder of a tokenize job's files until all parts are complete


def tokenizers_of(data: Sequence[str], flag: str = "--data") -> list[Path]:
    """Return the tokenizer files in the folders of `flag`. Raise UsageError for an unfinished folder."""
    folders = [Path(path) for source in sources_of(data) for path in source.paths]
    for folder in folders:
        if is_folder(folder / UNFINISHED) and not is_file(folder / MANIFEST):
            raise UsageError(
                f"{flag} {shown(folder)}: its token files are incomplete: run zero-mpi tokenize again, with "
                "the same flags"
            )
    return [folder / TOKENIZER for folder in folders if is_file(folder / TOKENIZER)]


Ids = NDArray[np.integer[Any]]
_HELD_OUT_STREAM = 0x68656C64  # part of this draw's key, so that other draws with the seed differ
_BLOCK = 1 << 20  # ids processed together


class Part(NamedTuple):
    """Stream of a source, its share of the samples, and the bos id that begins its windows."""

    name: str
    stream: Stream
    share: float = 1.0
    bos: int | None = None


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and validation data of a run, and facts about the data."""

    parts: tuple[Part, ...]  # training data
    held_out: tuple[Part, ...]  # validation data; if empty, `notes` give the reason
    sha256: str  # digest of all documents' names and bytes in order, and of the shares; not of the split
    documents: int
    val_documents: int  # documents held out in full; 0 if only the tail of a single document is held out
    notes: tuple[str, ...]  # notes for the user: which data is left out and why, and how data was read

    @property
    def train(self) -> Stream:
        """Training stream of a corpus with one source."""
        (part,) = self.parts
        return part.stream

    @property
    def val(self) -> Stream:
        """Validation stream of one source; empty if nothing is held out."""
        return self.held_out[0].stream if self.held_out else stream_of([])

    @property
    def tokens(self) -> tuple[int, int]:
        train, val = (sum(part.stream.size for part in parts) for parts in (self.parts, self.held_out))
        return train, val


_Documents = list[Document]


class _Split(NamedTuple):
    """Split of a source into training and validation data. A side has one part, or none if it is empty."""

    train: list[Part]
    val: list[Part]
    notes: list[str]
    digest: str
    documents: int
    val_documents: int  # documents held out in full


def load_corpus(
    paths: Sequence[str],
    reader: DocumentReader,
    val_fraction: float,
    context: int,
    seed: int,
    val_paths: Sequence[str] = (),
) -> Corpus:
    """Return the corpus of `paths` (none: Python's standard library) with `val_fraction` of it held out.

    If every path is `PATH=SHARE`, each path is a source. `val_paths`: validation data to use instead of
    held-out tokens. The ids of token files and of large encoded texts stay on disk.
    """
    fraction = 0.0 if val_paths else val_fraction
    splits = [_split(reader, source, context, fraction, seed) for source in sources_of(paths)]
    if val_paths:
        splits.append(_split(reader, DataSource("", list(val_paths)), context, 0.0, seed, "--val-data"))
    digest, *others = (split.digest for split in splits)
    if others:
        digest = hashlib.sha256(" ".join([digest, *others]).encode()).hexdigest()
    return Corpus(
        parts=tuple(part for split in splits for part in split.train),
        held_out=tuple(part for split in splits for part in split.val),
        sha256=digest,
        documents=sum(split.documents for split in splits),
        val_documents=sum(split.val_documents for split in splits),
        notes=tuple(note for split in splits for note in split.notes),
    )


def _split(
    reader: DocumentReader, source: DataSource, context: int, fraction: float, seed: int, flag: str = "--data"
) -> _Split:
    """Return a source with `fraction` of its tokens held out, or all of them for --val-data.

    Raises UsageError if the source is too small for a window.
    """
    documents, notes = reader.documents(flag, source.paths)
    *places, total = np.cumsum([0, *(document.tokens.size for document in documents)]).tolist()
    documents = [each._replace(at=at) for each, at in zip(documents, places, strict=True)]
    least = 2 if reader.packs or documents[0].counted is not None else context + 1  # documents may be short
    if total < least:
        suffix = f" of {source.name}" if source.name else ""
        problem = f"context {context} needs at least {least} tokens, but {flag}{suffix} has {total}"
        raise UsageError(f"{problem}: use a smaller --context or more data")
    train, val = _hold_out(documents, fraction, seed) if flag == "--data" else ([], documents)
    if fraction and (refusal := _too_small(train, val, least)):
        train, val, notes = documents, [], [*notes, refusal]
    label = source.name or ("" if flag == "--data" else flag)
    labelled = [type(note)(f"{label}: {note}") if label else note for note in notes]
    digest = f"{source.share!r} {_digest(documents)}" if source.name else _digest(documents)
    # Documents inside a token file are counted separately if the file marks where they end.
    in_train, in_val = (
        sum(len(each.ends) if each.ends is not None and each.is_divisible else 1 for each in side)
        for side in (train, val)
    )
    is_cut = len(documents) == 1 and len(train) == len(val) == 1 and not documents[0].is_divisible
    share, bos = source.share, reader.bos_of(source.paths)
    parts, held = ([Part(source.name, stream_of(side), share, bos)] if side else [] for side in (train, val))
    return _Split(parts, held, labelled, digest, in_train + in_val - is_cut, in_val - is_cut)


def _hold_out(documents: _Documents, fraction: float, seed: int) -> tuple[_Documents, _Documents]:
    """Return training and held-out documents, each in the order of the corpus.

    The tail of a single text is held out, or of each file if all files mark the ends of documents. A single
    conversation or pair is not split: training would never see the end of its answer.
    """
    if fraction == 0:
        return documents, []
    is_single = len(documents) == 1 and documents[0].counted is None
    if is_single or all(each.is_divisible for each in documents):
        cut = [each.cut(each.tokens.size - math.ceil(fraction * each.tokens.size)) for each in documents]
        return [first for first, _ in cut], [last for _, last in cut]
    places = _draw([document.tokens.size for document in documents], fraction, seed)
    train = [document for place, document in enumerate(documents) if place not in places]
    return train, [documents[place] for place in sorted(places)]


def _draw(sizes: list[int], fraction: float, seed: int) -> set[int]:
    """Return numbers of documents to hold out, with about `fraction` of all tokens; never all documents.

    Documents are drawn in an order set by `seed`. A document is skipped if it would raise the sum above twice
    the fraction. The smallest skipped one is held out only if the others do not reach the fraction.
    """
    goal, tokens = fraction * sum(sizes), 0
    order, places = permutation(len(sizes), seed, _HELD_OUT_STREAM).tolist(), list[int]()
    for place in order:
        if tokens < goal and tokens + sizes[place] <= 2 * goal:
            places.append(place)
            tokens += sizes[place]
    if tokens < goal:
        skipped = set(order) - set(places)
        places.append(min((place for place in order if place in skipped), key=sizes.__getitem__))
    return set(places[: len(sizes) - 1])


def _too_small(train: _Documents, val: _Documents, least: int) -> str:
    """Return a note if this split cannot be used; "" if both sides have at least `least` tokens."""
    tokens, val_tokens = (sum(document.tokens.size for document in side) for side in (train, val))
    if not val:
        return "no validation set: a single conversation or pair is not split; give --val-data"
    if tokens < least:
        return f"no validation set: it would leave {tokens} tokens for training, but a window needs {least}"
    if val_tokens < least:
        return (
            f"no validation set: it would have {val_tokens} tokens, but a window needs {least}; use a larger "
            "--val-fraction or a smaller --context"
        )
    return ""


def _digest(documents: Sequence[Document]) -> str:
    total = hashlib.sha256()
    for document in documents:
        name = os.fsencode(document.name)
        total.update(len(name).to_bytes(8, "little") + name + document.digest)
    return total.hexdigest()


def unigram_entropy(tokens: Ids) -> float:
    """Return the entropy, in nats per token, of `tokens` (1-D); NaN for no tokens. A model that predicts
    each token by its frequency alone has this loss, so a trained model has to reach a lower one.
    """
    counts = np.zeros(0, np.int64)
    for start in range(0, len(tokens), _BLOCK):
        fresh = np.bincount(tokens[start : start + _BLOCK], minlength=counts.size)
        fresh[: counts.size] += counts
        counts = fresh
    shares = counts[counts > 0] / len(tokens) if len(tokens) else np.array([np.nan])
    return 0.0 - float((shares * np.log(shares)).sum())
