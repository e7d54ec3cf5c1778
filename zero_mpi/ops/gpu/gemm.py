"""Matrix products by cuBLASLt. The first product of each set of shapes and types makes and caches a plan.

Our arrays are row-major and cuBLASLt is column-major, so cuBLASLt computes the transposed product: our second
factor is its A, our first factor its B, and our rows are its columns. A plan holds the descriptors and the
algorithm; a call passes addresses and allocates nothing. Sums are float32 for all inputs, and float32
inputs are multiplied in full precision, not as TF32.

The algorithm is the first that cuBLASLt's heuristics propose. This algorithm may split the inner dimension
and add float32 parts from a workspace in a fixed order: weight gradients have few tiles and long sums, which
would leave most of a GPU idle. ZERO_MPI_GPU_SPLIT_K=0 forbids that. ZERO_MPI_GPU_TUNE=1 times the first eight
algorithms; then another run may choose another algorithm, with slightly different results.
"""

from __future__ import annotations

import ctypes
import math
import operator
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from zero_mpi import device
from zero_mpi.device.arrays import pool_of
from zero_mpi.device.types import Array
from zero_mpi.errors import import_optional
from zero_mpi.ops.gpu.elementwise import ADD_ROW
from zero_mpi.ops.gpu.launch import PACK, PLANS, evenly_spaced, row_step, take, tiled
from zero_mpi.ops.sizes import WORKSPACE

# Constants from the headers of CUDA and cuBLASLt; tests compare them with the bindings.
COMPUTE_32F, NORMAL, TRANSPOSED = 68, 0, 1
EPILOGUE_DEFAULT, EPILOGUE_BIAS = 1, 4
WHOLE, FLOAT32_PARTS = 0, 2  # masks of reduction schemes: unsplit sums; float32 parts in a workspace
SINGLE, HALF, BFLOAT16 = 0, 2, 14  # cudaDataType
KINDS = {np.dtype(np.float32): SINGLE, np.dtype(np.float16): HALF, np.dtype(ml_dtypes.bfloat16): BFLOAT16}
DTYPES = {kind: dtype for dtype, kind in KINDS.items()}
BYTES: dict[int, int] = {kind: dtype.itemsize for dtype, kind in KINDS.items()}

CANDIDATES = 8
FITTING = 16  # bytes; the largest alignment that kernels need
RESULT = np.dtype(  # cublasLtMatmulHeuristicResult_t
    [
        ("algo", np.uint64, 8),
        ("workspace", np.uint64),
        ("state", np.int32),
        ("waves", np.float32),
        ("reserved", np.int32, 4),
    ]
)


class NoAlgorithm(ValueError):
    """Error: cuBLASLt has no algorithm for a product."""


class Matrix(NamedTuple):
    """Address, size and strides (in elements) of a matrix with contiguous rows, or of a batch of matrices."""

    address: int
    rows: int
    columns: int
    step: int  # stride of rows
    kind: int  # cudaDataType
    batch: int = 1
    apart: int = 0  # stride of matrices

    def part(self, first: int, rows: int) -> Matrix:
        return self._replace(address=self.address + first * self.step * BYTES[self.kind], rows=rows)

    @property
    def extent(self) -> int:
        """Number of bytes from the start of the first element to the end of the last element."""
        return ((self.batch - 1) * self.apart + (self.rows - 1) * self.step + self.columns) * BYTES[self.kind]


def kind_of(dtype: Any) -> int:
    """Return the cudaDataType of a type; raise ValueError if products do not support it."""
    kind = KINDS.get(dtype)
    if kind is None:
        names = ", ".join(dtype.name for dtype in KINDS)
        raise ValueError(f"products on the GPU support {names}, not {dtype}: convert the array first")
    return kind


def matrix(x: Array) -> Matrix:
    """Return x (..., C) as (N, C). Raise ValueError unless rows are contiguous with one stride."""
    step = row_step(x.shape, x.strides, x.itemsize)
    if not step:
        raise ValueError(f"expected evenly spaced contiguous rows, got {x.shape} with strides {x.strides}")
    return Matrix(x.data.ptr, math.prod(x.shape[:-1]), x.shape[-1], step, kind_of(x.dtype))


def batched(x: Array) -> Matrix:
    """Return a contiguous x (..., N, C) as a batch of matrices (N, C)."""
    *lead, rows, columns = x.shape
    assert x.flags.c_contiguous, "a batch of matrices is contiguous"
    return Matrix(x.data.ptr, rows, columns, columns, kind_of(x.dtype), math.prod(lead), rows * columns)


def fit(address: int) -> int:
    """Return the alignment of an address: the largest power of two up to FITTING that divides it."""
    return min(FITTING, address & -address) if address else FITTING


def import_lt() -> Any:
    """Return the bindings of cuBLASLt; raise UsageError if they are not installed."""
    hint = " or 'zero-mpi[cuda13]', as the driver supports"
    return import_optional("--device cuda", "cuda12", "nvmath.bindings.cublasLt", otherwise=hint)


def describe(lt: Any, kind: str, target: int, **values: int) -> None:
    """Set attributes of a cuBLASLt object of a kind such as "matmul_desc"."""
    names = getattr(lt, f"{kind.title().replace('_', '')}Attribute")
    for name, value in values.items():
        attribute = int(getattr(names, name))
        buffer = np.full(1, value, getattr(lt, f"get_{kind}_attribute_dtype")(attribute))
        getattr(lt, f"{kind}_set_attribute")(target, attribute, buffer.ctypes.data, buffer.itemsize)


class LtGemm:
    """Plan of D = scale op(A) op(B) + beta C + bias for one set of shapes, strides, types and alignments."""

    def __init__(self, products: Products, spec: GemmSpec) -> None:
        lt = self._lt = products.lt
        self._products = products
        self._numbers = np.array([spec.scale, spec.c is not None], np.float32)  # each product reads them
        self._scale, self._beta = (self._numbers.ctypes.data + 4 * place for place in (0, 1))
        self._bias = ctypes.c_uint64(spec.bias)
        self._bias_address = ctypes.addressof(self._bias)
        self._bias_pointer = int(lt.MatmulDescAttribute.BIAS_POINTER)
        # Our arrays are row-major, so cuBLASLt's A is our b and its B is our a.
        self.description = lt.matmul_desc_create(COMPUTE_32F, SINGLE)
        turns = [TRANSPOSED if turned else NORMAL for turned in (spec.tb, spec.ta)]
        describe(lt, "matmul_desc", self.description, TRANSA=turns[0], TRANSB=turns[1])
        if spec.bias:
            attributes = {"BIAS_DATA_TYPE": spec.d.kind, "BIAS_POINTER": spec.bias}
            describe(lt, "matmul_desc", self.description, EPILOGUE=EPILOGUE_BIAS, **attributes)
        self.layouts = [products.layout(m) for m in (spec.b, spec.a, spec.c or spec.d, spec.d)]
        self._add_bias: Callable[[int, int], None] | None = None  # a kernel, if no algorithm adds the bias
        try:
            self._choose(spec)
        except NoAlgorithm:  # there may be none that adds a bias to unaligned rows
            if not spec.bias:
                raise
            describe(lt, "matmul_desc", self.description, EPILOGUE=EPILOGUE_DEFAULT)
            self._choose(spec._replace(bias=0))
            self._add_bias = bias_adder(spec.d)

    def _choose(self, spec: GemmSpec) -> None:
        """Choose the algorithm and copy it to memory of this plan."""
        algorithms = self._algorithms(spec)
        self._use(algorithms[0] if len(algorithms) == 1 else self._fastest(spec, algorithms))

    def _use(self, candidate: Any) -> None:
        self._algorithm = np.array(candidate["algo"])
        self.algorithm = self._algorithm.ctypes.data

    def _algorithms(self, spec: GemmSpec) -> Any:
        """Return the algorithms that cuBLASLt proposes, best first; raise NoAlgorithm if there is none."""
        lt, products, count = self._lt, self._products, np.zeros(1, np.int32)
        results = np.zeros(CANDIDATES if products.tunes else 1, RESULT)
        preference = lt.matmul_preference_create()
        describe(
            lt,
            "matmul_preference",
            preference,
            MAX_WORKSPACE_BYTES=products.buffer.nbytes,
            REDUCTION_SCHEME_MASK=products.reductions,
            MIN_ALIGNMENT_A_BYTES=fit(spec.b.address),
            MIN_ALIGNMENT_B_BYTES=fit(spec.a.address),
            MIN_ALIGNMENT_C_BYTES=fit((spec.c or spec.d).address),
            MIN_ALIGNMENT_D_BYTES=fit(spec.d.address),
        )
        try:
            lt.matmul_algo_get_heuristic(
                products.handle, self.description, *self.layouts, preference,
                len(results), results.ctypes.data, count.ctypes.data,
            )  # fmt: skip
        except lt.cuBLASLtError as error:
            raise NoAlgorithm(f"cuBLASLt cannot multiply {spec}: {error}") from error
        finally:
            lt.matmul_preference_destroy(preference)
        algorithms = results[: count[0]]
        algorithms = algorithms[algorithms["state"] == 0]
        if not len(algorithms):
            raise NoAlgorithm(f"cuBLASLt knows no algorithm for {spec}")
        return algorithms

    def _fastest(self, spec: GemmSpec, algorithms: Any) -> Any:
        """Return the fastest algorithm for these arrays; the results of the trials go to scratch memory."""
        gpu = self._products.gpu
        buffer = pool_of(gpu).take((spec.d.extent,), np.uint8)
        c = (spec.c or spec.d).address
        events = gpu.cupy.cuda.Event(), gpu.cupy.cuda.Event()
        times = []
        for candidate in algorithms:
            self._use(candidate)
            for turn in range(6):
                if turn == 1:  # the first call, which loads code, is not timed
                    events[0].record(gpu.stream)
                self(spec.a.address, spec.b.address, c, buffer.data.ptr, spec.bias)
            events[1].record(gpu.stream)
            events[1].synchronize()
            times.append(gpu.cupy.cuda.get_elapsed_time(*events))
        return algorithms[int(np.argmin(times))]

    def __call__(self, a: int, b: int, c: int, d: int, bias: int) -> None:
        """Start the product of the arrays at these addresses on the stream; the result goes to `d`."""
        products, (of_b, of_a, of_c, of_d) = self._products, self.layouts
        if bias and bias != self._bias.value:
            self._bias.value = bias
            self._lt.matmul_desc_set_attribute(self.description, self._bias_pointer, self._bias_address, 8)
        self._lt.matmul(
            products.handle, self.description, self._scale, b, of_b, a, of_a,
            self._beta, c, of_c, d, of_d, self.algorithm,
            products.workspace, products.workspace_bytes, products.stream,
        )  # fmt: skip
        if self._add_bias is not None:
            self._add_bias(d, bias)

    def close(self) -> None:
        for layout in self.layouts:
            self._lt.matrix_layout_destroy(layout)
        self._lt.matmul_desc_destroy(self.description)


def bias_adder(d: Matrix) -> Callable[[int, int], None]:
    """Return a function that adds a bias to a result (both given by address), with a second rounding."""
    kernel = ADD_ROW[DTYPES[d.kind]]
    grid = tiled(d.rows, d.columns, PACK // BYTES[d.kind])
    return lambda place, bias: kernel(*grid, (place, bias, 0, place, d.columns, d.step, 0, d.step))


class GemmSpec(NamedTuple):
    """Description of a product for which a plan is made."""

    a: Matrix
    b: Matrix
    d: Matrix
    ta: bool
    tb: bool
    scale: float
    c: Matrix | None
    bias: int

    def __str__(self) -> str:
        sides = [f"{m.batch} x ({m.rows}, {m.columns}; {m.step}) of type {m.kind}" for m in self[:3]]
        turns = ["transposed " if turned else "" for turned in (self.ta, self.tb)]
        return f"{turns[0]}{sides[0]} by {turns[1]}{sides[1]} into {sides[2]}"


class Products:
    """cuBLASLt on the compute stream of a GPU: handle, workspace and plans."""

    def __init__(self, gpu: Any) -> None:
        with device.libraries():
            lt = self.lt = import_lt()
        self.gpu, self.stream = gpu, gpu.stream.ptr
        with device.libraries(lt.cuBLASLtError):
            self.handle = lt.create()
        self.tunes = os.environ.get("ZERO_MPI_GPU_TUNE", "0") == "1"
        splits = self.tunes or os.environ.get("ZERO_MPI_GPU_SPLIT_K", "1") != "0"
        self.reductions = FLOAT32_PARTS if splits else WHOLE
        hopper = int(gpu.cupy.cuda.Device(gpu.number).compute_capability) >= 90
        self.buffer = gpu.empty(WORKSPACE if hopper else 8 << 20, np.uint8)  # the best kernels need it all
        self.workspace, self.workspace_bytes = self.buffer.data.ptr, self.buffer.nbytes
        self.plans: dict[Any, LtGemm] = {}
        self.aligned_plans: dict[Any, LtGemm] = {}  # plans for aligned arrays, by shapes and strides

    def layout(self, m: Matrix) -> int:
        """Return a layout descriptor of the transpose of `m`, whose columns are the rows of `m`."""
        layout = self.lt.matrix_layout_create(m.kind, m.columns, m.rows, m.step)
        if m.batch > 1:
            describe(self.lt, "matrix_layout", layout, BATCH_COUNT=m.batch, STRIDED_BATCH_OFFSET=m.apart)
        return int(layout)

    def plan(self, key: Any, spec: GemmSpec) -> LtGemm:
        """Make and return a plan. Drop the oldest plan if there are too many."""
        if len(self.plans) >= PLANS:
            self.plans.pop(next(iter(self.plans))).close()
            self.aligned_plans.clear()
        plan = self.plans[key] = LtGemm(self, spec)
        return plan


_products: Products | None = None


def products() -> Products:
    """Return the `Products` object of the GPU in use."""
    global _products
    if _products is None or _products.gpu is not device.in_use():
        _products = Products(device.in_use())
    return _products


def about() -> str:
    """Return cuBLASLt's version and settings, for messages and records; results depend on them."""
    library = products()
    way = "timed" if library.tunes else "in float32 parts" if library.reductions else "whole sums"
    return f"products by cuBLASLt {library.lt.get_version()}, {way}"


def product(
    a: Array,
    b: Array,
    d: Array,
    *,
    ta: bool = False,
    tb: bool = False,
    c: Array | None = None,
    bias: Array | None = None,
) -> None:
    """Compute `multiply` for arrays (..., C) as matrices (N, C); arrays with uneven rows are copied first.

    Shapes and strides of arrays select the plan. A cached plan runs immediately if all arrays are aligned.
    """
    pa, pb, pd = a.data.ptr, b.data.ptr, d.data.ptr
    pc, layout = (pd, None) if c is None else (c.data.ptr, c is d or c.strides)
    bias_at, step = (0, None) if bias is None else (bias.data.ptr, bias.strides)
    # The key determines all other shapes and types, because operations check their arrays.
    key = (a.shape, a.strides, a.dtype, b.shape, b.strides, d.strides, d.dtype, layout, ta, tb, step)
    library = products()
    plan, fits = library.aligned_plans.get(key), not (pa | pb | pc | pd | bias_at) % FITTING
    if plan is not None and fits:
        plan(pa, pb, pc, pd, bias_at)
        return
    arrays, makers = (a, b, c, bias), (evenly_spaced, evenly_spaced, evenly_spaced, fitting)
    operands: list[Any] = [x if x is None else make(x) for x, make in zip(arrays, makers, strict=True)]
    bias_at = 0 if bias is None else operands[3].data.ptr
    a, b, c = (x if x is None else matrix(x) for x in operands[:3])
    plan = multiply(a, b, matrix(d), ta=ta, tb=tb, c=c, bias=bias_at)
    if plan is not None and fits and all(map(operator.is_, operands, arrays)):
        library.aligned_plans[key] = plan


def fitting(b: Array) -> Array:
    """Return a vector, or an aligned contiguous copy, which products can read as bias."""
    if b.data.ptr % FITTING == 0 and (b.size < 2 or b.strides[0] == b.itemsize):
        return b
    copy = take(b.shape, b.dtype)
    copy[...] = b
    return copy


def multiply(
    a: Matrix,
    b: Matrix,
    d: Matrix,
    *,
    ta: bool = False,
    tb: bool = False,
    scale: float = 1.0,
    c: Matrix | None = None,
    bias: int = 0,
) -> LtGemm | None:
    """Compute d = scale a b + c + bias, with the bias added to each row. c may be d itself, or None.

    `ta` and `tb`: use a and b transposed. a and b have one type, and c and d one type; sums are float32.
    Return the plan, or None if d is empty. Raises ValueError if cuBLASLt knows no algorithm.
    """
    if not d.rows * d.columns * d.batch:
        return None
    library, addresses = products(), (a.address, b.address, (c or d).address, d.address)
    key = (ta, tb, scale, bias != 0, *map(fit, addresses), a[1:], b[1:], c and c[1:], d[1:])
    plan = library.plans.get(key) or library.plan(key, GemmSpec(a, b, d, ta, tb, scale, c, bias))
    plan(*addresses, bias)
    return plan
