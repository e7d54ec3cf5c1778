"""Matrix products by BLAS into existing memory, called from Python and from inside kernels.

The routine is the Fortran sgemm of a loaded OpenBLAS, NumPy's if possible, or if no OpenBLAS is loaded, the
sgemm that SciPy exports to Cython. Unlike `numpy.matmul`, sgemm can add to its result (beta = 1), so a
gradient goes directly into the flat buffer, and a kernel can call it without the interpreter. SciPy's library
alone would also work, but it has its own threads and buffers, takes a quarter of a second to load, and in
today's wheels is older and a few per cent slower.
"""

import ctypes
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import get_cython_function_address, intrinsic
from threadpoolctl import ThreadpoolController

from zero_mpi.device.types import Array
from zero_mpi.ops.cpu.jit import BYTE, ONE, ZERO, intrinsic_of, kernel

SYMBOL = "zero_mpi_sgemm"
# Names in different builds of OpenBLAS.
EXPORTED_NAMES = ("scipy_sgemm_64_", "sgemm_64_", "scipy_sgemm_", "sgemm_")
NORMAL, TRANSPOSED = ord("N"), ord("T")
NN, NT, TN = (NORMAL, NORMAL), (NORMAL, TRANSPOSED), (TRANSPOSED, NORMAL)


def address_in_openblas() -> int | None:
    """Return the address of sgemm in a loaded OpenBLAS, NumPy's if possible, or None if there is none."""
    libraries = ThreadpoolController().select(internal_api="openblas").lib_controllers
    libraries.sort(key=lambda library: "numpy" not in library.filepath)
    for library in libraries:
        for name in EXPORTED_NAMES:
            function = getattr(library.dynlib, name, None)
            if function is not None:
                return ctypes.cast(function, ctypes.c_void_p).value
    return None


def address_in_scipy() -> int:
    """Return the address of SciPy's sgemm; limit its threads, as earlier limits miss it."""
    threads = [pool["num_threads"] for pool in ThreadpoolController().select(user_api="blas").info()]
    address: int = get_cython_function_address("scipy.linalg.cython_blas", "sgemm")
    ThreadpoolController().limit(limits=max(threads, default=1), user_api="blas")
    return address


llvmlite.binding.add_symbol(SYMBOL, address_in_openblas() or address_in_scipy())


@intrinsic  # type: ignore[untyped-decorator]
def gemm(context: Any, turns: Any, sizes: Any, alpha: Any, a: Any, b: Any, beta: Any, c: Any) -> Any:
    """Compute c (m, n) = alpha op(a) (m, k) op(b) (k, n) + beta c, row-major: Fortran sees c^T = b^T a^T.

    `turns`: NN, NT or TN, which says whether a and b are transposed; `sizes`: (m, n, k); a, b and c:
    (address, elements from one row to the next). Integers have 64 bits. A library with 32-bit integers reads
    the lower half, which comes first on little-endian machines, so the same code works with both libraries.
    """
    pointer = BYTE.as_pointer()

    def emit(builder: Any, turns: Any, sizes: Any, alpha: Any, a: Any, b: Any, beta: Any, c: Any) -> None:
        def address_of(value: Any) -> Any:  # Fortran receives every argument by its address
            return builder.bitcast(cgutils.alloca_once_value(builder, value), pointer)

        def matrix(pair: Any) -> tuple[Any, Any]:
            place, step = cgutils.unpack_tuple(builder, pair)
            return builder.inttoptr(place, pointer), address_of(step)

        turn_a, turn_b = (address_of(builder.trunc(x, BYTE)) for x in cgutils.unpack_tuple(builder, turns))
        m, n, k = map(address_of, cgutils.unpack_tuple(builder, sizes))
        alpha, beta = address_of(alpha), address_of(beta)
        arguments = turn_b, turn_a, n, m, k, alpha, *matrix(b), *matrix(a), beta, *matrix(c)
        kind = ir.FunctionType(ir.VoidType(), [pointer] * len(arguments))
        builder.call(cgutils.get_or_insert_function(builder.module, kind, SYMBOL), arguments)

    return intrinsic_of(types.void(turns, sizes, types.float32, a, b, types.float32, c), emit)


@kernel("f2~ f2~ f f2~+")
def multiply(a: Array, b: Array, beta: Any, c: Array) -> None:
    """Compute c (M, N) = a (M, K) b (K, N) + beta c; c, a or a^T, and b or b^T have contiguous rows."""
    m, k = a.shape
    n = b.shape[1]
    turn_a, lda = NORMAL, max(a.strides[0] // 4, k, 1)
    if a.strides[1] != 4:
        turn_a, lda = TRANSPOSED, max(a.strides[1] // 4, m, 1)
    turn_b, ldb = NORMAL, max(b.strides[0] // 4, n, 1)
    if b.strides[1] != 4:
        turn_b, ldb = TRANSPOSED, max(b.strides[1] // 4, k, 1)
    ldc = max(c.strides[0] // 4, n, 1)
    left, right = (a.ctypes.data, lda), (b.ctypes.data, ldb)
    gemm((turn_a, turn_b), (m, n, k), np.float32(1), left, right, beta, (c.ctypes.data, ldc))


def times(a: Array, b: Array, c: Array, *, adds: bool = False) -> Array:
    """Compute and return c = a b, or c + a b if `adds`, for float32 matrices that `multiply` accepts."""
    multiply(a, b, ONE if adds else ZERO, c)
    return c


def by_rows(x: Array) -> bool:
    """Return whether a matrix has contiguous rows that do not overlap, as BLAS requires for c."""
    (down, right), size = x.strides, x.itemsize
    return bool(x.flags.c_contiguous or (right == size and down >= size * x.shape[1] and down % size == 0))


def by_row(x: Array) -> Array:
    """Return the matrix if its rows are contiguous and do not overlap, else a copy."""
    return x if by_rows(x) else np.ascontiguousarray(x)


def fitting(x: Array) -> Array:
    """Return a matrix if BLAS can read it or its transpose in place, else a copy."""
    return x if by_rows(x) or by_rows(x.T) else np.ascontiguousarray(x)
