"""Tokens that stand in a text as they are spelt: found in one pass, and cut out as llama.cpp does it.

It takes the longest token first and cuts it out everywhere, then the next. So of two tokens that overlap the
longer one is read, wherever it begins, which a regex from left to right would not do.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from heapq import heapify, heappop, heappush

from zero_mpi.data.tokenizers.pair_table import BITS, trie

_WHITE = frozenset(" \t\n\v\f\r")  # of ASCII
Span = tuple[int, int, str]  # where a token begins and ends, with white space that is left out
_PLACE = 40  # bits of a place in a number that sorts by the rank of a token, the longest first, and by place


class Spellings:
    """The ids of tokens by their spelling, none of which is empty.

    stripping   tokens behind which white space is left out
    """

    def __init__(self, ids: Mapping[str, int], stripping: Collection[str] = ()) -> None:
        self._ids, self._stripping = ids, frozenset(stripping)
        self._tokens = sorted(ids, key=lambda token: -len(token.encode()))

    def cut(self, text: str, sizes: list[int] | None = None) -> list[int | str]:
        """`text` as ids of the tokens that are spelt in it, and the texts between them; whole without any.

        The bytes that each id stands for go into `sizes`.
        """
        parts, at = list[int | str](), 0
        for start, stop, token in self.spans(text):
            if at < start:
                parts.append(text[at:start])
            parts.append(self._ids[token])
            if sizes is not None:
                sizes.append(len(text[max(at, start) : stop].encode()))
            at = stop
        return [*parts, text[at:]] if at < len(text) or not parts else parts

    def spans(self, text: str) -> list[Span]:
        """Where tokens are spelt that are cut out, in the order of the text."""
        starts = (match.start() for match in self._start.finditer(text))
        ranked = [found for start in starts if (found := self._longest(text, start, len(text))) is not None]
        return sorted(self._taken(text, ranked)) if ranked else []

    def longest_token(self, text: str, start: int) -> str | None:
        """The longest token that begins at a place."""
        found = self._longest(text, start, len(text))
        return None if found is None else self._tokens[found >> _PLACE]

    def _taken(self, text: str, ranked: list[int]) -> Iterator[Span]:
        """(start, stop, token) of those that are cut out, with the white space that goes with them."""
        taken, same = bytearray(len(text)), list[int]()  # letters; where the token of one rank starts
        heapify(ranked)
        while ranked:
            rank, start = divmod(heappop(ranked), 1 << _PLACE)
            token = self._tokens[rank]
            covered = taken.find(1, start, start + len(token))
            if covered < 0:
                taken[start : start + len(token)] = b"\1" * len(token)
                same.append(start)
            elif (shorter := self._longest(text, start, covered)) is not None:
                heappush(ranked, shorter)
            if not (ranked and ranked[0] >> _PLACE == rank):
                for start in same:
                    stop = start + len(token)
                    while token in self._stripping and text[stop : stop + 1] in _WHITE and not taken[stop]:
                        taken[stop] = 1
                        stop += 1
                    yield start, stop, token
                same.clear()

    def _longest(self, text: str, start: int, stop: int) -> int | None:
        """Rank and place of the longest token that begins at a place and ends at `stop` or before."""
        nodes, ends = self._trie
        node, found = 0, None
        for at in range(start, stop):
            node = nodes.get(node << BITS | ord(text[at]), 0)
            if not node:
                break
            if node in ends:
                found = ends[node] << _PLACE | start
        return found

    @cached_property
    def _trie(self) -> tuple[dict[int, int], dict[int, int]]:
        return trie({token: rank for rank, token in enumerate(self._tokens)})

    @cached_property
    def _start(self) -> re.Pattern[str]:
        """Matches where a token may begin, by its first two letters."""
        longer = [token for token in self._ids if len(token) > 1]
        letters = {t for t in self._ids if len(t) == 1}, {t[0] for t in longer}, {t[1] for t in longer}
        alone, first, second = (f"[{re.escape(''.join(each))}]" if each else "(?!)" for each in letters)
        return re.compile(f"{first}(?={second})|{alone}")
