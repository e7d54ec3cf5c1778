"""Token embedding and learned positions."""

from typing import Any

from zero_mpi import ops
from zero_mpi.arguments import WHOLE, array
from zero_mpi.nn.adapters import AddedRows, split_tokens
from zero_mpi.nn.batch import batch_of
from zero_mpi.nn.layer import Cache, Gradients, Layer, Param, Weights
from zero_mpi.ops.packed_matrix import PackedMatrix


class Embedding(Layer):
    """Layer y (B, T, C) = rows of `NAME.weight` (V, C) for tokens (B, T). Tokens have no gradient."""

    backward_reads_params = False

    def __init__(self, name: str, vocabulary: int, width: int, *, std: float = 0.02) -> None:
        self.weight, self.param = f"{name}.weight", Param((vocabulary, width), std=std)
        self.added_rows: AddedRows | None = None

    def split(self, rows: int) -> None:
        """Make the last rows a separate parameter; the other rows must then be frozen."""
        vocabulary, width = self.param.shape
        self.param = Param((vocabulary - rows, width))
        self.added_rows = AddedRows(self.weight, rows, width)

    def params(self) -> dict[str, Param]:
        params = {self.weight: self.param}
        return params if self.added_rows is None else params | self.added_rows.params()

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        array(f"{self.weight}: tokens", x, kinds=WHOLE)  # float tokens would be truncated, or fail later
        w: Any = p[self.weight]
        if self.added_rows is not None:
            base, places, rows = split_tokens(x, w.shape[0])
            y = ops.embedding(base, w)
            if rows.size:
                y.reshape(-1, w.shape[1])[places] = ops.embedding(rows, p[self.added_rows.name])
            return y, x
        return (w.rows(x) if isinstance(w, PackedMatrix) else ops.embedding(x, w)), x

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        if self.added_rows is not None:
            _, places, rows = split_tokens(saved, self.param.shape[0])
            if rows.size and self.added_rows.name in g:
                ops.embedding_backward(rows, dy.reshape(-1, dy.shape[-1])[places], g[self.added_rows.name])
        elif self.weight in g:
            ops.embedding_backward(saved, dy, g[self.weight])


class LearnedPositions(Layer):
    """Layer y (B, T, C) = x + row i of `NAME.weight` (context, C) at position i of each document."""

    backward_reads_params = False

    def __init__(self, name: str, context: int, width: int, *, std: float = 0.02) -> None:
        self.weight, self.param = f"{name}.weight", Param((context, width), std=std)

    def params(self) -> dict[str, Param]:
        return {self.weight: self.param}

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        documents = batch_of(p).documents
        if documents is not None:
            return ops.add(x, ops.embedding(documents.positions, p[self.weight])), None
        return ops.positions(x, p[self.weight][: x.shape[1]]), None

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        documents = batch_of(p).documents
        if self.weight in g and documents is not None:
            ops.embedding_backward(documents.positions, dy, g[self.weight])
        elif self.weight in g:
            ops.positions_backward(dy, g[self.weight][: dy.shape[1]])
        return dy

    def infer(self, p: Weights, x: Any, cache: Cache) -> Any:
        return ops.positions(x, p[self.weight][cache.position : cache.position + x.shape[1]])
