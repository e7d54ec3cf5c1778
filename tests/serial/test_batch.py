"""A run determines the remaining time of its batch job, and the batch scripts work as documented."""

import math
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from jobs import clean_environment, hands_sigterm_on, launcher, launcher_kind, run_command, running, until
from test_command_bits import assert_same_run, fields, needs_mpiexec, train, write_text
from test_resume import SMALL, wait_for_lines

from zero_mpi.launch import time_limit
from zero_mpi.launch.time_limit import (
    NOTICE,
    BatchJob,
    TimeLimit,
    ask,
    clock_seconds,
    find_job,
    pbs_left,
    slurm_left,
)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
REQUEUE = 75
QSTAT = """Job Id: 123.server
    Job_Name = zero_mpi
    resources_used.cput = 100:00:00
{used}    job_state = R
    Resource_List.ncpus = 8
    Resource_List.walltime = 04:00:00
    stime = Fri Nov 21 13:48:05 2025
"""


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


TIMES = {"12": 12, "0:12": 12, "59:30": 3570, "1:02:03": 3723, "100:00:00": 360000, "2-00:00:10": 172810}
TIMES |= {"1-12": 86412, "3600": 3600}
TIMES |= dict.fromkeys(("", "-5", "-1:00", "1:2:3:4", "UNLIMITED", "1.5", "12 s"))
ANSWERS = {"58:12\n": 3492, "2-00:00:00\n": 172800, "UNLIMITED\n": math.inf}
ANSWERS |= dict.fromkeys(("NOT_SET\n", "INVALID\n", "", "58:12\n1:00:00\n"))


def test_what_squeue_says():
    assert {text: clock_seconds(text) for text in TIMES} == TIMES
    assert {text: slurm_left(text) for text in ANSWERS} == ANSWERS


def test_what_qstat_says(monkeypatch):
    monkeypatch.setattr(time_limit, "process_age", lambda: 60.0)
    line = "    resources_used.walltime = {}\n"
    assert pbs_left(QSTAT.format(used=line.format("01:00:30"))) == 3 * 3600 - 30
    assert pbs_left(QSTAT.format(used="")) == 4 * 3600 - 60, "a job is as old as this process, or older"
    assert pbs_left(QSTAT.format(used=line.format("00:00:02"))) == 4 * 3600 - 60
    assert pbs_left(QSTAT.format(used="").replace("Resource_List.walltime", "x")) is None
    assert pbs_left("qstat: Unknown Job Id 123.server") is None


def test_the_job_of_a_process_is_found(monkeypatch):
    monkeypatch.setattr(time_limit, "process_age", lambda: 10.0)
    assert find_job({"PATH": "/bin", "SLURM_JOB_ID": "", "SLURM_CONF": "x"}) is None
    job = find_job({"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": str(int(time.time()) + 500)})
    assert (job.name, job.question[-2:]) == ("Slurm job 17", ("17", "--format=%L"))
    assert 498 <= job.at_start <= 500
    assert find_job({"SLURM_JOB_ID": "17"}).at_start is None
    # The last task of an array has the id of the array, for which squeue would list all tasks.
    task = {"SLURM_JOB_ID": "17", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "4"}
    assert "17_4" in find_job(task).question
    job = find_job({"PBS_JOBID": "9.server", "PBS_WALLTIME": "100"})
    assert (job.name, job.question, job.at_start) == ("PBS job 9.server", ("qstat", "-f", "9.server"), 90)
    assert find_job({"PBS_JOBID": "9.server"}).at_start is None


def job_that_asks(*question: str, at_start: float | None = None) -> BatchJob:
    return BatchJob("Slurm job 1", question, slurm_left, at_start)


@pytest.mark.parametrize(
    "text",
    ["exit 1", "echo 10:00; exit 1", "echo nonsense", "printf '\\377\\n'", "kill $$", "exec sleep 30", None],
)
def test_a_program_that_does_not_answer_is_no_answer(text, programs, monkeypatch):
    monkeypatch.setattr(time_limit, "PATIENCE", 0.2)
    if text is not None:
        program(programs, "squeue", text)
    assert ask(job_that_asks("squeue" if text is not None else str(programs / "missing"))) is None


@pytest.mark.parametrize(
    ("own", "at_start", "left", "name"),
    [
        (None, 1000.0, 1000 - NOTICE, "the end of Slurm job 1"),
        (500.0, 1000.0, 500.0, "--max-time"),
        (5000.0, 1000.0, 1000 - NOTICE, "the end of Slurm job 1"),
        (5000.0, None, 5000.0, "--max-time"),
        (5000.0, -3.0, 5000.0, "--max-time"),  # the limit is past but the job runs, so the limit was extended
    ],
)
def test_the_earlier_end_counts(own, at_start, left, name, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(time_limit, "process_age", lambda: 0.0)
    limit = TimeLimit(own, job_that_asks("false", at_start=at_start))
    assert limit.left() == pytest.approx(left, abs=0.1)
    assert limit.name == name


def test_a_limit_that_is_extended_is_learnt_and_silence_changes_nothing(programs):
    answer = programs / "answer"
    program(programs, "squeue", f"cat {answer}; echo >> {programs}/asked")
    answer.write_text("10:00\n")
    limit = TimeLimit(None, job_that_asks("squeue"), interval=0.05)
    until(lambda: limit.left() < math.inf, "another limit")
    assert 560 < limit.left() <= 600 - NOTICE
    answer.write_text("1:00:00\n")
    until(lambda: 3500 < limit.left() <= 3600 - NOTICE, "another limit")
    answer.write_text("slurm_load_jobs error\n")
    calls = programs / "asked"
    before = calls.stat().st_size
    until(lambda: calls.stat().st_size > before + 3, "more calls of squeue")
    assert 3500 < limit.left() <= 3600 - NOTICE
    answer.write_text("UNLIMITED\n")
    until(lambda: limit.left() == math.inf, "another limit")


JOBS = {
    "Slurm job 3": ({"SLURM_JOB_ID": "3"}, "squeue", "echo 0:33"),
    "PBS job 4.x": ({"PBS_JOBID": "4.x"}, "qstat", "echo '    Resource_List.walltime = 00:00:34'"),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_run_stops_in_time_for_the_end_of_its_job(name, programs, tmp_path):
    environ, query, answer = JOBS[name]
    program(programs, query, answer)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "zero_mpi.train", "--out", str(out), *SMALL, "--steps", "1000000"]
    command += ["--data", *write_text(tmp_path)]
    start = time.monotonic()
    status, printed, errors = run_command(command, timeout=40, env={**environ, "PATH": os.environ["PATH"]})
    assert (status, errors) == (REQUEUE, ""), printed
    assert time.monotonic() - start < NOTICE
    assert f"stopped after step {len(fields(out))} in time for the end of {name};" in printed
    assert os.readlink(out / "latest") == f"step-{len(fields(out)):08d}"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("slurm/*.sbatch")), ids=lambda path: path.name)
@pytest.mark.parametrize("cores", ["4", ""])
def test_srun_hears_of_the_cores_of_a_task(path, cores):
    """From Slurm 22.05 on srun reads SRUN_CPUS_PER_TASK, which sbatch does not set."""
    environ = {"PATH": os.environ["PATH"], "LAUNCH": "printenv SRUN_CPUS_PER_TASK"}
    environ |= {"SLURM_CPUS_PER_TASK": cores} if cores else {}
    result = subprocess.run(["bash", str(path)], env=environ, capture_output=True, text=True, check=False)
    assert result.stdout.split() == [cores] * bool(cores)


@pytest.fixture
def pbs_job(programs, tmp_path) -> dict[str, str]:
    (tmp_path / "nodes").write_text("localhost\nlocalhost\n")
    program(programs, "qsub", f'echo "$@" >> {tmp_path}/submitted')
    path = [str(programs), str(Path(sys.executable).parent), str(Path(launcher()[0]).parent)]
    path.append(os.environ["PATH"])
    return {
        "PATH": ":".join(path),
        "PBS_JOBID": "1.x",
        "PBS_O_WORKDIR": str(ROOT),
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "LIBRARY": "mpich" if hands_sigterm_on() else "openmpi",
        "LAUNCH": "mpiexec" if launcher_kind() == "intel" else "mpirun",
    }


@needs_mpiexec
@pytest.mark.timeout_seconds(180)  # Python, shells and MPI start five times
@pytest.mark.parametrize(
    ("name", "number", "submitted"),
    [
        ("one_node", signal.SIGUSR1, "-W depend=afterany:1.x examples/pbs/one_node.pbs\n"),
        ("one_node", signal.SIGTERM, ""),  # PBS deletes the job, so it submits no successor
    ],
)
def test_a_pbs_job_told_to_stop_is_followed_by_one_that_goes_on(name, number, submitted, pbs_job, tmp_path):
    flags = [*SMALL, "--data", *write_text(tmp_path), "--steps", "150"]
    out, log = tmp_path / "out", tmp_path / "submitted"
    log.touch()
    # The signal comes after the ranks have started, so the script need not delay it.
    variables = {"FLAGS": " ".join(["--out", str(out), *flags]), "SETTLE": "0"}
    environ = clean_environment() | pbs_job | variables
    script = ["bash", str(EXAMPLES / "pbs" / f"{name}.pbs")]
    with running(script, tmp_path / "log", environ) as process:
        wait_for_lines(out / "metrics.jsonl", 5, process)
        process.send_signal(number)
        assert process.wait(20) == REQUEUE, (tmp_path / "log").read_text()
    assert log.read_text() == submitted
    assert "over 2 ranks" in (tmp_path / "log").read_text()
    if not submitted:
        return
    train(1, tmp_path / "unbroken", *flags)
    status, printed, errors = run_command(script, timeout=50, env=environ)
    assert status == 0, printed + errors
    assert log.read_text() == submitted, "a finished run must not be submitted again"
    assert_same_run(out, tmp_path / "unbroken")


def test_a_supervised_pbs_job_goes_on_without_a_host(pbs_job, programs, tmp_path):
    """Launcher and ssh are simulated; the first start loses a host, and the second start succeeds."""
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    program(programs, "ssh", '[[ " $* " != *" n2 "* ]]')
    test = f"[[ $(grep -c hostfile {tmp_path}/starts) = 2 ]]"
    program(programs, "mpirun", f"echo $1 $3 $4 >> {tmp_path}/starts; cat $2 >> {tmp_path}/starts; {test}")
    supervise = f"zero-mpi supervise --backoff 0 --for {pbs_job['LIBRARY']} --"
    environ = {"LAUNCH": "mpirun", "SUPERVISE": supervise, "FLAGS": f"--out {tmp_path}/out"}
    script = ["bash", str(EXAMPLES / "pbs" / "many_nodes.pbs")]
    status, printed, errors = run_command(script, timeout=60, env=pbs_job | environ)
    assert status == 0, printed + errors
    assert all(part in errors for part in ("restart 1 of 10", "1 host (n1), 2 ranks", ": n2"))
    form = "{}:2" if pbs_job["LIBRARY"] == "mpich" else "{} slots=2"
    expected = ["--hostfile -n 4", form.format("n1"), form.format("n2"), "--hostfile -n 2", form.format("n1")]
    assert (tmp_path / "starts").read_text().splitlines() == expected


@needs_mpiexec
def test_a_job_that_is_told_to_stop_while_its_ranks_start_hears_it(pbs_job, programs, tmp_path):
    """A signal before the first line of the program must neither kill the job nor be lost.

    The second rank starts late here, so it does not yet ignore the signal when it arrives.
    """
    flags = [*SMALL, "--data", *write_text(tmp_path), "--steps", "1000000"]
    started = tmp_path / "started"
    slow = f'if [[ $2 = zero_mpi.train ]]; then touch {started}; sleep 1; fi; exec {sys.executable} "$@"'
    program(programs, "python", slow)
    code = f'if [[ $1 = -c ]] && ! mkdir {tmp_path}/first 2> /dev/null; then sleep 2; fi; exec /bin/bash "$@"'
    program(programs, "bash", code)
    environ = pbs_job | {"FLAGS": " ".join(["--out", str(tmp_path / "out"), *flags])}
    script = ["bash", str(EXAMPLES / "pbs" / "one_node.pbs")]
    with running(script, tmp_path / "log", environ) as process:
        until(started.exists, "a start")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(30) == REQUEUE, (tmp_path / "log").read_text()
    assert (tmp_path / "submitted").exists(), "the job was submitted again"
