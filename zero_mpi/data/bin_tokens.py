"""Ids as other programs write them into .bin files: llm.c, nanoGPT, and Megatron with its .idx beside it.

Formats: llm.c's `dataloader.h` and `dev/data/data_common.py`; nanoGPT's `data/*/prepare.py`, which writes no
header, so only the user can say that a file is one; Megatron-LM's `indexed_dataset.py`.
"""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data.token_file import BLOCK, TokenLayout, blocks, check_length, exactly
from zero_mpi.files.open import open_file

LLM_C_HEADER = 1024  # bytes: 256 numbers, of which three are used
LLM_C: dict[tuple[int, int], np.dtype[Any]] = {  # by magic number and version
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}
MEGATRON = b"MMIDIDX\0\0"
MEGATRON_HEAD = len(MEGATRON) + 8 + 1 + 8 + 8
MEGATRON_TYPES = {code: np.dtype(name) for code, name in {3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()}
MEGATRON_MOST = (1 << 31) - 1  # ids of a document: its size is an int32
MEGATRON_NAMES = {1: "uint8", 2: "int8", 6: "float64", 7: "float32"}


def is_llm_c(path: Path) -> bool:
    """Whether a file begins as llm.c's token files do."""
    try:
        with path.open("rb") as file:
            return int.from_bytes(file.read(4), "little") in {magic for magic, _ in LLM_C}
    except OSError:  # said where it is read
        return False


def llm_c_layout(path: Path, file: FileIO) -> TokenLayout:
    """Where llm.c's files have their ids; ValueError for what is none."""
    magic, version, count = np.frombuffer(exactly(file, LLM_C_HEADER), "<i4", 3).tolist()
    dtype = LLM_C.get((magic, version))
    if dtype is None or count < 0:
        known = " or ".join(f"{magic} version {version}" for magic, version in LLM_C)
        raise ValueError(f"expected llm.c's {known}, found {magic} version {version} with {count} ids")
    check_length(file, LLM_C_HEADER + count * dtype.itemsize)
    return TokenLayout([(LLM_C_HEADER, count)], dtype)


def nanogpt_layout(path: Path, file: FileIO) -> TokenLayout:
    """All of the file as uint16; ValueError for an odd number of bytes."""
    length = os.fstat(file.fileno()).st_size
    if length % 2:
        raise ValueError(f"expected ids of two bytes each, found {length} bytes")
    return TokenLayout([(0, length // 2)], np.dtype("<u2"))


def is_megatron(path: Path) -> bool:
    """Whether an index lies beside the file."""
    return path.with_suffix(".idx").is_file()


def megatron_layout(path: Path, file: FileIO) -> TokenLayout:
    """Where the ids are by the index beside the file; ValueError for one that does not fit it."""
    with open_file(path.with_suffix(".idx"), "an index of Megatron") as index:
        head = exactly(index, MEGATRON_HEAD)
        version, code = int.from_bytes(head[9:17], "little"), head[17]
        sequences, documents = (int.from_bytes(head[at : at + 8], "little") for at in (18, 26))
        if head[:9] != MEGATRON or version != 1:
            raise ValueError(f"expected Megatron's index, version 1, found {head[:9]!r}, version {version}")
        dtype = MEGATRON_TYPES.get(code)
        if dtype is None:
            found = MEGATRON_NAMES.get(code, f"type {code}")
            raise ValueError(f"expected ids of 2, 4 or 8 bytes, found {found} in its index")
        check_length(index, MEGATRON_HEAD + 12 * sequences + 8 * documents)
        count = sum(int(sizes.sum(dtype=np.int64)) for sizes in blocks(index, sequences, np.dtype("<i4")))
        check_length(file, count * dtype.itemsize)
        if max(sequences, documents) > count + BLOCK:  # of a sparse file, which may tell of any number
            raise ValueError(
                f"expected about as many sequences as ids in its index, {count}, found {sequences}"
            )
        index.seek(MEGATRON_HEAD)
        sizes = np.frombuffer(exactly(index, 4 * sequences), "<i4")
        places = np.frombuffer(exactly(index, 8 * sequences), "<i8")
        borders = np.frombuffer(exactly(index, 8 * documents), "<i8")
    stops = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    if (sizes < 0).any() or not np.array_equal(places, stops[:-1] * dtype.itemsize):
        raise ValueError("expected sequences one behind the other in its index, found others")
    if not documents or borders[0] or borders[-1] != sequences or (np.diff(borders) < 0).any():
        raise ValueError(f"expected borders of documents from 0 to {sequences} in its index, found others")
    return TokenLayout([(0, count)], dtype, stops[borders[1:]])


def megatron_dtype(vocab: int) -> np.dtype[Any]:
    """The type of ids below `vocab` in a file of Megatron's; the narrowest that its readers know."""
    return MEGATRON_TYPES[8 if vocab <= 1 << 16 else 4]


def megatron_index(sizes: NDArray[np.int32], dtype: np.dtype[Any]) -> bytes:
    """The index of a file of documents of these sizes (D,), one behind the other, each a sequence."""
    code = next(code for code, known in MEGATRON_TYPES.items() if known == dtype)
    count = len(sizes)
    ends = np.cumsum(sizes, dtype=np.int64)
    places = (ends - sizes) * dtype.itemsize
    counts = np.array([count, count + 1], "<u8")
    head = MEGATRON + (1).to_bytes(8, "little") + bytes([code]) + counts.tobytes()
    borders = np.arange(count + 1, dtype="<i8")
    return head + sizes.astype("<i4").tobytes() + places.astype("<i8").tobytes() + borders.tobytes()
