"""Sums of values that layers report for each micro-batch: auxiliary losses, and data for buffer updates.

Each micro-batch has a row in a table, which its rank fills. Rows are added in order, so the sums do
not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.comm import Comm
from zero_mpi.device.types import Array
from zero_mpi.nn.layer import Stage, Tally


class Tallies:
    """The tallies that a model's layers declare, and their sums over the micro-batches of a step."""

    def __init__(self, kinds: Mapping[str, Tally]) -> None:
        self.kinds = kinds
        self.scales = {name: kind.scale for name, kind in kinds.items() if kind.scale}
        self.micro_batches = 1  # micro-batches of a step, over all ranks
        self.rounds: list[dict[str, Any]] = []  # values reported by this rank's micro-batches of the step
        self._sums: dict[str, Array] = {}

    def factors(self, loss_scale: float) -> dict[str, float]:
        """Return each auxiliary loss's factor for a micro-batch, times `loss_scale`."""
        return {name: scale * loss_scale / self.micro_batches for name, scale in self.scales.items()}

    def sums(self, comm: Comm) -> dict[str, Array]:
        """Return name -> float64 sum over the step's micro-batches, or mean for losses. Collective."""
        if self.kinds and self.rounds:
            rows = [self._row(reported) for reported in self.rounds]
            table = np.zeros((len(rows), comm.size, rows[0].size))
            table[:, comm.rank] = rows
            total = np.zeros(rows[0].size)
            for row in comm.sum_vector(table.reshape(-1)).reshape(-1, total.size):
                total += row
            cuts = np.cumsum([1, *(prod(kind.shape) for kind in self.kinds.values())])
            count, *parts = np.split(total, cuts[:-1])
            for (name, kind), part in zip(self.kinds.items(), parts, strict=True):
                self._sums[name] = part.reshape(kind.shape) / (1 if kind.scale is None else max(1, count[0]))
            self.rounds.clear()
        return self._sums

    def _row(self, reported: Mapping[str, Any]) -> Array:
        """Return a row of 1 and the numbers of a micro-batch; zeros without a micro-batch."""
        host, row = {name: device.in_use().to_host(x) for name, x in reported.items()}, [np.ones(1)]
        for name, kind in self.kinds.items():
            value = kind.value(host) if kind.value and host else host.get(name, 0.0)
            row.append(np.broadcast_to(np.asarray(value, np.float64), kind.shape).reshape(-1))
        return np.concatenate(row) * bool(host)


def tallies_of(stages: Iterable[Stage], scales: Mapping[str, float] | None) -> Tallies:
    """Return the tallies of a model; `scales` replace the scales that layers declare for auxiliary losses.

    Raises ValueError for a scale without a loss, and for layers that declare different tallies with one name.
    """
    found: dict[str, Tally] = {}
    for stage in stages:
        for name, tally in stage.layer.tallies().items():
            if found.setdefault(name, tally) != tally:
                raise ValueError(f"tally {name}: layers declare {found[name]} and {tally}")
    for name, scale in (scales or {}).items():
        if name not in found or found[name].scale is None:
            raise ValueError(f"auxiliary: {name} is no auxiliary loss of the model's layers")
        found[name] = replace(found[name], scale=scale)
    return Tallies(found)
