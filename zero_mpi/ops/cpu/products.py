"""Chooses the matmul backend: oneDNN where it is faster, else BLAS, else float32 copies or the reference.

oneDNN computes products of bfloat16, and those of float32 on processors with units for bfloat16, except small
ones, which BLAS finishes before oneDNN has begun. If these units multiply tiles (AMX), oneDNN is faster in
float32 only if the second matrix is transposed, as in a forward; for some other shapes it takes three times
as long (docs/benchmarks.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding
from numba import config

from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.cpu import onednn
from zero_mpi.ops.cpu.blas import times
from zero_mpi.ops.cpu.jit import BFLOAT16, single
from zero_mpi.ops.cpu.onednn import OneDNN
from zero_mpi.ops.low_precision import on_copies
from zero_mpi.ops.threads import EVEN_ROWS, equal_parts, piece, shared

LEAST = 1 << 22  # multiplications of float32: below that BLAS takes less time than a call of the library
AT_A_TIME = 3 << 20  # bytes of a transposed matrix: the library copies it, and the copy must stay in cache
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # Linux on x86-64: arch_prctl and its arguments


def is_transposed(x: Array) -> bool:
    """Return whether matrices are column-major."""
    return bool(x.strides[-1] != x.itemsize)


def product_of(*arrays: Array | None) -> Callable[..., Array] | None:
    """Return the function that multiplies these, with the signature of `blas.times`, or None."""
    given = [array for array in arrays if array is not None]
    library = onednn.load()[0]
    if single(*given):
        return times if library is None else of_single(library)
    low = all(x.dtype == BFLOAT16 and x.size for x in given)
    return of_low(library) if low and library is not None else None


def multiplier(*arrays: Array | None) -> Callable[..., Array] | None:
    """Return `product_of` these, computed on all threads."""
    product = product_of(*arrays)
    return None if product is None else shared(product)


@cache
def of_single(library: OneDNN) -> Callable[..., Array]:
    """Return a product of float32 like `blas.times` that uses the faster library."""

    def multiply(a: Array, b: Array, c: Array, *, adds: bool = False) -> Array:
        small = c.size * a.shape[-1] < LEAST
        if small or (library.has_tiles and not is_transposed(b)):
            return times(a, b, c, adds=adds)
        return library.multiply(a, b, c, adds=adds)

    return multiply


def is_prepared(a: Array, b: Array) -> bool:
    """Return whether the product a b is computed by oneDNN, which prepares each shape, if not small."""
    library = onednn.load()[0]
    if a.dtype == BFLOAT16 or library is None:
        return library is not None
    return is_transposed(b) or not library.has_tiles


def load() -> None:
    """Load the library that multiplies bfloat16, and compile our own kernels for it."""
    library = onednn.load()[0]
    if library is not None and library.has_tiles:
        by_tiles()


@cache
def of_low(library: OneDNN) -> Callable[..., Array]:
    """Return a product of bfloat16: many small matrices by tile units if there are any, else the library's.

    A large transposed a is multiplied in runs of its rows.
    """
    of_many = by_tiles() if library.has_tiles else None

    def multiply(a: Array, b: Array, c: Array, **more: Any) -> Array:
        if c.ndim > 2 and of_many is not None:
            return of_many(a, b, c, **more)
        if c.ndim > 2 or a.nbytes <= AT_A_TIME or not is_transposed(a):
            return library.multiply(a, b, c, **more)
        for part in equal_parts(a.shape[0], -(-a.nbytes // AT_A_TIME), EVEN_ROWS):
            library.multiply(**piece(part, 0, a=a, b=b, c=c, **more))
        return c

    return multiply


@cache
def by_tiles() -> Callable[..., Array] | None:
    """Return `amx.multiply` if it can be compiled and the system permits tiles, else None."""
    features = config.CPU_FEATURES or llvmlite.binding.get_host_cpu_features().flatten()
    permission = ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)
    if permission or not {"+amx-tile", "+amx-bf16"} <= set(features.split(",")):
        return None
    from zero_mpi.ops.cpu import amx

    return amx.multiply


def otherwise(operation: Callable[..., Any], *given: Any) -> Any:
    """Compute an operation without a product of its type: bfloat16 on float32 copies, else by reference."""
    if given[0].dtype == BFLOAT16:
        return on_copies(operation, *given)
    return getattr(reference, operation.__name__)(*given)
