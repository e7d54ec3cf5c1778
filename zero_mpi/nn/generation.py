"""Generation, one position after the other: the cache that it keeps between calls, and its use by layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from zero_mpi.device.arrays import namespace
from zero_mpi.nn.layer import Layer, Weights


@dataclass
class Cache:
    """State of generation between calls: the number of positions done, and keys and values per layer."""

    position: int = 0
    entries: dict[int, Any] = field(default_factory=dict)

    def extend(self, layer: Layer, k: Any, v: Any, stop: int) -> tuple[Any, Any]:
        """Return arrays for `stop` keys and values of a layer like k and v (B, T, ...), with those stored."""
        stored = self.entries.get(id(layer))
        if stored is None or stored[0].shape[1] < stop:
            grown = tuple(namespace(k).zeros((x.shape[0], 2 * stop, *x.shape[2:]), x.dtype) for x in (k, v))
            if stored is not None:
                for new, old in zip(grown, stored, strict=True):
                    new[:, : old.shape[1]] = old
            stored = self.entries[id(layer)] = grown
        return stored


def infer(layer: Layer, p: Weights, x: Any, cache: Cache) -> Any:
    """Return y of any layer for the positions that follow those in `cache`.

    A layer has `infer` if its result at a position depends on other positions or on the position's number.
    """
    own: Callable[..., Any] | None = getattr(layer, "infer", None)
    return layer.forward(p, x)[0] if own is None else own(p, x, cache)
