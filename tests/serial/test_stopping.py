"""After a signal at any moment, a run saves and ends with the right status and lines.

A test that presses keys runs its job on its own terminal. Launchers treat signals differently: MPICH's
forwards them, but a second Ctrl-C and a closed terminal make it kill its ranks. Open MPI's kills its ranks on
every signal but SIGUSR1, and is paused (`zero_mpi.launch.ending`) until they have saved.
"""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from jobs import (
    clean_environment,
    hands_sigterm_on,
    launcher,
    run_command,
    run_job,
    running,
    status_of,
    until,
)
from patched import train_with
from test_batch import program
from test_command_bits import assert_same_run, fields, needs_mpiexec, train, write_text
from test_resume import SMALL, wait_for_lines

REQUEUE, INTERRUPTED, FAILED = 75, 130, 1
STOPPING = "stopping after this step; "
ENDLESS = ["--steps", "100000", "--schedule", "constant"]
PYTHON = sys.executable
TRAIN = [PYTHON, "-m", "zero_mpi.train"]
CTRL_C = b"\x03"


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    return [*SMALL, "--data", *write_text(tmp_path_factory.mktemp("text"))]


class Terminal:
    """Command in the foreground of a terminal, with its output."""

    def __init__(self, command: Sequence[str]) -> None:
        self.pid, self._handle = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], list(command), clean_environment())
        self._seen, self.returncode = bytearray(), None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while text := os.read(self._handle, 4096):
                self._seen += text

    @property
    def text(self) -> str:
        return self._seen.decode(errors="replace")

    def press(self, keys: bytes) -> None:
        os.write(self._handle, keys)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def until(self, holds: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.text
            time.sleep(0.01)

    def wait(self, seconds: float = 30) -> int | None:
        """Return the exit status after the command has ended and all output is read."""
        self.until(lambda: self.poll() is not None, seconds)
        self._reader.join(5)
        return self.returncode


@contextlib.contextmanager
def terminal(*command: str) -> Iterator[Terminal]:
    """Run a command on a terminal; end it with the block at the latest."""
    screen = Terminal(command)
    try:
        yield screen
    finally:
        if screen.poll() is None:
            os.killpg(screen.pid, signal.SIGKILL)
            os.waitpid(screen.pid, 0)


def told(out: Path) -> tuple[str, str]:
    record = status_of(out)
    return record["state"], record["reason"]


def assert_saved(out: Path) -> int:
    """Check that the newest checkpoint is of the last recorded step, and return that step."""
    done = len(fields(out))
    assert os.readlink(out / "latest") == f"step-{done:08d}"
    return done


# on a terminal


@needs_mpiexec
def test_ctrl_c_under_a_launcher_saves_and_the_same_command_goes_on(flags, tmp_path):
    out = tmp_path / "out"
    args = ["--out", str(out), *flags, "--schedule", "constant"]
    with terminal(*launcher(), "-n", "2", *TRAIN, *args, *ENDLESS) as screen:
        wait_for_lines(out / "metrics.jsonl", 5, screen)
        screen.press(CTRL_C)
        status = screen.wait()
    assert "Traceback" not in screen.text
    stopped = assert_saved(out)
    assert 5 <= stopped < 100000
    if hands_sigterm_on():
        assert (status, told(out)) == (REQUEUE, ("stopped", "SIGINT"))
        assert screen.text.count(STOPPING) == 1, screen.text
    else:
        assert (status, told(out)) == (FAILED, ("stopped", "SIGTERM"))
        assert screen.text.count("stopping after this step") == 1, screen.text
    train(2, out, *args[2:], "--steps", str(stopped + 2))
    train(1, tmp_path / "unbroken", *args[2:], "--steps", str(stopped + 2))
    assert_same_run(out, tmp_path / "unbroken")


def long_step(folder: Path, seconds: float) -> str:
    """Return a script of a run whose fifth step takes some seconds."""
    body = f"""
        if done == 4:
            open(f'{folder}/at-{{rank}}', 'w').close()
            time.sleep({seconds})"""
    return train_with(folder / "long_step.py", body)


def test_a_second_ctrl_c_ends_at_once_and_keeps_what_is_saved(flags, tmp_path):
    out = tmp_path / "out"
    command = [PYTHON, long_step(tmp_path, 300), "--out", str(out), *flags, *ENDLESS, "--save-every", "2"]
    with terminal(*command) as screen:
        until((tmp_path / "at-0").exists, "step 4")
        screen.press(CTRL_C)
        screen.until(lambda: STOPPING in screen.text, 40)
        time.sleep(0.5)  # two signals in less time would count as one
        screen.press(CTRL_C)
        assert screen.wait(10) == INTERRUPTED
    assert "Traceback" not in screen.text
    assert len(re.findall(r"zero_mpi: stopped ", screen.text)) == 1
    assert os.readlink(out / "latest") == "step-00000004"
    assert told(out) == ("failed", "SIGINT, twice")


PIDS = """
import os
from zero_mpi import environment
with open(r"{folder}/rank-" + str(environment.launch_rank()), "w") as file:
    file.write(str(os.getpid()))
"""


def test_a_closed_terminal_saves(flags, tmp_path):
    """A failed write to the closed terminal must not end the run before it has saved."""
    out = tmp_path / "out"
    script = tmp_path / "shell.py"
    command = [*TRAIN, "--out", str(out), *flags, *ENDLESS]
    # This process alone holds the terminal's other end, so the terminal closes with it.
    script.write_text(f"""
import os, pty, sys, time
pid, handle = pty.fork()
if pid == 0:
    os.execv({command[0]!r}, {command!r})
print(pid, flush=True)
sys.stdin.readline()
os.close(handle)
_, status = os.waitpid(pid, 0)
print(os.waitstatus_to_exitcode(status), flush=True)
""")
    keeper = subprocess.Popen(
        [PYTHON, str(script)],
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert keeper.stdin is not None
        wait_for_lines(out / "metrics.jsonl", 5, keeper)
        printed, _ = keeper.communicate("\n", timeout=30)
    finally:
        keeper.kill()
        keeper.wait()
    assert printed.split()[1] == str(REQUEUE)
    assert assert_saved(out) >= 5
    assert told(out) == ("stopped", "SIGHUP")


def test_a_run_under_nohup_goes_on(flags, tmp_path):
    out = tmp_path / "out"
    command = ["nohup", PYTHON, long_step(tmp_path, 0.5), "--out", str(out), *flags, "--steps", "6"]
    with running(command, tmp_path / "log") as job:
        until((tmp_path / "at-0").exists, "step 4")
        job.send_signal(signal.SIGHUP)
        assert job.wait(30) == 0


# a script that calls the command's function

CALLS = """
import sys
from zero_mpi.launch.stopping import signals
from zero_mpi.launch.world import run
from zero_mpi.train.command import command as train

def command(world, arguments):
    status = train(world, arguments)
    print(f"returned {status}\\n", end="", flush=True)  # in one piece, for two ranks print
    return status

signals.listen()
run("script", command, sys.argv[1:])
"""


@needs_mpiexec
def test_a_script_that_trains_saves_and_ends_with_75(flags, tmp_path):
    """A signal to one rank stops all ranks."""
    out, script = tmp_path / "out", tmp_path / "script.py"
    script.write_text(PIDS.format(folder=tmp_path) + CALLS)
    command = [*launcher(), "-n", "2", PYTHON, str(script), "--out", str(out), *flags, *ENDLESS]
    with running(command, tmp_path / "log") as job:
        wait_for_lines(out / "metrics.jsonl", 5, job)
        os.kill(int((tmp_path / "rank-1").read_text()), signal.SIGINT)
        status = job.wait(40)
    output = (tmp_path / "log").read_text()
    assert "Traceback" not in output
    assert assert_saved(out) >= 5
    assert (status, told(out)[0]) == (REQUEUE, "stopped"), output
    assert output.count(f"returned {REQUEUE}") == 2


# signals from the first line of the program on

# Signals this process at the import of numpy, which the package imports late.
EARLY = """
import os, signal, sys, time

class Early:
    def find_spec(self, name, path, target=None):
        if name == "numpy":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), {number})
            time.sleep(0.6)

sys.meta_path.insert(0, Early())
"""


def early(folder: Path, number: int) -> dict[str, str]:
    (folder / "early").mkdir(exist_ok=True)
    (folder / "early" / "sitecustomize.py").write_text(EARLY.format(number=int(number)))
    return {"PYTHONPATH": str(folder / "early")}


WAYS = {
    "module": TRAIN,
    "package": [PYTHON, "-m", "zero_mpi", "train"],
    "script": [str(Path(PYTHON).with_name("zero-mpi")), "train"],
}


@pytest.mark.parametrize(
    ("way", "name"),
    [("module", "SIGINT"), ("package", "SIGTERM"), ("script", "SIGUSR1"), ("module", "SIGHUP")],
)
def test_a_signal_during_the_imports_ends_the_run_before_its_first_step(way, name, flags, tmp_path):
    out = tmp_path / "out"
    command = [*WAYS[way], "--out", str(out), *flags, *ENDLESS]
    status, printed, errors = run_command(command, timeout=40, env=early(tmp_path, signal.Signals[name]))
    assert (status, errors) == (REQUEUE, ""), printed
    assert f"stopped by {name} before the first step: nothing to save" in printed
    assert told(out) == ("stopped", f"{name} before the first step")
    assert not list(out.glob("step-*"))


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_another_command_ends_at_once_without_a_traceback(command, tmp_path):
    status, printed, errors = run_command(
        [PYTHON, "-m", "zero_mpi", command], timeout=40, env=early(tmp_path, signal.SIGINT)
    )
    assert (status, printed, errors) == (INTERRUPTED, "", f"zero_mpi {command}: interrupted\n")


AT_WORK = """
import os, signal
from zero_mpi.commands.inspect import command as inspect
from zero_mpi.launch import world as launch

def command(world, arguments):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    finally:
        print("tidied up")

launch.run("inspect", command, [])
"""


def test_a_command_that_is_interrupted_at_work_tidies_up():
    status, printed, errors = run_command([PYTHON, "-c", AT_WORK], timeout=40)
    assert (status, printed, errors) == (INTERRUPTED, "tidied up\n", "zero_mpi: interrupted\n")


# during the start of a run

BUSY = """
import os, signal, time
from zero_mpi.{package} import {module}
from zero_mpi.train import command as train_command

def busy(*arguments):
    {told}
    until = time.monotonic() + 300
    while time.monotonic() < until:
        pass

{module}.{name} = busy
train_command.main()
"""
MYSELF = "os.kill(os.getpid(), signal.{name})"


@needs_mpiexec
@pytest.mark.parametrize(
    ("name", "who"),
    [
        ("resolve.read_corpus", MYSELF.format(name="SIGTERM")),  # rank 0 reads while rank 1 waits
        ("resolve.inputs.open_init", "if os.environ.get('PMI_RANK', os.environ.get('PMIX_RANK')) == '1': "
         + MYSELF.format(name="SIGUSR1")),
        ("setup.make_module", MYSELF.format(name="SIGINT")),  # ranks may be in a collective here
    ],
)  # fmt: skip
def test_a_signal_ends_what_takes_long_before_the_first_step(name, who, flags, tmp_path):
    out, script = tmp_path / "out", tmp_path / "busy.py"
    module, _, name = name.partition(".")
    script.write_text(BUSY.format(package="train", module=module, name=name, told=who))
    status, printed, errors = run_job(2, [str(script), "--out", str(out), *flags, *ENDLESS], timeout=40)
    assert status == REQUEUE, errors
    assert printed.count("before the first step: nothing to save") <= 1
    assert "Traceback" not in errors
    state, reason = told(out)
    assert (state, reason.partition(" ")[2]) == ("stopped", "before the first step")


def test_a_sample_is_cut_short(flags, tmp_path):
    """After the last save a signal changes nothing: the run is done."""
    script = tmp_path / "busy.py"
    told_so = MYSELF.format(name="SIGINT")
    script.write_text(BUSY.format(package="train", module="trainer", name="show_sample", told=told_so))
    command = [PYTHON, str(script), "--out", str(tmp_path / "out"), *flags, "--steps", "2"]
    status, printed, errors = run_command(command, timeout=40)
    assert (status, errors) == (0, ""), printed
    assert told(tmp_path / "out") == ("done", "")


# consecutive jobs


def test_jobs_that_do_no_step_do_not_follow_each_other_for_ever(flags, tmp_path):
    """If the signal comes at each job's start, the second job without a step fails, so the chain ends."""
    out, end = tmp_path / "out", str(int(time.time()) + 170)
    command = [*TRAIN, "--out", str(out), *flags, "--steps", "3"]
    program(tmp_path, "squeue", "exit 1")  # squeue fails, so the job's variables are used
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": end, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    told_at_once = job | early(tmp_path, signal.SIGUSR1)
    assert run_command(command, timeout=40, env=told_at_once)[0] == REQUEUE, "once is allowed"
    status, _, errors = run_command(command, timeout=40, env=told_at_once)
    (line,) = errors.splitlines()
    assert status == FAILED
    assert re.search(r"signal came 1\d\d s before the end of Slurm job 17, .*--signal=B:USR1@", line)
    assert run_command(command, timeout=40, env=job)[0] == 0
    assert run_command([*command, "--steps", "5"], timeout=40, env=told_at_once)[0] == REQUEUE, (
        "a run that made a step is requeued"
    )


# saves at intervals of time

SOON = """
from zero_mpi.train import command as train_command, saving
saving.SAVE_SECONDS, saving.SAVE_PAUSE = 0.0, 0
train_command.main()
"""


@needs_mpiexec
def test_by_default_a_run_saves_now_and_then_by_the_clock_of_rank_0(flags, tmp_path):
    """Saves that depend on the time do not change the bits."""
    script = tmp_path / "soon.py"
    script.write_text(SOON)
    args = [*flags, "--steps", "4", "--keep", "2"]
    printed = train(2, tmp_path / "out", *args, script=script)
    assert printed.count("saved ") == 4
    assert len(list((tmp_path / "out").glob("step-*"))) == 2, "--keep must apply"
    printed = train(2, tmp_path / "at-the-end", *args, "--save-every", "0", script=script)
    assert printed.count("saved ") == 1
    assert_same_run(tmp_path / "out", tmp_path / "at-the-end")
    assert "save_every" not in (tmp_path / "out" / "config.toml").read_text()
    assert "save_every = 0" in (tmp_path / "at-the-end" / "config.toml").read_text()
