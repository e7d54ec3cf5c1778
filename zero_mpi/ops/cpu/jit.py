"""How kernels are compiled: the types of their arguments, the compiler's liberties, the place of the code.

A kernel is compiled, or loaded from the cache, when its module is imported. One that computes in EITHER type
is compiled for float32 then, and for the bits of bfloat16 with all others when the first such array comes:
most runs have none. Inputs are read-only types, so that
gathered weights may be views that nobody can write. Sums may be reassociated and products contracted, which
fixes the order for a given length and no more; NaN and infinity stay what they are, because a step whose
gradients are not finite has to be seen.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import llvmlite.binding
import ml_dtypes
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from zero_mpi.device.types import Array
from zero_mpi.environment import portable
from zero_mpi.ops import code_cache
from zero_mpi.ops.elementary import ROOT_HALF, log_of_parts
from zero_mpi.ops.rowsums import LANE_ROWS, LANES

F = TypeVar("F", bound=Callable[..., Any])

_for_low: list[Callable[[], None]] = []  # what compiles a kernel for bfloat16

# Reciprocals by arcp, roots by afn may be estimates of the processor, of which each maker has its own.
LIBERTIES = {"reassoc", "contract", "nsz"} | (set() if portable.active else {"arcp", "afn"})
FLOAT, DOUBLE, INTEGER, TRUTH = types.float32, types.float64, types.int64, types.boolean
LOW = types.uint16  # the bits of a bfloat16
WORD = ir.IntType(32)
FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
EITHER = "float32, or the bits of bfloat16"  # in the place of a type: all such arrays of a call are of one

SECOND_BLAS = "scipy.linalg.cython_blas"

f4: Any = np.float32
ZERO, ONE = f4(0), f4(1)
UNSEEN = f4(-3e38)  # a score that no exponential is left of, so that loops over whole blocks have no odd ends


@contextlib.contextmanager
def out_of_reach(module: str) -> Iterator[None]:
    """Let an import of a module fail within, unless it was imported before."""
    hidden = sys.modules.setdefault(module, cast(Any, None)) is None
    try:
        yield
    finally:
        if hidden:
            del sys.modules[module]


with out_of_reach(SECOND_BLAS):  # numba loads it for products that no kernel makes, which takes 0.2 s
    import numba.np.arraymath


def given(ndim: int, dtype: Any = FLOAT, layout: str = "C") -> Any:
    """The type of an array that a kernel reads; "A": of any strides."""
    return lambda either: types.Array(either if dtype is EITHER else dtype, ndim, layout, readonly=True)


def filled(ndim: int, dtype: Any = FLOAT, layout: str = "C") -> Any:
    """The type of an array that a kernel writes."""
    return lambda either: types.Array(either if dtype is EITHER else dtype, ndim, layout)


def signatures(returns: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """The signatures of a kernel: for float32, and for bfloat16."""
    return [
        returns(*(one if isinstance(one, types.Type) else one(either) for one in arguments))
        for either in (FLOAT, LOW)
    ]


def kernel(*arguments: Any, returns: Any = types.void, liberties: Any = LIBERTIES) -> Callable[[F], F]:
    """Compile a function for these types of arguments; it runs without the interpreter's lock."""
    full, low = signatures(returns, arguments)

    def compile_kernel(function: F) -> F:
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(code_cache.folder())
        try:
            compiled: Any = numba.njit(full, fastmath=liberties, nogil=True, cache=True, error_model="numpy")(
                function
            )
        finally:
            numba.config.CACHE_DIR = before
        if low != full:
            _for_low.append(partial(compile_also, compiled, low))
        return cast(F, compiled)

    return compile_kernel


def compile_also(compiled: Any, signature: Any) -> None:
    """Compile a kernel, or load it, for one more signature."""
    compiled.disable_compile(False)
    compiled.compile(signature)
    compiled.disable_compile()


def prepare_low() -> None:
    """Compile or load what computes with bfloat16, once for the process."""
    while _for_low:
        _for_low.pop()()


def helper(function: F) -> F:
    """A function that kernels call and that is compiled into them."""
    compiled: F = numba.njit(inline="always", fastmath=LIBERTIES, error_model="numpy")(function)
    return compiled


def fixed_helper(function: F) -> F:
    """A helper without liberties, called from kernels: the order of its sums stays as it is written."""
    compiled: F = numba.njit(fastmath=False, error_model="numpy")(function)
    return compiled


def target() -> str:
    """The processor that kernels are compiled for, by LLVM's name: this one unless numba is told another."""
    return str(numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name())


def single(*arrays: Array) -> bool:
    """Whether all are float32, which is what most kernels are for; the reference takes the rest."""
    return all(array.dtype == FLOAT32 for array in arrays)


def alike(*arrays: Array) -> bool:
    """Whether all are float32, or all bfloat16, which is what kernels of EITHER are for."""
    kind = arrays[0].dtype
    return kind in (FLOAT32, BFLOAT16) and all(array.dtype == kind for array in arrays)


def bits(x: Array) -> Array:
    """x as kernels take it: bfloat16 by its bits, anything else as it is."""
    if x.dtype != BFLOAT16:
        return x
    prepare_low()
    return x.view(np.uint16)


def flat(x: Array) -> Array:
    """x in one dimension, contiguous, by `bits`; a copy unless it is."""
    return bits(x.reshape(-1) if x.flags.c_contiguous else np.ascontiguousarray(x).reshape(-1))


def matrix(x: Array) -> Array:
    """x (..., C) as a contiguous matrix (N, C), by `bits`; a copy unless x is contiguous."""
    y = x if x.flags.c_contiguous else np.ascontiguousarray(x)
    return bits(y.reshape(math.prod(y.shape[:-1]), y.shape[-1]))


# ---------------------------------------------------------------------------------- inside of kernels


@intrinsic  # type: ignore[untyped-decorator]
def wide(context: Any, x: Any) -> Any:
    """An element as float32: itself, or what the bits of a bfloat16 say."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if signature.args[0] == FLOAT:
            return values[0]
        word = builder.zext(values[0], WORD)
        return builder.bitcast(builder.shl(word, WORD(16)), ir.FloatType())

    return FLOAT(x), codegen


def nearest_low(builder: Any, number: Any, word: Any, word_of: Callable[[int], Any] = WORD) -> Any:
    """The words whose lower halves are the bits of the nearest bfloat16 of float32, of two the even one.

    One number, or a vector: word is the type of its bits, and word_of makes a constant of that type.
    """
    bits = builder.bitcast(number, word)
    odd = builder.and_(builder.lshr(bits, word_of(16)), word_of(1))
    near = builder.lshr(builder.add(builder.add(bits, word_of(0x7FFF)), odd), word_of(16))
    is_nan = builder.fcmp_unordered("uno", number, number)  # the sum would carry it away
    return builder.select(is_nan, word_of(0x7FC0), near)


@intrinsic  # type: ignore[untyped-decorator]
def narrow(context: Any, out: Any, x: Any) -> Any:
    """What `out` holds for a float32: itself, or the bits of the nearest bfloat16, of two the even one."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if out.dtype == FLOAT:
            return values[1]
        return builder.trunc(nearest_low(builder, values[1], WORD), ir.IntType(16))

    return out.dtype(out, FLOAT), codegen


@helper
def exponential(x: Any) -> Any:
    """e^x in float32, to about 2 ulp: a power of two by its bits, times a polynomial (Cephes' expf).

    Unlike a call of the C library it becomes vector code. Above 88.3 it is infinite, below -87.7 zero:
    denormal numbers would be slow to compute with. NaN stays NaN.
    """
    x = f4(-88.0) if x < f4(-88.0) else x
    x = f4(88.8) if x > f4(88.8) else x
    n = np.floor(x * f4(1.44269504) + f4(0.5))
    r = x - n * f4(0.693359375) + n * f4(2.12194440e-4)
    y = f4(1.9875691500e-4)
    y = y * r + f4(1.3981999507e-3)
    y = y * r + f4(8.3334519073e-3)
    y = y * r + f4(4.1665795894e-2)
    y = y * r + f4(1.6666665459e-1)
    y = y * r + f4(5.0000001201e-1)
    y = y * r * r + r + ONE
    return y * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


own_log_of_parts = fixed_helper(log_of_parts)


@fixed_helper
def portable_log(x: Any) -> Any:
    """The logarithm of a float64, by `elementary.log_of_parts`."""
    if not ZERO < x < np.inf:
        return -np.inf if x == ZERO else x if x > ZERO else np.nan
    m, e = math.frexp(x)
    if m < ROOT_HALF:
        m, e = m + m, e - 1
    return own_log_of_parts(m, np.float64(e))


@fixed_helper
def portable_log_single(x: Any) -> Any:
    """The logarithm of a float32."""
    return f4(portable_log(np.float64(x)))


log_double, log_single = (portable_log, portable_log_single) if portable.active else (np.log, np.log)


@helper
def logistic(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    return ONE / (ONE + exponential(-x))


@helper
def in_order(bits: Any) -> Any:
    """Bits of a float32 as an int32 that is ordered as the numbers are; the same turns it back."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@helper
def row_most(row: Array) -> Any:
    """The largest element of a contiguous row, at least one.

    By whole numbers: a maximum of floats becomes vector code only where NaN is ruled out. NaN may come out as
    the largest or not; callers subtract the result from each element, so that it stays there.
    """
    bits = row.view(np.int32)
    most = in_order(bits[0])
    for j in range(bits.size):
        element = in_order(bits[j])
        most = element if element > most else most
    return in_order(most).view(np.float32)


@helper
def lanes_of(width: int) -> Array:
    """Room for `rowsums.column_sums`: row i goes to lane i mod LANES; the last line is their sum so far."""
    return np.zeros((LANES + 1, width), np.float32)


@fixed_helper
def settle(lanes: Array, i: int, n: int) -> None:
    """Close the lanes (LANES + 1, O) after row i of n if it is time: add them up, and let them begin anew."""
    if i < n - 1 and i % (LANES * LANE_ROWS) < LANES * LANE_ROWS - 1:
        return
    for j in range(lanes.shape[1]):
        lanes[LANES, j] += (lanes[0, j] + lanes[1, j]) + (lanes[2, j] + lanes[3, j])
    lanes[:LANES] = ZERO
