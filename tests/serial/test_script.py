"""If one rank of a user's script fails or exits, the job soon ends with a line that names it."""

import os
import re
import sys
import tempfile

import numpy as np
import pytest
from jobs import run_command, run_job

from zero_mpi.launch.connect import time_limit
from zero_mpi.launch.watchdog import STATUS

CONNECT = """
import os, sys, threading, time
import numpy as np
from zero_mpi import *
from zero_mpi.models import Llama
comm = connect(TIMEOUT)
one = comm.rank == 1
meet = lambda: comm.sum_vector(np.zeros(1))
def make():
    sizes = {"layers": 2, "dim": 16, "heads": 2, "context": 8, "vocab_size": 16}
    module = ShardedModule(Llama.from_flags(sizes).stages(), comm)
    module.initialize(0)
    return module
def work(module):
    module.forward(np.zeros((1, 8), int))
    module.backward(np.ones((1, 8, 16), np.float32))
    module.sync_gradients()
"""


def job(script, how="", **env):
    """Run three ranks; return status, stdout, the package's lines on stderr and the full stderr."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"TMPDIR": folder, **env}
        result = run_job(3, ["-c", CONNECT.replace("TIMEOUT", how) + script], timeout=60, env=env)
        assert os.listdir(folder) == []
    status, printed, errors = result
    return status, printed, [line for line in errors.splitlines() if line.startswith("zero_mpi: ")], errors


ENDED = {
    "exit": ("if one: sys.exit(3)\nmeet()", 3, r"rank 1 .* 3, .* for it in .*vector"),
    "end": ("if not one: meet()", 1, r"rank 1 .* 0, while ranks? [02]"),
    "state_dict": (
        "module = make()\nif one: module.state_dict()",
        1,
        r"rank [02] .* while rank 1 waits for it in allgather of parameters token_embd \(1024",
    ),
    "others": (
        "module = make()\nmodule.state_dict() if one else work(module)\nmeet()",
        1,
        r"number \d+ \(from 0\) is allgather of parameters blk.0 .*rank 1 and allgather of parameters blk.1",
    ),
}


@pytest.mark.parametrize("name", ENDED)
def test_who_waits_in_vain_ends_the_job(name):
    script, status, line = ENDED[name]
    actual, _, lines, errors = job(script)
    assert actual == status, errors
    # Open MPI may be the first to notice that a message does not fit.
    seen_by_mpi = name == "others" and "mpi4py.MPI.Exception: MPI_ERR_" in errors
    assert re.search(line, lines[0]) or seen_by_mpi, lines
    assert sum("ending the job" in line for line in lines) == 1, lines


def test_other_models_are_an_error_on_all_ranks_that_is_said_once():
    script = "print(end=str(comm.rank))\nShardedLinear(comm, 4, 4 + one)"
    status, _, lines, errors = job(script)
    assert status == 1
    assert errors.count("UsageError: the ranks differ in this ShardedLinear: ") == 1
    assert re.search(
        r"rank 1 on .* has .* \(5, 4\), trained, in unit linear.weight, ranks 0, 2 .* \(4, 4\)", errors
    )
    assert [line.partition(" failed ")[0] for line in lines] == ["zero_mpi: rank 0 of 3"]


def test_two_threads_are_refused():
    script = (
        "started = threading.Barrier(2)\n"
        "def run():\n"
        "    started.wait(); module = make()\n"
        "    for _ in range(100): work(module)\n"
        "threads = [threading.Thread(target=run) for _ in range(2)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "meet()\n"
    )
    status, _, lines, errors = job(script)
    assert status == 1
    assert re.search(r"ThreadError: rank 0: thread 'Thread-. \(run\)' starts \w+", errors)
    assert re.fullmatch(r"zero_mpi: thread .* of rank 0 of 3 failed .*", lines[0])


def test_checked_collectives_name_what_differs_at_once():
    status, _, lines, errors = job("comm.allreduce(np.zeros(5 if one else 4))", how="check=True")
    assert status == 1
    assert "is allreduce (5 float64) on rank 1, where 2 of 3 ranks start allreduce (4 float64)" in errors
    assert lines == ["zero_mpi: rank 0 of 3 failed with the error above; ending the job"]


@pytest.mark.parametrize("status", [0, 5])
def test_ranks_that_all_end_are_left_alone(status):
    script = f"work(make()); meet()\nif one: time.sleep(1.5)\nprint('all'); sys.exit({status})"
    actual, printed, lines, errors = job(script, ZERO_MPI_TIMEOUT="1")
    assert (actual, printed.count("all"), lines) == (status, 3, []), errors


def test_a_wait_without_an_end_ends_by_the_watchdog():
    status, _, lines, errors = job("if one: time.sleep(50)\nmeet()", how="timeout=3")
    assert status == STATUS
    assert re.search(r"no progress for 3.* s: rank 1 .*: the script, in no collective", lines[0]), errors
    assert re.search(r"ranks 0, 2: the script, waiting in .* for 3", "\n".join(lines))
    assert 'File "<string>"' in errors.partition("stacks of rank 1")[2]


def test_who_computes_for_long_is_let_be():
    """Only time in waits counts towards the limit, not computation."""
    status, printed, lines, errors = job("time.sleep(2.5)\nmeet(); print('on')", how="timeout=1")
    assert (status, printed.count("on"), lines) == (0, 3, []), errors


NOTEBOOK = """
import atexit, os, signal, sys, threading, time
before = sys.excepthook, threading.excepthook, sys.exit, signal.getsignal(signal.SIGINT)
from zero_mpi import connect
atexit.register = None
comm = connect()
assert before == (sys.excepthook, threading.excepthook, sys.exit, signal.getsignal(signal.SIGINT))
assert threading.enumerate() == [threading.main_thread()]
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    print("in the cell")
try:
    sys.exit(3)
except SystemExit:
    print("still here", comm.sum_vector([1.0]))
"""


def test_in_a_notebook_nothing_ends_the_kernel():
    """A single process keeps its hooks, signals and threads; an interrupt ends the cell."""
    result = run_command([sys.executable, "-c", NOTEBOOK], timeout=60)
    assert result == (0, "in the cell\nstill here [1.]\n", "")


@pytest.mark.parametrize("told", ["long", "-1", "nan", "inf"])
def test_a_time_limit_that_is_none(monkeypatch, told):
    monkeypatch.setenv("ZERO_MPI_TIMEOUT", told)
    with pytest.raises(ValueError, match=f"^ZERO_MPI_TIMEOUT={told}: expected seconds, or 0 for never$"):
        time_limit(None)
    assert time_limit(np.int64(7)) == 7.0
