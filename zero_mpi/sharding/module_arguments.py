"""Checks of a module's arguments, and of those that must be the same on all ranks.

Ranks that have other models, strategies or settings would start other collectives, or train something else,
in silence. So all arguments are compared, by a digest, when the module is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_mpi import device
from zero_mpi.arguments import came, instance, number
from zero_mpi.arguments import whole as whole_number
from zero_mpi.comm import Comm
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.nn.layer import Layer, Param, Stage, Tally, stage_params
from zero_mpi.ops.block_kinds import BlockKind
from zero_mpi.sharding.block_unit import Stored
from zero_mpi.sharding.host_masters import masters_on_host
from zero_mpi.sharding.layout import Layout, is_trainable, lay_out, matches
from zero_mpi.sharding.precision import FLOAT32, Precision
from zero_mpi.sharding.strategy import Strategy
from zero_mpi.sharding.tallies import scales_of, tallies_of
from zero_mpi.sharding.unit import Unit


@dataclass(frozen=True)
class ModuleArguments:
    """Checked arguments of a module."""

    stages: list[Stage]
    params: Mapping[str, Param]
    frozen: tuple[str, ...]
    layout: Layout
    masters: Callable[[int], Array] | None
    tallies: Mapping[str, Tally]


def check_arguments(
    stages: Any,
    comm: Comm,
    strategy: Any,
    *,
    prefetch: Any,
    bucket_mb: Any,
    frozen: Any,
    by_rows: Any,
    precision: Any,
    offload_masters: Any,
    stored: Any,
    whole: Any,
    auxiliary: Any,
) -> tuple[ModuleArguments, dict[str, object]]:
    """Return the checked arguments, and the facts that ranks must share; raise ValueError for bad ones."""
    instance("ShardedModule: strategy", strategy, Strategy, "a Strategy such as FULL_SHARD")
    instance("ShardedModule: precision", precision, Precision, "a Precision such as FP32")
    settings: dict[str, Any] = {
        "prefetch": whole_number("ShardedModule: prefetch", prefetch, least=0),
        "bucket_mb": number("ShardedModule: bucket_mb", bucket_mb, above=0),
        "by_rows": bool(by_rows),
    }
    stages = list_of_stages(stages)
    params = stage_params(stages)
    if not params:
        raise ValueError("ShardedModule: expected a model with parameters, got stages that have none")
    patterns = list_of_patterns("frozen", frozen, params)
    settings["whole"] = list_of_patterns("whole", whole, params)
    if settings["whole"] and settings["by_rows"]:
        raise ValueError("ShardedModule: whole: by_rows splits parameters between rows; use one of them")
    check_reduction(comm, precision)
    masters, tallies = masters_on_host(precision) if offload_masters else None, tallies_of(stages, auxiliary)
    kinds = check_stored(stored, params, patterns, settings["by_rows"])
    layout = lay_out(stages, strategy, frozen=patterns, precision=precision, stored=kinds, **settings)
    facts = {"the strategy": strategy, "the precision": precision, "exact": comm.exact, **settings}
    facts |= {"offload_masters": bool(offload_masters), "auxiliary": scales_of(tallies)}
    facts |= {f"stage {i}": f"{s.scope} ({type(s.layer).__name__})" for i, s in enumerate(stages)}
    facts |= {f"parameter {name}": about for unit in layout.units for name, about in told(unit, kinds)}
    return ModuleArguments(stages, params, patterns, layout, masters, tallies), facts


def told(unit: Unit, kinds: Stored) -> Iterator[tuple[str, str]]:
    """Yield (name, what ranks must share of it) of a unit's parameters."""
    kind = "trained" if unit.trainable else "frozen"
    for name, param in unit.params.items():
        yield name, f"{param.shape}, {kinds.get(name, kind)}, in unit {unit.name}"


def list_of_stages(stages: Any) -> list[Stage]:
    """Return a model's stages as a list; raise ValueError for anything but stages, and for none."""
    expected = "a list of Stage(scope, layer), such as model.stages()"
    if isinstance(stages, str | Mapping | Stage | Layer) or not hasattr(stages, "__iter__"):
        raise ValueError(f"ShardedModule: stages: expected {expected}, got {came(stages)}")
    found = list(stages)
    if not found:
        raise ValueError(f"ShardedModule: stages: expected {expected}, got none")
    for i, stage in enumerate(found):
        instance(f"ShardedModule: stages[{i}]", stage, Stage, "a Stage(scope, layer)")
        instance(f"ShardedModule: stages[{i}].scope", stage.scope, str, "a name")
        instance(f"ShardedModule: stages[{i}].layer", stage.layer, Layer, "a Layer")
    return found


def list_of_patterns(what: str, given: Any, params: Mapping[str, Param]) -> tuple[str, ...]:
    """Return name patterns as a tuple; raise ValueError for others, and for one that names nothing."""
    if isinstance(given, str) or not isinstance(given, Sequence | set | frozenset):
        raise ValueError(f"ShardedModule: {what}: expected a list of name patterns, got {came(given)}")
    for pattern in given:
        instance(f"ShardedModule: {what}", pattern, str, "name patterns")
    found = tuple(given) if isinstance(given, Sequence) else tuple(sorted(given))
    check_patterns(what, found, params)
    return found


def check_stored(stored: Any, params: Mapping[str, Param], frozen: Sequence[str], by_rows: bool) -> Stored:
    """Return the kinds of parameters that stay in blocks; raise ValueError for those that cannot."""
    if not stored:
        return {}
    instance("ShardedModule: stored", stored, Mapping, "a mapping of names to BlockKind")
    if by_rows or device.in_use().name != "cpu":
        raise ValueError("ShardedModule: stored: expected parameters on CPUs, in units that are no rows")
    for name, kind in stored.items():
        instance(f"ShardedModule: stored: {name}", kind, BlockKind, "a BlockKind")
        if name not in params or is_trainable(name, frozen):
            raise ValueError(f"ShardedModule: stored: {came(name)}: expected the name of a frozen parameter")
        if params[name].size % kind.elements:
            raise ValueError(f"ShardedModule: stored: {name}: expected blocks of {kind.elements} elements")
    return dict(stored)


def check_reduction(comm: Comm, precision: Precision) -> None:
    """Raise UsageError where the transport leaves sums to the library, which has none of low types."""
    if not comm.exact and precision.reduce != FLOAT32:
        raise UsageError(
            f"--precision {precision.name} with --reduction fast: the MPI library does not add "
            f"{precision.reduce.name}; use --reduction exact, or --reduce-dtype fp32"
        )


def check_patterns(what: str, patterns: Sequence[str], params: Mapping[str, Param]) -> None:
    """Raise ValueError for a pattern that matches nothing: most likely a typo."""
    for pattern in patterns:
        if not any(matches(name, pattern) for name in params):
            raise ValueError(
                f"{what} pattern {pattern!r} matches no parameter; names are like "
                f"{', '.join(list(params)[:3])}"
            )
