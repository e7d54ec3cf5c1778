"""Layout of a model: its units, when they travel, and what memory they take, all known beforehand.

It is worked out from the stages alone, without an array, so that a transport which shares memory can be asked
for it before the model is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

from zero_mpi.comm import Partition
from zero_mpi.nn.layer import Stage, stage_params
from zero_mpi.sharding.block_unit import BlockUnit, Stored, block_units
from zero_mpi.sharding.buffers import buffer_lengths
from zero_mpi.sharding.precision import FP32, Precision
from zero_mpi.sharding.schedule import Indices, Schedule, make_schedule
from zero_mpi.sharding.strategy import Strategy
from zero_mpi.sharding.unit import FROZEN, TRAINED, WHOLE, Unit, dealt_whole, units_by_bytes, units_by_scope

NOTHING: Stored = {}
BUCKET_MB = 25.0  # large enough to hide the latency of a message, small enough to start early


@dataclass(frozen=True)
class Layout:
    """The units of a model, which of them each stage uses, their schedule, and what is lent at once.

    buffers   of gradients, gathers   of parameters that are gathered: lengths of float32 arrays, which have
              room for twice as many elements in low precision
    """

    units: list[Unit]
    uses: list[Indices]
    schedule: Schedule
    buffers: tuple[int, ...]
    gathers: tuple[int, ...]
    precision: Precision = FP32

    def wholes(self, strategy: Strategy, ranks: int) -> list[Partition]:
        """Return the partition of each unit's array that ranks share: parameters, else summed gradients.

        A replicated unit that is frozen shares nothing: it has no gradient.
        """
        units = self.dealt(ranks).units
        if strategy.shards_moments:
            return [unit.in_room(ranks, self.precision.compute) for unit in units]
        return [unit.partition(ranks) if unit.trainable else Partition(0, ranks) for unit in units]

    def dealt(self, ranks: int) -> Layout:
        """Return the layout for `ranks` ranks: each parameter that is whole has an owner."""
        return replace(self, units=dealt_whole(self.units, ranks, products_of))


def products_of(shape: tuple[int, ...]) -> int:
    """Return operations of five orthogonalizing steps, 20 m^2 n + 10 m^3, which owners share evenly."""
    m, n = sorted(shape[-2:])
    return prod(shape[:-2]) * (20 * m * m * n + 10 * m**3)


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a parameter's name; "!" before a pattern: whether it does not."""
    return fnmatchcase(name, pattern.removeprefix("!")) != pattern.startswith("!")


def is_trainable(name: str, frozen: Sequence[str]) -> bool:
    """Return whether no frozen pattern matches the parameter's name."""
    return not any(matches(name, pattern) for pattern in frozen)


def lay_out(
    stages: Sequence[Stage],
    strategy: Strategy,
    *,
    prefetch: int = 1,
    bucket_mb: float = BUCKET_MB,
    frozen: Sequence[str] = (),
    by_rows: bool = False,
    precision: Precision = FP32,
    stored: Stored = NOTHING,
    whole: Sequence[str] = (),
) -> Layout:
    """Return the layout of a ShardedModule with the same arguments."""
    params = stage_params(list(stages))

    loose = {name: param for name, param in params.items() if name not in stored}

    def kind_of(name: str) -> str:
        trained = WHOLE if any(fnmatchcase(name, pattern) for pattern in whole) else TRAINED
        return trained if is_trainable(name, frozen) and not params[name].buffer else FROZEN

    kind = {name: kind_of(name) for name in loose}.__getitem__
    if strategy.buckets:
        units = units_by_bytes(loose, kind, int(bucket_mb * 2**20))
    else:
        units = units_by_scope(stages, loose, kind, by_rows)
    units = [*units, *block_units(stages, params, stored)]
    home = {name: number for number, unit in enumerate(units) for name in unit.params}
    uses = [tuple(dict.fromkeys(home[name] for name in stage.layer.params())) for stage in stages]
    schedule = scheduled(stages, units, uses, prefetch, strategy)
    gradients, gathers = buffer_lengths(units, uses, schedule, precision)
    return Layout(
        units,
        uses,
        schedule,
        gradients,
        gathers if strategy.shards_parameters else (),
        precision,
    )


def scheduled(
    stages: Sequence[Stage], units: list[Unit], uses: list[Indices], prefetch: int, strategy: Strategy
) -> Schedule:
    """Return the schedule of a model's units, with their names. Units in blocks are always gathered."""
    schedule = make_schedule(
        uses,
        [stage.layer.backward_reads_params for stage in stages],
        [unit.trainable for unit in units],
        prefetch,
        gathers=[strategy.shards_parameters or isinstance(unit, BlockUnit) for unit in units],
    )
    return replace(
        schedule,
        unit_names=tuple(unit.name for unit in units),
        stage_names=tuple(stage.scope for stage in stages),
    )
