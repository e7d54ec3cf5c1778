"""Formats of token files, and how each format is recognised. To add a format, add a row to `FORMATS`.

A format reads the header of a file and returns where the ids and documents are. The ids are read once for a
digest and stay in the file. A file larger than `WHOLE` is only sampled, so a run on terabytes starts as fast
as any other run.
"""

import hashlib
import os
import warnings
from collections.abc import Callable, Sequence
from io import FileIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.lib.format as npy
from numpy.typing import NDArray

from zero_mpi.data.conversations.formats import holds_conversations
from zero_mpi.data.conversations.row_sources import COLUMN, ArrowFile, pyarrow
from zero_mpi.data.documents import Document, FileSpan, TokenSpans
from zero_mpi.data.text_files import MANIFEST, NANOGPT, TOKENIZER
from zero_mpi.errors import JobError, UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import open_file, reason

WHOLE = 1 << 30  # bytes of the largest file that is read fully for its digest; this takes half a second
BLOCK = 1 << 20  # ids processed together
LLM_C_HEADER = 1024  # bytes: 256 numbers, of which three are used
LLM_C: dict[tuple[int, int], np.dtype[Any]] = {  # keyed by magic number and version
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}
MEGATRON = b"MMIDIDX\0\0"
MEGATRON_HEAD = len(MEGATRON) + 8 + 1 + 8 + 8
MEGATRON_TYPES = {code: np.dtype(name) for code, name in {3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()}
MEGATRON_MOST = (1 << 31) - 1  # maximum number of ids in a document, because its size is stored as int32
MEGATRON_NAMES = {1: "uint8", 2: "int8", 6: "float64", 7: "float32"}
ARROW_KINDS = ("int16", "int32", "int64", "uint16", "uint32")
# Columns, and the value that excludes a token from the loss.
MASKS = {"labels": -100, "assistant_masks": 0, "completion_mask": 0}
NPY_HEADERS = {  # keyed by the format's version; version 3.0 is 2.0 with field names in UTF-8
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
    (3, 0): npy.read_array_header_2_0,
}


class TokenLayout(NamedTuple):
    """Positions of the ids in a file."""

    runs: list[tuple[int, int]]  # (first byte, number of ids) of each run of ids, in order
    dtype: np.dtype[Any]  # dtype of an id, little-endian
    ends: NDArray[np.int64] | None = None  # (D,) where each document ends; None if unknown


def exactly(file: FileIO, count: int) -> bytes:
    """Return the next `count` bytes of a file. Raise ValueError if fewer follow."""
    raw = file.read(count)
    if len(raw or b"") != count:
        raise ValueError(f"expected {count} more bytes, found the end of the file")
    return raw


def check_length(file: FileIO, expected: int) -> None:
    """Raise ValueError for a file whose length differs from `expected`, the length that its header gives."""
    size = os.fstat(file.fileno()).st_size
    if size != expected:
        raise ValueError(f"expected {expected} bytes, as its header says, found {size}")


def is_llm_c(path: Path) -> bool:
    """Return whether a file begins with the magic number of llm.c's token files."""
    try:
        with path.open("rb") as file:
            return int.from_bytes(file.read(4), "little") in {magic for magic, _ in LLM_C}
    except OSError:  # reading the file reports this error later
        return False


def llm_c_layout(path: Path, file: FileIO) -> TokenLayout:
    """Return the layout of a token file of llm.c. Raise ValueError for any other file."""
    magic, version, count = np.frombuffer(exactly(file, LLM_C_HEADER), "<i4", 3).tolist()
    dtype = LLM_C.get((magic, version))
    if dtype is None or count < 0:
        formats = " or ".join(f"{magic} version {version}" for magic, version in LLM_C)
        raise ValueError(f"expected llm.c's {formats}, found {magic} version {version} with {count} ids")
    check_length(file, LLM_C_HEADER + count * dtype.itemsize)
    return TokenLayout([(LLM_C_HEADER, count)], dtype)


def nanogpt_layout(path: Path, file: FileIO) -> TokenLayout:
    """Return the layout of a file that has only uint16 ids. Raise ValueError for an odd number of bytes."""
    length = os.fstat(file.fileno()).st_size
    if length % 2:
        raise ValueError(f"expected ids of two bytes each, found {length} bytes")
    return TokenLayout([(0, length // 2)], np.dtype("<u2"))


def megatron_layout(path: Path, file: FileIO) -> TokenLayout:
    """Return the layout that Megatron's index next to the file gives. Raise ValueError if they disagree."""
    with open_file(path.with_suffix(".idx"), "an index of Megatron") as index:
        head = exactly(index, MEGATRON_HEAD)
        version, code = int.from_bytes(head[9:17], "little"), head[17]
        sequences, documents = (int.from_bytes(head[at : at + 8], "little") for at in (18, 26))
        if head[:9] != MEGATRON or version != 1:
            raise ValueError(f"expected Megatron's index, version 1, found {head[:9]!r}, version {version}")
        dtype = MEGATRON_TYPES.get(code)
        if dtype is None:
            kind = MEGATRON_NAMES.get(code, f"type {code}")
            raise ValueError(f"expected ids of 2, 4 or 8 bytes, found {kind} in its index")
        check_length(index, MEGATRON_HEAD + 12 * sequences + 8 * documents)
        count = 0
        for first in range(0, sequences, BLOCK):  # block by block, because a sparse file may claim any number
            block = exactly(index, 4 * min(BLOCK, sequences - first))
            count += int(np.frombuffer(block, "<i4").sum(dtype=np.int64))
        check_length(file, count * dtype.itemsize)
        if max(sequences, documents) > count + BLOCK:
            raise ValueError(
                f"expected at most about {count} sequences and documents in its index, one per id, "
                f"found {sequences} and {documents}"
            )
        index.seek(MEGATRON_HEAD)
        sizes = np.frombuffer(exactly(index, 4 * sequences), "<i4")
        places = np.frombuffer(exactly(index, 8 * sequences), "<i8")
        borders = np.frombuffer(exactly(index, 8 * documents), "<i8")
    stops = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    if (sizes < 0).any() or not np.array_equal(places, stops[:-1] * dtype.itemsize):
        raise ValueError("expected consecutive sequences in its index, found gaps or overlaps")
    if not documents or borders[0] or borders[-1] != sequences or (np.diff(borders) < 0).any():
        raise ValueError(f"expected document borders from 0 to {sequences} in its index, found other borders")
    return TokenLayout([(0, count)], dtype, stops[borders[1:]])


def megatron_dtype(vocab: int) -> np.dtype[Any]:
    """Return the narrowest dtype that Megatron's readers know and that holds ids below `vocab`."""
    return MEGATRON_TYPES[8 if vocab <= 1 << 16 else 4]


def megatron_index(sizes: NDArray[np.int32], dtype: np.dtype[Any]) -> bytes:
    """Return the index of a file whose documents have these sizes (D,). Each document is one sequence."""
    code = next(code for code, kind in MEGATRON_TYPES.items() if kind == dtype)
    count, places = len(sizes), (np.cumsum(sizes, dtype=np.int64) - sizes) * dtype.itemsize
    head = MEGATRON + (1).to_bytes(8, "little") + bytes([code])
    head += np.array([count, count + 1], "<u8").tobytes()
    borders = np.arange(count + 1, dtype="<i8")
    return head + sizes.astype("<i4").tobytes() + places.astype("<i8").tobytes() + borders.tobytes()


def npy_layout(path: Path, file: FileIO) -> TokenLayout:
    """Return the layout of a .npy file. Raise UsageError for other arrays, ValueError for other files."""
    try:
        with warnings.catch_warnings(action="ignore"):  # headers by Python 2 are valid but cause warnings
            shape, _, dtype = NPY_HEADERS[npy.read_magic(file)](file)
    except Exception as error:  # an invalid header may raise any exception
        problem = shown(str(error).partition("\n")[0] or type(error).__name__, 80)
        raise ValueError(f"expected the header of an array of numbers: {problem}") from None
    if dtype not in (np.dtype("<u2"), np.dtype("<u4")) or len(shape) != 1:
        problem = f"found {shown(dtype.name if dtype.isnative else dtype.str)} of shape {shown(shape)}"
        raise UsageError(f"{path}: expected a 1-D array of uint16 or uint32 ids, {problem}")
    check_length(file, file.tell() + shape[0] * dtype.itemsize)
    return TokenLayout([(file.tell(), shape[0])], dtype)


def arrow_layout(path: Path, file: FileIO) -> TokenLayout:
    """Return the layout of an Arrow file of the package datasets: one uncompressed list of ids in each row.

    Raises ValueError if no column holds ids that can be read by position.
    """
    library = pyarrow()
    runs, ends, kinds, total = list[tuple[int, int]](), [np.zeros(0, np.int64)], set[str](), 0
    try:
        with library.memory_map(str(path)) as mapped:
            batches = list(ArrowFile(library, mapped).batches)
            _check_masks(library, batches[:1])
            mapped.seek(0)
            base = mapped.read_buffer(mapped.size()).address
            for batch in batches:
                column = _ids_column(library, batch)
                kinds.add(str(column.type.value_type))
                offsets, values = column.offsets.to_numpy().astype(np.int64), column.values
                width = values.type.bit_width // 8
                start = values.buffers()[1].address - base + (values.offset + int(offsets[0])) * width
                count = int(offsets[-1] - offsets[0])
                if not 0 <= start <= mapped.size() - count * width:
                    raise ValueError("expected uncompressed buffers, found compressed ones")
                runs.append((start, count))
                ends.append(offsets[1:] - offsets[0] + total)
                total += count
    except library.lib.ArrowException as error:
        raise ValueError(shown(str(error), 200)) from None
    if len(kinds) != 1 or not kinds <= {*ARROW_KINDS}:
        types = ", ".join(sorted(kinds)) or "no rows"
        raise ValueError(f"expected ids of one type of {', '.join(ARROW_KINDS)}; found {types}")
    return TokenLayout(runs, np.dtype(kinds.pop()).newbyteorder("<"), np.concatenate(ends))


def _check_masks(library: Any, batches: list[Any]) -> None:
    """Raise ValueError if a column of these batches takes tokens out of the loss: all ids count here."""
    for batch, (name, value) in product(batches, MASKS.items()):
        column = batch.column(name) if name in batch.schema.names else None
        if column is not None and library.types.is_list(column.type):
            column.validate(full=True)
            if value in column.flatten().to_numpy(zero_copy_only=False):
                raise ValueError(f"expected ids that all count in the loss, found {value} in {name}")


def _ids_column(library: Any, batch: Any) -> Any:
    """Return the column of ids of a batch. Raise ValueError unless each row of it has a list of ids."""
    names = batch.schema.names
    if COLUMN not in names:
        raise ValueError(f"expected a column {COLUMN}, found {shown(', '.join(names), 100)}")
    column = batch.column(names.index(COLUMN))
    column.validate(full=True)  # opening the file did not check its content
    kind = column.type
    if not (library.types.is_list(kind) or library.types.is_large_list(kind)) or column.null_count:
        raise ValueError(f"expected a list of ids in each row of {COLUMN}, found {shown(str(kind), 60)}")
    if column.values.null_count:
        raise ValueError(f"expected an id at each position of {COLUMN}, found missing ids")
    return column


class TokenFormat(NamedTuple):
    """Format of token files."""

    matches: Callable[[str, Path], bool]  # whether a file has it, by its `collect_files` name and path
    layout: Callable[[Path, FileIO], TokenLayout]  # raises ValueError or UsageError for a damaged file


FORMATS = (
    TokenFormat(lambda name, path: name.startswith(NANOGPT), nanogpt_layout),
    TokenFormat(lambda name, path: path.suffix == ".npy", npy_layout),
    TokenFormat(
        lambda _, path: path.suffix == ".bin" and path.with_suffix(".idx").is_file(), megatron_layout
    ),
    TokenFormat(lambda name, path: path.suffix == ".bin" and is_llm_c(path), llm_c_layout),
    TokenFormat(lambda name, path: path.suffix == ".arrow" and not holds_conversations(path), arrow_layout),
)


def format_of(name: str, path: Path) -> TokenFormat | None:
    return next((row for row in FORMATS if row.matches(name, path)), None)


def token_files(files: Sequence[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Return the token files: either all files, except files that describe token files, or none.

    Raises UsageError if only some of the files are token files.
    """
    tokens = [file for file in files if format_of(*file) is not None]
    paths = {path for _, path in tokens}
    paths |= {path.with_suffix(".idx") for path in paths if path.suffix == ".bin"}
    texts = [path for _, path in files if path not in paths and path.name not in (MANIFEST, TOKENIZER)]
    if tokens and texts:
        raise UsageError(
            f"--data takes text or token files, not both: {tokens[0][1]} is one, {texts[0]} is not"
        )
    return tokens


def read_tokens(name: str, path: Path, vocab: int) -> Document:
    """Return a token file as one document, whose ids stay in the file. Raise UsageError if it is damaged.

    The digest is the sha256 of a file of at most `WHOLE` bytes. For a larger file it is
    `TokenSpans.sampled_digest`, and the ids between the samples are checked when they are read.
    """
    token_format = format_of(name, path)
    assert token_format is not None, "the caller has checked that it is a token file"
    try:
        with open_file(path, "a token file") as file:
            layout = token_format.layout(path, file)
            real, length = os.path.abspath(os.fsdecode(file.name)), os.fstat(file.fileno()).st_size
            runs = [FileSpan(real, start, count, layout.dtype, length) for start, count in layout.runs]
            spans = TokenSpans(runs, vocab)
            if length > WHOLE:
                digest = spans.sampled_digest()
            else:
                for first in range(0, spans.size, BLOCK):
                    spans[first : first + BLOCK].read_all()  # reading checks the ids
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").digest()
    except UsageError:
        raise
    except JobError as error:  # the job has not started yet, so this is a UsageError
        raise UsageError(str(error)) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path} as a token file: {reason(error)}") from error
    if layout.ends is None:
        return Document(name, spans, digest)
    ends = layout.ends[np.diff(layout.ends, prepend=0) > 0]
    return Document(name, spans, hashlib.sha256(digest + ends.tobytes()).digest(), ends=ends)
