"""Matrix products and linear layers on CPUs: by oneDNN if it is faster, else by BLAS or the reference.

oneDNN computes products of bfloat16. On processors with bfloat16 units it also computes float32 products,
except small products, which BLAS finishes before oneDNN has begun. On processors with tile units (AMX),
oneDNN is faster in float32 only if the second matrix is transposed, as in forward; otherwise it takes up to
three times as long for some shapes (docs/benchmarks.md).
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import llvmlite.binding
import numpy as np
from numba import config

from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.cpu import onednn
from zero_mpi.ops.cpu.blas import by_row, by_rows, fitting, times
from zero_mpi.ops.cpu.jit import (
    BFLOAT16,
    FLOAT32,
    add_sums,
    adds_into,
    alike,
    flat,
    kernel,
    lanes_of,
    matrix,
    settle,
    single,
    sums_for,
    wide,
)
from zero_mpi.ops.cpu.onednn import OneDNN
from zero_mpi.ops.flat_reference import LANES
from zero_mpi.ops.low_precision import accept_low
from zero_mpi.ops.reference import rows
from zero_mpi.ops.registry import definitions, implements
from zero_mpi.ops.threads import EVEN_ROWS, cut_product, equal_parts, in_parts, shared, with_sums

T = TypeVar("T")

LEAST = 1 << 22  # multiplications: BLAS computes smaller float32 products before oneDNN has begun
AT_A_TIME = 3 << 20  # maximum bytes of a transposed matrix in a call: oneDNN's copy must fit in cache
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # system call arch_prctl and its arguments


def is_transposed(x: Array) -> bool:
    return bool(x.strides[-1] != x.itemsize)


def product_of(*arrays: Array | None) -> Callable[..., Array] | None:
    """Return a function like `blas.times` for arrays of these types, or None if no library supports them."""
    operands = [array for array in arrays if array is not None]
    library = onednn.load()[0]
    if single(*operands):
        return times if library is None else of_single(library)
    low = all(x.dtype == BFLOAT16 and x.size for x in operands)
    return of_low(library) if low and library is not None else None


def multiplier(*arrays: Array | None) -> Callable[..., Array] | None:
    """Return the function of `product_of` with its work divided among all threads, or None."""
    product = product_of(*arrays)
    return None if product is None else shared(product)


@cache
def of_single(library: OneDNN) -> Callable[..., Array]:
    """Return a float32 version of `blas.times` that calls the faster of oneDNN and BLAS."""

    def multiply(a: Array, b: Array, c: Array, *, adds: bool = False) -> Array:
        small = c.size * a.shape[-1] < LEAST
        if small or (library.has_tiles and not is_transposed(b)):
            return times(a, b, c, adds=adds)
        return library.multiply(a, b, c, adds=adds)

    return multiply


def is_prepared(a: Array, b: Array) -> bool:
    """Return whether oneDNN prepares such products; True also for small float32 ones, left to BLAS."""
    library = onednn.load()[0]
    if a.dtype == BFLOAT16 or library is None:
        return library is not None
    return is_transposed(b) or not library.has_tiles


def load() -> None:
    """Load oneDNN and, if the processor has tile units, import our kernels for them."""
    library = onednn.load()[0]
    if library is not None and library.has_tiles:
        by_tiles()


@cache
def of_low(library: OneDNN) -> Callable[..., Array]:
    """Return a bfloat16 product: our tile kernels for many small matrices if possible, else oneDNN.

    If a is large and transposed, its rows are multiplied in parts.
    """
    of_many = by_tiles() if library.has_tiles else None

    def multiply(a: Array, b: Array, c: Array, **options: Any) -> Array:
        if c.ndim > 2 and of_many is not None:
            return of_many(a, b, c, **options)
        if c.ndim > 2 or a.nbytes <= AT_A_TIME or not is_transposed(a):
            return library.multiply(a, b, c, **options)
        for part in equal_parts(a.shape[0], -(-a.nbytes // AT_A_TIME), EVEN_ROWS):
            library.multiply(**cut_product(part, 0, a=a, b=b, c=c, **options))
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


def otherwise(operation: Callable[..., T], *arguments: Any) -> T:
    """Compute an operation that no library supports, on float32 copies of bfloat16 or by the reference."""
    name, is_low = operation.__name__, arguments[0].dtype == BFLOAT16
    result: T = (accept_low(name, operation) if is_low else getattr(reference, name))(*arguments)
    return result


# -------------------------------------------------------------------------------------- the linear layer


@kernel("f1 f2+")
def add_row(b: Array, y: Array) -> None:
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] += b[j]


@kernel("f1 f2 f2+")
def add_row_and(b: Array, plus: Array, y: Array) -> None:
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] = (y[i, j] + b[j]) + plus[i, j]


@kernel("e2 f1+")
def add_columns(x: Array, out: Array) -> None:
    """Add to out (O,) the sum of x (N, O) over its rows, in the order of `flat_reference.column_sums`."""
    n, width = x.shape
    lanes = lanes_of(width)
    for i in range(n):
        lane, row = lanes[i % LANES], x[i]
        for j in range(width):
            lane[j] += wide(row[j])
        settle(lanes, i, n)
    out += lanes[LANES]


@implements(reference.linear)
def linear(x: Array, w: Array, b: Array | None = None, plus: Array | None = None) -> Array:
    multiplies = multiplier(x, w, b, plus)
    if multiplies is None:
        return otherwise(linear, x, w, b, plus)
    y = recycled((*x.shape[:-1], w.shape[0]), x.dtype)
    a, out = fitting(rows(x)), rows(y)
    if x.dtype == BFLOAT16:
        bias = None if b is None else np.ascontiguousarray(b)
        multiplies(a, fitting(w).T, out, bias=bias, plus=None if plus is None else by_row(rows(plus)))
        return y
    multiplies(a, fitting(w).T, out)
    if b is None:
        return y if plus is None else np.add(y, plus, out=y)
    bias = flat(b)
    if plus is None:
        in_parts(out.shape, lambda part: add_row(bias, out[part]))
    else:
        addend = matrix(plus)
        in_parts(out.shape, lambda part: add_row_and(bias, addend[part], out[part]))
    return y


@implements(reference.linear_backward_x)
def linear_backward_x(dy: Array, w: Array, into: Array | None = None) -> Array:
    multiplies = multiplier(dy, w, into) if into is None or into.flags.c_contiguous else None
    if multiplies is None:
        return otherwise(linear_backward_x, dy, w, into)
    dx = recycled((*dy.shape[:-1], w.shape[1]), dy.dtype) if into is None else into
    multiplies(fitting(rows(dy)), fitting(w), rows(dx), adds=into is not None)
    return dx


@implements(reference.linear_backward_w)
def linear_backward_w(dy: Array, x: Array, dw: Array) -> None:
    multiplies = multiplier(dy, x) if dw.dtype in (dy.dtype, FLOAT32) and by_rows(dw) else None
    if multiplies is None:
        otherwise(linear_backward_w, dy, x, dw)
    else:
        multiplies(fitting(rows(dy)).T, fitting(rows(x)), dw, adds=True)


@implements(reference.linear_backward_b)
def linear_backward_b(dy: Array, db: Array) -> None:
    if not alike(dy) or not adds_into(db):
        definitions.linear_backward_b(dy, db)
        return
    columns, sums = matrix(dy), sums_for(db, db)
    with_sums(columns.shape, lambda part, total: add_columns(columns[part], total), sums)
    add_sums(sums, db)
