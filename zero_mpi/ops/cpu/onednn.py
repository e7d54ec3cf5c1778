"""Products by oneDNN through its C interface, if the processor has units for bfloat16.

NumPy's BLAS has no bfloat16 product, and on such processors oneDNN is faster in float32 too. The library
comes from $ZERO_MPI_DNNL, the extra `onednn` or the system; the first product loads it. Only documented
functions are used (oneDNN 3: the matmul primitive with bias and post-operations), so later versions work.
Sums are float32, and each result is rounded once. Products of subnormal bfloat16 numbers are zero, as in the
processor's instruction. A library is used only if it computes a few test products correctly.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import os
import threading
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from zero_mpi.device.types import Array
from zero_mpi.environment import portable
from zero_mpi.ops.cpu.jit import BFLOAT16, FLOAT32

VARIABLE, WHEEL, FILE = "ZERO_MPI_DNNL", "onednn-cpu-gomp", "libdnnl.so.3"
CPU, IN_ORDER = 1, 1  # the library's numbers for the CPU engine and an in-order stream
KINDS = {BFLOAT16: 2, FLOAT32: 3}
BF16_UNITS, TILE_UNITS = 0x80, 0x200  # bits of the instruction set in use
SOURCE, WEIGHTS, BIAS, RESULT, SECOND_SOURCE = 1, 33, 41, 17, 2
BINARY_ADD = 0x1FFF0
POST_OPERATION = (32768, 16384)  # argument number of the first post-operation, which depends on the version
MOST_DIMS = 12
MOST_PRODUCTS = 1024  # products kept per thread; nearly every window of packed documents has new shapes
Handle = ctypes.c_void_p
Key = tuple[Any, ...]


class OneDNNError(Exception):
    """Error: oneDNN rejected a call or cannot be used; the text gives the reason."""


class Argument(ctypes.Structure):
    """An array and its role in a primitive."""

    _fields_ = (("role", ctypes.c_int), ("memory", Handle))


class Product:
    """Product c = a b of fixed shapes, layouts and types: a primitive with memory objects for the arrays."""

    def __init__(self, library: OneDNN, arrays: dict[int, Array], adds: bool) -> None:
        self._library, self._stream = library, library.of_thread.stream
        create, engine = library.create, library.engine
        with contextlib.ExitStack() as stack:  # the primitive and memory objects copy these descriptions
            descriptions = {role: library.description(stack, array) for role, array in arrays.items()}
            self._memories = [create("memory_create", x, engine, None) for x in descriptions.values()]
            operands = [descriptions.pop(role, None) for role in (SOURCE, WEIGHTS, BIAS, RESULT)]
            addend = next(iter(descriptions.values()), None)
            attributes = library.attributes(stack, addend, adds)
            plan = library.create_for(stack, "matmul_primitive_desc_create", engine, *operands, attributes)
            self._primitive = create("primitive_create", plan)
        self._arguments = (Argument * len(arrays))(*map(Argument, arrays, self._memories))

    def destroy(self) -> None:
        self._library.call("primitive_destroy", self._primitive)
        for memory in self._memories:
            self._library.call("memory_destroy", memory)

    def __call__(self, arrays: dict[int, Array]) -> None:
        """Compute the product; the arrays must have the shapes and layouts that it was made for."""
        library = self._library
        for memory, array in zip(self._memories, arrays.values(), strict=True):
            library.set_handle(memory, array.__array_interface__["data"][0])  # twice as fast as .ctypes.data
        status = library.execute(self._primitive, self._stream, len(self._arguments), self._arguments)
        library.checked(status, "execute")
        library.wait(self._stream)


class ThreadState(threading.local):
    """State of one thread: a stream, and products by shape, which hold pointers to arrays."""

    def __init__(self, library: OneDNN) -> None:
        share_threads()
        self.stream = library.create("stream_create", library.engine, IN_ORDER)
        self.products: dict[Key, Product | None] = {}


class OneDNN:
    """A loaded oneDNN library and its products."""

    def __init__(self, path: str) -> None:
        try:
            self._symbols = ctypes.CDLL(path)
            self.set_handle = self._symbols.dnnl_memory_set_data_handle
            self.execute = self._symbols.dnnl_primitive_execute
            self.wait = self._symbols.dnnl_stream_wait
            isa = self._symbols.dnnl_get_effective_cpu_isa()
            self._symbols.dnnl_memory_desc_create_with_strides  # noqa: B018  (exists since oneDNN 3)
        except (OSError, AttributeError) as error:
            raise OneDNNError(f"{path} is not oneDNN 3: {error}") from None
        self.set_handle.argtypes = [Handle, Handle]
        self.execute.argtypes = [Handle, Handle, ctypes.c_int, Handle]
        if not isa & BF16_UNITS:
            raise OneDNNError("this CPU has no bfloat16 units, or ONEDNN_MAX_CPU_ISA disables them")
        self.has_tiles = bool(isa & TILE_UNITS)
        self.engine = self.create("engine_create", CPU, ctypes.c_size_t(0))
        self.of_thread = ThreadState(self)
        self._post_operation = 0
        self._try_all()

    @property
    def about(self) -> str:
        self._symbols.dnnl_version.restype = ctypes.POINTER(ctypes.c_int * 3)
        return f"oneDNN {'.'.join(map(str, self._symbols.dnnl_version().contents))}"

    def multiply(
        self,
        a: Array,
        b: Array,
        c: Array,
        *,
        bias: Array | None = None,
        plus: Array | None = None,
        adds: bool = False,
    ) -> Array:
        """Compute and return c (..., M, N) = a (..., M, K) b (..., K, N) + bias (N,) + plus, + c if `adds`.

        Either a, b, bias and plus are bfloat16 and c is bfloat16 or float32, or all are float32. a or a^T,
        and b or b^T, have contiguous rows that do not overlap. `bias` requires single matrices. NumPy
        computes products that the library does not support, on float32 copies.
        """
        arrays = {SOURCE: a, WEIGHTS: b, RESULT: c}
        if bias is not None:
            arrays[BIAS] = bias.reshape(1, -1)
        if plus is not None:
            arrays[self._post_operation | SECOND_SOURCE] = plus
        key = (adds, *((role, x.shape, x.strides, x.dtype) for role, x in arrays.items()))
        products = self.of_thread.products
        product = products[key] if key in products else self._new(key, arrays, adds)
        if product is not None:
            product(arrays)
        else:
            addends = [x.astype(np.float32) for x in (bias, plus, c if adds else None) if x is not None]
            c[...] = sum(addends, a.astype(np.float32) @ b.astype(np.float32))
        return c

    def _new(self, key: Key, arrays: dict[int, Array], adds: bool) -> Product | None:
        """Make, cache and return a product, or None if unsupported; drop the oldest if there are too many."""
        products = self.of_thread.products
        if len(products) >= MOST_PRODUCTS:
            oldest = products.pop(next(iter(products)))
            if oldest is not None:
                oldest.destroy()
        products[key] = None
        with contextlib.suppress(OneDNNError):
            products[key] = Product(self, arrays, adds)
        return products[key]

    # ------------------------------------------------------------------------------ the C interface

    def checked(self, status: int, function: str) -> None:
        """Raise OneDNNError if a library function returned an error status."""
        if status:
            raise OneDNNError(f"dnnl_{function} returned status {status}")

    def call(self, function: str, *arguments: Any) -> None:
        """Call a library function; raise OneDNNError if it returns an error status."""
        self.checked(getattr(self._symbols, f"dnnl_{function}")(*arguments), function)

    def create(self, function: str, *arguments: Any) -> Handle:
        """Return the object that a library function creates and returns through its first argument."""
        handle = Handle()
        self.call(function, ctypes.byref(handle), *arguments)
        return handle

    def create_for(self, stack: contextlib.ExitStack, function: str, *arguments: Any) -> Handle:
        """Return the object that KIND_create... creates; it is destroyed when `stack` exits."""
        handle = self.create(function, *arguments)
        kind = function.partition("_create")[0].removeprefix("matmul_")
        stack.callback(self.call, f"{kind}_destroy", handle)
        return handle

    def description(self, stack: contextlib.ExitStack, x: Array) -> Handle:
        """Return the library's description of an array of matrices: shape, strides and type."""
        dims = (ctypes.c_int64 * MOST_DIMS)(*x.shape)
        strides = (ctypes.c_int64 * MOST_DIMS)(*(step // x.itemsize for step in x.strides))
        return self.create_for(
            stack, "memory_desc_create_with_strides", x.ndim, dims, KINDS[x.dtype], strides
        )

    def attributes(self, stack: contextlib.ExitStack, addend: Handle | None, adds: bool) -> Handle | None:
        """Return attributes that make a product add another matrix or the old c; None if it adds neither."""
        if addend is None and not adds:
            return None
        attributes = self.create_for(stack, "primitive_attr_create")
        operations = self.create_for(stack, "post_ops_create")
        if addend is not None:
            self.call("post_ops_append_binary", operations, BINARY_ADD, addend)
        if adds:
            self.call("post_ops_append_sum", operations, ctypes.c_float(1), 0, 0)
        self.call("primitive_attr_set_post_ops", attributes, operations)
        return attributes

    # ------------------------------------------------------------------------------ before it is trusted

    def _try_all(self) -> None:
        """Find the argument number of post-operations; raise OneDNNError if a product is wrong."""
        problem = ""
        for self._post_operation in POST_OPERATION:
            self.of_thread.products.clear()
            try:
                for name, product, expected in self._trials():
                    # Tolerance: half a unit in the last place of bfloat16, and a different summation order.
                    if not np.allclose(product.astype(np.float32), expected, rtol=2**-8, atol=1e-4):
                        raise OneDNNError(f"a product is wrong ({name})")
                if None in self.of_thread.products.values():
                    raise OneDNNError("the library does not support products of these types")
            except OneDNNError as error:
                problem = str(error)
            else:
                self.of_thread.products.clear()
                return
        raise OneDNNError(problem)

    def _trials(self) -> Iterator[tuple[str, Array, Array]]:
        """Yield (name, the library's product, the expected product) for each kind of product in use."""
        for m, k, n in ((5, 3, 7), (64, 200, 96)):
            random = np.random.default_rng(m)
            shapes = (m, k), (n, k), (m, n)
            x, w, plus = (random.standard_normal(shape, np.float32).astype(BFLOAT16) for shape in shapes)
            a, b, p = (array.astype(np.float32) for array in (x, w, plus))
            y, dx, dw = np.zeros((m, n), BFLOAT16), np.ones((m, k), BFLOAT16), np.ones((n, k), np.float32)
            one, c, ones = np.float32(1), np.zeros((m, n), np.float32), dw.copy()
            yield "float32", self.multiply(a, b.T, c), a @ b.T
            yield "float32, added", self.multiply(p.T, a, ones, adds=True), p.T @ a + one
            yield "forward", self.multiply(x, w.T, y, bias=plus[0], plus=plus), a @ b.T + p[0] + p
            yield "to inputs", self.multiply(plus, w, dx, adds=True), p @ b + one
            yield "to weights", self.multiply(plus.T, x, dw, adds=True), p.T @ a + one


def share_threads() -> None:
    """Limit the library to as many threads as BLAS in products that this thread starts. If several BLAS
    libraries are loaded, use the smallest limit: a limit does not apply to one loaded later (SciPy's)."""
    threads = [pool["num_threads"] for pool in ThreadpoolController().select(user_api="blas").info()]
    ThreadpoolController().limit(limits=min(threads, default=1), user_api="openmp")


def candidates() -> Iterator[str]:
    """Yield the possible paths of a library, best first."""
    if VARIABLE in os.environ:
        yield os.environ[VARIABLE]
        return
    with contextlib.suppress(PackageNotFoundError):
        yield from (str(file.locate()) for file in files(WHEEL) or () if file.name == FILE)
    path = ctypes.util.find_library("dnnl")
    if path:
        yield path


@cache
def load() -> tuple[OneDNN | None, str]:
    """Return (the library, ""), or (None, the reason why there is none). A process loads the library once."""
    if portable.active:
        return None, "--bits portable uses OpenBLAS on float32 copies"
    reason = f"no oneDNN was found: pip install 'zero-mpi[onednn]', or set {VARIABLE} to a library"
    for path in candidates():
        try:
            return OneDNN(path), ""
        except OneDNNError as error:
            reason = str(error)
    return None, reason
