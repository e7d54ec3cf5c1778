"""A rank chooses its GPU before MPI starts if the launcher reports the local rank."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from jobs import COMPILED, run_command, run_job
from test_command_bits import needs_mpiexec, write_text

from zero_mpi.environment import LOCAL_RANK

PRETEND = Path(__file__).resolve().parents[1] / "pretend"
LISTENING = """
import json, sys
from cupy import cuda
used, use = [], cuda.Device.use
def listening(self):
    used.append([self.id, "mpi4py.MPI" in sys.modules])
    use(self)
cuda.Device.use = listening
"""
CLAIM = f"""{LISTENING}
from zero_mpi.train import command as train_command
train_command.run = lambda *_: print(json.dumps(used))
sys.argv = ["train", *sys.argv[1:]]
train_command.main()
"""
WHOLE = f"""{LISTENING}
import os, pathlib
from zero_mpi.environment import LOCAL_RANK
from zero_mpi.train import command as train_command
from zero_mpi.launch import world as launch
finish = launch.finish
def telling(world, *rest):
    told = next((int(os.environ[name]) for name in LOCAL_RANK if name in os.environ), world.rank)
    found = told, used, "zero_mpi.ops.cpu" in sys.modules
    pathlib.Path(os.environ["TOLD"], str(world.rank)).write_text(json.dumps(found))
    finish(world, *rest)
launch.finish = telling
train_command.main()
"""


@pytest.fixture
def env(monkeypatch):
    for name in LOCAL_RANK:
        monkeypatch.delenv(name, raising=False)
    return {"PYTHONPATH": str(PRETEND), "PRETEND_CUPY_GPUS": "2"}


FIRST = LOCAL_RANK[0]
CASES = [(name, "1", "cuda", [[1, False]]) for name in LOCAL_RANK]
CASES += [(FIRST, "2", "auto", [[0, False]]), (FIRST, "1", "cpu", []), (FIRST, "1", "nonsense", [])]


@pytest.mark.parametrize(("name", "told", "flag", "expected"), [*CASES, (FIRST, "untold", "cuda", [])])
def test_a_gpu_is_claimed_before_mpi_starts(env, name, told, flag, expected):
    flags = ["--device", flag]
    command = [sys.executable, "-c", CLAIM, *flags]
    status, output, errors = run_command(command, env=env | {name: told}, timeout=30)
    assert (status, errors) == (0, "")
    assert json.loads(output) == expected


@needs_mpiexec
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="the simulated GPU needs g++ to compile and run its kernels"
)
@pytest.mark.timeout_seconds(240)
@pytest.mark.parametrize("launcher", ["tells", "does not tell"])
def test_ranks_of_a_node_take_their_gpus(env, launcher, tmp_path):
    code, steps = WHOLE, "1"
    if launcher == "does not tell":
        steps = "0"
        code = f"from zero_mpi import environment\nenvironment.LOCAL_RANK = ()\n{code}"
    sizes = {"layers": 1, "dim": 16, "heads": 2, "ffn": 16, "context": 8, "batch-size": 4, "micro-batch": 1}
    flags = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    flags += ["--device", "cuda", "--steps", steps, "--data", *write_text(tmp_path), "--eval-every", "0"]
    flags += ["--sample", "0", "--out"]
    env = env | COMPILED | {"TOLD": str(tmp_path)}
    compiles = ["-m", "zero_mpi.train", *flags, str(tmp_path / "compiles")]  # g++ may take a minute
    assert run_job(1, compiles, env=env, timeout=100)[0] == 0
    staged = ["-c", code, *flags, str(tmp_path / "run"), "--transport", "staged"]
    status, output, errors = run_job(3, staged, env=env, timeout=100)
    assert status == 0, output + errors
    rows = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert {got for got, *_ in rows} == {0, 1, 2}  # Open MPI may number the ranks of a node in another order
    for got, devices, loaded in rows:
        assert not loaded, "CPU kernels must not be loaded"
        assert {number for number, _ in devices} == {got % 2}
        assert devices[0][1] == (launcher == "does not tell")
