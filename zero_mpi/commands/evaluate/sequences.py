"""Rows of tokens of which some targets count: windows over a text, and answers behind their questions.

A set of sequences says how many losses there are, and reads micro-batch i, which is the same on any rank. To
the model it is `PartedBatch`es, so a set may let any targets count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zero_mpi.arguments import UNCOUNTED
from zero_mpi.commands.evaluate.choices import EncodedChoices
from zero_mpi.data import EvalLoader, Windows
from zero_mpi.data.packing import PackedWindows
from zero_mpi.sharding.evaluation import PartedBatch


class SequenceSet(Protocol):
    """What is taken through a model."""

    count: int  # losses
    micro_batches: int

    def micro(self, i: int) -> PartedBatch:
        """Micro-batch i, from 0."""


class WindowSet:
    """Windows over a text, or conversations: a loss for each, of all the tokens that it predicts first.

    A window has `context` inputs; each predicts the token after it. Where windows overlap, only those targets
    count that no window before has predicted: the last `stride`, and all of the first window's.
    """

    def __init__(self, windows: Windows | PackedWindows, micro_batch: int, most: int | None = None) -> None:
        self._windows, self._loader = windows, EvalLoader(windows, micro_batch, most)
        self.count, self.micro_batches = len(self._loader.chosen), self._loader.micro_batches

    def micro(self, i: int) -> PartedBatch:
        """Micro-batch i: a part for each window."""
        first = i * self._loader.micro_batch
        batch = self._loader.micro(i)
        numbers = self._loader.chosen[first : first + len(batch.inputs)].tolist()
        parts = [(row, slice(self._windows.known(number), None)) for row, number in enumerate(numbers)]
        return PartedBatch(batch.inputs, batch.targets, parts, first)


class AnswerSet:
    """Answers behind their questions: a loss for each answer, of its tokens alone.

    Shorter sequences of a micro-batch are filled up at their ends, which no position before them sees.
    """

    def __init__(self, choices: EncodedChoices, micro_batch: int, scale: float = 1.0) -> None:
        self._choices, self._micro_batch, self._scale = choices, micro_batch, scale
        self.count = len(choices.sequences)
        self.micro_batches = -(-self.count // micro_batch)

    def micro(self, i: int) -> PartedBatch:
        """Micro-batch i: a part for each answer."""
        here = slice(i * self._micro_batch, (i + 1) * self._micro_batch)
        rows, starts = self._choices.sequences[here], self._choices.starts[here]
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = row
        parts = [
            (place, slice(start - 1, len(row) - 1))
            for place, (row, start) in enumerate(zip(rows, starts, strict=True))
        ]
        x, targets = np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
        return PartedBatch(x, targets, parts, here.start, self._scale)


def counted(sequences: SequenceSet, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each loss the sum of `values` (V,), by id, over the targets that count."""
    found: list[int] = []
    for batch in map(sequences.micro, range(sequences.micro_batches)):
        targets = [batch.targets[part] for part in batch.parts]
        found += [int(values[ids[ids != UNCOUNTED]].sum()) for ids in targets]
    return np.array(found, np.int64)


def grouped(values: Sequence[float], counts: Sequence[int]) -> list[list[float]]:
    """`values` in runs of `counts`: those of each question."""
    ends = np.cumsum(counts).tolist()
    return [list(values[end - count : end]) for end, count in zip(ends, counts, strict=True)]
