"""Tests of the measured matmul rate and memory use of a GPU."""

import pytest

from zero_mpi.launch.world import World
from zero_mpi.sharding.precision import BF16, FP32
from zero_mpi.train import summary as mfu

pytestmark = pytest.mark.world(1)


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_products_are_timed_on_the_gpu_in_the_type_of_computing(precision, gpu, monkeypatch):
    seen = []
    matrix = mfu.matrix

    def noted(edge, dtype):
        seen.append(matrix(edge, dtype))
        return seen[-1]

    monkeypatch.setattr(mfu, "EDGES", (64,))
    monkeypatch.setattr(mfu, "matrix", noted)
    assert mfu.measure(World(0, 1), precision.compute) > 0
    assert {x.dtype for x in seen} == {precision.compute}
    assert all(isinstance(x, gpu.cupy.ndarray) for x in seen)


def test_memory_in_use_is_what_is_not_free(gpu):
    free, total = gpu.cupy.cuda.runtime.memGetInfo()
    actual = gpu.memory_in_use()
    later, _ = gpu.cupy.cuda.runtime.memGetInfo()  # other processes may share the GPU
    assert min(total - free, total - later) <= actual <= max(total - free, total - later)
    assert 0 < actual < total
