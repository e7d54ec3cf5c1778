"""Optimizers that `--optimizer` names: their update rules, and the matrices that they need unsharded."""

from __future__ import annotations

from typing import Any

import numpy as np

from zero_mpi.errors import UsageError
from zero_mpi.models import ModelConfig
from zero_mpi.models.lora import projections
from zero_mpi.nn.balance import BALANCE, Z
from zero_mpi.optim.adamw import AdamW
from zero_mpi.optim.muon import Muon
from zero_mpi.optim.rule import Rule
from zero_mpi.sharding.unit import Unit

BALANCE_LOSS = 0.001  # router_aux_loss_coef of transformers
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
        fused = {name: linear.fused for name, linear in projections(model.layers()).items() if linear.fused}
        rules |= dict.fromkeys(whole, Muon(parts=fused, kind=products))
    return rules


def auxiliary_scales(
    model: ModelConfig, balance_loss: float | None, z_loss: float | None, adapts: bool
) -> dict[str, float]:
    """Return the scales of the losses of routers; raise UsageError for those of a model without experts."""
    routed = any(BALANCE in stage.layer.tallies() for stage in model.stages())
    for flag, value in (("--balance-loss", balance_loss), ("--z-loss", z_loss)):
        if value is not None and not routed:
            raise UsageError(f"{flag} {value:g}: the model has no experts; leave the flag out")
    default = 0.0 if adapts else BALANCE_LOSS
    found = {BALANCE: default if balance_loss is None else balance_loss, Z: z_loss or 0.0}
    return found if routed else {}


def state_count(unit: Unit) -> int:
    """Return the number of float32 arrays that are kept for a unit's elements."""
    return len((Muon if unit.whole else AdamW).states)
