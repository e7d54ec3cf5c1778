"""LoRA adapters: a trained product of low rank, added to a projection whose weight is frozen.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021: y = x W^T + s (x a^T) b^T, with
a = `NAME.lora_a` (R, C) random and b = `NAME.lora_b` (O, R) zero at the start, where NAME is the weight's
full name, as in llama.cpp. s is alpha / R.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from zero_mpi import device, ops
from zero_mpi.nn.layer import Gradients, Param, Weights

FIRST, SECOND = ".lora_a", ".lora_b"


class LowRank:
    """The adapter of one matrix (O, C), or of a stack of them (N, O, C), of rank R.

    `via`: the operations of linear layers that compute it, as in `Linear.rows`.
    """

    def __init__(self, weight: str, shape: tuple[int, ...], rank: int, scale: float) -> None:
        *stack, outputs, inputs = shape
        self._a, self._b, self._rank, self._scale = weight + FIRST, weight + SECOND, rank, scale
        self._params = {
            self._a: Param((*stack, rank, inputs), std=inputs**-0.5),
            self._b: Param((*stack, outputs, rank), "zeros"),
        }

    def params(self) -> dict[str, Param]:
        """Return both matrices by name."""
        return self._params

    def add_to(self, y: Any, p: Weights, x: Any, part: slice, via: Any = ops) -> Any:
        """Return y (..., O) + s (x a^T) b^T for x (..., C), for a part of the O rows.

        Without b among the weights the product is left out.
        """
        if self._b not in p:
            return y
        return via.linear(self._narrow(p, x, via), p[self._b][part], None, y)

    def backward(
        self, p: Weights, x: Any, dy: Any, g: Gradients, dx: Any, part: slice, via: Any = ops
    ) -> Any:
        """Add s (dy b) a to dx and return it; add the gradients of a and b into g.

        x a^T is recomputed, at R / O of the layer's matmul cost.
        """
        if self._b in g:
            via.linear_backward_w(dy, self._narrow(p, x, via), g[self._b][part])
        narrow = self._scaled(via.linear_backward_x(dy, p[self._b][part]))
        if self._a in g:
            via.linear_backward_w(narrow, x, g[self._a])
        return via.linear_backward_x(narrow, p[self._a], dx)

    def _narrow(self, p: Weights, x: Any, via: Any) -> Any:
        """Return s x a^T (..., R)."""
        return self._scaled(via.linear(x, p[self._a]))

    def _scaled(self, x: Any) -> Any:
        """Return s x (..., R), computed as a matrix product: every device and dtype supports it."""
        if self._scale == 1:
            return x
        return ops.linear(x, diagonal(self._rank, self._scale, x.dtype, device.home_of(x)))


@lru_cache(maxsize=32)
def diagonal(size: int, value: float, dtype: Any, place: device.Device) -> Any:
    """Return `value` times the identity matrix (size, size)."""
    return place.from_host((value * np.eye(size)).astype(dtype))
