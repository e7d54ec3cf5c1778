#!/usr/bin/env python3
"""Write the reference of the public names from their docstrings: HTML, by pdoc.

    python tools/reference.py [FOLDER]

Into site/ unless told. What is public is what `__all__` of these packages names. Our docstrings list things
as "name   what it is", in columns; that becomes a list here.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from pdoc import pdoc, render

PACKAGES = ("zero_mpi", "zero_mpi.nn", "zero_mpi.models", "zero_mpi.comm")
ALSO = (
    "zero_mpi.launch.world",
    "zero_mpi.launch.connect",
    "zero_mpi.errors",
    "zero_mpi.sharding.grad_accum",
    "zero_mpi.sharding.optimizer",
)
OTHERS = "\n\nOther pages: " + ", ".join(f"`{name}`" for name in (*PACKAGES[1:], *ALSO))  # pdoc links them
SITE = Path(__file__).resolve().parents[1] / "site"
ROW = re.compile(r"(?P<name>[`\w][^.\s]*(?:,? [^.\s]+){0,4}) {2,}(?P<text>\S.*)")


def public_names(package: str) -> list[str]:
    """What a package offers."""
    return list(import_module(package).__all__)


def specifications() -> list[str]:
    """What pdoc is told: these modules, without the modules inside."""
    return [told for module in (*PACKAGES, *ALSO) for told in (module, rf"!{re.escape(module)}\.")]


def load(package: str) -> None:
    """Put names that are loaded when they are first used where pdoc looks for them."""
    module = import_module(package)
    for name in public_names(package):
        setattr(module, name, getattr(module, name))


def listed(text: str) -> str:
    """A docstring in which rows of names and meanings are a list of Markdown."""
    front = inspect.getdoc(import_module("zero_mpi"))
    more = OTHERS if text.strip() == front else ""
    return "\n".join(rows(text.splitlines())) + more


def rows(lines: list[str]) -> Iterator[str]:
    """The lines, a row as an item; what is indented below a row goes on with it."""
    inside = False
    for line in lines:
        row = ROW.fullmatch(line)
        if row:
            if not inside:
                yield ""
            yield f"- **{row['name'].strip()}**: {row['text']}"
        elif inside and line.startswith("      "):
            yield f"  {line.strip()}"
        else:
            if inside and line:
                yield ""
            yield line
        inside = bool(row) or (inside and line.startswith("      "))


def write(folder: Path) -> None:
    """The pages."""
    for package in PACKAGES:
        load(package)
    to_markdown: Any = render.env.filters["to_markdown"]

    def converted(context: Any, text: str) -> Any:
        return to_markdown(context, listed(text))

    converted.__dict__.update(to_markdown.__dict__)  # jinja's mark: it takes the page's context first
    render.env.filters["to_markdown"] = converted
    render.configure(docformat="markdown", footer_text="zero_mpi", show_source=True)
    pdoc(*specifications(), output_directory=folder)


def main() -> None:
    """Entry point."""
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else SITE)


if __name__ == "__main__":
    main()
