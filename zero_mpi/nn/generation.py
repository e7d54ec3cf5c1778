"""Layers one position after the other: what generation keeps between calls, and how a layer uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from zero_mpi.nn.layer import Layer, Weights


@dataclass
class Cache:
    """What generation keeps between calls: how many positions are done, and keys and values per layer."""

    position: int = 0
    entries: dict[int, Any] = field(default_factory=dict)


def infer(layer: Layer, p: Weights, x: Any, cache: Cache) -> Any:
    """Return y of any layer for the positions that follow those in `cache`.

    A layer has `infer` where its result depends on other positions than its own, or on where they are.
    """
    own: Callable[..., Any] | None = getattr(layer, "infer", None)
    return layer.forward(p, x)[0] if own is None else own(p, x, cache)
