"""Attention by cuDNN: one graph for each set of shapes and strides, built at first use and cached.

q, k and v are read in place, even if heads are columns of a wider array, and gradients are written in place;
strides describe both. cuDNN supports bfloat16 and float16, as many keys as queries, and heads of
up to 128 columns (256 on Hopper); our kernels in `attention` compute all other cases. The package
nvidia-cudnn-frontend provides the graphs, cuDNN the kernels.

By default backward is deterministic, for which cuDNN stores a number per score (the frontend's "dP
workspace"). If these numbers exceed `most_slopes` bytes, backward is called for some sequences or heads at a
time. If one head alone exceeds this limit, cuDNN 9.25 and later use a method on Hopper that needs memory only
for gradients. Older versions are not used then, since memory must not grow with the square of T.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.device.arrays import pool_of
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError, first_line
from zero_mpi.ops.gpu.launch import BF16, F16, memory_of
from zero_mpi.ops.sizes import cudnn_group, most_slopes

Q, K, V, O, STATS, DY, DQ, DK, DV = range(1, 10)  # ids of the tensors in a graph
INPUTS = {"q": Q, "k": K, "v": V, "o": O, "dO": DY}  # ids of inputs by argument name
BACKWARD_IDS = Q, K, V, O, DY, DQ, DK, DV
WAYS = "auto", "own", "cudnn", "any-order"
ANY_ORDER = WAYS[-1]
TYPES = {BF16: "BFLOAT16", F16: "HALF"}
ALIGNMENT = 16  # bytes; addresses and the strides of heads, positions and sequences are multiples of it
OLDEST_GPU, HOPPER = 80, 90
WIDEST, WIDEST_ON_HOPPER = 128, 256
OLDEST_CUDNN = 90000  # first version whose attention has all features that this module uses
SLOPES_LIMIT = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT"  # variable of the frontend: bytes, or -1 for no limit
LINEAR = 16  # bytes per element of q: 12 for float32 dq, dk and dv of each query head, and a third more

FAULTS = AttributeError, OSError, RuntimeError, TypeError, ValueError  # raised by incompatible versions

logger = logging.getLogger("zero_mpi")
Strides = tuple[int, ...]


def described(x: Array) -> tuple[Strides, Strides]:
    """Return (dim, stride) of x (B, T, heads, width) for cuDNN: heads before positions, in elements."""
    b, t, h, d = (stride // x.itemsize for stride in x.strides)
    return (x.shape[0], x.shape[2], x.shape[1], x.shape[3]), (b, h, t, d)


def lies_well(x: Array) -> bool:
    """Return whether cuDNN's kernels can read x (B, T, heads, width) in place."""
    return x.data.ptr % ALIGNMENT == 0 and steps_well(x.shape, x.strides, x.itemsize)


@lru_cache
def steps_well(shape: Strides, strides: Strides, size: int) -> bool:
    """Return whether cuDNN's kernels support an array's strides; `size`: bytes of an element."""
    steps = [stride for length, stride in zip(shape, strides, strict=True) if length > 1]
    aligned = all(stride % ALIGNMENT == 0 for stride in steps[:-1])
    return aligned and strides[-1] == size and shape[-1] * size % ALIGNMENT == 0


def way() -> str:
    """Return the choice of ZERO_MPI_GPU_ATTENTION; raise UsageError if it is invalid."""
    choice = os.environ.get("ZERO_MPI_GPU_ATTENTION", "auto")
    if choice not in WAYS:
        raise UsageError(f"ZERO_MPI_GPU_ATTENTION: expected one of {', '.join(WAYS)}, got {choice!r}")
    return choice


class Graph:
    """Built graph; a call with the addresses of its tensors runs it on the compute stream.

    turns: one entry per run of the graph in a call, with the offset of each address. Raises RuntimeError if
    the graph needs more than `most` bytes of workspace.
    """

    def __init__(self, owner: Sdpa, graph: Any, most: float, turns: Sequence[dict[int, int]]) -> None:
        cudnn = owner.cudnn
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        self._graph, self._owner, self._turns = graph, owner, turns
        self._workspace = max(1, int(graph.get_workspace_size()))
        if self._workspace > most:
            raise RuntimeError(f"its workspace of {self._workspace >> 20} MiB exceeds {int(most) >> 20} MiB")

    def __call__(self, addresses: dict[int, int]) -> None:
        buffer = pool_of(self._owner.gpu).take((self._workspace,), np.uint8)
        for shifts in self._turns:
            places = {number: p + shifts[number] for number, p in addresses.items()} if shifts else addresses
            self._graph.execute(places, buffer.data.ptr, handle=self._owner.handle)


class Sdpa:
    """cuDNN on the compute stream of a GPU: its handle and graphs.

    Raises ImportError or one of FAULTS if cuDNN is missing or incompatible, or the GPU is too old.
    """

    def __init__(self, gpu: Any) -> None:
        slopes = str(most_slopes(memory_of(gpu)))
        limit = os.environ.setdefault(SLOPES_LIMIT, slopes)  # the frontend reads this variable for each graph
        self.slopes = float(limit) if limit.isdigit() else math.inf
        cudnn = self.cudnn = import_module("cudnn")
        self.gpu = gpu
        self.version = int(cudnn.backend_version())
        self.capability = int(gpu.cupy.cuda.Device(gpu.number).compute_capability)
        if self.version < OLDEST_CUDNN or self.capability < OLDEST_GPU:
            raise RuntimeError(f"cuDNN {self.version} on a GPU of compute capability {self.capability}")
        self.handle = cudnn.create_handle()
        cudnn.set_stream(handle=self.handle, stream=gpu.stream.ptr)
        self.graphs: dict[Any, Graph | None] = {}
        self.refusals: list[str] = []  # cuDNN's messages for arrays that it does not support

    def fits(self, q: Array, k: Array, v: Array) -> bool:
        """Return whether cuDNN can compute attention of these arrays."""
        widest = WIDEST_ON_HOPPER if self.capability == HOPPER else WIDEST
        return bool(
            q.dtype in TYPES
            and q.shape[1] == k.shape[1]
            and q.shape[3] == v.shape[3] <= widest
            and all(lies_well(x) for x in (q, k, v))
        )

    def forward(self, q: Array, k: Array, v: Array, scale: float, y: Array, stats: Array) -> bool:
        """Fill y (B, T, H, E) and stats (B, H, T), the logarithms of sums. Return False if unsupported."""
        graph = self._graph_for(False, scale, (q, k, v, y))
        if graph is None:
            return False
        graph({Q: q.data.ptr, K: k.data.ptr, V: v.data.ptr, O: y.data.ptr, STATS: stats.data.ptr})
        return True

    def backward(self, arrays: Sequence[Array], stats: Array, scale: float) -> bool:
        """Fill dq, dk and dv, the last of `arrays`, which are in the order of BACKWARD_IDS.

        Return False if cuDNN does not support these arrays.
        """
        graph = self._graph_for(True, scale, arrays) if all(map(lies_well, arrays[4:])) else None
        if graph is None:
            return False
        addresses = {number: x.data.ptr for number, x in zip(BACKWARD_IDS, arrays, strict=True)}
        graph(addresses | {STATS: stats.data.ptr})
        return True

    def _graph_for(self, backward: bool, scale: float, arrays: Sequence[Array]) -> Graph | None:
        """Return the graph for these arrays, built at first use; None if cuDNN does not support them."""
        scale = float(scale)  # the bindings accept only a float
        ordered = not backward or way() != ANY_ORDER
        q, k = arrays[:2]  # their shapes determine all other shapes
        key = (backward, ordered, scale, q.dtype, q.shape, k.shape, *[x.strides for x in arrays])
        if key not in self.graphs:
            parts, turns = self._parts(arrays) if backward and ordered else (arrays, [{}])
            most = self.slopes + LINEAR * math.prod(parts[0].shape)
            try:
                graph = self._backward(ordered, scale, parts) if backward else self._forward(scale, *parts)
                self.graphs[key] = Graph(self, graph, most, turns)
            except (self.cudnn.cudnnGraphNotSupportedError, *FAULTS) as error:
                self.graphs[key] = None
                self.refusals.append(first_line(error))
                name = f"{'the gradient of ' if backward else ''}attention of {tuple(arrays[0].shape)}"
                text = "%s uses our own kernels, which are several times slower; cuDNN (frontend %s): %s"
                logger.warning(text, name, self.cudnn.__version__, self.refusals[-1])
        return self.graphs[key]

    def _parts(self, arrays: Sequence[Array]) -> tuple[Sequence[Array], list[dict[int, int]]]:
        """Return the parts of arrays for one run of a graph, and the address offsets of each run."""
        (batch, length, heads, _), kv = arrays[0].shape, arrays[1].shape[2]
        sequences, group = cudnn_group(arrays[0].shape, kv, self.slopes)
        if (sequences, group) == (batch, kv):
            return arrays, [{}]
        shared = [x.shape[2] // kv for x in arrays]
        parts = [x[:sequences, :, : group * n] for x, n in zip(arrays, shared, strict=True)]
        return parts, [
            {STATS: 4 * length * (first * heads + head * heads // kv)}
            | {
                number: first * x.strides[0] + head * n * x.strides[2]
                for number, x, n in zip(BACKWARD_IDS, arrays, shared, strict=True)
            }
            for first in range(0, batch, sequences)
            for head in range(0, kv, group)
        ]

    def _new_graph(self, **arrays: Array) -> tuple[Any, dict[str, Any]]:
        """Return a new graph and, by argument name, its input tensors, which describe these arrays."""
        single, kind = self.cudnn.data_type.FLOAT, getattr(self.cudnn.data_type, TYPES[arrays["q"].dtype])
        graph = self.cudnn.pygraph(
            io_data_type=kind, intermediate_data_type=single, compute_data_type=single, handle=self.handle
        )
        inputs = {}
        for name, x in arrays.items():
            dim, stride = map(list, described(x))
            inputs[name] = graph.tensor(name=name, uid=INPUTS[name], dim=dim, stride=stride, data_type=kind)
        return graph, inputs

    def _forward(self, scale: float, q: Array, k: Array, v: Array, y: Array) -> Any:
        graph, inputs = self._new_graph(q=q, k=k, v=v)
        o, stats = graph.sdpa(**inputs, attn_scale=scale, use_causal_mask=True, generate_stats=True)
        give_out(o, O, *described(y))
        b, t, h, _ = y.shape
        give_out(stats, STATS, (b, h, t, 1), (h * t, t, 1, 1)).set_data_type(self.cudnn.data_type.FLOAT)
        return graph

    def _backward(self, ordered: bool, scale: float, arrays: Sequence[Array]) -> Any:
        q, k, v, y, dy, *results = arrays
        graph, inputs = self._new_graph(q=q, k=k, v=v, o=y, dO=dy)
        (b, t, h, _), single = y.shape, self.cudnn.data_type.FLOAT
        stats = graph.tensor(
            name="stats", uid=STATS, dim=[b, h, t, 1], stride=[h * t, t, 1, 1], data_type=single
        )
        gradients = graph.sdpa_backward(
            **inputs, stats=stats, attn_scale=scale, use_causal_mask=True, use_deterministic_algorithm=ordered
        )
        for tensor, number, x in zip(gradients, (DQ, DK, DV), results, strict=True):
            give_out(tensor, number, *described(x))
        return graph


def give_out(tensor: Any, number: int, dim: Strides, stride: Strides) -> Any:
    """Make a tensor an output of its graph, written with these strides; return the tensor."""
    return tensor.set_output(True).set_dim(list(dim)).set_stride(list(stride)).set_uid(number)


_library: tuple[Any, Sdpa | None, str] = None, None, ""


def sdpa() -> tuple[Sdpa | None, str]:
    """Return (cuDNN on the GPU in use, "") or (None, why it cannot be used)."""
    global _library
    gpu = device.in_use()
    if _library[0] is not gpu:
        try:
            _library = gpu, Sdpa(gpu), ""
        except ImportError as error:
            _library = gpu, None, f"nvidia-cudnn-frontend cannot be imported ({error})"
        except FAULTS as error:
            _library = gpu, None, f"no compatible library ({first_line(error)})"
    return _library[1:]
