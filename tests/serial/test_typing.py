"""A user's type checker sees `py.typed` and all public names."""

import ast
import tomllib
from pathlib import Path

import zero_mpi

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "zero_mpi" / "py.typed").read_bytes() == b""
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["zero_mpi"]
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]


def test_names_for_checkers_are_those_that_are_loaded_when_they_are_used():
    """The imports under TYPE_CHECKING and the table of lazy imports have the same names."""
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
