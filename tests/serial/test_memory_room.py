"""A run without enough memory is refused in one line, before MPI starts or large arrays exist."""

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from jobs import COMPILED, launcher, launcher_kind, ranks_said, run_command, run_job, running
from random_kills import descendants
from test_command_bits import needs_mpiexec, write_text
from test_shared_fallback import MOUNT, why_no_mount

from zero_mpi.config.settings import Config
from zero_mpi.environment.limits import Limits
from zero_mpi.models import Llama
from zero_mpi.plan import rank_memory

SIZES = {"layers": 3, "dim": 64, "heads": 4, "context": 32, "vocab_size": 258}
TINY = ["--layers", "1", "--dim", "8", "--heads", "1", "--context", "8", "--steps", "1"]
MODEL = ["--layers", "4", "--dim", "512", "--heads", "8", "--context", "64", "--batch-size", "8"]
MODEL += ["--steps", "2", "--warmup", "1"]


def with_shm(size, ranks, *command):
    job = [*launcher(), "-n", str(ranks), sys.executable, "-m", *command]
    return run_command(["unshare", "-m", "sh", "-c", MOUNT + 'exec "$@"', size, *job], timeout=100)


@needs_mpiexec
def test_a_small_dev_shm_is_one_line_or_enough(tmp_path):
    """Without a check, MPICH would die of SIGSEGV with 14 ranks if /dev/shm had 64 MiB, Docker's default."""
    if reason := why_no_mount():
        pytest.skip(f"no private /dev/shm: {reason}")
    if launcher_kind() == "openmpi":
        pytest.skip("the requirements are MPICH's and Intel MPI's; Open MPI takes 0.1 MB per rank")
    needed, enough = ("4.3", "6m") if launcher_kind() == "mpich" else ("24.0", "32m")
    line = rf"zero_mpi {{}}: error: .* {needed} MiB .* /dev/shm .* 3\.0 MiB .*--shm-size.*\n"
    for name in ("doctor", "train"):
        status, output, errors = with_shm("3m", 4, "zero_mpi", name, "--out", tmp_path / "run")
        assert (status, output) == (2, "")
        assert re.fullmatch(line.format(name), errors)
    flags = ["--data", *write_text(tmp_path), *TINY, "--batch-size", "4", "--out", tmp_path / "run"]
    status, output, errors = with_shm(enough, 4, "zero_mpi.train", *flags)
    assert status == 0, errors
    assert "saved " in output


NO_ROOM = """
from zero_mpi.launch import dev_shm
dev_shm.free_bytes = lambda: 0
dev_shm.check_space({"PMI_FD": "3", "PMI_SIZE": "5", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "%d"})
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_where_other_nodes_wait_a_rank_dies_of_a_signal_which_ends_them(rank):
    """A signal ends all ranks; after an exit before MPI_Init, the launcher would wait forever."""
    code = NO_ROOM % rank
    status, _, errors = run_command([sys.executable, "-c", code], timeout=60)
    assert (status, errors.count("/dev/shm")) == (-signal.SIGKILL, 1 if rank == 0 else 0)


@pytest.mark.parametrize("command", [["plan"], ["train", "--dry-run"], ["train"]])
def test_a_model_of_too_many_blocks_is_refused_at_once(command, tmp_path):
    name, *flags = command
    command = [sys.executable, "-m", "zero_mpi", name, "--layers", "100000000", *flags]
    status, output, errors = run_command(command, timeout=20, cwd=tmp_path)
    assert (status, output) == (2, "")
    assert re.fullmatch(
        rf"zero_mpi {name}: error: --layers 100000000: .* 2,000; .* 44,275,200,100,032 .*\n", errors
    )


def node(memory=8 << 30, **other):
    settings = {"group_memory": None, "group_free": None, "address_space": None}
    settings |= {"data": None, "locked": None, "files": 1024}
    return rank_memory.NodeInfo("a", 2, Limits(**{"available": memory} | settings | other), 1 << 30, 1 << 28)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (node(), None),
        (node(1 << 20), "parameters, gradients and moments .* 2.9 MiB on a "),
        (node(6 << 20), r"arrays and text of 2 rank\(s\) .* \d+.\d MiB on a "),
        (node(group_free=6 << 20, group_memory=1 << 30), "arrays .* its control group has 6.0 MiB left of"),
        (node(address_space=1 << 30), "a rank on a .*ulimit -v allows 1.0 GiB: "),
        (node(data=1 << 28), "a rank on a .*ulimit -d allows 256.0 MiB: "),
    ],
)
def test_each_limit_is_held_against_the_plan(found, said, tmp_path):
    (tmp_path / "text").write_text("a" * 1000)
    config = Config(data=[str(tmp_path / "text")], **{k: v for k, v in SIZES.items() if k != "vocab_size"})
    problem = rank_memory.find_problem([found], config, Llama.from_flags(SIZES), 2)
    assert bool(problem) == bool(said)
    assert said is None or re.search(f": {said}", problem)
    assert "\n" not in problem


@needs_mpiexec
def test_a_run_without_memory_is_one_line_from_rank_0(tmp_path):
    """`ulimit -v` needs no root. The limit is larger than the address space that ranks need to start."""
    flags = ["--data", *write_text(tmp_path), "--layers", "9", "--dim", "4096", "--heads", "32"]
    job = [*launcher(), "-n", "2", sys.executable, "-m", "zero_mpi.train", *flags, "--transport", "mpi"]
    command = ["sh", "-c", 'ulimit -v 9000000; exec "$@"', "sh", *job]
    status, output, errors = run_command(command, timeout=60, cwd=tmp_path)
    assert (status, output) == (2, ""), errors
    assert re.fullmatch(r"zero_mpi train: error: .*memory.* on .*\n", ranks_said(errors))


def resident_pages(job, folder):
    command = [*launcher(), "-n", "2", sys.executable, "-m", "zero_mpi.train", *job]
    peak, ranks = 0, []
    with running(command, folder / "said", COMPILED, folder) as process:
        while process.poll() is None:
            ranks = ranks if len(ranks) == 2 else [*ranks_of(process.pid)]
            peak = max(peak, sum(map(proportional, ranks)))
            time.sleep(0.1)  # reading the page counts takes longer if there are many
    assert process.returncode == 0, (folder / "said").read_text()
    return peak, (folder / "said").read_text()


def ranks_of(launcher_process):
    for process in descendants(launcher_process):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{process}/exe") == str(Path(sys.executable).resolve()):
                yield Path(f"/proc/{process}")


def proportional(folder):
    try:
        match = re.search(r"^Pss: +([0-9]+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) << 10 if match else 0


@needs_mpiexec
@pytest.mark.timeout_seconds(180)
def test_what_is_asked_for_is_what_ranks_take(tmp_path):
    """Ranks never use more memory than requested. The request is at most 25 % too large; it includes 64 MiB
    for the compiler, which ranks do not load if another test has filled its cache."""
    data = write_text(tmp_path)
    peak, output = resident_pages(["--data", *data, *MODEL, "--transport", "shared"], tmp_path)
    request = float(re.search(r"request ([0-9.]+) GiB per node", output)[1]) * 2**30
    assert peak <= request
    assert request <= 1.25 * (peak + (64 << 20))
    command = ["-m", "zero_mpi", "plan", "--ranks", "2", "--data", *data, *MODEL, "--transport", "shared"]
    status, printed, _ = run_job(1, command, env=COMPILED)
    assert status == 0
    assert f"{request / 2**30:.2f} GiB" in printed.splitlines()[-1]
