"""The package keeps its budget, and the check exits with 1 where it does not."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def budget(monkeypatch):
    """tools/ is no package: its scripts stand alone."""
    spec = importlib.util.spec_from_file_location("budget", ROOT / "tools" / "budget.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_package_keeps_its_budget(budget, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["budget.py"])
    assert budget.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "exceeded"),
    [
        ("nn/more.py", "x = 1\n", ()),
        ("comm/nodes/more.py", "x = 1\n" * 60, ("package",)),
        ("nn/more.py", "x = 1\n" * 21, ("engine",)),
        ("nn/more.py", "x = 1\n" * 60, ("engine", "package")),
        ("comm/long.py", "def f():\n" + "    x = 1\n" * 30, ("functions",)),
    ],
)
def test_a_violation_is_found(budget, monkeypatch, capsys, tmp_path, name, text, exceeded):
    monkeypatch.setattr(budget, "ENGINE", ("nn",))
    monkeypatch.setattr(budget, "BUDGET", {"engine": 20, "package": 60})
    for file, content in (("nn/layer.py", "def f():\n    pass\n"), (name, text)):
        path = tmp_path / "zero_mpi" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr("sys.argv", ["budget.py", str(tmp_path)])
    assert budget.main() == bool(exceeded)
    last = capsys.readouterr().out.splitlines()[3:]
    assert [line.split(":")[0] for line in last] == list(exceeded)
