"""Objective of a teacher's predictions: the cross-entropy, mixed with the divergence from the teacher.

For each token the teacher has K ids t with probabilities T, and the mass of the rest. With the student's
softmax S at the same temperature the loss is sum T (log T - log S) + Tr (log Tr - log Sr), where Tr and Sr
are the masses of all other ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from zero_mpi import device, ops
from zero_mpi.arguments import UNCOUNTED
from zero_mpi.config.inputs import fingerprint
from zero_mpi.data import Corpus, PackedWindows, StepLoader, Tokenizer, Windows
from zero_mpi.data.documents import Stream
from zero_mpi.data.teacher_file import Records, TeacherFile, open_teacher
from zero_mpi.device.arrays import Scalar, namespace
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import quoted, shown
from zero_mpi.models import ModelConfig
from zero_mpi.nn.loss import CrossEntropy, HeadLoss, zeros_of
from zero_mpi.ops.reference import chunk_rows
from zero_mpi.sharding import ShardedModule
from zero_mpi.train.objective import CrossEntropyStep, Objective, StepLoss, as_input

LEAST = 1e-12  # of a mass, before its logarithm


@dataclass(frozen=True, eq=False)
class Distilled(CrossEntropy):
    """(1 - weight) times the cross-entropy, plus weight times the divergence from records (B T,)."""

    records: Records
    weight: float
    teacher: TeacherFile

    def train(self, head: Any, p: Any, x: Any, g: Any, factor: float) -> tuple[Scalar, Any]:
        to_device, flat = device.in_use().from_host, x.reshape(-1, x.shape[-1])
        rows = np.flatnonzero(self.targets.reshape(-1) != UNCOUNTED)
        records, targets = self.records[rows], to_device(self.targets.reshape(-1)[rows])
        there, dx, loss = records["rest"] + records["logp"].sum(axis=-1) != 0, zeros_of(flat, x.dtype), 0.0
        step = chunk_rows(len(rows), self.teacher.vocab)
        for part in (slice(start, start + step) for start in range(0, len(rows), step)):
            some = to_device(rows[part])
            z, saved = head.forward(p, flat[some])
            hard, dz = ops.cross_entropy(z, targets[part], (1 - self.weight) * self.scale * factor)
            soft, slopes = self.divergence(z, targets[part], to_device(there[part]), records[part])
            dz += slopes * (self.weight * self.scale * factor)
            loss = loss + hard / factor + soft * self.weight * self.scale
            dx[some] = head.backward(p, saved, dz.astype(z.dtype), g)
        return loss, dx.reshape(x.shape)

    def divergence(self, z: Any, targets: Any, there: Any, records: Records) -> tuple[Any, Any]:
        """Return the summed divergence for logits (n, V), and its gradient."""
        xp, to_device = namespace(z), device.in_use().from_host
        at = xp.arange(len(z))[:, None]
        ids, logp, rest = (to_device(np.ascontiguousarray(records[name])) for name in ("ids", "logp", "rest"))
        ids, logp, rest = ids.astype(np.int64), logp.astype(np.float64), rest.astype(np.float64)
        share = ops.cross_entropy(z / z.dtype.type(self.teacher.temperature), targets, 1.0)[1].astype(
            np.float32
        )
        share[at[:, 0], targets] += 1  # the softmax, from the gradient of its cross-entropy
        found, wanted = share[at, ids].astype(np.float64), xp.exp(logp)
        others = xp.maximum(LEAST, 1 - found.sum(axis=-1))
        terms = (wanted * (logp - xp.log(xp.maximum(LEAST, found)))).sum(axis=-1)
        terms += xp.exp(rest) * (rest - xp.log(others))
        share *= ((others - xp.exp(rest)) / others)[:, None].astype(np.float32)
        share[at, ids] = (found - wanted).astype(np.float32)
        share[~there] = 0
        return terms[there].sum(), share / np.float32(self.teacher.temperature)


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
        return as_input(batch), Distilled(batch.targets, self._scale, records, of.weight, of.teacher)


class DistillObjective(Objective):
    """A teacher's predictions of the tokens of a stream, mixed with the cross-entropy."""

    def __init__(
        self, module: ShardedModule, loader: StepLoader, stream: Stream, path: str, weight: float
    ) -> None:
        super().__init__(module, loader)
        self.stream, self.path, self.weight, self.teacher = stream, path, weight, open_teacher(path)

    def step(self, number: int) -> StepLoss:
        return DistilledStep(self, number)
