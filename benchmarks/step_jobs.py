"""Starts the jobs that a benchmark compares. Each job prints JSON objects, one per line."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent


def launcher() -> str:
    """Return the mpirun next to this Python, or else the one on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun") or "mpirun"


def step_command(ranks: int, flags: Sequence[str]) -> list[str]:
    """Return the command `mpirun -n ranks python step.py FLAGS --json`."""
    return [launcher(), "-n", str(ranks), sys.executable, str(HERE / "step.py"), *flags, "--json"]


def run_once(command: Sequence[str]) -> dict[str, float] | None:
    """Run a job. Return its last result; without a result, print the error and return None."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, stdin=subprocess.DEVNULL)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:  # the status is not used: torch's processes may abort at their end, after the result
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"failed: {' '.join(command[-8:])}: {last}", file=sys.stderr)
        return None
    return dict(json.loads(lines[-1]))
