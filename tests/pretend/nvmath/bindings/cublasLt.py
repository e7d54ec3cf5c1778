"""cuBLASLt on the simulated device: the calls that the package uses, with the real names and numbers.

It is stricter than the library: each matrix must be inside one allocation, an algorithm may only be used for
the descriptors and alignment for which it was requested, and an attribute must have the right size. A product
is computed in float32 by NumPy and rounded once, asynchronously in the order of the stream.
"""

import ctypes
import itertools
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from cupy import cuda

INVALID_VALUE, NOT_SUPPORTED, NOT_INITIALIZED = 7, 15, 1
TYPES = {0: np.dtype(np.float32), 2: np.dtype(np.float16), 14: np.dtype(ml_dtypes.bfloat16)}
COMBINATIONS = {(0, 0), (2, 2), (14, 14), (2, 0), (14, 0)}  # type of A and B, type of C and D
WORKSPACE_ALIGNMENT = 256


class cuBLASLtError(Exception):
    """Error of the library."""

    def __init__(self, status: int, reason: str = "") -> None:
        super().__init__(f"cuBLASLt status {status} (pretend): {reason}")
        self.status = status


def demand(truth: Any, reason: str, status: int = INVALID_VALUE) -> None:
    if not truth:
        raise cuBLASLtError(status, reason)


class MatmulDescAttribute(IntEnum):
    """Attributes of a product."""

    TRANSA, TRANSB, EPILOGUE, BIAS_POINTER, BIAS_DATA_TYPE = 3, 4, 7, 8, 26


class MatrixLayoutAttribute(IntEnum):
    """Attributes of a matrix."""

    BATCH_COUNT, STRIDED_BATCH_OFFSET = 5, 6


class MatmulPreferenceAttribute(IntEnum):
    """Attributes by which an algorithm is chosen."""

    MAX_WORKSPACE_BYTES, REDUCTION_SCHEME_MASK = 1, 3
    MIN_ALIGNMENT_A_BYTES, MIN_ALIGNMENT_B_BYTES, MIN_ALIGNMENT_C_BYTES, MIN_ALIGNMENT_D_BYTES = 5, 6, 7, 8


D, L, P = MatmulDescAttribute, MatrixLayoutAttribute, MatmulPreferenceAttribute
DESC_TYPES = {D.TRANSA: "i4", D.TRANSB: "i4", D.EPILOGUE: "u4", D.BIAS_POINTER: "i8", D.BIAS_DATA_TYPE: "i4"}
LAYOUT_TYPES = {L.BATCH_COUNT: "i4", L.STRIDED_BATCH_OFFSET: "i8"}
PREFERENCE_TYPES = {P.MAX_WORKSPACE_BYTES: "u8"} | {name: "u4" for name in P if name != P.MAX_WORKSPACE_BYTES}


def _dtype(table: dict[Any, str], attribute: int) -> type:
    demand(attribute in table, f"attribute {attribute} is not known to the simulated cuBLASLt")
    return np.dtype(table[attribute]).type


def get_matmul_desc_attribute_dtype(attr: int) -> type:
    return _dtype(DESC_TYPES, attr)


def get_matrix_layout_attribute_dtype(attr: int) -> type:
    return _dtype(LAYOUT_TYPES, attr)


def get_matmul_preference_attribute_dtype(attr: int) -> type:
    return _dtype(PREFERENCE_TYPES, attr)


@dataclass(frozen=True)
class Layout:
    """Column-major matrix, or a batch of them."""

    type: int
    rows: int
    cols: int
    ld: int
    set: dict[int, int] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return self.set.get(L.BATCH_COUNT, 1)

    @property
    def apart(self) -> int:
        return self.set.get(L.STRIDED_BATCH_OFFSET, 0)

    @property
    def extent(self) -> int:
        return ((self.batch - 1) * self.apart + (self.cols - 1) * self.ld + self.rows) * TYPES[
            self.type
        ].itemsize

    def on(self, address: int) -> np.ndarray:
        """Return the batch of matrices (batch, rows, cols) at an address."""
        kind = TYPES[self.type]
        memory = (ctypes.c_char * self.extent).from_address(address)
        steps = np.array((self.apart, 1, self.ld)) * kind.itemsize
        return np.ndarray((self.batch, self.rows, self.cols), kind, memory, strides=tuple(steps))


@dataclass(frozen=True)
class Product:
    """Attributes of one product."""

    compute: int
    scale: int
    set: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Algorithm:
    """Descriptors for which an algorithm was chosen."""

    number: int
    product: tuple[tuple[int, int], ...]
    layouts: tuple[Layout, ...]
    aligned: tuple[int, ...]
    workspace: int
    parts: bool


_numbers = itertools.count(0x1000)
_objects: dict[int, Any] = {}
_algorithms: dict[int, Algorithm] = {}
calls: SimpleNamespace = SimpleNamespace(products=0, heuristics=0)  # counters that tests check
refuses: list[int] = []  # epilogues that get no algorithm; set by tests


def _make(value: Any) -> int:
    number = next(_numbers)
    _objects[number] = value
    return number


def _get(number: int, kind: type) -> Any:
    demand(isinstance(_objects.get(number), kind), f"{number} is no {kind.__name__}", NOT_INITIALIZED)
    return _objects[number]


def _set(number: int, kind: type, table: dict[Any, str], attr: int, buf: int, size: int) -> None:
    form = np.dtype(_dtype(table, attr))
    demand(size == form.itemsize, f"attribute {attr} takes {form.itemsize} bytes, not {size}")
    value = int(np.frombuffer(ctypes.string_at(buf, size), form)[0])
    record = _get(number, kind)
    _objects[number] = replace(record, set={**record.set, attr: value})


class Handle:
    """Context of the library."""


@dataclass(frozen=True)
class Preference:
    """Attributes by which algorithms are chosen."""

    set: dict[int, int] = field(default_factory=dict)


def get_version() -> int:
    return 130000


def create() -> int:
    return _make(Handle())


def destroy(light_handle: int) -> None:
    _get(light_handle, Handle)
    del _objects[light_handle]


def matrix_layout_create(type: int, rows: int, cols: int, ld: int) -> int:
    demand(type in TYPES, f"type {type} is not known to the simulated cuBLASLt", NOT_SUPPORTED)
    demand(rows > 0 and cols > 0 and ld >= rows, f"a matrix of {rows} rows, {cols} columns by {ld}")
    return _make(Layout(type, rows, cols, ld))


def matrix_layout_destroy(mat_layout: int) -> None:
    _get(mat_layout, Layout)
    del _objects[mat_layout]


def matrix_layout_set_attribute(mat_layout: int, attr: int, buf: int, size_in_bytes: int) -> None:
    _set(mat_layout, Layout, LAYOUT_TYPES, attr, buf, size_in_bytes)


def matmul_desc_create(compute_type: int, scale_type: int) -> int:
    demand((compute_type, scale_type) == (68, 0), "only COMPUTE_32F with float32 scalars is simulated")
    return _make(Product(compute_type, scale_type))


def matmul_desc_destroy(matmul_desc: int) -> None:
    _get(matmul_desc, Product)
    del _objects[matmul_desc]


def matmul_desc_set_attribute(matmul_desc: int, attr: int, buf: int, size_in_bytes: int) -> None:
    _set(matmul_desc, Product, DESC_TYPES, attr, buf, size_in_bytes)


def matmul_preference_create() -> int:
    return _make(Preference())


def matmul_preference_destroy(pref: int) -> None:
    _get(pref, Preference)
    del _objects[pref]


def matmul_preference_set_attribute(pref: int, attr: int, buf: int, size_in_bytes: int) -> None:
    _set(pref, Preference, PREFERENCE_TYPES, attr, buf, size_in_bytes)


def _own(product: Product) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((name, value) for name, value in product.set.items() if name != D.BIAS_POINTER))


def _check_shapes(product: Product, a: Layout, b: Layout, c: Layout, d: Layout) -> None:
    (m, k) = (a.cols, a.rows) if product.set.get(D.TRANSA, 0) else (a.rows, a.cols)
    (l, n) = (b.cols, b.rows) if product.set.get(D.TRANSB, 0) else (b.rows, b.cols)
    demand(k == l, f"the inner dimensions are {k} and {l}")
    demand(
        (c.rows, c.cols) == (d.rows, d.cols) == (m, n), f"{(m, n)} into {(c.rows, c.cols, d.rows, d.cols)}"
    )
    demand(len({x.batch for x in (a, b, c, d)}) == 1, "batches of several lengths")
    demand(a.type == b.type and c.type == d.type, "types of A and B, or of C and D, differ", NOT_SUPPORTED)
    demand((a.type, d.type) in COMBINATIONS, f"type {a.type} into {d.type}", NOT_SUPPORTED)
    if d.batch > 1:
        demand(d.apart >= (d.cols - 1) * d.ld + d.rows, "the results of a batch overlap")


def matmul_algo_get_heuristic(
    light_handle: int, operation_desc: int, adesc: int, bdesc: int, cdesc: int, ddesc: int, preference: int,
    requested_algo_count: int, heuristic_results_array: int, return_algo_count: int,
) -> None:  # fmt: skip
    _get(light_handle, Handle)
    product = _get(operation_desc, Product)
    layouts = tuple(_get(x, Layout) for x in (adesc, bdesc, cdesc, ddesc))
    settings = _get(preference, Preference).set
    _check_shapes(product, *layouts)
    calls.heuristics += 1
    aligned = tuple(settings.get(name, 256) for name in P if name.name.startswith("MIN_ALIGNMENT"))
    parts = bool(settings.get(P.REDUCTION_SCHEME_MASK, 7))
    choices = [False, True][: 1 + parts][:requested_algo_count]
    if product.set.get(D.EPILOGUE, 1) in refuses:
        choices = []
    buffer = (ctypes.c_uint64 * (12 * requested_algo_count)).from_address(heuristic_results_array)
    for place, splits in enumerate(choices):
        number = next(_numbers)
        needs = min(settings.get(P.MAX_WORKSPACE_BYTES, 0), 1 << 20 if splits else 0)
        _algorithms[number] = Algorithm(number, _own(product), layouts, aligned, needs, splits)
        buffer[12 * place : 12 * place + 12] = [number, 0, 0, 0, 0, 0, 0, ~number % (1 << 64), needs, 0, 0, 0]
    ctypes.c_int32.from_address(return_algo_count).value = len(choices)


def _algorithm(address: int) -> Algorithm:
    words = (ctypes.c_uint64 * 8).from_address(address)
    demand(words[0] in _algorithms and words[7] == ~words[0] % (1 << 64), "this is no algorithm")
    return _algorithms[words[0]]


def _inside(address: int, extent: int, label: str) -> None:
    demand(cuda.inside(address, extent), f"{label}: {extent} bytes at {address:#x} are not in one allocation")


def matmul(
    light_handle: int, compute_desc: int, alpha: int, a: int, adesc: int, b: int, bdesc: int, beta: int,
    c: int, cdesc: int, d: int, ddesc: int, algo: int, workspace: int, workspace_size_in_bytes: int,
    stream: int,
) -> None:  # fmt: skip
    """Queue D = alpha op(A) op(B) + beta C + bias on the stream."""
    _get(light_handle, Handle)
    product = _get(compute_desc, Product)
    layouts = tuple(_get(x, Layout) for x in (adesc, bdesc, cdesc, ddesc))
    algorithm = _algorithm(algo)
    demand(algorithm.product == _own(product), "the algorithm was chosen for another product")
    demand(algorithm.layouts == layouts, "the algorithm was chosen for other matrices")
    for place, (name, aligned) in enumerate(zip("ABCD", algorithm.aligned, strict=True)):
        demand((a, b, c, d)[place] % aligned == 0, f"{name} is not aligned to {aligned} as was said")
    times, plus = (ctypes.c_float.from_address(x).value for x in (alpha, beta))
    for name, address, layout in zip("ABCD", (a, b, c, d), layouts, strict=True):
        if name != "C" or plus:
            _inside(address, layout.extent, name)
    demand(workspace_size_in_bytes >= algorithm.workspace, "the workspace is too small")
    demand(workspace % WORKSPACE_ALIGNMENT == 0, "the workspace is not aligned")
    _inside(workspace, workspace_size_in_bytes, "workspace")
    demand(c != d or layouts[2] == layouts[3], "C and D share memory, so they need one layout")
    bias = 0
    epilogue = product.set.get(D.EPILOGUE, 1)
    demand(epilogue in (1, 4), f"epilogue {epilogue} is not pretended", NOT_SUPPORTED)
    if epilogue == 4:
        bias = product.set.get(D.BIAS_POINTER, 0)
        demand(bias, "the epilogue needs a bias, and none is set")
        demand(
            product.set.get(D.BIAS_DATA_TYPE, layouts[3].type) == layouts[3].type, "a bias of another type"
        )
        _inside(bias, layouts[3].rows * TYPES[layouts[3].type].itemsize, "bias")
    calls.products += 1
    places, turned = (a, b, c, d, bias), (product.set.get(D.TRANSA, 0), product.set.get(D.TRANSB, 0))
    cuda.Stream._all[stream].do(lambda: _compute(places, layouts, turned, times, plus))


def _compute(
    places: tuple[int, ...], layouts: tuple[Layout, ...], turned: tuple[int, int], alpha: float, beta: float
) -> None:
    a, b, c, d = (layout.on(place) for layout, place in zip(layouts, places, strict=False))
    a, b = (
        (x.swapaxes(1, 2) if turn else x).astype(np.float32) for x, turn in zip((a, b), turned, strict=True)
    )
    with np.errstate(all="ignore"):
        sums = np.float32(alpha) * np.matmul(a, b)
        if beta:
            sums += np.float32(beta) * c.astype(np.float32)
        if places[4]:
            kind = d.dtype
            memory = (ctypes.c_char * (d.shape[1] * kind.itemsize)).from_address(places[4])
            sums += np.frombuffer(memory, kind).astype(np.float32)[:, None]
        d[...] = sums.astype(d.dtype)
