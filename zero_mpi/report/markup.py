"""Text from files made safe for a page, and small pieces of HTML.

Names, settings, samples and reasons come from files that anybody may have written: all of them go through
`safe`. Pieces return markup, and take markup where they say so.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Sequence

SYMBOLS = 0x2400  # where Unicode shows control characters
VOID = ("input", "meta", "link")  # elements without content
CATEGORIES = ("Cc", "Cs", "Cf")  # control characters, half characters, marks that turn the direction of text


def visible(text: str) -> str:
    """Text without characters that a page may not hold or that could make it look like something else."""
    return "".join(map(shown, text)) if not text.isascii() or not text.isprintable() else text


def shown(letter: str) -> str:
    """A character, or a sign in its place."""
    code = ord(letter)
    if letter in "\n\t" or unicodedata.category(letter) not in CATEGORIES:
        return letter
    if letter in "\u200d\u200c":  # joiners: needed in some scripts, and harmless
        return letter
    return chr(SYMBOLS + code) if code < 32 else "\N{REPLACEMENT CHARACTER}"


def safe(text: object) -> str:
    """Text as markup, for contents and for attributes in double quotes."""
    return html.escape(visible(str(text)))


def tag(name: str, /, *content: str, **attributes: object) -> str:
    """An element around markup; `class_` is class, `data_run` is data-run, and None is not there."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{safe(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{given}>" if name in VOID else f"<{name}{given}>{''.join(content)}</{name}>"


def scrolling(title: str, *content: str) -> str:
    """A box that scrolls by itself, also by keys, where its content is too wide for the page."""
    return tag("div", *content, class_="scroll", tabindex=0, role="region", aria_label=title)


def table(head: Sequence[str], rows: Sequence[str], title: str, **attributes: object) -> str:
    """A table from the markup of its head's cells, and of its rows."""
    cells = "".join(tag("th", cell, scope="col") for cell in head)
    return scrolling(title, tag("table", tag("thead", tag("tr", cells)), tag("tbody", *rows), **attributes))


def row(*cells: str, kind: str | None = None) -> str:
    """One row of a table; its first cell names it."""
    return tag("tr", tag("th", cells[0], scope="row"), *(tag("td", cell) for cell in cells[1:]), class_=kind)


def section(name: str, title: str, content: str) -> str:
    """A part of the page with a heading; nothing where there is no content."""
    return tag("section", tag("h2", title), content, id=name) if content else ""
