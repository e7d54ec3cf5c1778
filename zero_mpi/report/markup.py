"""Text from files made safe for a page, and small pieces of HTML.

Names, settings, samples and reasons come from files that anybody may have written: all of them go through
`safe`, which also cuts them. Pieces return markup, and take markup where they say so.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from zero_mpi.files.foreign import LONGEST_LINE, cut, readable

VOID = ("input", "meta", "link")  # elements without content


def visible(text: str, most: int = LONGEST_LINE) -> str:
    """Text without characters that a page may not hold or that could make it look like something else."""
    return readable(cut(text, most))


def safe(text: object, most: int = LONGEST_LINE) -> str:
    """Text as markup for contents, in at most so many letters."""
    return html.escape(visible(str(text), most))


def attribute(value: object) -> str:
    """A value as markup in double quotes; it is not cut, for it may be a drawing."""
    return html.escape(readable(str(value)))


def tag(name: str, /, *content: str, **attributes: object) -> str:
    """An element around markup; `class_` is class, `data_run` is data-run, and None is not there."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{attribute(value)}"'
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
