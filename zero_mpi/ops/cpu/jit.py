"""Compilation of kernels: argument types, fast-math flags ("liberties"), and the cache of compiled code.

No run needs all kernels, so the first call with float32 arrays, or with the bits of bfloat16, compiles a
kernel for them or loads it from the cache. `compile_all` compiles all kernels in advance. Inputs have
read-only types, so gathered weights may be read-only views. The compiler may reassociate sums and contract
products, so the order of a sum is fixed only for a given length. NaN and infinity are preserved, because a
step with gradients that are not finite must be noticed.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import llvmlite.binding
import ml_dtypes
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime import rtsys
from numba.extending import intrinsic

from zero_mpi.device.types import Array
from zero_mpi.environment import portable
from zero_mpi.ops import code_cache
from zero_mpi.ops.elementary import ROOT_HALF, log_of_parts
from zero_mpi.ops.flat_reference import LANE_ROWS, LANES

F = TypeVar("F", bound=Callable[..., Any])

_kernels: list[tuple[Any, Any, Any]] = []  # kernel, float32 signature, bfloat16 signature (often equal)

# With arcp and afn, reciprocals and roots may be the processor's estimates, which differ by manufacturer.
LIBERTIES = {"reassoc", "contract", "nsz"} | (set() if portable.active else {"arcp", "afn"})
FLOAT, DOUBLE = types.float32, types.float64
LOW = types.uint16  # type of the bits of a bfloat16 in kernels
WORD = ir.IntType(32)
FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
f4: Any = np.float32
ZERO, ONE = f4(0), f4(1)
UNSEEN = f4(-3e38)  # score of an unseen key: its exponential is 0, so loops can run over full blocks


@contextlib.contextmanager
def out_of_reach(module: str) -> Iterator[None]:
    """Make imports of a module fail within the context, unless the module was imported before."""
    hidden = sys.modules.setdefault(module, cast(Any, None)) is None
    try:
        yield
    finally:
        if hidden:
            del sys.modules[module]


TYPES = {"f": FLOAT, "l": LOW, "d": DOUBLE, "i": types.int64, "b": types.boolean, "u": types.uint8}


def type_of(word: str, element: Any) -> Any:
    """Return the type that a word of a kernel's signature describes; see `kernel`."""
    kind = element if word[0] == "e" else TYPES[word[0]]
    if word[1:2].isdigit():
        return types.Array(kind, int(word[1]), "A" if "~" in word else "C", readonly="+" not in word)
    return kind


def kernel(text: str, liberties: Any = LIBERTIES) -> Callable[[F], F]:
    """Return a decorator that compiles a function for these types, to run without the interpreter's lock.

    `text` has a word for each argument, and after an arrow one for the result: f float32, l the bits of a
    bfloat16, e either of the two (all the same in a call), d float64, i int64, u uint8, b a boolean. A digit:
    array of that many axes, contiguous unless followed by `~`. `+`: the kernel writes the array.
    """
    arguments, _, result = text.partition(" -> ")
    words, returns = arguments.split(), TYPES[result] if result else types.void
    full, low = (returns(*(type_of(word, kind) for word in words)) for kind in (FLOAT, LOW))
    place = next((i for i, word in enumerate(words) if word[0] == "e"), None)  # index of the first `e`

    def make(function: F) -> F:
        compiled: Any = numba.njit(fastmath=liberties, nogil=True, error_model="numpy")(function)

        def entry(*operands: Any) -> Any:
            return load(compiled, full if place is None or operands[place].dtype == FLOAT32 else low)

        def fits_now(*operands: Any) -> bool:
            entry(*operands)
            return bool(type(compiled)._search_new_conversions(compiled, *operands))

        # numba calls `fits_now` if no loaded version fits, and `entry` only while another thread loads one.
        compiled._search_new_conversions, compiled._compile_for_args = fits_now, entry
        compiled._can_compile = False
        _kernels.append((compiled, full, low))
        return cast(F, compiled)

    return make


def load(compiled: Any, signature: Any) -> Any:
    """Return a kernel's code for a signature; load it from the cache, or compile it, unless it is loaded."""
    with global_compiler_lock:
        if not isinstance(compiled._cache, QuickCache):
            old_folder, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(code_cache.folder())
            compiled._cache = QuickCache(compiled.py_func)
            numba.config.CACHE_DIR = old_folder
        compiled._can_compile = True
        try:
            with out_of_reach("scipy.linalg.cython_blas"):  # unused; numba would load it in 0.2 s
                return compiled.compile(signature)
        finally:
            compiled._can_compile = False


class QuickCache(FunctionCache):  # type: ignore[misc]
    """Numba cache that loads code without importing everything that a compilation needs."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)
        return self._load_overload(sig, target_context)


def compile_all(kind: str) -> None:
    """Compile all kernels for float32, and if `kind` is "bfloat16" also for it, unless the cache has them."""
    for compiled, full, low in _kernels:
        for signature in (full, low) if kind == "bfloat16" else (full,):  # `amx` also writes float32
            load(compiled, signature)


def helper(function: F) -> F:
    """Compile a function that is inlined into kernels."""
    compiled: F = numba.njit(inline="always", fastmath=LIBERTIES, error_model="numpy")(function)
    return compiled


def fixed_helper(function: F) -> F:
    """Compile a helper of kernels without fast-math, so that its sums keep the written order."""
    compiled: F = numba.njit(fastmath=False, error_model="numpy")(function)
    return compiled


def target() -> str:
    """Return LLVM's name of the processor that code is compiled for: this machine's by default."""
    return str(numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name())


def single(*arrays: Array) -> bool:
    """Return whether all arrays are float32. Most kernels require it; the reference computes other types."""
    return all(array.dtype == FLOAT32 for array in arrays)


def alike(first: Array, *others: Array | None) -> bool:
    """Return whether all arrays are float32 or all are bfloat16; kernels with `e` arguments require that."""
    kind = first.dtype
    return kind in (FLOAT32, BFLOAT16) and all(x is None or x.dtype == kind for x in others)


def bits(x: Array) -> Array:
    """Return x in the form that kernels accept: bfloat16 as its bits, other types unchanged."""
    return x.view(np.uint16) if x.dtype == BFLOAT16 else x


def flat(x: Array) -> Array:
    """Return x as a contiguous 1-D array in the form of `bits`; a copy if not contiguous."""
    return bits(x.reshape(-1) if x.flags.c_contiguous else np.ascontiguousarray(x).reshape(-1))


def matrix(x: Array) -> Array:
    """Return x (..., C) as a contiguous matrix (N, C) in the form of `bits`; a copy if not contiguous."""
    y = x if x.flags.c_contiguous else np.ascontiguousarray(x)
    return bits(y.reshape(math.prod(y.shape[:-1]), y.shape[-1]))


# ------------------------------------------------------------------- LLVM code that kernels emit directly

BYTE, HALF, PLACE, SINGLE = ir.IntType(8), ir.IntType(16), ir.IntType(64), ir.FloatType()
ELEMENTS = 16  # elements of a vector
SIXTEEN, SINGLES = ir.VectorType(WORD, ELEMENTS), ir.VectorType(SINGLE, ELEMENTS)
PLACES = types.int64  # the type of addresses and counts in kernels


def intrinsic_of(signature: Any, emit: Callable[..., Any]) -> Any:
    """Return an intrinsic with this signature; emit(builder, *values) emits code and returns the result."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        result = emit(builder, *values)
        return context.get_dummy_value() if result is None else result

    return signature, codegen


def constant(number: int) -> Any:
    """Return sixteen words that hold one number."""
    return ir.Constant(SIXTEEN, [number] * ELEMENTS)


def load_at(builder: Any, place: Any, kind: Any, align: int = 1) -> Any:
    instruction = builder.load(builder.inttoptr(place, kind.as_pointer()))
    instruction.align = align
    return instruction


def store_at(builder: Any, value: Any, place: Any) -> None:
    """Write a value to an unaligned address."""
    builder.store(value, builder.inttoptr(place, value.type.as_pointer())).align = 1


# ---------------------------------------------------------------------------------- inside of kernels


@intrinsic  # type: ignore[untyped-decorator]
def wide(context: Any, x: Any) -> Any:
    """Return an element as float32; x is a float32 or the bits of a bfloat16."""

    def emit(builder: Any, value: Any) -> Any:
        if x == FLOAT:
            return value
        return builder.bitcast(builder.shl(builder.zext(value, WORD), WORD(16)), SINGLE)

    return intrinsic_of(FLOAT(x), emit)


def nearest_low(builder: Any, number: Any, word: Any, word_of: Callable[[int], Any] = WORD) -> Any:
    """Round float32 numbers to bfloat16, ties to even; return words with the bits in their lower halves.

    `number` is a scalar or a vector. `word` is the type of its bits, and `word_of` makes a constant of it.
    """
    bits = builder.bitcast(number, word)
    odd = builder.and_(builder.lshr(bits, word_of(16)), word_of(1))
    near = builder.lshr(builder.add(builder.add(bits, word_of(0x7FFF)), odd), word_of(16))
    is_nan = builder.fcmp_unordered("uno", number, number)  # the additions above could turn NaN into a number
    return builder.select(is_nan, word_of(0x7FC0), near)


@intrinsic  # type: ignore[untyped-decorator]
def narrow(context: Any, out: Any, x: Any) -> Any:
    """Return x as `out` stores it: the float32 itself, or the bits of the nearest bfloat16, ties to even."""

    def emit(builder: Any, _: Any, value: Any) -> Any:
        return value if out.dtype == FLOAT else builder.trunc(nearest_low(builder, value, WORD), HALF)

    return intrinsic_of(out.dtype(out, FLOAT), emit)


@intrinsic  # type: ignore[untyped-decorator]
def to_floats(context: Any, place: Any) -> Any:
    result = types.CPointer(types.float32)(PLACES)
    return intrinsic_of(result, lambda builder, place: builder.inttoptr(place, SINGLE.as_pointer()))


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def floats(place: int, size: int) -> Any:
    """Return the float32 array (size,) at an address."""
    return numba.carray(to_floats(place), size)


@helper
def exponential(x: Any) -> Any:
    """Return e^x in float32, to about 2 ulp: a power of two by its bits, times a polynomial (Cephes' expf).

    The compiler vectorizes it, unlike a call of the C library. Above 88.3 the power of two overflows, so the
    result is infinite; below -87.7 it is zero, because denormal numbers are slow. NaN stays NaN.
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
    """Return the logarithm of a float64, computed by `elementary.log_of_parts`."""
    if not ZERO < x < np.inf:
        return -np.inf if x == ZERO else x if x > ZERO else np.nan
    m, e = math.frexp(x)
    if m < ROOT_HALF:
        m, e = m + m, e - 1
    return own_log_of_parts(m, np.float64(e))


@fixed_helper
def portable_log_single(x: Any) -> Any:
    return f4(portable_log(np.float64(x)))


log_double, log_single = (portable_log, portable_log_single) if portable.active else (np.log, np.log)


@helper
def logistic(x: Any) -> Any:
    return ONE / (ONE + exponential(-x))


@helper
def in_order(bits: Any) -> Any:
    """Map the bits of a float32 to an int32 that sorts like the float; a second call maps it back."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@helper
def row_most(row: Array) -> Any:
    """Return the largest element of a contiguous row of at least one element.

    The code compares integers, because the compiler vectorizes a maximum of floats only without NaN. In a row
    with NaN the result is arbitrary; callers subtract it from each element, which keeps NaN in place.
    """
    bits = row.view(np.int32)
    most = in_order(bits[0])
    for j in range(bits.size):
        element = in_order(bits[j])
        most = element if element > most else most
    return in_order(most).view(np.float32)


@helper
def lanes_of(width: int) -> Array:
    """Return zeros for sums over rows: kernels add row i to lane i mod LANES; the last line is the total."""
    return np.zeros((LANES + 1, width), np.float32)


@fixed_helper
def settle(lanes: Array, i: int, n: int) -> None:
    """After a block of rows and after the last row, add the lanes to the last line (O,) and clear them."""
    if i < n - 1 and i % (LANES * LANE_ROWS) < LANES * LANE_ROWS - 1:
        return
    for j in range(lanes.shape[1]):
        lanes[LANES, j] += (lanes[0, j] + lanes[1, j]) + (lanes[2, j] + lanes[3, j])
    lanes[:LANES] = ZERO


# ------------------------------------------------------------------- outside of kernels: arrays for sums


def sums_for(dw: Array | None, w: Array) -> Array:
    """Return the array to which a kernel adds sums over rows: dw, or zeros that `add_sums` adds to dw.

    For a frozen parameter (dw None) it also returns zeros, so that the same code computes the same dx.
    """
    return dw if dw is not None and dw.dtype == FLOAT32 else np.zeros(w.shape, np.float32)


def add_sums(sums: Array, dw: Array | None) -> None:
    """Add separate float32 sums to a low-precision gradient, rounded once."""
    if dw is not None and dw is not sums:
        dw[...] = dw.astype(np.float32) + sums


def adds_into(*sums: Array | None) -> bool:
    """Return whether kernels can add to these arrays, directly or through a float32 buffer."""
    return all(x is None or (x.dtype in (FLOAT32, BFLOAT16) and x.flags.c_contiguous) for x in sums)
