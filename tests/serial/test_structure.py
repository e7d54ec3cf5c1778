"""The tree keeps its structure, and the check that says so finds what it is for."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_check():
    """tools/ is no package: its scripts stand alone."""
    spec = importlib.util.spec_from_file_location("structure", ROOT / "tools" / "structure.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


structure = load_check()


def violations(root, files):
    """Those of a small tree; each file gets a docstring in its first line."""
    for name, text in files.items():
        path = root / "zero_mpi" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""Text."""\n{text}')
    return structure.violations(root)


FILES = ("nn/__init__.py", "nn/layer.py", "ops/reference.py", "comm/base.py", "comm/mpi.py")
FILES += ("models/llama.py", "device/arrays.py", "files/foreign.py", "train/command.py")
SMALL_TREE = dict.fromkeys(FILES, "")
NN_FROM_COMM = "comm.mpi imports nn.layer: nn stands after comm in the order"
FORMS = ("from ..nn import layer\n", "def f():\n    from zero_mpi.nn.layer import Layer\n")
FORMS += ("import importlib\nx = importlib.import_module('zero_mpi.nn.layer')\n",)
LONG = "    x = 1\n" * 40


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        *(("comm/mpi.py", form, NN_FROM_COMM) for form in FORMS),
        ("launch/world.py", "C = ['python', '-m', 'zero_mpi.train.command']\n", "train stands after launch"),
        ("nn/norm.py", "from zero_mpi.comm import base\n", "nn.norm imports comm.base: nn may not use comm"),
        ("sharding/unit.py", "from zero_mpi.nn import Param\n", "sharding may use only nn.layer"),
        ("sharding/unit.py", "from zero_mpi import ShardedModule\n", "zero_mpi.ShardedModule from"),
        ("nn/norm.py", "from mpi4py import MPI\n", "nn.norm imports mpi4py, which only comm.start_mpi may"),
        ("surprise.py", "", "surprise is not in the order"),
        ("comm/base.py", "from zero_mpi.comm import mpi\n", "circle of files: comm.base -> comm.mpi"),
        ("device/arrays.py", f"def f():\n{LONG}", "function f has 41 lines, at most 40 allowed"),
        ("device/arrays.py", "x = 1\n" * 500, "the file has 501 lines, at most 500 allowed"),
        ("ops/flat_reference.py", f"def adamw():\n{LONG}", "adamw has 41 lines now: say so"),
        ("device/arrays.py", "class F:\n    pass\n", "F is public and has no docstring"),
    ],
)
def test_a_violation_is_found(tmp_path, name, text, found):
    others = {"comm/mpi.py": "from zero_mpi.comm import base\n"} if "circle" in found else {}
    lines = violations(tmp_path, SMALL_TREE | others | {name: text})
    assert any(line.startswith(f"zero_mpi/{name}:") and found in line for line in lines), lines


def test_a_name_that_no_module_has_is_found(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(
        '"""Text."""\nfrom zero_mpi.nn.layer import Layer, gone, norm\n'
    )
    assert violations(tmp_path, SMALL_TREE | {"nn/layer.py": "from a import Layer\nnorm = 1\n"}) == [
        "tests/test_x.py:2: zero_mpi.nn.layer.gone does not exist"
    ]
