"""A linear layer without an activation."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

from zero_mpi import ops
from zero_mpi.device.arrays import Scalar
from zero_mpi.nn.adapters import FIRST, SECOND, AddedRows, LowRank, copy_of
from zero_mpi.nn.layer import AddsInForward, Gradients, Param, Weights
from zero_mpi.ops.packed_matrix import PackedMatrix
from zero_mpi.ops.reference import chunk_rows

ALL = slice(None)
OBSERVERS: list[Callable[[str, Any, Any], None]] = []


@contextmanager
def observing(observe: Callable[[str, Any, Any], None]) -> Iterator[None]:
    """Call observe(name of the matrix, x, starts) in each forward of a linear layer within the context.

    starts: for stacked matrices, the first row of each expert; otherwise None
    """
    OBSERVERS.append(observe)
    try:
        yield
    finally:
        OBSERVERS.remove(observe)


def some(x: Any, part: slice) -> Any:
    """Return rows `part` of x, or x itself for ALL, because a view takes microseconds on a GPU."""
    return x if part is ALL else x[part]


class Linear(AddsInForward):
    """Layer y (..., O) = x (..., C) W^T + b, with W = `NAME.weight` (O, C) and b = `NAME.bias` (O,).

    If the layer has an adapter (`adapters`), the adapter's product is added. `fused`: the number of rows of
    each matrix, if W consists of several matrices. `stack`: number N of matrices W (N, O, C), one of which
    applies to each row of x; callers then pass operations on stacks as `via`.
    """

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        std: float = 0.02,
        fused: tuple[int, ...] = (),
        stack: int = 0,
    ) -> None:
        self.fused = fused
        self.weight, self.bias = f"{name}.weight", f"{name}.bias" if bias else None
        shape = (stack, outputs, inputs) if stack else (outputs, inputs)
        self._params = {self.weight: Param(shape, std=std)}
        if self.bias:
            self._params[self.bias] = Param((outputs,), "zeros")
        self.adapter: LowRank | AddedRows | None = None

    def adapt(self, rank: int, scale: float, kind: str | None = None) -> None:
        """Add an adapter (a product of low rank), which may be trained while the matrix is frozen.

        kind: quantized type to which the sum of the matrix and the product is rounded
        """
        self.adapter = LowRank(self.weight, self._params[self.weight].shape, rank, scale, kind)

    def split(self, rows: int) -> None:
        """Make the last rows a separate parameter; the others must be frozen, and there is no bias."""
        outputs, width = self._params[self.weight].shape
        self._params = {self.weight: Param((outputs - rows, width))}
        self.adapter = AddedRows(self.weight, rows, width)

    def _matrix(self, p: Weights, part: slice) -> Any:
        """Return rows `part` of W, merged with the adapter if their sum is rounded."""
        w: Any = some(p[self.weight], part)
        adapter = self.adapter
        return w if adapter is None or adapter.kind is None else adapter.merged(p, w, part)

    def params(self) -> dict[str, Param]:
        return self._params if self.adapter is None else self._params | self.adapter.params()

    def saved(self, p: Weights, x: Any, via: Any = ops) -> tuple[Any, Any]:
        """Return x, and the adapter's `narrow` result if its product is added to y."""
        return x, None if self.adapter is None else self.adapter.narrow(p, x, via)

    def forward(
        self, p: Weights, x: Any, residual: Any = None, part: slice = ALL, via: Any = ops
    ) -> tuple[Any, Any]:
        """Return (y, saved) for a part of the rows of W."""
        _, narrow = saved = self.saved(p, x, via)
        for observe in OBSERVERS if via is ops and not part.start else ():
            observe(self.weight, x, None)
        bias = some(p[self.bias], part) if self.bias else None
        w = self._matrix(p, part)
        y = w.linear(x, bias, residual) if isinstance(w, PackedMatrix) else via.linear(x, w, bias, residual)
        if self.adapter is not None and narrow is not None:
            y = self.adapter.add_to(y, p, narrow, part, via)
        return y, saved

    def backward(
        self,
        p: Weights,
        saved: Any,
        dy: Any,
        g: Gradients,
        into: Any = None,
        part: slice = ALL,
        via: Any = ops,
    ) -> Any:
        """Return dx for a part of the rows of W, added to `into` if it is given."""
        adapter = self.adapter
        dy_base = copy_of(dy[..., : -adapter.rows]) if isinstance(adapter, AddedRows) else dy
        if self.weight in g:
            via.linear_backward_w(dy_base, saved[0], some(g[self.weight], part))
        if self.bias and self.bias in g:
            ops.linear_backward_b(dy_base, some(g[self.bias], part))
        dx = via.linear_backward_x(dy_base, self._matrix(p, part), into)
        return dx if adapter is None else adapter.backward(p, saved, dy, g, dx, part, via)

    def loss(self, p: Weights, x: Any, targets: Any, scale: float, g: Gradients | None) -> tuple[Scalar, Any]:
        """Return (loss, dx); dx is None without `g`. Only one chunk of logits exists at a time."""
        if self.adapter is None:
            b, db = (p[self.bias], (g or {}).get(self.bias)) if self.bias else (None, None)
            dw, need_dx = (g or {}).get(self.weight), g is not None
            return ops.linear_cross_entropy(x, p[self.weight], b, targets, scale, dw, db, need_dx)
        dx: Any = None if g is None else ops.scale(x, 0.0)
        loss, flat, ids = 0.0, x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        step = chunk_rows(len(flat), self._params[self.weight].shape[0])
        for part in (slice(start, start + step) for start in range(0, len(flat), step)):
            y, saved = self.forward(p, flat[part])  # the fused operation does not support adapters
            part_loss, dy = ops.cross_entropy(y, ids[part], scale)
            loss = loss + part_loss
            if g is not None:
                self.backward(p, saved, dy, g, dx.reshape(flat.shape)[part])
        return loss, dx

    def evaluate(self, p: Weights, x: Any, targets: Any, scale: float) -> Scalar:
        return self.loss(p, x, targets, scale, None)[0] if scale else super().evaluate(p, x, targets, scale)


class Rows:
    """Layer that uses some rows of a linear layer: one of several projections that share a matrix.

    Separate products make each result contiguous, unlike one product of all rows.
    """

    def __init__(self, linear: Linear, start: int, stop: int) -> None:
        self.linear, self.part = linear, slice(start, stop)

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        return self.linear.forward(p, x, part=self.part)

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients, into: Any = None) -> Any:
        return self.linear.backward(p, saved, dy, g, into, self.part)


def is_adapter(name: str) -> bool:
    return name.endswith((FIRST, SECOND))


def rows_of(linear: Linear, counts: Sequence[int]) -> list[Rows]:
    """Return layers for consecutive rows of a linear layer: one for each number of rows in `counts`."""
    return [Rows(linear, *bounds) for bounds in pairwise(accumulate(counts, initial=0))]
