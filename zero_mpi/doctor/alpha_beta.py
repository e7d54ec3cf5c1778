"""Latency and bandwidth from times by size: seconds = alpha * messages + beta * bytes.

The usual model of a message (R. W. Hockney, The communication challenge for MPP, Parallel Computing 20,
1994); a collective is some messages one after the other, so that what is told holds for other numbers of
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A time: how many messages in turn, how many bytes in all, seconds."""

    messages: float
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class Line:
    """alpha: seconds of a message; beta: seconds of a byte. Neither is negative."""

    alpha: float
    beta: float

    def keys(self) -> dict[str, float]:
        """As it stands in the JSON file."""
        return {"alpha_seconds": self.alpha, "beta_seconds_per_byte": self.beta}


def fit(points: Sequence[Point]) -> Line:
    """The line with the least squares of relative errors, so that short calls count as much as long ones.

    Where the best one would be negative in one of the two, that one is 0 and the other the best without it.
    """
    rows = [(point.messages / point.seconds, point.nbytes / point.seconds) for point in points]
    mm, mn, nn = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    m, n = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = mm * nn - mn**2
    if determinant <= 1e-12 * mm * nn:  # all of one size
        return Line(m / mm, 0.0)
    alpha, beta = (m * nn - n * mn) / determinant, (n * mm - m * mn) / determinant
    if alpha < 0:
        return Line(0.0, n / nn)
    return Line(alpha, beta) if beta >= 0 else Line(m / mm, 0.0)
