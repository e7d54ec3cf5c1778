"""CUDA graphs of micro-batches: the GPU work is recorded once, and one call then launches all of it.

ZERO_MPI_GPU_GRAPH=1 enables them. Graphs need one rank, a cross-entropy of all rows, no tally and no trace;
other micro-batches run normally. The arrays of a recorded micro-batch are in a separate memory pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from zero_mpi import device, environment
from zero_mpi.device import Cuda
from zero_mpi.device.arrays import Recycler, Scalar, pool_of
from zero_mpi.nn.loss import CrossEntropy, rows_that_count
from zero_mpi.sharding.actions import Actions
from zero_mpi.telemetry import spans

WARM_UP = 2  # micro-batches of a kind before its recording; they create plans, kernels and buffers
MOST, MOST_COUNTS = 8, 64  # maximum number of recorded graphs, and of kinds of micro-batches that are counted

Work = Callable[..., Any]  # runs a micro-batch (x, its loss, actions) and returns the loss


class Graphs:
    """The recorded micro-batches of a module."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._counts = Counter[Any]()
        self._recordings: dict[Any, Recording] = {}

    def run(self, x: Any, loss: Any, actions: Actions, work: Work) -> Scalar | None:
        """Run a micro-batch normally, record and launch its graph, or launch the graph; return the loss."""
        form = self._form(x, loss)
        recorded = self._recordings.get(form)
        if recorded is not None:
            for unit in self._module.units:
                unit.gradient.rounds += unit.unit.trainable
            work(None, None, ())
            return recorded.launch(x, loss)
        if form is None or len(self._recordings) == MOST:
            return work(x, loss, actions)
        if len(self._counts) >= MOST_COUNTS:  # too many different shapes
            self._counts.clear()
        self._counts[form] += 1
        if self._counts[form] <= WARM_UP:
            return work(x, loss, actions)
        del self._counts[form]
        self._recordings[form] = recorded = Recording(x, loss, partial(work, actions=actions))
        return recorded.launch(x, loss)

    def _form(self, x: Any, loss: Any) -> Any:
        """Return a key shared by micro-batches with the same GPU work; None if recording is impossible."""
        plain = isinstance(x, np.ndarray) and type(loss) is CrossEntropy and spans.active is None
        if not plain or self._module.tallies.kinds or rows_that_count(loss.targets) is not None:
            return None
        rounds = [unit.gradient.rounds > 0 for unit in self._module.units]
        shapes = [(array.shape, array.dtype) for array in (x, loss.targets)]
        return (*shapes, loss.scale, self._module.loss_scale.factor, *rounds)


class Recording:
    """The graph of a micro-batch, its inputs, and its loss."""

    def __init__(self, x: Any, loss: CrossEntropy, work: Callable[[Any, Any], Any]) -> None:
        gpu = device.in_use()
        assert isinstance(gpu, Cuda), "graphs need a GPU"
        ids, targets = self._inputs = [gpu.from_host(x), gpu.from_host(loss.targets)]
        pool = pool_of(gpu)
        gpu.activations = self._pool = Recycler(gpu)
        try:
            recorded = gpu.record(partial(work, ids, replace(loss, targets=targets)))
            self._graph, self._loss, self._memory = recorded
        finally:
            gpu.activations = pool

    def launch(self, x: Any, loss: CrossEntropy) -> Scalar:
        gpu = device.in_use()
        for buffer, array in zip(self._inputs, (x, loss.targets), strict=True):
            buffer[...] = gpu.from_host(array)
        self._graph.launch(gpu.stream)
        return self._loss.copy()  # the next launch overwrites it


def graphs_for(module: Any) -> Graphs | None:
    """Return a `Graphs` if ZERO_MPI_GPU_GRAPH is set and a single rank runs on a GPU, else None."""
    enabled = environment.records_graphs() and isinstance(device.in_use(), Cuda) and module.comm.size == 1
    return Graphs(module) if enabled else None
