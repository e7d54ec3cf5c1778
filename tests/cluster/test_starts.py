"""srun starts ranks of each MPI through the interface that it supports; unsupported starts are refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import installed, site_variables
from jobs import COMPILED
from slurm import Slurm, slurm, why_no_slurm
from test_command_bits import SIZES, assert_same_run, train_compiled, write_text

RANKS, BAD_USAGE = 4, 2
FLAGS = [*SIZES, "--kv-heads", "1", "--batch-size", "7", "--micro-batch", "2"]
FLAGS += ["--steps", "3", "--warmup", "2", "--sample", "0"]

pytestmark = [
    pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm()),
    pytest.mark.timeout_seconds(180),
]


@pytest.fixture(scope="module")
def here() -> Iterator[Slurm]:
    with slurm(cpus=8) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    return [*FLAGS, "--data", *write_text(tmp_path_factory.mktemp("text"))]


@pytest.fixture(scope="module")
def alone(flags, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "out"
    train_compiled(1, out, *flags)
    return out


def start(cluster: Slurm, mpi: str, interface: str, *arguments: str) -> tuple[int, str, str]:
    try:
        python, _ = installed("mpich" if mpi == "site" else mpi)
        environ = COMPILED | (site_variables() if mpi == "site" else {})
    except LookupError as error:
        pytest.skip(str(error))
    launch = f"srun --mpi={interface}"
    if reason := cluster.why_no_launch(launch):
        pytest.skip(reason)
    return cluster.run(*launch.split(), "-n", str(RANKS), python, *arguments, env=environ, timeout=120)


@pytest.mark.parametrize(
    ("mpi", "interface"),
    [
        ("mpich", "pmi2"),
        ("site", "pmi2"),
        ("impi", "pmi2"),
        ("impi", "pmix"),
        ("openmpi", "pmix"),
        ("openmpi4", "pmix"),
    ],
)
def test_the_same_bytes_as_of_one_rank(mpi, interface, here, flags, alone, tmp_path):
    command = ["-m", "zero_mpi.train", "--out", str(tmp_path / "out"), *flags]
    status, printed, errors = start(here, mpi, interface, *command)
    assert (status, errors) == (0, ""), printed
    assert f"over {RANKS} ranks" in printed
    assert_same_run(tmp_path / "out", alone)


ALONE = f"the launcher started {RANKS} ranks, but each of them is alone"  # printed once, with status 2


@pytest.mark.parametrize(
    ("mpi", "interface", "says"),
    [
        ("mpich", "pmix", "unsupported PMI version PMIx"),
        ("site", "pmix", ALONE),
        ("openmpi", "pmi2", ALONE),
        ("openmpi4", "pmi2", "An error occurred in MPI_Init_thread"),
    ],
)
def test_the_wrong_interface_is_refused(mpi, interface, says, here, flags, tmp_path):
    command = ["-m", "zero_mpi.train", "--out", str(tmp_path / "out"), *flags]
    status, printed, errors = start(here, mpi, interface, *command)
    assert status != 0, printed
    assert says in errors
    assert says != ALONE or (status, errors.count(ALONE)) == (BAD_USAGE, 1)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
