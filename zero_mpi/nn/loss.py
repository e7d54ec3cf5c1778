"""Losses, which the last stage computes between its forward and its backward.

A `HeadLoss` holds the targets of a micro-batch, and its methods run the last stage. Training and evaluation
use only this interface, so a new loss is a new class here and needs no change elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zero_mpi import device, ops
from zero_mpi.arguments import FLOATING, UNCOUNTED, WHOLE, array, number
from zero_mpi.device import is_cupy
from zero_mpi.device.arrays import Scalar, namespace, pool_of, to_device_of
from zero_mpi.device.types import Array
from zero_mpi.nn.layer import Gradients, Layer, Weights
from zero_mpi.ops.elementary import exps, logs
from zero_mpi.ops.reference import chunk_rows

LEAST = 1e-12  # lower bound of a probability before its logarithm
ROW_STEPS = 8  # number of different row counts that a last stage may receive


def cross_entropy(logits: Array, targets: Array, scale: float | None = None) -> tuple[Scalar, Array]:
    """Return (loss, dlogits) for logits (..., V) and integer targets (...).

    The loss is `scale` times the sum over targets of -log softmax. `scale` is 1 over the number of targets of
    the *full step*, on all ranks and micro-batches, so that gradients are summed and never divided; by
    default, it is 1 over the number of targets in this call. A target of -1 is ignored: it has no loss.
    """
    check_targets(targets, logits)
    if scale is None:
        scale = 1.0 / max(1, int((targets != UNCOUNTED).sum()))
    scale = number("cross_entropy: scale", scale)
    loss, dlogits = ops.cross_entropy(logits, to_device_of(targets, logits), scale)
    return loss, dlogits


def check_targets(targets: Any, logits: Any = None) -> None:
    """Raise ValueError unless targets are integers, one for each row of logits if logits are given."""
    array("cross_entropy: targets", targets, kinds=WHOLE)
    if targets.size == 0:
        raise ValueError("cross_entropy: expected at least one target, got an array without elements")
    if logits is not None:
        array("cross_entropy: logits", logits, kinds=FLOATING)
        array("cross_entropy: targets for these logits", targets, tuple(logits.shape[:-1]))
        if not is_cupy(targets) and not UNCOUNTED <= targets.min() <= targets.max() < logits.shape[-1]:
            raise ValueError(
                f"cross_entropy: expected targets from 0 to {logits.shape[-1] - 1}, indices of the logits, "
                f"or -1 to ignore a position; got {targets.min()} to {targets.max()}"
            )


class HeadLoss:
    """A loss of a micro-batch, computed with the last stage, so that only some logits exist at a time.

    The last stage treats each row independently. It may receive a few rows that have no targets.
    """

    def train(self, head: Layer, p: Weights, x: Any, g: Gradients, factor: float) -> tuple[Scalar, Any]:
        """Run forward, loss and backward; return (loss, dx). `factor` multiplies dx and the gradients."""
        raise NotImplementedError

    def evaluate(self, head: Layer, p: Weights, x: Any) -> list[Scalar]:
        """Return the losses of the micro-batch's parts, without a backward."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class CrossEntropy(HeadLoss):
    """The cross-entropy of a micro-batch, `scale` times the sum over targets; a target of -1 is ignored.

    Calling it with logits runs `cross_entropy`. The last stage computes its logits in chunks.
    """

    targets: Array
    scale: float

    def __post_init__(self) -> None:
        check_targets(self.targets)
        number("CrossEntropy: scale", self.scale)

    def __call__(self, logits: Array) -> tuple[Scalar, Array]:
        """Return (loss, dlogits): the loss and its gradient."""
        return cross_entropy(logits, self.targets, self.scale)

    def train(self, head: Layer, p: Weights, x: Any, g: Gradients, factor: float) -> tuple[Scalar, Any]:
        x_rows, targets, rows = self._counted_rows(x)
        loss, dy = head.loss(p, x_rows, targets, self.scale * factor, g)
        if rows is not None and dy is not None:
            dx = zeros_of(x, dy.dtype)
            ops.embedding_backward(rows, dy, dx.reshape(-1, x.shape[-1]))
            dy = dx
        return loss / factor, dy

    def evaluate(self, head: Layer, p: Weights, x: Any) -> list[Scalar]:
        return [head.evaluate(p, *self._counted_rows(x)[:2], self.scale)]

    def _counted_rows(self, x: Any) -> tuple[Any, Any, Any]:
        """Return the rows that the last stage receives, their targets, and their indices (None: all rows)."""
        to_device, rows = device.in_use().from_host, rows_that_count(self.targets)
        if rows is None:
            return x, to_device(self.targets), None
        rows, targets = to_device(rows), to_device(self.targets)
        return ops.embedding(rows, x.reshape(-1, x.shape[-1])), targets.reshape(-1)[rows], rows


@dataclass(frozen=True, eq=False)
class Distilled(CrossEntropy):
    """Distillation: (1 - weight) * cross-entropy + weight * divergence from the teacher's records (B T,).

    A record has the teacher's `ids` (K,), the logarithms of their probabilities T (`logp`), and the logarithm
    of the remaining probability Tr (`rest`); zeros if there is no prediction. With the student's softmax S at
    the same temperature, the divergence of a token is sum T (log T - log S) + Tr (log Tr - log Sr).
    """

    records: Array
    weight: float
    temperature: float
    vocab: int

    def train(self, head: Any, p: Any, x: Any, g: Any, factor: float) -> tuple[Scalar, Any]:
        to_device, flat = device.in_use().from_host, x.reshape(-1, x.shape[-1])
        rows = np.flatnonzero(self.targets.reshape(-1) != UNCOUNTED)
        records, targets = self.records[rows], to_device(self.targets.reshape(-1)[rows])
        mask, dx, loss = records["rest"] + records["logp"].sum(axis=-1) != 0, zeros_of(flat, x.dtype), 0.0
        step = chunk_rows(len(rows), self.vocab)
        for part in (slice(start, start + step) for start in range(0, len(rows), step)):
            indices = to_device(rows[part])
            z, saved = head.forward(p, flat[indices])
            hard, dz = ops.cross_entropy(z, targets[part], (1 - self.weight) * self.scale * factor)
            soft, slopes = self.divergence(z, to_device(mask[part]), records[part])
            slopes *= self.weight * self.scale * factor
            dz += slopes
            loss = loss + hard / factor + soft * self.weight * self.scale
            dx[indices] = head.backward(p, saved, dz.astype(z.dtype, copy=False), g)
        return loss, dx.reshape(x.shape)

    def divergence(self, z: Any, mask: Any, records: Array) -> tuple[Any, Any]:
        """Return the summed divergence for logits (n, V), and its gradient (n, V)."""
        xp, to_device = namespace(z), device.in_use().from_host
        rows = xp.arange(len(z))[:, None]
        ids, logp, rest = (to_device(np.ascontiguousarray(records[name])) for name in ("ids", "logp", "rest"))
        ids, logp, rest = ids.astype(np.int64), logp.astype(np.float64), rest.astype(np.float64)
        best = ids[rows[:, 0], z[rows, ids].astype(np.float32).argmax(axis=-1)]  # by the student's logits
        share = ops.cross_entropy(self.cool(z), best, 1.0)[1].astype(np.float32, copy=False)
        share[rows[:, 0], best] += 1  # the softmax, from the gradient of the cross-entropy
        student, teacher = share[rows, ids].astype(np.float64), exps(logp)
        share[rows, ids] = 0  # what remains is summed, because 1 - student.sum() would cancel
        remainder = xp.maximum(LEAST, share.sum(axis=-1, dtype=np.float64))
        terms = (teacher * (logp - logs(xp.maximum(LEAST, student)))).sum(axis=-1)
        terms += exps(rest) * (rest - logs(remainder))
        share *= ((remainder - exps(rest)) / remainder)[:, None].astype(np.float32)
        share[rows, ids] = (student - teacher).astype(np.float32)
        share[~mask] = 0
        share /= np.float32(self.temperature)
        return terms[mask].sum(), share

    def cool(self, z: Any) -> Any:
        logits = pool_of(device.in_use()).take(z.shape, z.dtype)
        namespace(z).divide(z, z.dtype.type(self.temperature), out=logits)
        return logits


@dataclass(frozen=True, eq=False)
class PartLosses(HeadLoss):
    """The loss of each part of a micro-batch, without backward: `scale` times the sum over its targets.

    parts: indices of targets (B, T), such as (row, slice(3, 9)). scale 0: count the targets that are not the
    most likely token
    """

    targets: Array
    parts: Sequence[Any]
    scale: float = 1.0

    def evaluate(self, head: Layer, p: Weights, x: Any) -> list[Scalar]:
        targets = device.in_use().from_host(self.targets)
        return [head.evaluate(p, x[part], targets[part], self.scale) for part in self.parts]


class Segment:
    """Consecutive positions of a row, whose targets' log-probabilities are summed.

    A segment spans the first to the last counted target. Its length is padded to a power of two or a multiple
    of an eighth of the row, so that few shapes and buffer sizes occur; the added positions are ignored.
    """

    def __init__(self, row: int, span: slice, targets: Array) -> None:
        positions = np.flatnonzero(targets[row, span] != UNCOUNTED)
        first, last = (positions[0], positions[-1]) if positions.size else (0, 0)
        size, start, stop = targets.shape[1], span.start + int(first), span.start + int(last) + 1
        step = -(-size // ROW_STEPS)
        length = min(size, 1 << (stop - start - 1).bit_length(), -(-(stop - start) // step) * step)
        first = min(start, size - length)
        self.part = row, slice(first, first + length)
        ids = np.full(length, UNCOUNTED, np.int64)
        ids[start - first : stop - first] = targets[row, start:stop]
        self.targets = device.in_use().from_host(ids)


class SequenceLoss(HeadLoss):
    """A loss that is a function of the sums of log-probabilities of segments.

    `criterion` maps the sums, in nats, to (loss, its derivatives with respect to the sums). `train` sets the
    attribute `sums`. Logits are computed twice: for the sums, and for the gradient.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        criterion: Callable[[list[float]], tuple[float, Sequence[float]]] | None = None,
    ) -> None:
        self._segments, self._criterion = segments, criterion
        self.sums: list[float] = []

    def train(self, head: Layer, p: Weights, x: Any, g: Gradients, factor: float) -> tuple[Scalar, Any]:
        assert self._criterion is not None, "training needs a criterion"
        self.sums = [-float(nll) for nll in self.evaluate(head, p, x)]
        loss, slopes = self._criterion(self.sums)
        dx = zeros_of(x, x.dtype)
        for segment, slope in zip(self._segments, slopes, strict=True):
            if slope:
                dy = head.loss(p, x[segment.part], segment.targets, -slope * factor, g)[1]
                dx[segment.part] += dy
        return loss, dx

    def evaluate(self, head: Layer, p: Weights, x: Any) -> list[Scalar]:
        return [head.evaluate(p, x[segment.part], segment.targets, 1.0) for segment in self._segments]


def loss_with(targets: Any, scale: float) -> HeadLoss | None:
    """Return `targets` if it is a loss or None; for an array of targets, return its cross-entropy."""
    return targets if targets is None or isinstance(targets, HeadLoss) else CrossEntropy(targets, scale)


def zeros_of(x: Any, dtype: Any) -> Any:
    zeros = pool_of(device.in_use()).take(x.shape, dtype)
    zeros.fill(0)
    return zeros


def rows_that_count(targets: Any) -> Any:
    """Return the rows (K,) that a last stage receives: all rows with counted targets, and some other rows.

    K is a multiple of an eighth of all rows, so that few shapes and buffer sizes occur. None means all rows;
    targets on a GPU always give None.
    """
    if type(targets) is not np.ndarray:
        return None
    mask = targets.reshape(-1) != UNCOUNTED
    step = -(-mask.size // ROW_STEPS)
    count = -(-max(1, int(np.count_nonzero(mask))) // step) * step
    return np.sort(np.argsort(~mask, kind="stable")[:count]) if count < mask.size else None
