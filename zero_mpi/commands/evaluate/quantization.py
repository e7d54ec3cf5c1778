"""Figures about quantization: the distance between two models, and the columns of matrices that matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
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
FIGURES = 3  # sums of a window: divergence, squares of changes of probability, equal most likely tokens


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
    """Sums of the squares of each matrix's inputs, and the number of these, over all micro-batches in order.

    They are summed as gradients are: the result does not depend on the number of ranks.
    """

    def __init__(self, model: ModelConfig, comm: Comm) -> None:
        self.places, end = dict[str, tuple[int, int, int]](), 0  # first element, matrices, columns
        for name, param in model.params().items():
            if name.startswith("blk.") and name.endswith(".weight") and len(param.shape) > 1:
                matrices, columns = param.shape[0] if len(param.shape) > 2 else 1, param.shape[-1]
                self.places[name] = end, matrices, columns
                end += matrices * (columns + 1)
        self._comm, self._partition = comm, partitioned(-(-end // 1024) * 1024, comm.size, 1024)
        self._full = np.zeros(self._partition.length, np.float32)
        part = self._partition.part(comm.rank)
        self._own = np.zeros(part.stop - part.start, np.float32)
        self._seen = set[str]()

    def sums_and_counts(self, name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return views: sums of squares (M, in) and numbers of inputs (M, 1) of each matrix."""
        start, matrices, columns = self.places[name]
        both = self._full[start : start + matrices * (columns + 1)].reshape(matrices, columns + 1)
        return both[:, :columns], both[:, columns:]

    def observe(self, name: str, x: Any, starts: Any) -> None:
        """Add the inputs x (..., in) of a matrix, or of a stack: those of expert e begin at row starts[e]."""
        if name not in self.places:
            return
        to_host = device.in_use().to_host
        flat, (sums, counts) = to_host(x).reshape(-1, x.shape[-1]), self.sums_and_counts(name)
        bounds = [0, len(flat)] if starts is None else to_host(starts).tolist()
        for matrix, (first, stop) in enumerate(pairwise(bounds)):
            squares = np.zeros(x.shape[-1])
            for at in range(first, stop, ROWS):
                squares += np.square(flat[at : min(at + ROWS, stop)].astype(np.float64)).sum(0)
            sums[matrix] += squares.astype(np.float32)
            counts[matrix] += stop - first
        self._seen.add(name)

    def end_round(self, contributors: int) -> None:
        """Add what the ranks have seen in a round. Collective."""
        arguments = self._full, self._own, self._partition
        self._comm.reduce_scatter(*arguments, contributors=contributors, accumulate=True).wait()
        self._full.fill(0)

    def totals(self) -> dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """Return sums (M, in) and counts (M, 1) of the matrices with inputs, on all ranks. Collective."""
        self._comm.allgather(self._own, self._full, self._partition).wait()
        names = sorted(set[str]().union(*self._comm.allgather_object(self._seen)))
        return {name: self.sums_and_counts(name) for name in names}
