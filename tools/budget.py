#!/usr/bin/env python3
"""Count the lines of the package and the words of the pages, and hold them to budgets.

    python tools/budget.py [ROOT]

Prints the lines of the engine and of the package and the words of the pages beside their budgets, and the
lengths of functions. Exits with status 1 if a budget is exceeded. A budget is a bound: a change that needs
more lines or words takes others out first.
"""

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "zero_mpi"
BUDGET = {"engine": 9550, "package": 51200}  # lines of Python
# The files to read to understand a step: full packages, and of ops and comm these files.
ENGINE = ("device", "nn", "models", "sharding", "optim", "environment/__init__.py", "errors.py")
ENGINE += tuple(f"comm/{name}.py" for name in ("base", "partition", "serial", "transfer", "mpi"))
ENGINE += tuple(f"comm/{name}.py" for name in ("message_type", "meter", "progress_thread", "start_mpi"))
ENGINE += ("ops/__init__.py", "ops/reference.py", "ops/activations_reference.py", "ops/low_precision.py")
MEDIAN, P90 = 8, 25  # lines of a function
WORDS = {"pages": 24000, "README.md": 1000}  # as `wc -w` counts them
PAGES = {
    "pages": ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/*.md"),
    "README.md": ("README.md",),
}


def count_lines(root: Path, names: tuple[str, ...]) -> int:
    """Count the lines of some files and folders of the package."""
    places = [root / PACKAGE / name for name in names]
    files = [path for place in places for path in (place.rglob("*.py") if place.is_dir() else [place])]
    return sum(len(path.read_text().splitlines()) for path in files)


def check_budget(root: Path) -> Iterator[str]:
    """Print the lines of the engine and the package, and yield a line for each budget that is exceeded."""
    for what, names in (("engine", ENGINE), ("package", (".",))):
        found, allowed = count_lines(root, names), BUDGET[what]
        print(f"{what:9} {found:6} lines, budget {allowed} ({found - allowed:+})")
        if found > allowed:
            yield f"{what}: {found} lines, budget {allowed}: take lines out"


def check_words(root: Path) -> Iterator[str]:
    """Print the words of the pages, and yield a line for each budget that is exceeded."""
    for what, allowed in WORDS.items():
        paths = [path for pattern in PAGES[what] for path in root.glob(pattern)]
        found = sum(len(path.read_text(encoding="utf-8").split()) for path in paths)
        print(f"{what:9} {found:6} words, budget {allowed} ({found - allowed:+})")
        if found > allowed:
            yield f"{what}: {found} words, budget {allowed}: take words out"


def check_lengths(root: Path) -> Iterator[str]:
    """Print how long functions are, and yield a line if most are longer than they should be."""
    trees = (ast.parse(path.read_text(), filename=str(path)) for path in (root / PACKAGE).rglob("*.py"))
    nodes = [node for tree in trees for node in ast.walk(tree)]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = sorted((n.end_lineno or 0) - n.lineno + 1 for n in nodes if isinstance(n, kinds))
    median, p90 = statistics.median(found), found[len(found) * 9 // 10]
    print(f"functions: {len(found)}, median {median:g} lines, nine of ten within {p90}")
    if median > MEDIAN or p90 > P90:
        yield f"functions: median {median:g} and p90 {p90} lines, at most {MEDIAN} and {P90} allowed"


def main() -> int:
    """Print the counts and the violations. Return the exit status."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    found = [*check_budget(root), *check_words(root), *check_lengths(root)]
    for text in found:
        print(text)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
