"""Ranks with different programs or settings are refused at the start, with rank, host and both values.

The launcher starts one rank with a different command: `mpiexec -n 2 A : -n 1 B`.
"""

import platform
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import launcher, run_command
from test_command_bits import SIZES, needs_mpiexec, write_text
from test_generate import LLAMA, write_model

import zero_mpi
from zero_mpi.errors import UsageError
from zero_mpi.launch import consistency
from zero_mpi.launch.world import World
from zero_mpi.train import description as same_bits

FLAGS = [*SIZES, "--steps", "1", "--sample", "0", "--batch-size", "4", "--eval-every", "0"]
PACKAGE = Path(zero_mpi.__file__).parent
RUN = [sys.executable, "-m", "zero_mpi.train"]


@pytest.fixture
def flags(tmp_path):
    return [*FLAGS, "--data", *write_text(tmp_path), "--out", str(tmp_path / "out")]


def refused(usual, odd, cwd):
    command = [*launcher(), "-n", "1", *usual, ":", "-n", "1", *odd, ":", "-n", "1", *usual]
    status, printed, errors = run_command(command, timeout=40, cwd=cwd)
    assert status == 2, f"{status}\n{printed}\n{errors}"
    assert "Traceback" not in errors, errors
    assert len(re.findall("^zero_mpi", errors, re.MULTILINE)) == 1, "expected one line of zero_mpi"
    assert not list(Path(cwd).glob("out/step-*"))
    return errors


def test_every_flag_and_what_else_decides_counts(monkeypatch):
    monkeypatch.setenv("ZERO_MPI_RANKS_PER_NODE", "2")
    settings = same_bits.settings(zero_mpi.config.settings.Config(seed=5))
    assert settings["--seed"] == "5"
    assert settings["ZERO_MPI_RANKS_PER_NODE"] == "2"
    assert len([name for name in settings if name.startswith("--")]) == len(zero_mpi.config.settings.FIELDS)


@pytest.mark.parametrize(("rank", "expected"), [("0", UsageError), ("2", SystemExit)])
def test_ranks_that_do_not_find_each_other_are_refused_once(rank, expected):
    """Under the launcher of another MPI, the first rank reports the error and all others exit silently."""
    environ = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": rank}
    with pytest.raises(expected) as caught:
        consistency.check_not_alone(World(0, 1), environ)
    assert expected is SystemExit or "started 4 ranks, but each of them is alone" in str(caught.value)


@needs_mpiexec
def test_another_flag_on_one_rank_is_refused(flags, tmp_path):
    errors = refused([*RUN, *flags], [*RUN, *flags, "--lr", "0.5"], tmp_path)
    host = platform.node()
    assert f"rank 1 on {host} has --lr 0.5, ranks 0, 2 (on {host}) 0.004; start all ranks with" in errors


@needs_mpiexec
def test_another_variable_on_one_rank_is_refused(flags, tmp_path):
    errors = refused(["env", "ZERO_MPI_OPS=auto", *RUN, *flags], [*RUN, *flags], tmp_path)
    assert "has operations numpy, ranks 0, 2" in errors
    assert "use the same environment" in errors


@needs_mpiexec
def test_another_package_on_one_rank_is_refused(flags, tmp_path):
    ignore = shutil.ignore_patterns("*.pyc", "__pycache__")
    copy = shutil.copytree(PACKAGE, tmp_path / "other/zero_mpi", ignore=ignore)
    path = copy / "optim/optimizer.py"
    path.write_text(path.read_text() + "# another line\n")
    errors = refused([*RUN, *flags], ["env", f"PYTHONPATH={copy.parent}", *RUN, *flags], tmp_path)
    assert f"rank 1 on {platform.node()} has zero_mpi's source" in errors


@needs_mpiexec
def test_another_model_file_on_one_rank_is_refused(flags, tmp_path):
    """Hosts with local disks may have different files under the same path."""
    path, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    write_model(path, LLAMA)
    write_model(other, replace(LLAMA, feed_forward_length=11))
    # Rank 1 opens the second model under the name of the first.
    script = tmp_path / "other.py"
    script.write_text(
        "from zero_mpi.config import inputs as session\n"
        "from zero_mpi.train import command as train_command\n"
        "open_init = session.open_init\n"
        "from dataclasses import replace\n"
        f"session.open_init = lambda config: open_init(replace(config, init={str(other)!r}))\n"
        "train_command.main()\n"
    )
    init = [*flags[len(SIZES) :], "--init", str(path)]
    errors = refused([*RUN, *init], [sys.executable, str(script), *init], tmp_path)
    assert f"has the model file of --init {path}" in errors
