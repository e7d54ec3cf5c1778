"""Ranks that are forked from a loaded process (tests/warm_start.py) do what ranks that are started do."""

import os
import signal
import subprocess
import sys
import time

import jobs
import pytest
from test_command_bits import SIZES, assert_same_run, needs_mpiexec, write_text

pytestmark = [
    needs_mpiexec,
    pytest.mark.skipif(jobs.is_cold(), reason="ranks are started: ZERO_MPI_TEST_WARM=0, or no MPICH"),
]
SAYS = """
import os, signal, sys, time
from zero_mpi.comm.start_mpi import MPI
about = MPI.COMM_WORLD.size, os.environ.get("PMI_SIZE"), os.getpid()
sys.stdout.write(f"{sys.argv[1:]} {os.getcwd()} {about[0]} {about[1]} {about[2]}\\n")
sys.stdout.flush()
exec(sys.argv[1])
MPI.COMM_WORLD.Barrier()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "says.py"
    path.write_text(SAYS)
    return str(path)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("operations", [jobs.REFERENCE, jobs.COMPILED])
def test_both_write_the_same_files(operations, tmp_path):
    command = ["-m", "zero_mpi.train", *SIZES, "--data", *write_text(tmp_path), "--steps", "2"]
    for warm in (True, False):
        out = str(tmp_path / str(warm))
        status, _, errors = jobs.run_job(2, [*command, "--out", out], env=operations, warm=warm)
        assert (status, errors) == (0, "")
    assert_same_run(tmp_path / "True", tmp_path / "False")


def test_a_rank_has_the_arguments_the_folder_and_the_files_of_its_client(script, tmp_path):
    for warm in (True, False):
        status, printed, errors = jobs.run_job(
            2, [script, "sys.stderr.write('x')", "y z"], cwd=tmp_path, warm=warm
        )
        assert (status, errors) == (0, "xx")
        for line in printed.splitlines():
            assert line.startswith(f"[\"sys.stderr.write('x')\", 'y z'] {tmp_path} 2 2 ")
    assert jobs.run_job(1, ["-m", "zero_mpi.train", "--steps", "x"])[0] == 2
    assert jobs.run_job(1, ["-m", "zero_mpi.train", "--version"])[0] == 0


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("sys.exit(7 if MPI.COMM_WORLD.rank else 0)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", signal.SIGKILL),
        ("MPI.COMM_WORLD.Abort(5)", 5),
        ("raise RuntimeError", 1),
    ],
)
def test_a_job_ends_as_its_ranks_do(action, expected, script, tmp_path):
    command = [script, f"{action}; time.sleep(20)"]
    for warm in (True, False):
        status = jobs.run_job(2, command, warm=warm, timeout=15)[0]
        assert status in (jobs.status_of_one(expected) if expected == signal.SIGKILL else {expected})


def test_signals_reach_a_rank_and_none_outlives_its_launcher(script, monkeypatch):
    monkeypatch.setattr(jobs, "_servers", {})  # tests before may have started as many as there may be
    python = jobs.warm_python(jobs.clean_environment())
    assert len(python) > 1
    for number, says in ((signal.SIGUSR1, b"heard\n"), (signal.SIGKILL, b"")):
        action = "signal.signal(signal.SIGUSR1, lambda *_: print('heard', flush=True)); time.sleep(20)"
        process = subprocess.Popen(
            [*python, script, action], stdout=subprocess.PIPE, env=jobs.clean_environment()
        )
        pid = int(process.stdout.readline().split()[-1])
        time.sleep(0.3)
        process.send_signal(number)
        if says:
            assert process.stdout.readline() == says
            process.kill()
        assert process.wait(10) == -signal.SIGKILL
        process.stdout.close()
        deadline = time.monotonic() + 10
        while alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_other_variables_start_a_rank_anew(monkeypatch):
    assert jobs.warm_python(jobs.clean_environment() | {"ZERO_MPI_X": "1"}) == [sys.executable]
    monkeypatch.setattr(jobs, "MOST_SERVERS", len(jobs._servers))
    monkeypatch.setenv("ZERO_MPI_X", "1")
    assert jobs.warm_python(jobs.clean_environment()) == [sys.executable], "there are servers enough"


def test_a_server_ends_with_the_process_that_has_it(tmp_path):
    program = (
        "import jobs; jobs.warm_python(jobs.clean_environment()); "
        "(server,) = jobs._servers.values(); print(server.process.pid, flush=True); "
        "import os; os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=jobs.clean_environment() | {"PYTHONPATH": str(jobs.WARM.parent)},
        capture_output=True,
        timeout=30,
        check=True,
    )
    deadline = time.monotonic() + 10
    while alive(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
