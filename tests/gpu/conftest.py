"""Tests on CuPy arrays, with a GPU or the simulated CuPy of tests/pretend (see run_sizes.py).

A test module must not import cupy, so that its tests can be skipped without it.
"""

import os
import shutil
from pathlib import Path

import pytest
from mpi4py import MPI

from zero_mpi import device, ops

HERE = Path(__file__).resolve().parent
NO_GPU = "no GPU: `python tests/run_sizes.py tests/gpu` simulates one"
NOT_AWARE = "without ZERO_MPI_GPU_AWARE=1, MPI is not known to accept the memory of this GPU"
NO_GPU_EACH = "NCCL needs a GPU for each rank"
NO_COMPILER = "the simulated GPU needs g++ to run kernels"


def pytest_collection_modifyitems(items):
    """Skip this folder if CuPy finds no GPU, or a simulated one without a compiler for kernels."""
    skip_what_cannot_travel(items)
    has_compiler = os.environ.get("ZERO_MPI_TEST_GPU") == "1" or shutil.which("g++")
    if device.gpus() and has_compiler:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=NO_COMPILER if device.gpus() else NO_GPU))


def skip_what_cannot_travel(items):
    """Skip tests of transports that this machine's GPUs lack: CUDA-aware MPI, or NCCL (one GPU per rank)."""
    world = MPI.COMM_WORLD
    if world.size == 1 or not device.gpus() or "pretend" in device.use("cuda").about:
        return
    lacking = {} if os.environ.get("ZERO_MPI_GPU_AWARE") == "1" else {"mpi": NOT_AWARE}
    lacking |= {"nccl": NO_GPU_EACH} if device.gpus() < world.size else {}
    for item in items:
        mark = item.get_closest_marker("carries")
        values = [*item.callspec.params.values()] if hasattr(item, "callspec") else []
        words = {str(value).partition(" ")[0] for value in values} | set(mark.args if mark else ())
        if HERE in item.path.parents and (hits := words & set(lacking)):
            item.add_marker(pytest.mark.skip(reason=lacking[hits.pop()]))


@pytest.fixture(scope="session")
def the_gpu():
    before = device.in_use()
    yield device.use("cuda")
    device.adopt(before)


@pytest.fixture
def gpu(the_gpu):
    device.adopt(the_gpu)
    ops.prepare()
    yield the_gpu
    the_gpu.synchronize()
