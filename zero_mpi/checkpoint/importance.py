"""Importance matrices in llama.cpp's format: for each matrix, the mean square of its inputs per column.

For each matrix NAME, a GGUF of type `imatrix` holds NAME.in_sum2 (M, in), the sums of the squares of its
inputs over tokens, and NAME.counts (M, 1), the number of tokens. M is the number of experts, or 1.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from zero_mpi.checkpoint.gguf.header import pack_file
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.tensor_file import Floats
from zero_mpi.errors import FileError, writing
from zero_mpi.files.atomic import replacing, write_to_disk
from zero_mpi.files.foreign import show
from zero_mpi.files.gguf_keys import GGUFKeys

ENDS = SUMS, COUNTS = ".in_sum2", ".counts"


def read_importance(path: str | os.PathLike[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Floats]:
    """Return the mean square of each input column, (M, in), for the model's matrices that the file has.

    shapes: name -> shape of the model's tensors. An expert that no token used gets ones. Raises FileError for
    another kind of file, for wrong sizes, for numbers that are not finite, or if no matrix is found.
    """
    file = GGUFFile.open(path)
    if (kind := GGUFKeys(file.metadata, str(file.path)).text("general.type")) != "imatrix":
        label = show(kind or "a model")
        raise FileError(f"{path}: expected an importance matrix in GGUF, found {label}")
    means: dict[str, Floats] = {}
    names = [name.removesuffix(SUMS) for name in file.tensors if name.endswith(SUMS)]
    for name in filter(shapes.__contains__, names):
        shape, spec = shapes[name], file.tensors[name + SUMS]
        matrices, columns = (shape[0] if len(shape) > 2 else 1), shape[-1]
        if spec.size != matrices * columns or spec.shape[-1] != columns:
            expected = f"expected ({matrices}, {columns}) numbers, found {spec.shape}"
            raise FileError(f"{file.path}: {name + SUMS}: {expected}")
        sums, counts = file.tensor(name + SUMS).reshape(matrices, columns), file.read(name + COUNTS)[:, None]
        if len(counts) != matrices or not np.isfinite(sums).all() or not np.isfinite(counts).all():
            raise FileError(f"{file.path}: {name}: expected finite sums and {matrices} counts")
        with np.errstate(all="ignore"):
            means[name] = np.where(counts > 0, sums / counts, np.float32(1))
    if not means:
        raise FileError(f"{path}: expected importance values of this model's matrices, found none")
    return means


def write_importance(
    path: Path, totals: Mapping[str, tuple[Floats, Floats]], texts: list[str], chunks: int, context: int
) -> None:
    """Write the sums (M, in) and counts (M, 1) of each matrix over `chunks` windows of `context` tokens."""
    tensors = {name + end: x for name, pair in totals.items() for end, x in zip(ENDS, pair, strict=True)}
    keys = {"general.type": "imatrix", "imatrix.datasets": texts, "imatrix.chunk_count": np.uint32(chunks)}
    keys["imatrix.chunk_size"] = np.uint32(context)
    header, offsets, total = pack_file("imatrix", keys, [(name, x.shape) for name, x in tensors.items()])
    with writing(), replacing(path) as place:
        content = bytearray(total)
        content[: len(header)] = header
        for name, x in tensors.items():
            content[offsets[name] : offsets[name] + x.nbytes] = x.tobytes()
        write_to_disk(place, bytes(content))
