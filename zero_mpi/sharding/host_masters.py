"""Float32 parameters in pinned memory of the host, which the GPU copies from and to by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zero_mpi import device
from zero_mpi.device import Cuda
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.sharding.precision import FLOAT32, Precision

NONE, MOMENTS, STATE = CHOICES = ("none", "moments", "state")  # values of --offload


def gpu_to_spare(name: str) -> Cuda:
    """Return the GPU in use; raises UsageError if there is none."""
    where = device.in_use()
    if not isinstance(where, Cuda):
        raise UsageError(f"--offload {name}: expected a GPU, got the CPU; leave it out")
    return where


def masters_on_host(precision: Precision) -> Callable[[int], Array]:
    """Return a function that makes zeros of a size in pinned memory, for parameters in float32.

    Raises UsageError without a GPU, and where layers read the very parameters that are updated.
    """
    where = gpu_to_spare(STATE)
    if not precision.is_low:
        none = f"with --precision {precision.name} there are no separate fp32 weights"
        raise UsageError(f"--offload {STATE}: {none}; use --offload {MOMENTS}, or bf16")
    return partial(pinned_zeros, where)


def pinned_zeros(where: Cuda, size: int) -> Array:
    """Return flat zeros, float32, in pinned memory of the host."""
    array = where.pinned(size * FLOAT32.itemsize).view(FLOAT32)
    array.fill(0)
    return array
