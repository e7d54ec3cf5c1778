"""Text that others have written (names, values, flags), shown with care.

What is shown of it is one line of bounded length in which nothing controls a terminal.
"""

from __future__ import annotations

import os
import re
import unicodedata

LONGEST = 200  # letters of a foreign text that are shown
LONGEST_LINE = 1800  # of what a command says on a line, beside its own name
LONG_WORD = re.compile(rf"\S{{{LONGEST + 1},}}")
LAYOUT = "\n\t\u200c\u200d"  # letters that do not print and belong to a text: joiners make words and emoji


def shown(value: object, most: int = LONGEST) -> str:
    """A foreign text for one line: escaped where it does not print, its middle left out where it is long."""
    text = str(value) if isinstance(value, str | os.PathLike) else _repr(value)
    return cut(printable(cut(text, most)), most)  # escapes are longer than what they stand for


def cut(text: str, most: int) -> str:
    """A text of at most so many letters, its middle left out where it has more."""
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return f"{text[: most - 3 - half]}...{text[len(text) - half :]}"


def _repr(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # Python writes no number of thousands of digits
        return f"a value of type {type(value).__name__} that is too large to write"


def show(name: str, most: int = 80) -> str:
    """A name from a file, quoted, fit for one line of an error: escaped, and cut when long."""
    return printable(repr(name if len(name) <= most else name[: most - 3] + "..."))


def quoted(value: object, most: int = 80) -> str:
    """A value from a file for an error: a text as `show` has it, all else as Python writes it."""
    return show(value, most) if isinstance(value, str) else shown(value, most)


def printable(text: str, keep: str = "") -> str:
    """A text with what does not print (control letters, new lines, halves of pairs) as escapes.

    Letters of `keep` stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def readable(text: str) -> str:
    """A text of many lines, such as a sample, in which nothing controls a terminal; its layout stays."""
    if text.isprintable():
        return text
    return "".join(c if c in LAYOUT or unicodedata.category(c) == "Zs" else printable(c) for c in text)


def one_line(text: str) -> str:
    """What a command says, whatever it was made of: one line of bounded length, and so is each word in it.

    The net below all that is shown: who makes a text of foreign parts shows them by `shown`.
    """
    return shown(LONG_WORD.sub(lambda found: shown(found[0]), text), LONGEST_LINE)
