"""Objective of preferred answers: sums of log-probabilities of a step, beside those of the reference.

The sums of all sequences of a step are one vector, in the order of the data: a rank fills the places of its
micro-batches, and the sum over ranks is the same at any number of them. All figures are computed from it. The
reference is the model as the run begins: without its adapters if these start at zero, else its sums are
computed once, for all data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data import EvalLoader, HeldOut, StepLoader
from zero_mpi.data.packing import PairBatch, PairWindows, mismatched
from zero_mpi.device.types import Array
from zero_mpi.nn.loss import HeadLoss, Segment, SequenceLoss
from zero_mpi.nn.preference import Preference, log_odds, log_sigmoid
from zero_mpi.sharding import ShardedModule
from zero_mpi.sharding.evaluation import dealt_out
from zero_mpi.train.objective import Figures, Objective, StepLoss, as_input

Floats = NDArray[np.float64]
EVERYTHING = slice(None)


class PairStep(StepLoss):
    """Pairs of a step or of an evaluation, whose micro-batches are given as their windows.

    Sums are (S, K): of the answer of each sequence, and for ORPO of all other tokens of it.
    reference   (S,) sums of the answers under the reference; zeros for none
    kl          KTO's estimate of the divergence from the reference
    """

    def __init__(self, preference: Preference, windows: PairWindows, batches: Sequence[Array]) -> None:
        self.preference, self.windows, self.batches = preference, windows, batches
        found = [windows.sequences(each) for each in batches]
        ends = np.cumsum([len(numbers) for numbers, *_ in found]).tolist()
        self.places = list(map(slice, [0, *ends], ends))  # of each micro-batch's sequences
        self.numbers, self.counts, sizes = (np.concatenate(each) for each in zip(*found, strict=True))
        self.is_better, count = self.numbers % 2 == 0, self.numbers.size
        self.terms = count if preference.is_unpaired else count // 2
        self.positions = int(sizes[self.is_better].sum())
        self.reference, self.kl, self._sums = np.zeros(count), 0.0, self.nothing()

    def nothing(self) -> Floats:
        """Return sums of zero."""
        return np.zeros((self.numbers.size, 1 + self.preference.learns_prompts))

    def micro(self, i: int) -> tuple[Any, HeadLoss]:
        pairs = self.windows.pairs(self.batches[i])
        return as_input(pairs.batch), SequenceLoss(self.segments(pairs), partial(self._learn, self.places[i]))

    def segments(self, pairs: PairBatch) -> list[Segment]:
        """Return the segments of a micro-batch's sequences, one sequence after the other."""
        kinds = [pairs.batch.targets, *[pairs.rest] * self.preference.learns_prompts]
        return [Segment(row, span, targets) for row, span in pairs.spans for targets in kinds]

    @property
    def sums(self) -> Sequence[float]:
        return self._sums.ravel().tolist()

    def _learn(self, here: slice, sums: Sequence[float]) -> tuple[float, Sequence[float]]:
        self._sums[here] = np.reshape(sums, (-1, self._sums.shape[1]))
        return self.loss(here, self._sums[here])

    def loss(self, here: slice, sums: Floats) -> tuple[float, Sequence[float]]:
        """Return the part of sequences in the loss of the step, and its derivative by each segment."""
        ratios, counts = sums[:, 0] - self.reference[here], self.counts[here]
        scored = self.preference.score(self.numbers[here].tolist(), ratios.tolist(), counts.tolist(), self.kl)
        loss, slopes, better = sum(scored.terms) / self.terms, np.zeros_like(sums), self.is_better[here]
        slopes[:, 0] = np.array(scored.slopes) / self.terms
        if self.preference.learns_prompts:
            loss -= sum(sums[better].ravel().tolist()) / self.positions
            slopes[better] -= 1 / self.positions
        return loss, slopes.ravel().tolist()

    def figures(self, sums: Sequence[float]) -> Figures:
        """Return rewards and log-probabilities, by the names that people know from TRL."""
        table, by_token = np.reshape(sums, self._sums.shape), not self.preference.has_reference
        answers = table[:, 0] / self.counts if by_token else table[:, 0]
        rewards, found = self.preference.beta * (answers - self.reference), Figures()
        for kind, values in (("rewards", rewards), ("logps", answers)):
            for name, side in (("chosen", self.is_better), ("rejected", ~self.is_better)):
                if side.any():
                    found[f"{kind}/{name}"] = mean(values[side])
        if np.array_equal(self.numbers[::2] + 1, self.numbers[1::2]):  # no sequence is alone
            found["rewards/accuracies"] = mean(rewards[::2] > rewards[1::2])
            found["rewards/margins"] = mean(rewards[::2] - rewards[1::2])
        if self.preference.is_unpaired:
            found["kl"] = self.kl
        if self.preference.learns_prompts and np.isfinite(table).all():
            odds = list(map(log_odds, answers[::2].tolist(), answers[1::2].tolist()))
            found["nll_loss"] = -float(np.cumsum(table[self.is_better])[-1]) / self.positions
            found["log_odds_ratio"] = mean(list(map(log_sigmoid, odds)))
            found["log_odds_chosen"] = mean(odds)
        return found


class PreferenceObjective(Objective):
    """A preference loss. adapted: the reference is the model without its adapters."""

    def __init__(
        self, module: ShardedModule, loader: StepLoader, data: HeldOut, preference: Preference, adapted: bool
    ) -> None:
        super().__init__(module, loader)
        self.preference, self.keeps = preference, preference.has_reference and not adapted
        self._windows = cast(PairWindows, loader.windows)
        self._data = [self._windows, *(cast(PairWindows, each.windows) for each in data.loaders.values())]
        self._reads = (as_it_is, mismatched) if preference.is_unpaired else (as_it_is,)
        self._kept: dict[int, Floats] = {}  # by windows: sums (kinds, sides)

    def keep(self) -> Floats:
        found = list[Floats]()
        for windows in self._data:
            cuts = np.arange(self.loader.micro_batch, len(windows), self.loader.micro_batch)
            step = PairStep(self.preference, windows, np.split(np.arange(len(windows)), cuts))
            for read in self._reads:
                found.append(np.zeros(windows.sides))
                found[-1][step.numbers] = self._measured(step, read)[:, 0]
        return np.concatenate(found)

    def use(self, kept: Floats) -> None:
        for windows in self._data:
            size = len(self._reads) * windows.sides
            self._kept[id(windows)], kept = kept[:size].reshape(-1, windows.sides), kept[size:]

    def step(self, number: int) -> StepLoss:
        return self._with_reference(self._windows, self.loader.batches(number))

    def held_out(self, loader: EvalLoader) -> tuple[float, Figures]:
        step = self._with_reference(cast(PairWindows, loader.windows), loader.batches())
        sums = self._measured(step, as_it_is)
        return step.loss(EVERYTHING, sums)[0], step.figures(sums.ravel().tolist())

    def _with_reference(self, windows: PairWindows, batches: Sequence[Array]) -> PairStep:
        """Return the pairs of micro-batches with all that their losses depend on. Collective."""
        step, kept = PairStep(self.preference, windows, batches), self._kept.get(id(windows))
        if self.preference.has_reference:
            before = [
                self._measured(step, read, False)[:, 0] if kept is None else kept[place, step.numbers]
                for place, read in enumerate(self._reads)
            ]
            step.reference = before[0]
            if self.preference.is_unpaired:
                step.kl = max(0.0, mean(self._measured(step, mismatched)[:, 0] - before[1]))
        return step

    def _measured(
        self, step: PairStep, read: Callable[[PairBatch], PairBatch], adapted: bool = True
    ) -> Floats:
        """Return the sums of log-probabilities (S, K) of a step, on all ranks. Collective."""
        sums = step.nothing()

        def compute(i: int, losses: Array) -> None:
            self.module.comm.meter.beat()
            pairs, first = read(step.windows.pairs(step.batches[i])), step.places[i].start * sums.shape[1]
            loss = SequenceLoss(step.segments(pairs))
            found = self.module.losses(as_input(pairs.batch), loss, adapted=adapted)
            for place, value in enumerate(found, first):
                losses[place] = value

        found: Floats = -dealt_out(self.module, len(step.batches), sums.size, compute)
        return found.reshape(sums.shape)


def as_it_is(pairs: PairBatch) -> PairBatch:
    """Return a micro-batch."""
    return pairs


def mean(values: Any) -> float:
    """Return the mean of numbers, summed from first to last."""
    return float(np.cumsum(values, dtype=np.float64)[-1] / len(values))
