"""After any fault a run ends within seconds with a message, and a restart gives the same bytes.

Every row of `faults.ROWS` runs for real and is compared with docs/reliability.md. To regenerate that table:

    ZERO_MPI_FAULT_TABLE=rows.md python tests/cluster/run_cluster.py tests/cluster/test_faults.py
"""

import contextlib
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from faults import CLOCK, INSIDE, PATIENT, RANKS, ROWS, SAVE_EVERY, STEPS, Fault, Trial, memory_group
from hosts import OPENMPI_FLAGS, Hosts, hosts, installed, why_no_hosts
from jobs import run_command, status_of
from test_command_bits import assert_same_run, needs_mpiexec

pytestmark = [needs_mpiexec, pytest.mark.timeout_seconds(150)]
DOCS = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
HAPPENS_AT = 12  # step before which the event happens
TOKENS = 60_000
FLAGS = ["--layers", "1", "--dim", "24", "--heads", "3", "--ffn", "17", "--context", "16", "--sample", "0"]
FLAGS += ["--batch-size", "6", "--micro-batch", "1", "--warmup", "2", "--steps", str(STEPS), "--keep", "3"]
FLAGS += ["--max-time", "10m"]  # the limit must not depend on the clock that jumps
FLAGS += ["--arch", "llama", "--vocab-size", "64", "--save-every", str(SAVE_EVERY)]


@dataclass(frozen=True)
class Stage:
    """Functions for an event: `fire` triggers the event, `mend` repairs its damage before the resume."""

    fire: Callable[[Trial], None]
    mend: Callable[[Trial], None] = lambda trial: None
    env: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()  # command to run instead of the usual command


def write_tokens(path: Path) -> None:
    place = np.arange(TOKENS)
    np.save(path, ((place % 61) ^ (place // 997 % 64)).astype(np.uint16))


def flags(folder: Path, timeout: float = PATIENT) -> list[str]:
    return [*FLAGS, "--data", str(folder / "tokens.npy"), "--timeout", str(timeout)]


def command(mpi: str, ranks: int) -> list[str]:
    """Return the command that starts python on ranks of this machine; skip if this MPI is not installed."""
    try:
        python, launcher = installed(mpi)
    except LookupError as error:
        pytest.skip(str(error))
    extra = [*OPENMPI_FLAGS.split(), "--oversubscribe"] if mpi == "openmpi" else []
    return [launcher, *extra, "-n", str(ranks), python]


@pytest.fixture(scope="module")
def unbroken() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="zero_mpi-test-", dir="/var/tmp"))
    write_tokens(folder / "tokens.npy")
    start = [sys.executable, "-m", "zero_mpi.train", "--out", str(folder / "out")]
    status, printed, errors = run_command([*start, *flags(folder)], timeout=60)
    assert (status, errors) == (0, ""), printed
    yield folder / "out"
    shutil.rmtree(folder)


@contextlib.contextmanager
def little_memory(trial: Trial) -> Iterator[Stage]:
    """Put one rank into a group with 64 MiB and let it allocate more."""
    try:
        group, limit = memory_group()
    except OSError as error:
        pytest.skip(str(error))
    try:
        (group / limit).write_text(str(64 << 20))

        def fire(trial: Trial) -> None:
            (group / "cgroup.procs").write_text(str(trial.victim))
            trial.now.touch()

        yield Stage(fire)
    finally:
        trial.close()
        group.rmdir()


@contextlib.contextmanager
def small_disk(trial: Trial) -> Iterator[Stage]:
    """Put the run folder on its own file system, which another program fills."""
    trial.out.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(trial.out)]
    status, _, errors = run_command(mount, timeout=20)
    if status:
        pytest.skip(f"cannot mount here: {errors.strip()}")
    filler = trial.out / "filler"

    def fire(trial: Trial) -> None:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        os.truncate(filler, filler.stat().st_size - 4 * 4096)  # space for records, not for a checkpoint

    try:
        yield Stage(fire, mend=lambda trial: filler.unlink())
    finally:
        trial.close()
        run_command(["umount", "-l", trial.out], timeout=20)


HOUR = 3600


@contextlib.contextmanager
def loose_clock(trial: Trial) -> Iterator[Stage]:
    """Set rank 0's clock forward by an hour, and some steps later back by two hours."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no cc to build the shifted clock: apt-get install gcc libc6-dev")
    folder = trial.out.parent
    source, library, off = folder / "clock.c", folder / "clock.so", folder / "off"
    source.write_text(CLOCK)
    off.write_bytes(struct.pack("q", 0))
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)

    def set_off(seconds: int) -> None:
        with off.open("r+b") as file:
            file.write(struct.pack("q", seconds))

    def fire(trial: Trial) -> None:
        set_off(HOUR)
        trial.until_step(trial.done + 10)
        set_off(-HOUR)

    def check(trial: Trial) -> None:
        record = status_of(trial.out)
        begun, last = (datetime.fromisoformat(record[key]) for key in ("started", "updated"))
        assert -HOUR < (last - begun).total_seconds() < -HOUR + 60, "the clock did not jump"

    yield Stage(fire, mend=check, env={"LD_PRELOAD": str(library), "TEST_CLOCK": str(off)})


def tokens_of(trial: Trial) -> Path:
    return trial.out.parent / "tokens.npy"


def cut_newest(trial: Trial) -> None:
    path = trial.out / "latest" / "model.gguf"
    os.truncate(path, path.stat().st_size // 2)


KILL = Stage(lambda trial: os.kill(trial.victim, signal.SIGKILL))
STAGES = dict.fromkeys(INSIDE, Stage(lambda trial: trial.now.touch())) | {
    "SIGKILL of one rank": KILL,
    "SIGSTOP of one rank": Stage(lambda trial: os.kill(trial.victim, signal.SIGSTOP)),
    "token file cut short": Stage(
        lambda trial: os.truncate(tokens_of(trial), 4096), lambda trial: write_tokens(tokens_of(trial))
    ),
    "newest checkpoint cut short": Stage(KILL.fire, mend=cut_newest),
}
PREPARED = {  # event -> context in which its stage is prepared and cleaned up
    "killed for memory (cgroup)": little_memory,
    "disk full": small_disk,
    "clock jumps by an hour": loose_clock,
}
TO_HOSTS: dict[str, Callable[[Hosts], None]] = {
    "host lost": lambda cluster: cluster.lose("h2"),
    "link cut": lambda cluster: cluster.set_link("h2", up=False),
}
# Open MPI's launcher waits for an unreachable host unless ssh reports the loss.
ALIVE = ["--prtemca", "plm_ssh_args", "-o ServerAliveInterval=3 -o ServerAliveCountMax=2"]
REFUSED = "token file cut short before the start"


def is_sound(checkpoint: Path) -> bool:
    command = [sys.executable, "-m", "zero_mpi", "inspect", checkpoint]
    status, printed, errors = run_command(command, timeout=60)
    assert status in (0, 1, 2), printed + errors  # 1: different content, 2: unreadable
    return status == 0


def sound_step(out: Path, newest_is_broken: bool) -> int:
    newest, before, *_ = sorted(out.glob("step-*"), reverse=True)
    assert (out / "latest").resolve() == newest
    assert is_sound(newest) != newest_is_broken
    assert not newest_is_broken or is_sound(before)
    return int((before if newest_is_broken else newest).name.removeprefix("step-"))


def check_end(fault: Fault, trial: Trial) -> None:
    assert trial.job.returncode in fault.statuses, f"status {trial.job.returncode}\n{trial.errors}"
    pattern = fault.said.replace("<process>", str(trial.victim))
    assert re.search(pattern, trial.words) if pattern else not trial.errors, trial.words
    record = status_of(trial.out)
    assert re.fullmatch(fault.state, record["state"]), record
    if record["state"] == "failed":
        assert fault.reason, record
        assert re.search(fault.reason, record["reason"]), record
    else:
        assert record["reason"] == ("SIGTERM" if record["state"] == "stopped" else "")


def go_on(fault: Fault, trial: Trial, start: int, unbroken: Path) -> None:
    words = [*command(fault.launcher, 2), "-m", "zero_mpi.train", "--out", str(trial.out)]
    status, printed, errors = run_command([*words, *flags(trial.out.parent)], timeout=60)
    assert status == 0, printed + errors
    assert f"at step {start}" in printed
    assert ("warning: " in printed and "unusable checkpoint" in printed) == (
        fault.event == "newest checkpoint cut short"
    )
    assert status_of(trial.out)["state"] == "done"
    assert_same_run(trial.out, unbroken)


def note_down(fault: Fault, trial: Trial, seconds: float, lost: int) -> None:
    """Append the event's row of docs/reliability.md to the file that $ZERO_MPI_FAULT_TABLE names."""
    if path := os.environ.get("ZERO_MPI_FAULT_TABLE"):
        record, words = status_of(trial.out), "nothing"
        if match := fault.said and re.search(fault.said.replace("<process>", r"\d+"), trial.words):
            begin, end = trial.words.rfind("\n", 0, match.start()) + 1, trial.words.find("\n", match.end())
            words = " ".join(trial.words[begin:end].split())
        cells = [fault.event, f"{fault.launcher}, {fault.transport}"]
        cells += [f"{trial.job.returncode}, `{record['state']}`", words, f"{seconds:.1f}, {lost}"]
        with open(path, "a") as file:
            file.write(f"| {' | '.join(cells)} |\n".replace(str(trial.out), "OUT"))


def rows(events: Sequence[str]) -> pytest.MarkDecorator:
    chosen = [fault for fault in ROWS if fault.event in events]
    return pytest.mark.parametrize("fault", chosen, ids=lambda fault: fault.name.replace(", ", "-"))


def happen(fault: Fault, trial: Trial, stage: Stage, unbroken: Path) -> None:
    write_tokens(trial.out.parent / "tokens.npy")
    start = stage.command or command(fault.launcher, RANKS)
    extra = ["--transport", fault.transport]
    trial.start(start, [*flags(trial.out.parent, fault.timeout), *extra], stage.env)
    trial.until_step(HAPPENS_AT)
    trial.happens(stage.fire)
    seconds = trial.end_of_job(fault.seconds)
    check_end(fault, trial)
    done, broken = trial.done, fault.event == "newest checkpoint cut short"
    stage.mend(trial)
    step = sound_step(trial.out, broken)
    assert 0 <= done - step <= fault.lost
    note_down(fault, trial, seconds, done - step)
    if fault.state != "done":
        go_on(fault, trial, step, unbroken)
    assert_same_run(trial.out, unbroken)


@rows([*STAGES, *PREPARED])
def test_a_run_ends_and_goes_on(fault, unbroken, common_path):
    trial = Trial(common_path, INSIDE.get(fault.event, "pass"))
    with contextlib.closing(trial):
        if fault.event not in PREPARED:
            happen(fault, trial, STAGES[fault.event], unbroken)
            return
        with PREPARED[fault.event](trial) as stage:
            happen(fault, trial, stage, unbroken)


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
@rows([*TO_HOSTS])
def test_a_run_over_hosts_ends_and_goes_on(fault, unbroken):
    """An event happens to the second of two hosts, which have two ranks each."""
    command(fault.launcher, RANKS)
    with hosts(2) as cluster:
        trial = Trial(cluster.folder)
        start = cluster.job(4, 2, [], mpi=fault.launcher)
        if fault.launcher == "openmpi":
            start[-1:-1] = ALIVE
        with contextlib.closing(trial):
            stage = Stage(lambda trial: TO_HOSTS[fault.event](cluster), command=start)
            happen(fault, trial, stage, unbroken)


@rows([REFUSED])
def test_a_run_whose_data_are_cut_short_is_refused(fault, unbroken, common_path):
    """The job is refused immediately and in one line; files of the earlier run do not change."""
    tokens = common_path / "tokens.npy"
    write_tokens(tokens)
    trial = Trial(common_path)
    with contextlib.closing(trial):
        trial.start(command(fault.launcher, RANKS), flags(common_path))
        trial.until_step(HAPPENS_AT)
        trial.close()  # close() sends SIGTERM, so the run saves
        done = trial.done
        os.truncate(tokens, 4096)
        trial.happens(lambda trial: trial.start(command(fault.launcher, RANKS), flags(common_path)))
        seconds = trial.end_of_job(fault.seconds)
        check_end(fault, trial)
        assert len(trial.errors.splitlines()) == 1
    step = sound_step(trial.out, False)
    assert step == done
    note_down(fault, trial, seconds, 0)
    write_tokens(tokens)
    go_on(fault, trial, step, unbroken)


def test_the_table_in_the_docs_is_what_was_seen():
    """The page's table has the rows of `ROWS` in the same order, with values that their tests allow."""
    lines = [line.strip("| \n").split(" | ") for line in DOCS.read_text().splitlines() if line[:2] == "| "]
    table = [line for line in lines if len(line) == 5][1:]
    assert [tuple(line[:2]) for line in table] == [(f.event, f"{f.launcher}, {f.transport}") for f in ROWS]
    for fault, (_, _, ended, words, cost) in zip(ROWS, table, strict=True):
        (status, state), (seconds, lost) = ended.split(", "), cost.split(", ")
        assert int(status) in fault.statuses, fault.name
        pattern = fault.said.replace("<process>", r"\d+")
        assert re.search(pattern, words) if pattern else words == "nothing", fault.name
        assert re.fullmatch(fault.state, state.strip("`")), fault.name
        assert float(seconds) < fault.seconds, fault.name
        assert int(lost) <= fault.lost, fault.name
