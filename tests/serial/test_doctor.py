"""The doctor's rows are true, and each bad condition gives its line, its remedy and its exit status.

Conditions that a machine cannot be brought into in a second are made where the doctor looks: in folders that
stand for the system's, or in what ranks are said to have found. The others are real: jobs with another
version on a rank, more ranks than cores, too many threads, a run folder that cannot be.
"""

import json
import mmap
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import launcher, run_command, run_job
from pretended_mounts import pretend
from test_command_bits import needs_mpiexec

import zero_mpi
from zero_mpi.cli import text as cli_text
from zero_mpi.comm import SerialComm
from zero_mpi.comm.gpu import probe, run_probe
from zero_mpi.comm.shared.gradient_pool import padded
from zero_mpi.device.types import Array  # noqa: F401  (numpy is there before the doctor's modules are)
from zero_mpi.doctor import (
    binding,
    clocks,
    compute,
    gpu,
    links,
    mpi_library,
    other_processes,
    output_folder,
    ranks_or_threads,
    shared_memory,
    system_limits,
    verdicts,
    versions,
)
from zero_mpi.doctor import command as doctor
from zero_mpi.doctor.links import Measurement, fit
from zero_mpi.doctor.ranks import Ranks, told_apart
from zero_mpi.doctor.verdicts import BAD, NOTE, OK, Row
from zero_mpi.environment.control_groups import group_limits
from zero_mpi.files.file_systems import KINDS, StripeLayout, file_system
from zero_mpi.launch.consistency import is_first
from zero_mpi.launch.limits import Limits
from zero_mpi.launch.world import World
from zero_mpi.models import Llama
from zero_mpi.plan.machine import Link
from zero_mpi.sharding import FULL_SHARD
from zero_mpi.sharding.layout import lay_out

CORES = len(os.sched_getaffinity(0))


def place(*nodes, names=None):
    """Ranks on nodes; for rows, which ask for no more."""
    size = sum(map(len, nodes))
    return Ranks(World(0, size), SerialComm(), None, nodes, names or tuple("abcdefgh"[: len(nodes)]))


def only(found):
    """The one row that there is."""
    (row,) = found
    return row


# ------------------------------------------------------------------------------------------ text and fits


@pytest.mark.parametrize(
    ("numbers", "text"), [([3], "3"), ([0, 1, 2, 3, 7], "0-3, 7"), ([5, 4], "4-5"), ([0, 2], "0, 2")]
)
def test_ranges(numbers, text):
    assert cli_text.ranges(numbers) == text


def test_a_row_shows_its_remedy_below_and_fits_the_width():
    long = "many words " * 30
    told = list(verdicts.lines(Row("disk", long, NOTE, f"do {long}")))
    assert told[0].startswith("note  disk")
    assert max(map(len, told)) <= cli_text.WIDTH
    assert " ".join(" ".join(told).split()).count("many words") == 60
    assert sum("-> do" in line for line in told) == 1


@pytest.mark.parametrize("row", [("a", "b", OK, "do"), ("a", "b", NOTE, ""), ("a", "b", BAD, "")])
def test_a_remedy_goes_with_a_fault(row):
    with pytest.raises(AssertionError):
        Row(*row)


def points(alpha, beta, noise=0.0):
    draw = np.random.default_rng(0)
    sizes = [(messages, 4.0**k * 1024) for messages in (1, 3) for k in range(8)]
    return [Measurement(m, n, (alpha * m + beta * n) * (1 + noise * draw.uniform(-1, 1))) for m, n in sizes]


@pytest.mark.parametrize(("alpha", "beta"), [(2e-6, 1e-10), (3e-3, 8e-9), (0.0, 1e-9)])
def test_fit_finds_latency_and_bandwidth(alpha, beta):
    assert fit(points(alpha, beta)).alpha == pytest.approx(alpha, rel=1e-6, abs=1e-12)
    assert fit(points(alpha, beta)).beta == pytest.approx(beta, rel=1e-6)
    noisy = fit(points(alpha, beta, 0.2))
    assert noisy.alpha == pytest.approx(alpha, rel=0.2, abs=2e-7)
    assert noisy.beta == pytest.approx(beta, rel=0.2)


def test_fit_is_never_negative():
    falling = [Measurement(1, 1e3, 2e-3), Measurement(1, 1e6, 1e-3)]
    steep = [Measurement(1, 1e3, 1e-6), Measurement(1, 1e6, 1e-2)]
    assert fit(falling).beta == 0 < fit(falling).alpha
    assert fit(steep).alpha == 0 < fit(steep).beta
    assert fit([Measurement(1, 8, 2e-3), Measurement(1, 8, 2e-3)]) == Link(pytest.approx(2e-3), 0)


# ---------------------------------------------------------------------------------------- rows of ranks


def installed(**other):
    """What a rank has: our own versions, but for some."""
    return {name: other.get(name, value) for name, value in versions.look(World(0, 1)).items()}


def test_versions_are_those_that_are_installed():
    found = {row.what: row for row in versions.rows([installed(), installed()])}
    assert found["zero_mpi"].value == zero_mpi.__version__
    assert found["Python"].value == platform.python_version()
    assert found["NumPy"].value == np.__version__
    assert {row.verdict for row in found.values()} <= {OK, NOTE}


@pytest.mark.parametrize("name", ["zero_mpi", "Python", "NumPy", "operations"])
def test_another_version_on_a_rank_is_bad_and_names_it(name):
    found = versions.rows([installed(), installed(**{name: "9.9"}), installed(), installed(**{name: "9.9"})])
    bad = only(row for row in found if row.verdict == BAD)
    assert bad.what == name
    assert bad.value.endswith("but 9.9 on ranks 1, 3")
    assert "same on all hosts" in bad.remedy


def test_other_kernels_of_products_are_bad():
    found = versions.rows([installed(), installed(BLAS="openblas 0.3 Other")])
    bad = only(row for row in found if "Other" in row.value)
    assert (bad.what, bad.verdict) == ("BLAS", BAD)
    assert "OPENBLAS_CORETYPE" in bad.remedy


def test_plain_operations_are_a_note():
    assert versions.row("operations", ["numpy"], BAD).remedy.startswith("pip install 'zero-mpi[fast]'")
    assert versions.row("operations", ["numba 1.0"], BAD).verdict == OK


def test_a_launcher_of_another_mpi_is_bad():
    environ = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}
    row = mpi_library.started(1, environ)
    assert row.verdict == BAD
    assert row.value == "mpirun of Open MPI started 4 processes, and each is a job of one rank"
    assert mpi_library.started(4, environ) == Row("launcher", "mpirun of Open MPI, 4 ranks")
    assert is_first(environ)
    assert not is_first(environ | {"OMPI_COMM_WORLD_RANK": "2"})
    intel = {"HYDI_CONTROL_FD": "7", "PMI_RANK": "0", "I_MPI_HYDRA_UUID": "8e21"}
    assert mpi_library.started(2, intel) == Row("launcher", "mpiexec of Intel MPI, 2 ranks")
    assert mpi_library.started(1, {}) == Row("launcher", "none, 1 rank")
    assert is_first({})


def test_ranks_or_threads_says_which_was_faster(tmp_path):
    assert ranks_or_threads.choices(8, 8, parts=2) == [4, 8], "a rank a host, and one a part of its memory"
    assert ranks_or_threads.choices(8, 16, parts=3) == [8]
    assert ranks_or_threads.choices(1, 8, parts=1) == ranks_or_threads.choices(8, 4, parts=1) == []
    (ranks,) = ranks_or_threads.row({1: 1000.0, 4: 930.0, 8: 800.0}, 8)
    assert (ranks.verdict, ranks.value.partition(" (")[0]) == (
        OK,
        "8 ranks x 1 thread 1.00, 2 ranks x 4 threads 0.93, 1 rank x 8 threads 0.80",
    )
    (threads,) = ranks_or_threads.row({1: 1000.0, 2: 1100.0}, 2)
    assert threads.verdict == NOTE
    assert threads.remedy.startswith("start 1 rank x 2 threads with --threads 2;")
    assert ranks_or_threads.row({}, 1) == []
    for name in ("node0", "node1", "possible"):
        (tmp_path / name).mkdir()
    assert (ranks_or_threads.domains(tmp_path), ranks_or_threads.domains(tmp_path / "none")) == (2, 1)


@pytest.mark.parametrize("name", mpi_library.ASYNC_PROGRESS)
def test_progress_threads_of_the_library_are_a_note(name):
    assert mpi_library.progress([{}, {name: "1"}]).remedy == f"unset {name}"
    assert mpi_library.progress([{}, {name: "0"}]).verdict == OK


def seat(cores=range(8), threads=1, chosen=False, yields=False, quota=None):
    return binding.Seat(tuple(cores), threads, chosen, yields, quota)


def node(*seats, name="a", first=0):
    return binding.NodeSeats(name, tuple(range(first, first + len(seats))), seats)


def test_more_ranks_than_cores():
    crowded = [node(*[seat(range(2))] * 8)]
    row = binding.crowding(crowded, "MPICH 5.0")
    assert row.verdict == NOTE
    assert row.value.startswith("8 ranks on 2 cores of a, and a rank that waits keeps its core")
    assert "MPIR_CVAR_ENABLE_HEAVY_YIELD=1 MPIR_CVAR_ALLGATHERV_PIPELINE_MSG_SIZE=67108864" in row.remedy
    assert "OMPI_MCA_mpi_yield_when_idle=1" in binding.crowding(crowded, "Open MPI v5.0.11").remedy
    yielding = binding.crowding([node(*[seat(range(2), yields=True)] * 8)], "MPICH 5.0")
    assert (yielding.verdict, "hands its core over" in yielding.value) == (NOTE, True)
    assert "at most 2 a host" in yielding.remedy
    assert binding.crowding([node(*[seat()] * 8)], "MPICH 5.0").verdict == OK


@pytest.mark.parametrize(
    ("ranks", "threads", "quota", "verdicts", "number"),
    [
        (1, 1, 1.5, (OK, OK), ""),  # no advice to start more
        (1, 2, 1.5, (OK, NOTE), "--threads 1"),
        (2, 1, 1.5, (NOTE, OK), "at most 1 a host"),
        (2, 1, 4.0, (OK, NOTE), "2 of 4"),
        (2, 1, 0.5, (NOTE, OK), "at most 1 a host"),
    ],
)
def test_a_quota_counts_as_so_many_cores(ranks, threads, quota, verdicts, number):
    found = [node(*[seat(threads=threads, yields=True, quota=quota)] * ranks)]
    rows = binding.crowding(found, "MPICH 5.0"), binding.threads(found)
    assert tuple(row.verdict for row in rows) == verdicts
    assert number in " ".join(row.value + row.remedy for row in rows)


def test_whether_a_rank_yields_is_what_its_library_reads():
    both = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "MPIR_CVAR_ALLGATHERV_PIPELINE_MSG_SIZE": "67108864"}
    assert binding.look("MPICH 5.0", both).yields
    assert not binding.look("MPICH 5.0", both | {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "0"}).yields
    assert not binding.look("Open MPI v5", both).yields


def test_ranks_that_are_dealt_out_in_turn():
    dealt = [
        binding.NodeSeats("a", (0, 2), (seat(), seat())),
        binding.NodeSeats("b", (1, 3), (seat(), seat())),
    ]
    row = binding.order(dealt)
    assert (row.verdict, row.value[:18]) == (NOTE, "a has ranks 0, 2, ")
    assert "ppr:N:node" in row.remedy
    assert binding.order([node(seat(), seat()), node(seat(), seat(), name="b", first=2)]).verdict == OK
    uneven = binding.order([node(seat(), seat()), node(seat(), name="b", first=2)])
    assert uneven.value.startswith("1 to 2 ranks on a host")


def test_ranks_that_are_bound_to_one_core():
    row = binding.binding([node(seat([0]), seat([1]), seat([1]), seat([2, 3]))])
    assert row.value == "ranks 1-2 of a share 1 core (1) while other cores are free"
    assert "--bind-to core" in row.remedy
    assert binding.binding([node(*[seat([core]) for core in range(4)])]).verdict == OK


def test_threads_and_cores(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "8")
    for name in binding.environment.THREADS[1:]:
        monkeypatch.delenv(name, raising=False)
    row = binding.threads([node(*[seat(threads=8, chosen=True)] * 4)])
    assert row.value.startswith("8 for each rank, but 2 cores for each of 4 ranks on a")
    assert row.remedy == "unset OPENBLAS_NUM_THREADS, or train with --threads 2"
    bound = binding.threads([node(seat([0], threads=2), seat([1], threads=2))])
    assert "but 1 core for each of 2 ranks" in bound.value
    assert binding.threads([node(*[seat(threads=2)] * 4)]).verdict == OK
    idle = binding.threads([node(seat(), seat())])
    assert idle.value == "1 for each rank; 6 of 8 cores of a idle"
    assert "--threads auto" in idle.remedy


def test_many_hosts_are_not_all_listed():
    found = [node(seat(), name=f"h{number}", first=number) for number in range(30)]
    told = list(binding.hosts(found))
    assert len(told) == cli_text.FEW + 1
    assert told[-1].value == "22 more, 1 ranks on each"
    assert told[0] == Row("host h0", "rank 0 on 8 cores (0-7), 8 for each rank")


def test_hosts_of_one_name_are_told_apart():
    assert told_apart(["a", "b", "a"]) == ("a", "b", "a (2)")


def test_a_slow_host_is_named():
    where = place((0, 1), (2, 3), (4, 5))
    speed, uneven = compute.rows([1e11, 9e10, 1e11, 1e11, 5e10, 4e10], where)
    assert speed.value.startswith("40 to 100 GFLOP/s a rank, 480 in all")
    assert (uneven.verdict, uneven.value) == (NOTE, "c at 47 % of the median: all ranks wait for it")
    assert compute.rows([1e11, 6e10], place((0,), (1,)))[1].value.startswith("b at 60 %")
    assert [row.verdict for row in compute.rows([1e11, 9e10], place((0,), (1,)))] == [OK, OK]


def test_products_of_bfloat16_are_told_beside_those_of_float32(tmp_path):
    row = compute.low_row([4e11, 3.8e11, 4.2e11], 2e11, ("oneDNN 3.2.0", ""))
    assert row.value == "oneDNN 3.2.0: 400 GFLOP/s a rank, 2.0 times fp32"
    row = compute.low_row([0.0, 0.0], 2e11, ("", "no oneDNN was found"))
    assert (row.verdict, row.value) == (OK, "--precision bf16 would be slower than fp32: no oneDNN was found")
    (tmp_path / "cpuinfo").write_text("model name : One\nflags\t\t: fpu avx2 avx512f avx512_bf16\n")
    assert compute.units(tmp_path / "cpuinfo") == ["avx512_bf16", "avx512f", "avx2"]
    assert compute.units(tmp_path / "none") == []


def test_a_library_that_is_held_below_the_processor_is_named():
    assert compute.pinned(["avx2"], {}, "openblas") == []
    (row,) = compute.pinned(["avx512f", "avx2"], {"OPENBLAS_CORETYPE": "Haswell"}, "openblas 0.3 Haswell")
    assert row.verdict == NOTE
    assert (row.what, row.value) == (
        "OPENBLAS_CORETYPE", "Haswell, on a processor with avx512f, avx2; BLAS: openblas 0.3 Haswell"
    )  # fmt: skip
    assert row.remedy.startswith("take OPENBLAS_CORETYPE out of the environment")


def test_the_bits_of_a_job_are_told_with_the_digest_of_its_trial(monkeypatch):
    row = compute.bits_row(["0a", "0a"], "openblas 1 Zen", "")
    assert (row.verdict, row.value) == (OK, "native, the best code for each processor; trial 0a")
    row = compute.bits_row(["0a", "0b", "0b"], "openblas 1 Zen", "")
    assert row.verdict == NOTE
    assert row.value == "native, the best code for each processor; trial 0a and 1 other among the ranks"
    assert "give --bits portable" in row.remedy
    assert compute.pins_fault() == ""
    monkeypatch.setenv("ZERO_MPI_BITS", "portable")
    row = compute.bits_row(["0a"], "openblas 1 Haswell", "")
    told = "portable, x86-64-v3 (openblas 1 Haswell, compiled for haswell); trial 0a"
    assert (row.verdict, row.value) == (OK, told)
    assert compute.pins_fault().startswith("--bits portable: NumPy was imported before zero_mpi")
    row = compute.bits_row(["0a"], "openblas 1 Zen", compute.pins_fault())
    assert (row.verdict, row.value) == (NOTE, compute.pins_fault())


def test_a_clock_that_is_off_is_named():
    row = only(clocks.rows([(0.001, 1e-5), (-7.25, 2e-5), (3.0, 1e-5)], ("b", "c", "d")))
    assert (row.verdict, row.value) == (NOTE, "at most 7.2 s apart: c (known to 20 us)")
    assert only(clocks.rows([(0.9, 1e-5)], ("b",))).verdict == OK


@pytest.mark.parametrize(
    ("alpha", "beta", "verdict"), [(5e-5, 1e-9, OK), (5e-5, 9e-9, NOTE), (2e-3, 1e-9, NOTE)]
)
def test_a_slow_network_is_a_note(alpha, beta, verdict):
    row = links.judged({"alpha_seconds": alpha, "beta_seconds_per_byte": beta})
    assert row.verdict == verdict
    assert ("btl_tcp_if_include" in row.remedy) == (verdict == NOTE)


# ------------------------------------------------------------------------------------------- the system


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_limits_of_control_groups_of_both_kinds(tmp_path):
    own = tmp_path / "own"
    new, old = tmp_path / "new", tmp_path / "old"
    write(own, "0::/job/step\n")
    write(new / "memory.max", "max\n")
    write(new / "job" / "memory.max", f"{1 << 30}\n")
    write(new / "job" / "memory.current", f"{700 << 20}\n")
    write(new / "job" / "memory.stat", f"anon 5\ninactive_file {200 << 20}\n")
    write(new / "job" / "step" / "memory.max", "max\n")
    write(new / "job" / "step" / "cpu.max", "150000 100000\n")
    assert group_limits(new, own) == (1 << 30, 524 << 20, 1.5)
    write(own, "4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n")
    write(old / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")  # in a container: the root
    write(old / "cpu,cpuacct" / "cpu.cfs_quota_us", "-1\n")
    write(old / "cpu,cpuacct" / "cpu.cfs_period_us", "100000\n")
    assert group_limits(old, own) == (None, None, None)
    write(old / "memory" / "memory.limit_in_bytes", "1000\n")
    write(old / "memory" / "memory.usage_in_bytes", "400\n")
    write(old / "cpu,cpuacct" / "cpu.cfs_quota_us", "50000\n")
    assert group_limits(old, own) == (1000, 600, 0.5)
    assert group_limits(old, tmp_path / "none") == (None, None, None)


def limited(**other):
    common = {"available": 64 << 30, "group_memory": None, "group_room": None, "group_cores": None}
    common |= {"address_space": None, "data": None, "locked": None, "files": 1024, "cores": 8}
    return Limits(**common | other)


@pytest.mark.parametrize(
    ("other", "value", "remedy"),
    [
        ({"group_cores": 1.5}, "a control group allows 1.5 of 8 cores on a", "--cpus"),
        (
            {"group_memory": 1 << 30, "group_room": 1 << 29},
            "128 MiB for each rank; a control group allows",
            "--mem",
        ),
        ({"address_space": 1 << 32}, "address space of 4 GiB on a", "ulimit -v"),
        ({"data": 1 << 32}, "private memory of 4 GiB for a rank on a", "ulimit -d"),
        ({"locked": 1 << 16}, "locked memory of 64 KiB on a", "ulimit -l"),
        ({"files": 64}, "64 open files on a, for 4 ranks", "ulimit -n 4096"),
    ],
)
def test_limits_that_bite_are_notes(other, value, remedy):
    where = place((0, 1, 2, 3))
    assert {row.verdict for row in system_limits.rows([limited()], where)} == {OK}
    row = only(row for row in system_limits.rows([limited(**other)], where) if row.verdict != OK)
    assert row.verdict == NOTE
    assert row.value.startswith(value)
    assert remedy in row.remedy


def test_memory_for_a_rank_is_that_of_the_tightest_host():
    found = [limited(available=8 << 30), limited(group_memory=4 << 30, group_room=3 << 30)]
    assert system_limits.memory_per_rank(found, place((0, 1), (2,))) == 3 << 30
    assert system_limits.memory_per_rank(found, place((0, 1), (2, 3))) == 3 << 29


def test_segments_that_nobody_uses_are_named_and_stay(tmp_path, monkeypatch):
    for name in ("mpich_shm_old", "mpich_shm_used", "mpich_shm_new", "other"):
        (tmp_path / name).write_bytes(b"x" * 5000)
        if "new" not in name:
            os.utime(tmp_path / name, (1, 1))
    monkeypatch.setattr(shared_memory, "PLACE", tmp_path)
    with open(tmp_path / "mpich_shm_used", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        found = shared_memory.look()
    assert found.left == (str(tmp_path / "mpich_shm_old"),)
    row = only(shared_memory.leftovers([found], ("a",)))
    assert row.value == "4.9 KiB on a, in 1 file that no process uses: mpich_shm_old"
    assert row.remedy == f"rm {tmp_path}/mpich_shm_old"
    assert len(shared_memory.look().left) == 2
    assert len(list(tmp_path.iterdir())) == 4
    many = tuple(f"{tmp_path}/mpich_shm_{number}" for number in range(99))
    command = shared_memory.removal(many).removeprefix("while no job starts: ")
    with open(tmp_path / "mpich_shm_used", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        subprocess.run(["sh", "-c", command], check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mpich_shm_used", "other"]


def test_little_shared_memory_is_a_note(monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((1, 4096, 9, 9, 16384, 0, 0, 0, 0, 9)))
    room = shared_memory.look()
    assert room.free == 64 << 20  # as containers have it
    where = place((0, 1))
    first, second = shared_memory.rows([room], ["/dev/shm is full"], where)[:2]
    assert "--shm-size" in first.remedy
    assert "--shm-size" in second.remedy
    assert (
        first.value
        == "64 MiB free in /dev/shm of a: for 2 ranks, a model of 11 million parameters in 12 blocks"
    )
    assert second.value == "a: /dev/shm is full: a run would go over messages"


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_model_that_fits_shared_memory_is_what_the_layout_takes(ranks):
    """A model of as many blocks, by the runtime's own layout: its bytes are those that were told to fit."""
    model = Llama.from_flags(
        {"layers": shared_memory.BLOCKS, "dim": 256, "heads": 4, "context": 64, "vocab_size": 256}
    )
    layout = lay_out(model.stages(), FULL_SHARD)
    wholes = sum(padded(whole.length) for whole in layout.wholes(FULL_SHARD, ranks))
    needed = wholes + ranks * sum(map(padded, layout.buffers))
    parameters = sum(unit.length for unit in layout.units)
    assert shared_memory.largest_model(needed, ranks) == pytest.approx(parameters, rel=0.1)


def test_no_device_is_one_line():
    assert gpu.rows([gpu.look(present=False)] * 2, ("a", "b")) == [Row("CUDA", "no CUDA device")]


CHILD = "import os, signal, time; os.write(1, b'{}\\n'); {}"
NAMES = '{"names": ["X1", "X1"], "driver": "13.0"}'


@pytest.mark.parametrize(
    ("end", "value", "verdict"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "a: no, the test died of SIGSEGV", NOTE),
        ("raise SystemExit('no such call')", "a: no, the test ended with status 1: no such call", NOTE),
        ("time.sleep(9)", "a: no, no answer within 1 s", NOTE),
        ('print(\'{"takes_memory": true, "mpi": "arrived"}\')', "a: arrived", OK),
        ('print(\'noise\\n{"takes_memory": false, "mpi": "lost"}\')', "a: no, lost", NOTE),
    ],
)
def test_what_the_live_test_of_devices_says(end, value, verdict, monkeypatch):
    """A child that finds two devices and then ends in some way; CuPy is not installed."""
    monkeypatch.setattr(gpu, "PROBE_SECONDS", 1.0)
    monkeypatch.setattr(gpu, "installed", lambda name: "")
    code = CHILD.replace("{}", NAMES, 1).replace("{}", end)
    found = gpu.look([sys.executable, "-c", code], present=True)
    devices, cupy, aware = gpu.rows([found], ("a",))
    assert devices == Row("CUDA", "a: 2 devices (X1), driver for CUDA 13.0")
    assert cupy.remedy.startswith("pip install")
    assert (aware.value, aware.verdict) == (value, verdict)
    assert aware.remedy == ("" if verdict == OK else gpu.STAGED)


def test_a_driver_that_does_not_work_is_a_note():
    """The probe itself, where there is no driver, and one that cannot be started."""
    if gpu.has_driver():
        pytest.skip("this machine has a driver")
    found = gpu.look(present=True)
    assert found.error.startswith("the driver's library cannot be loaded: libcuda.so.1")
    assert only(gpu.rows([found], ("a",))).verdict == NOTE
    assert "cannot be started" in gpu.look(["/no/such/program"], present=True).error


def test_the_live_test_knows_nothing_of_the_job():
    job = {
        "PMI_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "MPI_LOCALRANKID": "0",
        "SLURM_JOB_ID": "1",
        "PMIX_ID": "1",
    }
    kept = {"PATH": "/bin", "OMPI_MCA_pml": "ucx", "UCX_TLS": "sm", "PMIX_PREFIX": "/opt/mpi"}
    assert run_probe.outside_job(job | kept) == kept


def test_device_memory_is_lent_by_the_protocol():
    about = probe.DeviceArray(4096, 10).__cuda_array_interface__
    assert about == {"shape": (10,), "typestr": "|u1", "data": (4096, False), "version": 3}


def busy_process(core):
    """A process bound to `core` that computes until it is killed."""
    code = f"import os; os.sched_setaffinity(0, [{core}]); print(1, flush=True)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


@pytest.mark.skipif(CORES < 2, reason="one core: nothing can be bound to a part of the cores")
def test_a_busy_process_on_our_cores_is_named():
    core = min(os.sched_getaffinity(0))
    process = busy_process(core)
    try:
        found = other_processes.look({os.getpid()}, (core,))
        ours = other_processes.look({os.getpid(), process.pid}, (core,))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert process.pid in [pid for pid, _, _ in found]
    assert process.pid not in [pid for pid, _, _ in ours]
    row = only(other_processes.rows([found], ("a",)))
    assert f"({process.pid}) on {core} of a" in row.value
    assert "--bind-to none" in row.remedy
    assert other_processes.look(set(), tuple(range(os.cpu_count()))) == []  # we are not bound


@pytest.mark.parametrize(
    ("threads", "cores", "ranks", "others"),
    [(17, 2, 2, 15), (3, 2, 2, 1), (2, 2, 2, None), (8, 2, 8, None), (9, 2, 8, 1), (1, 64, 2, None)],
)
def test_a_host_on_which_others_compute_is_a_note(threads, cores, ranks, others, tmp_path, monkeypatch):
    monkeypatch.setattr(other_processes, "PROC", tmp_path)
    assert other_processes.busy_threads() == 0
    (tmp_path / "loadavg").write_text(f"0.23 0.27 0.14 {threads}/931 7039\n")
    assert other_processes.busy_threads() == threads
    rows = other_processes.crowd((threads, cores), ranks, "h1")
    assert [row.verdict for row in rows] == [NOTE] * (others is not None)
    assert all(row.value.startswith(f"{others} ") and " h1, " in row.value for row in rows)


# ------------------------------------------------------------------------------------------- run folder


def test_a_run_folder_is_tried_and_nothing_stays(tmp_path):
    out = tmp_path / "new" / "run"
    told = output_folder.section(place((0,)), out)
    assert [row.verdict for row in told if row.what != "disk"] == [
        OK if not on_memory(tmp_path) else NOTE,
        OK,
        OK,
    ]
    assert told[2].value == "1 of 1 with --checkpoint-io parallel"
    assert f"{out} on {file_system(tmp_path).kind}" in told[0].value
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").mkdir()
    output_folder.section(place((0,)), tmp_path / "kept")
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]


def on_memory(path):
    """Whether the tests' own folder is on a file system in memory."""
    return not file_system(path).lasting


def test_a_run_folder_that_cannot_be_is_bad():
    row = only(output_folder.section(place((0,)), Path("/dev/null/run")))
    assert row.verdict == BAD
    assert row.value.startswith("/dev/null/run: a run cannot save there: /dev/null")
    assert "--out DIR" in row.remedy


@pytest.mark.parametrize("name", ["rename", "symlink_to", "replace"])
def test_a_file_system_that_cannot_publish_is_bad(name, tmp_path, monkeypatch):
    def refuse(self, *arguments, **options):
        raise OSError(95, "Operation not supported", str(self))

    monkeypatch.setattr(Path, name, refuse)
    row = only(output_folder.section(place((0,)), tmp_path))
    assert (row.verdict, "Operation not supported" in row.value) == (BAD, True)
    assert list(tmp_path.iterdir()) == []


def test_a_rename_that_is_not_seen_is_bad(tmp_path, monkeypatch):
    monkeypatch.setattr(output_folder.folders, "replace_folder", lambda new, final: None)
    row = only(output_folder.section(place((0,)), tmp_path))
    assert (row.verdict, "a rename is not seen" in row.value) == (BAD, True)


def test_slow_full_and_fleeting_file_systems_are_notes(tmp_path):
    slow = output_folder.pace(output_folder.Found(written=16 << 20, synced=10.0))
    assert (slow.verdict, slow.value) == (NOTE, "16 MiB brought to disk in 10 s, 1.6 MiB/s")
    assert "--async-save" in slow.remedy
    assert output_folder.place(tmp_path, output_folder.Found(KINDS["ext4"], free=1 << 29)).verdict == NOTE
    fleeting = output_folder.place(tmp_path, output_folder.Found(KINDS["tmpfs"], free=1 << 40))
    assert "on a disk" in fleeting.remedy
    blind = list(output_folder.rows(tmp_path, output_folder.Found(free=1 << 40, synced=0.1), ["b"]))[-1]
    assert (blind.verdict, blind.value) == (BAD, f"not on b: what rank 0 writes to {tmp_path}")


def test_stripes_are_those_that_a_file_got(tmp_path):
    """Of the folder, of what was asked for, or none where the library does not hand it on to Lustre."""
    asked, lustre = {"striping_factor": "16", "striping_unit": "4194304"}, KINDS["lustre"]
    four, one = StripeLayout(4, 1 << 20), StripeLayout(1, 1 << 20)
    row = output_folder.stripes(tmp_path, output_folder.Found(lustre, layout=four))
    assert (row.verdict, row.value) == (
        OK,
        "of a large file, as the folder has them: 4 of them, 1024 KiB each",
    )
    row = output_folder.stripes(
        tmp_path, output_folder.Found(lustre, hints=asked, layout=StripeLayout(16, 4 << 20))
    )
    assert (row.verdict, "of 16 that MPI-IO was asked for: 16 of them, 4096 KiB each" in row.value) == (
        OK,
        True,
    )
    for got in (one, None):
        row = output_folder.stripes(tmp_path, output_folder.Found(lustre, hints=asked, layout=got))
        assert (row.verdict, row.remedy.endswith(f"lfs setstripe -c 16 -S 4M {tmp_path}")) == (NOTE, True)


def test_stripes_are_asked_for_on_lustre_alone(tmp_path, monkeypatch):
    pretend(monkeypatch, tmp_path, "lustre")
    told = {row.what: row for row in output_folder.section(place((0,)), tmp_path / "run")}
    assert (told["stripes"].verdict, "not to be read" in told["stripes"].value) == (NOTE, True)
    assert told["run folder"].value.startswith(f"{tmp_path / 'run'} on lustre, ")
    pretend(monkeypatch, tmp_path, "gpfs")
    assert "stripes" not in {row.what for row in output_folder.section(place((0,)), tmp_path / "run")}
    assert [path.name for path in tmp_path.iterdir()] == [f"mountinfo-{os.getpid()}"]


def test_writers_of_several_hosts():
    """Those of --checkpoint-io parallel, and what all hosts write at once."""
    two = place((0, 1), (2, 3))
    found = output_folder.Found(KINDS["gpfs"], written=16 << 20, synced=1.0)
    row = output_folder.writers(two, found, [(16 << 20, 1.0), (16 << 20, 2.0)])
    assert row.value == "2 of 4 with --checkpoint-io parallel; 2 hosts at once: 16 MiB/s"
    row = output_folder.writers(two, found, [(16 << 20, 1.0), "cannot write F: Input/output error"])
    assert (row.verdict, row.value.endswith("parallel: cannot write F: Input/output error")) == (NOTE, True)
    nfs = output_folder.Found(KINDS["nfs4"])
    assert output_folder.writers(two, nfs, []).value == "1 of 4 with --checkpoint-io parallel"


def test_a_write_ends_when_its_time_is_up(tmp_path, monkeypatch):
    monkeypatch.setattr(output_folder, "LONGEST", 0.0)
    assert output_folder.write(tmp_path / "file")[0] == 0
    assert (tmp_path / "file").stat().st_size == 0


# -------------------------------------------------------------------------------------------- the command


def test_one_process_without_mpi(tmp_path, capsys):
    figures = tmp_path / "figures.json"
    arguments = ["--quick", "--out", str(tmp_path / "run"), "--json", str(figures)]
    assert doctor.command(World(0, 1), arguments) == 0
    said = capsys.readouterr().out
    found = json.loads(figures.read_text())
    assert (found["ranks"], found["nodes"], found["links"]) == (1, 1, {"node": None, "between": None})
    assert found["flops_per_second_per_rank"] > 1e8
    assert (1 << 20) < found["memory_bytes_per_rank"] < 1 << 50
    by_name = {row["what"]: row for row in found["rows"]}
    assert by_name["MPI threads"]["value"] == "no MPI library can be loaded: one process only"
    assert by_name["links"]["value"] == "one rank has nobody to talk to"
    assert by_name["shared window"]["value"] == "not tried: one process without MPI"
    assert said.splitlines()[-1].endswith("0 bad: a job would run")
    assert all(row["what"] in said for row in found["rows"])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--max-mb", "0"], "--max-mb 0: expected at least 1 KiB"),
        (["--max-mb", "many"], "argument --max-mb: invalid float value: 'many'"),
        (["--timeout", "-1"], "--timeout -1: expected seconds"),
        (["--json", "/no/such/folder/x"], "--json /no/such/folder/x: cannot be written"),
        (["--json", "/"], "--json /: cannot be written"),
        (["--max-mb", "1e9"], "--max-mb 1e+09: expected at most"),
    ],
)
def test_bad_flags_are_one_line(flags, text):
    with pytest.raises(zero_mpi.UsageError) as error:
        doctor.command(World(0, 1), flags)
    assert str(error.value).startswith(text)
    assert "\n" not in str(error.value)


def examine(ranks, tmp_path, *flags, env=None, start=None):
    """(exit status, rows by name, figures, what was said) of a quick examination."""
    figures = tmp_path / "figures.json"
    args = ["--quick", "--json", str(figures), *(flags or ["--out", str(tmp_path / "run")])]
    if start is None:
        done = run_job(ranks, ["-m", "zero_mpi.doctor", *args], timeout=50, env=env)
    else:
        done = run_command([*start, *args], timeout=50, env=env)
    status, said, errors = done
    assert figures.exists(), said + errors
    found = json.loads(figures.read_text())
    return status, {row["what"]: row for row in found["rows"]}, found, said + errors


@needs_mpiexec
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_are_true(ranks, tmp_path):
    status, told, found, said = examine(ranks, tmp_path)
    assert status == 0, said
    assert (found["ranks"], found["nodes"], found["ranks_per_node"]) == (ranks, 1, ranks)
    assert told["zero_mpi"]["value"] == zero_mpi.__version__
    assert told["launcher"]["value"].endswith(cli_text.plural(ranks, "rank"))
    host = told[f"host {platform.node()}"]["value"]
    assert host.startswith(f"{cli_text.ranks(range(ranks))} on {cli_text.plural(CORES, 'core')}")
    crowded = ranks > CORES
    assert (told["ranks and cores"]["verdict"], "hands its core over" in said) == (
        NOTE if crowded else OK,
        crowded,
    )
    assert told["shared window"]["value"].startswith("made, written to and read")
    assert told["CUDA"]["value"] == "no CUDA device" or gpu.has_driver()
    assert found["links"]["between"] is None
    assert said.splitlines().count("") == 0
    if ranks == 1:
        assert found["links"]["node"] is None
        return
    link = found["links"]["node"]
    assert link["transport"] == "shared"
    assert 0 < link["alpha_seconds"] < 0.5
    assert 0 <= link["beta_seconds_per_byte"] < 1e-6
    assert link["ways"].keys() == {"shared", "mpi"}
    for way in link["ways"].values():
        sizes = [entry["bytes"] for entry in way["reduce_scatter"]["sizes"]]
        assert sizes == [1 << 10, 1 << 15, 1 << 20]
        assert all(entry["seconds"] > 0 for entry in way["all_gather"]["sizes"])


@needs_mpiexec
def test_what_can_go_wrong_in_one_job(tmp_path):
    """Two hosts (pretended), a run folder that cannot be, too many threads, progress threads."""
    env = {"ZERO_MPI_RANKS_PER_NODE": "2", "OPENBLAS_NUM_THREADS": "64", "MPIR_CVAR_ASYNC_PROGRESS": "0"}
    env["MPICH_ASYNC_PROGRESS"] = "1"  # a name of older versions: the doctor reads it, this library does not
    status, told, found, said = examine(4, tmp_path, "--out", "/dev/null/run", env=env)
    assert status == 1, said
    assert told["run folder"]["verdict"] == BAD
    assert said.count("a job would fail") == 1
    if CORES > 1:  # OpenBLAS takes no more threads than cores, each of two ranks as many
        assert re.match(r"\d+ for each rank, but \d+ cores? for each of 2 ", told["threads"]["value"])
        assert "unset OPENBLAS_NUM_THREADS" in told["threads"]["remedy"]
    assert told["progress threads"]["remedy"] == "unset MPICH_ASYNC_PROGRESS"
    name = platform.node()
    assert [host["name"] for host in found["hosts"]] == [name, f"{name} (2)"]
    assert (found["nodes"], found["ranks_per_node"]) == (2, 2)
    assert told["clocks"]["value"].startswith("at most")
    assert "uneven hosts" in told
    assert found["links"]["between"]["transport"] == "mpi"
    assert found["links"]["between"]["beta_seconds_per_byte"] < 1e-6
    assert found["links"]["node"]["ways"].keys() == {"shared", "mpi"}


def other_version(tmp_path):
    """A folder for PYTHONPATH with a package of another version."""
    package = Path(zero_mpi.__file__).parent
    copy = tmp_path / "other" / "zero_mpi"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    init = copy / "__init__.py"
    text = init.read_text()
    init.write_text(text.replace(f'__version__ = "{zero_mpi.__version__}"', '__version__ = "9.9"'))
    assert init.read_text() != text
    return copy.parent


@needs_mpiexec
def test_another_version_on_a_rank(tmp_path):
    """Ranks of one job from two places: the launcher starts a second command for the last rank."""
    run = [sys.executable, "-m", "zero_mpi.doctor", "--quick", "--json", str(tmp_path / "figures.json")]
    run += ["--out", str(tmp_path / "run")]
    other = ["env", f"PYTHONPATH={other_version(tmp_path)}", *run]
    command = [*launcher(), "-n", "1", *run, ":", "-n", "1", *other]
    status, said, errors = run_command(command, timeout=50, cwd=tmp_path)
    assert status == 1, said + errors
    told = {row["what"]: row for row in json.loads((tmp_path / "figures.json").read_text())["rows"]}
    assert told["zero_mpi"]["verdict"] == BAD
    assert told["zero_mpi"]["value"] == f"{zero_mpi.__version__}, but 9.9 on rank 1"


@needs_mpiexec
def test_processes_that_are_no_job_say_so_once(tmp_path):
    """As a launcher of another MPI starts them: each is alone, and only the first one looks and speaks."""
    told = []
    for rank in "01":
        files = ["--out", str(tmp_path / "run"), "--json", str(tmp_path / rank)]
        environ = {
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": rank,
        }
        run = [sys.executable, "-m", "zero_mpi.doctor", "--quick", *files]
        told.append(run_command(run, timeout=50, env=environ))
    assert [status for status, _, _ in told] == [1, 1]
    assert "each is a job of one rank" in told[0][1]
    assert told[1][1] == ""  # mpi4py says on stderr what it thinks of it
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


STANDING = """
import sys, time
from zero_mpi.doctor import compute
from zero_mpi.doctor.command import main
from zero_mpi.environment import launch_rank

if launch_rank() == 1:
    compute.rate = lambda *given: time.sleep(60)
main()
"""


@needs_mpiexec
def test_what_stands_still_is_named_and_ended(tmp_path):
    """A rank that never comes back from its products; the rows before are there.

    Its ranks are started: they let go of much memory when they end, and the launcher kills what stands for a
    rank that is forked before it can tell how the rank has ended.
    """
    script = tmp_path / "standing.py"
    script.write_text(STANDING)
    flags = ["--quick", "--timeout", "3", "--out", str(tmp_path / "run")]
    status, said, errors = run_job(2, [str(script), *flags], timeout=50, warm=False)
    assert status == 86, said + errors
    assert "no progress for" in errors
    assert "speed of products" in errors
    assert "run folder" in said


@needs_mpiexec
def test_help_and_bad_flags_of_a_job_are_told_once():
    status, said, errors = run_job(2, ["-m", "zero_mpi.doctor", "--help"], timeout=50)
    assert (status, said.count("usage:"), errors) == (0, 1, "")
    status, said, errors = run_job(2, ["-m", "zero_mpi.doctor", "--max-mb", "x"], timeout=50)
    assert (status, said) == (2, "")
    assert errors.splitlines()[0] == "zero_mpi doctor: error: argument --max-mb: invalid float value: 'x'"
