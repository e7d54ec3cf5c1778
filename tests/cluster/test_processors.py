"""With `--bits portable`, emulated processors of Intel and AMD give bit for bit this processor's results.

QEMU's user mode runs one process with the instructions and identity of another processor, without AVX-512.
The emulator rounds products, square roots and fused multiply-adds correctly. It runs the code that was
compiled here for the pinned target, so it need not compile. The models come from tests/portable_steps.py.
"""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import architectures
import pytest
from jobs import COMPILED, clean_environment, launcher, launcher_kind, run_command
from test_command_bits import files, needs_mpiexec, write_text
from test_consistency import FLAGS, RUN

from zero_mpi.environment import portable

STEPS = Path(__file__).resolve().parents[1] / "portable_steps.py"
EMULATOR = "qemu-x86_64"
# Each architecture is trained on one of the processors.
NAMES = tuple(architectures.ROWS)
PROCESSORS = {"Haswell": NAMES[::2], "EPYC-Rome": NAMES[1::2]}
NOT_FITTING = portable.unfit(platform.machine(), portable.environment.of_processor("flags"))

pytestmark = [
    pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR}: apt-get install qemu-user"),
    pytest.mark.skipif(bool(NOT_FITTING), reason=f"--bits portable: {NOT_FITTING}"),
]


def lines(*before, names=()):
    env = clean_environment() | COMPILED | {portable.VARIABLE: portable.PORTABLE}
    command = [*before, sys.executable, str(STEPS), *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def here():
    digests = lines()
    assert [line.split()[0] for line in digests] == ["functions", *architectures.ROWS, "trial"]
    return digests


@pytest.mark.timeout_seconds(900)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_architectures_have_the_bits_of_this_processor(processor, here):
    names = PROCESSORS[processor]
    cases = ("functions", *names, "trial")
    expected = [line for line in here if line.split()[0] in cases]
    assert lines(EMULATOR, "-cpu", processor, names=names) == expected


@needs_mpiexec
@pytest.mark.skipif(launcher_kind() != "mpich", reason="only MPICH has a setting against process_vm_readv")
@pytest.mark.timeout_seconds(900)
@pytest.mark.parametrize("bits", ["portable", "native"])
def test_ranks_on_unlike_processors(bits, tmp_path):
    """Ranks on different processors give the same bytes as one rank here; native bits are refused."""
    environ = COMPILED | {portable.VARIABLE: bits, "MPIR_CVAR_CH4_CMA_ENABLE": "0"}
    train = [*RUN, *FLAGS, "--data", *write_text(tmp_path), "--resume", "never", "--out"]
    emulated = [EMULATOR, "-cpu", "EPYC-Rome", *train]
    command = [*launcher(), "-n", "1", *train, "both", ":", "-n", "1", *emulated, "both"]
    status, printed, errors = run_command(command, timeout=600, cwd=tmp_path, env=environ)
    if bits == "native":
        assert status == 2
        assert "the ranks differ: rank 1" in errors or "the ranks compute different bits: rank 1" in errors
        return
    assert status == 0, f"{printed}\n{errors}"
    status, printed, errors = run_command([*train, "one"], timeout=100, cwd=tmp_path, env=environ)
    assert status == 0, f"{printed}\n{errors}"
    assert files(tmp_path / "both") == files(tmp_path / "one")
