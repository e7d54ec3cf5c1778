"""Learning rate at each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from zero_mpi.config.settings import Config
from zero_mpi.errors import UsageError
from zero_mpi.ops.elementary import cosine

Schedule = Callable[[int], float]


def schedule_of(config: Config) -> Schedule:
    """Return the schedule of the flags; their number of steps must be known."""
    return make_schedule(
        config.schedule,
        lr=config.lr,
        min_lr=config.lr / 10 if config.min_lr is None else config.min_lr,
        warmup=config.warmup,
        steps=config.steps,
        decay_steps=config.steps // 10 if config.decay_steps is None else config.decay_steps,
    )


def described(config: Config, epochs: Iterable[float]) -> str:
    """Return how often the steps go through all sources, and at which learning rates, for messages."""
    times = min(epochs)
    read = f"{times:.1f} epochs" if times >= 1 else f"{times:.3%} of the data"
    last = schedule_of(config)(config.steps)
    warmup = f"{config.warmup} warmup step{'s' * (config.warmup != 1)}"
    return f"{read}; rate {config.lr:g} after {warmup}, then {config.schedule} to {last:g}"


def make_schedule(
    name: str, *, lr: float, min_lr: float, warmup: int, steps: int, decay_steps: int = 0
) -> Schedule:
    """Return a map step (from 0) -> learning rate: linear warm-up to `lr`, then `name` down to `min_lr`.

    Names: "cosine" (Loshchilov and Hutter, "SGDR", 2017), "linear", "constant", and "wsd" (warm-up, stable,
    decay: Hu et al., "MiniCPM", 2024), which stays at `lr` until the last `decay_steps` and falls linearly
    in these. Raises UsageError for another name.
    """
    shapes: dict[str, Callable[[float], float]] = {
        "cosine": lambda done: 0.5 * (1.0 + cosine(math.pi * done)),
        "linear": lambda done: 1.0 - done,
        "constant": lambda done: 1.0,
        "wsd": lambda done: 1.0 - done,
    }
    if name not in shapes:
        raise UsageError(f"schedule {name!r} is not known; expected one of {', '.join(shapes)}")
    begin = max(warmup, steps - decay_steps) if name == "wsd" else warmup

    def rate(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / warmup
        if step < begin:
            return lr
        done = min(1.0, (step - begin) / max(1, steps - begin))
        return min_lr + (lr - min_lr) * shapes[name](done)

    return rate
