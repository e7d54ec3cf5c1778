"""Rules of a Hugging Face tokenizer for which GGUF has no key and which llama.cpp does not follow.

They come from a Hugging Face folder. The model file stores them as JSON under a key that llama.cpp ignores:
`added_tokens` (token -> flags), `normalizer`, `original` (regexes, see `pretokenizers`) and `ignore_merges`.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from zero_mpi.data.tokenizers.pretokenizers import PreTokenizer
from zero_mpi.data.tokenizers.spellings import Span, Spellings
from zero_mpi.errors import UsageError, import_optional
from zero_mpi.files.foreign import show, shown
from zero_mpi.files.gguf_keys import GGUFKeys
from zero_mpi.files.parse import parse_json

RULES = "tokenizer.huggingface.rules"
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_LOCAL = {*_FORMS, "Lowercase", "Sequence"}  # normalizers that allow cuts at _STABLE
_MOST_GROWTH, _MOST_JSON = 16, 2000  # limits: growth of a text, and characters of a normalizer's definition
_CHUNK = 1 << 16  # characters normalized together; the library needs 40 bytes for each character
# Characters that no Unicode normalization form joins to the text before them.
_STABLE = re.compile("[\0-\x7f\u0400-\u0450\u3400-\u9fff\uac00-\ud7a3]")
_WHITE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


class Rules:
    """The rules in a tokenizer's keys. Raises FileError if the rules are invalid.

    flags          token -> flags of an added token
    changes_cuts   whether the rules change which tokens are cut out of a text
    """

    def __init__(self, keys: GGUFKeys) -> None:
        try:
            rules = parse_json(keys.text(RULES) or "{}")
            flags = rules.get("added_tokens", {}).items()
            self.flags = {token: frozenset(names) & {*FLAGS} for token, names in flags}
            self.normalizer, self._ignore_merges = rules.get("normalizer"), rules.get("ignore_merges")
            self._original = bool(rules.get("original"))
            check_normalizer(self.normalizer)
        except (ValueError, AttributeError, TypeError) as error:
            raise keys.fault(RULES, f"rules of a Hugging Face tokenizer ({shown(str(error), 100)})") from None
        self.changes_cuts = bool(self.flags) or self.normalizer is not None
        self._is_local = kinds_of(self.normalizer) <= _LOCAL

    def splitting(self, pre: PreTokenizer) -> PreTokenizer:
        """Return `pre` with the regexes and the `ignore_merges` that these rules ask for."""
        regexes = (self._original and pre.original) or pre.regexes
        merges = pre.ignore_merges if self._ignore_merges is None else bool(self._ignore_merges)
        return pre._replace(regexes=regexes, ignore_merges=merges)

    def normalize(self, text: str) -> str:
        """Return a text, normalized as the rules say."""
        kind = None if self.normalizer is None else self.normalizer["type"]
        if kind is None or (kind in _FORMS and unicodedata.is_normalized(kind, text)):
            return text
        speller, parts, start = normalizer_of(self.normalizer), list[str](), 0
        while start < len(text):
            seam = _STABLE.search(text, start + _CHUNK) if self._is_local else None
            stop = seam.start() if seam else len(text)
            parts.append(speller.normalize_str(text[start:stop]))
            start = stop
        return "".join(parts)

    def spellings(self, ids: Mapping[str, int], normalized: bool) -> FlaggedSpellings:
        """Return a finder of the added tokens with this value of the flag `normalized`."""
        tokens = dict[str, str]()
        for token in (t for t in ids if ("normalized" in self.flags.get(t, ())) == normalized):
            spelling = self.normalize(token) if normalized else token
            is_lost = "lstrip" in self.flags.get(token, ()) and not spelling.strip(_WHITE)
            if not spelling or spelling in tokens or is_lost:
                raise UsageError(
                    f"the added token {show(token)} is white space with lstrip, or normalized to nothing or "
                    "another token: expected one that the package tokenizers can find in a text"
                )
            tokens[spelling] = token
        flags = {spelling: self.flags.get(token, frozenset()) for spelling, token in tokens.items()}
        return FlaggedSpellings({spelling: ids[token] for spelling, token in tokens.items()}, flags)


def rules_json(
    flags: Mapping[str, list[str]], normalizer: Any, settings: Mapping[str, bool]
) -> dict[str, object]:
    """Return the rules' key; {} if there are none. Without a normalizer, `normalized` does not count."""
    has_flags = normalizer or any({*names} - {"normalized"} for names in flags.values())
    added = {"added_tokens": {token: names for token, names in flags.items() if names and has_flags}}
    rules = {k: v for k, v in (added | {"normalizer": normalizer, **settings}).items() if v not in (None, {})}
    return {RULES: json.dumps(rules, sort_keys=True)} if rules else {}


def rules_in_words(metadata: Mapping[str, object]) -> str:
    """Return the names of the rules in a model's keys; "" if there are none."""
    rules = parse_json(GGUFKeys(metadata).text(RULES) or "{}")
    flagged = [
        f"{flag} of {show(token)}" for token, flags in rules.pop("added_tokens", {}).items() for flag in flags
    ]
    suffix = [f"{len(flagged) - 3} more flags"] if len(flagged) > 3 else []
    kinds = " ".join(sorted(kinds_of(rules.pop("normalizer", None)) - {"Sequence"}))
    return ", ".join([*flagged[:3], *suffix, *([f"normalizer {kinds}"] if kinds else []), *rules])


class FlaggedSpellings(Spellings):
    """Finder that follows the package tokenizers and the flags: left to right, longest token first."""

    def __init__(self, ids: Mapping[str, int], flags: Mapping[str, frozenset[str]]) -> None:
        super().__init__(ids)
        self._flags = flags

    def spans(self, text: str) -> list[Span]:
        spans = list[Span]()
        at = edge = white = 0  # ends of the last match, the last span and a run of white space
        for start, rank in reversed([*self.longest(text)]):
            if start < at:
                continue
            token = self.tokens[rank]
            at = stop = start + len(token)
            flags = self._flags[token]
            if "single_word" in flags and (
                _is_word(text[start - 1 : start]) or _is_word(text[stop : stop + 1])
            ):
                continue
            if "lstrip" in flags:
                while start > edge and text[start - 1] in _WHITE:
                    start -= 1
                start = max(start, edge)
            if "rstrip" in flags:
                white = max(white, stop)
                while white < len(text) and text[white] in _WHITE:
                    white += 1
                stop = white
            if start < stop:
                spans.append((start, stop, token))
            edge = stop
        return spans


def tokenizers() -> Any:
    return import_optional("this model's tokenizer", "tokenizers", "tokenizers")


def _is_word(letter: str) -> bool:
    r"""Return whether a character is `\w` for the library; False for ""."""
    words = tokenizers().pre_tokenizers.Whitespace().pre_tokenize_str("a" + letter)
    return letter != "" and words[0][0] == "a" + letter


def kinds_of(definition: Any) -> set[str]:
    """Return the types of all normalizers in a definition, nested ones included."""
    return set(re.findall(r'"type": "(\w+)"', json.dumps(definition)))


def normalizer_of(definition: Any) -> Any:
    lib = tokenizers()
    empty = json.loads(lib.Tokenizer(lib.models.BPE()).to_str())
    return lib.Tokenizer.from_str(json.dumps(empty | {"normalizer": definition})).normalizer


def check_normalizer(definition: Any) -> None:
    """Raise ValueError for a normalizer that is unknown, too long, or makes a text much longer."""
    if definition is not None:
        if _growth(definition) > _MOST_GROWTH or len(json.dumps(definition)) > _MOST_JSON:
            raise ValueError(
                f"a normalizer that makes a text more than {_MOST_GROWTH} times as long, or is too long"
            )
        try:
            normalizer_of(definition)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"the normalizer {shown(definition, 100)} ({shown(str(error), 60)})") from error


def _growth(definition: Any) -> int:
    """Return the factor by which a normalizer can lengthen a text (Unicode forms: 1), or raise ValueError."""
    fields = definition if isinstance(definition, dict) else {}
    kind, new, pattern, inner = map(fields.get, ("type", "content", "pattern", "normalizers"))
    old = pattern.get("String") if isinstance(pattern, dict) else None
    if kind in (*_FORMS, "Lowercase", "Strip"):
        return 1
    if kind == "Sequence" and isinstance(inner, list):
        return math.prod(map(_growth, inner))
    if kind == "Prepend" and isinstance(fields.get("prepend"), str):
        return 1 + len(fields["prepend"])
    if kind == "Replace" and isinstance(old, str) and isinstance(new, str) and old:
        return max(1, -(-len(new) // len(old)))  # only a fixed text is allowed: a regex may take forever
    raise ValueError(f"the normalizer {shown(definition, 100)}")
