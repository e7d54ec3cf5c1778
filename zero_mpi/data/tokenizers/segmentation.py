"""Loops that cut a text into tokens, character by character; compiled if numba is installed.

They follow llama.cpp's rules exactly, which no library on PyPI does: `sentencepiece` adds scores in float32;
`tokenizers` allows no equal ranks and treats a letter with its marks as one character. Both would change ids.
Without numba, Python runs the same functions, a hundred times slower, with the same result.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data.tokenizers import pair_table
from zero_mpi.data.tokenizers.pair_table import FREE, MOST_SPELT

F = TypeVar("F", bound=Callable[..., Any])
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

try:
    import numba
except ImportError:
    numba = None


def compiled(function: F) -> F:
    """Return `function` compiled to machine code and cached on disk; unchanged without numba."""
    if numba is None:
        return function
    try:
        machine: F = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba found no folder in which it can cache the code
        machine = numba.njit(nogil=True)(function)
    return machine


find = compiled(pair_table.find)
_PLACE = 32  # a heap key is rank << _PLACE | index
_MASK = (1 << _PLACE) - 1


# ---------------------------------------------------------------------------------- merges by score


@compiled
def merge(symbols: Int32, keys: Int64, values: Int32, ranks: Int64, space: int) -> Int64:
    """Join adjacent `symbols` (n,) in place until the table contains no pair of neighbours.

    The rank of a pair is the rank of its joined symbol. The pair of the lowest rank is joined first, and the
    leftmost of equal ranks (byte-pair encoding as in SentencePiece, Kudo and Richardson 2018). `space`:
    symbol that begins a word if a different one precedes it; no pair crosses such a position (FREE: no such
    symbol). Returns (n,) the index of each next symbol; FREE for a symbol joined to the one before.
    """
    count = len(symbols)
    before, after = np.empty(count, np.int64), np.empty(count, np.int64)
    start = 0
    while start < count:
        stop = start + 1
        while stop < count and (space == FREE or symbols[stop] != space or symbols[stop - 1] == space):
            stop += 1
        for place in range(start, stop):
            before[place], after[place] = place - 1, place + 1
        merge_word(symbols[:stop], keys, values, ranks, (before, after, start))
        start = stop
    return after


@compiled
def merge_word(
    symbols: Int32, keys: Int64, values: Int32, ranks: Int64, chain: tuple[Int64, Int64, int]
) -> None:
    """Merge one word, as `merge` does. `chain`: links to previous and next symbols, and the first index."""
    before, after, start = chain
    heap = [np.int64(0)]
    heap.pop()
    for place in range(start, len(symbols) - 1):
        symbol = find(keys, values, symbols[place], symbols[place + 1])
        if symbol != FREE:
            heap.append(ranks[symbol] << _PLACE | place)
    heapq.heapify(heap)
    while len(heap) > 0:
        best = heapq.heappop(heap)
        left = best & _MASK
        right = after[left]
        if right == FREE or right >= len(symbols):
            continue
        symbol = find(keys, values, symbols[left], symbols[right])
        if symbol == FREE or ranks[symbol] != best >> _PLACE:
            continue  # since the pair was pushed, one of its symbols was joined to another
        symbols[left] = symbol
        third = after[right]
        after[left], after[right] = third, FREE
        if third < len(symbols):
            before[third] = left
            symbol = find(keys, values, symbols[left], symbols[third])
            if symbol != FREE:
                heapq.heappush(heap, ranks[symbol] << _PLACE | left)
        if left > start:
            symbol = find(keys, values, symbols[before[left]], symbols[left])
            if symbol != FREE:
                heapq.heappush(heap, ranks[symbol] << _PLACE | before[left])


@compiled
def spell(symbols: Int32, links: Int64, letters: Int32, bytewise: Int32, vocab: int) -> Int32:
    """Return the ids of merged symbols. A character that is not a token gives the ids of its UTF-8 bytes.

    `letters` (n,): code points, or -1 - id in place of a token that was cut out. `bytewise` (256,): the token
    of each byte.
    """
    ids = np.empty(4 * len(symbols), np.int32)
    count = place = 0
    while place < len(symbols):
        if symbols[place] < vocab:
            ids[count] = symbols[place]
            count += 1
        elif letters[place] < 0:
            ids[count] = -1 - letters[place]
            count += 1
        else:
            point = letters[place]
            tail = int(point > 0x7F) + int(point > 0x7FF) + int(point > 0xFFFF)  # bytes after the first
            first = point if tail == 0 else (0xFF00 >> tail + 1 & 0xFF) | point >> 6 * tail
            ids[count] = bytewise[first]
            for number in range(tail):
                ids[count + 1 + number] = bytewise[0x80 | point >> 6 * (tail - 1 - number) & 0x3F]
            count += 1 + tail
        place = links[place]
    return ids[:count].copy()


# ---------------------------------------------------------------------------------- the most likely tokens


@compiled
def likeliest(
    letters: Int32, keys: Int64, values: Int32, ends: Int32, scores: Float64, unknown: tuple[int, float]
) -> Int32:
    """Return the tokens (m,) of letters (n,) with the greatest sum of scores (Viterbi; unigram, Kudo 2018).

    The table maps a node of a trie and a letter to the next node; `ends` maps a node to its token or FREE.
    `unknown`: the token of a letter without a token, and its score; adjacent unknown letters become one
    token. Of paths with equal sums, the path with the longer last token wins. A letter may be -1 - id of a
    token that was cut out: the letters before it and after it are separate texts.
    """
    count = len(letters)
    best, token = np.full(count + 1, -np.inf), np.empty(count + 1, np.int32)
    origin = np.empty(count + 1, np.int64)
    best[0] = 0.0
    for start in range(count):
        if letters[start] < 0:
            best[start + 1], token[start + 1], origin[start + 1] = 0.0, -1 - letters[start], start
            continue
        node, place, alone = 0, start, False
        while place < count and letters[place] >= 0:
            node = find(keys, values, node, letters[place])
            if node == FREE:
                break
            place += 1
            if ends[node] != FREE:
                alone = alone or place == start + 1
                total = best[start] + scores[ends[node]]
                if total > best[place]:
                    best[place], token[place], origin[place] = total, ends[node], start
        if not alone and best[start] + unknown[1] > best[start + 1]:
            best[start + 1], token[start + 1], origin[start + 1] = best[start] + unknown[1], unknown[0], start
    return backwards(letters, token, origin, unknown[0])


@compiled
def backwards(letters: Int32, token: Int32, origin: Int64, unknown: int) -> Int32:
    """Return the tokens (m,) of the best path in text order. `origin` (n + 1,) is followed from its end."""
    ids = np.empty(len(letters), np.int32)
    first, place, in_unknown = len(ids), len(letters), False
    while place > 0:
        is_unknown = token[place] == unknown and letters[place - 1] >= 0
        if not (is_unknown and in_unknown):
            first -= 1
            ids[first] = token[place]
        place, in_unknown = origin[place], is_unknown
    return ids[first:].copy()


# ---------------------------------------------------------------------------------- other spellings


@compiled
def respell(
    text: NDArray[np.uint8], nodes: Int64, spellings: NDArray[np.uint8], out: NDArray[np.uint8]
) -> int:
    """Copy UTF-8 to `out`; at each place, replace the longest prefix of the rest that the charsmap has.

    Returns the length, even if `out` is too short; FREE if the map points outside itself. `nodes`: a double
    array (Kanda 2018). A node has its letter, a flag that a prefix ends in it, and the base of its children.
    The value of a prefix is the offset in `spellings` of its replacement, which ends with 0.
    """
    place = length = 0
    while place < len(text):
        size, spelling = longest_prefix(text[place:], nodes)
        if size < 0 or spelling >= len(spellings):
            return FREE
        if size:
            while spellings[spelling]:
                if length < len(out):
                    out[length] = spellings[spelling]
                spelling += 1
                length += 1
                if spelling == len(spellings):
                    return FREE
            place += size
        else:
            stop = place + 1  # no prefix begins inside a character
            while stop < len(text) and text[stop] & 0xC0 == 0x80:
                stop += 1
            for byte in text[place:stop]:
                if length < len(out):
                    out[length] = byte
                length += 1
            place = stop
    return length


@compiled
def longest_prefix(text: NDArray[np.uint8], nodes: Int64) -> tuple[int, int]:
    """Return the length of the longest prefix in the map, and its value (`respell`).

    Returns (0, 0) if no prefix is in the map, (FREE, 0) if the map is damaged.
    """
    size = spelling = 0
    if len(nodes) == 0:
        return 0, 0
    node: Any = base_of(nodes[0])
    for place in range(min(len(text), MOST_SPELT)):  # a damaged file's table may contain a loop
        letter = np.int64(text[place])
        node ^= letter
        if node >= len(nodes):
            return FREE, 0
        if letter == 0 or nodes[node] & 0x800000FF != letter:
            break
        is_end = nodes[node] >> 8 & 1
        node ^= base_of(nodes[node])
        if is_end:
            if node >= len(nodes):
                return FREE, 0
            size, spelling = place + 1, nodes[node] & 0x7FFFFFFF
    return size, spelling


@compiled
def base_of(node: int) -> int:
    """Return the offset of a node's children, relative to the node."""
    return node >> 10 << ((node & 0x200) >> 6)
