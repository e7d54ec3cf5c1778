"""Generation without Python code between layers: one call computes the next position of each sequence.

`Program` visits the layers of a model once and records their computation as instructions of `ops.cpu.decode`.
`RECORDERS` lists the supported layers; a model with other layers uses `infer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zero_mpi import device, ops
from zero_mpi.device.arrays import address
from zero_mpi.device.types import Array
from zero_mpi.nn.activation import GELU, GeGLU, JointSwiGLU, Multiply, SwiGLU
from zero_mpi.nn.adapters import AddedRows, LowRank
from zero_mpi.nn.attention import (
    CausalAttention,
    FusedQKV,
    JointQKNorm,
    JointQKV,
    MergeHeads,
    ProjectQKV,
    QKNorm,
    RoPE,
)
from zero_mpi.nn.compose import Chain, Residual
from zero_mpi.nn.embedding import Embedding, LearnedPositions
from zero_mpi.nn.layer import Cache, Layer, Stage, Weights
from zero_mpi.nn.linear import ALL, Linear, Rows
from zero_mpi.nn.norm import LayerNorm, RMSNorm
from zero_mpi.ops.packed_matrix import PackedMatrix
from zero_mpi.telemetry import log


class Decoder:
    """Generator of a model's outputs for one sequence, with a cache of earlier positions."""

    def __init__(self, stages: Sequence[Stage], p: Weights) -> None:
        self.stages, self.p, self.cache = stages, p, Cache()
        self.program: Program | None = None
        self._records = ops.compiles() and device.in_use() is device.HOST

    def read(self, ids: Array) -> Array:
        """Return outputs (T, V) for ids (T,) at the positions after those in the cache."""
        program = self._next_program() if len(ids) == 1 and self.cache.position else None
        if program is None:
            y: Any = ids[None]
            for stage in self.stages:
                y = stage.layer.infer(self.p, y, self.cache)
            y = y[0]
        else:
            y = program.run(ids, np.array([self.cache.position])).copy()
        self.cache.position += len(ids)
        return y

    def _next_program(self) -> Program | None:
        """Return a program with capacity for one more position; None if the model cannot be recorded."""
        position = self.cache.position
        if self._records and (self.program is None or self.program.capacity <= position):
            try:
                self.program = Program(self, self.cache, 1 << position.bit_length())
            except Unrecorded:
                self._records = False
        return self.program


class Batch:
    """Sequences that begin with `prompts`; `read` adds at most `tokens` tokens. May raise Unrecorded."""

    def __init__(self, stages: Sequence[Stage], p: Weights, prompts: Sequence[Array], tokens: int) -> None:
        readers = [Decoder(stages, p) for _ in prompts]
        self.outputs = np.stack([reader.read(ids)[-1] for reader, ids in zip(readers, prompts, strict=True)])
        self._positions = np.array([reader.cache.position for reader in readers])
        capacity, cache = int(self._positions.max()) + tokens, Cache()
        for layer in readers[0].cache.entries:
            entries = [reader.cache.entries[layer] for reader in readers]
            cache.entries[layer] = tuple(stack(arrays, capacity) for arrays in zip(*entries, strict=True))
        self._program = Program(readers[0], cache, capacity, len(prompts))

    def read(self, ids: Array) -> Array:
        """Return outputs (B, V) for the next token (B,) of each sequence; the next call overwrites them."""
        self.outputs = self._program.run(ids, self._positions)
        self._positions += 1
        return self.outputs


def stack(arrays: Sequence[Array], capacity: int) -> Array:
    """Return one array (B, capacity, ...) with the arrays (1, positions, ...) of several sequences."""
    batch = np.zeros((len(arrays), capacity, *arrays[0].shape[2:]), arrays[0].dtype)
    for row, array in zip(batch, arrays, strict=True):
        count = min(capacity, array.shape[1])
        row[:count] = array[0, :count]
    return batch


class Unrecorded(Exception):
    """Error for a layer or an array that no instruction supports."""


class Program:
    """The recorded instructions of a model, for sequences of up to `capacity` positions in `cache`."""

    def __init__(self, model: Decoder, cache: Cache, capacity: int, sequences: int = 1) -> None:
        from zero_mpi.ops.cpu import decode

        self.code, self.p, self.cache = decode, model.p, cache
        self.capacity, self.sequences = capacity, sequences
        self._steps = list[list[list[int]]]()
        self._arrays = list[Any]()  # arrays whose addresses are in instructions, kept alive
        self._buffers: dict[tuple[int, int, int], Array] = {}
        self.first: tuple[Embedding, Array] | None = None
        x: Any = None
        for number, stage in enumerate(model.stages):  # buffers of a stage are reused two stages later
            self._turn, self._count = number % 2, 0
            x = self.record(stage.layer, x)
        self._outputs, self._code = x, decode.instructions(*self._steps)
        ops.fill_cache(ops.GENERATION, log.info)

    def run(self, ids: Array, positions: Array) -> Array:
        """Return the outputs (B, V) of tokens (B,) at positions (B,); the next call overwrites them."""
        assert self.first is not None
        embedding, x = self.first
        x[...] = embedding.forward(self.p, ids)[0]
        self.code.crew().run(self._code, positions)
        return self._outputs

    def record(self, layer: Layer, x: Any) -> Any:
        """Record a layer and return its output; raise Unrecorded if it is not supported."""
        if type(layer) not in RECORDERS:
            raise Unrecorded(type(layer).__name__)
        return RECORDERS[type(layer)](self, layer, x)

    def buffer(self, *shape: int) -> Array:
        """Return an array (B, ...) for results of the current stage."""
        self._count += 1
        key = self._turn, self._count, int(np.prod(shape))
        buffer = self._buffers.setdefault(key, np.zeros((self.sequences, key[2]), np.float32))
        return buffer.reshape(self.sequences, *shape)

    def place(self, x: Any) -> int:
        """Return the address of an array, or of a number as float32, and keep the array alive."""
        array = x if isinstance(x, np.ndarray) else np.asarray(x, np.float32)
        if array.dtype != np.float32 or not array.flags.c_contiguous:
            raise Unrecorded(f"an array of {array.dtype}")
        self._arrays.append(array)
        return address(array)

    def step(self, *lines: list[int]) -> None:
        """Add instructions (operation, parts, x, y, ...) that may run at the same time."""
        self._steps.append(list(lines))

    def combine(self, operation: int, x: Array, operand: Any, rows: int = 0) -> Array:
        """Record an elementwise operation; `rows` as in `decode.combine`."""
        y = self.buffer(*x.shape[1:])
        self.step([operation, 1, address(x), address(y), x[0].size, self.place(operand), rows])
        return y

    def products(self, pairs: Sequence[tuple[Any, Array]]) -> list[Array]:
        """Record the products W x of pairs (W, x) that do not depend on each other."""
        products = [self.buffer(w.shape[0]) for w, _ in pairs]
        for w, _ in pairs:
            self._arrays.append(w) if isinstance(w, PackedMatrix) else self.place(w)
        self.step(*(self.code.product(w, x, y) for (w, x), y in zip(pairs, products, strict=True)))
        return products

    def project(self, layers: Sequence[Linear | Rows], x: Array) -> list[Array]:
        parts = [(each, ALL) if isinstance(each, Linear) else (each.linear, each.part) for each in layers]
        outputs = self.products([(self.p[linear.weight][part], x) for linear, part in parts])
        for place, (linear, part) in enumerate(parts):
            if linear.bias is not None:
                outputs[place] = self.combine(self.code.ADD, outputs[place], self.p[linear.bias][part], 1)
            if isinstance(linear.adapter, AddedRows):
                raise Unrecorded("no instruction for a head with added rows")
            if linear.adapter is not None and linear.adapter.b in self.p:
                outputs[place] = self.adapt(linear.adapter, part, x, outputs[place])
        return outputs

    def adapt(self, adapter: LowRank, part: slice, x: Array, y: Array) -> Array:
        if adapter.kind is not None:
            raise Unrecorded("no instruction for an adapter that is rounded with its matrix")
        narrow = self.products([(self.p[adapter.a], x)])[0]
        narrow = self.combine(self.code.SCALE, narrow, adapter.scale, 1)
        return self.combine(self.code.ADD, y, self.products([(self.p[adapter.b][part], narrow)])[0])

    def normalize(self, norm: RMSNorm | LayerNorm, x: Array, vectors: int = 1) -> Array:
        """Record a norm of `vectors` vectors per sequence, each of `norm.width` elements."""
        y, bias = self.buffer(*x.shape[1:]), getattr(norm, "bias", None)
        operation = self.code.NORM if bias is None else self.code.CENTRED_NORM
        weights = self.place(self.p[norm.weight]), 0 if bias is None else self.place(self.p[bias])
        self.step([operation, 1, address(x), address(y), *weights, norm.width, vectors, self.place(norm.eps)])
        return y


def embedding(program: Program, layer: Embedding, x: Any) -> Array:
    """Record an embedding; `run` looks up the rows of the token ids."""
    if program.first is not None or x is not None:
        raise Unrecorded("no instruction for an embedding of computed values")
    program.first = layer, program.buffer(layer.param.shape[1])
    return program.first[1]


def chain(program: Program, layer: Chain, x: Any) -> Any:
    for inner in layer.layers:
        x = program.record(inner, x)
    return x


def swiglu(program: Program, layer: SwiGLU, x: Array) -> Array:
    gate, up = program.project([layer.gate, layer.up], x)
    return program.combine(program.code.GEGLU if isinstance(layer, GeGLU) else program.code.SWIGLU, gate, up)


def heads(program: Program, layer: ProjectQKV, x: Array) -> Any:
    """Record the projections of q, k and v; return them as (B, heads, width)."""
    q, k, v = (y[:, None] for y in program.project(layer.projections, x))
    return tuple(y[:, 0] for y in layer.heads.split(q, k, v))


def head_norms(program: Program, layer: QKNorm, x: Any) -> Any:
    counts = (1, 1) if isinstance(layer, JointQKNorm) else (x[0].shape[1], x[1].shape[1])
    return *(program.normalize(*args) for args in zip(layer.norms, x[:2], counts, strict=True)), x[2]


def rotation(program: Program, layer: RoPE, x: Any) -> Any:
    """Record the rotation of q and k in place."""
    q, k, v = x
    width = layer.width or q.shape[-1]
    table = [program.place(array) for array in layer.table(program.capacity, q[:, None])]
    for array in (q, k):
        sizes = array.shape[1], array.shape[2], width, layer.interleaved
        program.step([program.code.TURN, 1, address(array), address(array), *table, *sizes])
    return q, k, v


def attention(program: Program, layer: CausalAttention, x: Any) -> Array:
    """Record attention, and the write of the new position's keys and values to the cache."""
    q, k, v = x
    entry = program.cache.extend(layer, k[:, None], v[:, None], program.capacity)
    capacity = entry[0].shape[1]
    for rows, array in zip((k, v), entry, strict=True):
        program.step([program.code.KEEP, 1, address(rows), program.place(array), rows[0].size, capacity])
    y = program.buffer(q.shape[1], v.shape[2])
    places = *map(program.place, entry), capacity, layer.window or 0, program.place(layer.scale)
    program.step(
        [program.code.ATTEND, q.shape[1], address(q), address(y), *places, q.shape[2], v.shape[2], k.shape[1]]
    )
    return y


RECORDERS: dict[type[Layer], Callable[[Program, Any, Any], Any]] = {
    Embedding: embedding,
    LearnedPositions: lambda program, layer, x: program.combine(
        program.code.ADD, x, program.p[layer.weight], 2
    ),
    Chain: chain,
    Residual: lambda program, layer, x: program.combine(program.code.ADD, program.record(layer.inner, x), x),
    Linear: lambda program, layer, x: program.project([layer], x)[0],
    RMSNorm: Program.normalize,
    LayerNorm: Program.normalize,
    Multiply: lambda program, layer, x: program.combine(program.code.SCALE, x, layer.factor, 1),
    GELU: lambda program, layer, x: program.combine(program.code.GELU, x, 0.0, 1),
    **dict.fromkeys((SwiGLU, JointSwiGLU, GeGLU), swiglu),
    **dict.fromkeys((ProjectQKV, JointQKV, FusedQKV), heads),
    **dict.fromkeys((QKNorm, JointQKNorm), head_norms),
    RoPE: rotation,
    CausalAttention: attention,
    MergeHeads: lambda program, layer, x: x.reshape(len(x), -1),
}
