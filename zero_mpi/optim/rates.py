"""Weight decay and learning-rate factors of parameters, by name pattern.

Both are constant within a chunk of a unit. Decay is a table with a number for each chunk. Rates differ
rarely, so a unit is cut into segments of one factor. The cuts do not change the update of an element.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from zero_mpi import device
from zero_mpi.arguments import instance, number
from zero_mpi.device.types import Array
from zero_mpi.optim.rule import Rule
from zero_mpi.sharding.module import ShardedUnit

T = TypeVar("T")


@dataclass(frozen=True)
class UnitRates:
    """Factors of the part of one unit that an optimizer updates.

    decays     factor of the weight decay of each chunk, 0 for no decay: (chunks,) float64, on the device
    segments   (elements, factor of the rate, rule), one after the other
    """

    decays: Array
    segments: tuple[tuple[slice, float, Rule], ...]

    def within(self, part: slice) -> Iterator[tuple[slice, float, Rule]]:
        """Yield the segments of a part, cut to it."""
        for run, factor, rule in self.segments:
            start, stop = max(run.start, part.start), min(run.stop, part.stop)
            if start < stop:
                yield slice(start, stop), factor, rule


def unit_rates(
    unit: ShardedUnit,
    factor_of: Callable[[str], float],
    decays: Mapping[str, float],
    rule_of: Callable[[str], Rule],
) -> UnitRates:
    """Return the factors of what an optimizer updates of a unit.

    factor_of   name -> factor of the learning rate
    decays      name pattern -> factor of the decay; the last match wins
    """
    part, full = unit.updated[2], unit.unit
    here = slice(part.start // full.quantum, -(-part.stop // full.quantum))
    of_chunks, updates = list[float](), list[tuple[float, Rule]]()
    for name, param in full.params.items():
        count = full.chunks(name)
        of_chunks += [matched(decays, name, float(param.decays))] * count
        updates += [(factor_of(name), rule_of(name))] * count
    segments, start = list[tuple[slice, float, Rule]](), 0
    for (factor, rule), same in groupby(updates[here]):
        stop = start + full.quantum * sum(1 for _ in same)
        segments.append((slice(start, stop), factor, rule))
        start = stop
    return UnitRates(device.in_use().from_host(np.array(of_chunks[here], np.float64)), tuple(segments))


def matched(values: Mapping[str, T], name: str, otherwise: T) -> T:
    """Return the value of the last pattern that matches a name."""
    found = [value for pattern, value in values.items() if fnmatchcase(name, pattern)]
    return found[-1] if found else otherwise


def check_scales(what: str, scales: Any, trained: Collection[str]) -> dict[str, float]:
    """Return factors by pattern; raise ValueError for other values and for patterns without a match."""
    instance(what, scales, Mapping, "a mapping of name patterns to numbers")
    for pattern in scales:
        instance(what, pattern, str, "name patterns")
        if not any(fnmatchcase(name, pattern) for name in trained):
            few = ", ".join(list(trained)[:3])
            raise ValueError(f"{what}: {pattern!r} matches no trained parameter; names are like {few}")
    return {pattern: number(f"{what}: {pattern}", x, least=0) for pattern, x in scales.items()}
