"""A short form of the fuzzing from outside: every case some times, or once; in CI the same ones each time.

An hour of it: python tests/fuzz/run_fuzz.py --seconds 3600
"""

import os
import random
import re
import sys
from pathlib import Path

import pytest
from jobs import run_command

DRIVER = Path(__file__).parents[1] / "fuzz" / "run_fuzz.py"
ROUNDS = 3
SECONDS = 40  # of a slow machine; as many rounds as that leaves


@pytest.mark.timeout_seconds(180)
def test_whatever_a_file_holds_it_is_taken_or_refused_in_one_line(tmp_path, quick):
    seed = 7 if os.environ.get("CI") else random.randrange(100_000)
    flags = ["--rounds", str(1 if quick else ROUNDS), "--seconds", str(SECONDS), "--seed", str(seed)]
    command = [sys.executable, str(DRIVER), *flags, "--keep", str(tmp_path / "failures")]
    status, printed, errors = run_command(command, timeout=170)
    assert (status, errors) == (0, ""), f"{printed[-5000:]}\n{errors}"
    assert "runs in" in printed


BROKEN = {  # what no command may do, and what the driver says of it
    "traceback": ("raise KeyError('x')", "traceback: KeyError: 'x'"),
    "status": ("sys.exit(7)", "status 7"),
    "killed": ("os.kill(os.getpid(), 9)", "status signal 9"),
    "busy": ("while True: pass", "slow: "),
    "memory": ("x = b'x' * (400 << 20)", "memory: "),
    "lines": ("sys.stderr.write('one\\ntwo\\n'); sys.exit(2)", "2 lines where one is promised"),
    "silent": ("sys.exit(2)", "0 lines where one is promised"),
    "long": ("sys.stderr.write('x' * 3000 + '\\n'); sys.exit(2)", "a line of 3000 letters"),
    "escape": ("print('\\x1b[31m')", "control letter"),
    "warning": ("import warnings; warnings.warn('x', stacklevel=1)", "warning"),
    "sound": ("sys.stderr.write('no\\n'); sys.exit(2)", "for what is sound"),
    "fine": ("sys.stderr.write('no\\n'); sys.exit(2)", ""),
}
CODE = {name: code for name, (code, _) in BROKEN.items()}


def test_the_driver_finds_what_it_looks_for(tmp_path):
    """Each promise is broken once by a command that is made for it."""
    lines = [
        "from pathlib import Path",
        "def case(text):",
        "    def write(random, folder):",
        "        (folder / 'x.py').write_text('import os, sys\\n' + text)",
        "        return ['x.py']",
        "    return write",
        f"CASES = {{name: case(text) for name, text in {CODE!r}.items()}}",
    ]
    (tmp_path / "fuzz_broken.py").write_text("\n".join(lines))
    command = [sys.executable, str(DRIVER), "--cases", str(tmp_path), "--rounds", "1"]
    status, printed, errors = run_command([*command, "--keep", str(tmp_path / "kept")], timeout=100)
    assert (status, errors) == (1, ""), printed
    found = dict(re.findall(r"FAILED broken\.(\w+) --number 0: (.*)", printed))
    assert found.keys() == BROKEN.keys() - {"fine"}
    assert [name for name in found if BROKEN[name][1] not in found[name]] == [], found
    assert len(list((tmp_path / "kept").glob("*/files/x.py"))) == len(found), "to be looked at"
