"""CuPy without a GPU, for tests: device memory is host memory, streams are threads, kernels are emulated.

It has the part of CuPy that the package uses, and is as strict: no operation mixes arrays of device and host,
and only `get` returns a NumPy array. Copies and kernels on a stream run in its thread after a random delay of
up to PRETEND_CUPY_DELAY seconds (0). Code that reads without a wait therefore reads too early, and tests
detect it. Array expressions wait for the current stream and are then computed immediately.

PYTHONPATH=tests/pretend makes it the cupy of a process; PRETEND_CUPY_GPUS (1) sets the number of GPUs.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from . import cuda

__version__ = "14.2.0"
float32, float64, int32, int64, uint8, uint16 = (
    np.float32, np.float64, np.int32, np.int64, np.uint8, np.uint16
)  # fmt: skip
inf, newaxis = np.inf, None


def host_refused(*values: Any) -> None:
    for value in values:
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError(f"Unsupported type {type(value)}")


def bare(value: Any) -> Any:
    """Return the NumPy array of an argument, also inside lists and tuples."""
    if isinstance(value, ndarray):
        return value._host
    if isinstance(value, (list, tuple)):
        return type(value)(bare(item) for item in value)
    host_refused(value)
    return value


def dressed(value: Any) -> Any:
    """Return a result of NumPy as a device array; scalars become arrays without dimensions."""
    if isinstance(value, tuple):
        return tuple(dressed(item) for item in value)
    return asarray(value) if isinstance(value, (np.ndarray, np.generic)) else value


def computed(function: Any, *arguments: Any, **named: Any) -> Any:
    """Return function(...) of NumPy on device arrays, after the current stream has finished."""
    stream = cuda.get_current_stream()
    if stream.recorded is not None:
        return recorded(stream, function, arguments, named)
    stream.synchronize()
    named = {key: bare(value) for key, value in named.items()}
    out = named.get("out")
    result = function(*bare(arguments), **named)
    return dressed(result) if out is None else out


def recorded(stream: Any, function: Any, arguments: Any, named: dict[str, Any]) -> Any:
    """Return an array that `function` fills when a graph is launched; a first call gives shape and type."""
    positional, named = bare(arguments), {key: bare(value) for key, value in named.items()}
    trial = [x.copy() if isinstance(x, np.ndarray) else x for x in positional]
    result = named["out"] if "out" in named else dressed(function(*trial, **named))
    if isinstance(result, ndarray):
        stream.do(lambda: np.copyto(result._host, function(*positional, **named)))
    else:
        stream.do(lambda: function(*positional, **named) is None)
    return result


class ndarray:
    """Array in device memory."""

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"
    ) -> None:
        kind = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        self.data = cuda.alloc(size) if memptr is None else memptr
        self.base: ndarray | None = None
        memory = (ctypes.c_char * max(1, size)).from_address(self.data.ptr)
        if not size and strides is None:
            strides = (0,) * len(shape)  # strides of an empty array, as in CuPy
        self._host = np.ndarray(shape, kind, memory, strides=strides, order=order)

    def _view(self, host: np.ndarray) -> ndarray:
        view = ndarray.__new__(ndarray)
        view._host, view.base = host, self if self.base is None else self.base
        offset = host.__array_interface__["data"][0] - self.data.mem.ptr if host.size else 0
        view.data = cuda.MemoryPointer(self.data.mem, offset)
        return view

    @property
    def _c_contiguous(self) -> bool:
        return self._host.flags.c_contiguous

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        host = self._host
        strides = None if host.flags.c_contiguous else host.strides
        return {
            "shape": host.shape, "typestr": host.dtype.str, "descr": host.dtype.descr, "version": 3,
            "stream": 1, "strides": strides, "data": (self.data.ptr, False),
        }  # fmt: skip

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        """Return a copy on the host after the stream has finished; arrays with gaps are packed first."""
        if stream is not None and not self.flags.c_contiguous:
            with stream:
                return ascontiguousarray(self).get(stream, order, out, blocking)
        stream = stream or cuda.get_current_stream()
        target = np.empty(self.shape, self.dtype) if out is None else out

        def copy() -> None:
            target[...] = self._host

        stream.do(copy)
        if blocking:
            stream.synchronize()
        return target

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        """Fill the array from a host array of the same shape and type."""
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype or arr.shape != self.shape:
            raise ValueError(f"Shape or type mismatch: {arr.shape} {arr.dtype}, {self.shape} {self.dtype}")
        if not (self.flags.c_contiguous or self.flags.f_contiguous):
            raise RuntimeError("Cannot set to non-contiguous array")
        copied = arr.copy() if stream is None else arr

        def copy() -> None:
            self._host[...] = copied

        (stream or cuda.get_current_stream()).do(copy)

    def view(self, dtype: Any = None) -> ndarray:
        return self._view(self._host.view() if dtype is None else self._host.view(dtype))

    def reshape(self, *shape: Any) -> ndarray:
        reshaped = self._host.reshape(*shape)
        if np.shares_memory(reshaped, self._host) or not reshaped.size:
            return self._view(reshaped)
        return computed(np.reshape, self, shape[0] if len(shape) == 1 else shape)

    def swapaxes(self, first: int, second: int) -> ndarray:
        return self._view(self._host.swapaxes(first, second))

    @property
    def T(self) -> ndarray:
        return self._view(self._host.T)

    def __getitem__(self, index: Any) -> ndarray:
        basic = index if isinstance(index, tuple) else (index,)
        if all(isinstance(item, (int, np.integer, slice)) or item is None or item is ... for item in basic):
            part = self._host[basic if any(item is ... for item in basic) else (*basic, ...)]
            return self._view(part)
        return computed(lambda host, *place: host[place], self, *basic)

    def __setitem__(self, index: Any, value: Any) -> None:
        host_refused(value)

        def assign(host: np.ndarray, values: Any, *place: Any) -> None:
            host[place] = values

        computed(assign, self, value, *(index if isinstance(index, tuple) else (index,)))

    def __len__(self) -> int:
        return len(self._host)

    def __float__(self) -> float:
        return float(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())

    def fill(self, value: Any) -> None:
        computed(lambda host: host.fill(value), self)

    def copy(self, order: str = "C") -> ndarray:
        return computed(np.copy, self, order=order)

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> ndarray:
        return self if not copy and self.dtype == dtype else computed(lambda host: host.astype(dtype), self)

    def __repr__(self) -> str:
        return f"pretend cupy {self._host!r}"


for _name in ("shape", "dtype", "size", "ndim", "strides", "itemsize", "nbytes", "flags"):
    setattr(ndarray, _name, property(lambda self, name=_name: getattr(self._host, name)))
for _name in ("sum", "mean", "max", "min", "argmax", "all", "any", "tolist", "take"):

    def _reduce(self: ndarray, *arguments: Any, _method: str = _name, **named: Any) -> Any:
        return computed(
            lambda host, *rest, **more: getattr(host, _method)(*rest, **more), self, *arguments, **named
        )

    setattr(ndarray, _name, _reduce)
ARITHMETIC = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
COMPARISONS = ["lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor"]
for _name in [*ARITHMETIC, *COMPARISONS, *(f"r{name}" for name in ARITHMETIC), "neg", "abs", "invert"]:

    def _operate(self: ndarray, *others: Any, _method: str = f"__{_name}__") -> Any:
        host_refused(*others)
        return computed(lambda host, *rest: getattr(host, _method)(*rest), self, *others)

    setattr(ndarray, f"__{_name}__", _operate)
for _name in ARITHMETIC:

    def _in_place(self: ndarray, other: Any, _method: str = f"__i{_name}__") -> ndarray:
        host_refused(other)
        computed(lambda host, rest: getattr(host, _method)(rest), self, other)
        return self

    setattr(ndarray, f"__i{_name}__", _in_place)
ndarray.__hash__ = object.__hash__  # type: ignore[method-assign]


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype)


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    array = ndarray(shape, dtype)
    array.fill(0)
    return array


def zeros_like(a: ndarray, dtype: Any = None) -> ndarray:
    return zeros(a.shape, a.dtype if dtype is None else dtype)


def asarray(a: Any, dtype: Any = None) -> ndarray:
    """Return a device array made from a host array, or the argument if it already is a device array."""
    if isinstance(a, ndarray):
        return a if dtype is None or a.dtype == dtype else a.astype(dtype)
    host = np.asarray(a, dtype)
    if host.flags.fnc:  # CuPy keeps this order, and kernels read the memory
        return asarray(host.T).T
    array = ndarray(host.shape, host.dtype)
    array.set(np.ascontiguousarray(host).reshape(host.shape))
    return array


array = asarray


def ascontiguousarray(a: ndarray) -> ndarray:
    return a if a.flags.c_contiguous else a.copy()


FUNCTIONS = {
    "add", "arange", "argsort", "bincount", "concatenate", "cumsum", "divide", "empty_like", "exp", "full",
    "log", "matmul", "maximum", "mean", "sqrt", "tanh", "triu", "unique", "where",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "RawModule":
        from .raw import RawModule

        return RawModule
    if name not in FUNCTIONS:
        raise AttributeError(f"the simulated CuPy has no {name}; see tests/pretend/cupy")
    function = getattr(np, name)

    def on_device(*arguments: Any, **named: Any) -> Any:
        return computed(function, *arguments, **named)

    return on_device


def get_default_memory_pool() -> Any:
    return cuda.POOL
