"""Latency and bandwidth from times by size: seconds = alpha * messages + beta * bytes.

The usual model of a message (R. W. Hockney, The communication challenge for MPP, Parallel Computing 20,
1994); a collective is some messages one after the other, so that what is told holds for other numbers of
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_mpi.plan.machine import Link


@dataclass(frozen=True)
class Measurement:
    """A time: how many messages in turn, how many bytes in all, seconds."""

    messages: float
    nbytes: float
    seconds: float


def keys(link: Link) -> dict[str, float]:
    """A link as it stands in the JSON file."""
    return {"alpha_seconds": link.alpha, "beta_seconds_per_byte": link.beta}


def fit(points: Sequence[Measurement]) -> Link:
    """The line with the least squares of relative errors, so that short calls count as much as long ones.

    Where the best one would be negative in one of the two, that one is 0 and the other the best without it.
    """
    rows = [(point.messages / point.seconds, point.nbytes / point.seconds) for point in points]
    mm, mn, nn = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    m, n = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = mm * nn - mn**2
    if determinant <= 1e-12 * mm * nn:  # all of one size
        return Link(m / mm, 0.0)
    alpha, beta = (m * nn - n * mn) / determinant, (n * mm - m * mn) / determinant
    if alpha < 0:
        return Link(0.0, n / nn)
    return Link(alpha, beta) if beta >= 0 else Link(m / mm, 0.0)
