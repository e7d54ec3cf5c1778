"""Devices: a rank's arrays are in host memory, or in the memory of the single GPU that it uses.

A process computes on one device, chosen once, before the first large array. A device provides the few
operations that hosts and GPUs have in common: flat memory, memory that is lent to an array and returned after
use, copies between host and device, and markers in the order of the device's work. All other array code runs
on NumPy and CuPy arrays alike. `arrays` has pools of buffers on a device, and `ordered_sum` adds arrays in
rank order.

If the launcher gives a rank its number on the node, `claim` takes that rank's GPU before MPI starts, because
MPI libraries use the current GPU of the thread that starts them. All computation uses one stream. A step
copies only the gradient's norm from the GPU, and losses stay on the GPU until the step's total is formed. So
the host can launch further work while the GPU computes.
"""

import contextlib
import sys
from typing import Any

import numpy as np

from zero_mpi import environment
from zero_mpi.device.cuda import Cuda, CudaMark, gpus, import_cupy, libraries, why_no_gpu
from zero_mpi.device.host import HOST, Host, HostStopwatch, Marker
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError

__all__ = ["HOST", "Cuda", "CudaMark", "Host", "HostStopwatch", "Marker", "gpus", "import_cupy", "libraries"]

Device = Host | Cuda
_in_use: Device = HOST


def in_use() -> Device:
    return _in_use


def use(name: str, on_node: int = 0) -> Device:
    """Choose the device of this process: "cpu", "cuda", or "auto", which is a GPU if CuPy finds one.

    A rank uses the GPU with the rank's number on the node, modulo the number of GPUs; `on_node` is the rank's
    number if the launcher does not set it. Raise UsageError if "cuda" is requested and there is no GPU.
    """
    count = 0 if name == "cpu" else gpus()
    if name == "cuda" and not count:
        raise UsageError(f"--device cuda: {why_no_gpu()}")
    local_rank = environment.local_rank()
    return adopt(Cuda((on_node if local_rank is None else local_rank) % count) if count else HOST)


def claim(name: str) -> None:
    """Take this rank's GPU before MPI starts, if the launcher gives the rank's number on the node.

    Errors are ignored here. The same errors occur in `use`, where all ranks can agree on them.
    """
    number, count = environment.local_rank(), 0 if name == "cpu" else gpus()
    if number is not None and count:
        cuda = import_cupy().cuda
        with contextlib.suppress(cuda.runtime.CUDARuntimeError):
            cuda.Device(number % count).use()
            cuda.runtime.free(0)  # creates the context and does nothing else


def adopt(device: Device) -> Device:
    global _in_use
    _in_use = device
    return device


def is_cupy(x: Array) -> bool:
    """Return whether `x` is a CuPy array, without importing CuPy."""
    return type(x).__module__.partition(".")[0] == "cupy"


def home_of(x: Array) -> Device:
    return in_use() if is_cupy(x) else HOST


def namespace(x: Array) -> Any:
    """Return the array module of `x`: cupy for a CuPy array, numpy for anything else."""
    return sys.modules["cupy"] if is_cupy(x) else np
