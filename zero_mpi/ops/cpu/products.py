"""What multiplies which matrices: oneDNN where it is the faster one, else BLAS, else nothing as they are.

Products of bfloat16 are oneDNN's. So are those of float32 on processors with units for bfloat16, but for
small ones, which BLAS has done before the library has begun. Where these units multiply whole tiles (AMX),
oneDNN is the faster one in float32 only when the second matrix is a transposed one, as in a forward; of the
others some shapes take it three times as long (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.cpu import onednn
from zero_mpi.ops.cpu.blas import times
from zero_mpi.ops.cpu.jit import BFLOAT16, single
from zero_mpi.ops.cpu.onednn import OneDNN
from zero_mpi.ops.low_precision import on_copies
from zero_mpi.ops.threads import EVEN_ROWS, equal_parts, piece, shared

LEAST = 1 << 22  # multiplications of float32: below, BLAS needs less time than it takes to call the library
AT_A_TIME = 3 << 20  # bytes of a transposed matrix: the library copies all of it, which shall stay in cache


def is_transposed(x: Array) -> bool:
    """Whether matrices lie by columns."""
    return bool(x.strides[-1] != x.itemsize)


def product_of(*arrays: Array | None) -> Callable[..., Array] | None:
    """What multiplies these: a function as `blas.times` is, or None if nothing does."""
    given = [array for array in arrays if array is not None]
    library = onednn.load()[0]
    if single(*given):
        return times if library is None else of_single(library)
    low = all(x.dtype == BFLOAT16 and x.size for x in given)
    return by_pieces(library.multiply) if low and library is not None else None


def multiplier(*arrays: Array | None) -> Callable[..., Array] | None:
    """`product_of` these, on all threads."""
    product = product_of(*arrays)
    return None if product is None else shared(product)


def of_single(library: OneDNN) -> Callable[..., Array]:
    """A product of float32 as `blas.times`, by whichever is faster."""

    def multiply(a: Array, b: Array, c: Array, *, adds: bool = False) -> Array:
        small = c.size * a.shape[-1] < LEAST
        if small or (library.has_tiles and not is_transposed(b)):
            return times(a, b, c, adds=adds)
        return library.multiply(a, b, c, adds=adds)

    return multiply


def by_pieces(product: Callable[..., Array]) -> Callable[..., Array]:
    """A product(a, b, c, ...) that takes a large transposed a by runs of its rows."""

    def multiply(a: Array, b: Array, c: Array, **more: Any) -> Array:
        if c.ndim > 2 or a.nbytes <= AT_A_TIME or not is_transposed(a):
            return product(a, b, c, **more)
        for part in equal_parts(a.shape[0], -(-a.nbytes // AT_A_TIME), EVEN_ROWS):
            product(**piece(part, 0, a=a, b=b, c=c, **more))
        return c

    return multiply


def otherwise(operation: Callable[..., Any], *given: Any) -> Any:
    """What nothing multiplies as it is: low precision on float32 copies, anything else by the definition."""
    if given[0].dtype == BFLOAT16:
        return on_copies(operation, *given)
    return getattr(reference, operation.__name__)(*given)
