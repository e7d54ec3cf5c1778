"""In which order windows are dealt out: sample k of a run is one window, by the seed and k alone.

So a resume needs to know nothing but k, and any rank works out its own. Where there are several sources, each
has a share of the samples and epochs of its own: samples are dealt out in blocks of `DEALT`, and no source is
ever more than one sample beside its share of all blocks.

An epoch has each window once. Up to `MOST_SORTED` windows its order is made as a whole, by sorting random
numbers. Beyond that this would take gigabytes on each rank, and seconds of a start, so the place of each
sample is computed for itself, by a cipher on the numbers 0..windows-1: the swap-or-not shuffle (Hoang,
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
ROUNDS = 64  # of the shuffle: each halves what is left of the order before
DEALT = 1 << 12  # samples that are dealt out to sources together
BLOCK = 1 << 12  # samples whose windows are computed together, for rounds cost little more for many
_EPOCH_STREAM, _SOURCE_STREAM = 0x65706F63, 0x736F7572  # keep draws apart from other uses of the user's seed


def draws(count: int, *key: int) -> NDArray[np.uint64]:
    """Random numbers (count,) of 64 bits drawn from `key` (integers from 0 up), the same with every NumPy.

    NumPy promises the raw stream of a bit generator for good, but lets `Generator.permutation` change from
    release to release (NEP 19).
    """
    return np.asarray(np.random.PCG64(np.random.SeedSequence(key)).random_raw(count), np.uint64)


def permutation(count: int, *key: int) -> Places:
    """A permutation of 0..count-1 drawn from `key`, made by sorting draws."""
    return np.argsort(draws(count, *key), kind="stable").astype(np.int64, copy=False)


def shuffled(places: Places, count: int, *key: int) -> Places:
    """Where each of `places` (n,) goes in a permutation of 0..count-1 drawn from `key`, which is not made.

    In each round every number has a partner, and one bit, which both have in common, says whether they swap.
    """
    found = places.astype(np.uint64)
    total = np.uint64(count)
    partners, bits = draws(2 * ROUNDS, *key).reshape(2, ROUNDS)
    for partner, bit in zip(partners % total, bits, strict=True):
        other = (partner + total - found) % total
        found = np.where(mixed(np.maximum(found, other) ^ bit) >> np.uint64(63), other, found)
    return found.astype(np.int64)


def mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers all of whose bits depend on all bits of those given (Steele et al., SplitMix, 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))


@lru_cache(maxsize=16)  # of some sources; a step may end one epoch and begin the next
def _block(windows: int, block: int, *key: int) -> Places:
    """The windows of a block of an epoch's samples; the whole epoch is one where it can be sorted."""
    if windows <= MOST_SORTED:
        order = permutation(windows, *key)
    else:
        order = shuffled(np.arange(block * BLOCK, min((block + 1) * BLOCK, windows)), windows, *key)
    order.flags.writeable = False
    return order


def _in_epoch(places: Places, windows: int, *key: int) -> Places:
    """The windows at places (n,) of an epoch's order."""
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
    """The window (0..windows-1) behind each sample number; every epoch has each window once.

    key   the seed, and what else an order is drawn from
    """
    epochs, places = np.divmod(np.asarray(sample, dtype=np.int64), windows)
    found = np.empty_like(places)
    for epoch in sorted(set(epochs.ravel().tolist())):
        here = epochs == epoch
        found[here] = _in_epoch(places[here], windows, *key, _EPOCH_STREAM, epoch)
    return found if isinstance(sample, np.ndarray) else int(found)


class SampleOrder:
    """The order in which windows of one source or of several are dealt out.

    counts   windows of each source, which are numbered on from one source to the next
    shares   of all samples, of sum 1
    """

    def __init__(self, counts: Sequence[int], shares: Sequence[float], seed: int) -> None:
        self._counts, self._seed = tuple(counts), seed
        self._bounds = np.append(0.0, np.cumsum(shares)[:-1] / sum(shares))
        self._first = np.append(0, np.cumsum(counts)[:-1])

    @property
    def epoch(self) -> int:
        """Samples that go through the windows of each source once at least."""
        shares: list[float] = np.diff(np.append(self._bounds, 1.0)).tolist()
        return max(math.ceil(count / share) for count, share in zip(self._counts, shares, strict=True))

    def windows(self, samples: Places) -> Places:
        """The windows (n,) behind samples (n,), by their numbers among those of all sources."""
        sources, numbers = self.places(samples)
        found = np.empty_like(samples)
        for source, count in enumerate(self._counts):
            here = sources == source
            if here.any():
                key = (self._seed, _SOURCE_STREAM, source) if source else (self._seed,)
                found[here] = self._first[source] + window_of(numbers[here], count, *key)
        return found

    def places(self, samples: Places) -> tuple[Places, Places]:
        """(source, number among the samples of that source) of each sample (n,), from 0."""
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
        """How often the first `samples` go through the windows of each source."""
        whole = samples // DEALT
        rest = self.places(np.arange(whole * DEALT, samples))[0]
        return [
            (int(begun) + int((rest == source).sum())) / count
            for source, (begun, count) in enumerate(
                zip(_begun(whole, self._bounds), self._counts, strict=True)
            )
        ]


def _begun(block: int, bounds: Places) -> Places:
    """How many samples of each source the blocks before `block` have; bounds are rounded, so all add up."""
    total = block * DEALT
    return np.diff(np.append(np.floor(bounds * total + 0.5), total)).astype(np.int64)


@lru_cache(maxsize=4)
def _dealt(block: int, bounds: tuple[float, ...], seed: int) -> tuple[Places, Places]:
    """The source of each sample of a block, and its number among all samples of that source."""
    begun = _begun(block, np.array(bounds))
    quotas = _begun(block + 1, np.array(bounds)) - begun
    sources = np.empty(DEALT, np.int64)
    sources[permutation(DEALT, seed, _SOURCE_STREAM, 0, block)] = np.repeat(np.arange(len(quotas)), quotas)
    numbers = np.empty(DEALT, np.int64)
    for source, first in enumerate(begun.tolist()):
        here = sources == source
        numbers[here] = first + np.arange(int(here.sum()))
    return sources, numbers
