"""The pages of the reference, as mkdocstrings reads them: which public names each has, from `__all__`.

Our docstrings list things as "name   what it is", in columns; `listed` makes a list of Markdown of these.
Nothing is imported: the names stand in the source.
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
# Modules beside these that a program of one's own may need, whole.
MORE = ("zero_mpi.launch.world", "zero_mpi.launch.connect", "zero_mpi.errors")
ROW = re.compile(r"(?P<name>[`\w][^.\s]*(?:,? [^.\s]+){0,4}) {2,}(?P<text>\S.*)")


def public_names(package: str) -> list[str]:
    """What a package offers: its `__all__`."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{package} has no __all__")


def reference_pages() -> dict[str, str]:
    """Path on the site -> Markdown."""
    found = {path: page(title, package) for path, (title, package) in PAGES.items()}
    wholes = "\n\n".join(f"::: {module}" for module in MORE)
    return found | {"reference/more.md": f"# Reference: to start and to end\n\n{wholes}\n"}


def page(title: str, package: str) -> str:
    """The page of a package: its docstring, then each public name."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    names = "\n\n".join(f"::: {package}.{name}" for name in public_names(package))
    return f"# {title}\n\n{listed(ast.get_docstring(tree) or '')}\n\n{names}\n"


def listed(text: str) -> str:
    """A docstring in which rows of names and meanings are a list of Markdown."""
    return "\n".join(rows(text.splitlines()))


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
