"""Times each operation and compares it with its reference and with the limit of the machine.

    python benchmarks/ops.py --repeats 30

The limit of a matrix product is the speed of a large sgemm. The limit of any other operation is the time that
an addition by NumPy needs to move the same number of bytes. Limits and operations are measured in turns, on
one thread, and every timed call follows a call that is not timed. The ratio compares medians. The share of
the limit compares minimum times, because other work on the machine affects them less.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import zero_mpi  # noqa: F401  (one thread, before numpy is loaded)

import numpy as np  # isort: skip

from zero_mpi import ops
from zero_mpi.device.types import Array
from zero_mpi.ops import reference

SQUARE = 1024  # number of rows and columns of the sgemm that sets the limit


@dataclass
class Row:
    """An operation on certain arrays, with its amount of work and its measured seconds."""

    name: str
    shape: str
    fast: Callable[[], object]
    plain: Callable[[], object]
    flops: float = 0
    nbytes: float = 0
    fast_times: list[float] = field(default_factory=list)
    plain_times: list[float] = field(default_factory=list)
    limit_times: list[float] = field(default_factory=list)


def numbers(*shape: int, seed: int = 0) -> Array:
    """Return an array of random float32 numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def row(name: str, *arguments: object, moved: Sequence[Array] = (), flops: float = 0, **named: object) -> Row:
    """Return the row for an operation. `moved`: arrays that it reads or writes once."""
    shape = " ".join("x".join(map(str, x.shape)) for x in arguments if isinstance(x, np.ndarray))
    fast = partial(getattr(ops, name), *arguments, **named)
    plain = partial(getattr(reference, name), *arguments, **named)
    return Row(name, shape[:40], fast, plain, flops, sum(x.nbytes for x in moved))


def products(n: int, inputs: int, outputs: int) -> list[Row]:
    """Return rows for the operations of a linear layer."""
    x, y, w = numbers(n, inputs), numbers(n, outputs), numbers(outputs, inputs)
    flops = 2.0 * n * inputs * outputs
    return [
        row("linear", x, w, flops=flops),
        row("linear_backward_x", y, w, flops=flops),
        row("linear_backward_w", y, x, np.zeros_like(w), flops=flops),
        row("linear_backward_b", y, np.zeros(outputs, np.float32), moved=[y]),
    ]


def norms(n: int, width: int) -> list[Row]:
    """Return rows for RMSNorm and LayerNorm."""
    x, dy, w, sums = numbers(n, width), numbers(n, width, seed=1), numbers(width), numbers(width, seed=1)
    _, r = reference.rms_norm(x, w, 1e-5)
    _, mean, root = reference.layer_norm(x, w, w, 1e-5)
    return [
        row("rms_norm", x, w, 1e-5, moved=[x, x]),
        row("rms_norm_backward", dy, x, w, r, sums, moved=[x, x, x]),
        row("layer_norm", x, w, w, 1e-5, moved=[x, x]),
        row("layer_norm_backward", dy, x, w, mean, root, sums, sums.copy(), moved=[x, x, x]),
    ]


def pointwise(n: int, width: int) -> list[Row]:
    """Return rows for activations, a sum, and rotary positions."""
    x, y, z = numbers(n, width), numbers(n, width, seed=1), numbers(n, width, seed=2)
    heads = x.reshape(n // 256, 256, width // 64, 64)
    angle = numbers(256, 32)
    return [
        row("add", x, y, moved=[x, x, x]),
        row("gelu", x, moved=[x, x]),
        row("gelu_backward", y, x, moved=[x, x, x]),
        row("swiglu", x, y, moved=[x, x, x]),
        row("swiglu_backward", z, x, y, moved=[x] * 5),
        row("rope", heads, np.cos(angle), np.sin(angle), True, moved=[x, x]),
        row("rope", heads, np.cos(angle), np.sin(angle), False, moved=[x, x]),
    ]


def embeddings(b: int, t: int, vocabulary: int, width: int) -> list[Row]:
    """Return rows for the embedding tables of tokens and of positions."""
    tokens = np.random.default_rng(0).integers(vocabulary, size=(b, t))
    w, dy, places = numbers(vocabulary, width), numbers(b, t, width), numbers(t, width)
    return [
        row("embedding", tokens, w, moved=[dy, dy]),
        row("embedding_backward", tokens, dy, np.zeros_like(w), moved=[dy, dy, dy]),
        row("positions", dy, places, moved=[dy, dy]),
        row("positions_backward", dy, places, moved=[dy]),
    ]


def attention(b: int, t: int, heads: int, width: int) -> list[Row]:
    """Return rows for attention and its gradient. Their limit only counts matmuls up to the diagonal."""
    q, k, v, dy = (numbers(b, t, heads, width, seed=seed) for seed in range(4))
    scale = width**-0.5
    _, kept = ops.causal_attention(q, k, v, scale)
    _, weights = reference.causal_attention(q, k, v, scale)
    flops = 2.0 * b * heads * t * (t + 1) / 2 * width
    backward = row("causal_attention_backward", dy, q, k, v, kept, scale, flops=4 * flops)
    backward.plain = partial(reference.causal_attention_backward, dy, q, k, v, weights, scale)
    return [row("causal_attention", q, k, v, scale, flops=2 * flops), backward]


def losses(n: int, width: int, vocabulary: int) -> list[Row]:
    """Return rows for cross-entropy, alone and together with the head's matmuls."""
    x, w, dw = numbers(n, width), numbers(vocabulary, width), np.zeros((vocabulary, width), np.float32)
    targets = np.random.default_rng(0).integers(vocabulary, size=n)
    logits = x @ w.T
    flops = 2.0 * n * width * vocabulary
    return [
        row("cross_entropy", logits, targets, 1 / n, moved=[logits, logits]),
        row("linear_cross_entropy", x, w, None, targets, 1 / n, dw, flops=3 * flops),
    ]


def flat(size: int) -> list[Row]:
    """Return rows for operations on the flat shards of a rank."""
    p, g, m, v = (numbers(size, seed=seed) for seed in range(4))
    options = {
        "grad_scale": 1.0,
        "lr": 1e-5,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "decay": np.array([0.1]),
        "step": 9,
    }
    return [
        row("adamw", p, g, m, np.abs(v), moved=[p] * 7, **options),
        row("chunk_squares", g, 1024, moved=[g]),
    ]


def all_rows() -> list[Row]:
    """Return rows for a byte-level llama of width 384 at 8 x 256 tokens, long attention, and GPT-2's head."""
    return [
        *products(2048, 384, 1024),
        *norms(2048, 384),
        *pointwise(2048, 1024),
        *embeddings(8, 256, 256, 384),
        *attention(8, 256, 6, 64),
        *attention(1, 2048, 4, 64),
        *losses(2048, 384, 256),
        *losses(256, 768, 50257),
        *flat(10_800_000 // 1024 * 1024),
    ]


def seconds(call: Callable[[], object]) -> float:
    """Call twice. Return the seconds of the second call."""
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Limits:
    """Limits of the machine: operations per second of an sgemm, and bytes per second of an addition."""

    def __init__(self) -> None:
        self.a, self.b = numbers(SQUARE, SQUARE), numbers(SQUARE, SQUARE, seed=1)
        self.c = np.empty_like(self.a)

    def time(self, item: Row) -> float:
        """Measure the limit of a row. Return the minimum number of seconds that the row's work can take."""
        if item.flops:
            return seconds(partial(np.matmul, self.a, self.b, out=self.c)) * item.flops / (2.0 * SQUARE**3)
        x, y, z = np.zeros((3, max(1, int(item.nbytes) // 12)), np.float32)
        return seconds(partial(np.add, x, y, out=z))


def measure(rows: list[Row], repeats: int) -> None:
    """Time all rows and their limits, in turns."""
    limits = Limits()
    for item in rows:
        item.fast(), item.plain()
    for _ in range(repeats):
        for item in rows:
            item.fast_times.append(seconds(item.fast))
            item.plain_times.append(seconds(item.plain))
            item.limit_times.append(limits.time(item))


def print_table(rows: list[Row], repeats: int) -> None:
    """Print a table with one line per operation."""
    print(f"{ops.backend()}, numpy {np.__version__}, {platform.machine()}, 1 thread, {repeats} repeats")
    print("| operation | arrays | ms | least ms | reference ms | ratio | limit | share of limit |")
    print("|---|---|---|---|---|---|---|---|")
    for item in rows:
        fast, plain = statistics.median(item.fast_times), statistics.median(item.plain_times)
        share = min(item.limit_times) / min(item.fast_times)
        print(
            f"| {item.name} | {item.shape} | {fast * 1e3:.3f} | {min(item.fast_times) * 1e3:.3f} "
            f"| {plain * 1e3:.3f} | {plain / fast:.1f} | {'sgemm' if item.flops else 'bytes'} | {share:.0%} |"
        )


def main() -> None:
    """Time all operations and print the table."""
    parser = argparse.ArgumentParser(description="Time operations, their references and their limits.")
    parser.add_argument("--repeats", type=int, default=20, help="number of timed runs of each operation")
    parser.add_argument("--only", default="", help="time only operations whose name contains this")
    arguments = parser.parse_args()
    ops.prepare(print)
    rows = [item for item in all_rows() if arguments.only in item.name]
    measure(rows, arguments.repeats)
    print_table(rows, arguments.repeats)


if __name__ == "__main__":
    main()
