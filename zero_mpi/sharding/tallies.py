"""Sums of what layers report of micro-batches: auxiliary losses, and what buffers are updated by.

Each micro-batch has a row of its own in a table that all ranks fill, and rows are added in their order. So
the sums do not depend on the number of ranks.
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
from zero_mpi.nn.batch import BatchContext
from zero_mpi.nn.layer import Stage, Tally


class Tallies:
    """The tallies that the layers of a model declare, and their sums over the micro-batches of a step.

    micro_batches   of a step, over all ranks: an auxiliary loss counts as its mean over them
    """

    def __init__(self, kinds: Mapping[str, Tally]) -> None:
        self.kinds, self.micro_batches = kinds, 1
        self._rounds: list[dict[str, Any]] = []
        self._found: dict[str, Array] = {}

    def factors(self, loss_scale: float) -> dict[str, float]:
        """Return the factor of each auxiliary loss of a micro-batch in the objective times `loss_scale`."""
        factor = loss_scale / self.micro_batches
        return {name: scale * factor for name, scale in scales_of(self.kinds).items()}

    def add(self, batch: BatchContext) -> None:
        """Note what was reported in a round; nothing by a rank without a micro-batch."""
        if self.kinds:
            self._rounds.append(batch.sums)

    def forget(self) -> None:
        """Forget the rounds of which there is no sum yet."""
        self._rounds.clear()

    def sums(self, comm: Comm) -> dict[str, Array]:
        """Return name -> sum over the step's micro-batches, float64; of losses the mean. Collective."""
        if self._rounds:
            rows = [self._row(sums) for sums in self._rounds]
            table = np.zeros((len(rows), comm.size, rows[0].size))
            table[:, comm.rank] = rows
            total = np.zeros(rows[0].size)
            for row in comm.sum_vector(table.reshape(-1)).reshape(-1, total.size):
                total += row
            self._found, start = {}, 1
            for name, kind in self.kinds.items():
                value = total[start : start + prod(kind.shape)].reshape(kind.shape)
                self._found[name] = value if kind.scale is None else value / max(total[0], 1)
                start += prod(kind.shape)
            self.forget()
        return self._found

    def losses(self, comm: Comm) -> dict[str, float]:
        """Return the auxiliary losses of the step by name, without their scale. Collective."""
        found = self.sums(comm)
        return {name: float(found[name]) for name in scales_of(self.kinds) if name in found}

    def _row(self, sums: Mapping[str, Any]) -> Array:
        """Return 1 and the numbers of a micro-batch, one after the other; zeros if there is none."""
        row = [np.array([float(bool(sums))])]
        host = {name: device.in_use().to_host(value) for name, value in sums.items()}
        for name, kind in self.kinds.items():
            value = kind.value(host) if kind.value and host else host.get(name, 0.0)
            row.append(np.broadcast_to(np.asarray(value, np.float64), kind.shape).reshape(-1))
        return np.concatenate(row)


def scales_of(kinds: Mapping[str, Tally]) -> dict[str, float]:
    """Return the scales of the auxiliary losses that count in the objective, by name."""
    return {name: kind.scale for name, kind in kinds.items() if kind.scale}


def tallies_of(stages: Iterable[Stage], scales: Mapping[str, float] | None) -> dict[str, Tally]:
    """Return the tallies of a model; `scales` of auxiliary losses stand in for those that layers declare.

    Raises ValueError for a scale of no loss, and for layers that mean different tallies by one name.
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
    return found
