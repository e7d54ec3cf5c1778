"""Decides which tokens go where: token stream -> windows -> samples -> micro-batches.

A corpus is cut into non-overlapping windows of `context` tokens. Sample k of the run (counted from 0 over all
steps) is one window, a function of (seed, epoch) alone; step s holds samples s*B .. s*B + B - 1; its
micro-batch i is a fixed run of those, and rank i mod P computes it in round i div P. So the samples and the
shape of a micro-batch never depend on the number of ranks, and a resume needs only the step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zero_mpi.data.sample_order import SampleOrder
from zero_mpi.data.token_spans import TokenSpans, read_ids
from zero_mpi.errors import UsageError

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Batch:
    """Micro-batch that is computed at once: fresh C-contiguous int64 arrays (b, T)."""

    inputs: Ids
    targets: Ids  # id that each position is to predict; -1: none
    begins: Ids | None = None  # where in its row each position's document begins; None: a row is one


class WindowSource(Protocol):
    """Numbered windows of T = `context` positions, from which samples are drawn."""

    context: int
    kind: str  # description of the windows, for the error if there are none

    def __len__(self) -> int:
        """Return the number of windows."""

    def batch(self, indices: ArrayLike) -> Batch:
        """Return the windows `indices` (b,); raises IndexError for an index outside 0..len-1."""

    def counted(self, indices: ArrayLike) -> int:
        """Return the number of targets of these windows that count."""

    def about(self) -> str:
        """Return how the data fill the windows, if that needs to be said."""

    def notes(self) -> list[str]:
        """Return notes on what is left out, for the user."""


def inside(indices: ArrayLike, count: int) -> Ids:
    """Return numbers of windows as an array; raises IndexError for one outside 0..count-1."""
    wanted = np.asarray(indices, dtype=np.int64)
    if wanted.size and not 0 <= wanted.min() <= wanted.max() < count:
        raise IndexError(f"windows {wanted.min()}..{wanted.max()} of {count}")
    return wanted


class Windows:
    """Windows of T = `context` tokens over ids, 1-D or in files; window i starts at i * `stride`.

    By default the stride is T, and windows do not overlap: the last target of a window is the first input of
    the next, so every token but the first is predicted once. A stride below T lets each window but the first
    predict T - stride tokens again. Tokens after the last whole window are not used. `bos`: the first
    input of each window, before T - 1 inputs of the text, whose first token is predicted too.
    """

    def __init__(
        self,
        tokens: NDArray[np.integer] | TokenSpans,
        context: int,
        stride: int | None = None,
        bos: int | None = None,
    ) -> None:
        self.context = _at_least_one("--context", context)
        self.kind = f"window of {context + 1} tokens: use a smaller --context"
        self.stride = _at_least_one("--stride", context if stride is None else stride)
        if self.stride > context:
            raise UsageError(f"--stride {stride}: expected at most the context, {context}")
        self._bos = [] if bos is None else [bos]
        self._tokens = tokens if isinstance(tokens, TokenSpans) else np.asarray(tokens)

    def known(self, index: int) -> int:
        """Return the number of a window's targets that earlier windows have predicted."""
        return self.context - self.stride if index else 0

    def __len__(self) -> int:
        return max(len(self._tokens) + len(self._bos) - self.context - 1 + self.stride, 0) // self.stride

    def counted(self, indices: ArrayLike) -> int:
        """Return the number of targets of these windows: all count."""
        return self.context * np.size(indices)

    def about(self) -> str:
        """Return "": nothing needs to be said."""
        return ""

    def notes(self) -> list[str]:
        """Return []: there is nothing to report."""
        return []

    def batch(self, indices: ArrayLike) -> Batch:
        """Return inputs and targets of the windows `indices` (b,).

        Raises IndexError for an index outside 0..len-1.
        """
        starts = inside(indices, len(self)) * self.stride
        width = self.context + 1 - len(self._bos)  # the inputs of a window and, one place on, its targets
        rows = read_ids(self._tokens, starts, np.full_like(starts, width)).reshape(-1, width)
        if self._bos:
            rows = np.insert(rows, 0, self._bos, axis=1)
        return Batch(rows[:, :-1].astype(np.int64, order="C"), rows[:, 1:].astype(np.int64, order="C"))


def _at_least_one(flag: str, value: int) -> int:
    if value < 1:
        raise UsageError(f"{flag} must be at least 1, not {value}")
    return value


class StepLoader:
    """Training batches: B = `batch_size` samples per step, cut into M micro-batches of `micro_batch` samples.

    The last micro-batch of a step is shorter if B is no multiple. `order`: order of the samples, if windows
    are of several sources. Raises UsageError for sizes below 1 and for a corpus without a window.
    """

    def __init__(
        self,
        windows: WindowSource,
        *,
        batch_size: int,
        micro_batch: int,
        seed: int,
        order: SampleOrder | None = None,
    ) -> None:
        if not len(windows):
            raise UsageError(f"the data contains no {windows.kind}")
        self.batch_size = _at_least_one("--batch-size", batch_size)
        self.micro_batch = _at_least_one("--micro-batch", micro_batch)
        self.micro_batches = -(-batch_size // micro_batch)
        self.positions_per_step = batch_size * windows.context
        self.windows = windows
        self.order = order or SampleOrder([len(windows)], [1.0], seed)

    def counted(self, step: int) -> int:
        """Return the number of targets of a step (from 0) that count: the divisor of a mean loss."""
        return self.windows.counted(self.order.windows(step * self.batch_size + np.arange(self.batch_size)))

    def batches(self, step: int) -> list[Ids]:
        """Return the windows of each micro-batch of a step (from 0)."""
        first = step * self.batch_size
        windows = self.order.windows(np.arange(first, first + self.batch_size))
        return np.split(windows, np.arange(self.micro_batch, self.batch_size, self.micro_batch))

    def epochs(self, steps: int) -> list[float]:
        """Return how many times so many steps go through the windows of each source."""
        return self.order.epochs(steps * self.batch_size)

    def micro(self, step: int, i: int) -> Batch:
        """Return micro-batch i (0..M-1) of `step` (from 0)."""
        assert 0 <= i < self.micro_batches, f"micro-batch {i} of {self.micro_batches}"
        end = min((i + 1) * self.micro_batch, self.batch_size)
        samples = step * self.batch_size + np.arange(i * self.micro_batch, end)
        return self.windows.batch(self.order.windows(samples))


class EvalLoader:
    """Held-out batches: at most `limit` windows (None: all), evenly spread over the text and always the same.

    Without a window (nothing held out) it has no micro-batches. Raises UsageError for a micro-batch below 1.
    """

    def __init__(self, windows: WindowSource, micro_batch: int, limit: int | None = None) -> None:
        assert limit is None or limit >= 0, limit
        self.micro_batch = _at_least_one("--micro-batch", micro_batch)
        total = len(windows)
        taken = total if limit is None else min(limit, total)
        self.chosen = np.arange(taken) * total // max(taken, 1)  # numbers of windows
        self.windows = windows
        self.micro_batches = -(-taken // micro_batch)
        self.counted = windows.counted(self.chosen)  # targets: the divisor of a mean loss

    def micro(self, i: int) -> Batch:
        """Return micro-batch i, of 0..micro_batches-1."""
        assert 0 <= i < self.micro_batches, f"micro-batch {i} of {self.micro_batches}"
        return self.windows.batch(self.chosen[i * self.micro_batch : (i + 1) * self.micro_batch])

    def batches(self) -> list[Ids]:
        """Return the windows of each micro-batch."""
        return np.split(self.chosen, np.arange(self.micro_batch, self.chosen.size, self.micro_batch))


@dataclass(frozen=True)
class HeldOut:
    """Data of an evaluation: windows of each source of which some are held out, by the source's name."""

    loaders: dict[str, EvalLoader]

    def __bool__(self) -> bool:
        return any(loader.micro_batches for loader in self.loaders.values())

    def mean(self, losses: Mapping[str, float]) -> float:
        """Return the loss over all targets from each source's mean loss; for one source, its exact bits."""
        if len(losses) == 1:
            return next(iter(losses.values()))
        counts = {name: self.loaders[name].counted for name in losses}
        return sum(losses[name] * counts[name] for name in losses) / sum(counts.values())

    def batches(self) -> Iterator[Batch]:
        """Yield all micro-batches, one source after the other."""
        for loader in self.loaders.values():
            yield from map(loader.micro, range(loader.micro_batches))
