"""Clipping of gradients to a largest global norm."""

from __future__ import annotations

import math
from typing import Any

from zero_mpi.arguments import instance, number
from zero_mpi.sharding.module import ShardedModule


def check_max_norm(what: str, max_norm: Any, *, required: bool = False) -> None:
    """Raise ValueError for an impossible largest norm; infinity is a way to ask for the norm alone."""
    if (max_norm is not None or required) and max_norm != math.inf:
        number(f"{what}: max_norm", max_norm, above=0)


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that makes the norm of gradients at most `max_norm`."""
    return min(1.0, max_norm / (norm + 1e-6))


def clip_grad_norm(module: ShardedModule, max_norm: float) -> float:
    """Scale the module's gradients in place so that their global norm is at most `max_norm`. Collective.

    Returns the norm before. `ShardedAdamW.step(max_norm=...)` does the same without a pass of its own.
    """
    instance("clip_grad_norm: module", module, ShardedModule, "a ShardedModule")
    check_max_norm("clip_grad_norm", max_norm, required=True)
    module.check_gradients("clip_grad_norm")
    module.sync_gradients()
    norm = module.gradient_norm()
    factor = clip_factor(norm, max_norm)
    if math.isfinite(norm) and factor < 1.0:
        for unit in module.units:
            if unit.unit.trainable:
                unit.gradient.scale(factor)
    return norm
