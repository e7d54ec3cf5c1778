"""Quantization and dequantization by the library ggml, called through ctypes, for the types it supports.

The extra `ggml` installs the library; ZERO_MPI_GGML may name another libggml-base.so.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from zero_mpi.errors import UsageError
from zero_mpi.ops.block_kinds import CHUNK

VARIABLE, PACKAGE, FILE = "ZERO_MPI_GGML", "libggml", "lib64/libggml-base.so"
SIZE, POINTER = ctypes.c_size_t, ctypes.c_void_p
CALLS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_row_size": (SIZE, [ctypes.c_int, ctypes.c_int64]),
    "ggml_quantize_requires_imatrix": (ctypes.c_bool, [ctypes.c_int]),
    "ggml_quantize_chunk": (SIZE, [ctypes.c_int, POINTER, POINTER, *[ctypes.c_int64] * 3, POINTER]),
    "ggml_validate_row_data": (ctypes.c_bool, [ctypes.c_int, POINTER, SIZE]),
}


@cache
def library(user: str) -> Any:
    """Load and return the library. If there is none, raise UsageError with a text that begins with `user`."""
    path = os.environ.get(VARIABLE)
    remedy = f"pip install 'zero-mpi[ggml]', or set {VARIABLE} to the path of a libggml-base.so"
    if not path:
        package = find_spec(PACKAGE)
        if package is None or not package.submodule_search_locations:
            raise UsageError(f"{user} needs the quantizers of ggml: {remedy}")
        path = str(Path(package.submodule_search_locations[0]) / FILE)
    try:
        handle = ctypes.CDLL(path)
        for name, (result, arguments) in CALLS.items():
            call = getattr(handle, name)
            call.restype, call.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise UsageError(f"{user}: {path} is not a ggml library ({error}): {remedy}") from None
    return handle


@cache
def reader(kind: str) -> Any:
    """Return the library's function that dequantizes a type, or None if library or function is missing."""
    try:
        call = getattr(library("reading blocks"), f"dequantize_row_{kind.lower().replace('_k', '_K')}", None)
    except UsageError:
        return None
    if call is not None:
        call.restype, call.argtypes = None, [POINTER, POINTER, ctypes.c_int64]
    return call


def dequantize(raw: NDArray[np.uint8], kind: str, out: NDArray[Any]) -> bool:
    """Unpack full blocks into out (n,). Return False if `reader` has no function for the type.

    Float32 elements are bit-identical to those of the package gguf; other types are rounded from float32.
    """
    call, (block, nbytes) = reader(kind), GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if call is None:
        return False
    for start in range(0, out.size, CHUNK):
        part = out[start : start + CHUNK]
        values = part if part.dtype == np.float32 else np.empty(part.size, np.float32)
        call(raw[start // block * nbytes :].ctypes.data, values.ctypes.data, part.size)
        if values is not part:
            with np.errstate(all="ignore"):
                part[:] = values
    return True


def quantize(
    rows: NDArray[np.float32], kind: GGMLQuantizationType, importance: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Return rows (n, width) as blocks (n, bytes) of a type; importance (width,): a weight for each column.

    Raise OverflowError for numbers that the type cannot represent.
    """
    ggml, (count, width) = library(kind.name), rows.shape
    block, nbytes = GGML_QUANT_SIZES[kind]
    expected = width // block * nbytes
    if width % block or ggml.ggml_row_size(int(kind), width) != expected:  # the library would abort
        raise ValueError(f"rows of {width} elements: expected a multiple of {block} for {kind.name}")
    if importance is None and ggml.ggml_quantize_requires_imatrix(int(kind)):
        raise ValueError(f"{kind.name}: expected an importance matrix")
    importance = None if importance is None else np.ascontiguousarray(importance, np.float32)
    assert importance is None or importance.shape == (width,), "expected one importance per column"
    rows, out = np.ascontiguousarray(rows, np.float32), np.empty((count, expected), np.uint8)
    weights = None if importance is None else importance.ctypes.data
    ggml.ggml_quantize_chunk(int(kind), rows.ctypes.data, out.ctypes.data, 0, count, width, weights)
    if not ggml.ggml_validate_row_data(int(kind), out.ctypes.data, out.nbytes):
        raise OverflowError(f"a number is too large for {kind.name}")
    return out
