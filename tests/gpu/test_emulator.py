"""The emulator behind the pretend CuPy's kernels sees what a GPU would get wrong without a word.

Only where the CuPy is the pretend one: a real GPU would give wrong numbers, or hang.
"""

from __future__ import annotations

import threading
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
        (
            "if (threadIdx.x % 32) x[0] = __shfl_xor_sync(0xffffffffu, x[0], 1);",
            "diverge: at a shuffle.*ended",
        ),
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


def test_lanes_exchange_values(pretend):
    code = (
        HEAD
        + """lanes(float* x, double* y) {
        x[threadIdx.x] = __shfl_down_sync(0xffffffffu, x[threadIdx.x], 5);
        double z = y[threadIdx.x];
        for (int way = 16; way > 0; way /= 2) z += __shfl_xor_sync(0xffffffffu, z, way);
        y[threadIdx.x] = z + __shfl_sync(0xffffffffu, y[threadIdx.x], 3);
    }"""
    )
    x, y = pretend.from_host(np.arange(64, dtype=np.float32)), pretend.from_host(np.arange(64.0))
    run(pretend, code, "lanes", 64, x, y)
    halves = np.arange(64).reshape(2, 32)
    assert np.array_equal(pretend.to_host(x).reshape(2, 32)[:, :27], halves[:, 5:])
    assert np.array_equal(
        pretend.to_host(y).reshape(2, 32), np.repeat(halves.sum(1) + halves[:, 3], 32).reshape(2, 32)
    )


def test_dynamic_shared_memory_and_many_blocks(pretend):
    code = (
        HEAD
        + """blocks(float* x) {
        extern __shared__ float room[];
        room[threadIdx.x] = blockIdx.x + gridDim.x * blockIdx.y;
        __syncthreads();
        float* mine = x + (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x;
        mine[threadIdx.x] = room[blockDim.x - 1 - threadIdx.x];
    }"""
    )
    x = pretend.zeros(6 * 40)
    function(pretend, code, "blocks")((3, 2), (40,), (x,), shared_mem=160)
    assert np.array_equal(pretend.to_host(x), np.repeat(np.arange(6), 40))


TYPED = (
    HEAD
    + "__launch_bounds__(64) typed(float* x, long long n, float f, double d, int i) { x[n] = f + d + i; }"
)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (lambda x: (x, 1, np.float32(2), 3.0), TypeError, "takes 5 arguments, got 4"),
        (lambda x: (x, 1.0, np.float32(2), 3.0, np.int32(4)), TypeError, "a parameter L takes"),
        (lambda x: (x, 1, 2.0, 3.0, np.int32(4)), TypeError, "a parameter F takes"),
        (lambda x: (x, 1, np.float32(2), np.float32(3), np.int32(4)), TypeError, "a parameter D takes"),
        (lambda x: (x, 1, np.float32(2), 3.0, 4), TypeError, "a parameter I takes"),
        (lambda x: (x.get(), 1, np.float32(2), 3.0, np.int32(4)), TypeError, "a parameter P takes"),
        (lambda x: (1 << 40, 1, np.float32(2), 3.0, np.int32(4)), ValueError, "not in device memory"),
        (
            lambda x: (x.get().ctypes.data, 1, np.float32(2), 3.0, np.int32(4)),
            ValueError,
            "not in device memory",
        ),
    ],
)
def test_arguments_are_held_to_the_signature(pretend, arguments, error, text):
    x = pretend.zeros(4)
    with pytest.raises(error, match=text):
        run(pretend, TYPED, "typed", 64, *arguments(x))
    run(pretend, TYPED, "typed", 64, x, 1, np.float32(2), 3.0, np.int32(4))
    assert pretend.to_host(x).tolist() == [0, 9, 0, 0]


def test_sizes_and_names_are_checked(pretend):
    typed = function(pretend, TYPED, "typed")
    arguments = (pretend.zeros(4), 1, np.float32(2), 3.0, np.int32(4))
    with pytest.raises(ValueError, match="at most 64 threads"):
        typed((1,), (65,), arguments)
    with pytest.raises(ValueError, match="a grid of"):
        typed((0,), (64,), arguments)
    with pytest.raises(pretend.cupy.cuda.CUDARuntimeError, match="not found"):
        function(pretend, TYPED, "other")
    with pytest.raises(RuntimeError, match="does not compile"):
        function(pretend, HEAD + "f(float* x) { x[0] = y; }", "f")


def test_kernels_run_in_the_order_of_their_stream_on_memory_that_is_still_there(pretend, monkeypatch):
    monkeypatch.setenv("PRETEND_CUPY_DELAY", "0.002")
    code = HEAD + "twice(float* to, const float* from) { to[threadIdx.x] = 2 * from[threadIdx.x]; }"
    twice = function(pretend, code, "twice")
    steps = [pretend.from_host(np.arange(32, dtype=np.float32))]
    for _ in range(5):
        steps.append(pretend.empty(32))
        twice((1,), (32,), (steps[-1].data.ptr, steps[-2].data.ptr))
        del steps[:-1]  # only its address was told
    assert np.array_equal(pretend.to_host(steps[-1]), 32 * np.arange(32))


def test_a_stream_that_use_has_chosen_is_forgotten_after_a_with_block(pretend):
    """The rule of CuPy's stream.pyx: leaving a block goes back to the block around it, or the NULL stream."""
    cuda, found = pretend.cupy.cuda, []

    def chosen() -> None:
        used, outer, inner = cuda.Stream(), cuda.Stream(), cuda.Stream()
        used.use()
        with outer:
            with inner:
                pass
            found.append(cuda.get_current_stream() is outer)
        found.append(cuda.get_current_stream() is cuda.Stream.null)

    thread = threading.Thread(target=chosen)  # the main thread's stream stays what it is
    thread.start()
    thread.join()
    assert found == [True, True]


def test_every_kernel_has_the_parameters_of_the_table(pretend):
    from zero_mpi.ops.gpu import launch

    assert len(launch.TABLE) > 50
    for name, kernel in launch.TABLE.items():
        assert kernel.bind().parameters == kernel.parameters, name
