"""Auxiliary losses of routed layers, and the load of their experts. Each routed layer has a `RouterLosses`.

`balance_loss` is defined as in transformers (`load_balancing_loss_func`): N sum_e f_e P_e with f_e = C_e / R
and P_e = S_e / R. C_e counts how often expert e was chosen and S_e sums its probabilities, over all routed
layers of a micro-batch together, and R = layers * tokens. If the load is balanced, the loss is U, the number
of experts that a token uses. C is a count, so the derivative with respect to a probability is N C_e / R^2.
`z_loss` is the mean over tokens of log(sum(exp(logits)))^2, summed over layers (Zoph et al., "ST-MoE", 2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zero_mpi.device.arrays import namespace
from zero_mpi.device.types import Array
from zero_mpi.nn.batch import BatchContext
from zero_mpi.nn.layer import Tally
from zero_mpi.ops.elementary import logs
from zero_mpi.ops.flat_reference import column_sums

BALANCE, Z, LOAD = "balance_loss", "z_loss", ".expert_load"
ROWS = 1024  # rows of logits that are processed at a time


def balance(sums: Mapping[str, Any]) -> float:
    """Return the balance loss of a micro-batch, from the sums over its routed layers."""
    counts, p = (np.asarray(sums.get(name, 0.0), float) for name in ("routed_counts", "routed_p"))
    return float(counts.size * np.vdot(counts, p) / max(1.0, float(sums.get("routed_rows", 1))) ** 2)


def log_sums(logits: Array, p: Array) -> Array:
    """Return log(sum(exp(logits))) (T,) of each row of logits (T, N), given their softmax p."""
    return logits.max(axis=-1) - logs(p.max(axis=-1)).astype(p.dtype)


class RouterLosses:
    """Losses and load of a router with N experts, in the layer `name`."""

    def __init__(self, name: str, experts: int) -> None:
        self.name, self.experts = name, experts

    def tallies(self) -> dict[str, Tally]:
        """Return the tallies of a routed layer. At scale 0, the default, losses are only reported."""
        load = {self.name + LOAD: Tally((self.experts,))}
        return {BALANCE: Tally(scale=0.0, value=balance), Z: Tally(scale=0.0), **load}

    def report(self, batch: BatchContext, logits: Array, p: Array, chosen: Array, starts: Array) -> None:
        """Report a layer's routing, as `ops.route` returns it, for logits (T, N); padding is left out."""
        counts = starts[1:] - starts[:-1]
        if batch.documents is not None:
            counted = batch.documents.counted
            experts = namespace(chosen).arange(self.experts)
            counts = counts - (chosen[~counted].reshape(-1, 1) == experts).sum(axis=0)
            logits, p = logits[counted], p[counted]
        batch.report(self.name, **{self.name + LOAD: counts})
        if batch.factors:
            squares = (log_sums(logits, p) ** 2).sum(dtype=np.float64)
            batch.report(self.name, routed_counts=counts, routed_p=column_sums(p), routed_rows=len(p))
            batch.report(self.name, **{Z: squares / max(1, len(p))})

    def add_gradient(self, batch: BatchContext, dlogits: Array, logits: Array, p: Array) -> None:
        """Add the gradients of both losses to dlogits (T, N) in place, after all layers have reported."""
        if not batch.factors:
            return
        by_balance, by_z = (batch.factors.get(name, 0.0) for name in (BALANCE, Z))
        counts, rows = batch.sums["routed_counts"], max(1, batch.sums["routed_rows"])
        slope = (counts * (by_balance * self.experts / rows**2)).astype(p.dtype)  # dloss / dp, (N,)
        counted = None if batch.documents is None else batch.documents.counted
        tokens = len(p) if counted is None else max(1, int(counted.sum()))
        for start in range(0, len(p), ROWS):
            part = slice(start, start + ROWS)
            mean = column_sums((p[part] * slope).T)
            if by_z:
                mean = mean - (2 * by_z / tokens) * log_sums(logits[part], p[part])
            added = p[part] * (slope - mean[:, None])
            if counted is not None:
                added[~counted[part]] = 0
            dlogits[part] = dlogits[part] + added  # dlogits may be in low precision (bf16 or fp16)
