"""Optimizer of a rank's shards, with update rules by name pattern and their states.

A rank has the states of the elements that it updates: 1/N of all elements if moments are sharded. All ranks
have the same gradient norm, and all skip a step if the norm is not finite.

This class does not check its arguments; `zero_mpi.compat.ShardedOptimizer`, which scripts use, does.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from zero_mpi import device, ops
from zero_mpi.arguments import instance, number
from zero_mpi.comm import AllOf, Handle
from zero_mpi.comm.agree import Facts, agreed
from zero_mpi.device.types import Array
from zero_mpi.optim.offload import HostState, Offload, make_offload
from zero_mpi.optim.rule import AdamW, MatrixRule, Part, Rule
from zero_mpi.sharding.module import ShardedModule, ShardedUnit
from zero_mpi.telemetry import spans

T = TypeVar("T")
Segment = tuple[slice, float, Rule]  # adjacent elements, factor of their learning rate, their rule
States = Mapping[str, Array]  # name -> writable flat float32 array, for a unit's part or a user's array


@dataclass(frozen=True)
class StepResult:
    """Result of a step: the gradient's norm before clipping, and whether the update was skipped."""

    grad_norm: float
    skipped: bool


def clip_factor(norm: float, max_norm: float) -> float:
    return min(1.0, max_norm / (norm + 1e-6))


class ShardedOptimizer:
    """Optimizer of a ShardedModule; `zero_mpi.compat.optimizer.ShardedOptimizer` describes its arguments.

    `steps` counts updates; `skipped` counts steps without an update because the norm was not finite. The
    constructor is collective; it raises UsageError if arguments differ by rank, or if `offload` needs a GPU.
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
        label = type(self).__name__
        instance(f"{label}: module", module, ShardedModule, "a ShardedModule")
        rules = {"*": rules} if isinstance(rules, Rule) else rules
        scales = {"lr_scale": lr_scale or {}, "decay_scale": decay_scale or {}}
        settings = {"lr": lr, "weight_decay": weight_decay, "ema": ema, "offload": offload, **scales}

        def prepare() -> tuple[Offload | None, Facts]:
            self.check(module, rules, settings)
            facts: dict[str, object] = {"rules": {pattern: rule.type for pattern, rule in rules.items()}}
            for pattern, rule in rules.items():
                facts |= {f"{pattern}: {rule.type}: {name}": value for name, value in vars(rule).items()}
            facts |= settings | {name: [*values.items()] for name, values in scales.items()}
            return make_offload(offload), facts

        self._offload = agreed(module.comm, f"this {label}", prepare)
        self.module, self.rules = module, dict(rules)
        self.lr, self.weight_decay, self._scales = float(lr), float(weight_decay), scales
        self._rules_by_name: dict[str, Rule] = {}  # so that patterns are not matched in every step
        self.steps = self.skipped = 0
        self.units = [unit for unit in module.units if unit.unit.trainable]
        self.check_units()
        self._rates = {unit.name: self._rates_of(unit) for unit in self.units}
        self.states = self._make_states()
        self.ema, zeros = ema, device.in_use().zeros
        self.average: dict[str, Array] = {}  # moving averages by unit, zeros until `averages` is called
        for unit in self.units if ema is not None else ():
            self.average[unit.name] = zeros(unit.updated[0].size, unit.updated[0].dtype)

    def check(self, module: ShardedModule, rules: Mapping[str, Rule], settings: Mapping[str, Any]) -> None:
        """Raise an error for invalid arguments. Subclasses override it; this class does not check."""

    def check_units(self) -> None: ...

    @property
    def type(self) -> str:
        """Names of the rules, as written to optimizer files."""
        return "+".join(dict.fromkeys(rule.type for rule in self.rules.values()))

    def rule_of(self, name: str) -> Rule:
        """Return the rule of a parameter; raise ValueError if none matches."""
        rule = self._rules_by_name.get(name) or value_of(self.rules, name, None)
        if rule is None:
            raise ValueError(f"rules: no pattern matches {name}: add a rule for the pattern *")
        self._rules_by_name[name] = rule
        return rule

    def rate_factor(self, name: str) -> float:
        return value_of(self._scales["lr_scale"], name, 1.0)

    def decay_factor(self, name: str, decays: bool) -> float:
        return value_of(self._scales["decay_scale"], name, float(decays))

    def _is_directed(self, unit: ShardedUnit) -> bool:
        """Return whether a unit's rules need full matrices (`MatrixRule.direct` runs on their owners)."""
        return isinstance(self.rule_of(next(iter(unit.unit.params))), MatrixRule)

    def _rates_of(self, unit: ShardedUnit) -> tuple[Array, list[Segment]]:
        """Return each updated chunk's decay factor, (chunks,) float64, and segments of equal rate and rule.

        Rates rarely differ, so a unit has few segments. An element's update does not depend on the segments.
        """
        part, full = unit.updated[2], unit.unit
        chunks = slice(part.start // full.quantum, -(-part.stop // full.quantum))
        decays, updates = list[float](), list[tuple[float, Rule]]()
        for name, param in full.params.items():
            count = full.chunks(name)
            decays += [self.decay_factor(name, param.decays)] * count
            updates += [(self.rate_factor(name), self.rule_of(name))] * count
        segments, start = list[Segment](), 0
        for (factor, rule), group in groupby(updates[chunks]):
            stop = start + full.quantum * sum(1 for _ in group)
            segments.append((slice(start, stop), factor, rule))
            start = stop
        return device.in_use().from_host(np.array(decays[chunks], np.float64)), segments

    def averages(self) -> Mapping[str, Array]:
        """Return the moving averages by unit (not copies); before any update they equal the parameters."""
        for unit in () if self.steps or self.ema is None else self.units:
            device.in_use().copy(self.average[unit.name], unit.updated[0])
        return self.average

    def begin(self) -> None:
        """Let rules prepare a new run, once the parameters have values. Collective."""
        if all(type(rule).begin is Rule.begin for rule in self.rules.values()):
            return
        self.module.drop_gathered()
        for unit in self.units:
            for part, _, rule in self._parts(unit, 1.0):
                rule.begin(part)
        self.module.publish()

    def step(self, lr: float | None = None, max_norm: float | None = None) -> StepResult:
        """Update the parameters by the module's gradients, then clear the gradients. Collective.

        Returns the norm before clipping, and whether the update was skipped because the norm was not finite.
        `lr`: learning rate of this step (default: the constructor's); `max_norm`: limit of the global norm.
        """
        lr = self.lr if lr is None else lr
        pending = self.module.overlapped_sync_gradients()
        with spans.during(spans.OPTIMIZER, "norm"):
            norm = self.module.gradient_norm()
        pending.wait()
        finite = math.isfinite(norm)
        if finite:
            device.in_use().before_update()
            self.averages()
            self.steps += 1
            self.module.drop_gathered()
            self.module.update_buffers()
            scale = 1.0 if max_norm is None else clip_factor(norm, max_norm)
            scale /= self.module.loss_scale.factor
            with spans.during(spans.OPTIMIZER, "update"):
                self._direct(lr, scale).wait()
                for unit in self.units:
                    for part, rate, rule in self._parts(unit, lr):
                        rule.update(part, rate, scale, self.steps)
                        if part.low is not None and type(rule).update is not AdamW.update:
                            device.in_use().copy(part.low, part.parameters)
                    if self.ema is not None:
                        ops.moving_average(self.average[unit.name], unit.updated[0], self.ema)
                if self._offload is not None and self._offload.masters:
                    self._offload.finish()
            self.module.start_updates()
        else:
            self.skipped += 1
        self.module.loss_scale.update(finite)
        self.module.zero_gradients()
        return StepResult(norm, not finite)

    def kept_states(self) -> Iterator[tuple[str, ShardedUnit, frozenset[str]]]:
        """Yield (state, unit, names of its parameters that have the state), one state after the other."""
        rules = (self.rule_of(name) for unit in self.units for name in unit.unit.params)
        for state in dict.fromkeys(state for rule in rules for state in rule.states):
            for unit in self.units:
                names = frozenset(name for name in unit.unit.params if state in self.rule_of(name).states)
                if names:
                    yield state, unit, names

    def state_part(self, unit: ShardedUnit) -> slice:
        """Return the part of a unit whose states this rank keeps; for matrix rules only its own shard."""
        return unit.part if self._is_directed(unit) else unit.parameters.master_part

    def _make_states(self) -> dict[str, States]:
        sizes = {}
        for unit in self.units:
            part, rules = self.state_part(unit), [self.rule_of(name) for name in unit.unit.params]
            names = tuple(dict.fromkeys(name for rule in rules for name in rule.states))
            sizes[unit.name] = part.stop - part.start, unit.unit.quantum, names
        if self._offload is not None:
            return dict(zip(sizes, self._offload.states(sizes.values()), strict=True))
        zeros, kind = device.in_use().zeros, self.module.precision.master
        return {key: {name: zeros(size, kind) for name in names} for key, (size, _, names) in sizes.items()}

    def _direct(self, lr: float, scale: float) -> Handle:
        """Turn gradients into directions on the owners of full matrices; send them to the updating ranks."""
        handles = []
        for unit in filter(self._is_directed, self.units):
            gradient, states = unit.gradient.sum, self.states[unit.name]
            for segment in unit.unit.segments(unit.part):
                first, rule = segment.where.start, self.rule_of(segment.name)
                span = slice(first, first + unit.unit.chunks(segment.name) * unit.unit.quantum)
                assert isinstance(rule, MatrixRule), "units of full matrices have only matrix rules"
                matrix_states = {name: states[name][span] for name in rule.states}
                rate = lr * self.rate_factor(segment.name)
                shape = unit.unit.params[segment.name].shape
                rule.direct(segment.name, shape, gradient[span], matrix_states, rate, scale)
            handles.append(unit.gradient.start_publish())
        return AllOf(handles)

    def _parts(self, unit: ShardedUnit, lr: float) -> Iterator[tuple[Part, float, Rule]]:
        """Yield (part, rate, rule) for each part of a unit with a single rule and rate."""
        parameters, gradients, _ = unit.updated
        (decays, segments), quantum, low = self._rates[unit.name], unit.unit.quantum, unit.parameters.low
        decay = self.weight_decay * decays
        for part, p, states in self._chunks(unit, parameters):
            for segment, factor, rule in segments:
                start, stop = max(segment.start, part.start), min(segment.stop, part.stop)
                if start >= stop:
                    continue
                span, local = slice(start, stop), slice(start - part.start, stop - part.start)
                runs = slice(start // quantum, -(-stop // quantum))
                rounded = None if low is None else low[span]
                names = () if isinstance(rule, MatrixRule) else rule.states
                views = {name: states[name][local] for name in names}
                yield Part(p[local], gradients[span], views, decay[runs], rounded), lr * factor, rule

    def _chunks(self, unit: ShardedUnit, parameters: Array) -> Iterator[tuple[slice, Array, States]]:
        """Yield a unit's parameters and states on the device: all at once, or by chunks if offloaded."""
        unit_states = self.states[unit.name]
        if not isinstance(unit_states, HostState):
            yield slice(0, parameters.size), parameters, unit_states
            return
        assert self._offload is not None
        masters = [parameters] if self._offload.masters else []
        for part, arrays in self._offload.through(unit_states, *masters):
            rest = arrays[len(unit_states) :]
            states = dict(zip(unit_states, arrays, strict=False))
            yield part, rest[0] if rest else parameters[part], states

    def memory_bytes(self) -> int:
        """Return the bytes of states and averages of this rank, in device and host memory."""
        return sum(map(bytes_of, [*self.states.values(), self.average]))


def bytes_of(states: States) -> int:
    return int(sum(state.nbytes for state in states.values()))


def value_of(values: Mapping[str, T], name: str, otherwise: T) -> T:
    """Return the value of the last pattern that matches a name, or `otherwise`."""
    matches = [value for pattern, value in values.items() if fnmatchcase(name, pattern)]
    return matches[-1] if matches else otherwise


def check_pattern(what: str, pattern: Any, trained: Collection[str]) -> None:
    """Raise ValueError unless a name pattern matches a trained parameter."""
    instance(what, pattern, str, "name patterns")
    if not any(fnmatchcase(name, pattern) for name in trained):
        few = ", ".join(list(trained)[:3])
        raise ValueError(f"{what}: {pattern!r} matches no trained parameter; names are like {few}")


def check_scales(what: str, scales: Any, trained: Collection[str]) -> dict[str, float]:
    """Return factors by pattern; raise ValueError for invalid factors and patterns without a match."""
    instance(what, scales, Mapping, "a mapping of name patterns to numbers")
    for pattern in scales:
        check_pattern(what, pattern, trained)
    return {pattern: number(f"{what}: {pattern}", x, least=0) for pattern, x in scales.items()}
