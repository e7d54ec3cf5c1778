"""Curves of `metrics.jsonl` in at most LIMIT columns: neighbouring steps are averaged where a run has more.

A column holds a power of two of steps. A value that is not finite (null in the file) makes its column a gap,
and a value that is absent, as between two evaluations, does not count. The file is read in pieces, so memory
does not grow with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from zero_mpi.files.open import read_lines
from zero_mpi.telemetry.metrics import MARK, record_of

LIMIT = 2000  # columns of a run, an even number
PIECE = 1000  # records that are put into columns at a time
LARGEST = 1e39  # beyond what a float32 holds: counts as not finite
MEMORY = "memory_bytes"  # one number a rank in a record; the largest in a curve
NUMBERS: tuple[str, ...] = ("loss", "val_loss", "lr", "grad_norm", "tokens", "tokens_per_second", "mfu")
NUMBERS += ("step_seconds", "wait_seconds", MEMORY)

Floats = npt.NDArray[np.float64]


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value of JSON is a number that a record may have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def number_of(record: Mapping[str, Any], name: str) -> float:
    """Return a number of a record: nan if it is not finite or no number, infinity if the record lacks it."""
    value = record.get(name, math.inf)
    if name == MEMORY and isinstance(value, list) and value and all(map(is_number, value)):
        return float(max(value))
    return float(value) if is_number(value) or value is math.inf else math.nan


class Curves:
    """The numbers of a run in columns.

    width   steps of a column; column i holds steps i * width + 1 to (i + 1) * width
    last    the last value of each number, nan if it was not finite
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.width, self.records, self.step = 1, 0, 0
        self.last: dict[str, float] = {}
        self._sums = np.zeros((len(NUMBERS), limit))
        self._counts = np.zeros((len(NUMBERS), limit))

    def add(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Put records into their columns."""
        if not records:
            return
        steps = np.array([record["step"] for record in records], np.int64)
        while (int(steps.max()) - 1) // self.width >= self._sums.shape[1]:
            self._halve()
        columns = (steps - 1) // self.width
        for number, name in enumerate(NUMBERS):
            values = np.array([number_of(record, name) for record in records])
            there = ~np.isinf(values)
            np.add.at(self._sums[number], columns[there], values[there])
            np.add.at(self._counts[number], columns[there], 1)
            self.last.update((name, float(value)) for value in values[there][-1:])
        self.records += len(records)
        self.step = max(self.step, int(steps.max()))

    def _halve(self) -> None:
        """Put every two columns together."""
        self.width *= 2
        for table in (self._sums, self._counts):
            halved = table[:, 0::2] + table[:, 1::2]
            table[:] = 0
            table[:, : halved.shape[1]] = halved

    def points(self, name: str) -> tuple[npt.NDArray[np.int64], Floats]:
        """Return (last step, mean) of each column that has the number; a mean is nan where one value was."""
        number = NUMBERS.index(name)
        columns = np.flatnonzero(self._counts[number])
        means = self._sums[number, columns] / self._counts[number, columns]
        return np.minimum((columns + 1) * self.width, self.step), means


def read_curves(path: Path, limit: int = LIMIT) -> Curves:
    """Read a file of records; lines that are none, such as one cut off by a crash, are left out."""
    curves = Curves(limit)
    for records in pieces(filter(None, map(record_of, read_lines(path, MARK, "a file of records")))):
        curves.add(records)
    return curves


def pieces(records: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield records in lists of at most PIECE."""
    while piece := list(islice(records, PIECE)):
        yield piece
