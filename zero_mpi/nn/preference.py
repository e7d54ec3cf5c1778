"""Losses for preferred answers: functions of the summed log-probabilities of sequences.

C and R are the summed log-probabilities of a better and a worse answer, minus those under the reference model
if the loss uses one; nc and nr are the numbers of their tokens. All computation is in float64 on the host.
Loss names are TRL's. DPO: Rafailov et al. 2023; IPO: Azar et al. 2023, on averages over tokens as in TRL;
SimPO: Meng et al. 2024; ORPO: Hong et al. 2024, without its cross-entropy; KTO: Ethayarajh et al. 2024.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zero_mpi.ops.elementary import log, power

MOST_AVERAGE = -1e-7  # upper bound of averages in ORPO, which divides by 1 - e^c (0 at probability 1)
Pair = tuple[float, float, float]  # the loss, and its derivatives with respect to C and R


class Scored(NamedTuple):
    """Terms of a loss, and its derivatives with respect to each sequence's summed log-probability."""

    terms: list[float]
    slopes: list[float]


@dataclass(frozen=True)
class Preference:
    """Preference loss `name` with its constants."""

    name: str
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    @property
    def has_reference(self) -> bool:
        """True if sums are compared with a reference model's; otherwise averages over tokens are used."""
        return self.name in ("dpo", "ipo", "kto")

    @property
    def learns_prompts(self) -> bool:
        """True if the loss includes the cross-entropy of the better answer with its prompt."""
        return self.name == "orpo"

    @property
    def is_unpaired(self) -> bool:
        """True if each answer is a separate term, compared with the answers to other prompts."""
        return self.name == "kto"

    def score(
        self, numbers: Sequence[int], sums: Sequence[float], counts: Sequence[int], kl: float = 0.0
    ) -> Scored:
        """Return the loss terms and slopes. Better answers have even `numbers`, worse answers odd ones."""
        if not all(map(math.isfinite, sums)):
            return Scored([math.nan], [math.nan] * len(sums))
        results: list[tuple[float, ...]]  # a term, and its derivatives with respect to its sums
        if self.is_unpaired:
            results = [self._kto(number, ratio, kl) for number, ratio in zip(numbers, sums, strict=True)]
        else:
            pairs = zip(sums[::2], sums[1::2], map(float, counts[::2]), map(float, counts[1::2]), strict=True)
            results = [PAIRWISE[self.name](self, *pair) for pair in pairs]
        return Scored([term for term, *_ in results], [slope for _, *slopes in results for slope in slopes])

    def _kto(self, number: int, ratio: float, kl: float) -> tuple[float, float]:
        weight, sign = (self.undesirable_weight, -1) if number % 2 else (self.desirable_weight, 1)
        share = sigmoid(sign * self.beta * (ratio - kl))
        return weight * (1 - share), -sign * weight * self.beta * share * (1 - share)


def dpo(self: Preference, C: float, R: float, nc: float, nr: float) -> Pair:
    d, smoothing = self.beta * (C - R), self.label_smoothing
    slope = -self.beta * (sigmoid(-d) - smoothing)
    return -(1 - smoothing) * log_sigmoid(d) - smoothing * log_sigmoid(-d), slope, -slope


def ipo(self: Preference, C: float, R: float, nc: float, nr: float) -> Pair:
    margin = C / nc - R / nr - 1 / (2 * self.beta)
    return margin * margin, 2 * margin / nc, -2 * margin / nr


def simpo(self: Preference, C: float, R: float, nc: float, nr: float) -> Pair:
    z = self.beta * (C / nc - R / nr) - self.simpo_gamma
    slope = -self.beta * sigmoid(-z)
    return -log_sigmoid(z), slope / nc, -slope / nr


def orpo(self: Preference, C: float, R: float, nc: float, nr: float) -> Pair:
    """Return ORPO's odds-ratio loss and its derivatives, without the cross-entropy."""
    c, r = min(C / nc, MOST_AVERAGE), min(R / nr, MOST_AVERAGE)
    odds = log_odds(c, r)
    slope = -self.beta * sigmoid(-odds)
    return -self.beta * log_sigmoid(odds), slope / (1 - exp(c)) / nc, -slope / (1 - exp(r)) / nr


PAIRWISE: dict[str, Callable[..., Pair]] = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo}
PREFERENCES = (*PAIRWISE, "kto")


def exp(x: float) -> float:
    """Return e^x for x <= 0."""
    return float(power(math.e, x))


def sigmoid(x: float) -> float:
    small = exp(-abs(x))
    return (1 if x >= 0 else small) / (1 + small)


def log_sigmoid(x: float) -> float:
    return min(x, 0.0) - log(1 + exp(-abs(x)))


def log_odds(c: float, r: float) -> float:
    """Return the log odds ratio of two answers, given the average log-probability of their tokens."""
    c, r = min(c, MOST_AVERAGE), min(r, MOST_AVERAGE)
    return c - r - log(1 - exp(c)) + log(1 - exp(r))
