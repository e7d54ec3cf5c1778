"""Optimizers that `--optimizer` names: their update rules, and the matrices that they need unsharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from zero_mpi.models import ModelConfig
from zero_mpi.nn import Layer, Linear
from zero_mpi.nn.layer import Composite
from zero_mpi.optim.adamw import AdamW
from zero_mpi.optim.muon import Muon
from zero_mpi.optim.rule import Rule
from zero_mpi.sharding.unit import Unit

ADAMW, MUON = OPTIMIZERS = ("adamw", "muon")


def whole_matrices(optimizer: str, model: ModelConfig) -> tuple[str, ...]:
    """Return the names of the matrices that an optimizer updates in full: for Muon those of blocks."""
    if optimizer != MUON:
        return ()
    params = model.params().items()
    return tuple(name for name, param in params if name.startswith("blk.") and len(param.shape) > 1)


def rules_of(
    optimizer: str, model: ModelConfig, betas: tuple[float, float], eps: float, products: Any = np.float32
) -> dict[str, Rule]:
    """Return name pattern -> rule; `products`: the dtype that Muon multiplies in."""
    rules: dict[str, Rule] = {"*": AdamW(betas, eps)}
    whole = whole_matrices(optimizer, model)
    if whole:
        muon = Muon(parts=dict(fused(model.layers())), kind=products)
        rules |= dict.fromkeys(whole, muon)
    return rules


def state_count(unit: Unit) -> int:
    """Return the number of float32 arrays that are kept for a unit's elements."""
    return len((Muon if unit.whole else AdamW).states)


def fused(layers: Sequence[Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, rows of each matrix) for the parameters that hold several matrices."""
    for stage in layers:
        yield from fused_in(stage.layer)


def fused_in(layer: Layer) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield `fused` of one layer."""
    if isinstance(layer, Linear):
        if layer.fused:
            yield layer.weight, layer.fused
    elif isinstance(layer, Composite):
        for part in layer.parts():
            yield from fused_in(part)
