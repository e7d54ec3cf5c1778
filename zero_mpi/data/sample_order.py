"""Order in which windows are dealt out: sample k of a run is one window, set by the seed and k alone.

So a resume needs only k, and any rank computes its own samples. If there are several sources, each
has a share of the samples and epochs of its own: samples are dealt out in blocks of `DEALT`, and no source
ever deviates by more than one sample from its share of all blocks.

An epoch has each window once. Up to `MOST_SORTED` windows its order is made at once, by sorting random
numbers. Beyond that this would take gigabytes on each rank, and seconds at the start, so the place of each
sample is computed separately, by a cipher on the numbers 0..windows-1: the swap-or-not shuffle (Hoang,
Morris, Rogaway, "An Enciphering Scheme Based on a Card Shuffle", 2012).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import overload

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]

MOST_SORTED = 1 << 20  # windows; sorting them takes 16 MiB and a tenth of a second
ROUNDS = 64  # rounds of the shuffle: each halves the remaining order
DEALT = 1 << 12  # samples that are dealt out to sources together
BLOCK = 1 << 12  # samples whose windows are computed together: many cost little more than one
_EPOCH_STREAM, _SOURCE_STREAM = 0x65706F63, 0x736F7572  # keep draws apart from other uses of the user's seed


def draws(count: int, *key: int) -> NDArray[np.uint64]:
    """Return random numbers (count,) of 64 bits drawn from `key` (integers >= 0), the same with every NumPy.

    NumPy keeps the raw stream of a bit generator unchanged for good, but may change `Generator.permutation`
    from release to release (NEP 19).
    """
    return np.asarray(np.random.PCG64(np.random.SeedSequence(key)).random_raw(count), np.uint64)


def permutation(count: int, *key: int) -> Places:
    """Return a permutation of 0..count-1 drawn from `key`, made by sorting draws."""
    return np.argsort(draws(count, *key), kind="stable").astype(np.int64, copy=False)


def shuffled(places: Places, count: int, *key: int) -> Places:
    """Return where each of `places` (n,) goes in a permutation of 0..count-1 drawn from `key`, never built.

    In each round every number has a partner, and one bit that both share says whether they swap.
    """
    found = places.astype(np.uint64)
    total = np.uint64(count)
    partners, bits = draws(2 * ROUNDS, *key).reshape(2, ROUNDS)
    for partner, bit in zip(partners % total, bits, strict=True):
        other = (partner + total - found) % total
        found = np.where(mixed(np.maximum(found, other) ^ bit) >> np.uint64(63), other, found)
    return found.astype(np.int64)


def mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix numbers: every result bit depends on all bits of its input (Steele et al., SplitMix, 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))


@lru_cache(maxsize=16)  # entries for several sources; a step may end one epoch and begin the next
def _block(windows: int, block: int, *key: int) -> Places:
    """Return the windows of a block of an epoch's samples; an epoch that can be sorted is one block."""
    if windows <= MOST_SORTED:
        order = permutation(windows, *key)
    else:
        order = shuffled(np.arange(block * BLOCK, min((block + 1) * BLOCK, windows)), windows, *key)
    order.flags.writeable = False
    return order


def _in_epoch(places: Places, windows: int, *key: int) -> Places:
    """Return the windows at places (n,) of an epoch's order."""
    size = max(windows, 1) if windows <= MOST_SORTED else BLOCK
    blocks, within = np.divmod(places, size)
    found = np.empty_like(places)
    for block in sorted(set(blocks.tolist())):  # np.unique would import numpy.ma, 30 ms of a start
        here = blocks == block
        found[here] = _block(windows, block, *key)[within[here]]
    return found


@overload
def window_of(sample: int, windows: int, *key: int) -> int: ...
@overload
def window_of(sample: Places, windows: int, *key: int) -> Places: ...
def window_of(sample: int | Places, windows: int, *key: int) -> int | Places:
    """Return the window (0..windows-1) of each sample number; every epoch has each window once.

    key   the seed, and whatever else the order is drawn from
    """
    epochs, places = np.divmod(np.asarray(sample, dtype=np.int64), windows)
    found = np.empty_like(places)
    for epoch in sorted(set(epochs.ravel().tolist())):
        here = epochs == epoch
        found[here] = _in_epoch(places[here], windows, *key, _EPOCH_STREAM, epoch)
    return found if isinstance(sample, np.ndarray) else int(found)


class SampleOrder:
    """Order in which the windows of one or several sources are dealt out.

    counts   number of windows of each source; window numbers continue from one source to the next
    shares   each source's share of all samples; their sum is 1
    """

    def __init__(self, counts: Sequence[int], shares: Sequence[float], seed: int) -> None:
        self._counts, self._seed = tuple(counts), seed
        self._bounds = np.append(0.0, np.cumsum(shares)[:-1] / sum(shares))
        self._first = np.append(0, np.cumsum(counts)[:-1])

    @property
    def epoch(self) -> int:
        """Number of samples that go through the windows of each source at least once."""
        shares: list[float] = np.diff(np.append(self._bounds, 1.0)).tolist()
        return max(math.ceil(count / share) for count, share in zip(self._counts, shares, strict=True))

    def windows(self, samples: Places) -> Places:
        """Return the windows (n,) of samples (n,), numbered among those of all sources."""
        sources, numbers = self.places(samples)
        found = np.empty_like(samples)
        for source, count in enumerate(self._counts):
            here = sources == source
            if here.any():
                key = (self._seed, _SOURCE_STREAM, source) if source else (self._seed,)
                found[here] = self._first[source] + window_of(numbers[here], count, *key)
        return found

    def places(self, samples: Places) -> tuple[Places, Places]:
        """Return (source, number among the samples of that source) of each sample (n,), from 0."""
        if len(self._counts) == 1:
            return np.zeros_like(samples), samples
        sources, numbers = np.empty_like(samples), np.empty_like(samples)
        blocks, within = np.divmod(samples, DEALT)
        for block in sorted(set(blocks.tolist())):
            here = blocks == block
            dealt = _dealt(block, tuple(self._bounds.tolist()), self._seed)
            sources[here], numbers[here] = dealt[0][within[here]], dealt[1][within[here]]
        return sources, numbers

    def epochs(self, samples: int) -> list[float]:
        """Return how many times the first `samples` go through the windows of each source."""
        whole = samples // DEALT
        rest = self.places(np.arange(whole * DEALT, samples))[0]
        return [
            (int(begun) + int((rest == source).sum())) / count
            for source, (begun, count) in enumerate(
                zip(_begun(whole, self._bounds), self._counts, strict=True)
            )
        ]


def _begun(block: int, bounds: Places) -> Places:
    """Return each source's number of samples in the blocks before `block`; rounded bounds make all add up."""
    total = block * DEALT
    return np.diff(np.append(np.floor(bounds * total + 0.5), total)).astype(np.int64)


@lru_cache(maxsize=4)
def _dealt(block: int, bounds: tuple[float, ...], seed: int) -> tuple[Places, Places]:
    """Return the source of each sample of a block, and its number among all samples of that source."""
    begun = _begun(block, np.array(bounds))
    quotas = _begun(block + 1, np.array(bounds)) - begun
    sources = np.empty(DEALT, np.int64)
    sources[permutation(DEALT, seed, _SOURCE_STREAM, 0, block)] = np.repeat(np.arange(len(quotas)), quotas)
    numbers = np.empty(DEALT, np.int64)
    for source, first in enumerate(begun.tolist()):
        here = sources == source
        numbers[here] = first + np.arange(int(here.sum()))
    return sources, numbers
