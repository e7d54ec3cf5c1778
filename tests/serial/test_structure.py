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


def test_the_tree_is_clean():
    assert structure.violations(ROOT) == []


def violations(root, files):
    """Those of a small tree; each file gets a docstring in its first line."""
    for name, text in files.items():
        path = root / "zero_mpi" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""Text."""\n{text}')
    return structure.violations(root)


NN_FROM_COMM = (
    "comm.mpi imports nn.layer: comm.* may use errors, foreign, environment, keys, arguments, durable, device"
)


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("comm/mpi.py", "import zero_mpi.nn.layer\n", NN_FROM_COMM),
        ("comm/mpi.py", "from zero_mpi.nn.layer import Layer\n", NN_FROM_COMM),
        ("comm/mpi.py", "from zero_mpi.nn import layer\n", NN_FROM_COMM),
        ("comm/mpi.py", "from ..nn import layer\n", NN_FROM_COMM),
        ("comm/mpi.py", "def f():\n    from zero_mpi.nn.layer import Layer\n", NN_FROM_COMM),
        ("comm/mpi.py", "import importlib\nx = importlib.import_module('zero_mpi.nn.layer')\n", NN_FROM_COMM),
        ("nn/norm.py", "from zero_mpi.comm import base\n", "nn.norm imports comm"),
        ("sharding/unit.py", "from zero_mpi.nn import Param\n", "sharding.unit imports nn:"),
        ("optim.py", "from zero_mpi.models import llama\n", "optim imports models"),
        ("data/loader.py", "from zero_mpi.device.arrays import namespace\n", "data.loader imports arrays"),
        (
            "optim.py",
            "from zero_mpi import ShardedModule\n",
            "imports zero_mpi.ShardedModule from the package",
        ),
        ("nn/norm.py", "from mpi4py import MPI\n", "nn.norm imports mpi4py, which only comm.*, launch may"),
        ("nn/norm.py", "def f():\n    import mpi4py.MPI\n", "nn.norm imports mpi4py"),
        ("ops/reference.py", "import scipy.special\n", "ops.reference imports scipy"),
        ("nn/norm.py", "import cupy as cp\n", "nn.norm imports cupy"),
        ("surprise.py", "", "surprise is in no layer: add it to the table"),
        ("checkpoint/surprise.py", "", "checkpoint.surprise is in no layer: add it to the table"),
        ("arrays.py", "def f():\n" + "    x = 1\n" * 60, "function f has 61 lines, at most 60 allowed"),
        ("arrays.py", "x = 1\n" * 400, "401 lines, at most 400 allowed"),
        ("arrays.py", "def f():\n    return 1\n", "f is public and has no docstring"),
        ("arrays.py", "class F:\n    pass\n", "F is public and has no docstring"),
    ],
)
def test_a_violation_is_found(tmp_path, name, text, found):
    lines = violations(
        tmp_path,
        {
            "nn/__init__.py": "",
            "nn/layer.py": "",
            "comm/base.py": "",
            "models/llama.py": "",
            "arrays.py": "",
            name: text,
        },
    )
    assert any(line.startswith(f"zero_mpi/{name}:") and found in line for line in lines), lines


def test_what_is_allowed_is_not_found(tmp_path):
    assert (
        violations(
            tmp_path,
            {
                "__init__.py": "from zero_mpi.train.trainer import x\nfrom mpi4py import MPI\n",
                "arrays.py": "",
                "device.py": "import cupy\n",
                "ops/cpu.py": "import numba\n"
                "from zero_mpi.ops import reference\nfrom zero_mpi.device.arrays import y\n",
                "ops/reference.py": "def _hidden():\n" + "    x = 1\n" * 59,
                "data/loader.py": "from typing import overload\n@overload\ndef f(x: int) -> int: ...\n"
                "def f(x):\n    'Text.'\n",
                "nn/layer.py": "from zero_mpi import ops\n",
                "comm/mpi.py": "from typing import TYPE_CHECKING\nfrom mpi4py import MPI\n"
                "if TYPE_CHECKING:\n    from zero_mpi.nn.layer import Layer\n",
                "sharding/unit.py": "from zero_mpi.nn.layer import Param\nfrom zero_mpi.comm import mpi\n",
                "optim.py": "from zero_mpi import __version__\nfrom zero_mpi.sharding.unit import Unit\n",
                "train.py": "from zero_mpi.sharding import optimizer as optim\nfrom zero_mpi.sharding import unit\n",
            },
        )
        == []
    )


def test_a_module_without_docstring_is_found(tmp_path):
    (tmp_path / "zero_mpi").mkdir()
    (tmp_path / "zero_mpi" / "arrays.py").write_text("x = 1\n")
    assert structure.violations(tmp_path) == ["zero_mpi/device/arrays.py:1: the module has no docstring"]
