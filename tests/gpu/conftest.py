"""Tests on CuPy arrays: of a GPU, or of the pretend one of tests/pretend (see run_sizes.py).

A test module must not import cupy: where there is none, its tests are skipped and say so.
"""

import os
import shutil
from pathlib import Path

import pytest

from zero_mpi import device, ops

HERE = Path(__file__).resolve().parent
NO_GPU = "no GPU: `python tests/run_sizes.py tests/gpu` brings a pretend one"
NO_COMPILER = "the pretend GPU runs kernels only where there is g++"


def pytest_collection_modifyitems(items):
    """Skip what is in this folder where CuPy finds no GPU, or a pretend one that cannot run kernels."""
    has_compiler = os.environ.get("ZERO_MPI_TEST_GPU") == "1" or shutil.which("g++")
    if device.gpus() and has_compiler:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=NO_COMPILER if device.gpus() else NO_GPU))


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
