"""The package and the pages keep their budgets."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_package_keeps_its_budget():
    check = [sys.executable, ROOT / "tools" / "budget.py"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
