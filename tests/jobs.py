"""Functions that start MPI jobs for a test (or for run_sizes.py), and end all their processes.

A job is `mpiexec -n RANKS python ARGS...` in its own session, without stdin, with its output written
to files, so that neither a hanging rank nor a rank that outlives its launcher can block the caller.
The launcher is $ZERO_MPI_MPIEXEC, else the mpiexec in the folder of this python, else the one on PATH. This
module also handles differences between launchers: `ranks_said`, `launcher_kind` and its callers.
"""

import atexit
import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

TIMED_OUT = 124  # status of timeout(1)

# Variables that a launcher sets for its ranks. A launcher that finds these acts as a rank of the outer job.
JOB_VARIABLES = re.compile(r"(PMI|PMIX|OMPI|PRTE|HYDRA|HYDI)_|MPI_LOCAL(NRANKS|RANKID)$")
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
SETTINGS = re.compile(
    r"OMPI_ALLOW_RUN_AS_ROOT|PRTE_MCA_(rmaps|hwloc)_default_|OMPI_MCA_(rmaps|hwloc)_base_"
)  # variables that users set, not launchers

# Messages of Open MPI's launcher and MPI_Abort on stderr in a job whose status is not 0: lines between two
# rules, sometimes followed by a null byte. MPICH prints on stdout or nothing. Warnings, which look
# similar, are kept.
NOTES = re.compile(
    r"(?m)^-{60,}\n"
    r"(?:\w+ (?:detected that one or more|has exited due to|noticed that) process"
    r"|Primary job  terminated normally, but \d+ process(?:es)? returned|MPI_ABORT was invoked on )"
    r"(?:.*\n)*?-{60,}\n\0?"
)

REFERENCE, COMPILED = {"ZERO_MPI_OPS": "reference"}, {"ZERO_MPI_OPS": "auto"}

OF_A_TEST = "PYTEST_CURRENT_TEST"  # pytest sets this variable again in every phase of a test
MOST_SERVERS = 4  # each server uses as much memory as a rank
WARM = Path(__file__).with_name("warm_start.py")

_servers: dict[tuple[tuple[str, str], ...], "Server"] = {}  # environment -> server
_set_for_this_process: set[str] = set()
_running: set[int] = set()


def inside_job() -> bool:
    return any(name in os.environ for name in RANK_VARIABLES)


def prepare_process() -> None:
    """Set variables that numpy and MPI read at their start; variables that are already set stay.

    Ranks use one BLAS thread, and MPICH yields the core if there are more ranks than cores: otherwise
    a barrier takes a time slice of the scheduler. Jobs that a test starts do not inherit these settings,
    because tests also cover the package's own choice.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job of a shell inherits this
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup set it; jobs must not inherit it
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    preset = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    ranks = max(int(os.environ.get(name, 1)) for name in SIZE_VARIABLES)
    if ranks > len(os.sched_getaffinity(0)):
        preset |= {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "MPIR_CVAR_ALLGATHERV_PIPELINE_MSG_SIZE": "67108864"}
    for name in preset.keys() - os.environ.keys():
        os.environ[name] = preset[name]
        _set_for_this_process.add(name)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without the variables of an outer job or `prepare_process`.

    Python writes bytecode even if a container's image disables it, because compiling the package
    would double the start time of two thousand processes. Jobs use the reference operations unless a
    test adds COMPILED, because loading compiled operations takes a rank longer than a small job's steps.
    """
    in_job = inside_job()

    def of_outer_job(name: str) -> bool:
        return in_job and bool(JOB_VARIABLES.match(name)) and not SETTINGS.match(name)

    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in {*_set_for_this_process, "PYTHONDONTWRITEBYTECODE"} and not of_outer_job(name)
    }
    return environ | REFERENCE


def launcher() -> list[str]:
    if "ZERO_MPI_MPIEXEC" in os.environ:
        return shlex.split(os.environ["ZERO_MPI_MPIEXEC"])
    folder = str(Path(sys.executable).parent)
    path = shutil.which("mpiexec", path=folder) or shutil.which("mpiexec")
    if path is None:
        raise FileNotFoundError("no mpiexec: install an MPI, e.g. pip install '.[mpich]'")
    return [path]


def run_job(
    ranks: int,
    args: Sequence[str | os.PathLike[str]],
    *,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    warm: bool = True,
) -> tuple[int, str, str]:
    """Run `mpiexec -n ranks python args...`; return (exit status, stdout, the ranks' stderr).

    `env` is added to the cleaned environment. After `timeout` seconds the job ends with status `TIMED_OUT`.
    `warm`: ranks may be forked from a process that has loaded the package (`warm_start`).
    """
    forked = warm and (args[0] == "-m" or not str(args[0]).startswith("-"))
    python = warm_python(clean_environment() | dict(env or {})) if forked else [sys.executable]
    command = [*launcher(), "-n", str(ranks), *python, *args]
    status, printed, errors = run_command(command, timeout=timeout, env=env, cwd=cwd)
    return status, printed, ranks_said(errors) if status else errors


def warm_python(environ: Mapping[str, str]) -> list[str]:
    kind = environ.get("ZERO_MPI_OPS", "")
    usual = clean_environment() | {"ZERO_MPI_OPS": kind}
    usual, environ = ({k: v for k, v in each.items() if k != OF_A_TEST} for each in (usual, environ))
    cold = os.environ.get("ZERO_MPI_TEST_WARM") == "0" or not hands_sigterm_on()
    if environ != usual or cold:
        return [sys.executable]
    key = tuple(sorted(usual.items()))  # the environment, which later imports may change
    if key not in _servers and len(_servers) == MOST_SERVERS:
        return [sys.executable]
    if key not in _servers:
        _servers[key] = Server(usual)
    return [sys.executable, "-ISE", str(WARM), "client", _servers[key].address]


def with_warm_python(folder: Path) -> str:
    """Return a PATH with a warm `python` and `zero-mpi`, then this Python and its launcher.

    For shells. A process that restarts itself, as for portable bits, starts normally.
    """
    plain = shlex.quote(sys.executable)
    warm = shlex.join(warm_python(clean_environment()))
    folder.mkdir(exist_ok=True)
    program = folder / "python"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *portable*) exec {plain} "$@" ;; esac\n'
        f'case "$1 $2" in "-m zero_mpi"*) exec {warm} "$@" ;; esac\nexec {plain} "$@"\n'
    )
    command = folder / "zero-mpi"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(str(program))} -m zero_mpi "$@"\n')
    for path in (program, command):
        path.chmod(0o755)
    return os.pathsep.join(
        [str(folder), str(Path(launcher()[0]).parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    )


class Server:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self.address = f"zero_mpi-tests-{uuid.uuid4().hex}"
        self.process = subprocess.Popen(
            [sys.executable, str(WARM), "server", self.address],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != b"ready\n":
            raise RuntimeError("the server of warm starts has not started: run tests/warm_start.py by hand")
        atexit.register(self.end)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def ranks_said(errors: str) -> str:
    return NOTES.sub("", errors)


@functools.cache
def launcher_kind() -> str:
    output = run_command([*launcher(), "--version"], timeout=20, merge=True)[1]
    return "intel" if "Intel(R) MPI" in output else "mpich" if "HYDRA" in output else "openmpi"


LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
)


def library() -> str:
    status, output, errors = run_command([sys.executable, "-c", LIBRARY], timeout=20)
    lines = (output if status == 0 else errors).strip().splitlines() or ["nothing was said"]
    return " ".join(lines[0 if status == 0 else -1].partition(", package")[0].split())


def hands_sigterm_on() -> bool:
    """Return whether the launcher forwards SIGTERM, as MPICH's and Intel MPI's do; Open MPI's kills ranks."""
    return launcher_kind() != "openmpi"


def start(
    command: Sequence[str | os.PathLike[str]], env: Mapping[str, str] | None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a command without input in a session of its own; `env` is added to a clean environment."""
    env = clean_environment() | dict(env or {})
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True, **options)


def run_command(
    command: Sequence[str | os.PathLike[str]],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    merge: bool = False,
) -> tuple[int, str, str]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start(command, env, cwd=cwd, stdout=out, stderr=subprocess.STDOUT if merge else err)
        _running.add(process.pid)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = TIMED_OUT
        finally:  # also after an exception, so that an interrupted test leaves no ranks
            end(process)
        return status, read(out), read(err)


@contextlib.contextmanager
def running(
    command: Sequence[str], output: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in its own session, with its output in a file; end it when the block ends."""
    with output.open("ab") as file:  # appends, because ranks may write without their launcher
        process = start(command, env, cwd=cwd, stdout=file, stderr=file)
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    _running.discard(process.pid)


def until(holds: Callable[[], object], event: str, seconds: float = 60, process: Any = None) -> None:
    """Wait until a condition holds; fail after `seconds`, or when `process` ends earlier."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert process is None or process.poll() is None, f"the process ended without {event}"
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {event}"
        time.sleep(0.002)


def status_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "status.json").read_text())


def kill_running() -> None:
    for group in _running:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


def read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
