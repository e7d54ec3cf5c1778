"""Tests of the doctor: each bad condition gives its row, verdict, remedy and exit status."""

import json
import os
import platform
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from jobs import run_job
from test_command_bits import needs_mpiexec

from zero_mpi.cli import text as cli_text
from zero_mpi.comm import SerialComm
from zero_mpi.comm.gpu import probe
from zero_mpi.commands.doctor import command as doctor
from zero_mpi.commands.doctor import hosts, measures
from zero_mpi.commands.doctor.ranks import BAD, NOTE, OK, Ranks, Row
from zero_mpi.device.types import Array  # noqa: F401  (NumPy is loaded before the doctor's modules)
from zero_mpi.environment.limits import Limits
from zero_mpi.files.file_systems import KINDS, file_system
from zero_mpi.launch.world import World

CORES = len(os.sched_getaffinity(0))


def place(*nodes, **options):
    """Return ranks on nodes a, b, ..., with the facts that the doctor's checks need."""
    size = sum(map(len, nodes))
    names = tuple("abcdefgh"[: len(nodes)])
    return Ranks(World(0, size), SerialComm(), None, nodes, names, Namespace(**options))


def only(rows):
    (row,) = rows
    return row


def placed(cores=range(8), threads=1, chosen=False, quota=None):
    return hosts.Placement(tuple(cores), threads, chosen, quota)


def node(*placements):
    return hosts.NodePlacement("a", tuple(range(len(placements))), placements)


def quota(ranks, threads, cores):
    return [node(*[placed(threads=threads, quota=cores)] * ranks)]


def level(name):
    levels = {f"THREAD_{name}": name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    return Namespace(**levels, Query_thread=lambda: name)


def limit(**other):
    common = {"available": 64 << 30, "group_memory": None, "group_free": None}
    common |= {"address_space": None, "data": None, "locked": None, "files": 1024}
    rows = hosts.limit_rows([Limits(**common | other)], place((0, 1, 2, 3)))
    return only(row for row in rows if row.verdict != OK)


def folder(*blind, **other):
    fine = {"system": KINDS["ext4"], "free": 1 << 40, "written": 16 << 20, "synced": 0.1}
    rows = measures.folder_rows(Path("run"), measures.Trial(**fine | other), list(blind))
    return only(row for row in rows if row.verdict != OK)


OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}
TWO, NODE = place((0,), (1,)), [placed(range(2))] * 8
ROWS = [
    (lambda: hosts.version("zero_mpi", ["1", "9.9", "1", "9.9"]), BAD, "9.9 on ranks 1, 3"),
    (lambda: hosts.version("mpi4py", ["4", "3"]), NOTE, "3 on rank 1"),
    (lambda: hosts.version("BLAS", ["a", "b"]), BAD, "OPENBLAS_CORETYPE"),
    (lambda: hosts.version("operations", ["numpy"]), NOTE, "zero-mpi[fast]"),
    (lambda: hosts.version("operations", ["numba 1.0"]), OK, "numba 1.0"),
    (lambda: hosts.launcher(1, OPEN_MPI), BAD, "started 4 processes"),
    (lambda: hosts.launcher(4, OPEN_MPI), OK, "4 ranks"),
    (lambda: hosts.launcher(1, {}), OK, "1 rank"),
    (lambda: hosts.thread_level(level("SERIALIZED")), NOTE, "MPI_THREAD_MULTIPLE"),
    (lambda: hosts.thread_level(level("MULTIPLE")), OK, "multiple"),
    (lambda: hosts.thread_level(None), NOTE, "zero-mpi[mpich]"),
    (lambda: hosts.crowding([node(*NODE)]), NOTE, "8 ranks on 2 cores of a"),
    (lambda: hosts.crowding([node(*[placed()] * 8)]), OK, ""),
    (lambda: hosts.crowding(quota(8, 1, 2)), NOTE, "at most 2 "),
    (lambda: hosts.crowding(quota(1, 1, 1.5)), OK, ""),
    (lambda: hosts.crowding(quota(2, 1, 0.5)), NOTE, "at most 1 "),
    (lambda: hosts.threads(quota(1, 1, 1.5)), OK, ""),  # no advice to start more ranks
    (lambda: hosts.threads(quota(1, 2, 1.5)), NOTE, "--threads 1"),
    (lambda: hosts.threads(quota(2, 1, 4.0)), NOTE, "2 of 4"),
    (lambda: hosts.threads([node(*[placed(threads=8, chosen=True)] * 4)]), NOTE, "OPENBLAS_NUM_THREADS"),
    (lambda: hosts.threads([node(placed([0], threads=2), placed([1], threads=2))]), NOTE, "--threads 1"),
    (lambda: hosts.threads([node(placed(), placed())]), NOTE, "6 of 8 cores of a idle"),
    (lambda: hosts.binding([node(*map(placed, ([0], [1], [1], [2, 3])))]), NOTE, "ranks 1-2 of a share 1"),
    (lambda: list(measures.rate_rows([1e11, 6e10], TWO))[1], NOTE, "b at 60 %"),
    (lambda: list(measures.rate_rows([1e11, 9e10], TWO))[1], OK, "90 %"),
    (lambda: next(measures.rate_rows([1e11, 6e10], TWO)), OK, "160 in total"),
    (lambda: limit(group_memory=1 << 30, group_free=1 << 29), NOTE, "128.0 MiB for each rank"),
    (lambda: limit(address_space=1 << 32), NOTE, "ulimit -v"),
    (lambda: limit(locked=1 << 16), NOTE, "ulimit -l"),
    (lambda: limit(files=64), NOTE, "ulimit -n 4096"),
    (lambda: folder(synced=10.0), NOTE, "--async-save"),
    (lambda: folder(free=1 << 29), NOTE, "--keep"),
    (lambda: folder(system=KINDS["tmpfs"]), NOTE, "--out DIR"),
    (lambda: folder("b"), BAD, "b cannot see"),
    (lambda: measures.network({"alpha_seconds": 5e-5, "beta_seconds_per_byte": 0}), OK, ""),
    (lambda: measures.network({"alpha_seconds": 5e-5, "beta_seconds_per_byte": 9e-9}), NOTE, "btl_tcp"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "verdict", "text"), ROWS)
def test_verdicts(row, verdict, text, monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "8")
    for name in hosts.environment.THREADS[1:]:
        monkeypatch.delenv(name, raising=False)
    result = row()
    assert (result.verdict, text in result.value + result.remedy) == (verdict, True), result


def test_latency_and_bandwidth_are_those_of_a_small_and_a_large_message(monkeypatch):
    monkeypatch.setattr(
        measures, "seconds_of", lambda job, ring, nbytes: 1e-5 + (nbytes > 64) * nbytes * 1e-9
    )
    job = place((0, 1), (2, 3), quick=True)
    assert [row.what for row in measures.links(job)] == ["link in a node", "network"]
    node, between = job.figures["links"]["node"], job.figures["links"]["between"]
    assert node["alpha_seconds"] == between["alpha_seconds"] == 1e-5
    assert node["beta_seconds_per_byte"] == pytest.approx(1e-9)
    assert between["beta_seconds_per_byte"] == pytest.approx(5e-10), "two ranks share the link"


@pytest.mark.parametrize(
    ("threads", "cores", "others"), [(17, 2, 15), (3, 2, 1), (2, 2, None), (1, 64, None)]
)
def test_a_host_on_which_others_compute_is_a_note(threads, cores, others, tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "PROC", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    job = place((0, 1))
    assert list(hosts.load(job)) == [], "unknown load gives no note"
    (tmp_path / "loadavg").write_text(f"0.23 0.27 0.14 {threads}/931 7039\n")
    verdicts = [(row.verdict, row.value.split()[0]) for row in hosts.load(job)]
    assert verdicts == [(NOTE, str(others))] * (others is not None)


def test_little_shared_memory_is_a_note(monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((1, 4096, 9, 9, 16384, 0, 0, 0, 0, 9)))
    assert hosts.free_bytes() == 64 << 20  # a container's default
    first, second = hosts.shared_rows([hosts.free_bytes()], ["/dev/shm is full"], place((0, 1)))
    assert "64.0 MiB free in /dev/shm of a" in first.value
    assert [(row.verdict, "--shm-size" in row.remedy) for row in (first, second)] == [(NOTE, True)] * 2


CHILD = "import os, signal, time; os.write(1, b'{}\\n'); {}"
NAMES = '{"names": ["X1", "X1"], "driver": "13.0"}'


@pytest.mark.parametrize(
    ("end", "text", "verdict"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV", NOTE),
        ("raise SystemExit('no such call')", "status 1: no such call", NOTE),
        ("time.sleep(9)", "1 s", NOTE),
        ('print(\'{"takes_memory": true, "mpi": "arrived"}\')', "arrived", OK),
        ('print(\'noise\\n{"takes_memory": false, "mpi": "lost"}\')', "lost", NOTE),
    ],
)
def test_the_answers_of_the_live_test_of_devices(end, text, verdict, monkeypatch):
    """CuPy is missing, and the child finds two devices and then ends in one of several ways."""
    monkeypatch.setattr(hosts, "PROBE_SECONDS", 1.0)
    monkeypatch.setattr(hosts, "package_version", lambda name: "")
    code = CHILD.replace("{}", NAMES, 1).replace("{}", end)
    probed = hosts.find_devices([sys.executable, "-c", code], ["/"])
    devices, cupy, aware = hosts.device_rows([probed], ("a",))
    assert "2 devices (X1)" in devices.value
    assert cupy.remedy.startswith("pip install")
    assert (text in aware.value, aware.verdict) == (True, verdict)
    assert hosts.device_rows([hosts.find_devices(driver=[])] * 2, ("a", "b")) == [
        Row("CUDA", "no CUDA device")
    ]


def test_a_driver_that_does_not_work_is_a_note_and_the_probe_knows_nothing_of_the_job():
    """A probe without a driver gives a note; a probe whose program does not exist gives an error."""
    names = ("PMI_RANK", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "SLURM_JOB_ID", "PMIX_ID")
    environ = {"PATH": "/bin", "OMPI_MCA_pml": "ucx", "UCX_TLS": "sm", "PMIX_PREFIX": "/opt/mpi"}
    assert probe.outside_job(dict.fromkeys(names, "1") | environ) == environ
    assert "cannot be started" in hosts.find_devices(["/no/such/program"], ["/"]).error
    if any(map(os.path.exists, hosts.DRIVER)):
        pytest.skip("this machine has a driver")
    devices = hosts.find_devices(driver=["/"])
    assert "libcuda.so.1" in devices.error
    assert only(hosts.device_rows([devices], ("a",))).verdict == NOTE


def test_a_run_folder_is_tried_and_nothing_stays(tmp_path):
    for out in (tmp_path / "new" / "run", tmp_path / "kept"):
        rows = measures.run_folder(place((0,), out=str(out)))
        assert [row.what for row in rows] == ["run folder", "disk", "seen by all hosts"]
        assert [row.verdict for row in rows][::2] == [OK if file_system(tmp_path).is_lasting else NOTE, OK]
        assert file_system(tmp_path).kind in rows[0].value
        assert [path.name for path in tmp_path.rglob("*")] == ["kept"] * (tmp_path / "kept").exists()
        (tmp_path / "kept").mkdir(exist_ok=True)


@pytest.mark.parametrize("name", ["rename", "symlink_to", ""])
def test_a_file_system_that_cannot_publish_is_bad(name, tmp_path, monkeypatch):
    def refuse(self, *arguments, **options):
        raise OSError(95, "Operation not supported", str(self))

    if name:
        monkeypatch.setattr(Path, name, refuse)
    else:
        monkeypatch.setattr(measures.folders, "replace_folder", lambda new, final: None)
    row = only(measures.run_folder(place((0,), out=str(tmp_path))))
    assert (row.verdict, ("Operation not supported" if name else "rename") in row.value) == (BAD, True)
    assert list(tmp_path.iterdir()) == []


def test_one_process_without_mpi(tmp_path, capsys):
    figures = tmp_path / "figures.json"
    arguments = ["--quick", "--out", str(tmp_path / "run"), "--json", str(figures)]
    assert doctor.command(World(0, 1), arguments) == 0
    output, report = capsys.readouterr().out, json.loads(figures.read_text())
    assert (report["ranks"], report["nodes"], report["links"]) == (1, 1, {"node": None, "between": None})
    assert report["flops_per_second_per_rank"] > 1e8
    assert (1 << 20) < report["memory_bytes_per_rank"] < 1 << 50
    names = [row["what"] for row in report["rows"]]
    assert {"MPI threads", "links", "shared window", "speed", "bf16", "disk"} <= set(names)
    assert all(name in output for name in names)
    assert "0 bad" in output.splitlines()[-1]


def examine(count, tmp_path, *flags, env=None):
    """Run `doctor --quick`; return its status, rows by name, figures and output."""
    figures = tmp_path / "figures.json"
    args = ["--quick", "--json", str(figures), *(flags or ["--out", str(tmp_path / "run")])]
    status, output, errors = run_job(count, ["-m", "zero_mpi", "doctor", *args], timeout=50, env=env)
    assert figures.exists(), output + errors
    report = json.loads(figures.read_text())
    return status, {row["what"]: row for row in report["rows"]}, report, output + errors


@needs_mpiexec
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_are_true(ranks, tmp_path):
    status, rows, report, output = examine(ranks, tmp_path)
    assert status == 0, output
    assert (report["ranks"], report["nodes"], report["ranks_per_node"]) == (ranks, 1, ranks)
    assert rows["launcher"]["value"] == cli_text.plural(ranks, "rank")
    assert cli_text.ranks(range(ranks)) in rows[f"host {platform.node()}"]["value"]
    assert rows["ranks and cores"]["verdict"] == (NOTE if ranks > CORES else OK)
    assert rows["shared window"]["verdict"] == OK
    assert output.splitlines().count("") == 0
    assert report["links"]["between"] is None
    assert 0 < report["links"]["node"]["alpha_seconds"] < 0.5
    assert 0 <= report["links"]["node"]["beta_seconds_per_byte"] < 1e-6


@needs_mpiexec
def test_faults_of_one_job(tmp_path):
    """The job has two simulated hosts, an impossible run folder and too many threads."""
    env = {"ZERO_MPI_RANKS_PER_NODE": "2", "OPENBLAS_NUM_THREADS": "64"}
    status, rows, report, output = examine(4, tmp_path, "--out", "/dev/null/run", env=env)
    assert status == 1, output
    assert rows["run folder"]["verdict"] == BAD
    if CORES > 1:  # OpenBLAS uses at most as many threads as cores, on each of two ranks
        assert "unset OPENBLAS_NUM_THREADS" in rows["threads"]["remedy"]
    name = platform.node()
    assert [host["name"] for host in report["hosts"]] == [name, f"{name} (2)"]
    assert (report["nodes"], report["ranks_per_node"]) == (2, 2)
    assert "uneven hosts" in rows
    assert 0 <= report["links"]["between"]["beta_seconds_per_byte"] < 1e-6


STANDING = """
import signal
from zero_mpi.commands.doctor import command, measures
from zero_mpi.environment import launch_rank

if launch_rank() == 1:
    measures.rate = lambda *given: signal.pause()
command.main()
"""


@needs_mpiexec
def test_a_check_that_hangs_is_named_and_ended(tmp_path):
    """The rows before the check that hangs are printed."""
    script = tmp_path / "standing.py"
    script.write_text(STANDING)
    flags = ["--quick", "--timeout", "3", "--out", str(tmp_path / "run")]
    status, output, errors = run_job(2, [str(script), *flags], timeout=50, warm=False)
    assert status == 86, output + errors
    assert "speed of products" in errors
    assert "run folder" in output
