"""The device that this process computes on, chosen once, before the first large array."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np

from zero_mpi import environment
from zero_mpi.device.cuda import Cuda, gpus, import_cupy, why_no_gpu
from zero_mpi.device.host import HOST, Host
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError

Device = Host | Cuda
_in_use: Device = HOST


def in_use() -> Device:
    """Return the device of this process."""
    return _in_use


def use(name: str, on_node: int = 0) -> Device:
    """Choose the device of this process: "cpu", "cuda", or "auto", a GPU where CuPy finds one.

    Of several GPUs a rank takes the one of its number on the node, over again where ranks are more; `on_node`
    is that number where the launcher does not tell it. Raises UsageError where a GPU is asked for and there
    is none.
    """
    count = 0 if name == "cpu" else gpus()
    if name == "cuda" and not count:
        raise UsageError(f"--device cuda: {why_no_gpu()}")
    told = environment.local_rank()
    return adopt(Cuda((on_node if told is None else told) % count) if count else HOST)


def claim(name: str) -> None:
    """Take this rank's GPU before MPI starts, where the launcher tells which it is.

    MPI libraries look for the GPU of the thread that starts them. Errors are not reported here: `use`
    meets them again, when all ranks can agree on them.
    """
    number, count = environment.local_rank(), 0 if name == "cpu" else gpus()
    if number is not None and count:
        cuda = import_cupy().cuda
        with contextlib.suppress(cuda.runtime.CUDARuntimeError):
            cuda.Device(number % count).use()
            cuda.runtime.free(0)  # nothing but that there is a context now


def adopt(chosen: Device) -> Device:
    """Compute on a device from now on."""
    global _in_use
    _in_use = chosen
    return chosen


def is_cupy(x: Array) -> bool:
    """Return whether `x` is a CuPy array, without importing CuPy for the answer."""
    return type(x).__module__.partition(".")[0] == "cupy"


def home_of(x: Array) -> Device:
    """Return the device that an array lies on."""
    return in_use() if is_cupy(x) else HOST


def namespace(x: Array) -> Any:
    """Return the array module of `x`: cupy for a CuPy array, numpy for anything else."""
    return sys.modules["cupy"] if is_cupy(x) else np
