"""Rows of added tokens: the last rows of a frozen embedding or head, trained as a separate parameter."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from zero_mpi import device, ops
from zero_mpi.device.arrays import namespace, pool_of
from zero_mpi.nn.layer import Gradients, Param, Weights

ADDED = ".added"  # suffix of the parameter's name, after the name of the matrix


class AddedRows:
    """The last `rows` rows of a matrix (O, C): `NAME.weight.added` (rows, C). Used like an adapter."""

    kind = None

    def __init__(self, weight: str, rows: int, width: int) -> None:
        self.name, self.rows = weight + ADDED, rows
        self._params = {self.name: Param((rows, width))}

    def params(self) -> dict[str, Param]:
        """Return the parameter of the rows by name."""
        return self._params

    def narrow(self, p: Weights, x: Any, via: Any = ops) -> Any:
        """Return x, which `add_to` multiplies by the rows."""
        return x

    def add_to(self, y: Any, p: Weights, x: Any, part: slice, via: Any = ops) -> Any:
        """Return the columns y (..., O - rows) followed by the columns of the added rows."""
        size = y.shape[-1]
        joined = like(y, size + self.rows)
        joined[..., :size] = y
        joined[..., size:] = via.linear(x, p[self.name])
        return joined

    def backward(
        self, p: Weights, saved: Any, dy: Any, g: Gradients, dx: Any, part: slice, via: Any = ops
    ) -> Any:
        """Add the contribution of the added rows to dx and return it; add their gradient into g."""
        dy = copied(dy[..., -self.rows :])
        if self.name in g:
            via.linear_backward_w(dy, saved[0], g[self.name])
        return via.linear_backward_x(dy, p[self.name], dx)


def like(x: Any, width: int) -> Any:
    """Return an array (..., width) in recycled memory, shaped like x except for the last axis."""
    return pool_of(device.in_use()).take((*x.shape[:-1], width), x.dtype)


def copied(x: Any) -> Any:
    """Return a contiguous copy of an array's columns in recycled memory."""
    out = like(x, x.shape[-1])
    out[...] = x
    return out


@singledispatch
def parted(tokens: Any, first: int) -> tuple[Any, Any, Any]:
    """Return tokens with 0 for ids from `first` on; the flat positions of these ids; their added rows."""
    flat = tokens.reshape(-1)
    places = namespace(tokens).flatnonzero(flat >= first)
    return tokens * (tokens < first), places, flat[places] - first
