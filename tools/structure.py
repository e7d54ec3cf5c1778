#!/usr/bin/env python3
"""Check the structure of the tree: the direction of imports, sizes, docstrings.

    python tools/structure.py [ROOT]

The layers are data (`LAYERS`, `GUARDED`), read against the syntax tree of every file, imports inside
functions included; imports under `if TYPE_CHECKING:` are for readers and not counted. Prints each
violation as `path:line: text` and exits with status 1 if there is one.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "zero_mpi"

# A key ending in ".*" is a whole package. Modules under one key may use each other; everything else that
# a module may use is listed beside its key, by the same patterns. The package's own __init__ is free.
BASE = ("errors", "foreign", "environment", "keys", "arguments", "durable")
STATE = (*BASE, "spans", "device", "arrays", "ops.*", "comm.*", "sharding.*", "nn.layer", "nn.fusions")
FILES = (
    "checkpoint.digest",
    "checkpoint.stored",
    "checkpoint.index",
    "checkpoint.reader",
    "checkpoint.packing",
    "checkpoint.stream",
    "checkpoint.writer",
    "checkpoint.manager",
    "checkpoint.safetensors",
    "checkpoint.hfconfig",
    "checkpoint.hforder",
    "checkpoint.hfnames",
    "checkpoint.huggingface",
    "checkpoint.weights",
    "checkpoint.hfexport",
    "checkpoint.encode",
)
TRAINING = (*STATE, *FILES, "optim", "accumulate")
ANYTHING = ("*",)
LAYERS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "foreign": ("errors",),
    "keys": ("errors", "foreign"),
    "arguments": ("errors", "foreign"),
    "environment": ("errors",),
    "interrupts": BASE,
    "reprieve": BASE,
    "stopping": (*BASE, "interrupts", "reprieve", "batch"),
    "leftovers": BASE,
    "shmroom": (*BASE, "leftovers"),
    "durable": (),
    "spans": (),
    "device": BASE,
    "arrays": (*BASE, "device"),
    "ops.*": (*BASE, "device", "arrays"),
    "nn.*": (*BASE, "device", "arrays", "ops.*"),
    "models.*": (*BASE, "arrays", "ops.*", "nn.*"),
    "comm.*": (*BASE, "device", "arrays", "spans"),
    "sharding.*": (*BASE, "spans", "device", "arrays", "ops.*", "comm.*", "nn.layer", "nn.fusions"),
    "sharding.linear": (*BASE, "comm.*", "nn.layer", "nn.linear", "sharding.*"),
    "trial": (*BASE, "device", "arrays", "ops.*"),
    "optim": STATE,
    "accumulate": (*STATE, "optim", "nn.loss"),
    "trace.events": ("spans",),
    "timeline": (*STATE, "log", "trace.events"),
    "checkpoint.digest": (),
    "checkpoint.stored": (
        "errors",
        "foreign",
    ),
    "checkpoint.index": ("errors", "foreign", "checkpoint.stored"),
    "checkpoint.reader": ("errors", "foreign", "keys", "checkpoint.stored", "checkpoint.index"),
    "checkpoint.packing": ("errors", "foreign", "checkpoint.stored", "checkpoint.index"),
    "checkpoint.writer": (
        "errors",
        "foreign",
        "checkpoint.digest",
        "checkpoint.stored",
        "checkpoint.index",
        "checkpoint.packing",
        "checkpoint.stream",
    ),
    "checkpoint.stream": ("errors", "foreign", "checkpoint.stored"),
    "checkpoint.safetensors": ("errors", "foreign", "checkpoint.stored", "checkpoint.stream"),
    "checkpoint.hfnames": ("errors", "foreign", "checkpoint.stored"),
    "checkpoint.hfconfig": (
        "errors",
        "foreign",
        "checkpoint.stored",
        "checkpoint.index",
        "checkpoint.hfnames",
    ),
    "checkpoint.hforder": ("checkpoint.stored",),
    "checkpoint.huggingface": (
        "errors",
        "foreign",
        "checkpoint.stored",
        "checkpoint.index",
        "checkpoint.safetensors",
        "checkpoint.hfnames",
        "checkpoint.hfconfig",
        "checkpoint.hforder",
    ),
    "checkpoint.hfexport": ("errors", "foreign", "keys", *FILES),
    "checkpoint.encode": ("errors", "foreign", *FILES),
    "checkpoint.weights": ("errors", "foreign", *FILES),
    "checkpoint.manager": (
        "errors",
        "foreign",
    ),
    "data.*": ("errors", "foreign", "keys"),
    "checkpoint.contributions": TRAINING,
    "checkpoint.pair": (*TRAINING, "checkpoint.contributions"),
    "checkpoint.state": (*TRAINING, "checkpoint.contributions"),
    "checkpoint.saver": (*TRAINING, "checkpoint.contributions", "checkpoint.pair", "checkpoint.state"),
    "checkpoint": (*TRAINING, "checkpoint.*"),  # its __init__: re-exports
    "batch": (),
    "limits": (),
    "lock": (*BASE, "log"),
    "rollcall": BASE,
    "parser": BASE,
    "status": BASE,
    "watchdog": (*BASE, "comm.*", "rollcall"),
    "lookout": (*BASE, "comm.*", "rollcall", "watchdog"),
    "script": (*BASE, "comm.*", "rollcall", "watchdog", "lookout", "launch"),
    "log": BASE,
    "events": (*BASE, "log"),
    "progress": (*BASE, "log"),
    "tensorboard": BASE,
    "records": (*BASE, "log", "progress", "tensorboard"),
    "sampling": (*BASE, "arrays"),
    "textmodel": (*BASE, "arrays", "ops.*", "nn.*", "models.*", "data.*", "sampling", "checkpoint.weights"),
}
COMMANDS = ("train", "generate", "export", "hostfile", "inspect", "inspection", "compare", "cli", "__main__")
COMMANDS += ("completion", "dryrun")
COMMANDS += ("plan.*", "doctor.*", "trace.*", "report.*")
RUN = ("config", "launch", "resume", "session", "source", "uniform", "peak", "summary", "outcome", "finale")
RUN += ("samebits", "description")
RUN += ("defaults", "combinations", "remarks")
RUN += ("ample",)
RUN += ("hold", "replay", "divergence")
LAYERS |= dict.fromkeys(RUN, ANYTHING)
LAYERS |= dict.fromkeys(COMMANDS, ANYTHING)

# Libraries that only some modules may import.
GUARDED: dict[str, tuple[str, ...]] = {
    "mpi4py": ("comm.*", "launch"),
    "cupy": ("device", "ops.gpu.*", "comm.*"),
    "cupyx": ("device", "ops.gpu.*", "comm.*"),
    "numba": ("ops.cpu.*",),
    "scipy": ("ops.cpu.*",),
}

MAX_FUNCTION, MAX_FILE = 60, 400
FOLDERS = (PACKAGE, "tools", "examples", "benchmarks", "tests")
FREE_LENGTH = ("tests",)  # a table of cases may be long; its functions may not

Violation = tuple[int, str]


def matches(module: str, pattern: str) -> bool:
    """Whether a module's name (without the package) falls under a pattern of the tables."""
    if pattern.endswith(".*"):
        return module == pattern[:-2] or module.startswith(pattern[:-1])
    return pattern in ("*", module)


def layer_of(module: str) -> str | None:
    """The key of the table that a module belongs to; an exact name goes before a package."""
    if module in LAYERS:
        return module
    return next((key for key in LAYERS if matches(module, key)), None)


def module_name(path: Path, package: Path) -> str:
    """`nn.layer` for PACKAGE/nn/layer.py, `nn` for its __init__, "" for the package's own."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    """Whether a node is `if TYPE_CHECKING:` or `if typing.TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            for other in node.orelse:  # type: ignore[attr-defined]
                yield other
                yield from running_nodes(other)
        else:
            yield node
            yield from running_nodes(node)


def imports(tree: ast.AST, path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of everything a file imports."""
    for node in running_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(node, path, package)
            for alias in node.names:
                deeper = f"{origin}.{alias.name}"
                yield node.lineno, deeper if origin == PACKAGE or is_module(deeper, package) else origin
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (
                (node.lineno, text.value)
                for text in node.args[:1]
                if isinstance(text, ast.Constant) and isinstance(text.value, str)
            )


def absolute(node: ast.ImportFrom, path: Path, package: Path) -> str:
    """The module that `from X import` names, relative ones resolved."""
    if node.level == 0:
        return node.module or ""
    folder = path.parents[node.level - 1].relative_to(package.parent)
    return ".".join([*folder.parts, *([node.module] if node.module else [])])


def is_module(name: str, package: Path) -> bool:
    """Whether a dotted name is a module of the package, rather than something defined in one."""
    place = package.parent.joinpath(*name.split("."))
    return name.startswith(f"{PACKAGE}.") and (place.with_suffix(".py").exists() or place.is_dir())


def check_imports(tree: ast.AST, path: Path, package: Path) -> Iterator[Violation]:
    """Arrows that point back, guarded libraries, modules that no table knows."""
    module = module_name(path, package)
    if not module:
        return
    layer = layer_of(module)
    if layer is None:
        yield 1, f"{module} is in no layer: add it to the table in tools/structure.py"
        return
    for line, name in imports(tree, path, package):
        top, _, inner = name.partition(".")
        if top in GUARDED and not any(matches(module, user) for user in GUARDED[top]):
            yield line, f"{module} imports {top}, which only {', '.join(GUARDED[top])} may"
        if top == PACKAGE and inner.startswith("__"):
            continue  # __version__
        if top == PACKAGE and not is_module(name, package):
            yield line, f"{module} imports {name} from the package's own names: import its module"
        elif top == PACKAGE and not any(matches(inner, allowed) for allowed in (layer, *LAYERS[layer])):
            yield line, f"{module} imports {inner}: {layer} may use {', '.join(LAYERS[layer]) or 'nothing'}"


def check_sizes(tree: ast.Module, text: str, limit: float) -> Iterator[Violation]:
    """Files and functions that are too long."""
    lines = len(text.splitlines())
    if lines > limit:
        yield 1, f"{lines} lines, at most {limit} allowed"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION:
                yield node.lineno, f"function {node.name} has {length} lines, at most {MAX_FUNCTION} allowed"


def check_docstrings(tree: ast.Module, public_names: bool) -> Iterator[Violation]:
    """A docstring for the module and, with `public_names`, for what it offers."""
    if tree.body and ast.get_docstring(tree) is None:
        yield 1, "the module has no docstring"
    for node in tree.body if public_names else ():
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
            and ast.get_docstring(node) is None
            and not any(ast.unparse(mark).endswith("overload") for mark in node.decorator_list)
        ):
            yield node.lineno, f"{node.name} is public and has no docstring"


def check_file(path: Path, root: Path) -> Iterator[Violation]:
    """All violations of one file."""
    text = path.read_text()
    tree = ast.parse(text, filename=str(path))
    folder = path.relative_to(root).parts[0]
    if folder == PACKAGE:
        yield from check_imports(tree, path, root / PACKAGE)
    yield from check_sizes(tree, text, float("inf") if folder in FREE_LENGTH else MAX_FILE)
    yield from check_docstrings(tree, public_names=folder in (PACKAGE, "tools"))


def violations(root: Path) -> list[str]:
    """Every violation in the tree, as `path:line: text`."""
    files = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    return [
        f"{path.relative_to(root)}:{line}: {text}"
        for path in files
        for line, text in sorted(check_file(path, root))
    ]


def main() -> int:
    """Print what is wrong; returns the exit status."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    found = violations(root)
    print("\n".join(found) if found else "structure: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
