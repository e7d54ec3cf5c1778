"""Each case of tests/fuzz runs once or twice, in CI with a fixed seed.

To fuzz for an hour: python tests/fuzz/run_fuzz.py --seconds 3600
"""

import os
import random
import sys
from pathlib import Path

import pytest
from jobs import run_command

DRIVER = Path(__file__).parents[1] / "fuzz" / "run_fuzz.py"
ROUNDS = 2
SECONDS = 25  # limit on the fuzzing time, for slow machines


@pytest.mark.timeout_seconds(180)
def test_whatever_a_file_holds_it_is_taken_or_refused_in_one_line(tmp_path, quick):
    seed = 7 if os.environ.get("CI") else random.randrange(100_000)
    flags = ["--rounds", str(1 if quick else ROUNDS), "--seconds", str(SECONDS), "--seed", str(seed)]
    command = [sys.executable, str(DRIVER), *flags, "--keep", str(tmp_path / "failures")]
    status, printed, errors = run_command(command, timeout=170)
    assert (status, errors) == (0, ""), f"{printed[-5000:]}\n{errors}"
    assert "runs in" in printed
