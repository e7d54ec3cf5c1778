"""Tests of `supervise`, which restarts a run: decisions after an end, remaining hosts, and signals.

A small script replaces the launcher and follows the test's instructions at each start. The last
test uses a real job. tests/cluster covers lost hosts.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from jobs import clean_environment, launcher, run_command, running, status_of, until, warm_python
from patched import train_with
from test_command_bits import assert_same_run, needs_mpiexec, train, write_text
from test_resume import SMALL

from zero_mpi.commands.hostfile import HostEntry
from zero_mpi.commands.report.runs import read_events
from zero_mpi.commands.supervise import attempt
from zero_mpi.commands.supervise.attempt import NO_FOLDER, RunFolder, StopRequest
from zero_mpi.commands.supervise.command import Restarts, prepare
from zero_mpi.commands.supervise.hosts import HostPool, Template, find_pool
from zero_mpi.errors import UsageError

# Script that replaces mpirun: start N runs the file start-N, with functions for the files of a run.
LAUNCHER = """#!/bin/bash
here=${0%/*} out=${0%/*}/out
[[ $1 = --version ]] && cat "$here/version" && exit
printf '%s\\n' "$*" >> "$here/starts"
number=$(wc -l < "$here/starts")
while [[ $# -gt 0 ]]; do
    [[ $1 =~ ^--?(hostfile|machinefile)$ ]] && echo "$(tr '\\n' ' ' < "$2")" >> "$here/hostfiles"
    shift
done
says() {
    mkdir -p "$out"
    printf '{"state": "%s", "reason": "%s", "start": %s}' "$1" "$2" "$number" > "$out/status.json"
}
records() { mkdir -p "$out"; echo "{\\"step\\": $1}" >> "$out/metrics.jsonl"; }
saves() { mkdir -p "$out/step-$1"; ln -sfn "step-$1" "$out/latest"; }
. "$here/start-$number"
"""
DONE = "says done"


class Trial:
    """Run with the small launcher, which executes `starts[N]` at start N."""

    def __init__(self, folder: Path, *starts: str) -> None:
        self.folder, self.out, self.program = folder, folder / "out", folder / "mpirun"
        self.errors = folder / "errors"
        self.program.write_text(LAUNCHER)
        (folder / "version").write_text("HYDRA build details:\n    Version: 5.0.2\n")
        self.program.chmod(0o755)
        for number, text in enumerate(starts, 1):
            (folder / f"start-{number}").write_text(text + "\n")

    def words(self, *of_launcher: str) -> list[str]:
        return [str(self.program), *of_launcher, "python", "-m", "zero_mpi.train", "--out", str(self.out)]

    def run(self, *flags: str, of_launcher: tuple[str, ...] = (), of_run: tuple[str, ...] = ()) -> int:
        command = [*self.words(*of_launcher), *of_run]
        return prepare(["--backoff", "0", *flags, "--", *command]).run()

    def running(self, *flags: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        """Supervise the run in a process that can receive signals; the process ends with the block."""
        start = [sys.executable, "-m", "zero_mpi", "supervise", "--backoff", "0", *flags, "--", *self.words()]
        return running(start, self.errors)

    @property
    def starts(self) -> list[str]:
        path = self.folder / "starts"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def hostfiles(self) -> list[str]:
        return [line.strip() for line in (self.folder / "hostfiles").read_text().splitlines()]

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(event["event"], event["reason"]) for event in read_events(self.out / "events.jsonl")]


# -------------------------------------------------------------------------------- decisions after an end


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ("exit 0", 0),  # the command does not train
        ("says done; exit 0", 0),
        ("says done; exit 1", 0),  # status.json decides
        ("says stopped SIGTERM; exit 75", 75),
        ("says stopped SIGTERM; exit 1", 75),  # Open MPI's launcher after a signal
        ("exit 75", 75),
        ("exit 2", 2),
        ("says failed interrupted; exit 130", 130),
    ],
)
def test_an_end_that_is_the_last(ends, status, tmp_path, capfd):
    trial = Trial(tmp_path, ends)
    assert trial.run() == status
    assert len(trial.starts) == 1
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ("says running; exit 0", "status 0: killed"),  # Open MPI's launcher may return 0
        ("says running; exit 9", "status 9: killed"),
        ("says running; kill -KILL $$", "status 137 (SIGKILL): killed"),
        ("says failed 'no progress for 5.2 s'; exit 86", "no progress for 5.2 s"),
        ("mkdir -p $out; exit 7", "status 7"),
    ],
)
def test_an_end_after_which_it_is_started_again(ends, reason, tmp_path, capfd):
    trial = Trial(tmp_path, f"records 12; saves 00000010; {ends}", DONE)
    assert trial.run("--restarts", "4") == 0
    words = " ".join(trial.words()[1:])
    assert trial.starts == [words, f"{words} --resume auto"]
    ended, restart = capfd.readouterr().err.splitlines()
    assert f"step 12: {reason}" in ended
    assert "restart 1 of 4 from step-00000010" in restart
    (event,) = read_events(trial.out / "events.jsonl")
    assert (event["event"], event["step"]) == ("restarted", 12)
    assert event["reason"].startswith(reason)


def test_the_word_of_the_job_before_is_not_its_own(tmp_path):
    trial = Trial(tmp_path, "records 3; exit 9", DONE)
    trial.out.mkdir()
    (trial.out / "status.json").write_text(json.dumps({"state": "done", "reason": ""}))
    assert (trial.run(), len(trial.starts)) == (0, 2)


@pytest.mark.parametrize(
    ("command", "out"),
    [
        ("python -m zero_mpi.train", "runs/default"), ("python -mzero_mpi train", "runs/default"),
        ("python -m zero_mpi train --out=a --out b", "b"), ("/usr/bin/zero-mpi train --out b --out=a", "a"),
        ("python -m zero_mpi plan", None),
    ],
)  # fmt: skip
def test_the_run_folder_of_a_command(command, out):
    template = Template(tuple(command.split()), "mpich")
    assert template.out() == (out and Path(out))
    assert ("auto" in template.resuming().words) == (out is not None)


def test_the_same_failure_at_the_same_step_is_not_tried_a_third_time(tmp_path, capfd):
    """Numbers in the reason are ignored, because ranks, seconds and processes differ."""
    fails = "saves 00000010; records 12; says failed 'rank {} after {}.5 s: ValueError'; exit 1"
    repeat = "records 12; says failed 'rank 3 after 9.5 s: ValueError'; exit 1"
    trial = Trial(tmp_path, fails.format(1, 4), repeat, DONE)
    assert trial.run() == 1
    assert len(trial.starts) == 2
    event, reason = trial.events[-1]
    assert event == "gave-up"
    assert "step 12: rank 3 after 9.5 s: ValueError" in reason
    assert reason in capfd.readouterr().err


@pytest.mark.parametrize(
    "second",
    [
        "records 13; says running; exit 9",  # a different step
        "records 12; says running; exit 255",  # a different exit status
        "records 12; saves 00000012; says running; exit 9",  # further progress
    ],
)
def test_another_failure_is_none_of_that(second, tmp_path):
    trial = Trial(tmp_path, "records 12; says running; exit 9", second, DONE)
    assert (trial.run(), len(trial.starts)) == (0, 3)


def test_the_limit_counts_restarts_without_a_new_checkpoint(tmp_path, capfd):
    fails = "records {0}; says running; exit 9"
    saves = "saves {0}; records {0}; says running; exit 9"
    starts = [fails.format(1), saves.format(20), fails.format(21), fails.format(22), fails.format(23)]
    trial = Trial(tmp_path, *starts, DONE)
    assert trial.run("--restarts", "2") == 9
    assert len(trial.starts) == 4, "the count begins again at a checkpoint"
    assert "2 restarts" in capfd.readouterr().err


def test_pauses_double_until_there_is_a_new_checkpoint(tmp_path, monkeypatch):
    paused = []
    monkeypatch.setattr(Restarts, "_pause", lambda self, seconds: paused.append(seconds) or True)
    fails = [f"records {step}; says running; exit 9" for step in range(1, 8)]
    fails[4] = f"saves 5; {fails[4]}"
    trial = Trial(tmp_path, *fails, DONE)
    assert trial.run("--backoff", "100") == 0
    assert paused == [100, 200, 300, 300, 100, 200, 300]


@pytest.mark.parametrize("flag", [("--resume", "never"), ("--resume=never",), ("--resume", "elsewhere")])
def test_it_goes_on_from_its_own_checkpoint_as_soon_as_there_is_one(flag, tmp_path):
    """--resume of the command applies until the run has saved; an older checkpoint does not count."""
    starts = ["records 1; says running; exit 9", "saves 2; records 2; says running; exit 9", DONE]
    trial = Trial(tmp_path, *starts)
    (trial.out / "step-00000099").mkdir(parents=True)
    (trial.out / "latest").symlink_to("step-00000099")
    assert trial.run(of_run=(*flag, "--steps", "9")) == 0
    words = " ".join(flag)
    assert [words in start for start in trial.starts] == [True, True, False]
    assert "--resume auto --steps 9" in trial.starts[2].replace("=", " ")


# ------------------------------------------------------------------------------------------------- hosts


def host_trial(folder: Path, text: str, *starts: str) -> tuple[Trial, tuple[str, ...]]:
    """Return a run over several hosts and its flags. A host answers unless a file down-HOST exists."""
    (folder / "hosts").write_text(text)
    probe = folder / "probe"
    probe.write_text(f'#!/bin/sh\necho "$1" >> {folder}/asked\n[ ! -e {folder}/down-"$1" ]\n')
    probe.chmod(0o755)
    flags = ("--hostfile", str(folder / "hosts"), "--probe", f"{folder}/probe {{host}}")
    return Trial(folder, *starts), flags


LOSES = "touch $here/down-{0}; records {1}; says running; exit 255"
FILLED = ("-machinefile", "{hostfile}", "-n", "{ranks}", "--where", "{nodes}:{hosts}")


@pytest.mark.parametrize(
    ("text", "form", "line"),
    [
        ("n1:2\nn2:2\nn3:2\n", "mpich", "{}:2"),
        ("n1:2\nn2:2\nn3:2\n", "impi", "{}:2"),
        ("n1:2\nn2:2\nn3 slots=2\n", "openmpi", "{} slots=2"),
        ("n1\nn1\nn2\nn2\nn3\nn3\n", "mpich", "{}:2"),
    ],
)
def test_hosts_that_do_not_answer_are_left_out(text, form, line, tmp_path, capfd):
    trial, flags = host_trial(tmp_path, text, LOSES.format("n2", 5), LOSES.format("n1", 7), DONE)
    assert trial.run(*flags, "--for", form, of_launcher=FILLED) == 0
    left = "n1 n2 n3", "n1 n3", "n3"
    assert trial.hostfiles == [" ".join(map(line.format, names.split())) for names in left]
    places = [re.search(r"-n (\d) --where (\S+)", start).groups() for start in trial.starts]
    assert places == [("6", "3:n1,n2,n3"), ("4", "2:n1,n3"), ("2", "1:n3")]
    assert "n2" in capfd.readouterr().err
    first, _ = read_events(trial.out / "events.jsonl")
    assert (first["hosts"], first["silent"], first["ranks"]) == (["n1", "n3"], ["n2"], 4)


def test_a_host_in_reserve_takes_the_place_of_a_lost_one_until_that_answers(tmp_path):
    starts = [LOSES.format("n1", 1), "rm $here/down-n1; records 2; says running; exit 9", DONE]
    trial, flags = host_trial(tmp_path, "n1:2\nn2:2\nn3:2\n", *starts)
    assert trial.run("--spare", "1", *flags, of_launcher=FILLED) == 0
    assert trial.hostfiles == ["n1:2 n2:2", "n2:2 n3:2", "n1:2 n2:2"]
    assert [" -n 4 " in start for start in trial.starts] == [True] * 3


def test_it_waits_for_hosts_where_too_few_answer_and_gives_up_in_the_end(tmp_path, capfd, monkeypatch):
    trial, flags = host_trial(tmp_path, "n1\nn2\nn3\n", LOSES.format("n2", 1), DONE)
    flags = ("--min-hosts", "3", "--restarts", "3", *flags)
    assert trial.run(*flags, of_launcher=FILLED) == 1
    assert len(trial.starts) == 1
    _, *waits, last = capfd.readouterr().err.splitlines()
    assert [f"restart {n} of 3" in line for n, line in zip((2, 3), waits, strict=True)] == [True, True]
    assert all("2 of 3 hosts answer" in line for line in (*waits, last))
    (tmp_path / "starts").unlink()
    paused = []

    def returns(self, seconds):
        paused.append(seconds)
        if len(paused) == 2:
            (tmp_path / "down-n2").unlink()
        return True

    monkeypatch.setattr(Restarts, "_pause", returns)
    assert trial.run(*flags, of_launcher=FILLED) == 0
    assert len(paused) == 2


def test_a_question_that_hangs_is_no_answer_and_is_ended(tmp_path, monkeypatch):
    asking, ask = [], HostPool._ask
    monkeypatch.setattr(HostPool, "_ask", lambda *of: asking.append(ask(*of)) or asking[-1])
    pool = HostPool((HostEntry("n1"), HostEntry("n2")), ("sh", "-c", "sleep 1000 # {host}"), timeout=0.2)
    assert pool.silent() == ["n1", "n2"]
    assert [one.returncode for one in asking] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize(("own", "other"), [("n1", "n2.cluster"), ("n1.cluster", "n1.elsewhere")])
def test_this_machine_is_not_asked_whatever_domain_its_name_has(own, other, monkeypatch):
    monkeypatch.setattr("platform.node", lambda: own)
    hosts = tuple(map(HostEntry, ("n1", "n1.cluster", "localhost", "127.0.0.1", other)))
    assert HostPool(hosts, ("false", "{host}")).silent() == [other]
    hosts += (HostEntry("n1.rack2"),)  # n1 may be either of two hosts with a domain
    assert "n1.rack2" in HostPool(hosts, ("false", "{host}")).silent()


# -------------------------------------------------------------------------------- hosts of batch systems


def test_the_nodes_of_a_slurm_job(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nprintf 'n1\\nn2\\nn3\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    environ = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),2"}
    pool = find_pool("", "", environ)
    assert pool.hosts == (HostEntry("n1", 4), HostEntry("n2", 4), HostEntry("n3", 2))
    assert pool.probe[0] == "srun"
    assert "--nodelist={host}" in pool.probe
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    trial, (*_, probe) = host_trial(tmp_path, "", LOSES.format("n2", 5), DONE)
    of_srun = ("-w", "{hosts}", "-N", "{nodes}", "-n", "{ranks}")
    assert trial.run("--probe", probe, of_launcher=of_srun) == 0
    places = [start.partition(" python")[0] for start in trial.starts]
    assert places == ["-w n1,n2,n3 -N 3 -n 10", "-w n1,n3 -N 2 -n 6"]


def test_a_step_of_slurm_need_not_wait_for_the_one_before_it(tmp_path):
    """Slurm needs minutes to notice a lost node, and the earlier step keeps its resources until then."""
    begins = 'echo "$SLURM_OVERLAP" >> $here/overlaps; '
    trial = Trial(tmp_path, f"{begins} says running; exit 9", begins + DONE)
    assert trial.run() == 0
    assert (tmp_path / "overlaps").read_text() == "\n1\n"


# -------------------------------------------------------------------------------------- hanging runs


def test_a_run_without_a_sign_of_life_is_ended_and_started_again(tmp_path, capfd, monkeypatch):
    """The run ignores SIGTERM, and all processes of its group are ended."""
    left, reason = tmp_path / "left", "no sign of life"
    monkeypatch.setattr(attempt, "GRACE", 0.3)
    monkeypatch.setattr(attempt, "CHECK_RUN_SECONDS", 0.0)
    monkeypatch.setattr(attempt.Attempt, "_silence", lambda self, now: reason if left.exists() else "")
    hangs = "trap '' TERM; records 3; saves 2; says running\nsleep 1000 & echo $! > $here/new\n"
    hangs += "mv $here/new $here/left; while :; do wait; done"
    trial = Trial(tmp_path, hangs, f"mv $here/left $here/was; {DONE}")
    assert trial.run() == 0
    assert f"step 3: {reason}" in capfd.readouterr().err
    until(lambda: not is_alive(int((tmp_path / "was").read_text())), "the end of its process")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_signs_of_life_are_what_the_run_writes(tmp_path):
    """A renewed lock is a sign of life too; without a run folder or a limit, no run counts as silent."""
    now = time.monotonic()
    run = attempt.Attempt(RunFolder(tmp_path), StopRequest(), 900.0)
    assert run._silence(now + 800) == ""
    for number, name in enumerate((".lock", "metrics.jsonl", "status.json", "events.jsonl"), 1):
        (tmp_path / name).write_text("x")
        assert run._silence(now + 1000 * number) == ""
        assert run._silence(now + 1000 * number + 899) == ""
    assert "900 s" in run._silence(now + 5000)
    assert attempt.Attempt(RunFolder(tmp_path), StopRequest(), 0.0)._silence(now + 1e6) == ""
    assert attempt.Attempt(RunFolder(NO_FOLDER), StopRequest(), 900.0)._silence(now + 1e6) == ""


@pytest.mark.parametrize(("word", "status", "starts"), [("done", 0, 1), ("stopped", 75, 1), ("failed", 0, 2)])
def test_a_launcher_that_outlives_its_run_is_ended(word, status, starts, tmp_path, monkeypatch):
    """Open MPI's launcher continues for 16 minutes if it cannot reach a host."""
    monkeypatch.setattr(attempt, "LINGER", 0.3)
    monkeypatch.setattr(attempt, "CHECK_RUN_SECONDS", 0.05)
    trial = Trial(tmp_path, f"says {word} so; sleep 1000", DONE)
    assert trial.run() == status
    assert len(trial.starts) == starts


# ------------------------------------------------------------------------------------------------ signals

WAITS = "touch $here/ready; while :; do sleep 0.05; done"
HEARS = "trap 'echo told >> $here/told; {}' USR1; says running; " + WAITS


@pytest.mark.parametrize(
    ("number", "start", "status"),
    [
        (signal.SIGTERM, HEARS.format("says stopped; exit 75"), 75),
        (signal.SIGUSR1, HEARS.format("says stopped; exit 75"), 75),
        (signal.SIGTERM, HEARS.format("says failed disk; exit 1"), 1),
        (signal.SIGUSR1, "echo told > $here/told; touch $here/ready; sleep 1000", 75),  # the signal ends it
    ],
)
def test_a_signal_is_handed_on_and_ends_all(number, start, status, tmp_path):
    trial = Trial(tmp_path, start, DONE)
    with trial.running() as process:
        until((tmp_path / "ready").exists, "the start of the run")
        process.send_signal(number)
        assert process.wait(60) == status
    assert (tmp_path / "told").read_text() == "told\n", "the launcher alone gets one signal"
    assert len(trial.starts) == 1


def test_a_run_that_has_not_heard_it_is_told_again(tmp_path, monkeypatch):
    monkeypatch.setattr(attempt, "AGAIN", 0.2)
    counts = "n=$((n+1)); [[ $n = 3 ]] && says stopped && exit 1"
    trial = Trial(tmp_path, HEARS.format(counts), DONE)
    supervisor = prepare(["--backoff", "0", "--", *trial.words()])

    def tell() -> None:
        until((tmp_path / "ready").exists, "the start of the run")
        supervisor.stop.signal_name = "SIGUSR1"

    thread = threading.Thread(target=tell)
    thread.start()
    assert supervisor.run() == 75
    thread.join()
    assert (tmp_path / "told").read_text() == "told\n" * 3


def test_a_pause_ends_at_a_signal(tmp_path):
    trial = Trial(tmp_path, "says running; exit 9", DONE)
    with trial.running("--backoff", "1000") as process:
        until(lambda: "in 300.0 s" in trial.errors.read_text(), "a pause")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
    assert len(trial.starts) == 1


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    trial = Trial(tmp_path, HEARS.format(":"), DONE)
    with trial.running() as process:
        until((tmp_path / "ready").exists, "the start of the run")
        process.send_signal(signal.SIGINT)
        until((tmp_path / "told").exists, "the first signal at the launcher")
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert process.returncode == 130


def test_a_run_whose_supervisor_is_killed_is_told_to_stop(tmp_path):
    trial = Trial(tmp_path, f"trap 'touch $here/told; exit' TERM; {WAITS}")
    with trial.running() as process:
        until((tmp_path / "ready").exists, "the start of the run")
        process.kill()
        until((tmp_path / "told").exists, "the kernel's signal to the launcher")


# --------------------------------------------------------------------------------------------- bad usage


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "-- mpirun ..."),
        ("--restarts -1 -- mpirun", "--restarts -1: expected a number from 0 "),
        ("--backoff nan -- mpirun", "--backoff nan: "),
        ("--min-hosts 0 -- mpirun", "--min-hosts 0: expected a number from 1 "),
        ("--spare 1 -- mpirun", "--spare and --min-hosts: expected one of {hostfile}"),
        ("--hostfile hosts -- mpirun", "--hostfile, --spare "),
        ("-- mpirun -n {ranks}", "--hostfile FILE"),
        ("-- mpirun zero-mpi train --config x", "--run: expected "),
        ("-- mpirun zero-mpi train --config x --out", "--run: expected "),
        ("--hostfile hosts --spare 2 -- mpirun {hosts}", "--spare 2: "),
        ("--hostfile hosts --probe ssh -- mpirun {hosts}", "--probe ssh: expected {host}"),
    ],
)
def test_bad_usage_is_named(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("n1\nn2\n")
    with pytest.raises(UsageError) as error:
        prepare(arguments.split())
    assert said in str(error.value)


# --------------------------------------------------------------------------------------------- a real job


@needs_mpiexec
@pytest.mark.timeout_seconds(180)
def test_a_job_whose_rank_is_killed_ends_done_with_the_bytes_of_one_that_nothing_disturbed(tmp_path):
    """In the first two starts, a rank kills itself at the beginning of a random step."""
    flags = [*SMALL, "--data", *write_text(tmp_path), "--steps", "30", "--save-every", "4", "--keep", "2"]
    train(1, tmp_path / "unbroken", *flags)
    draw = random.Random(time.time_ns())
    steps = [draw.randrange(5, 18), draw.randrange(22, 30)]
    out = tmp_path / "out"
    body = f"""
        if rank == 1 and os.path.exists(kill := f'{tmp_path}/kill-{{done}}'):
            os.unlink(kill)
            os.kill(os.getpid(), signal.SIGKILL)"""
    script = train_with(tmp_path / "killed.py", body)
    for number in steps:
        (tmp_path / f"kill-{number}").touch()
    job = [*launcher(), "-n", "2", *warm_python(clean_environment()), script, "--out", str(out), *flags]
    start = [sys.executable, "-m", "zero_mpi", "supervise", "--backoff", "0.1", "--", *job]
    status, printed, errors = run_command(start, timeout=120)
    assert status == 0, f"killed before steps {steps}\n{printed}{errors}"
    assert status_of(out)["state"] == "done"
    events = [event["event"] for event in read_events(out / "events.jsonl")]
    assert [events.count(name) for name in ("restarted", "lost", "resumed", "done")] == [2, 2, 2, 1]
    assert_same_run(out, tmp_path / "unbroken")
