#!/usr/bin/env python3
"""Check the structure of the tree: directions of imports, circular imports, sizes, docstrings.

    python tools/structure.py [ROOT]

The tree is an ordered list of layers, which are packages or single files (`ORDER`). A layer imports only
layers before it, and its files have no circular imports. Imports inside functions count, and so does the full
name of a module in a string, because such a string starts or loads the module. Imports under `if
TYPE_CHECKING:` do not count. Other folders import from the package only names that exist. Prints each
violation as `path:line: text`. Exits with status 1 if there is a violation.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "zero_mpi"

# Packages and files at the top of the package. Each of them imports only layers before it.
ORDER = (
    "errors", "environment", "files", "arguments", "telemetry",
    "device", "data", "cli",
    "ops", "comm", "nn", "launch", "models", "sharding", "optim", "compat",
    "checkpoint", "config", "plan", "train", "commands", "__main__",
)  # fmt: skip

# Imports that the order permits but the design does not: a layer, and layers that it must not import.
NEVER: dict[str, tuple[str, ...]] = {
    "comm": ("ops", "nn"),  # transports carry and add arrays, without operations or layers
    "nn": ("comm",),  # a layer holds no arrays and knows no ranks, so it can be sharded
    "data": ("device", "ops", "comm", "cli", "telemetry"),  # its functions depend only on their arguments
    "models": ("comm",),
    "sharding": ("models",),
    "optim": ("models", "nn"),
}
# If a pair of layers is listed here, the first may import only these modules of the second.
ONLY: dict[tuple[str, str], tuple[str, ...]] = {
    ("sharding", "nn"): ("nn.layer", "nn.linear", "nn.loss", "nn.batch"),
}

# Libraries, and the only modules that may import them.
GUARDED: dict[str, tuple[str, ...]] = {
    "mpi4py": ("comm.start_mpi",),
    "cupy": ("device.*", "ops.gpu.*", "comm.*"),
    "numba": ("ops.cpu.*", "data.tokenizers.segmentation"),
    "scipy": ("ops.cpu.*",),
    "jinja2": ("data.conversations.sandbox", "commands.report.command"),
}

MAX_FUNCTION, MAX_FILE = 40, 500
SHORT = 3  # maximum number of lines in the body of a function that needs no docstring
# Files and functions that are too long, with their lines. These numbers may only fall.
DEBT = {
    "zero_mpi/ops/cpu/attention.py:backward": 44,
    "zero_mpi/ops/flat_reference.py:adamw": 46,
    "tests/fuzz/fuzz_gguf.py:model": 44,
}
FOLDERS = (PACKAGE, "tools", "examples", "benchmarks", "tests")
FREE_LENGTH = ("tests",)  # a table of test cases may be long; functions may not

UNDOCUMENTED = re.compile(r"(\w+\.)?(overload|implements\(.*)$")  # decorators that replace a docstring

Violation = tuple[int, str]


def matches(module: str, pattern: str) -> bool:
    """Return whether the name of a module, without the package, matches a pattern of the tables."""
    if pattern.endswith(".*"):
        return module == pattern[:-2] or module.startswith(pattern[:-1])
    return pattern in ("*", module)


def layer_of(module: str) -> str:
    """Return the layer of a module, such as `comm` for `comm.mpi`."""
    return module.partition(".")[0]


def module_name(path: Path, package: Path) -> str:
    """Return `nn.layer` for PACKAGE/nn/layer.py, `nn` for its __init__, "" for the package's own."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    """Return whether a node is `if TYPE_CHECKING:` or `if typing.TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of a tree except those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            for other in node.orelse:  # type: ignore[attr-defined]
                yield other
                yield from running_nodes(other)
        else:
            yield node
            yield from running_nodes(node)


def imports(tree: ast.AST, path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Yield line and full dotted name of each import in a file, and of each module named in a string."""
    for node in running_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(node, path, package)
            for alias in node.names:
                deeper = f"{origin}.{alias.name}"
                yield node.lineno, deeper if origin == PACKAGE or is_module(deeper, package) else origin
        elif isinstance(node, ast.Constant) and is_named_whole(node.value, package):
            yield node.lineno, node.value


def is_named_whole(value: object, package: Path) -> bool:
    """Return whether a constant in the source is the full name of a module."""
    return isinstance(value, str) and not value.endswith(".") and is_module(value, package)


def absolute(node: ast.ImportFrom, path: Path, package: Path) -> str:
    """Return the module in `from X import`. Relative imports are resolved."""
    if node.level == 0:
        return node.module or ""
    folder = path.parents[node.level - 1].relative_to(package.parent)
    return ".".join([*folder.parts, *([node.module] if node.module else [])])


def is_module(name: str, package: Path) -> bool:
    """Return whether a dotted name is a module of the package, and not a name inside a module."""
    place = package.parent.joinpath(*name.split("."))
    return name.startswith(f"{PACKAGE}.") and (place.with_suffix(".py").exists() or place.is_dir())


def why_not(module: str, target: str) -> str | None:
    """Return why a module must not import another module of the package; None if it may."""
    layer, other = layer_of(module), layer_of(target)
    if layer == other:
        return None
    if other not in ORDER or ORDER.index(other) > ORDER.index(layer):
        return f"{other} stands after {layer} in the order of tools/structure.py"
    if other in NEVER.get(layer, ()):
        return f"{layer} may not use {other}"
    allowed = ONLY.get((layer, other))
    if allowed is not None and target not in allowed:
        return f"{layer} may use only {', '.join(allowed)}"
    return None


def check_imports(tree: ast.AST, path: Path, package: Path) -> Iterator[Violation]:
    """Yield the imports of a file that are not allowed, and its layer if that is not in the order."""
    module = module_name(path, package)
    if not module:
        return
    if layer_of(module) not in ORDER:
        yield 1, f"{layer_of(module)} is not in the order of tools/structure.py: put it where it belongs"
        return
    for line, name in imports(tree, path, package):
        top, _, inner = name.partition(".")
        if top in GUARDED and not any(matches(module, user) for user in GUARDED[top]):
            yield line, f"{module} imports {top}, which only {', '.join(GUARDED[top])} may"
        if top == PACKAGE and inner.startswith("__"):
            continue  # __version__
        if top == PACKAGE and not is_module(name, package):
            yield line, f"{module} imports {name} from the package's own names: import its module"
        elif top == PACKAGE and (reason := why_not(module, inner)):
            yield line, f"{module} imports {inner}: {reason}"


def check_circles(package: Path) -> Iterator[tuple[Path, Violation]]:
    """Yield circular imports, each with the file where it begins."""
    arrows: dict[str, dict[str, int]] = {}
    places = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    for module, path in places.items():
        tree = ast.parse(path.read_text(), filename=str(path))
        for line, name in imports(tree, path, package):
            target = name.removeprefix(f"{PACKAGE}.")
            if name.startswith(f"{PACKAGE}.") and target in places and target != module:
                arrows.setdefault(module, {}).setdefault(target, line)
    done: set[str] = set()
    for module in sorted(places):
        yield from (
            (places[circle[0]], (arrows[circle[0]][circle[1]], f"circular imports: {' -> '.join(circle)}"))
            for circle in circles_from(module, [], arrows, done)
        )


def circles_from(
    module: str, way: list[str], arrows: dict[str, dict[str, int]], done: set[str]
) -> Iterator[list[str]]:
    """Yield each circle of imports that begins at `module`. Each module is visited only once."""
    if module in way:
        yield [*way[way.index(module) :], module]
    elif module not in done:
        for target in sorted(arrows.get(module, {})):
            yield from circles_from(target, [*way, module], arrows, done)
        done.add(module)


def check_sizes(tree: ast.Module, text: str, name: str, limit: float) -> Iterator[Violation]:
    """Yield files and functions that are longer than allowed, or shorter than DEBT says."""
    lines = len(text.splitlines())
    yield from check_size(1, "the file", name, lines, limit)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            what, place = f"function {node.name}", f"{name}:{node.name}"
            yield from check_size(node.lineno, what, place, length, MAX_FUNCTION)


def check_size(line: int, what: str, place: str, length: int, limit: float) -> Iterator[Violation]:
    """Yield a message if a length exceeds its limit, or is less than its entry in DEBT."""
    allowed = DEBT.get(place, limit)
    if length > allowed:
        yield line, f"{what} has {length} lines, at most {allowed} allowed"
    elif limit < length < allowed:
        yield line, f"{what} has only {length} lines now: change DEBT in tools/structure.py"


def check_docstrings(tree: ast.Module, public_names: bool) -> Iterator[Violation]:
    """Yield a message for a missing docstring: of the module and, if `public_names`, of public objects.

    A function whose body has at most three lines needs none.
    """
    if tree.body and ast.get_docstring(tree) is None:
        yield 1, "the module has no docstring"
    for node in tree.body if public_names else ():
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
            and ast.get_docstring(node) is None
            and (isinstance(node, ast.ClassDef) or (node.end_lineno or 0) - node.body[0].lineno >= SHORT)
            and not any(UNDOCUMENTED.match(ast.unparse(mark)) for mark in node.decorator_list)
        ):
            yield node.lineno, f"{node.name} is public and has no docstring"


@functools.cache
def names_of(file: Path) -> frozenset[str]:
    """Return the names that a file defines, imports or assigns."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return frozenset(found)


def check_names(tree: ast.AST, package: Path) -> Iterator[Violation]:
    """Yield each name that a `from zero_mpi... import` asks for, but that no module has."""
    for node in ast.walk(tree):
        origin = node.module if isinstance(node, ast.ImportFrom) and not node.level else None
        if not origin or origin.split(".")[0] != PACKAGE:
            continue
        place = package.parent.joinpath(*origin.split("."))
        file = place.with_suffix(".py")
        file = file if file.exists() else place / "__init__.py"
        names = names_of(file) if file.exists() else frozenset()
        for alias in node.names:
            name = f"{origin}.{alias.name}"
            if not {alias.name, "__getattr__"} & names and not is_module(name, package):
                yield node.lineno, f"{name} does not exist"


def check_file(path: Path, root: Path) -> Iterator[Violation]:
    """Yield all violations of one file."""
    text = path.read_text()
    tree = ast.parse(text, filename=str(path))
    folder = path.relative_to(root).parts[0]
    if folder == PACKAGE:
        yield from check_imports(tree, path, root / PACKAGE)
    else:
        yield from check_names(tree, root / PACKAGE)
    limit = float("inf") if folder in FREE_LENGTH else MAX_FILE
    yield from check_sizes(tree, text, path.relative_to(root).as_posix(), limit)
    yield from check_docstrings(tree, public_names=folder in (PACKAGE, "tools"))


def violations(root: Path) -> list[str]:
    """Return all violations in the tree, as `path:line: text`."""
    files = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    found = [(path, violation) for path in files for violation in sorted(check_file(path, root))]
    found += check_circles(root / PACKAGE)
    return [f"{path.relative_to(root)}:{line}: {text}" for path, (line, text) in found]


def main() -> int:
    """Print the violations. Return the exit status."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    found = violations(root)
    print("\n".join(found) if found else "structure: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
