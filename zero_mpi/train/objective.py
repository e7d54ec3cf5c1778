"""Objectives: the loss of a run as a `HeadLoss` for each micro-batch, and the recorded figures of each step.
The flags choose cross-entropy, a preference loss, or distillation. Training, recomputation and
evaluation work with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from zero_mpi.arguments import UNCOUNTED
from zero_mpi.config.inputs import fingerprint
from zero_mpi.data import Batch, Corpus, EvalLoader, HeldOut, PackedWindows, StepLoader, Tokenizer, Windows
from zero_mpi.data.documents import Stream
from zero_mpi.data.packing import PairBatch, PairWindows
from zero_mpi.data.teacher_file import open_teacher
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import quoted, shown
from zero_mpi.models import ModelConfig
from zero_mpi.nn import Packed
from zero_mpi.nn.loss import CrossEntropy, Distilled, HeadLoss, Segment, SequenceLoss
from zero_mpi.nn.preference import Preference, log_odds, log_sigmoid
from zero_mpi.sharding.module import ShardedModule
from zero_mpi.sharding.rounds import dealt_out, ordered_total, part_losses

Figures = dict[str, float]
Floats = NDArray[np.float64]


class StepLoss:
    """Losses of the micro-batches of a step. micro: function that returns input and loss of micro-batch i."""

    def __init__(self, micro: Callable[[int], tuple[Any, HeadLoss]]) -> None:
        self.micro = micro

    @property
    def sums(self) -> Sequence[float]:
        """Numbers of this rank that are to be summed over all ranks."""
        return ()

    def figures(self, sums: Sequence[float]) -> Figures:
        """Return the figures of the step, given the sums over all ranks."""
        return {}


class Objective:
    """Cross-entropy of the targets that count, and base class of the other objectives.

    keeps: whether the loss needs numbers of the initial model, which `keep` computes and `use` sets
    """

    keeps = False
    unit = " nats per token"  # unit of the loss, for messages

    def __init__(self, module: ShardedModule, loader: StepLoader) -> None:
        self.module, self.loader = module, loader

    def keep(self) -> Floats:
        """Compute numbers of the current model that the objective needs later. Return them. Collective."""
        raise NotImplementedError

    def use(self, numbers: Floats) -> None:
        """Set the numbers that an earlier `keep` returned."""

    def step(self, number: int) -> StepLoss:
        """Return the losses of step `number` (from 0). Collective."""
        return StepLoss(partial(self.micro, number, 1.0 / self.loader.counted(number)))

    def micro(self, number: int, scale: float, i: int) -> tuple[Any, HeadLoss]:
        return with_loss(self.loader.micro(number, i), scale)

    def held_out(self, loader: EvalLoader) -> tuple[float, Figures]:
        """Return the mean loss of the validation data, and further figures. Collective."""
        count, scale = loader.micro_batches, 1.0 / loader.counted
        losses = part_losses(self.module, count, count, lambda i: (*with_loss(loader.micro(i), scale), i))
        return ordered_total(losses), {}


def with_loss(batch: Batch, scale: float) -> tuple[Array | Packed, CrossEntropy]:
    return as_input(batch), CrossEntropy(batch.targets, scale)


def as_input(batch: Batch) -> Array | Packed:
    return batch.inputs if batch.begins is None else Packed(batch.inputs, batch.begins)


# ------------------------------------------------------------------------------------------- preferences


class PairStep(StepLoss):
    """Preference pairs of a step or an evaluation. batches: numbers of the windows in each micro-batch.

    `sums` is a table (S, K) in the order of the data. Each row has the log-probability of a sequence's
    answer, and for ORPO also that of all other tokens. A rank fills the rows of its micro-batches. The sum
    over ranks is equal at any number of ranks, and all figures are computed from it.

    reference   (S,) log-probabilities of the answers under the reference model; zeros if there is none
    kl          KTO's estimate of the divergence from the reference
    """

    def __init__(self, preference: Preference, windows: PairWindows, batches: Sequence[Array]) -> None:
        super().__init__(self._micro)
        self.preference, self.windows, self.batches = preference, windows, batches
        sequences = [windows.sequences(each) for each in batches]
        ends = np.cumsum([len(numbers) for numbers, *_ in sequences]).tolist()
        self.places = list(map(slice, [0, *ends], ends))  # the sequences of each micro-batch, as slices
        self.numbers, self.counts, sizes = (np.concatenate(each) for each in zip(*sequences, strict=True))
        self.is_better, count = self.numbers % 2 == 0, self.numbers.size
        self.terms = count if preference.is_unpaired else count // 2
        self.positions = int(sizes[self.is_better].sum())
        self.reference, self.kl = np.zeros(count), 0.0
        self._sums = np.zeros((count, 1 + preference.learns_prompts))

    @property
    def sums(self) -> Sequence[float]:
        return self._sums.ravel().tolist()

    def _micro(self, i: int) -> tuple[Any, HeadLoss]:
        pairs, rows = self.windows.pairs(self.batches[i]), self.places[i]

        def learn(sums: Sequence[float]) -> tuple[float, Sequence[float]]:
            self._sums[rows] = np.reshape(sums, (-1, self._sums.shape[1]))
            return self.loss(rows, self._sums[rows])

        return as_input(pairs.batch), SequenceLoss(self._segments(pairs), learn)

    def _segments(self, pairs: PairBatch) -> list[Segment]:
        kinds = [pairs.batch.targets, *[pairs.rest] * self.preference.learns_prompts]
        return [Segment(row, span, targets) for row, span in pairs.spans for targets in kinds]

    def measure(
        self, module: ShardedModule, read: Callable[[PairWindows, Array], PairBatch], adapted: bool = True
    ) -> Floats:
        """Return the sums (S, K) under the current model, with adapters or without. Collective."""
        width = self._sums.shape[1]

        def compute(i: int, losses: Array) -> None:
            module.comm.meter.beat()
            pairs = read(self.windows, self.batches[i])
            sums = module.losses(as_input(pairs.batch), SequenceLoss(self._segments(pairs)), adapted=adapted)
            for place, value in enumerate(sums, self.places[i].start * width):
                losses[place] = value

        sums: Floats = -dealt_out(module, len(self.batches), self._sums.size, compute)
        return sums.reshape(-1, width)

    def loss(self, rows: slice, sums: Floats) -> tuple[float, Sequence[float]]:
        """Return the part of the loss from the sequences `rows`, and its gradient with respect to `sums`."""
        ratios, counts = sums[:, 0] - self.reference[rows], self.counts[rows]
        score = self.preference.score(self.numbers[rows].tolist(), ratios.tolist(), counts.tolist(), self.kl)
        loss, slopes, better = sum(score.terms) / self.terms, np.zeros_like(sums), self.is_better[rows]
        slopes[:, 0] = np.array(score.slopes) / self.terms
        if self.preference.learns_prompts:
            loss -= sum(sums[better].ravel().tolist()) / self.positions
            slopes[better] -= 1 / self.positions
        return loss, slopes.ravel().tolist()

    def figures(self, sums: Sequence[float]) -> Figures:
        """Return rewards, log-probabilities and other figures, named as in TRL."""
        table, by_token = np.reshape(sums, self._sums.shape), not self.preference.has_reference
        answers = table[:, 0] / self.counts if by_token else table[:, 0]
        rewards, figures = self.preference.beta * (answers - self.reference), Figures()
        for kind, values in (("rewards", rewards), ("logps", answers)):
            for name, side in (("chosen", self.is_better), ("rejected", ~self.is_better)):
                if side.any():
                    figures[f"{kind}/{name}"] = mean(values[side])
        if np.array_equal(self.numbers[::2] + 1, self.numbers[1::2]):  # all sequences come in pairs
            figures["rewards/accuracies"] = mean(rewards[::2] > rewards[1::2])
            figures["rewards/margins"] = mean(rewards[::2] - rewards[1::2])
        if self.preference.is_unpaired:
            figures["kl"] = self.kl
        if self.preference.learns_prompts and np.isfinite(table).all():
            odds = list(map(log_odds, answers[::2].tolist(), answers[1::2].tolist()))
            figures["nll_loss"] = -float(np.cumsum(table[self.is_better])[-1]) / self.positions
            figures["log_odds_ratio"] = mean(list(map(log_sigmoid, odds)))
            figures["log_odds_chosen"] = mean(odds)
        return figures


class PreferenceObjective(Objective):
    """Objective for a preference loss.

    The reference model is the model at the start of the run. If adapters start at zero, it is the model
    without adapters (`adapted`). Otherwise the sums of the reference are computed once for all data.
    """

    unit = ""

    def __init__(
        self, module: ShardedModule, loader: StepLoader, data: HeldOut, preference: Preference, adapted: bool
    ) -> None:
        super().__init__(module, loader)
        self.preference, self.keeps = preference, preference.has_reference and not adapted
        self._windows = cast(PairWindows, loader.windows)
        self._data = [self._windows, *(cast(PairWindows, each.windows) for each in data.loaders.values())]
        self._pairings = [PairWindows.pairs, PairWindows.mismatched][: 1 + preference.is_unpaired]
        self._references: dict[int, Floats] = {}  # id of a PairWindows -> log-probabilities

    def keep(self) -> Floats:
        parts = list[Floats]()
        for windows in self._data:
            cuts = np.arange(self.loader.micro_batch, len(windows), self.loader.micro_batch)
            step = PairStep(self.preference, windows, np.split(np.arange(len(windows)), cuts))
            for read in self._pairings:
                parts.append(np.zeros(windows.sides))
                parts[-1][step.numbers] = step.measure(self.module, read)[:, 0]
        return np.concatenate(parts)

    def use(self, numbers: Floats) -> None:
        for windows in self._data:
            size = len(self._pairings) * windows.sides
            self._references[id(windows)], numbers = numbers[:size].reshape(-1, windows.sides), numbers[size:]

    def step(self, number: int) -> StepLoss:
        return self._with_reference(self._windows, self.loader.batches(number))

    def held_out(self, loader: EvalLoader) -> tuple[float, Figures]:
        step = self._with_reference(cast(PairWindows, loader.windows), loader.batches())
        sums = step.measure(self.module, PairWindows.pairs)
        return step.loss(slice(None), sums)[0], step.figures(sums.ravel().tolist())

    def _with_reference(self, windows: PairWindows, batches: Sequence[Array]) -> PairStep:
        """Return the `PairStep` of micro-batches, with the reference's sums if there is one. Collective."""
        step, table = PairStep(self.preference, windows, batches), self._references.get(id(windows))
        if not self.preference.has_reference:
            return step
        references = [
            step.measure(self.module, read, adapted=False)[:, 0] if table is None else table[n, step.numbers]
            for n, read in enumerate(self._pairings)
        ]
        step.reference = references[0]
        if self.preference.is_unpaired:
            step.kl = max(0.0, mean(step.measure(self.module, self._pairings[1])[:, 0] - references[1]))
        return step


def mean(values: Any) -> float:
    """Return the mean of numbers, which are added in order."""
    return float(np.cumsum(values, dtype=np.float64)[-1] / len(values))


# ------------------------------------------------------------------------------------------- distillation


class DistillObjective(Objective):
    """Objective for distillation: divergence from a teacher's predictions, mixed with the cross-entropy."""

    def __init__(
        self, module: ShardedModule, loader: StepLoader, stream: Stream, path: str, weight: float
    ) -> None:
        super().__init__(module, loader)
        self._stream, self._path, self._weight, self._teacher = stream, path, weight, open_teacher(path)

    def micro(self, number: int, scale: float, i: int) -> tuple[Any, HeadLoss]:
        batch, windows = self.loader.micro(number, i), cast("Windows | PackedWindows", self.loader.windows)
        positions = windows.places(self.loader.batches(number)[i])
        places = self._stream.in_data(np.where(batch.targets == UNCOUNTED, -1, positions).ravel())
        records = self._teacher.read(self._path, places)
        return as_input(batch), Distilled(
            batch.targets, scale, records, self._weight, self._teacher.temperature, self._teacher.vocab
        )


def check_teacher(path: str, corpus: Corpus, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Raise UsageError unless the teacher predicts the tokens of this data."""
    teacher = open_teacher(path)
    digest = teacher.tokenizer if tokenizer is None else fingerprint(tokenizer)  # None: token files
    run = {"data": corpus.sha256, "tokenizer": digest, "vocabulary": model.vocab_size}
    facts = {"data": teacher.data, "tokenizer": teacher.tokenizer, "vocabulary": teacher.vocab}
    for name, value in facts.items():
        if value != run[name]:
            raise UsageError(
                f"--teacher {shown(path)}: made for {name} {quoted(value)}, expected {quoted(run[name])}: "
                "run evaluate --top-k-out with the same --data"
            )
    if len(corpus.parts) > 1 or teacher.tokens != sum(corpus.tokens):
        raise UsageError(f"--teacher {shown(path)}: expected --data without shares and no --val-data")
