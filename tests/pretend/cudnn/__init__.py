"""Subset of cudnn-frontend that the package uses, on the simulated device: graphs of one attention node.

It has the names of the real package and is stricter: a graph must have passed all build steps, a call must
have the addresses of exactly its tensors, and every tensor must be inside one allocation. Attention is
computed in float32 by NumPy from dims and strides, asynchronously in the order of the handle's stream.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable
from enum import Enum
from itertools import count
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from cupy import cuda

__version__ = "1.28.0"


class data_type(Enum):
    """Types of elements."""

    FLOAT, HALF, BFLOAT16, NOT_SET = range(4)


class heur_mode(Enum):
    """Sources of plans."""

    A, B, FALLBACK = range(3)


TYPES = {
    data_type.FLOAT: np.dtype(np.float32),
    data_type.HALF: np.dtype(np.float16),
    data_type.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
WORKSPACE = 4096
version = 92500
WIDEST = 128
calls = SimpleNamespace(built=0, executed=0, in_order=[])  # counters that tests check
refuses: list[str] = []  # names of nodes that get no plan; set by tests


class cudnnGraphNotSupportedError(Exception):
    """Error for a graph that has no plan."""


def backend_version() -> int:
    return version


_handles: dict[int, int] = {}
_numbers = count(0x5000)


def create_handle() -> int:
    number = next(_numbers)
    _handles[number] = 0
    return number


def set_stream(handle: int, stream: int) -> None:
    assert handle in _handles, "no handle"
    _handles[handle] = stream


def destroy_handle(handle: int) -> None:
    del _handles[handle]


class Tensor:
    """A tensor of a graph."""

    def __init__(self, **options: Any) -> None:
        self.name, self.uid = options.get("name", ""), options.get("uid", -1)
        self.dim, self.stride = options.get("dim"), options.get("stride")
        self.type, self.output = options.get("data_type", data_type.NOT_SET), False

    def set_output(self, value: bool) -> Tensor:
        self.output = value
        return self

    def set_dim(self, value: list[int]) -> Tensor:
        self.dim = value
        return self

    def set_stride(self, value: list[int]) -> Tensor:
        self.stride = value
        return self

    def set_uid(self, value: int) -> Tensor:
        self.uid = value
        return self

    def set_data_type(self, value: data_type) -> Tensor:
        self.type = value
        return self

    def on(self, address: int) -> np.ndarray:
        kind = TYPES[self.type]
        last = sum((n - 1) * step for n, step in zip(self.dim, self.stride, strict=True))
        extent = (last + 1) * kind.itemsize
        if not cuda.inside(address, extent):
            raise RuntimeError(f"{self.name or self.uid}: {extent} bytes are not in one allocation (pretend)")
        memory = (ctypes.c_char * extent).from_address(address)
        steps = [step * kind.itemsize for step in self.stride]
        return np.ndarray(self.dim, kind, memory, strides=steps)


class pygraph:
    """A graph with one node."""

    STEPS = ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")

    def __init__(
        self, name: str = "test_graph", io_data_type: Any = None, intermediate_data_type: Any = None,
        compute_data_type: Any = None, handle: Any = None,
    ) -> None:  # fmt: skip
        assert intermediate_data_type == compute_data_type == data_type.FLOAT, "sums are float32"
        assert handle in _handles, "a graph belongs to a handle"
        self._io, self._done = io_data_type, 0
        self._tensors: list[Tensor] = []
        self._node: Callable[..., None] | None = None

    def tensor(
        self, dim: list[int], stride: list[int], data_type: Any = data_type.NOT_SET, is_virtual: bool = False,
        is_pass_by_value: bool = False, ragged_offset: Any = None, reordering_type: Any = None,
        name: str = "", uid: int = -1,
    ) -> Tensor:  # fmt: skip
        assert isinstance(dim, list)
        assert isinstance(stride, list)
        assert len(dim) == len(stride) == 4
        tensor = Tensor(dim=dim, stride=stride, data_type=data_type, name=name, uid=uid)
        self._tensors.append(tensor)
        return tensor

    def _outputs(self, *names: str) -> list[Tensor]:
        tensors = [Tensor(name=name) for name in names]
        self._tensors += tensors
        return tensors

    def sdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attn_scale: float,
        use_causal_mask: bool,
        generate_stats: bool,
    ) -> list[Tensor]:
        assert use_causal_mask
        assert generate_stats
        assert self._node is None
        o, stats = self._outputs("O", "Stats")
        self.scale, self.what, self.inputs = attn_scale, "sdpa", (q, k, v)
        self._node = lambda at: attend(at, attn_scale, q, k, v, o, stats)
        return [o, stats]

    def sdpa_backward(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, dO: Tensor, stats: Tensor, *, attn_scale: float,
        use_causal_mask: bool, use_deterministic_algorithm: bool,
    ) -> list[Tensor]:  # fmt: skip
        assert use_causal_mask
        calls.in_order.append(use_deterministic_algorithm)
        assert self._node is None
        outputs = self._outputs("dQ", "dK", "dV")
        self.what, self.inputs = "sdpa_backward", (q, k, v)
        self._node = lambda at: turn_back(at, attn_scale, (q, k, v, o, dO, stats), outputs)
        return outputs

    def _step(self, name: str) -> None:
        assert self.STEPS[self._done] == name, f"{name} before {self.STEPS[self._done]}"
        self._done += 1

    def validate(self) -> None:
        self._step("validate")
        for tensor in self._tensors:
            if tensor.type == data_type.NOT_SET:
                tensor.type = self._io
            assert tensor.uid > 0, f"{tensor.name} has no uid"
            assert tensor.dim, f"{tensor.name} has no dims"
            assert tensor.stride, f"{tensor.name} has no strides"
            assert tensor.output == (tensor.name in ("O", "Stats", "dQ", "dK", "dV")), tensor.name
            assert tensor.dim[3] == 1 or tensor.stride[3] == 1, f"{tensor.name}: the last stride is not 1"
            if tensor.name not in ("Stats", "stats"):
                assert tensor.type == self._io != data_type.FLOAT, f"{tensor.name}: {tensor.type}"
                assert all(step % 8 == 0 for step in tensor.stride[:3]), f"{tensor.name} by {tensor.stride}"
        assert len({tensor.uid for tensor in self._tensors}) == len(self._tensors), "two tensors have one uid"
        q, k, v = (x.dim for x in self.inputs)
        fit = q[0] == k[0] == v[0] and q[1] % k[1] == 0 and k[1:3] == v[1:3] and q[3] == k[3]
        assert fit, (q, k, v)
        assert q[2] == k[2], "the package promised equal numbers of queries and keys"

    def build_operation_graph(self) -> None:
        self._step("build_operation_graph")

    def create_execution_plans(self, heuristics: list[heur_mode]) -> None:
        assert heuristics
        assert all(isinstance(mode, heur_mode) for mode in heuristics)
        self._step("create_execution_plans")

    def check_support(self) -> None:
        self._step("check_support")
        if self.what in refuses or any(x.dim[3] > WIDEST or x.dim[3] % 8 for x in self.inputs):
            raise cudnnGraphNotSupportedError("No execution plans support the graph. (pretend)")

    def build_plans(self) -> None:
        self._step("build_plans")
        calls.built += 1

    def get_workspace_size(self) -> int:
        assert self._done == len(self.STEPS), "the graph is not built"
        return WORKSPACE if self.what == "sdpa" else self._slopes()

    def _slopes(self) -> int:
        """Return the bytes of score gradients in blocks of 64 by 128, or of dq if these exceed the limit."""
        (b, h, t, d), s = self.inputs[0].dim, self.inputs[1].dim[2]
        size = 2 * b * h * (-(-t // 64) * 64) * (-(-s // 128) * 128)
        limit = int(os.environ.get("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", "-1"))
        return 4 * b * h * t * d if backend_version() >= 92500 and 0 <= limit < size else size

    def execute(self, tensor_dict: dict[int, int], workspace: int, handle: Any = None) -> None:
        assert self._done == len(self.STEPS), "the graph is not built"
        uids = {tensor.uid for tensor in self._tensors}
        assert set(tensor_dict) == uids, f"addresses of {sorted(tensor_dict)} for tensors {sorted(uids)}"
        assert all(type(x) is int and x % 16 == 0 for x in tensor_dict.values()), (
            "addresses are aligned integers"
        )
        if not cuda.inside(workspace, self.get_workspace_size()):
            raise RuntimeError("the workspace is too small (pretend)")
        arrays = {tensor.uid: tensor.on(tensor_dict[tensor.uid]) for tensor in self._tensors}
        calls.executed += 1
        cuda.Stream._all[_handles[handle]].do(lambda: self._node(arrays))


Arrays = dict[int, np.ndarray]


def wide(at: Arrays, tensor: Tensor, heads: int) -> np.ndarray:
    """Return a tensor (B, H, S, D) in float32, with each head repeated for the query heads that share it."""
    x = at[tensor.uid].astype(np.float32)
    return np.repeat(x, heads // x.shape[1], axis=1)


def exponents(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """Return scores (B, H, T, S); -inf for keys that are masked."""
    scores = np.float32(scale) * (q @ k.swapaxes(-1, -2))
    return scores + np.triu(np.full(scores.shape[-2:], -math.inf, np.float32), 1)


def attend(at: Arrays, scale: float, q: Tensor, k: Tensor, v: Tensor, o: Tensor, stats: Tensor) -> None:
    heads = q.dim[1]
    scores = exponents(*(wide(at, x, heads) for x in (q, k)), scale)
    largest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    at[o.uid][...] = (weights / total @ wide(at, v, heads)).astype(TYPES[o.type])
    at[stats.uid][...] = largest + np.log(total)


def turn_back(at: Arrays, scale: float, inputs: tuple[Tensor, ...], outputs: list[Tensor]) -> None:
    heads, (b, kv, s, _) = inputs[0].dim[1], inputs[1].dim
    q, k, v, o, do, stats = (wide(at, x, heads) for x in inputs)
    weights = np.exp(exponents(q, k, scale) - stats)
    slopes = weights * (do @ v.swapaxes(-1, -2) - (do * o).sum(axis=-1, keepdims=True)) * np.float32(scale)
    gradients = slopes @ k, slopes.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ do
    for tensor, x in zip(outputs, gradients, strict=True):
        if tensor is not outputs[0]:
            x = x.reshape(b, kv, heads // kv, s, -1).sum(axis=2)
        at[tensor.uid][...] = x.astype(TYPES[tensor.type])
