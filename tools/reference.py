"""Makes the pages of the API reference for mkdocstrings: one page for the public names of each package.

Our docstrings list things in columns, as "name   what it is". `listed` makes a Markdown list of them. No
module is imported: the names are read from the source code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "reference/zero_mpi.md": ("Reference: zero_mpi", "zero_mpi"),
    "reference/nn.md": ("Reference: layers", "zero_mpi.nn"),
    "reference/models.md": ("Reference: models", "zero_mpi.models"),
    "reference/comm.md": ("Reference: transports", "zero_mpi.comm"),
}
# Further modules that a user's program may need; all of their names are shown.
MORE = ("zero_mpi.launch.world", "zero_mpi.launch.connect", "zero_mpi.errors")
ROW = re.compile(r"(?P<name>[`\w][^.\s]*(?:,? [^.\s]+){0,4}) {2,}(?P<text>\S.*)")


def public_names(package: str) -> list[str]:
    """Return the names in a package's `__all__`, or its functions and its imports of the form `X as X`."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    imported = (name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names)
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return sorted([name.name for name in imported if name.name == name.asname] + functions)


def reference_pages() -> dict[str, str]:
    """Return path on the site -> text of the page in Markdown."""
    found = {path: page(title, package) for path, (title, package) in PAGES.items()}
    wholes = "\n\n".join(f"::: {module}" for module in MORE)
    return found | {"reference/more.md": f"# Reference: to start and to end\n\n{wholes}\n"}


def page(title: str, package: str) -> str:
    """Return the page of a package: its docstring, followed by each public name."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    names = "\n\n".join(f"::: {package}.{name}" for name in public_names(package))
    return f"# {title}\n\n{listed(ast.get_docstring(tree) or '')}\n\n{names}\n"


def listed(text: str) -> str:
    """Return a docstring in which rows of names and meanings are a Markdown list."""
    return "\n".join(rows(text.splitlines()))


def rows(lines: list[str]) -> Iterator[str]:
    """Yield the lines. Each row, with the indented lines below it, becomes an item of a list."""
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
