"""The package keeps its budget, and the check that says so finds what it is for."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def budget():
    """tools/ is no package: its scripts stand alone. Without debts, and with room for a small tree."""
    spec = importlib.util.spec_from_file_location("budget", ROOT / "tools" / "budget.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(budget, monkeypatch):
    for name in ("POSITIONAL", "ATTRIBUTES", "ASKERS"):
        monkeypatch.setattr(budget, name, {})
    for name in ("MODULES", "CLASSES", "DIALECT"):
        monkeypatch.setattr(budget, name, ())
    monkeypatch.setattr(budget, "MOST_TERSE", 0)
    monkeypatch.setattr(budget, "ENGINE", ("nn",))
    monkeypatch.setattr(budget, "BUDGET", {"engine": 20, "package": 60})
    return budget


def found(budget, root, files):
    """The texts of all violations of a small tree."""
    for name, text in files.items():
        path = root / "zero_mpi" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [f"{name}:{line}: {text}" for name, line, text in budget.violations(root)]


def test_the_package_keeps_its_budget(budget, capsys):
    assert budget.violations(ROOT) == []
    said = capsys.readouterr().out
    assert "engine" in said
    assert "goal 28000" in said


SOUND = {
    "nn/layer.py": "class Layer:\n    def __init__(self):\n        self.a = 1\n",
    "sharding/unit.py": "def f(a, b, c, d, e, f, *, g):\n    pass\n",
    "ops/gpu/norm.py": "def f(a, b, c, d, e, f, g, h):\n    return is_cupy(a)\n",
}
MANY = "".join(f"        self.a{number} = 1\n" for number in range(13))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"nn/more.py": "x = 1\n" * 20}, ":1: engine: 23 lines, budget 20"),
        ({"comm/more.py": "x = 1\n" * 60}, ":1: package: 67 lines, budget 60"),
        ({"comm/mpi.py": "def f(self, a, b, c, d, e, f, g):\n    pass\n"}, "comm/mpi.py:1: f: 7 positional"),
        (
            {"comm/mpi.py": f"class M:\n    def __init__(self):\n{MANY}"},
            "comm/mpi.py:1: M: 13 attributes set in __init__, at most 12 allowed",
        ),
        ({"comm/mpi.py": "x = device.is_cupy(y)\n"}, "comm/mpi.py:1: 1 questions about the device"),
        ({"comm/mpi.py": "class Layer:\n    pass\n"}, "the class Layer stands in comm/mpi.py, nn/layer.py"),
        ({"plan/layer.py": ""}, "plan/layer.py:1: the module layer stands in nn/layer.py, plan/layer.py"),
        ({"nn/uniform.py": ""}, "nn/uniform.py:1: uniform: the word uniform is banned"),
        (
            {"comm/mpi.py": "x = 1\nclass RollCall:\n    pass\n"},
            "comm/mpi.py:2: RollCall: the word rollcall is",
        ),
        ({"comm/mpi.py": "def take_the_ways():\n    pass\n"}, "take_the_ways: the word ways is banned"),
        ({"comm/mpi.py": "def always():\n    pass\n"}, None),
        (
            {"comm/mpi.py": 'def f():\n    """Of both."""\n'},
            "comm/mpi.py:1: 'Of both.' is a docstring of fewer than 4 words",
        ),
        ({"comm/mpi.py": 'def f():\n    """The sum of both."""\n'}, None),
        ({"comm/mpi.py": 'def f():\n    """As `reference.add`."""\n'}, None),
        ({"nn/long.py": "def f():\n" + "    x = 1\n" * 12}, None),
    ],
)
def test_a_violation_is_found(small, tmp_path, files, expected):
    lines = found(small, tmp_path, SOUND | files)
    assert len(lines) == (expected is not None), lines
    assert expected is None or expected in lines[0]


def test_a_debt_that_is_paid_must_go(small, tmp_path, monkeypatch):
    monkeypatch.setattr(small, "POSITIONAL", {"sharding/unit.py:f": 8})
    monkeypatch.setattr(small, "CLASSES", ("Layer",))
    monkeypatch.setattr(small, "DIALECT", ("nn/layer.py:ghost",))
    monkeypatch.setattr(small, "MOST_TERSE", 2)
    lines = found(small, tmp_path, SOUND)
    assert any("nn/layer.py:ghost has no banned word now" in line for line in lines)
    assert any("0 terse docstrings now: lower MOST_TERSE of 2" in line for line in lines)
    assert any("6 positional parameters now: lower or remove the debt of 8" in line for line in lines)
    assert any("the class Layer stands once now" in line for line in lines)
