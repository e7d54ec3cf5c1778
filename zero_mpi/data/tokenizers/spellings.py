"""Finds the tokens that a text spells, in one pass, and cuts them out as llama.cpp does.

llama.cpp first cuts out the longest token everywhere, then the next longest. So of two overlapping tokens the
longer one is read, wherever it begins. A regex that reads from left to right would read the first one.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from heapq import heapify, heappop, heappush

from zero_mpi.data.tokenizers.pair_table import BITS, trie

_WHITE = frozenset(" \t\n\v\f\r")  # ASCII's white space
Span = tuple[int, int, str]  # start and end of a token, both including dropped white space, and the token


class Spellings:
    """Finder of the tokens in `ids` (token -> id), none of which is empty.

    stripping   tokens after which white space is dropped
    """

    def __init__(self, ids: Mapping[str, int], stripping: Collection[str] = ()) -> None:
        self._ids, self._stripping = ids, frozenset(stripping)
        self.tokens = sorted(ids, key=lambda token: -len(token.encode()))

    def cut(self, text: str, sizes: list[int] | None = None) -> list[int | str]:
        """Return `text` as ids of the tokens in it and the texts between; `[text]` if it spells no token.

        The number of bytes of each id is appended to `sizes`.
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
        """Return the spans of the tokens to cut out, in text order."""
        places = defaultdict[int, list[int]](list)
        for start, rank in self.longest(text):
            places[rank].append(start)
        return sorted(self._select(text, places)) if places else []

    def longest(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield (place, rank of the longest token that begins there), backwards from the text's end."""
        nodes, fails, ranks = self._automaton
        node, at, text = 0, 0, text[::-1]
        while at < len(text):
            if not node:  # not inside a token: go on where a token may end
                if (match := self._end.search(text, at)) is None:
                    return
                at = match.start()
            letter = ord(text[at])
            while (following := nodes.get(node << BITS | letter, 0)) == 0 and node:
                node = fails[node]
            node, at = following, at + 1
            if ranks[node] >= 0:
                yield len(text) - at, ranks[node]

    def _select(self, text: str, places: defaultdict[int, list[int]]) -> Iterator[Span]:
        """Yield (start, stop, token) of the tokens to cut out. `places`: rank -> where that token begins."""
        mask, ranks = bytearray(len(text) + 1), [*places]  # one byte per character; the last byte stays 0
        heapify(ranks)
        while ranks:
            rank = heappop(ranks)
            token, starts, matches, at = self.tokens[rank], sorted(places[rank]), list[int](), 0
            while at < len(starts):
                start, stop = starts[at], starts[at] + len(token)
                covered, edge = mask.find(1, start, stop), start + 1
                if covered < 0:
                    mask[start:stop] = b"\1" * len(token)
                    matches.append(start)
                    edge = stop
                elif covered == start:
                    edge = mask.find(0, start)
                else:
                    shorter = rank
                    while shorter >= 0 and len(self.tokens[shorter]) > covered - start:
                        shorter = self._prefixes[shorter]
                    if shorter >= 0 and shorter not in places:
                        heappush(ranks, shorter)
                    places[shorter].append(start)
                at = bisect_left(starts, edge, at + 1)
            for start in matches:
                stop = start + len(token)
                while token in self._stripping and text[stop : stop + 1] in _WHITE and not mask[stop]:
                    mask[stop] = 1
                    stop += 1
                yield start, stop, token

    @cached_property
    def _prefixes(self) -> list[int]:
        """For each token, the rank of the longest other token that is a prefix of it; -1 if there is none."""
        prefixes, outer = [-1] * len(self.tokens), list[int]()
        for token, rank in sorted((token, rank) for rank, token in enumerate(self.tokens)):
            while outer and not token.startswith(self.tokens[outer[-1]]):
                outer.pop()
            prefixes[rank] = outer[-1] if outer else -1
            outer.append(rank)
        return prefixes

    @cached_property
    def _automaton(self) -> tuple[dict[int, int], list[int], list[int]]:
        """Aho-Corasick automaton for the reversed tokens. It reads each character once or twice.

        It has the trie's nodes, and for each its longest proper suffix node and its longest token's rank.
        """
        nodes, ends = trie({token[::-1]: rank for rank, token in enumerate(self.tokens)})
        depths, fails, ranks = ([entry] * (len(nodes) + 1) for entry in (0, 0, -1))
        for edge, node in nodes.items():
            depths[node] = depths[edge >> BITS] + 1
        for edge, node in sorted(nodes.items(), key=lambda entry: depths[entry[1]]):
            parent, letter = divmod(edge, 1 << BITS)
            fail = parent
            while fail and not fails[node]:
                fail = fails[fail]
                fails[node] = nodes.get(fail << BITS | letter, 0)
            ranks[node] = ends.get(node, ranks[fails[node]])
        return nodes, fails, ranks

    @cached_property
    def _end(self) -> re.Pattern[str]:
        """Regex that finds where a token may end in a reversed text, by the last two characters of tokens."""
        longer = [token for token in self._ids if len(token) > 1]
        singles = {token for token in self._ids if len(token) == 1}
        letters = singles, {token[-1] for token in longer}, {token[-2] for token in longer}
        single, last, previous = (f"[{re.escape(''.join(chars))}]" if chars else "(?!)" for chars in letters)
        return re.compile(f"{last}(?={previous})|{single}")
