"""Optimizers for scripts: the engine's class with checks and updates of any arrays, and `ShardedAdamW`."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.arguments import FLOATING, array, came, instance, number
from zero_mpi.compat.module import ShardedModule
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.optim import optimizer as engine
from zero_mpi.optim.muon import Muon
from zero_mpi.optim.optimizer import States, StepResult, bytes_of, check_pattern, check_scales, clip_factor
from zero_mpi.optim.rule import AdamW, MatrixRule, Part, Rule
from zero_mpi.sharding.parameters import NONE
from zero_mpi.sharding.precision import FLOAT32, FLOAT64

Key = str | int  # key of a user's array: its name, or its index in the list
Arrays = Mapping[str, Array] | Sequence[Array]
PART = re.compile(r"\[\d+:\d+\]$")  # end of the name of a part of stacked parameters


@dataclass
class ArrayState:
    """States, (shape, dtype) and step count of an array that the user passes to `step_on_params`."""

    states: States
    kind: tuple[tuple[int, ...], Any]
    steps: int = 0


class ShardedOptimizer(engine.ShardedOptimizer):
    """Optimizer of a ShardedModule. If several name patterns match a parameter, the last one is used.

    rules         a Rule (`AdamW`, `Muon`, your own), or name pattern -> Rule
    lr            learning rate, unless `step` gets another learning rate
    weight_decay  decoupled decay: each step multiplies matrices by 1 - lr * weight_decay
    lr_scale      name pattern -> factor of the learning rate ("*.lora_b": 16); 0: parameters do not change
    decay_scale   name pattern -> factor of the weight decay, also for parameters that are not matrices
    ema           decay of a moving average of trained parameters; `zero_mpi.save` writes it as a second model
    offload       "moments" keeps states in pinned host memory, "state" also the parameters of a module
                  with `offload_masters`; raises UsageError without a GPU

    `steps` counts updates; `skipped` counts steps without an update because the norm was not finite. The
    constructor is collective; it raises ValueError for invalid settings, UsageError if they differ by rank.
    """

    module: ShardedModule

    def check(self, module: Any, rules: Any, settings: Mapping[str, Any]) -> None:
        """Raise ValueError for invalid arguments, and UsageError for arguments that exclude each other."""
        label, offload, ema = type(self).__name__, settings["offload"], settings["ema"]
        trained = [name for name in module.params if module.is_trainable(name)]
        instance("rules", rules, Mapping, "a Rule such as AdamW(), or a mapping of name patterns to rules")
        for pattern, rule in rules.items():
            check_pattern("rules", pattern, trained or module.params)
            instance(f"rules: {pattern}", rule, Rule, "a Rule such as AdamW()")
        if ema is not None:
            number(f"{label}: ema", ema, above=0, below=1)
            if offload != NONE:
                raise UsageError(f"{label}: ema={ema} excludes offload={offload!r}: leave one of them out")
        for name in ("lr", "weight_decay"):
            number(f"{label}: {name}", settings[name], least=0)
        for name in ("lr_scale", "decay_scale"):
            check_scales(f"{label}: {name}", settings[name], trained)
        if offload != NONE and any(isinstance(rule, MatrixRule) for rule in rules.values()):
            raise ValueError("offload: Muon cannot offload its states; leave offload out")

    def check_units(self) -> None:
        """Raise ValueError unless matrix rules apply only to full matrices, in units without other rules."""
        for unit in self.units:
            is_matrix = {name: isinstance(self.rule_of(name), MatrixRule) for name in unit.unit.params}
            if unit.unit.full_matrices and len({*is_matrix.values()}) > 1:
                raise ValueError(f"rules: all parameters of the unit {unit.name} need the same kind of rule")
            for name, param in unit.unit.params.items():
                if is_matrix[name] and (not unit.unit.full_matrices or len(param.shape) < 2):
                    raise ValueError(
                        f"rules: {self.rule_of(name).type} needs full matrices; {name} is not one: create "
                        "the module with whole=[patterns of the matrices], and use another rule for the rest"
                    )
                rule = self.rule_of(name)
                if isinstance(rule, Muon):
                    rule.rows_of(name, param.shape)

    def step(self, lr: float | None = None, max_norm: float | None = None) -> StepResult:
        """Update the parameters by the module's gradients, then clear the gradients. Collective."""
        lr = None if lr is None else number("step: lr", lr, least=0)
        check_max_norm("step", max_norm)
        self.module.check_gradients("step")
        if not self.steps + self.skipped:
            self.begin()
        return super().step(lr, max_norm)

    @cached_property
    def _array_states(self) -> dict[Key, ArrayState]:
        return {}

    def step_on_params(self, params: Arrays, grads: Arrays, lr: float | None = None) -> None:
        """Update any arrays in place by their gradients; both are mappings by name, or both are lists.

        States and step counts are kept by name or index, separately from the module's. For shards of the
        module, `dict(module.named_parameters())`, call `drop_gathered` before and `broadcast_updated_params`
        after. Weight decay applies to matrices of the module and to other arrays of two or more dimensions.
        Not collective. Raises ValueError before any update if names, shapes or types do not match each other
        or the earlier calls.
        """
        lr = self.lr if lr is None else number("step_on_params: lr", lr, least=0)
        arrays, gradients = arrays_by_key("params", params), arrays_by_key("grads", grads)
        self._check_arrays(arrays, gradients)
        for key, p in arrays.items():
            name, zeros = PART.sub("", str(key)), device.in_use().zeros
            rule, param = self.rule_of(name), self.module.params.get(name)
            if key not in self._array_states:
                states = {state: zeros(p.size, p.dtype) for state in rule.states}
                self._array_states[key] = ArrayState(states, (p.shape, p.dtype))
            kept = self._array_states[key]
            kept.steps += 1
            decays = self.decay_factor(name, p.ndim >= 2 if param is None else param.decays)
            decay = np.array([self.weight_decay * decays])
            part = Part(p.reshape(-1), gradients[key].reshape(-1), kept.states, decay)
            if kept.steps == 1:
                rule.begin(part)
            rule.update(part, lr * self.rate_factor(name), 1.0, kept.steps)

    def _check_arrays(self, params: Mapping[Key, Array], grads: Mapping[Key, Array]) -> None:
        """Raise ValueError unless all arrays can be updated."""
        if any(isinstance(self.rule_of(PART.sub("", str(key))), MatrixRule) for key in params):
            raise ValueError(f"step_on_params: {self.type} needs full matrices of the module: use step")
        kinds, others = ({key: (x.shape, x.dtype) for key, x in each.items()} for each in (params, grads))
        if kinds != others:
            raise ValueError(f"step_on_params: parameters are {kinds}, but gradients {others}")
        if not {kind for _, kind in kinds.values()} <= {FLOAT32, FLOAT64}:
            raise ValueError(f"step_on_params: expected float32 or float64, got {kinds}")
        if not all(p.flags.c_contiguous and getattr(p.flags, "writeable", True) for p in params.values()):
            raise ValueError("step_on_params: parameters must be contiguous and writable")
        kept = {key: state.kind for key, state in self._array_states.items()}
        indices = [key for key in kept if isinstance(key, int)]
        mismatch = indices and 0 in params and len(indices) != len(params)
        if mismatch or kept | kinds != kinds | kept:
            raise ValueError("step_on_params: the arrays are not those of the first call")

    def memory_bytes(self) -> int:
        return super().memory_bytes() + sum(bytes_of(kept.states) for kept in self._array_states.values())


class ShardedAdamW(ShardedOptimizer):
    """AdamW for a ShardedModule: a `ShardedOptimizer` with the rule AdamW for all parameters.

    betas, eps    decay rates of the two moments, and the number added to the square root of the second moment
    """

    def __init__(
        self,
        module: ShardedModule,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        **more: Any,
    ) -> None:
        if not isinstance(betas, Sequence | np.ndarray) or isinstance(betas, str) or len(betas) != 2:
            raise ValueError(f"ShardedAdamW: betas: expected two numbers, got {came(betas)}")
        first, second = (number("ShardedAdamW: betas", beta, least=0, below=1) for beta in betas)
        rule = AdamW((first, second), number("ShardedAdamW: eps", eps, above=0))
        super().__init__(module, rule, lr=lr, **more)


def clip_grad_norm(module: ShardedModule, max_norm: float) -> float:
    """Scale the module's gradients to a norm of at most `max_norm`; return the old norm. Collective."""
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


def check_max_norm(what: str, max_norm: Any, *, required: bool = False) -> None:
    """Raise ValueError for an invalid `max_norm`; with infinity, the norm is only measured."""
    if (max_norm is not None or required) and max_norm != math.inf:
        number(f"{what}: max_norm", max_norm, above=0)


def arrays_by_key(what: str, arrays: Any) -> dict[Key, Array]:
    """Return arrays by name, or by index if given as a list; raise ValueError unless all are float arrays."""
    if isinstance(arrays, str) or not isinstance(arrays, Sequence | Mapping):
        expected = "a list of arrays, or a mapping of names to them"
        raise ValueError(f"step_on_params: {what}: expected {expected}, got {came(arrays)}")
    by_key: dict[Key, Array] = dict(arrays) if isinstance(arrays, Mapping) else dict(enumerate(arrays))
    for key, value in by_key.items():
        array(f"step_on_params: {what}[{key!r}]", value, kinds=FLOATING)
    return by_key
