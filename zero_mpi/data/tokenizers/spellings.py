"""Tokens that stand in a text as they are spelt: found in one pass, and cut out as llama.cpp does it.

It takes the longest token first and cuts it out everywhere, then the next. So of two tokens that overlap the
longer one is read, wherever it begins, which a regex from left to right would not do. A regex says which
tokens there are at all: a text with none, the usual one, is passed over once, whatever the number of tokens.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property

_WHITE = " \t\n\v\f\r"  # of ASCII


class Spellings:
    """The ids of tokens by their spelling, none of which is empty.

    stripping   tokens behind which white space is left out
    """

    def __init__(self, ids: Mapping[str, int], stripping: Collection[str] = ()) -> None:
        longest_first = sorted(ids, key=lambda token: -len(token.encode()))
        self._ids = {token: ids[token] for token in longest_first}
        self._rank = {token: rank for rank, token in enumerate(longest_first)}
        self._stripping = frozenset(stripping)
        self._beginnings: dict[str, list[str]] = {}

    def cut(self, text: str) -> list[int | str]:
        """`text` as ids of the tokens that are spelt in it, and the texts between them; whole without any."""
        parts: list[int | str] = [text]
        if self._start.search(text) is None:
            return parts
        for token in self._found(text):
            strips = token in self._stripping
            parts = [new for part in parts for new in _cut_out(part, token, self._ids[token], strips)]
        return parts

    @cached_property
    def _start(self) -> re.Pattern[str]:
        """Matches where a token begins; made where it is used: a vocabulary may have very many of them."""
        return _start_of_any(self._ids)

    def _found(self, text: str) -> list[str]:
        """The tokens that stand anywhere in `text`, also within another one, longest first."""
        longest = {match[0] + match[match.lastindex or 0] for match in self._start.finditer(text)}
        return sorted({t for token in longest for t in self._begins(token)}, key=self._rank.__getitem__)

    def _begins(self, token: str) -> list[str]:
        """The tokens with which a token begins; it is one of them."""
        if token not in self._beginnings:
            self._beginnings[token] = [other for other in self._ids if token.startswith(other)]
        return self._beginnings[token]


def _start_of_any(longest_first: Iterable[str]) -> re.Pattern[str]:
    """Matches the first letter of each place where a token stands; the last group is the rest of the longest.

    Only a letter is consumed, so tokens that overlap are all found; by it the regex skips over other text.
    """
    rests: dict[str, list[str]] = {}
    for token in longest_first:
        rests.setdefault(token[0], []).append(re.escape(token[1:]))
    places = [f"{re.escape(first)}(?=({'|'.join(rest)}))" for first, rest in rests.items()]
    return re.compile("|".join(places) or "(?!)")


def _cut_out(part: int | str, token: str, place: int, strips: bool) -> list[int | str]:
    """`part` with the id in the place of each occurrence of the token."""
    if isinstance(part, int):
        return [part]
    first, *rest = part.split(token)
    texts = [first, *(text.lstrip(_WHITE) if strips else text for text in rest)]
    both: list[int | str] = [side for text in texts for side in (text, place)]
    return [side for side in both[:-1] if side != ""]
