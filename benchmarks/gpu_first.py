"""First minutes on a GPU: one process, a line of JSON for each experiment; none that fails ends the rest.

    python benchmarks/gpu_first.py --seconds 120

In the order of what is learnt: how long a start takes and what was found; whether results are right; what a
call costs the host; what operations reach (TFLOP/s, or GB/s of what must be read and written at least, on
random data: zeros are faster); attention by its ways; whole steps of GPT-2 124M, one thing changed at a time.
An experiment that would begin after --seconds is left out and says so.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from gpu_workloads import ALL

from zero_mpi import device, ops
from zero_mpi.cli.parser import Parser
from zero_mpi.launch.world import World, run
from zero_mpi.ops import reference, sizes

BEGUN = time.perf_counter()
BF16 = np.dtype(ml_dtypes.bfloat16)
PRODUCTS = {  # rows, inputs, outputs
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
FLAT = 64 << 20  # elements of an update
CALLS, REPEATS, WARM_UP = 5, 9, 3  # between two events; medians of so many
HOST_CALLS = 300
BATCHES, MICRO_STEPS = (8, 32, 4), 6
PACKAGES = "numpy numba mpi4py nvmath-python cuda-bindings nvidia-cudnn-frontend torch"

Timed = tuple[str, str, float, str, Callable[[], Any]]  # operation, shape, work, unit, call


class Experiments:
    """Runs one after the other and prints what each found."""

    def __init__(self, seconds: float, tiny: bool) -> None:
        self.seconds, self.tiny = seconds, tiny

    def attempt(self, what: str, do: Callable[[], dict[str, Any]]) -> None:
        """Print what `do` returns, why it failed, or that no time was left."""
        if time.perf_counter() - BEGUN > self.seconds:
            found: dict[str, Any] = {"left_out": "no time"}
        else:
            try:
                found = do()
            except Exception as error:  # the next experiment is to go on
                found = {"error": f"{type(error).__name__}: {error}"[:600]}
        at = round(time.perf_counter() - BEGUN, 1)
        print(json.dumps({"at": at, "what": what} | found, default=str), flush=True)

    def smaller(self, *shape: int) -> tuple[int, ...]:
        """The shape, or one for the pretend GPU."""
        return tuple(min(length, 32) for length in shape) if self.tiny else shape


def drawn(kind: Any, *shape: int, scale: float = 1.0) -> Any:
    """Random numbers on the GPU; a million of them over and over."""
    some = (np.random.default_rng(0).standard_normal(1 << 20, np.float32) * np.float32(scale)).astype(kind)
    return device.in_use().from_host(np.resize(some, shape))


def off(got: Any, want: Any) -> float:
    """The length of the difference in relation to that of `want`."""
    own, exact = (np.asarray(x, np.float64) for x in (device.in_use().to_host(got), want))
    return float(np.linalg.norm(own - exact) / max(1e-30, float(np.linalg.norm(exact))))


# ---------------------------------------------------------------------------------------------- right or not


def start() -> dict[str, Any]:
    """Seconds until operations can be called; versions."""
    took = {}
    for name in ("cupy", "nvmath.bindings.cublasLt", "cudnn"):
        begun = time.perf_counter()
        __import__(name)
        took[name] = round(time.perf_counter() - begun, 2)
    begun = time.perf_counter()
    about = device.use("cuda").about
    ops.prepare()
    took["compile or load kernels"] = round(time.perf_counter() - begun, 2)
    found = {}
    for name in PACKAGES.split():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "-"
    return {"gpu": about, "computes": ops.backend(), "seconds": took, "versions": found}


def streams() -> dict[str, Any]:
    """Whether the stream of computing stays the current one."""
    gpu = device.in_use()
    cuda = gpu.cupy.cuda
    gpu.to_host(gpu.zeros(64).reshape(8, 8)[:, 1:3])
    kept = {"after columns": cuda.get_current_stream().ptr == gpu.stream.ptr}
    with cuda.Stream(non_blocking=True):
        pass
    return kept | {"after another stream": cuda.get_current_stream().ptr == gpu.stream.ptr}


def right_products() -> dict[str, Any]:
    """Relative errors of odd shapes, and those that cuBLASLt refuses."""
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
    """cuDNN's and our own beside float64: y, dq, dk, dv."""
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
    """Microseconds of the host for a call of each kind."""
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
    """Forward, dx and dw of a linear layer."""
    for name, shape in PRODUCTS.items():
        rows, inputs, outputs = tried.smaller(*shape)
        x, w, dy = drawn(BF16, rows, inputs), drawn(BF16, outputs, inputs), drawn(BF16, rows, outputs)
        dw, work = drawn(BF16, outputs, inputs), 2.0 * rows * inputs * outputs
        yield "linear", name, work, "TFLOP/s", partial(ops.linear, x, w)
        yield "linear_backward_x", name, work, "TFLOP/s", partial(ops.linear_backward_x, dy, w)
        yield "linear_backward_w", name, work, "TFLOP/s", partial(ops.linear_backward_w, dy, x, dw)


def attention(tried: Experiments) -> Iterator[Timed]:
    """Causal attention both ways; products above the diagonal are not counted."""
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
    """Operations whose time is that of memory."""
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


def seconds(call: Callable[[], Any]) -> float:
    """The median time of a call."""
    cuda, stream = device.in_use().cupy.cuda, device.in_use().stream
    for _ in range(WARM_UP):
        call()
    events = [cuda.Event() for _ in range(REPEATS + 1)]
    events[0].record(stream)
    for event in events[1:]:
        for _ in range(CALLS):
            call()
        event.record(stream)
    events[-1].synchronize()
    times = [cuda.get_elapsed_time(*pair) for pair in pairwise(events)]
    return statistics.median(times) / CALLS / 1e3


def rate(work: float, unit: str, call: Callable[[], Any]) -> dict[str, Any]:
    """Microseconds and rate of a call."""
    took = seconds(call)
    return {
        "us": round(1e6 * took, 1),
        "rate": work / took / (1e12 if unit == "TFLOP/s" else 1e9),
        "unit": unit,
    }


# ----------------------------------------------------------------------------------------------- whole steps


class Steps:
    """A model in training, of which one thing at a time is changed."""

    def __init__(self, workload: str) -> None:
        import gpu_step

        options = {"workload": workload, "batch": None, "precision": "bf16", "recompute": False}
        self._gpu_step = gpu_step
        self._stepper = gpu_step.Stepper(SimpleNamespace(offload="none", **options))

    def measured(self, batch: int, **changed: Any) -> dict[str, Any]:
        """Milliseconds of a step, of the host's part, and tokens a second; `changed`: attributes of sizes."""
        stepper, before = self._stepper, {name: getattr(sizes, name) for name in changed}
        stepper.workload = replace(stepper.workload, batch=batch)
        data = [self._gpu_step.micro_batch(stepper.workload, 0, n) for n in range(self._gpu_step.BATCHES)]
        stepper.data = [tuple(np.ascontiguousarray(part) for part in pair) for pair in data]
        try:
            for name, value in changed.items():
                setattr(sizes, name, value)
            for _ in range(WARM_UP):
                stepper.step()
            device.in_use().synchronize()
            ms = statistics.median(stepper.timed(MICRO_STEPS))
        finally:
            for name, value in before.items():
                setattr(sizes, name, value)
        tokens = 1e3 * stepper.workload.tokens / ms
        return {"batch": batch, "ms": round(ms, 2), "tokens/s": round(tokens), "loss": round(stepper.loss, 4)}


def command(world: World, arguments: Sequence[str]) -> int:
    """Do all of them."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="after so many none is begun")
    parser.add_argument("--tiny", action="store_true", help="small sizes: to try the script itself")
    options = parser.parse_args(arguments)
    tried = Experiments(options.seconds, options.tiny)
    tried.attempt("start", start)
    tried.attempt("streams", streams)
    tried.attempt("right: products", right_products)
    tried.attempt("right: attention", partial(right_attention, *tried.smaller(2, 256, 12, 64)))
    tried.attempt("host costs", partial(host_costs, 10 if options.tiny else HOST_CALLS))
    for group in (products, attention, passes):
        for operation, shape, work, unit, call in group(tried):
            tried.attempt(f"{operation}, {shape}", partial(rate, work, unit, call))
    workload = "tiny-gpt2" if options.tiny else "gpt2-124m"
    made: list[Steps] = []
    tried.attempt("a model", lambda: made.append(Steps(workload)) or {"parameters": ALL[workload].width})
    for steps in made:
        for batch in (ALL[workload].batch,) if options.tiny else BATCHES:
            tried.attempt(f"step, batch {batch}", partial(steps.measured, batch))
        most = ALL[workload].batch
        tried.attempt("step, logits in 256 MiB", partial(steps.measured, most, LOGITS_BYTES=256 << 20))
    return 0


if __name__ == "__main__":
    run("first", command, sys.argv[1:], alone=True)
