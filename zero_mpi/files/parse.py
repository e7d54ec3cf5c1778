"""Parsers of untrusted JSON and TOML: any text, however nested, gives a value or one kind of error."""

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

from zero_mpi.files.foreign import show, shown

MOST_NESTED = 100  # limit on nesting, so that recursive code does not exhaust the stack
MOST_VALUES = 1 << 21  # maximum number of values in a JSON text; a one-character value takes about 100 bytes
PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
# Matches a TOML key with many parts, for which parsing takes quadratic time.
LONG_KEY = re.compile(rf"""(?<![\w"'-]){PART}(?:\.[ \t]*+{PART}){{32}}""", re.ASCII)


def parse_json(
    raw: bytes | str, *, null_for_infinite: bool = False, unique: bool = False, most_values: int = MOST_VALUES
) -> Any:
    """Return the JSON value of a text in UTF-8; raise ValueError with one line for anything else.

    Errors include too deep nesting, numbers of thousands of digits, more than `most_values` values, and
    numbers that are not finite, which JSON lacks; with `null_for_infinite` they become null. With `unique`, a
    repeated name in an object is an error too; otherwise its last value counts.
    """
    lists, values = _signs(raw)
    if values > most_values:
        raise ValueError(f"more than {most_values} values")

    def parse() -> Any:
        text = raw if isinstance(raw, str) else raw.decode()
        if text.startswith("\ufeff"):
            raise ValueError("expected a text without a byte order mark")
        return _decoder(null_for_infinite, unique).decode(text)

    return _guarded_parse(parse, nests=lists > MOST_NESTED)


@cache
def _decoder(null_for_infinite: bool, unique: bool) -> json.JSONDecoder:
    """Return a cached decoder with the rules of `parse_json`; making it takes longer than parsing a line."""

    def number(text: str) -> float | None:
        value = float(text)
        if not math.isfinite(value):
            constant(text)
            return None
        return value

    def constant(text: str) -> None:
        if not null_for_infinite:
            raise ValueError(f"the number {shown(text, 40)} is not finite")

    return json.JSONDecoder(
        parse_float=number, parse_constant=constant, object_pairs_hook=_unique_names if unique else None
    )


def _is_nested(value: Any, levels: int) -> bool:
    inner = [value]
    for _ in range(levels + 1):
        if not inner:
            return False
        inner = [
            item
            for outer in inner
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, dict | list)
        ]
    return bool(inner)


def _signs(raw: bytes | str) -> tuple[int, int]:
    """Return upper bounds on the numbers of containers and values in a JSON text, from its punctuation."""
    if isinstance(raw, str):
        lists, commas = raw.count("[") + raw.count("{"), raw.count(",")
    else:
        lists, commas = raw.count(b"[") + raw.count(b"{"), raw.count(b",")
    return lists, 1 + commas + lists


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        duplicate = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"expected {show(duplicate)} once, found it twice")
    return members


def parse_toml(raw: bytes) -> dict[str, Any]:
    """Return the table of a TOML text in UTF-8; raise ValueError with one line for anything else."""

    def parse() -> dict[str, Any]:
        text = raw.decode()
        if LONG_KEY.search(text):
            raise ValueError("a key of more than 32 parts")
        return tomllib.loads(text)

    result: dict[str, Any] = _guarded_parse(parse)
    return result


def _guarded_parse(parse: Callable[[], Any], nests: bool = True) -> Any:
    try:
        value = parse()
        if nests and _is_nested(value, MOST_NESTED):
            raise RecursionError
        return value
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except ValueError as error:  # invalid format, or a number with thousands of digits
        raise ValueError(shown(str(error))) from None
