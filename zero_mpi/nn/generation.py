"""Layers one position after the other: what generation keeps between calls, and how a layer uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from zero_mpi.nn.layer import Layer, Weights


@dataclass
class Cache:
    """What generation keeps between calls: how many positions are done, and keys and values per layer."""

    position: int = 0
    entries: dict[int, Any] = field(default_factory=dict)


class Continues(Protocol):
    """A layer whose result depends on other positions than its own, or on where they are."""

    def infer(self, p: Weights, x: Any, cache: Cache) -> Any:
        """y for the positions that follow those in `cache`."""


def infer(layer: Layer, p: Weights, x: Any, cache: Cache) -> Any:
    """y of any layer for the positions that follow those in `cache`; see `Continues`."""
    own: Callable[..., Any] | None = getattr(layer, "infer", None)  # isinstance of a protocol takes 30 us
    return layer.forward(p, x)[0] if own is None else own(p, x, cache)
