"""An optimizer over the slices that a rank owns: rules by name pattern, and the states that they keep.

States lie where the optimizer works: 1/N of them per rank where moments are sharded. A step whose gradient
norm is not finite is skipped, on all ranks alike since all see the same norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.arguments import FLOATING, array, came, instance, number
from zero_mpi.comm import AllOf, Handle
from zero_mpi.comm.agree import Facts, agreed
from zero_mpi.device.types import Array
from zero_mpi.optim.adamw import AdamW
from zero_mpi.optim.average import MovingAverage, check_average
from zero_mpi.optim.clipping import check_max_norm, clip_factor
from zero_mpi.optim.offload import HostState, make_offload
from zero_mpi.optim.rates import ParameterRates, check_scales, matched
from zero_mpi.optim.rule import MatrixRule, Part, Rule
from zero_mpi.sharding.module import ShardedModule
from zero_mpi.sharding.sharded_unit import ShardedUnit
from zero_mpi.telemetry import spans


@dataclass(frozen=True)
class StepResult:
    """Result of a step: the gradient's norm before clipping, and whether the update was left out."""

    grad_norm: float
    skipped: bool


States = Mapping[str, Array]  # name -> flat float32, of one unit's part or one array, to read and to fill
Key = str | int  # key of a user's array: its name, or its place in a list
Arrays = Mapping[str, Array] | Sequence[Array]


def check_rules(rules: Any) -> tuple[dict[str, Rule], dict[str, object]]:
    """Return name pattern -> rule, and what ranks must share; raises ValueError for what is no rule."""
    found = {"*": rules} if isinstance(rules, Rule) else rules
    instance("rules", found, Mapping, "a Rule such as AdamW(), or a mapping of name patterns to rules")
    for pattern, rule in found.items():
        instance("rules", pattern, str, "name patterns")
        instance(f"rules: {pattern}", rule, Rule, "a Rule such as AdamW()")
    facts: dict[str, object] = {"rules": {pattern: rule.type for pattern, rule in found.items()}}
    for pattern, rule in found.items():
        facts |= {f"{pattern}: {rule.type}: {name}": value for name, value in vars(rule).items()}
    return dict(found), facts


class ShardedOptimizer:
    """An optimizer for a ShardedModule.

    rules         a Rule (`AdamW`, `Muon`, one of your own), or name pattern -> Rule; the last match wins
    lr            learning rate; `step` may be given another one each time
    weight_decay  a step takes away lr * weight_decay of what decays, apart from the gradient: of matrices,
                  unless `decay_scale` says otherwise
    lr_scale      name pattern -> factor of the learning rate of parameters that it matches ("*.lora_b":
                  16); the last match wins, 0 leaves them as they are
    decay_scale   the same for the weight decay
    ema           keep a moving average of what `step` trains too: ema * average + (1 - ema) * parameter after
                  each update, from the first parameters on; `zero_mpi.save` writes it as a model of its own

    `steps` counts the updates that were made, `skipped` those left out for a norm that was not finite.
    Making one is collective; raises ValueError for impossible settings, UsageError where ranks differ.
    `offload`: "moments" keeps states in pinned memory of the host, "state" also the parameters of a module
    with `offload_masters`; raises UsageError where there is no GPU.
    """

    def __init__(
        self,
        module: ShardedModule,
        rules: Rule | Mapping[str, Rule],
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        offload: str = "none",
        lr_scale: Mapping[str, float] | None = None,
        decay_scale: Mapping[str, float] | None = None,
        ema: float | None = None,
    ) -> None:
        what = type(self).__name__
        instance(f"{what}: module", module, ShardedModule, "a ShardedModule")

        def checked() -> tuple[tuple[Any, ...], Facts]:
            check_average(ema, offload)
            chosen, facts = check_rules(rules)
            rate, decay = (
                number(f"{what}: {name}", value, least=0)
                for name, value in (("lr", lr), ("weight_decay", weight_decay))
            )
            trained = [name for name in module.params if module.is_trainable(name)]
            scales, decays = (
                check_scales(f"{what}: {name}", given or {}, trained)
                for name, given in (("lr_scale", lr_scale), ("decay_scale", decay_scale))
            )
            facts |= {"lr": rate, "weight_decay": decay, "ema": ema, "offload": offload}
            facts |= {"lr_scale": [*scales.items()], "decay_scale": [*decays.items()]}
            return (chosen, rate, decay, make_offload(offload), scales, decays), facts

        found = agreed(module.comm, f"this {what}", checked)
        self.module, (self.rules, self.lr, self.weight_decay, self._offload, scales, decays) = module, found
        self._chosen: dict[str, Rule] = {}  # by name: patterns are matched once, and not in every step
        self.steps = self.skipped = 0
        self._check_matrices()
        self._rates = ParameterRates(self.units, scales, decays, self.rule_of)
        self.states = self._make_states()
        self.average = None if ema is None else MovingAverage(self.units, ema)
        self._plain: dict[Key, tuple[States, int]] = {}

    @property
    def type(self) -> str:
        """The names of the rules, as a file of the state has them."""
        return "+".join(dict.fromkeys(rule.type for rule in self.rules.values()))

    def rule_of(self, name: str) -> Rule:
        """Return the rule of a parameter; raises ValueError if there is none."""
        rule = self._chosen.get(name) or matched(self.rules, name, None)
        if rule is None:
            raise ValueError(f"rules: none matches {name}: add one for the pattern *")
        self._chosen[name] = rule
        return rule

    def _is_directed(self, unit: ShardedUnit) -> bool:
        """Return whether owners turn a unit's gradients into directions: its rules take whole matrices."""
        return isinstance(self.rule_of(next(iter(unit.unit.params))), MatrixRule)

    def _check_matrices(self) -> None:
        """Raise ValueError unless rules for whole matrices have such matrices, in units of their own."""
        for unit in self.units:
            if (
                unit.unit.whole
                and len({isinstance(self.rule_of(name), MatrixRule) for name in unit.unit.params}) > 1
            ):
                raise ValueError(f"rules: all parameters of the unit {unit.name} need the same kind of rule")
            for name, param in unit.unit.params.items():
                if isinstance(self.rule_of(name), MatrixRule) and (
                    not unit.unit.whole or len(param.shape) < 2
                ):
                    raise ValueError(
                        f"rules: {self.rule_of(name).type} needs full matrices, {name} is not one: create "
                        "the module with whole=[patterns of the matrices], and use another rule for other "
                        "parameters"
                    )

    @property
    def units(self) -> list[ShardedUnit]:
        """The units that are trained."""
        return [unit for unit in self.module.units if unit.unit.trainable]

    def averages(self) -> Mapping[str, Array]:
        """Return the moving averages by unit, where they are kept; before any update, the parameters."""
        assert self.average is not None, "made with ema=X"
        if not self.steps:
            self.average.begin(self.units)
        return self.average.values

    def step(self, lr: float | None = None, max_norm: float | None = None) -> StepResult:
        """Update the parameters by the module's gradients and forget these. Collective.

        Returns the norm before clipping, and whether the update was left out because that was not finite.
        `lr`: for this step, otherwise the one given at the start; `max_norm`: clip the global norm to it.
        """
        lr = self.lr if lr is None else number("step: lr", lr, least=0)
        check_max_norm("step", max_norm)
        self.module.check_gradients("step")
        pending = self.module.overlapped_sync_gradients()
        with spans.during(spans.OPTIMIZER, "norm"):
            norm = self.module.gradient_norm()
        pending.wait()
        finite = math.isfinite(norm)
        if finite:
            if self.average is not None:
                self.averages()
            self.steps += 1
            self.module.drop_gathered()
            self.module.update_buffers()
            scale = 1.0 if max_norm is None else clip_factor(norm, max_norm)
            scale /= self.module.loss_scale.factor
            with spans.during(spans.OPTIMIZER, "update"):
                self._direct(lr, scale).wait()
                for unit in self.units:
                    self._update_unit(unit, lr, scale)
                    if self.average is not None:
                        self.average.follow(unit)
                if self._offload is not None and self._offload.masters:
                    self._offload.finish()
            self.module.start_updates()
        else:
            self.skipped += 1
        self.module.loss_scale.update(finite)
        self.module.zero_gradients()
        return StepResult(norm, not finite)

    def names_of_states(self, unit: ShardedUnit) -> tuple[str, ...]:
        """Return the names of a unit's states: of all its parameters, those that each one's rule keeps."""
        rules = (self.rule_of(name) for name in unit.unit.params)
        return tuple(dict.fromkeys(name for rule in rules for name in rule.states))

    def kept_states(self) -> Iterator[tuple[str, ShardedUnit, frozenset[str]]]:
        """Yield (state, unit, names of its parameters that have the state), one state after the other."""
        rules = (self.rule_of(name) for unit in self.units for name in unit.unit.params)
        for state in dict.fromkeys(state for rule in rules for state in rule.states):
            for unit in self.units:
                names = frozenset(name for name in unit.unit.params if state in self.rule_of(name).states)
                if names:
                    yield state, unit, names

    def state_part(self, unit: ShardedUnit) -> slice:
        """Return the part of a unit whose states this rank keeps; of full matrices only those that it
        owns.
        """
        return unit.part if self._is_directed(unit) else unit.parameters.updated_part

    def _make_states(self) -> dict[str, States]:
        """Return zeros for each unit, where they are kept."""
        sizes = {
            unit.name: (part.stop - part.start, unit.unit.quantum, self.names_of_states(unit))
            for unit in self.units
            for part in [self.state_part(unit)]
        }
        if self._offload is None:
            zeros = device.in_use().zeros
            return {unit: {name: zeros(size) for name in names} for unit, (size, _, names) in sizes.items()}
        if any(isinstance(rule, MatrixRule) for rule in self.rules.values()):
            raise ValueError(f"offload: {self.type} keeps its states with full matrices; leave it out")
        return dict(zip(sizes, self._offload.states(sizes.values()), strict=True))

    def _direct(self, lr: float, scale: float) -> Handle:
        """Let owners of whole matrices turn gradients into directions, and send them to updating ranks."""
        handles = []
        for unit in filter(self._is_directed, self.units):
            gradient, states = unit.gradient.sum, self.states[unit.name]
            for segment in unit.unit.segments(unit.part):
                first, rule = segment.where.start, self.rule_of(segment.name)
                inside = slice(first, first + unit.unit.chunks(segment.name) * unit.unit.quantum)
                assert isinstance(rule, MatrixRule), "as _check_matrices has seen"
                own = {name: states[name][inside] for name in rule.states}
                rate = lr * self._rates.factor(segment.name)
                shape = unit.unit.params[segment.name].shape
                rule.direct(segment.name, shape, gradient[inside], own, rate, scale)
            handles.append(unit.gradient.start_publish())
        return AllOf(handles)

    def _update_unit(self, unit: ShardedUnit, lr: float, scale: float) -> None:
        parameters, gradients, _ = unit.updated
        rates, quantum, low = self._rates[unit.name], unit.unit.quantum, unit.parameters.rounds_to
        decay = self.weight_decay * rates.decays
        for part, p, states in self._pieces(unit, parameters):
            for here, factor, rule in rates.within(part):
                own = slice(here.start - part.start, here.stop - part.start)
                runs = slice(here.start // quantum, -(-here.stop // quantum))
                rounded = None if low is None else low[here]
                kept = (
                    {} if isinstance(rule, MatrixRule) else {name: states[name][own] for name in rule.states}
                )
                taken = Part(p[own], gradients[here], kept, decay[runs], rounded)
                rule.update(taken, lr * factor, scale, self.steps)

    def _pieces(self, unit: ShardedUnit, parameters: Array) -> Iterator[tuple[slice, Array, States]]:
        """Yield a unit's parameters and states where they are updated: all, or offloaded ones by pieces."""
        kept = self.states[unit.name]
        if not isinstance(kept, HostState):
            yield slice(0, parameters.size), parameters, kept
            return
        assert self._offload is not None
        more = [parameters] if self._offload.masters else []
        for part, arrays in self._offload.through(kept, *more):
            rest = arrays[len(kept) :]
            states = dict(zip(kept, arrays, strict=False))
            yield part, rest[0] if rest else parameters[part], states

    def step_on_params(self, params: Arrays, grads: Arrays, lr: float | None = None) -> None:
        """Update arrays of any kind in place by gradients given for them, both by name or both as lists.

        The name, or the place in the list, is the identity: under it moments and a count of steps are kept,
        beside the module's, from the first call on; names may come later or be left out of a call. Under the
        names of the module's parameters that is its local shard: `dict(module.named_parameters())` and
        gradients of the same elements. A caller that updates those calls `drop_gathered` before and
        `broadcast_updated_params` after it. What decays: the module's matrices by their names, also where
        the shard is flat, and other arrays of two or more dimensions. Not collective.

        Raises ValueError, and updates nothing, if names, lists, shapes or types do not fit each other or
        earlier calls.
        """
        lr = self.lr if lr is None else number("step_on_params: lr", lr, least=0)
        arrays, given = keyed("params", params), keyed("grads", grads)
        self._check_plain(arrays, given)
        for key, p in arrays.items():
            rule, zeros = self.rule_of(str(key)), device.in_use().zeros
            states, steps = self._plain.get(key) or ({name: zeros(p.size) for name in rule.states}, 0)
            self._plain[key] = states, steps + 1
            known = self.module.params.get(str(key))
            decays = p.ndim >= 2 if known is None else known.decays
            decay, rate = np.array([self.weight_decay * decays]), lr * self._rates.factor(str(key))
            rule.update(Part(p.reshape(-1), given[key].reshape(-1), states, decay), rate, 1.0, steps + 1)

    def _check_plain(self, params: Mapping[Key, Array], grads: Mapping[Key, Array]) -> None:
        """Raise ValueError unless all of them can be updated."""
        if any(isinstance(self.rule_of(str(key)), MatrixRule) for key in params):
            raise ValueError(f"step_on_params: {self.type} needs full matrices of the module: use step")
        shapes = {key: p.shape for key, p in params.items()}
        if shapes != {key: g.shape for key, g in grads.items()}:
            raise ValueError(f"step_on_params: parameters have shapes {shapes}, gradients differ")
        if not all(p.flags.c_contiguous for p in params.values()):
            raise ValueError("step_on_params: parameters must be contiguous to be updated in place")
        listed = [key for key in self._plain if isinstance(key, int)]
        longer = listed and 0 in params and len(listed) != len(params)
        for key, (states, _) in self._plain.items():
            sizes = {state.size for state in states.values()}
            if longer or (key in params and not sizes <= {params[key].size}):
                raise ValueError("step_on_params: the arrays are not those of the first call")

    def memory_bytes(self) -> int:
        """Return the bytes of states and averages on this rank, wherever they are."""
        plain = [states for states, _ in self._plain.values()]
        average = 0 if self.average is None else self.average.nbytes
        return average + sum(map(bytes_of, [*self.states.values(), *plain]))


class ShardedAdamW(ShardedOptimizer):
    """AdamW for a ShardedModule: `ShardedOptimizer` with that rule alone.

    betas, eps    decay of the two moments, and what is added to the root of the second
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


def bytes_of(states: States) -> int:
    """Return the bytes of the states of a unit or an array."""
    return int(sum(state.nbytes for state in states.values()))


def keyed(what: str, arrays: Any) -> dict[Key, Array]:
    """Return arrays by name, or by place in a list; raise ValueError for anything but float arrays."""
    if isinstance(arrays, str) or not isinstance(arrays, Sequence | Mapping):
        raise ValueError(
            f"step_on_params: {what}: expected a list of arrays, or a mapping of names to them, got "
            f"{came(arrays)}"
        )
    found: dict[Key, Array] = dict(arrays) if isinstance(arrays, Mapping) else dict(enumerate(arrays))
    for key, value in found.items():
        array(f"step_on_params: {what}[{key!r}]", value, kinds=FLOATING)
    return found
