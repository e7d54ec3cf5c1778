"""The learning rate at each step."""

from __future__ import annotations

import math
from collections.abc import Callable

from zero_mpi.errors import UsageError

Schedule = Callable[[int], float]


def make_schedule(name: str, *, lr: float, min_lr: float, warmup: int, steps: int) -> Schedule:
    """step (from 0) -> learning rate: linear warm-up to `lr`, then by `name` down to `min_lr` at the end.

    Names: "cosine" (Loshchilov and Hutter, "SGDR", 2017), "linear", "constant". Raises UsageError.
    """
    shapes: dict[str, Callable[[float], float]] = {
        "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
        "linear": lambda done: 1.0 - done,
        "constant": lambda done: 1.0,
    }
    if name not in shapes:
        raise UsageError(f"schedule {name!r} is not known; expected one of {', '.join(shapes)}")

    def rate(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return min_lr + (lr - min_lr) * shapes[name](done)

    return rate
