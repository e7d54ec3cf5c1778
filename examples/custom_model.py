"""A model of your own: a layer with a hand-written backward, its test, and a sharded language model.

    mpirun -n 3 python examples/custom_model.py

The layer mixes each position with the previous one. Two such layers see three tokens, which is enough to
continue counting sequences without attention. The docstring of `MixPrevious` says what a layer must do;
`slope_error` checks its backward. Losses are the same, digit for digit, at any number of ranks.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from zero_mpi import FULL_SHARD, GradAccum, ShardedAdamW, ShardedModule, connect
from zero_mpi.device.arrays import namespace
from zero_mpi.device.types import Array
from zero_mpi.launch.world import World, run
from zero_mpi.nn import Chain, CrossEntropy, Embedding, Layer, Linear, Param, Residual, RMSNorm, Stage, SwiGLU

VOCABULARY, CONTEXT, WIDTH, BLOCKS = 32, 16, 48, 2
STEPS, MICRO_BATCHES, SEQUENCES = 30, 4, 8  # SEQUENCES: sequences per micro-batch


class MixPrevious(Layer):
    """y[t] = m x[t] + (1 - m) x[t - 1] for x (B, T, C), with m = `NAME.weight` (C,), and x[-1] = 0.

    A layer holds no arrays. The runtime passes the weights in `p` only while they are needed, so:
    - `params` names the weights, with shapes and initial values. A name is unique in the model.
    - `forward` returns y and the values that backward needs, which must not refer to `p`.
    - `backward` returns dx and *adds* the gradients into `g`. A weight that is not in `g` is frozen.
    - neither changes x or dy, which other layers may still read.
    """

    def __init__(self, name: str, width: int) -> None:
        self.weight, self.width = f"{name}.weight", width

    def params(self) -> dict[str, Param]:
        return {self.weight: Param((self.width,), "normal", std=0.5)}

    def forward(self, p: Any, x: Array) -> tuple[Array, Any]:
        m, before = p[self.weight], moved(x, 1)
        return m * x + (1 - m) * before, (x, before)

    def backward(self, p: Any, saved: Any, dy: Array, g: Any) -> Array:
        (x, before), m = saved, p[self.weight]
        if self.weight in g:
            g[self.weight] += (dy * (x - before)).sum(axis=(0, 1))
        return m * dy + moved((1 - m) * dy, -1)


def moved(x: Array, by: int) -> Array:
    """Return x (B, T, C) shifted one position later (1) or earlier (-1). The free position becomes 0."""
    result = namespace(x).zeros_like(x)  # a NumPy array, or a CuPy array if x is on a GPU
    if by > 0:
        result[:, 1:] = x[:, :-1]
    else:
        result[:, :-1] = x[:, 1:]
    return result


def slope_error(layer: Layer, x: Array, step: float = 1e-5) -> float:
    """Return the relative error of backward, compared with a difference quotient of forward in one direction.

    In float64, rounding leaves an error of about 1e-9. `g` does not start at zero, because backward must add
    to it. The weights are overwritten before backward, because `saved` must not refer to them.
    """
    draw = np.random.default_rng(0)
    p = {name: draw.standard_normal(param.shape) for name, param in layer.params().items()}
    along = {name: draw.standard_normal(value.shape) for name, value in p.items()}
    dx_along, dy = draw.standard_normal(x.shape), draw.standard_normal(layer.forward(p, x)[0].shape)

    def loss(t: float) -> float:
        moved_p = {name: value + t * along[name] for name, value in p.items()}
        return float((dy * layer.forward(moved_p, x + t * dx_along)[0]).sum())

    measured = (loss(step) - loss(-step)) / (2 * step)
    weights = {name: value.copy() for name, value in p.items()}
    _, saved = layer.forward(weights, x)
    for value in weights.values():
        value.fill(np.nan)
    g = {name: np.ones_like(value) for name, value in p.items()}
    dx = layer.backward(p, saved, dy, g)
    slope = (dx * dx_along).sum() + sum(((g[name] - 1) * along[name]).sum() for name in p)
    return abs(float(slope) - measured) / abs(measured)


def block(name: str) -> Layer:
    """Return a block that consists of two residual branches."""
    mix = Chain(RMSNorm(f"{name}.mix_norm", WIDTH, 1e-5), MixPrevious(f"{name}.mix", WIDTH))
    wide = 2 * WIDTH
    feed = (SwiGLU(name, WIDTH, wide), Linear(f"{name}.ffn_down", wide, WIDTH, std=0.1))
    return Chain(Residual(mix), Residual(Chain(RMSNorm(f"{name}.ffn_norm", WIDTH, 1e-5), *feed)))


def stages() -> list[Stage]:
    """Return the model. Each block is a stage with its own scope, so a rank gathers it block by block."""
    head = Chain(RMSNorm("output_norm", WIDTH, 1e-5), Linear("output", WIDTH, VOCABULARY))
    return [
        Stage("token_embd", Embedding("token_embd", VOCABULARY, WIDTH, std=0.5)),
        *(Stage(f"blk.{i}", block(f"blk.{i}")) for i in range(BLOCKS)),
        Stage("output", head),
    ]


def micro_batch(step: int, index: int | None) -> tuple[Array | None, CrossEntropy | None]:
    """Return tokens and criterion of a micro-batch, the same on every rank; (None, None) if index is None."""
    if index is None:
        return None, None
    draw = np.random.default_rng((step, index))
    first, gap = draw.integers([[0], [1]], [[VOCABULARY], [4]], size=(2, SEQUENCES))[..., None]
    text = (first + gap * np.arange(CONTEXT + 1)) % VOCABULARY
    return text[:, :-1], CrossEntropy(text[:, 1:], 1.0 / (MICRO_BATCHES * SEQUENCES * CONTEXT))


def command(world: World, arguments: Sequence[str]) -> int:
    """Test the layer, train the model, and let it count. Return the exit status."""
    comm = connect()
    error = slope_error(MixPrevious("mix", 5), np.random.default_rng(1).standard_normal((2, 4, 5)))
    if error > 1e-7:
        raise ValueError(f"backward of MixPrevious does not match forward: relative error {error:.1e}")
    module = ShardedModule(stages(), comm, FULL_SHARD)
    module.initialize(seed=0)
    optimizer, accumulator = ShardedAdamW(module, lr=1e-2), GradAccum(module, MICRO_BATCHES)
    for step in range(STEPS):
        for index in accumulator:
            accumulator.accumulate(*micro_batch(step, index))
        loss = accumulator.total_loss()
        optimizer.step(max_norm=1.0)
        if comm.rank == 0:
            print(f"step {step + 1} loss {loss!r}")
    text = np.array([[3, 6]])
    for _ in range(6):  # forward is collective, so all ranks call it
        logits = module.forward(text, training=False)
        text = np.append(text, logits[:, -1:].argmax(axis=-1), axis=1)
    if comm.rank == 0:
        print(f"3 6 goes on: {' '.join(map(str, text[0, 2:]))}")
    return 0


if __name__ == "__main__":
    run("example", command, [])
