"""The emulator behind the pretend CuPy's kernels sees what a GPU would get wrong without a word.

Only where the CuPy is the pretend one: a real GPU would give wrong numbers, or hang.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zero_mpi import device

pytestmark = pytest.mark.world(1)  # a process alone

HEAD = 'extern "C" __global__ void '
REVERSE = HEAD + "reverse(float* x) { __shared__ float room[64]; room[threadIdx.x] = x[threadIdx.x]; BARRIER "
REVERSE += "x[threadIdx.x] = room[63 - threadIdx.x]; }"


@pytest.fixture
def pretend(the_gpu: Any) -> Any:
    if not hasattr(the_gpu.cupy.cuda, "is_device_address"):
        pytest.skip("this CuPy is a real one: what it runs is not emulated")
    return device.adopt(the_gpu)


def function(gpu: Any, code: str, name: str) -> Any:
    return gpu.cupy.RawModule(code=code, options=("-std=c++17",)).get_function(name)


def run(gpu: Any, code: str, name: str, threads: int, *arguments: Any, **named: Any) -> None:
    function(gpu, code, name)((1,), (threads,), arguments, **named)
    gpu.synchronize()


def test_threads_meet_at_a_barrier(pretend):
    x = np.arange(64, dtype=np.float32)
    for barrier, is_right in [("__syncthreads();", True), ("", False)]:
        there = pretend.from_host(x)
        run(pretend, REVERSE.replace("BARRIER", barrier), "reverse", 64, there)
        found = pretend.to_host(there)
        assert np.array_equal(found, x[::-1]) == is_right
        assert np.isnan(found).any() != is_right, "what was not yet written is NaN"


def test_a_barrier_that_protects_what_is_read_is_missed_too(pretend):
    """The second barrier of a loop: somebody still reads what is written for the next round."""
    code = (
        HEAD
        + """turns(float* x) {
        __shared__ float room[64];
        for (int round = 0; round < 8; round++) {
            room[threadIdx.x] = x[threadIdx.x];
            __syncthreads();
            x[threadIdx.x] = room[(threadIdx.x + 1) % 64];
            BARRIER
        }
    }"""
    )
    x = np.arange(64, dtype=np.float32)
    for barrier, is_right in [("__syncthreads();", True), ("", False)]:
        there = pretend.from_host(x)
        run(pretend, code.replace("BARRIER", barrier), "turns", 64, there)
        assert np.array_equal(pretend.to_host(there), np.roll(x, -8)) == is_right


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("if (threadIdx.x < 40) __syncthreads();", "threads 0 and .* of a block diverge: .*at a barrier"),
        ("if (threadIdx.x < 40) __syncthreads();\n else __syncthreads();", "diverge: .*line 1, .*line 2"),
        ("if (threadIdx.x % 32) x[0] = __shfl_xor_sync(~0u, x[0], 1);", "diverge: at a shuffle.*ended"),
        ("x[0] = __shfl_xor_sync(0xffffu, x[0], 1);", "part of a warp"),
        ("__shared__ float a[20000]; x[0] = a[0];", "bytes of shared memory"),
    ],
)
def test_threads_that_part_are_reported(pretend, body, text):
    there = pretend.zeros(64)
    code = HEAD + "parting(float* x) { BODY }".replace("BODY", body)
    with pytest.raises(pretend.cupy.cuda.CUDARuntimeError, match=text):
        run(pretend, code, "parting", 64, there)
    run(pretend, REVERSE.replace("BARRIER", "__syncthreads();"), "reverse", 64, there)  # others go on


TYPED = HEAD + "typed(float* x, long long n, float f, double d, int i) { x[n] = f + d + i; }"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (lambda x: (x, 1, np.float32(2), 3.0), TypeError, "takes 5 arguments, got 4"),
        (lambda x: (x, 1.0, np.float32(2), 3.0, np.int32(4)), TypeError, "a parameter L takes"),
        (lambda x: (x, 1, 2.0, 3.0, np.int32(4)), TypeError, "a parameter F takes"),
        (lambda x: (x.get(), 1, np.float32(2), 3.0, np.int32(4)), TypeError, "a parameter P takes"),
        (lambda x: (1 << 40, 1, np.float32(2), 3.0, np.int32(4)), ValueError, "not in device memory"),
    ],
)
def test_arguments_are_held_to_the_signature(pretend, arguments, error, text):
    x = pretend.zeros(4)
    with pytest.raises(error, match=text):
        run(pretend, TYPED, "typed", 64, *arguments(x))
    run(pretend, TYPED, "typed", 64, x, 1, np.float32(2), 3.0, np.int32(4))
    assert pretend.to_host(x).tolist() == [0, 9, 0, 0]


def test_every_kernel_has_the_parameters_of_the_table(pretend):
    from zero_mpi.ops.gpu import launch

    assert len(launch.TABLE) > 50
    for name, kernel in launch.TABLE.items():
        assert kernel.bind().parameters == kernel.parameters, name
