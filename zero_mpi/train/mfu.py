"""Model FLOPs utilization (MFU): the share of the machine's peak that a run reaches.

The peak is measured and not taken from a data sheet: the speed of plain matmuls on all ranks at once, at the
start of a run. The work of a step is the products of forward and backward as the plan counts them; what is
computed a second time to save memory does not count (Chowdhery et al., "PaLM", 2022, appendix B). The
measurement touches no state of the run, so it changes no bit.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from zero_mpi import device, ops
from zero_mpi.device.types import Array
from zero_mpi.launch.world import World
from zero_mpi.plan.case import Case
from zero_mpi.plan.simulate import Simulator
from zero_mpi.plan.workspaces import Compiled

SECONDS = 0.04  # seconds of timed products, after one that starts threads or compiles
LONG = 2e-3  # seconds of a large enough product: so short only where many cores or a GPU share it
EDGES = (512, 1024, 2048, 4096)  # edges of the matrices
BLOCK = 64  # rows of random numbers, which are repeated: making all of them would take longer than a product


def measure(world: World, dtype: Any) -> float:
    """Return floating-point operations per second of all ranks together, in products of `dtype`. Collective.

    On the host, products of a low type are float32 products where no library multiplies that type.
    """
    kind = np.dtype(np.float32) if ops.products(dtype)[1] else dtype
    world.comm.barrier()  # all ranks begin together: they share cores, caches and power
    return math.fsum(world.comm.allgather_object(rate(kind)))


def rate(dtype: Any) -> float:
    """Return operations per second of this rank, in matrices large enough to keep it busy."""
    for edge in EDGES:
        a, b, out = (matrix(edge, dtype) for _ in range(3))
        products(1, a, b, out)
        seconds = products(1, a, b, out)
        if seconds >= LONG:
            break
    count = max(1, int(SECONDS / seconds))
    return 2.0 * edge**3 * count / (products(count, a, b, out) if count > 1 else seconds)


def products(count: int, a: Array, b: Array, out: Array) -> float:
    """Return the seconds that `count` products take, by the operation that layers use."""
    begun = time.perf_counter()
    for _ in range(count):
        ops.linear_backward_x(a, b, out)
    device.in_use().synchronize()
    return time.perf_counter() - begun


def matrix(edge: int, dtype: Any) -> Array:
    """Return random numbers: on equal numbers processors would be faster."""
    where = device.in_use()
    array = where.empty(edge * edge, dtype).reshape(edge // BLOCK, BLOCK, edge)
    block = np.random.default_rng(edge).random((BLOCK, edge), np.float32).astype(dtype)
    array[...] = where.from_host(block)
    return array.reshape(edge, edge)


class Once(Compiled):
    """Operations that keep all they need for backward: nothing is computed a second time."""

    def attention_backward(
        self, dy: Array, q: Array, k: Array, v: Array, kept: Any
    ) -> tuple[tuple[Array, Array, Array], bool]:
        """Compute attention's backward without computing the weights again."""
        return super().attention_backward(dy, q, k, v, kept)[0], False


def step_flop(case: Case) -> float:
    """Return the matmul FLOP per step, of all ranks."""
    lone = Case(
        case.model,
        batch_size=case.micro_batch,
        micro_batch=case.micro_batch,
        context=case.context,
        frozen=case.frozen,
        packed=case.packed,
        preference=case.preference,
        base_is_reference=case.base_is_reference,
        teacher=case.teacher,
    )
    events = Simulator(lone, Once()).step()
    sequences = case.batch_size / case.micro_batch  # a last micro-batch may be smaller
    return sequences * math.fsum(event.flop for event in events)
