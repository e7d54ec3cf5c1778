"""Table from pairs of integers to an integer, as two arrays that compiled code can read."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FREE = -1
BITS = 21  # bits of the right number (a code point or a symbol); the left number has up to 31 bits
MOST = 1 << BITS
MOST_SPELT = 256  # maximum bytes of a charsmap's spelling, and of the text that it replaces; NFKC needs 33
_LEFT, _FOLD = 2654435761, 15  # the hash has an odd factor, to spread adjacent values (Knuth), and a shift


class PairTable(NamedTuple):
    """Open-addressing table. The search for a pair, or for a free slot, begins at the hash of the pair.

    keys      (n + 1,) int64, n a power of two: left << BITS | right, or FREE; the last element is the factor
    of the hash, random so that a file cannot hold pairs that all have the same hash
    values    (n,) int32
    """

    keys: NDArray[np.int64]
    values: NDArray[np.int32]


def pair_table(left: NDArray[np.int64], right: NDArray[np.int64], values: NDArray[np.int64]) -> PairTable:
    """Return a table of distinct pairs (m,) and their values. At least half of its slots are free."""
    size = 1 << max(4, int(2 * len(left) - 1).bit_length())
    table = PairTable(np.full(size + 1, FREE, np.int64), np.zeros(size, np.int32))
    table.keys[size] = secrets.randbits(62) | 1
    pairs = left << BITS | right
    slots = (left * _LEFT + right) * table.keys[size]
    slots = (slots ^ (slots >> _FOLD)) & (size - 1)
    pending = np.arange(len(pairs))
    while len(pending):
        probes = slots[pending]
        free = table.keys[probes] == FREE
        table.keys[probes[free]] = pairs[pending[free]]  # if several pairs want a slot, the last one gets it
        placed = table.keys[probes] == pairs[pending]
        table.values[probes[placed]] = values[pending[placed]]
        pending = pending[~placed]
        slots[pending] = (slots[pending] + 1) & (size - 1)
    return table


def trie(tokens: Mapping[str, int]) -> tuple[dict[int, int], dict[int, int]]:
    """Return a trie as two maps: node << BITS | character -> next node, last node -> token. The root is 0."""
    nodes, ends = dict[int, int](), dict[int, int]()
    for token, number in tokens.items():
        node = 0
        for letter in token:
            node = nodes.setdefault(node << BITS | ord(letter), len(nodes) + 1)
        ends[node] = number
    return nodes, ends


def find(keys: NDArray[np.int64], values: NDArray[np.int32], left: int, right: int) -> int:
    """Return the value of a pair, or FREE if the table does not have this pair."""
    wide_left, wide_right = int(left), int(right)  # 64 bits, even if the numbers come from a 32-bit array
    size = len(keys) - 1
    slot = (wide_left * _LEFT + wide_right) * int(keys[size])
    slot = (slot ^ (slot >> _FOLD)) & (size - 1)
    pair = wide_left << BITS | wide_right
    while keys[slot] != pair:
        if keys[slot] == FREE:
            return FREE
        slot = (slot + 1) & (size - 1)
    return int(values[slot])
