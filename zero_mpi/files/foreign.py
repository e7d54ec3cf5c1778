"""Safe display of text from others (names, values, flags).

A message shows such a text as one line of bounded length without terminal control characters.
"""

import os
import re
import unicodedata

LONGEST = 200  # maximum number of displayed characters of a foreign text
LONGEST_LINE = 1800  # maximum number of characters of a one-line message, without the command's name
LONG_WORD = re.compile(rf"\S{{{LONGEST + 1},}}")
LAYOUT = "\n\t\u200c\u200d"  # unprintable characters that `readable` keeps; the joiners form words and emoji


def shown(value: object, most: int = LONGEST) -> str:
    """Return a foreign text as one line: unprintable characters escaped, the middle of a long text cut."""
    text = str(value) if isinstance(value, str | os.PathLike) else _repr(value)
    return cut(printable(cut(text, most)), most)  # escapes are longer than the characters they replace


def cut(text: str, most: int) -> str:
    """Return a text of at most `most` characters; dots replace the middle of a longer text."""
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return f"{text[: most - 3 - half]}...{text[len(text) - half :]}"


def _repr(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # Python refuses to write numbers of thousands of digits
        return f"a value of type {type(value).__name__} that is too large to write"


def show(name: str, most: int = 80) -> str:
    """Return a name from a file in quotes, for an error of one line: escaped, and cut if it is long."""
    return printable(repr(name if len(name) <= most else name[: most - 3] + "..."))


def quoted(value: object, most: int = 80) -> str:
    """Return a value from a file for an error: a text as in `show`, anything else as Python's repr."""
    return show(value, most) if isinstance(value, str) else shown(value, most)


def printable(text: str, keep: str = "") -> str:
    """Return a text with unprintable characters (newlines, lone surrogates, ...) as escapes.

    Characters in `keep` do not change.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def readable(text: str) -> str:
    """Return a text of several lines, with unprintable characters except spaces and LAYOUT as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c in LAYOUT or unicodedata.category(c) == "Zs" else printable(c) for c in text)


def one_line(text: str) -> str:
    """Return any message of a command as one line of bounded length; each word is bounded too.

    This is the safety net for all output; a text with foreign parts should already show them with `shown`.
    """
    return shown(LONG_WORD.sub(lambda match: shown(match[0]), text), LONGEST_LINE)
