"""Tests of a CUDA-aware MPI on a driver's memory: `make test-cuda-mpi MPI_ROOT=...` and run_cuda_mpi.py."""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
NOT_HERE = "an MPI that is not CUDA-aware ends the process: make test-cuda-mpi MPI_ROOT=..."


def pytest_collection_modifyitems(items):
    if os.environ.get("ZERO_MPI_TEST_CUDA_MPI") == "1":
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=NOT_HERE))
