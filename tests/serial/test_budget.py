"""The package and the pages keep their budgets, and the check exits with 1 where they do not."""

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
        ("zero_mpi/comm/nodes/more.py", "x = 1\n" * 60, ("package",)),
        ("zero_mpi/nn/more.py", "x = 1\n" * 60, ("engine", "package")),
        ("zero_mpi/comm/long.py", "def f():\n" + "    x = 1\n" * 30, ("functions",)),
        ("README.md", "word\n" * 21, ("README.md",)),
        ("README.md", "| word " * 41, ("pages", "README.md")),
        ("docs/page.md", "word " * 81, ("pages",)),
        ("docs/images/page.md", "word " * 81, ()),
    ],
)
def test_a_violation_is_found(budget, monkeypatch, capsys, tmp_path, name, text, exceeded):
    monkeypatch.setattr(budget, "ENGINE", ("nn",))
    monkeypatch.setattr(budget, "BUDGET", {"engine": 20, "package": 60})
    monkeypatch.setattr(budget, "WORDS", {"pages": 80, "README.md": 20})
    for file, content in (("zero_mpi/nn/layer.py", "def f():\n    pass\n"), (name, text)):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr("sys.argv", ["budget.py", str(tmp_path)])
    assert budget.main() == bool(exceeded)
    last = capsys.readouterr().out.splitlines()[5:]
    assert [line.split(":")[0] for line in last] == list(exceeded)
