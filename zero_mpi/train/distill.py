"""Objective of a teacher's predictions: for each micro-batch a `Distilled` loss with its records."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from zero_mpi.arguments import UNCOUNTED
from zero_mpi.config.inputs import fingerprint
from zero_mpi.data import Corpus, PackedWindows, StepLoader, Tokenizer, Windows
from zero_mpi.data.documents import Stream
from zero_mpi.data.teacher_file import open_teacher
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import quoted, shown
from zero_mpi.models import ModelConfig
from zero_mpi.nn.distilled import Distilled
from zero_mpi.nn.loss import HeadLoss
from zero_mpi.sharding import ShardedModule
from zero_mpi.train.objective import CrossEntropyStep, Objective, StepLoss, as_input


def check_teacher(path: str, corpus: Corpus, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Raise UsageError unless a teacher has predicted the tokens of this data."""
    found = open_teacher(path)
    made = {"data": corpus.sha256, "tokenizer": fingerprint(tokenizer), "vocabulary": model.vocab_size}
    has = {"data": found.data, "tokenizer": found.tokenizer, "vocabulary": found.vocab}
    if tokenizer is None:  # the data are ids
        has["tokenizer"] = made["tokenizer"]
    for name, value in has.items():
        if value != made[name]:
            raise UsageError(
                f"--teacher {shown(path)}: of another {name}, {quoted(value)}, not {quoted(made[name])}: "
                "run evaluate --top-k-out with the same --data"
            )
    if len(corpus.parts) > 1 or found.tokens != sum(corpus.tokens):
        raise UsageError(f"--teacher {shown(path)}: expected --data without shares, and without --val-data")


class DistilledStep(CrossEntropyStep):
    """Distilled losses of a step's micro-batches."""

    def __init__(self, objective: DistillObjective, number: int) -> None:
        super().__init__(objective.loader, number)
        self._of, self._batches = objective, objective.loader.batches(number)

    def micro(self, i: int) -> tuple[Any, HeadLoss]:
        batch, of = self._loader.micro(self._number, i), self._of
        at = cast("Windows | PackedWindows", of.loader.windows).places(self._batches[i])
        places = of.stream.in_data(np.where(batch.targets == UNCOUNTED, -1, at).ravel())
        records = of.teacher.read(of.path, places)
        return as_input(batch), Distilled(
            batch.targets, self._scale, records, of.weight, of.teacher.temperature, of.teacher.vocab
        )


class DistillObjective(Objective):
    """A teacher's predictions of the tokens of a stream, mixed with the cross-entropy."""

    def __init__(
        self, module: ShardedModule, loader: StepLoader, stream: Stream, path: str, weight: float
    ) -> None:
        super().__init__(module, loader)
        self.stream, self.path, self.weight, self.teacher = stream, path, weight, open_teacher(path)

    def step(self, number: int) -> StepLoss:
        return DistilledStep(self, number)
