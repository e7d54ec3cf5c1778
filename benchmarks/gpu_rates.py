"""What our operations reach on a GPU: products and attention by shape, and what is bound by memory.

    python benchmarks/gpu_rates.py --precision bf16

A line of JSON for each operation and shape: the median of repeated calls between events of the GPU, on random
data (zeros are faster), as TFLOP/s, or GB/s of what must be read and written at least.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np

from zero_mpi import device, ops
from zero_mpi.cli.parser import Parser
from zero_mpi.launch.world import World, run

KINDS = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
PRODUCTS = {  # rows, inputs, outputs
    "gpt2 qkv": (32768, 768, 2304),
    "gpt2 projection": (32768, 768, 768),
    "gpt2 up": (32768, 768, 3072),
    "gpt2 down": (32768, 3072, 768),
    "gpt2 head": (4096, 768, 50304),
    "llama projection": (16384, 2048, 2048),
    "llama up": (16384, 2048, 8192),
    "llama down": (16384, 8192, 2048),
    "square": (8192, 8192, 8192),
}
ATTENTION = {  # sequences, positions, query heads, key/value heads, width
    "gpt2": (32, 1024, 12, 12, 64),
    "llama": (8, 2048, 32, 8, 64),
    "long": (1, 16384, 32, 8, 128),
}
PASSES = {"gpt2": (32768, 768), "llama": (16384, 2048)}  # rows, width
FLAT = 64 << 20  # elements of an update
CALLS, REPEATS, WARM_UP = 5, 20, 3  # between two events; medians of so many

Timed = tuple[str, str, float, str, Callable[[], Any]]  # operation, shape, work, unit, call


def drawn(kind: Any, *shape: int) -> Any:
    """Random numbers on the GPU; a million of them over and over."""
    some = np.random.default_rng(0).standard_normal(1 << 20, np.float32).astype(kind)
    return device.in_use().from_host(np.resize(some, shape))


def products(kind: Any) -> Iterator[Timed]:
    """Forward, dx and dw of a linear layer."""
    for name, (rows, inputs, outputs) in PRODUCTS.items():
        x, w, dy = drawn(kind, rows, inputs), drawn(kind, outputs, inputs), drawn(kind, rows, outputs)
        dw, work = drawn(kind, outputs, inputs), 2.0 * rows * inputs * outputs
        yield "linear", name, work, "TFLOP/s", partial(ops.linear, x, w)
        yield "linear_backward_x", name, work, "TFLOP/s", partial(ops.linear_backward_x, dy, w)
        yield "linear_backward_w", name, work, "TFLOP/s", partial(ops.linear_backward_w, dy, x, dw)


def attention(kind: Any) -> Iterator[Timed]:
    """Causal attention both ways; products above the diagonal are not counted."""
    for name, (batch, length, heads, kv, width) in ATTENTION.items():
        q, dy = (drawn(kind, batch, length, heads, width) for _ in range(2))
        k, v = (drawn(kind, batch, length, kv, width) for _ in range(2))
        work, scale = 2.0 * batch * heads * length * length * width, width**-0.5
        yield "causal_attention", name, work, "TFLOP/s", partial(ops.causal_attention, q, k, v, scale)
        _, kept = ops.causal_attention(q, k, v, scale)
        back = partial(ops.causal_attention_backward, dy, q, k, v, kept, scale)
        yield "causal_attention_backward", name, 2.5 * work, "TFLOP/s", back


def passes(kind: Any) -> Iterator[Timed]:
    """Operations whose time is that of memory."""
    for name, (rows, width) in PASSES.items():
        x, dy, w = drawn(kind, rows, width), drawn(kind, rows, width), drawn(kind, width)
        dw, db, size = drawn(kind, width), drawn(kind, width), x.nbytes
        yield "rms_norm", name, 2 * size, "GB/s", partial(ops.rms_norm, x, w, 1e-5)
        _, mean, r = ops.layer_norm(x, w, db, 1e-5)
        back = partial(ops.layer_norm_backward, dy, x, w, mean, r, dw, db, dy)
        yield "layer_norm_backward", name, 4 * size, "GB/s", back
        yield "gelu", name, 2 * size, "GB/s", partial(ops.gelu, x)
        yield "swiglu_backward", name, 5 * size, "GB/s", partial(ops.swiglu_backward, dy, x, x)
    p, g, m, v = (drawn(np.float32, FLAT) for _ in range(4))
    v *= v
    low, decay = drawn(kind, FLAT), device.in_use().zeros(FLAT // 1024, np.float64)
    settings = {"grad_scale": 1.0, "lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "step": 1}
    update = partial(ops.adamw, p, g, m, v, decay=decay, low=low, **settings)
    yield "adamw", f"{FLAT >> 20} Mi elements", FLAT * (7 * 4 + kind.itemsize), "GB/s", update
    yield "chunk_squares", f"{FLAT >> 20} Mi elements", 4 * FLAT, "GB/s", partial(ops.chunk_squares, g, 1024)


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


def command(world: World, arguments: Sequence[str]) -> int:
    """A line for each."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=tuple(KINDS), default="bf16")
    kind = KINDS[parser.parse_args(arguments).precision]
    device.use("cuda")
    ops.prepare()
    for group in (products, attention, passes):
        for operation, shape, work, unit, call in group(kind):
            took = seconds(call)
            rate = work / took / (1e12 if unit == "TFLOP/s" else 1e9)
            found = {"operation": operation, "shape": shape, "us": 1e6 * took, "rate": rate, "unit": unit}
            print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    run("rates", command, sys.argv[1:], alone=True)
