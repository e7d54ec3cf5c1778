"""The linear layer on a GPU: forward and the gradients of x and w are one product each.

The product also adds the bias and other terms (`plus`, `into`, the earlier gradient). cuBLASLt rounds the
product to 16 bits before it adds it to a result in place, and in some kernels before it adds a bias. A
head's logits are computed in chunks of at most LOGITS_BYTES, which become gradients in place. Products of
50,257 columns take seven times as long as those of 50,264 (cuBLASLt 13.1, H100), so a vocabulary is padded to
a multiple of LINE by rows of zeros.
"""

from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.device.arrays import to_device_of
from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.gpu.gemm import product
from zero_mpi.ops.gpu.launch import ARRAY, evenly_spaced, memory_of, take
from zero_mpi.ops.gpu.loss import add_losses, losses_of_rows
from zero_mpi.ops.gpu.sums import add_columns
from zero_mpi.ops.registry import implements
from zero_mpi.ops.sizes import LINE, logit_rows, logit_width


def with_zeros(x: Array, length: int) -> Array:
    """Return `x`, or a copy that is padded with zeros to `length` rows."""
    if len(x) == length:
        return x
    copy = take((length, *x.shape[1:]), x.dtype)
    copy[: len(x)] = x
    copy[len(x) :].fill(0)
    return copy


@implements(reference.linear, ARRAY)
def linear(x: Array, w: Array, b: Array | None = None, plus: Array | None = None) -> Array:
    y = take((*x.shape[:-1], w.shape[0]), x.dtype)
    product(x, w, y, tb=True, c=plus, bias=b)
    return y


@implements(reference.linear_backward_x, ARRAY)
def linear_backward_x(dy: Array, w: Array, into: Array | None = None) -> Array:
    dx = take((*dy.shape[:-1], w.shape[1]), dy.dtype) if into is None else into
    product(dy, w, dx, c=into)
    return dx


@implements(reference.linear_backward_w, ARRAY)
def linear_backward_w(dy: Array, x: Array, dw: Array) -> None:
    if dy.size:
        product(dy, x, dw, ta=True, c=dw)


# ---------------------------------------------------------------------------------------- a head and its loss


@implements(reference.linear_cross_entropy, ARRAY)
def linear_cross_entropy(
    x: Array,
    w: Array,
    b: Array | None,
    targets: Array,
    scale: float,
    dw: Array | None = None,
    db: Array | None = None,
    need_dx: bool = True,
) -> tuple[Any, Array | None]:
    """Compute `reference.linear_cross_entropy`; the loss is a 0-dimensional array on the GPU."""
    flat, ids = evenly_spaced(x).reshape(-1, x.shape[-1]), to_device_of(targets, x).reshape(-1)
    dx = take(flat.shape, x.dtype) if need_dx else None
    total = device.in_use().zeros(1, np.float64)
    gradient = need_dx or dw is not None or db is not None
    width, even = logit_width(len(w)), len(w) // LINE * LINE
    step = logit_rows(len(flat), width * x.itemsize, memory_of(device.in_use()))
    buffer, weights = take((min(step, len(flat)), width), x.dtype), with_zeros(w, width)
    bias = None if b is None else with_zeros(b, width)
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        rows = flat[part]
        wide = buffer[: len(rows)]
        product(rows, weights, wide, tb=True, bias=bias)
        z = wide[:, : len(w)]  # the padding stays zero, which is also its gradient
        add_losses(total, losses_of_rows(z, z if gradient else None, ids[part], scale), scale, True)
        if dw is not None:
            linear_backward_w(z[:, :even], rows, dw[:even])
            linear_backward_w(z[:, even:], rows, dw[even:])
        if db is not None:
            add_columns(z, db)
        if dx is not None:
            product(wide, weights, dx[part])
    return total.reshape(()), None if dx is None else dx.reshape(x.shape)
