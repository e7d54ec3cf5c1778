"""Table of GPU kernels with their parameters, and functions that launch them.

A module of operations declares the kernels that it calls, with their source and the kinds of their
parameters. All kernels are in `TABLE`, which a test compares with the sources. All kernels of a source are
compiled together, and CuPy caches them for later processes. A call passes one tuple of arrays (0 for None)
and numbers: lengths as Python integers (64 bits in the kernel), float32 as `f4`, float64 as Python floats.
"""

from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import cupy
import ml_dtypes
import numpy as np

from zero_mpi import device
from zero_mpi.device.arrays import pool_of
from zero_mpi.device.types import Array
from zero_mpi.ops.sizes import PACK as PACK
from zero_mpi.ops.sizes import THREADS as THREADS

FOLDER = Path(__file__).resolve().parent / "kernels"
OPTIONS = ("-std=c++17",)
F32, BF16, F16 = (np.dtype(kind) for kind in (np.float32, ml_dtypes.bfloat16, np.float16))
F64 = np.dtype(np.float64)
TYPES = {F32: "f32", BF16: "bf16", F16: "f16"}  # suffixes of kernel names
f4 = np.float32
ARRAY = cupy.ndarray
PLANS = 4096  # maximum number of product plans and checked shapes in memory; a model needs a few dozen


class Kernel:
    """Kernel in a source file. `parameters`: P an array or 0, L a length (64 bits), F float32, D float64."""

    __slots__ = ("_function", "name", "parameters", "source")

    def __init__(self, source: str, name: str, parameters: str) -> None:
        self.source, self.name, self.parameters = source, name, parameters
        self._function: Any = None
        assert name not in TABLE, f"{name} is in the table already"
        TABLE[name] = self

    def bind(self) -> Any:
        """Return the kernel's function on the GPU. The first use of a source compiles or loads it."""
        with device.libraries():
            self._function = module(self.source).get_function(self.name).kernel  # later calls reuse it
        return self._function

    def __call__(self, blocks: int, threads: int, arguments: tuple[Any, ...]) -> None:
        """Start the kernel on the compute stream; do nothing if there are no blocks."""
        if blocks:
            function = self._function or self.bind()
            function((blocks,), (threads,), arguments, stream=device.in_use().stream)


TABLE: dict[str, Kernel] = {}  # all kernels, by name


class Family(dict[Any, Kernel]):
    """Kernels NAME_f32, NAME_bf16 and NAME_f16 of a source, by type. Raises ValueError for any other type."""

    def __init__(self, source: str, name: str, parameters: str) -> None:
        super().__init__((kind, Kernel(source, f"{name}_{end}", parameters)) for kind, end in TYPES.items())
        self.name = name

    def __missing__(self, kind: Any) -> Kernel:
        names = ", ".join(TYPES.values())
        raise ValueError(f"{self.name}: on a GPU expected arrays of one of {names}; got {kind}")


def by_pairs(source: str, name: str, parameters: str, pairs: Iterable[Any]) -> dict[Any, Kernel]:
    """Return the kernels NAME_X_Y for pairs of types, by pair (X, Y)."""
    return {(x, y): Kernel(source, f"{name}_{TYPES[x]}_{TYPES[y]}", parameters) for x, y in pairs}


def text(source: str) -> str:
    """Return the text to compile: common.cuh and the source. Compiler errors name lines of the source."""
    common, code = ((FOLDER / name).read_text() for name in ("common.cuh", source))
    return f'{common}#line 1 "{source}"\n{code}'


@lru_cache
def module(source: str) -> Any:
    """Return the module of a source file; CuPy compiles it when one of its functions is first used."""
    return cupy.RawModule(code=text(source), options=OPTIONS)


# ---------------------------------------------------------------------------------------- arrays of a call


@cache
def memory_of(gpu: Any) -> int:
    """Return the total memory of a GPU in bytes."""
    return int(gpu.cupy.cuda.runtime.getDeviceProperties(gpu.number)["totalGlobalMem"])


def take(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an uninitialised array in the GPU's recycled memory."""
    return pool_of(device.in_use()).take(shape, dtype)


def packed(x: Array) -> Array:
    """Return `x`, or a contiguous copy of it."""
    return x if x._c_contiguous else cupy.ascontiguousarray(x)  # faster than `flags`, which makes an object


def writable(operation: str, *arrays: Array | None) -> None:
    """Raise ValueError unless arrays that an operation writes in place are contiguous."""
    for x in arrays:
        if x is not None and not x._c_contiguous:
            raise ValueError(f"{operation}: on a GPU the output must be contiguous; pass such an array")


def at(x: Array | None) -> Any:
    """Return the kernel argument for an array, or 0 for None."""
    return 0 if x is None else x


@lru_cache(PLANS)
def row_step(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> int:
    """Return the stride of rows of (..., C) in elements; 0 unless rows are contiguous and evenly spaced."""
    if 0 in shape:
        return max(1, int(shape[-1]))
    if shape[-1] > 1 and strides[-1] != size:
        return 0
    step, rows = 0, 1
    for length, stride in zip(shape[-2::-1], strides[-2::-1], strict=True):
        if length != 1:
            step = step or stride
            if stride != step * rows:
                return 0
            rows *= length
    if not step:
        return max(1, shape[-1])
    return step // size if step % size == 0 and step >= shape[-1] * size else 0


def evenly_spaced(x: Array) -> Array:
    """Return x (..., C), or a copy, with contiguous rows that are equally far apart."""
    if x._c_contiguous or row_step(x.shape, x.strides, x.itemsize):
        return x
    copy = take(x.shape, x.dtype)
    copy[...] = x
    return copy


def by_rows(x: Array) -> tuple[Array, int, int, int]:
    """Return x (..., C) as a matrix: (x or a copy, rows, C, elements from a row to the next row)."""
    x, width = evenly_spaced(x), x.shape[-1]
    step = max(1, width) if x._c_contiguous else row_step(x.shape, x.strides, x.itemsize)
    return x, x.size // max(1, width), width, step


# ----------------------------------------------------------------------------------------- blocks and threads


def elements(x: Array) -> int:
    """Return the number of blocks for a flat array, with one pack per thread."""
    return int(-(-x.size * x.itemsize // (THREADS * PACK)))


def tiled(rows: int, width: int, pack: int) -> tuple[int, int]:
    """Return (blocks, threads) for a matrix, if each block computes one tile of a row."""
    packs = -(-width // pack)
    threads = min(THREADS, -(-packs // 32) * 32)
    return rows * -(-packs // threads), threads
