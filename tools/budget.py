#!/usr/bin/env python3
"""Count the package and hold it to its budget: lines, lengths, arguments, attributes, names.

    python tools/budget.py [ROOT]

Prints the lines of the engine and of the package beside those of BUDGET, and each violation as `path:line:
text`; exits with status 1 if there is one. What is beyond a limit stands in a list of debts, which may only
shrink: a debt that is paid must be taken out, or lowered, in the same change.
"""

import ast
import re
import statistics
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

PACKAGE = "zero_mpi"
# Lines of Python. GOAL is where they are to go; BUDGET may only fall, unless a commit says why it rises.
GOAL = {"engine": 6000, "package": 28000}
BUDGET = {"engine": 9107, "package": 54402}
# What one has to read to understand a step: whole packages, and of ops and comm these files.
ENGINE = ("device", "nn", "models", "sharding", "environment/__init__.py", "errors.py")
ENGINE += tuple(f"comm/{name}.py" for name in ("base", "partition", "serial", "transfer", "mpi"))
ENGINE += tuple(f"comm/{name}.py" for name in ("message_type", "meter", "progress_thread", "start_mpi"))
ENGINE += ("ops/__init__.py", "ops/reference.py", "ops/activations_reference.py", "ops/low_precision.py")

MEDIAN, P90 = 8, 25  # lines of a function
MOST_POSITIONAL, MOST_ATTRIBUTES = 6, 12
POSITIONAL = {
    "comm/gpu/comm.py:_sums": 7,
    "comm/mpi.py:_add": 7,
    "comm/nodes/reduce_scatter.py:start": 7,
    "sharding/optimizer.py:_update": 8,
}
ATTRIBUTES = {
    "checkpoint/saver.py:Saver": 13,
    "comm/mpi.py:MPIComm": 14,
    "comm/nodes/comm.py:NodesComm": 13,
    "ops/gpu/gemm.py:Products": 14,
}
# Modules of one name in several packages: those of ops mirror each other, a command is called so everywhere,
# and each folder of transports (shared, nodes, gpu) has its class of `Comm` in `comm`.
MIRRORS = ("__init__", "__main__", "command", "comm")
MODULES: tuple[str, ...] = ()
CLASSES: tuple[str, ...] = ()
# Words of a private dialect, which no name of a module, class or function may have; DIALECT: those that do.
BANNED = ("borrower", "finale", "ghost", "hforder", "imagined", "nowhere", "nudge", "patience")
BANNED += ("rehearsal", "rehearsed", "relay", "rollcall", "sieve", "straight", "uniform", "ways", "wire")
DIALECT: tuple[str, ...] = ()
# Docstrings of fewer words than a sentence has, unless they only name what defines the thing.
MOST_TERSE, TERSE_WORDS = 18, 4
REFERENCE = re.compile(r"(As )?`[^`]+`\.")
# Who asks whether an array or a run is on a GPU, outside device, ops/gpu and comm/gpu.
ASKING = ("is_cupy", "on_gpu")
ASKERS = {
    "comm/kinds.py": 8,
    "nn/attention.py": 4,
    "nn/loss.py": 1,
    "plan/case.py": 1,
    "plan/copy_time.py": 1,
    "plan/flags.py": 7,
    "plan/machine.py": 1,
    "plan/rank_memory.py": 1,
    "plan/report.py": 1,
    "plan/resident.py": 1,
    "plan/step_time.py": 1,
    "train/dry_run.py": 2,
}

Violation = tuple[str, int, str]


def modules(root: Path) -> dict[str, ast.Module]:
    """The syntax tree of every file of the package, by its path below it."""
    package = root / PACKAGE
    return {
        path.relative_to(package).as_posix(): ast.parse(path.read_text(), filename=str(path))
        for path in sorted(package.rglob("*.py"))
    }


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods of a file."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lines(root: Path, names: tuple[str, ...]) -> int:
    """The lines of some files and folders of the package."""
    places = [root / PACKAGE / name for name in names]
    files = [path for place in places for path in (place.rglob("*.py") if place.is_dir() else [place])]
    return sum(len(path.read_text().splitlines()) for path in files)


def check_debt(
    name: str, line: int, found: int, limit: int, debts: dict[str, int], what: str
) -> Iterator[Violation]:
    """A number against its limit, or against what is owed."""
    owed = debts.get(name, limit)
    if found > owed:
        yield name, line, f"{found} {what}, at most {owed} allowed"
    elif name in debts and found < owed:
        yield name, line, f"{found} {what} now: lower or remove the debt of {owed} in tools/budget.py"


def check_arguments(name: str, tree: ast.Module) -> Iterator[Violation]:
    """Functions with many positional parameters; those of ops are kernels and take what they need."""
    for node in functions(tree) if not name.startswith("ops/") else ():
        given = [
            arg.arg for arg in (*node.args.posonlyargs, *node.args.args) if arg.arg not in ("self", "cls")
        ]
        place = f"{name}:{node.name}"
        for _, line, text in check_debt(
            place, node.lineno, len(given), MOST_POSITIONAL, POSITIONAL, "positional parameters"
        ):
            yield name, line, f"{node.name}: {text}"


def attributes(node: ast.ClassDef) -> set[str]:
    """What a class sets on itself in its __init__."""
    made = next(
        (item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None
    )
    return {
        item.attr
        for item in (ast.walk(made) if made else ())
        if isinstance(item, ast.Attribute)
        and isinstance(item.ctx, ast.Store)
        and ast.unparse(item.value) == "self"
    }


def check_attributes(name: str, tree: ast.Module) -> Iterator[Violation]:
    """Classes that set many attributes on themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found = len(attributes(node))
            place = f"{name}:{node.name}"
            for _, line, text in check_debt(
                place, node.lineno, found, MOST_ATTRIBUTES, ATTRIBUTES, "attributes set in __init__"
            ):
                yield name, line, f"{node.name}: {text}"


def check_askers(name: str, tree: ast.Module) -> Iterator[Violation]:
    """Questions whether something is on a GPU, where nobody should need to ask."""
    if name.startswith(("device/", "ops/gpu/", "comm/gpu/")):
        return
    found = [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id in ASKING)
        or (isinstance(node, ast.Attribute) and node.attr in ASKING)
    ]
    yield from check_debt(
        name, found[0] if found else 1, len(found), 0, ASKERS, "questions about the device (ASKERS)"
    )


def check_names(trees: dict[str, ast.Module]) -> Iterator[Violation]:
    """Modules and public classes whose name stands twice."""
    stems: dict[str, list[str]] = {}
    classes: dict[str, list[str]] = {}
    for name, tree in trees.items():
        if not name.startswith("ops/"):
            stems.setdefault(Path(name).stem, []).append(name)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault(node.name, []).append(name)
    kinds = (("module", stems, (*MIRRORS, *MODULES), MODULES), ("class", classes, CLASSES, CLASSES))
    for kind, found, free, debts in kinds:
        for what, places in found.items():
            if len(places) > 1 and what not in free:
                yield places[-1], 1, f"the {kind} {what} stands in {', '.join(places)}: give one another name"
        for what in debts:
            if len(found.get(what, ())) < 2:
                yield "", 1, f"the {kind} {what} stands once now: take it out of tools/budget.py"


def words_of(name: str) -> list[str]:
    """The words of a name in small letters, and each two that follow each other as one."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    return [*words, *(first + second for first, second in pairwise(words))]


def check_words(trees: dict[str, ast.Module]) -> Iterator[Violation]:
    """Names of modules, classes and functions with a word that is banned."""
    found = set()
    for name, tree in trees.items():
        named = [node for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
        for what, line in ((Path(name).stem, 1), *((node.name, node.lineno) for node in named)):
            place, banned = f"{name}:{what}", sorted({*words_of(what)} & {*BANNED})
            if banned:
                found.add(place)
            if banned and place not in DIALECT:
                yield name, line, f"{what}: the word {banned[0]} is banned: use the field's"
    for place in DIALECT:
        if place not in found:
            yield "", 1, f"{place} has no banned word now: take it out of tools/budget.py"


def check_docstrings(trees: dict[str, ast.Module]) -> Iterator[Violation]:
    """How many docstrings are too short to be a sentence."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    terse = [
        (name, getattr(node, "lineno", 1), text)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
        if len(text.split()) < TERSE_WORDS and not REFERENCE.fullmatch(text)
    ]
    print(f"docstrings of fewer than {TERSE_WORDS} words: {len(terse)}")
    if len(terse) > MOST_TERSE:
        for name, line, text in terse:
            yield name, line, f"{text!r} is a docstring of fewer than {TERSE_WORDS} words"
    elif len(terse) < MOST_TERSE:
        yield "", 1, f"{len(terse)} terse docstrings now: lower MOST_TERSE of {MOST_TERSE} in tools/budget.py"


def check_budget(root: Path) -> Iterator[Violation]:
    """The lines of engine and package against their budgets, printed as a difference."""
    for what, names in (("engine", ENGINE), ("package", (".",))):
        found, allowed = lines(root, names), BUDGET[what]
        print(f"{what:8} {found:6} lines, budget {allowed} ({found - allowed:+}), goal {GOAL[what]}")
        if found > allowed:
            yield "", 1, f"{what}: {found} lines, budget {allowed}: take lines out, or raise it and say why"


def check_lengths(trees: dict[str, ast.Module]) -> Iterator[Violation]:
    """How long functions are in general."""
    found = sorted(
        (node.end_lineno or 0) - node.lineno + 1 for tree in trees.values() for node in functions(tree)
    )
    median, p90 = statistics.median(found), found[len(found) * 9 // 10]
    print(f"functions: {len(found)}, median {median:g} lines, nine of ten within {p90}")
    if median > MEDIAN or p90 > P90:
        yield "", 1, f"functions: median {median:g} and p90 {p90} lines, at most {MEDIAN} and {P90} allowed"


def violations(root: Path) -> list[Violation]:
    """Every violation of the package."""
    trees = modules(root)
    found = [*check_budget(root), *check_lengths(trees), *check_names(trees)]
    found += [*check_words(trees), *check_docstrings(trees)]
    for name, tree in trees.items():
        found += [*check_arguments(name, tree), *check_attributes(name, tree), *check_askers(name, tree)]
    return found


def main() -> int:
    """Print the counts and what is wrong; returns the exit status."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    found = violations(root)
    for name, line, text in found:
        print(f"{PACKAGE}/{name}:{line}: {text}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
