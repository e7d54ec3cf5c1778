"""Figures about quantization: the distance between two models, and the columns of matrices that matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero_mpi import device
from zero_mpi.arguments import UNCOUNTED
from zero_mpi.comm import Comm
from zero_mpi.comm.partition import dealt_out as partitioned
from zero_mpi.device.types import Array
from zero_mpi.models import ModelConfig
from zero_mpi.sharding import ShardedModule
from zero_mpi.sharding.evaluation import PartedBatch, dealt_out
from zero_mpi.sharding.grad_accum import ordered_total

ROWS = 64  # of logits compared at a time
FIGURES = 3  # sums of a window: divergence, squares of changes of probability, equal likeliest tokens


def divergences(
    modules: Sequence[ShardedModule], micro_batches: int, count: int, read: Callable[[int], PartedBatch]
) -> Array:
    """Return the sums of each part, (count, 3) float64, the same on all ranks. Collective.

    modules: the model and its reference; read(i) gives micro-batch i
    """

    def compute(number: int, sums: Array) -> None:
        batch = read(number)
        to_host = device.in_use().to_host
        ours, theirs = (np.array(to_host(each.forward(batch.x, training=False))) for each in modules)
        for place, part in enumerate(batch.parts, batch.first):
            found = compared(ours[part], theirs[part], np.asarray(batch.targets)[part])
            sums[FIGURES * place : FIGURES * (place + 1)] = found

    def idle() -> None:
        for module in modules:
            module.forward(None, training=False)

    return dealt_out(modules[0], micro_batches, FIGURES * count, compute, idle).reshape(-1, FIGURES)


def compared(ours: Array, theirs: Array, targets: Array) -> Array:
    """Return the three sums over positions, from logits (T, V) of a model and its reference."""
    total = np.zeros(FIGURES)
    for start in range(0, len(targets), ROWS):
        here = slice(start, start + ROWS)
        mine, base, ids = log_softmax(ours[here]), log_softmax(theirs[here]), targets[here]
        kept = np.flatnonzero(ids != UNCOUNTED)
        mine, base, ids = mine[kept], base[kept], ids[kept]
        rows = np.arange(len(ids))
        changes = np.exp(mine[rows, ids]) - np.exp(base[rows, ids])
        equal = mine.argmax(1) == base.argmax(1)
        total += np.array([(np.exp(base) * (base - mine)).sum(), (changes**2).sum(), equal.sum()])
    return total


def log_softmax(logits: Array) -> Array:
    """Return log-probabilities of the last axis, float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def divergence_figures(sums: Array, tokens: int) -> dict[str, float]:
    """Return the means over all tokens, as llama.cpp's perplexity tool has them."""
    divergence, squares, equal = (ordered_total(column) / tokens for column in sums.T)
    return {"kl": divergence, "rms_change": float(np.sqrt(squares)), "same_top": equal}


class Importance:
    """Sums of the squares of each matrix's inputs, over all micro-batches in their order.

    They are summed as gradients are: the result does not depend on the number of ranks.
    """

    def __init__(self, model: ModelConfig, comm: Comm) -> None:
        shapes = {name: param.shape for name, param in model.params().items() if name.startswith("blk.")}
        ends = np.cumsum([shape[-1] if len(shape) == 2 else 0 for shape in shapes.values()]).tolist()
        self.places = {
            name: slice(end - shape[-1], end)
            for (name, shape), end in zip(shapes.items(), ends, strict=True)
            if len(shape) == 2 and name.endswith(".weight")
        }
        self._comm, self._partition = comm, partitioned(-(-ends[-1] // 1024) * 1024, comm.size, 1024)
        self._full = np.zeros(self._partition.length, np.float32)
        part = self._partition.part(comm.rank)
        self._own = np.zeros(part.stop - part.start, np.float32)
        self.seen, self.tokens = set[str](), 0

    def observe(self, name: str, x: Any) -> None:
        """Add the inputs x (..., in) of a matrix."""
        place = self.places.get(name)
        if place is not None:
            flat = device.in_use().to_host(x).reshape(-1, x.shape[-1])
            squares = np.zeros(x.shape[-1])
            for start in range(0, len(flat), ROWS):
                squares += np.square(flat[start : start + ROWS].astype(np.float64)).sum(0)
            self._full[place] += squares.astype(np.float32)
            self.seen.add(name)

    def end_round(self, contributors: int) -> None:
        """Add what the ranks have seen in a round. Collective."""
        arguments = self._full, self._own, self._partition
        self._comm.reduce_scatter(*arguments, contributors=contributors, accumulate=True).wait()
        self._full.fill(0)

    def totals(self) -> dict[str, NDArray[np.float32]]:
        """Return the sums (1, in) of the matrices with inputs, on all ranks. Collective."""
        self._comm.allgather(self._own, self._full, self._partition).wait()
        names = sorted(set[str]().union(*self._comm.allgather_object(self.seen)))
        return {name: self._full[self.places[name]][None] for name in names}
