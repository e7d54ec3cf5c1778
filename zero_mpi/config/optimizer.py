"""Optimizers that `--optimizer` names: their update rules, and the matrices that they need unsharded."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

from zero_mpi.checkpoint.mixes import is_matrix, known_type, types_of
from zero_mpi.config.settings import Config
from zero_mpi.errors import UsageError
from zero_mpi.models import ModelConfig
from zero_mpi.models.lora import projections
from zero_mpi.nn.experts import BALANCE, Z
from zero_mpi.ops.elementary import cosine
from zero_mpi.optim.muon import Muon
from zero_mpi.optim.rule import AdamW, Rounded, Rule
from zero_mpi.sharding.unit import Unit

BALANCE_LOSS = 0.001  # default of router_aux_loss_coef in the package transformers
ADAMW, MUON = "adamw", "muon"


def whole_matrices(optimizer: str, model: ModelConfig) -> tuple[str, ...]:
    """Return the names of the matrices that an optimizer needs unsharded: for Muon, those in blocks."""
    if optimizer != MUON:
        return ()
    params = model.params().items()
    return tuple(name for name, param in params if name.startswith("blk.") and len(param.shape) > 1)


def rules_of(config: Config, model: ModelConfig, products: Any = np.float32) -> dict[str, Rule]:
    """Return name pattern -> rule of the optimizer. `products`: dtype in which Muon multiplies."""
    rules: dict[str, Rule] = {"*": AdamW((config.beta1, config.beta2), config.eps)}
    matrices = whole_matrices(config.optimizer, model)
    if matrices:
        fused = {name: linear.fused for name, linear in projections(model.layers()).items() if linear.fused}
        rules |= dict.fromkeys(matrices, Muon(parts=fused, kind=products))
    kinds = {} if config.qat is None or config.lora else rounding_of(model, config.qat)
    return rules | {name: Rounded(rules["*"], kind.name) for name, kind in kinds.items()}


def auxiliary_scales(model: ModelConfig, config: Config) -> dict[str, float]:
    """Return the scales of the routers' losses. Raise UsageError for a flag if the model has no experts."""
    has_experts = any(BALANCE in stage.layer.tallies() for stage in model.stages())
    balance_loss = config.balance_loss
    for flag, value in (("--balance-loss", balance_loss), ("--z-loss", config.z_loss)):
        if value is not None and not has_experts:
            raise UsageError(f"{flag} {value:g}: the model has no experts; leave the flag out")
    default = BALANCE_LOSS if config.lora is None else 0.0
    scales = {BALANCE: default if balance_loss is None else balance_loss, Z: config.z_loss or 0.0}
    return scales if has_experts else {}


def rounding_of(model: ModelConfig, qat: str) -> dict[str, Kind]:
    """Return the type that `export` gives to each matrix; embedding and output head have at least 8 bits."""
    shapes = {name: param.shape for name, param in model.params().items()}
    keys = {"general.architecture": model.arch} | model.metadata()
    kinds = types_of(keys, shapes, known_type(qat), fine_ends=True)
    return {name: kind for name, kind in kinds.items() if kind != Kind.F32}


def state_count(unit: Unit, qat: str | None) -> int:
    """Return how many float32 values the optimizer keeps for each element; --qat adds a copy."""
    masters = qat is not None and any(is_matrix(name, param.shape) for name, param in unit.params.items())
    return len((Muon if unit.full_matrices else AdamW).states) + masters


Schedule = Callable[[int], float]


def schedule_of(config: Config) -> Schedule:
    """Return a function step (from 0) -> learning rate: linear warmup to `lr`, then decay towards `min_lr`.

    Schedules: "cosine" (Loshchilov and Hutter, "SGDR", 2017), "linear", "constant", and "wsd" (warmup,
    stable, decay: Hu et al., "MiniCPM", 2024). wsd stays at `lr` and decreases linearly in the last
    `decay_steps` steps. `config.steps` must be set.
    """
    shapes: dict[str, Callable[[float], float]] = {
        "cosine": lambda fraction: 0.5 * (1.0 + cosine(math.pi * fraction)),
        "linear": lambda fraction: 1.0 - fraction,
        "constant": lambda fraction: 1.0,
        "wsd": lambda fraction: 1.0 - fraction,
    }
    shape, lr, warmup, steps = shapes[config.schedule], config.lr, config.warmup, config.steps
    min_lr = lr / 10 if config.min_lr is None else config.min_lr
    decay_steps = steps // 10 if config.decay_steps is None else config.decay_steps
    begin = max(warmup, steps - decay_steps) if config.schedule == "wsd" else warmup

    def rate(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / warmup
        if step < begin:
            return lr
        fraction = min(1.0, (step - begin) / max(1, steps - begin))
        return min_lr + (lr - min_lr) * shape(fraction)

    return rate
