"""`metrics.jsonl` of a run of any length, kept small: columns of 1, 2, 4, 8, ... steps.

A run has at most LIMIT columns. Where it has more steps, neighbouring columns are put together, so each holds
the same power of two of steps. Of every number a column keeps the mean, the least and the greatest value and
how many were not finite (null in the file); a number that is not there, as in records of older versions or
between two evaluations, is not counted at all. The file is read in pieces: memory does not grow with it.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from zero_mpi.files.open import read_lines
from zero_mpi.files.parse import parse_json
from zero_mpi.telemetry.metrics import MARK, record_of
from zero_mpi.telemetry.proof import MOST_STEPS

LIMIT = 2000  # columns of a run
PIECE = 1 << 22  # bytes that lines take which are read at a time
RECENT = 100  # last records that are kept
LARGEST = 1e39  # beyond what a float32 holds: counts as not finite
ABSENT = math.inf  # stands for a number that is not there; JSON has no such number
NUMBERS = ("loss", "val_loss", "lr", "grad_norm", "tokens_per_second", "mfu", "sent_bytes")
WAITS, MEMORY = "wait_share", "memory_bytes"  # made from others; one number a rank
CURVES = (*NUMBERS, WAITS, MEMORY)
OF_RECENT = ("tokens_per_second", "mfu", "wait_seconds", "step_seconds", "skipped")  # what is kept of records

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
Row = Mapping[str, Any]


class Curve:
    """One number over the columns: sum and extremes where `count` is not 0; `odd` counts nulls."""

    PARTS: Mapping[str, tuple[np.ufunc, float]] = {
        "total": (np.add, 0.0),
        "count": (np.add, 0.0),
        "odd": (np.add, 0.0),
        "least": (np.minimum, np.inf),
        "greatest": (np.maximum, -np.inf),
    }

    def __init__(self, limit: int) -> None:
        self.parts = {name: np.full(limit, blank) for name, (_, blank) in self.PARTS.items()}

    def add(self, places: Places, least: Floats, greatest: Floats | None = None) -> None:
        """Put values into columns; of a span of values the greater end counts for the mean."""
        greatest = least if greatest is None else greatest
        fine, odd = np.isfinite(least) & np.isfinite(greatest), np.isnan(least) | np.isnan(greatest)
        one = np.ones_like(least)
        values = {"total": greatest, "count": one, "odd": one, "least": least, "greatest": greatest}
        for name, (join, _) in self.PARTS.items():
            where = odd if name == "odd" else fine
            join.at(self.parts[name], places[where], values[name][where])

    def halve(self) -> None:
        """Put every two columns together."""
        for name, (join, blank) in self.PARTS.items():
            halved = join(self.parts[name][0::2], self.parts[name][1::2])
            self.parts[name] = np.append(halved, np.full_like(halved, blank))

    def __getitem__(self, name: str) -> Floats:
        return self.parts[name]

    @property
    def mean(self) -> Floats:
        """Of each column; nan where there is none."""
        blank = np.full_like(self["total"], math.nan)
        return np.divide(self["total"], self["count"], out=blank, where=self["count"] > 0)

    @property
    def is_empty(self) -> bool:
        """Whether no record had this number."""
        return not self["count"].any() and not self["odd"].any()

    @property
    def extent(self) -> tuple[float, float]:
        """(least, greatest) of all values; (nan, nan) where none is finite."""
        if not self["count"].any():
            return math.nan, math.nan
        return float(self["least"].min()), float(self["greatest"].max())


class Metrics:
    """The records of a run in columns.

    width      steps of a column; column i holds steps i * width + 1 to (i + 1) * width
    at         the last step, seconds of training and tokens of each column, as curves whose `greatest` counts
    last       the last value of each number that is there, nan if it was not finite
    seconds    of all steps together, without evaluations, checkpoints and pauses; None: the file does not say
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit, self.width, self.records = limit + limit % 2, 1, 0
        self.curves = {name: Curve(self.limit) for name in CURVES}
        self.at = {name: Curve(self.limit) for name in ("step", "seconds", "tokens")}
        self.last: dict[str, float] = {}
        self.seconds: float | None = None
        self.memory: list[float] = []  # of the ranks, when it was last looked at, after
        self.memory_step = 0
        self.recent: deque[Row] = deque(maxlen=RECENT)

    @property
    def used(self) -> Places:
        """The columns that hold a record."""
        return np.flatnonzero(self.at["step"]["count"])

    def add(self, rows: Sequence[Row]) -> None:
        """Put records into their columns."""
        steps = column(rows, "step")
        sound = (steps >= 1) & (steps <= MOST_STEPS)
        rows, steps = list(compress(rows, sound)), steps[sound]
        if not rows:
            return
        places = self.columns_of(steps.astype(np.int64))
        seconds, waits = column(rows, "step_seconds"), column(rows, "wait_seconds")
        are_known = (seconds > 0) & np.isfinite(seconds) & np.isfinite(waits)
        shares = np.divide(waits, seconds, out=np.full(len(rows), ABSENT), where=are_known)
        self.at["step"].add(places, steps)
        self.at["tokens"].add(places, column(rows, "tokens"))
        self.add_seconds(places, seconds)
        for name, values in {**{name: column(rows, name) for name in NUMBERS}, WAITS: shares}.items():
            self.curves[name].add(places, values)
            self.last.update((name, float(value)) for value in values[~np.isinf(values)][-1:])
        self.add_memory(places, rows)
        self.recent.extend({name: row[name] for name in OF_RECENT if name in row} for row in rows[-RECENT:])
        self.records += len(rows)

    def columns_of(self, steps: Places) -> Places:
        """The column of each step, after making columns as wide as they must be."""
        while (int(steps.max()) - 1) // self.width >= self.limit:
            self.width *= 2
            for curve in (*self.curves.values(), *self.at.values()):
                curve.halve()
        return (steps - 1) // self.width

    def add_seconds(self, places: Places, seconds: Floats) -> None:
        """Go on counting the time of training."""
        there = np.isfinite(seconds)
        if not there.any():
            return
        so_far = (self.seconds or 0.0) + np.cumsum(np.where(there, seconds, 0.0))
        self.at["seconds"].add(places, so_far)
        self.seconds = float(so_far[-1])

    def add_memory(self, places: Places, rows: Sequence[Row]) -> None:
        """The span over the ranks, at the steps that tell it."""
        for place, row in zip(places, rows, strict=True):
            values = row.get(MEMORY)
            if isinstance(values, list) and values and all(is_number(value) for value in values):
                self.memory, self.memory_step = [float(value) for value in values], int(row["step"])
                span = np.array([min(self.memory)]), np.array([max(self.memory)])
                self.curves[MEMORY].add(np.array([place]), *span)
                self.last[MEMORY] = max(self.memory)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of JSON is a number that a run may have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def column(rows: Sequence[Row], name: str) -> Floats:
    """A number of every record: nan for null and for what is no number, ABSENT where it is not there."""
    values = [row.get(name, ABSENT) for row in rows]
    try:
        found = np.array(values, np.float64)  # None becomes nan
    except (TypeError, ValueError, OverflowError):
        found = np.zeros(())
    if found.shape == (len(rows),):
        return np.where((np.abs(found) >= LARGEST) & (found != ABSENT), math.nan, found)
    return np.array([v if is_number(v) or v is ABSENT else math.nan for v in values], np.float64)


def read_metrics(path: Path, limit: int = LIMIT) -> Metrics:
    """All records of a file; lines that are none, such as one cut off by a crash, are left out."""
    metrics, held, size = Metrics(limit), list[bytes](), 0
    for line in read_lines(path, MARK, "a file of records"):
        held.append(line)
        size += sys.getsizeof(line)
        if size >= PIECE:
            metrics.add(rows_of(held))
            held, size = [], 0
    metrics.add(rows_of(held))
    return metrics


def rows_of(lines: Sequence[bytes]) -> Sequence[Row]:
    """The records of lines of JSON: parsed together, or one by one where one of them is damaged."""
    try:
        found = parse_json(b"[" + b",".join(lines) + b"]", null_for_infinite=True)
    except ValueError:
        return [*filter(None, map(record_of, lines))]
    return [row for row in found if isinstance(row, dict)]
