"""AdamW over the slices that a rank owns.

The moments live where the optimizer works: 1/N of them per rank where moments are sharded. A step whose
gradient norm is not finite is skipped, on all ranks alike since all see the same norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zero_mpi import device, ops
from zero_mpi.arguments import FLOATING, array, came, instance, number
from zero_mpi.comm.agree import Facts, agreed
from zero_mpi.device.types import Array
from zero_mpi.sharding.average import MovingAverage, check_average
from zero_mpi.sharding.clipping import check_max_norm, clip_factor
from zero_mpi.sharding.module import ShardedModule
from zero_mpi.sharding.offload import HostMoments, Offload, make_offload
from zero_mpi.sharding.rates import ParameterRates, check_scales
from zero_mpi.sharding.sharded_unit import ShardedUnit
from zero_mpi.telemetry import spans


@dataclass(frozen=True)
class StepResult:
    """What a step did: the gradient's norm before clipping, and whether the update was left out."""

    grad_norm: float
    skipped: bool


@dataclass
class FlatMoments:
    """First and second moments for one unit's part (or one array), flat, where they are updated."""

    first: Array
    second: Array

    @classmethod
    def like(cls, array: Array) -> FlatMoments:
        """Zeros for a flat array."""
        zeros = device.in_use().zeros
        return cls(zeros(array.size), zeros(array.size))

    @property
    def nbytes(self) -> int:
        """Bytes of both moments."""
        return int(self.first.nbytes + self.second.nbytes)

    def part(self, inside: slice) -> FlatMoments:
        """Those of some elements, views."""
        return FlatMoments(self.first[inside], self.second[inside])


Settings = tuple[float, tuple[float, float], float, float, Offload | None]
Moments = FlatMoments | HostMoments  # to read and to fill
Key = str | int  # of an array of one's own: its name, or its place in a list
Arrays = Mapping[str, Array] | Sequence[Array]


def check_settings(
    lr: Any, betas: Any, eps: Any, weight_decay: Any, offload: Any
) -> tuple[Settings, dict[str, object]]:
    """An optimizer's settings, and what ranks must share; raises ValueError for what cannot be."""
    if not isinstance(betas, Sequence | np.ndarray) or isinstance(betas, str) or len(betas) != 2:
        raise ValueError(f"ShardedAdamW: betas: expected two numbers, got {came(betas)}")
    first, second = (number("ShardedAdamW: betas", beta, least=0, below=1) for beta in betas)
    facts: dict[str, object] = {
        "lr": (lr := number("ShardedAdamW: lr", lr, least=0)),
        "betas": (first, second),
        "eps": (eps := number("ShardedAdamW: eps", eps, above=0)),
        "weight_decay": (weight_decay := number("ShardedAdamW: weight_decay", weight_decay, least=0)),
        "offload": offload,
    }
    return (lr, (first, second), eps, weight_decay, make_offload(offload)), facts


class ShardedAdamW:
    """AdamW (Loshchilov and Hutter, 2019) for a ShardedModule. Decay applies to matrices only.

    lr            learning rate; `step` may be given another one each time
    betas, eps    decay of the two moments, and what is added to the root of the second
    weight_decay  a step takes lr * weight_decay of a matrix away, apart from the gradient
    lr_scale      name pattern -> what multiplies the learning rate of parameters that it matches ("*.lora_b":
                  16); the last match wins, 0 leaves them as they are
    ema           keep a moving average of what `step` trains too: ema * average + (1 - ema) * parameter after
                  each update, from the first parameters on; `zero_mpi.save` writes it as a model of its own

    `steps` counts the updates that were made, `skipped` those left out for a norm that was not finite.
    Making one is collective; raises ValueError for settings that cannot be, UsageError where ranks differ.
    `offload`: "moments" keeps them in pinned memory of the host, "state" also the parameters of a module with
    `offload_masters`; raises UsageError where there is no GPU.
    """

    def __init__(
        self,
        module: ShardedModule,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        offload: str = "none",
        lr_scale: Mapping[str, float] | None = None,
        ema: float | None = None,
    ) -> None:
        instance("ShardedAdamW: module", module, ShardedModule, "a ShardedModule")
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "offload": offload}

        def checked() -> tuple[tuple[Settings, dict[str, float]], Facts]:
            check_average(ema, offload)
            chosen, facts = check_settings(**settings)
            trained = [name for name in module.params if module.is_trainable(name)]
            scales = check_scales("ShardedAdamW: lr_scale", lr_scale or {}, trained)
            return (chosen, scales), facts | {"lr_scale": list(scales.items()), "ema": ema}

        chosen, scales = agreed(module.comm, "this ShardedAdamW", checked)
        self.module, (self.lr, self.betas, self.eps, self.weight_decay, self._offload) = module, chosen
        self.steps = self.skipped = 0
        self.moments = self._make_moments()
        self.average = None if ema is None else MovingAverage(self.units, ema)
        self._plain: dict[Key, tuple[FlatMoments, int]] = {}
        self._rates = ParameterRates(self.units, scales)

    @property
    def units(self) -> list[ShardedUnit]:
        """The units that are trained."""
        return [unit for unit in self.module.units if unit.unit.trainable]

    def averages(self) -> Mapping[str, Array]:
        """The moving averages by unit, where they are kept; before any update they are the parameters."""
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
            scale = 1.0 if max_norm is None else clip_factor(norm, max_norm)
            scale /= self.module.loss_scale.factor
            with spans.during(spans.OPTIMIZER, "update"):
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

    def _make_moments(self) -> Mapping[str, Moments]:
        """Zeros for each unit, where they are kept."""
        names = [unit.name for unit in self.units]
        if self._offload is None:
            return dict(zip(names, (FlatMoments.like(unit.updated[0]) for unit in self.units), strict=True))
        sizes = [(int(unit.updated[0].size), unit.unit.quantum) for unit in self.units]
        return dict(zip(names, self._offload.moments(sizes), strict=True))

    def _update_unit(self, unit: ShardedUnit, lr: float, scale: float) -> None:
        parameters, gradients, _ = unit.updated
        rates, quantum, low = self._rates[unit.name], unit.unit.quantum, unit.parameters.rounds_to
        decay = self.weight_decay * rates.decays
        for part, p, moments in self._pieces(unit, parameters):
            for here, factor in rates.within(part):
                own = slice(here.start - part.start, here.stop - part.start)
                runs = slice(here.start // quantum, -(-here.stop // quantum))
                rounded = None if low is None else low[here]
                state = p[own], gradients[here], moments.part(own)
                self._update(*state, lr * factor, scale, decay[runs], self.steps, rounded)

    def _pieces(self, unit: ShardedUnit, parameters: Array) -> Iterator[tuple[slice, Array, FlatMoments]]:
        """A unit's parameters and moments where they are updated: all, or if offloaded piece by piece."""
        kept = self.moments[unit.name]
        if isinstance(kept, FlatMoments):
            yield slice(0, kept.first.size), parameters, kept
            return
        assert self._offload is not None
        more = [parameters] if self._offload.masters else []
        for part, first, second, *rest in self._offload.through(kept, *more):
            yield part, rest[0] if rest else parameters[part], FlatMoments(first, second)

    def _update(
        self,
        p: Array,
        g: Array,
        moments: FlatMoments,
        lr: float,
        scale: float,
        decay: Array,
        step: int,
        low: Array | None = None,
    ) -> None:
        ops.adamw(
            p,
            g,
            moments.first,
            moments.second,
            grad_scale=scale,
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            decay=decay,
            step=step,
            low=low,
        )

    def step_on_params(self, params: Arrays, grads: Arrays, lr: float | None = None) -> None:
        """Update arrays of any kind in place by gradients given for them, both by name or both as lists.

        The name, or the place in the list, is the identity: under it moments and a count of steps are kept,
        beside the module's, from the first call on; names may come later or be left out of a call. Under the
        names of the module's parameters that is its local shard: `dict(module.named_parameters())` and
        gradients of the same elements. Whoever updates those calls `drop_gathered` before and
        `broadcast_updated_params` after it. What decays: the module's matrices by their names, also where
        the shard is flat, and other arrays of two or more dimensions. Not collective.

        Raises ValueError, and updates nothing, if names, lists, shapes or types do not fit each other or
        earlier calls.
        """
        lr = self.lr if lr is None else number("step_on_params: lr", lr, least=0)
        arrays, given = keyed("params", params), keyed("grads", grads)
        self._check_plain(arrays, given)
        for key, p in arrays.items():
            moments, steps = self._plain.get(key) or (FlatMoments.like(p), 0)
            self._plain[key] = moments, steps + 1
            known = self.module.params.get(str(key))
            decays = p.ndim >= 2 if known is None else known.decays
            decay, rate = np.array([self.weight_decay * decays]), lr * self._rates.factor(str(key))
            self._update(p.reshape(-1), given[key].reshape(-1), moments, rate, 1.0, decay, steps + 1)

    def _check_plain(self, params: Mapping[Key, Array], grads: Mapping[Key, Array]) -> None:
        """Raise ValueError unless all of them can be updated."""
        shapes = {key: p.shape for key, p in params.items()}
        if shapes != {key: g.shape for key, g in grads.items()}:
            raise ValueError(f"step_on_params: parameters have shapes {shapes}, gradients differ")
        if not all(p.flags.c_contiguous for p in params.values()):
            raise ValueError("step_on_params: parameters must be contiguous to be updated in place")
        listed = [key for key in self._plain if isinstance(key, int)]
        longer = listed and 0 in params and len(listed) != len(params)
        for key, (moments, _) in self._plain.items():
            if longer or (key in params and moments.first.size != params[key].size):
                raise ValueError("step_on_params: the arrays are not those of the first call")

    def memory_bytes(self) -> int:
        """Bytes of moments and averages on this rank, wherever they are."""
        plain = [moments for moments, _ in self._plain.values()]
        average = 0 if self.average is None else self.average.nbytes
        return average + sum(moments.nbytes for moments in [*self.moments.values(), *plain])


def keyed(what: str, arrays: Any) -> dict[Key, Array]:
    """Arrays by name, or by place in a list; raises ValueError for anything but arrays of float numbers."""
    if isinstance(arrays, str) or not isinstance(arrays, Sequence | Mapping):
        raise ValueError(
            f"step_on_params: {what}: expected a list of arrays, or a mapping of names to them, got "
            f"{came(arrays)}"
        )
    found: dict[Key, Array] = dict(arrays) if isinstance(arrays, Mapping) else dict(enumerate(arrays))
    for key, value in found.items():
        array(f"step_on_params: {what}[{key!r}]", value, kinds=FLOATING)
    return found
