#!/usr/bin/env python3
"""Count the lines of the package and of the tests, and the words of the pages, and check their budgets.

    python tools/budget.py [ROOT]

Prints the lines of the tests and of each folder of the package, and the words of the pages, with their
budgets, and the lengths of functions. Exits with status 1 if a budget or a limit is exceeded, or if the flags
of `train` are not those of FLAGS. A change that needs more lines or words must first remove others. A commit
that adds a flag to FLAGS must say why the flag is needed.
"""

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "zero_mpi"
FLAGS = "tools/train_flags.txt"  # one flag per line
# Lines of Python.
TOTAL = {"engine": 9186, "package": 49475, "tests": 41963}
ROOMS = {
    "checkpoint": 4269,
    "cli": 255,
    "comm": 3960,
    "commands": 7777,
    "compat": 786,
    "config": 1332,
    "data": 5944,
    "device": 740,
    "environment": 369,
    "files": 887,
    "launch": 2006,
    "models": 1163,
    "nn": 2275,
    "ops": 7206,
    "optim": 675,
    "plan": 2196,
    "sharding": 2628,
    "telemetry": 1334,
    "train": 3417,
}
# The engine, the code to read to understand a step: some complete packages, and single files.
ENGINE = ("device", "nn", "models", "sharding", "optim", "environment/__init__.py", "errors.py")
ENGINE += tuple(f"comm/{name}.py" for name in ("base", "partition", "serial", "transfer", "mpi"))
ENGINE += tuple(f"comm/{name}.py" for name in ("meter", "start_mpi"))
ENGINE += ("ops/__init__.py", "ops/reference.py", "ops/activations_reference.py", "ops/low_precision.py")
MEDIAN, P90 = 8, 25  # limits on the lines of functions
WORDS = {"pages": 25434, "README.md": 1000}  # number of words, as `wc -w` counts them
PAGES = {
    "pages": ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/*.md"),
    "README.md": ("README.md",),
}


def count_lines(places: list[Path]) -> int:
    """Return the number of lines of Python in some files and folders."""
    files = [path for place in places for path in (place.rglob("*.py") if place.is_dir() else [place])]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def held(what: str, found: int, allowed: int, unit: str) -> Iterator[str]:
    """Print a count with its budget. Yield a message if the budget is exceeded."""
    print(f"{what:12} {found:6} {unit}, budget {allowed} ({found - allowed:+})")
    if found > allowed:
        yield f"{what}: {found} {unit}, budget {allowed}: remove {unit}"


def check_lines(root: Path) -> Iterator[str]:
    """Check the budgets of the engine, the package, its folders and the tests. A new folder needs one."""
    package = root / PACKAGE
    places = {"engine": [package / name for name in ENGINE], "package": [package], "tests": [root / "tests"]}
    for what, allowed in TOTAL.items():
        yield from held(what, count_lines(places[what]), allowed, "lines")
    rooms = sorted(path for path in package.iterdir() if path.is_dir() and (path / "__init__.py").exists())
    for room in rooms:
        yield from held(f"  {room.name}", count_lines([room]), ROOMS.get(room.name, 0), "lines")


def check_words(root: Path) -> Iterator[str]:
    """Check the budgets of the pages."""
    for what, allowed in WORDS.items():
        paths = [path for pattern in PAGES[what] for path in root.glob(pattern)]
        words = sum(len(path.read_text(encoding="utf-8").split()) for path in paths)
        yield from held(what, words, allowed, "words")


def check_lengths(root: Path) -> Iterator[str]:
    """Print median and 90th percentile of lines per function. Yield a message if one exceeds its limit."""
    trees = (ast.parse(path.read_text(), filename=str(path)) for path in (root / PACKAGE).rglob("*.py"))
    nodes = [node for tree in trees for node in ast.walk(tree)]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = sorted((n.end_lineno or 0) - n.lineno + 1 for n in nodes if isinstance(n, kinds))
    median, p90 = statistics.median(found), found[len(found) * 9 // 10]
    print(f"functions: {len(found)}, median {median:g} lines, nine of ten within {p90}")
    if median > MEDIAN or p90 > P90:
        yield f"functions: median {median:g} and p90 {p90} lines, at most {MEDIAN} and {P90} allowed"


def check_flags(root: Path) -> Iterator[str]:
    """Yield a message for each flag that is missing in `train` or in the list."""
    tree = ast.parse((root / PACKAGE / "config" / "settings.py").read_text())
    config = next(each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name == "Config")
    fields = [each.target.id for each in config.body if isinstance(each, ast.AnnAssign)]
    known = (root / FLAGS).read_text().split()
    print(f"flags of train: {len(fields)}")
    yield from (
        f"--{name} is not in {FLAGS}: can it be done without a flag?" for name in fields if name not in known
    )
    yield from (f"{FLAGS}: train has no --{name}" for name in known if name not in fields)


def main() -> int:
    """Print the counts and the exceeded budgets. Return the exit status."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    found = [*check_lines(root), *check_words(root), *check_lengths(root), *check_flags(root)]
    for text in found:
        print(text)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
