"""A user's own type checker sees `py.typed`, and public names that are all there, typed and described."""

import ast
import importlib
import inspect
import tomllib
from pathlib import Path

import pytest

import zero_mpi

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("zero_mpi", "zero_mpi.nn", "zero_mpi.models", "zero_mpi.comm")
NAMES = [(package, name) for package in PACKAGES for name in importlib.import_module(package).__all__]


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "zero_mpi" / "py.typed").read_bytes() == b""
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["zero_mpi"]
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]


def test_names_for_checkers_are_those_that_are_loaded_when_they_are_used():
    """A checker reads the imports under TYPE_CHECKING, Python the table: both are the public names."""
    tree = ast.parse((ROOT / "zero_mpi" / "__init__.py").read_text())
    (branch,) = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.name: node.module.removeprefix("zero_mpi.")
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == zero_mpi.PUBLIC
    assert set(zero_mpi.__all__) == set(zero_mpi.PUBLIC)
    assert set(zero_mpi.__all__) <= set(dir(zero_mpi))


def functions_of(found) -> list:
    """The functions that a public name stands for: itself, or the public methods that a class defines."""
    if inspect.isfunction(found):
        return [found]
    if not inspect.isclass(found):
        return []
    own = {name: part for name, part in vars(found).items() if not name.startswith("_") or name == "__init__"}
    unwrapped = [getattr(part, "__func__", getattr(part, "fget", part)) for part in own.values()]
    return [part for part in unwrapped if inspect.isfunction(part)]


@pytest.mark.parametrize(("package", "name"), NAMES, ids=[".".join(pair) for pair in NAMES])
def test_every_argument_and_result_has_a_type_and_every_name_a_text(package, name):
    found = getattr(importlib.import_module(package), name)
    if inspect.isclass(found) or inspect.isfunction(found):
        assert inspect.getdoc(found)
    for function in functions_of(found):
        if function.__module__.startswith("zero_mpi") and function.__doc__ != "Initialize self.":
            signature = inspect.signature(function)
            untyped = [
                argument.name
                for argument in signature.parameters.values()
                if argument.annotation is argument.empty and argument.name not in ("self", "cls")
            ]
            assert untyped == [], function.__qualname__
            typed = signature.return_annotation is not signature.empty or function.__name__ == "__init__"
            assert typed, function.__qualname__
