"""Assigns tokens to ranks: windows of a token stream are the samples, and samples form micro-batches.

A corpus is cut into windows of `context` tokens. Sample k of a run (counted from 0 over all steps) is one
window, which depends only on the seed and k. Step s holds samples s*B .. s*B + B - 1. Its micro-batch i is a
fixed range of these samples, and rank i mod P computes it in round i div P. So neither the samples nor the
shapes of micro-batches depend on the number of ranks, and a resume needs only the step.

An epoch contains each window once. Up to `MOST_SORTED` windows are ordered together, by sorting random
numbers. For more windows, sorting would take gigabytes on each rank and seconds at the start. Then the window
of each sample is computed separately, by a cipher on 0..windows-1: the swap-or-not shuffle (Hoang, Morris,
Rogaway, "An Enciphering Scheme Based on a Card Shuffle", 2012).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zero_mpi.data.documents import Places, Tokens, read_ids
from zero_mpi.errors import UsageError

MOST_SORTED = 1 << 20  # maximum number of windows that are sorted; this takes 16 MiB and a tenth of a second
ROUNDS = 64  # rounds of the cipher; each one halves the deviation from a random order
DEALT = 1 << 12  # samples that are assigned to sources together
BLOCK = 1 << 12  # samples whose windows are computed together; this takes little longer than for one sample
_EPOCH_STREAM, _SOURCE_STREAM = 0x65706F63, 0x736F7572  # parts of keys, so that draws differ


def draws(count: int, *key: int) -> NDArray[np.uint64]:
    """Return 64-bit random numbers (count,) that depend only on `key` (integers >= 0), in all NumPy versions.

    NumPy guarantees the raw output of a bit generator, but may change `Generator.permutation` in any
    release (NEP 19).
    """
    return np.asarray(np.random.PCG64(np.random.SeedSequence(key)).random_raw(count), np.uint64)


def permutation(count: int, *key: int) -> Places:
    """Return a permutation of 0..count-1 that depends only on `key`, made by sorting random numbers."""
    return np.argsort(draws(count, *key), kind="stable").astype(np.int64, copy=False)


def shuffled(places: Places, count: int, *key: int) -> Places:
    """Return the values at `places` (n,) of a permutation of 0..count-1 drawn from `key`, without storing it.

    In each round every number has a partner. A random bit, equal for both, decides whether they swap places.
    """
    numbers = places.astype(np.uint64)
    total = np.uint64(count)
    partners, bits = draws(2 * ROUNDS, *key).reshape(2, ROUNDS)
    for partner, bit in zip(partners % total, bits, strict=True):
        mirror = (partner + total - numbers) % total
        numbers = np.where(_mix(np.maximum(numbers, mirror) ^ bit) >> np.uint64(63), mirror, numbers)
    return numbers.astype(np.int64)


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix numbers: every result bit depends on all bits of the input (Steele et al., SplitMix, 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))


@lru_cache(maxsize=16)  # enough for several sources and a step that spans two epochs
def _block(windows: int, block: int, *key: int) -> Places:
    """Return the windows of one block of an epoch's samples. An epoch that is sorted is a single block."""
    if windows <= MOST_SORTED:
        order = permutation(windows, *key)
    else:
        order = shuffled(np.arange(block * BLOCK, min((block + 1) * BLOCK, windows)), windows, *key)
    order.flags.writeable = False
    return order


def window_of(samples: ArrayLike, windows: int, *key: int) -> Places:
    """Return the window (0..windows-1) of each sample number. An epoch contains each window exactly once.

    key   the seed, and further numbers that determine the order
    """
    epochs, places = np.divmod(np.asarray(samples, np.int64), windows)
    blocks, offsets = np.divmod(places, max(windows, 1) if windows <= MOST_SORTED else BLOCK)
    order = np.empty_like(places)
    # np.unique would import numpy.ma, which makes the start 30 ms slower.
    for epoch, block in sorted(set(zip(epochs.ravel().tolist(), blocks.ravel().tolist(), strict=True))):
        mask = (epochs == epoch) & (blocks == block)
        order[mask] = _block(windows, block, *key, _EPOCH_STREAM, epoch)[offsets[mask]]
    return order


class SampleOrder:
    """Order in which the windows of one or several sources become samples.

    Each source has a share of the samples and epochs of its own. Samples are assigned to sources in blocks of
    `DEALT`. After each block, the number of a source's samples differs from its share by at most one.

    counts   number of windows of each source; window numbers continue from one source to the next
    shares   each source's share of all samples; their sum is 1
    """

    def __init__(self, counts: Sequence[int], shares: Sequence[float], seed: int) -> None:
        self._counts, self._seed = tuple(counts), seed
        self._bounds = 0.0, *(np.cumsum(shares)[:-1] / sum(shares)).tolist()
        self._first = np.append(0, np.cumsum(counts)[:-1])

    @property
    def epoch(self) -> int:
        """Smallest number of samples of which every source's share covers all its windows."""
        shares: list[float] = np.diff(np.append(self._bounds, 1.0)).tolist()
        pairs = zip(self._counts, shares, strict=True)
        return max(math.ceil(count / share * (1 - 1e-9)) for count, share in pairs)  # shares are rounded

    def windows(self, samples: Places) -> Places:
        """Return the windows (n,) of `samples` (n,); windows are numbered over all sources."""
        sources, numbers = self.places(samples)
        windows = np.empty_like(samples)
        for source, count in enumerate(self._counts):
            mask = sources == source
            if mask.any():
                key = (self._seed, _SOURCE_STREAM, source) if source else (self._seed,)
                windows[mask] = self._first[source] + window_of(numbers[mask], count, *key)
        return windows

    def places(self, samples: Places) -> tuple[Places, Places]:
        """Return the source (n,) of each sample, and the sample's number (n,) within that source, from 0."""
        if len(self._counts) == 1:
            return np.zeros_like(samples), samples
        sources, numbers = np.empty_like(samples), np.empty_like(samples)
        blocks, offsets = np.divmod(samples, DEALT)
        for block in sorted(set(blocks.tolist())):
            mask = blocks == block
            dealt = _assignment(block, self._bounds, self._seed)
            sources[mask], numbers[mask] = dealt[0][offsets[mask]], dealt[1][offsets[mask]]
        return sources, numbers

    def epochs(self, samples: int) -> list[float]:
        """Return, for each source, how many of its epochs the first `samples` samples contain."""
        blocks = samples // DEALT
        rest = self.places(np.arange(blocks * DEALT, samples))[0]
        begun = _samples_before(blocks, self._bounds) + np.bincount(rest, minlength=len(self._counts))
        return [int(number) / count for number, count in zip(begun, self._counts, strict=True)]


def _samples_before(block: int, bounds: tuple[float, ...]) -> Places:
    """Return how many samples before `block` each source has, by rounding the cumulative shares."""
    total = block * DEALT
    return np.diff(np.append(np.floor(np.array(bounds) * total + 0.5), total)).astype(np.int64)


@lru_cache(maxsize=4)
def _assignment(block: int, bounds: tuple[float, ...], seed: int) -> tuple[Places, Places]:
    """Return the source of each sample in a block, and its number among the samples of that source."""
    begun = _samples_before(block, bounds)
    quotas = _samples_before(block + 1, bounds) - begun
    sources, numbers = np.empty(DEALT, np.int64), np.empty(DEALT, np.int64)
    sources[permutation(DEALT, seed, _SOURCE_STREAM, 0, block)] = np.repeat(np.arange(len(quotas)), quotas)
    for source, (first, count) in enumerate(zip(begun.tolist(), quotas.tolist(), strict=True)):
        numbers[sources == source] = first + np.arange(count)
    return sources, numbers


@dataclass(frozen=True, eq=False)
class Batch:
    """Micro-batch: newly allocated C-contiguous int64 arrays (b, T)."""

    inputs: Places
    targets: Places  # id that each position must predict; -1: no target
    begins: Places | None = None  # column in which each position's document begins; None: always 0


class WindowSource(Protocol):
    """Interface of a set of numbered windows with T = `context` positions. Each sample is one window."""

    context: int
    kind: str  # name of a window, and a remedy, for the error if there is no window

    def __len__(self) -> int:
        """Return the number of windows."""

    def batch(self, indices: ArrayLike) -> Batch:
        """Return the windows `indices` (b,). Raise IndexError for an index outside 0..len-1."""

    def counted(self, indices: ArrayLike) -> int:
        """Return the number of targets of these windows that the loss counts."""

    def about(self) -> str:
        """Return a sentence on how documents fill the windows; "" if they are not packed."""
        return ""

    def notes(self) -> list[str]:
        """Return notes for the user on data that is not used."""
        return []


def inside(indices: ArrayLike, count: int) -> Places:
    """Return window numbers as an array. Raise IndexError for a number outside 0..count-1."""
    numbers = np.asarray(indices, dtype=np.int64)
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < count:
        raise IndexError(f"windows {numbers.min()}..{numbers.max()} of {count}")
    return numbers


class Windows(WindowSource):
    """Windows of T = `context` tokens of a sequence of ids. Window i starts at index i * `stride`.

    By default, the stride is T and windows do not overlap: the last target of a window is the first input of
    the next window, so every token except the first is predicted once. With a stride below T, each later
    window predicts T - stride tokens again. Tokens after the last full window are not used. `bos`: the first
    input of each window, before T - 1 inputs of the text; then the text's first token is predicted too.
    """

    def __init__(
        self, tokens: Tokens, context: int, stride: int | None = None, bos: int | None = None
    ) -> None:
        self.context = context
        self.kind = f"window of {context + 1} tokens: use a smaller --context"
        self.stride = context if stride is None else stride
        if self.stride > context:
            raise UsageError(f"--stride {stride}: expected at most the context, {context}")
        self._bos = [] if bos is None else [bos]
        self._tokens = tokens

    def overlap(self, index: int) -> int:
        """Return how many targets of a window are also targets of earlier windows."""
        return self.context - self.stride if index else 0

    def __len__(self) -> int:
        return max(len(self._tokens) + len(self._bos) - self.context - 1 + self.stride, 0) // self.stride

    def counted(self, indices: ArrayLike) -> int:
        return self.context * np.size(indices)

    def places(self, indices: ArrayLike) -> Places:
        """Return the index in the text of each target of the windows `indices`, (b, T)."""
        starts = inside(indices, len(self)) * self.stride
        return starts[:, None] + np.arange(1, self.context + 1) - len(self._bos)

    def batch(self, indices: ArrayLike) -> Batch:
        starts = inside(indices, len(self)) * self.stride
        width = self.context + 1 - len(self._bos)  # a window's inputs, and one more id for the last target
        rows = read_ids(self._tokens, starts, np.full_like(starts, width)).reshape(-1, width)
        if self._bos:
            rows = np.insert(rows, 0, self._bos, axis=1)
        return Batch(rows[:, :-1].astype(np.int64, order="C"), rows[:, 1:].astype(np.int64, order="C"))


class MixedWindows(WindowSource):
    """The windows of several sources with the same context, under consecutive numbers."""

    kind = "window"

    def __init__(self, parts: Sequence[WindowSource]) -> None:
        self.parts, self.context = parts, parts[0].context
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _by_part(self, indices: ArrayLike) -> Iterator[tuple[WindowSource, Places, Places]]:
        """Yield (part, rows in the batch, window numbers in the part) for each part that has any rows."""
        windows = inside(indices, len(self))
        sources = np.searchsorted(self._ends, windows, "right")
        for number, part in enumerate(self.parts):
            rows = np.flatnonzero(sources == number)
            if rows.size:
                yield part, rows, windows[rows] - (self._ends[number] - len(part))

    def counted(self, indices: ArrayLike) -> int:
        return sum(part.counted(numbers) for part, _, numbers in self._by_part(indices))

    def batch(self, indices: ArrayLike) -> Batch:
        """Return the windows `indices` (b,). If only some parts have `begins`, rows of the others get 0."""
        cut = [(rows, part.batch(numbers)) for part, rows, numbers in self._by_part(indices)]
        if len(cut) == 1:
            return cut[0][1]
        shape = (np.size(indices), self.context)
        inputs, targets = np.empty(shape, np.int64), np.empty(shape, np.int64)
        packed = any(batch.begins is not None for _, batch in cut)
        begins = np.zeros(shape, np.int64) if packed else None
        for rows, batch in cut:
            inputs[rows], targets[rows] = batch.inputs, batch.targets
            if begins is not None and batch.begins is not None:
                begins[rows] = batch.begins
        return Batch(inputs, targets, begins)

    def about(self) -> str:
        return "; ".join(filter(None, (part.about() for part in self.parts)))

    def notes(self) -> list[str]:
        return [note for part in self.parts for note in part.notes()]


class StepLoader:
    """Training batches of B = `batch_size` samples per step, in M micro-batches of `micro_batch` samples.

    The last micro-batch of a step may be smaller. `order`: order of the samples if there are several sources.
    Raises UsageError if the corpus has no window.
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
        self.batch_size, self.micro_batch = batch_size, micro_batch
        self.micro_batches = -(-batch_size // micro_batch)
        self.positions_per_step = batch_size * windows.context
        self.windows = windows
        self.order = order or SampleOrder([len(windows)], [1.0], seed)

    def counted(self, step: int) -> int:
        """Return the number of targets in a step (from 0) that count; it divides the step's summed loss."""
        return self.windows.counted(np.concatenate(self.batches(step)))

    def batches(self, step: int) -> list[Places]:
        """Return the windows of each micro-batch of a step (from 0)."""
        windows = self.order.windows(step * self.batch_size + np.arange(self.batch_size))
        return np.split(windows, np.arange(self.micro_batch, self.batch_size, self.micro_batch))

    def epochs(self, steps: int) -> list[float]:
        """Return, for each source, how many of its epochs the first `steps` steps contain."""
        return self.order.epochs(steps * self.batch_size)

    def micro(self, step: int, i: int) -> Batch:
        """Return micro-batch i (0..M-1) of `step` (from 0)."""
        assert 0 <= i < self.micro_batches, f"micro-batch {i} of {self.micro_batches}"
        end = min((i + 1) * self.micro_batch, self.batch_size)
        samples = step * self.batch_size + np.arange(i * self.micro_batch, end)
        return self.windows.batch(self.order.windows(samples))


class EvalLoader:
    """Validation batches: at most `limit` windows (None: all), evenly spaced in the text, always the same.

    If nothing is held out, there are no windows and no micro-batches.
    """

    def __init__(self, windows: WindowSource, micro_batch: int, limit: int | None = None) -> None:
        self.micro_batch, total = micro_batch, len(windows)
        count = total if limit is None else min(limit, total)
        self.indices = np.arange(count) * total // max(count, 1)  # numbers of the selected windows
        self.windows = windows
        self.micro_batches = -(-count // micro_batch)
        self.counted = windows.counted(self.indices)  # number of targets that count; divides the summed loss

    def micro(self, i: int) -> Batch:
        assert 0 <= i < self.micro_batches, f"micro-batch {i} of {self.micro_batches}"
        return self.windows.batch(self.indices[i * self.micro_batch : (i + 1) * self.micro_batch])

    def batches(self) -> list[Places]:
        return np.split(self.indices, np.arange(self.micro_batch, self.indices.size, self.micro_batch))


@dataclass(frozen=True)
class HeldOut:
    """Data of an evaluation: source name -> its held-out windows, without sources that hold out nothing."""

    loaders: dict[str, EvalLoader]

    def __bool__(self) -> bool:
        return any(loader.micro_batches for loader in self.loaders.values())

    def mean(self, losses: Mapping[str, float]) -> float:
        """Return the mean loss over all targets, given the mean of each source."""
        if len(losses) == 1:
            return next(iter(losses.values()))
        counts = {name: self.loaders[name].counted for name in losses}
        return sum(losses[name] * counts[name] for name in losses) / sum(counts.values())

    def batches(self) -> Iterator[Batch]:
        for loader in self.loaders.values():
            yield from map(loader.micro, range(loader.micro_batches))
