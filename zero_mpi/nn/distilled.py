"""Distillation loss: the cross-entropy, mixed with the divergence from a teacher's predictions.

For each token the teacher gives K ids with probabilities T, and the probability Tr of all other ids. With the
student's softmax S at the same temperature, and Sr for all other ids, the divergence is sum T (log T - log S)
+ Tr (log Tr - log Sr).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zero_mpi import device, ops
from zero_mpi.arguments import UNCOUNTED
from zero_mpi.device.arrays import Scalar, namespace, pool_of
from zero_mpi.device.types import Array
from zero_mpi.nn.loss import CrossEntropy, zeros_of
from zero_mpi.ops.elementary import exps, logs
from zero_mpi.ops.reference import chunk_rows

LEAST = 1e-12  # lower bound of a probability before its logarithm


@dataclass(frozen=True, eq=False)
class Distilled(CrossEntropy):
    """Loss (1 - weight) * cross-entropy + weight * divergence from the teacher's records (B T,).

    A record has the fields `ids` (K,), `logp` of these ids, and `rest`; all are zero without a prediction.
    """

    records: Array
    weight: float
    temperature: float
    vocab: int

    def train(self, head: Any, p: Any, x: Any, g: Any, factor: float) -> tuple[Scalar, Any]:
        to_device, flat = device.in_use().from_host, x.reshape(-1, x.shape[-1])
        rows = np.flatnonzero(self.targets.reshape(-1) != UNCOUNTED)
        records, targets = self.records[rows], to_device(self.targets.reshape(-1)[rows])
        there, dx, loss = records["rest"] + records["logp"].sum(axis=-1) != 0, zeros_of(flat, x.dtype), 0.0
        step = chunk_rows(len(rows), self.vocab)
        for part in (slice(start, start + step) for start in range(0, len(rows), step)):
            some = to_device(rows[part])
            z, saved = head.forward(p, flat[some])
            hard, dz = ops.cross_entropy(z, targets[part], (1 - self.weight) * self.scale * factor)
            soft, slopes = self.divergence(z, targets[part], to_device(there[part]), records[part])
            slopes *= self.weight * self.scale * factor
            dz += slopes
            loss = loss + hard / factor + soft * self.weight * self.scale
            dx[some] = head.backward(p, saved, dz.astype(z.dtype, copy=False), g)
        return loss, dx.reshape(x.shape)

    def divergence(self, z: Any, targets: Any, there: Any, records: Array) -> tuple[Any, Any]:
        """Return the summed divergence for logits (n, V), and its gradient (n, V)."""
        xp, to_device = namespace(z), device.in_use().from_host
        at = xp.arange(len(z))[:, None]
        ids, logp, rest = (to_device(np.ascontiguousarray(records[name])) for name in ("ids", "logp", "rest"))
        ids, logp, rest = ids.astype(np.int64), logp.astype(np.float64), rest.astype(np.float64)
        share = ops.cross_entropy(self.cooled(z), targets, 1.0)[1].astype(np.float32, copy=False)
        share[at[:, 0], targets] += 1  # turns the gradient of the cross-entropy into the softmax
        found, wanted = share[at, ids].astype(np.float64), exps(logp)
        others = xp.maximum(LEAST, 1 - found.sum(axis=-1))
        terms = (wanted * (logp - logs(xp.maximum(LEAST, found)))).sum(axis=-1)
        terms += exps(rest) * (rest - logs(others))
        share *= ((others - exps(rest)) / others)[:, None].astype(np.float32)
        share[at, ids] = (found - wanted).astype(np.float32)
        share[~there] = 0
        share /= np.float32(self.temperature)
        return terms[there].sum(), share

    def cooled(self, z: Any) -> Any:
        """Return logits divided by the temperature, in recycled memory."""
        found = pool_of(device.in_use()).take(z.shape, z.dtype)
        namespace(z).divide(z, z.dtype.type(self.temperature), out=found)
        return found
