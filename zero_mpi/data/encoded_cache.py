"""Cache of encoded texts: the ids are in a folder whose name is a digest of everything that determines them.

Encoding gigabytes takes minutes, and a requeued job would repeat it at each start. Ids in a file also need no
memory on the ranks. So if texts have at least `LEAST` bytes, their ids are written once. The digest covers
the texts, the settings and this package's code. An entry that was not used for `MOST_DAYS` is removed when
another entry is made. ZERO_MPI_CACHE names the folder of all entries. The texts of a small corpus, and all
texts if no folder can be written, are encoded into memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data.documents import Document, FileSpan, Remark, TokenSpans
from zero_mpi.data.text_files import unreadable
from zero_mpi.errors import UsageError
from zero_mpi.files.atomic import write_whole
from zero_mpi.files.open import READ_AT_ONCE, open_file, read_file, refusing
from zero_mpi.files.parse import parse_json

LEAST = 4 << 20  # smallest number of bytes of text to cache; encoding less takes about a second
MOST_DAYS = 30  # days since the last use of an entry
MOST_ABOUT, MOST_VALUES = 1 << 32, 1 << 30  # limits on the file ABOUT: its bytes, its values
IDS, COUNTED, ABOUT = "ids.bin", "counted.bin", "about.json"
DIGEST = "digest"  # key of a table that holds the digest of all other keys
NEW = "new-"  # prefix of an unfinished entry; if a killed job left one, it is removed after a day
PLACES = {"ZERO_MPI_CACHE": "", "XDG_CACHE_HOME": "zero_mpi/encoded", "HOME": ".cache/zero_mpi/encoded"}
Files = Sequence[tuple[str, Path]]
Reading = tuple[list[Document], list[str]]
"""Documents, and notes for the user."""
Beat = Callable[[], object]  # called repeatedly during long work, to show that the job is alive
Pieces = Sequence[Any]  # texts, or arrays (n,) of their characters
Rows = list[NDArray[np.integer[Any]]]
Encode = Callable[[list[str]], Iterator[Document]]
"""Encodes the documents, then appends notes for the user to the list."""


class Batches:
    """Runner of encode functions on batches of texts. The results are arrays of integers below 2**32.

    beat         function that is called before each batch
    uses_cache   whether ids from an earlier encoding may be used
    folder       where results are kept for the next job, if this one is interrupted; None: they are not kept
    """

    def __init__(self, beat: Beat = lambda: None, uses_cache: bool = True) -> None:
        self.beat, self.uses_cache = beat, uses_cache
        self.folder: Path | None = None

    def __call__(self, pieces: Pieces, encode: Callable[[Pieces], Rows]) -> Rows:
        """Return encode(pieces), from a file of an earlier job if possible. The file begins with a sha256."""
        self.beat()
        if self.folder is None:
            return encode(pieces)
        total, content = hashlib.sha256(encode.__name__.encode()), b""
        for piece in pieces:
            raw = piece.encode() if isinstance(piece, str) else piece.tobytes()
            total.update(len(raw).to_bytes(8) + raw)
        path = self.folder / total.hexdigest()
        with suppress(OSError):
            content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() != content[:32]:
            rows = encode(pieces)
            numbers = np.concatenate([[len(rows)], [*map(len, rows)], *rows]).astype("<u4").tobytes()
            content = hashlib.sha256(numbers).digest() + numbers
            with suppress(OSError):  # without the file, another job encodes again
                write_whole(path, content)
        integers = np.frombuffer(content, "<u4", offset=32)
        return np.split(integers[1 + integers[0] :], np.cumsum(integers[1 : integers[0]]))


def read_documents(
    files: Files, settings: Mapping[str, object], vocab: int, encode: Encode, batches: Batches
) -> Reading:
    """Return the documents of files, and notes. Cached ids are used; ids of a large corpus are cached.

    settings   all settings that determine the ids; the texts determine them too
    batches    runs `encode` on batches of the texts

    Raises UsageError for files that cannot be read, or that change while they are read.
    """
    base, reading = folder(), None
    try:
        is_large = sum(path.stat().st_size for _, path in files) >= LEAST
    except OSError as error:
        unreadable(error)
    if base is not None and batches.uses_cache and is_large:
        entry = base / name_of(files, settings, batches.beat)
        reading = load_entry(entry, vocab, batches.beat)
        if reading is None:
            shutil.rmtree(entry, ignore_errors=True)  # removes a damaged entry
            with suppress(OSError):  # disk full, or no permission
                make(entry, encode, batches)
                if entry.name != name_of(files, settings, batches.beat):
                    shutil.rmtree(entry, ignore_errors=True)
                    raise UsageError("--data changed while it was read: start again")
                reading = load_entry(entry, vocab, batches.beat)
    if reading is not None:
        return reading
    notes = list[str]()
    return list(encode(notes)), notes


def folder() -> Path | None:
    """Return the folder of all entries; None if no variable in `PLACES` names one."""
    paths = (Path(os.environ[name], suffix) for name, suffix in PLACES.items() if os.environ.get(name))
    return next(paths, None)


def name_of(files: Files, settings: Mapping[str, object], beat: Beat) -> str:
    """Return the name of an entry; this reads all texts, at about one GB per second."""
    total = hashlib.sha256(code().encode())
    for name, value in sorted(settings.items()):
        total.update(f"{name} = ".encode())
        total.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    for name, path in files:
        with refusing("--data", path, "cannot be read"):
            total.update(f"{name!r} {digest_of(path, beat)}".encode())
    return total.hexdigest()[:32]


def digest_of(path: Path, beat: Beat) -> str:
    """Return the sha256 of a regular file. Raise FileError for a pipe or another special file."""
    total = hashlib.sha256()
    with open_file(path) as file:
        while block := file.read(READ_AT_ONCE):
            total.update(block)
            beat()
    return total.hexdigest()


@cache
def code() -> str:
    """Return a digest of the code that encodes, because other versions of the code may give other ids."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def make(entry: Path, encode: Encode, batches: Batches) -> None:
    """Write an entry under a temporary name and rename it when it is complete. Raise OSError if that fails.

    Batches that were encoded before an interruption are kept for the next job.
    """
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in entry.parent.iterdir():  # removes entries that were not used for a long time
        stamp, days = (path / IDS, 1) if path.name.startswith(NEW) else (path, MOST_DAYS)
        with suppress(OSError):
            if stamp.stat().st_mtime < time.time() - days * 86400:
                shutil.rmtree(path, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(dir=entry.parent, prefix=NEW))
    batches.folder = results = entry.with_suffix(".batches")
    try:
        results.mkdir(exist_ok=True)
        write(scratch, encode, batches.beat)
        with suppress(OSError):  # another job may have made the same entry in the meantime
            scratch.rename(entry)
        shutil.rmtree(results, ignore_errors=True)
    except Exception:
        shutil.rmtree(results, ignore_errors=True)
        raise
    finally:
        batches.folder = None
        shutil.rmtree(scratch, ignore_errors=True)


def write(scratch: Path, encode: Encode, beat: Beat) -> None:
    """Write ids and facts document by document, without holding all of them in memory."""
    notes, documents = list[str](), list[tuple[str, int, str, list[int] | None]]()
    kind: np.dtype[Any] = np.dtype(np.uint16)
    with (scratch / IDS).open("wb") as ids, (scratch / COUNTED).open("wb") as counted:
        for document in encode(notes):
            beat()
            assert isinstance(document.tokens, np.ndarray), "encoded ids are in memory"
            kind = document.tokens.dtype
            ids.write(np.ascontiguousarray(document.tokens).data)
            if document.counted is not None:
                counted.write(np.ascontiguousarray(document.counted).data)
            ends = None if document.ends is None else document.ends.tolist()
            documents.append((document.name, document.tokens.size, document.digest.hex(), ends))
    facts: dict[str, Any] = {"dtype": kind.str, "documents": documents}
    facts["notes"] = [(note, isinstance(note, Remark)) for note in notes]
    facts["sha256"] = {name: digest_of(scratch / name, beat) for name in (IDS, COUNTED)}
    (scratch / ABOUT).write_text(json.dumps(sealed(facts)))
    for name in (IDS, COUNTED, ABOUT):
        with (scratch / name).open("rb") as file:
            os.fsync(file)


def sealed(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table with a digest of its content, so that any later change is noticed."""
    text = json.dumps({name: value for name, value in table.items() if name != DIGEST})
    return {**table, DIGEST: hashlib.sha256(text.encode()).hexdigest()}


def load_entry(entry: Path, vocab: int, beat: Beat) -> Reading | None:
    """Return documents and notes of an entry; ids stay in its files. Return None if it is damaged.

    A file of the entry is used only if its digest is unchanged.
    """
    try:
        facts = parse_json(read_file(entry / ABOUT, MOST_ABOUT), most_values=MOST_VALUES)
        if not isinstance(facts, dict) or sealed(facts) != facts:
            return None
        kind, rows = np.dtype(facts["dtype"]), facts["documents"]
        if any(digest_of(entry / name, beat) != sha256 for name, sha256 in facts["sha256"].items()):
            return None
        total = sum(size for _, size, *_ in rows)
        ids = TokenSpans([FileSpan(str(entry / IDS), 0, total, kind, total * kind.itemsize)], vocab)
        counted = np.fromfile(entry / COUNTED, np.bool_)  # empty for text
        os.utime(entry)  # sets the time of the last use
    except (OSError, ValueError):
        return None
    documents, at = list[Document](), 0
    for name, size, digest, ends in rows:
        part = slice(at, at + size)
        at += size
        counts = counted[part] if counted.size else None
        borders = None if ends is None else np.array(ends, np.int64)
        documents.append(Document(name, ids[part], bytes.fromhex(digest), counts, borders))
    return documents, [Remark(note) if is_remark else note for note, is_remark in facts["notes"]]
