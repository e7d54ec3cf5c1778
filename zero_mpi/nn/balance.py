"""Auxiliary losses of routed layers, and the load of experts: a routed layer holds one `RouterLosses`.

`balance_loss` is that of transformers (`load_balancing_loss_func`): N sum_e f_e P_e with f_e = C_e / R and
P_e = S_e / R, where C_e counts how often expert e was chosen and S_e adds its probabilities up, over all
routed layers of a micro-batch together, and R = layers * tokens. In balance it is U, the experts that a token
uses. C is a count, so the slope by each probability is N C_e / R^2. `z_loss` is the mean over tokens of
log(sum(exp(logits)))^2, summed over layers (Zoph et al., "ST-MoE", 2022). A module that is given no scale for
them leaves both out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.nn.batch import BatchContext
from zero_mpi.nn.layer import Tally
from zero_mpi.ops.elementary import chosen, log_of_array
from zero_mpi.ops.rowsums import column_sums

BALANCE, Z = "balance_loss", "z_loss"
LOAD = ".expert_load"
ROWS = 1024  # of a temporary array
log: Callable[[Array], Array] = chosen(log_of_array, np.log)


def log_sums(logits: Array, p: Array) -> Array:
    """Return log(sum(exp(logits))) of each row of logits (T, N), by their softmax p; (T,)."""
    return logits.max(axis=-1) - log(p.max(axis=-1)).astype(p.dtype)


def balance(sums: Mapping[str, Any]) -> float:
    """Return the balance loss of a micro-batch, by the sums over its routed layers; 0 without any."""
    if "routed_p" not in sums:
        return 0.0
    counts, p = (np.asarray(sums[name], np.float64) for name in ("routed_counts", "routed_p"))
    return float(counts.size * np.vdot(counts, p) / float(sums["routed_rows"]) ** 2)


class RouterLosses:
    """Losses and load of the router of the layer `name`, of N experts."""

    def __init__(self, name: str, experts: int) -> None:
        self.name, self.experts = name, experts

    def tallies(self) -> dict[str, Tally]:
        """Return the tallies of a routed layer."""
        load = Tally((self.experts,))
        return {BALANCE: Tally(scale=0.0, value=balance), Z: Tally(scale=0.0), self.name + LOAD: load}

    def report(self, batch: BatchContext, logits: Array, p: Array, starts: Array) -> None:
        """Report logits and their softmax p (T, N); expert e has the rows starts[e]:starts[e + 1]."""
        counts = starts[1:] - starts[:-1]
        batch.report(self.name, **{self.name + LOAD: counts})
        if batch.factor(BALANCE) or batch.factor(Z):
            squares = (log_sums(logits, p) ** 2).sum(dtype=np.float64)
            batch.report(self.name, routed_counts=counts, routed_p=column_sums(p), routed_rows=len(p))
            batch.report(self.name, **{Z: squares / len(p)})

    def add_gradient(self, batch: BatchContext, dlogits: Array, logits: Array, p: Array) -> None:
        """Add the gradient of both losses to dlogits (T, N) in place; all layers have reported."""
        by_balance, by_z = batch.factor(BALANCE), batch.factor(Z)
        if not (by_balance or by_z):
            return
        counts, rows = batch.sums["routed_counts"], batch.sums["routed_rows"]
        slope = (counts * (by_balance * self.experts / rows**2)).astype(p.dtype)  # by p, (N,)
        for start in range(0, len(p), ROWS):
            part = slice(start, start + ROWS)
            mean = column_sums((p[part] * slope).T)
            if by_z:
                mean = mean - (2 * by_z / len(p)) * log_sums(logits[part], p[part])
            dlogits[part] += p[part] * (slope - mean[:, None])


def load_figures(sums: Mapping[str, Array]) -> dict[str, float]:
    """Return the least and most load of experts, 1: the mean of a layer, and the entropy, 1: all alike."""
    loads = [counts / counts.mean() for name, counts in sums.items() if name.endswith(LOAD) and counts.any()]
    if not loads:
        return {}
    shares = [load[load > 0] / load.size for load in loads]
    even = math.log(loads[0].size) or 1.0
    entropies = [float(-(share * np.log(share)).sum()) / even for share in shares]
    return {
        "load_least": float(min(load.min() for load in loads)),
        "load_most": float(max(load.max() for load in loads)),
        "load_entropy": sum(entropies) / len(entropies),
    }
