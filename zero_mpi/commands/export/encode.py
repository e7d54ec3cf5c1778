"""Conversion of tensors to another type, piece by piece: the type of each, and its bytes.

Matrices change, but vectors, norms and tables by position stay float32, and a matrix whose rows
do not fill blocks becomes F16. Embedding and head have 8 bits beside matrices of 4 or 5: every token passes
through them, and small models lose most there. llama.cpp's own program gives its head more bits as well
(Q6_K, or Q8_0 where rows do not fill its blocks); with `--pure` all matrices have one type, here as there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quantize
from gguf.constants import GGML_QUANT_SIZES

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.huggingface.folder import EMBEDDING, HEAD
from zero_mpi.checkpoint.tensor_file import TensorSpec
from zero_mpi.checkpoint.weights import WeightSource
from zero_mpi.errors import FileError
from zero_mpi.files.foreign import show

F32, F16, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0
FILE_TYPES = {  # types that can be written, and their numbers in the key general.file_type
    "f32": 0,
    "f16": 1,
    "bf16": 32,
    "q8_0": 7,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 8,
    "q5_1": 9,
}
COARSE = tuple(GGMLQuantizationType[name.upper()] for name in FILE_TYPES if name.startswith(("q4", "q5")))
ENDS = (EMBEDDING, HEAD)  # a tied model has only the first
KEPT = (
    "ffn_gate_inp",
    "position_embd",
    "token_types",
    "rope_freqs",
    "rope_factors_long",
    "rope_factors_short",
)
AT_ONCE = 1 << 18  # elements encoded at a time: a few MiB with all temporaries
COPIED = 1 << 20  # bytes copied at a time


def kind_of(spec: TensorSpec, wanted: GGMLQuantizationType, pure: bool = False) -> GGMLQuantizationType:
    """Return the type for a tensor of a model of type `wanted`; `pure`: every matrix gets it."""
    stem, _, last = spec.name.rpartition(".")
    part = stem.rpartition(".")[2]
    matrix = last == "weight" and sum(dim > 1 for dim in spec.shape[:-1]) > 0 and spec.shape[-1] > 0
    if not matrix or part.endswith("norm") or part in KEPT:
        return F32
    if spec.name in ENDS and wanted in COARSE and not pure:
        wanted = Q8_0
    block, _ = GGML_QUANT_SIZES[wanted]
    return wanted if spec.shape[-1] % block == 0 else F16


def encoded(source: WeightSource, spec: TensorSpec, kind: GGMLQuantizationType) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in a type, in pieces; the file's own bytes if it has that type already."""
    if isinstance(source, GGUFFile) and spec.type == kind:
        yield from source.raw_pieces(spec.name, COPIED)
        return
    pieces = (source.read(spec.name, at, min(spec.size, at + AT_ONCE)) for at in range(0, spec.size, AT_ONCE))
    yield from encoded_pieces(f"{source.path}: tensor {show(spec.name)}", pieces, kind)


def encoded_pieces(
    what: str, pieces: Iterable[npt.NDArray[np.float32]], kind: GGMLQuantizationType
) -> Iterator[memoryview]:
    """Yield flat pieces, of whole blocks, in a type. FileError for values not finite or too large for it."""
    for piece in pieces:
        if not np.isfinite(piece).all():
            raise FileError(f"{what}: expected finite numbers, found some that are not")
        for at in range(0, piece.size, AT_ONCE):
            try:
                with np.errstate(over="raise"):  # not infinity in the place of a large number
                    yield quantize(piece[None, at : at + AT_ONCE], kind).data
            except FloatingPointError:
                largest = f"{np.abs(piece).max():g}"
                raise FileError(
                    f"{what}: {largest} is more than {kind.name} can hold: take bf16 or f32"
                ) from None
