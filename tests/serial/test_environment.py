"""Tests of the variables that are set before NumPy and MPI start: threads, yielding, users' own values.

A wrong choice makes a run 10 to 100 times slower, which no test of results would notice.
"""

import json
import os
import subprocess
import sys

import pytest
from jobs import clean_environment

from zero_mpi import environment
from zero_mpi.environment import LOCAL_RANKS, THREADS, YIELDING, local_ranks, prepare, under_launcher
from zero_mpi.environment.limits import group_limits


@pytest.fixture(autouse=True)
def before_numpy(monkeypatch):
    monkeypatch.setattr(sys, "prefix", "/nonexistent")
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    monkeypatch.setattr(environment, "cores", lambda: 4)
    monkeypatch.setattr(environment, "quota", lambda: None)


def prepared(**environ):
    prepare(environ)
    return environ


def test_one_thread_where_nothing_is_set():
    assert prepared() == dict.fromkeys(THREADS, "1")
    assert {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"} <= {*THREADS}


@pytest.mark.parametrize("name", THREADS)
def test_one_setting_of_the_user_leaves_all_alone(name):
    """If the user sets one variable, no other is set: OMP_NUM_THREADS=8 also sets OpenBLAS."""
    assert prepared(**{name: "8"}) == {name: "8"}


def test_threads_are_left_alone_once_numpy_has_read_them(monkeypatch):
    """After NumPy is loaded, the variables stay, because a change would affect only child processes."""
    monkeypatch.setitem(sys.modules, "numpy", object())
    assert prepared() == {}


@pytest.mark.parametrize("name", LOCAL_RANKS)
def test_cores_are_handed_over_only_where_ranks_outnumber_them(name):
    for ranks in (1, 3, 4):
        assert YIELDING.keys() & prepared(**{name: str(ranks)}).keys() == set()
    assert YIELDING.items() <= prepared(**{name: "5"}).items()
    assert YIELDING.items() <= prepared(**{name: "8"}, OMP_NUM_THREADS="2").items()


def test_what_the_user_says_about_yielding_stays():
    name = next(iter(YIELDING))
    environ = prepared(MPI_LOCALNRANKS="8", **{name: "0"})
    assert environ[name] == "0"
    assert all(environ[other] == value for other, value in YIELDING.items() if other != name)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "PMIX_RANK"])
def test_windows_of_open_mpi_do_without_ucx_whoever_starts_its_ranks(name):
    """Open MPI's UCX would warn on stderr; under srun only PMIx variables show that it is Open MPI."""
    assert prepared(**{name: "0"})["OMPI_MCA_osc"] == "^ucx"
    assert prepared(**{name: "0"}, OMPI_MCA_osc="ucx")["OMPI_MCA_osc"] == "ucx"
    assert "OMPI_MCA_osc" not in prepared(PMI_RANK="0")


def test_open_mpi_4_beside_python_is_told_where_it_is(monkeypatch, tmp_path):
    """The wheel was built for another prefix, and without a launcher only OPAL_PREFIX gives the path."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert "OPAL_PREFIX" not in prepared()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/orted").touch()
    assert prepared()["OPAL_PREFIX"] == str(tmp_path)
    assert "OPAL_PREFIX" not in prepared(PMIX_RANK="0")
    assert prepared(OPAL_PREFIX="/site")["OPAL_PREFIX"] == "/site"


def test_ranks_are_counted_by_the_launcher_before_the_batch_system():
    """The launcher's number goes before SLURM_NTASKS_PER_NODE, which may have forms such as 4(x2)."""
    for value in ("", "4(x2)", "-3", "many"):
        assert local_ranks({"SLURM_NTASKS_PER_NODE": value}) == 1
    assert local_ranks({"SLURM_NTASKS_PER_NODE": "8", "MPI_LOCALNRANKS": "2"}) == 2
    assert not under_launcher({"PATH": "/bin"})
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"):
        assert under_launcher({name: "0"})


IMPORTED = """
import json, os, sys
import {module}
print(json.dumps([[name for name in {heavy} if name in sys.modules], dict(os.environ)]))
"""
HEAVY = ["mpi4py", "mpi4py.MPI", "numpy", "cupy"]


@pytest.mark.parametrize(
    "module", ["zero_mpi", "zero_mpi.environment", "zero_mpi.errors", "zero_mpi.commands.main"]
)
def test_importing_the_package_loads_neither_mpi_nor_arrays(module):
    environ = {name: value for name, value in clean_environment().items() if name not in THREADS}
    command = [sys.executable, "-c", IMPORTED.format(module=module, heavy=HEAVY)]
    result = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
    loaded, environ = json.loads(result.stdout)
    assert loaded == []
    assert {name: environ[name] for name in THREADS} == dict.fromkeys(THREADS, "1")


@pytest.mark.parametrize(
    ("environ", "own", "parents", "ranks", "together", "each"),
    [
        ({}, 4, 4, 1, 4, 4),  # a single rank
        ({}, 2, 8, 1, 2, 2),  # no launcher: the parent is a shell with more cores
        ({"PMI_RANK": "0"}, 8, 8, 4, 8, 2),  # ranks are not bound to cores
        ({"PMI_RANK": "0"}, 2, 8, 4, 8, 2),  # the rank is bound to two of eight cores
        ({"PMI_RANK": "0"}, 2, 8, 8, 8, 1),  # two ranks share two cores
        ({"PMI_RANK": "0"}, 2, 2, 8, 2, 1),  # more ranks than cores
        ({"SLURM_PROCID": "0", "SLURM_CPUS_ON_NODE": "8"}, 1, 64, 8, 8, 1),
        ({"SLURM_PROCID": "0", "SLURM_CPUS_ON_NODE": "2"}, 2, 64, 8, 2, 1),
    ],
)
def test_cores_of_a_rank_that_may_be_bound(monkeypatch, environ, own, parents, ranks, together, each):
    monkeypatch.setattr(environment, "cores", lambda: own)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(parents)))
    environ = environ | {"MPI_LOCALNRANKS": str(ranks)}
    assert environment.node_cores(environ) == together
    assert environment.cores_per_rank(environ) == each
    environment.prepare(environ)
    assert ("MPIR_CVAR_ENABLE_HEAVY_YIELD" in environ) == (ranks > together)


@pytest.mark.parametrize(
    ("quota", "ranks", "together", "each"),
    [(None, 2, 4, 2), (1.0, 1, 1, 1), (1.0, 2, 1, 1), (3.9, 2, 3, 1), (0.5, 1, 1, 1), (64.0, 1, 4, 4)],
)
def test_a_quota_of_processor_time_counts_as_cores(monkeypatch, quota, ranks, together, each):
    monkeypatch.setattr(environment, "quota", lambda: quota)
    environ = {"MPI_LOCALNRANKS": str(ranks)}
    assert (environment.node_cores(environ), environment.cores_per_rank(environ)) == (together, each)
    environment.prepare(environ)
    assert ("MPIR_CVAR_ENABLE_HEAVY_YIELD" in environ) == (ranks > together)


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({}, (None, None, None)),
        (
            {
                "own": "0::/job/step\n", "memory.max": "max\n", "job/memory.max": f"{1 << 30}\n",
                "job/memory.current": f"{700 << 20}\n", "job/memory.stat": f"inactive_file {200 << 20}\n",
                "job/step/memory.max": "max\n", "job/step/cpu.max": "150000 100000\n",
            },
            (1 << 30, 524 << 20, 1.5),
        ),
        (
            {
                "own": "4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n", "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "400\n", "cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            (1000, 600, 0.5),
        ),
        (
            {
                "own": "4:memory:/job\n1:cpu,cpuacct:/job\n", "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",  # no limit, in version 1 of cgroups
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            (None, None, None),
        ),
    ],
)  # fmt: skip
def test_limits_of_control_groups_of_both_kinds(files, limits, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert group_limits(tmp_path, tmp_path / "own") == limits
