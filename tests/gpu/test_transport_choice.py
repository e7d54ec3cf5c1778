"""Tests of the choice of a transport for GPU arrays: the MPI library is tested, and all ranks agree."""

import json
import sys

import pytest

from zero_mpi import device
from zero_mpi.comm import SerialComm, kinds
from zero_mpi.comm.gpu import select as device_choice
from zero_mpi.comm.gpu.backends import CudaAwareBackend
from zero_mpi.comm.gpu.select import Answer
from zero_mpi.comm.transfer import MPI
from zero_mpi.config.settings import Config
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import find_world
from zero_mpi.train.setup import choose_transport

WORLD = MPI.COMM_WORLD
RANKS = WORLD.Get_size()
several_ranks = pytest.mark.world(2, 3)  # a single rank sends nothing
one_rank = pytest.mark.world(1)


@pytest.fixture(autouse=True)
def gpu(the_gpu):
    device.adopt(the_gpu)
    return the_gpu


def child(*lines, end="pass"):
    writes = "".join(f"os.write(1, {json.dumps(line).encode()!r} + bytes([10])); " for line in lines)
    return [sys.executable, "-c", f"import os, signal; {writes}{end}"]


FOUND = {"names": ["X"], "driver": "13.0"}
WORKS = child(FOUND, {"takes_memory": True, "mpi": "it arrived"})
LIES = child(FOUND, {"takes_memory": False, "mpi": "the received bytes differ"})
CRASHES = child(FOUND, end="os.kill(os.getpid(), signal.SIGSEGV)")
NO_DRIVER = child({"error": "no driver"})


class Library:
    def __init__(self, kinds):
        self.kinds = kinds

    def Get_info(self):
        return self

    def get(self, key):
        return self.kinds if key == "mpi_memory_alloc_kinds" else None

    def Free(self):
        pass


@one_rank
@pytest.mark.parametrize(
    ("kinds", "yes"), [("mpi,system", False), ("mpi,system,cuda", True), ("system,cuda:device", True)]
)
def test_the_kinds_of_memory_that_a_library_names(kinds, yes):
    (answer,) = device_choice.memory_kinds(Library(kinds))
    assert answer == Answer(yes, f"mpi_memory_alloc_kinds is {kinds}")
    assert list(device_choice.memory_kinds(Library(None))) == []


@one_rank
@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"ZERO_MPI_GPU_AWARE": "1"}, Answer(True, "ZERO_MPI_GPU_AWARE=1")),
        ({"ZERO_MPI_GPU_AWARE": "0", "MV2_USE_CUDA": "1"}, Answer(False, "ZERO_MPI_GPU_AWARE=0")),
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, Answer(True, "MPICH_GPU_SUPPORT_ENABLED=1")),
        ({"MVP_USE_CUDA": "0"}, None),
        ({}, None),
    ],
)
def test_what_is_said_without_a_test(environ, said, monkeypatch):
    monkeypatch.setattr(device_choice, "library_says", lambda: iter(()))
    answer = device_choice.claim(Library(None), environ)
    assert answer == said if said else not answer.yes
    assert answer.reason


@one_rank
def test_the_loaded_library_is_asked():
    """The loaded MPI library answers a call that asks for CUDA support, or it has no such call."""
    maps = (
        "7f00-7f01 r-xp 0 0:0 1 /opt/cray/lib/libmpi_gnu_123.so.12.0.0\n"
        "7f01-7f02 r-xp 0 0:0 1 /usr/lib/libmpi.so.40.30.4\n"
        "7f02-7f03 r-xp 0 0:0 1 /usr/lib/libmpi.so.40.30.4\n"
        "7f03-7f04 r-xp 0 0:0 1 /usr/lib/libmpi_mpifh.so.40\n"
        "7f04-7f05 r-xp 0 0:0 1 /usr/lib/python/mpi4py/MPI.so\n"
    )
    assert device_choice.loaded_libraries(maps) == [
        "/opt/cray/lib/libmpi_gnu_123.so.12.0.0",
        "/usr/lib/libmpi.so.40.30.4",
    ]
    with open("/proc/self/maps") as real:
        assert device_choice.loaded_libraries(real.read()), "the loaded MPI library was not found"
    for answer in device_choice.library_says():
        assert "support says" in answer.reason


@one_rank
@pytest.mark.parametrize(
    ("command", "yes", "why"),
    [
        (WORKS, True, "the site says so, and it arrived"),
        (LIES, False, "the site says so, but the received bytes differ"),
        (CRASHES, False, "the site says so, but the test died of SIGSEGV"),
        (NO_DRIVER, False, "the site says so, but no driver"),
        (["/no/such/program"], False, "the site says so, but cannot be started: No such file or directory"),
    ],
)
def test_nobody_is_believed_without_a_test(command, yes, why):
    assert device_choice.probe_says(Answer(True, "the site says so"), command) == Answer(yes, why)


@pytest.mark.parametrize(("mode", "tried"), [(0, True), (3, False)])
def test_a_gpu_of_one_process_is_not_tried_by_a_child(gpu, monkeypatch, mode, tried):
    monkeypatch.setattr(
        gpu.cupy.cuda.runtime, "deviceGetAttribute", lambda attribute, _: {20: mode}[attribute]
    )
    answer = device_choice.find_answer(WORLD, {"ZERO_MPI_GPU_AWARE": "1"}, CRASHES)
    assert answer.yes != tried
    assert ("SIGSEGV" in answer.reason) == tried


def test_all_ranks_have_one_answer(monkeypatch):
    forced = {"ZERO_MPI_GPU_AWARE": "1"}
    answer = device_choice.find_answer(WORLD, forced, WORKS)
    assert answer == Answer(True, "ZERO_MPI_GPU_AWARE=1, and it arrived")
    last = WORLD.Get_rank() == RANKS - 1
    one_says_no = device_choice.find_answer(
        WORLD, forced | ({"ZERO_MPI_GPU_AWARE": "0"} if last else {}), WORKS
    )
    assert one_says_no == Answer(False, "ZERO_MPI_GPU_AWARE=0")
    monkeypatch.setenv("ZERO_MPI_RANKS_PER_NODE", "1")
    one_node_fails = device_choice.find_answer(WORLD, forced, CRASHES if last else WORKS)
    assert one_node_fails == Answer(False, "ZERO_MPI_GPU_AWARE=1, but the test died of SIGSEGV")


def made(transport="auto", **flags):
    config, notes = Config(transport=transport, device="cuda", **flags), []
    chosen = choose_transport(find_world(), config, None, notes)
    assert notes == []
    return chosen.comm, chosen.text


@one_rank
@pytest.mark.parametrize("transport", ["auto", "mpi", "staged", "nccl"])
def test_one_rank_needs_no_transport(transport):
    comm, text = made(transport)
    assert type(comm) is SerialComm
    assert text == ""


@several_ranks
def test_auto_is_staged_where_nothing_is_certain(monkeypatch):
    monkeypatch.setenv("ZERO_MPI_GPU_AWARE", "0")
    comm, text = made(reduction="fast")
    assert comm.exact
    assert text.startswith("staged, through ")
    assert text.endswith(" exact, because ZERO_MPI_GPU_AWARE=0")
    comm.close()
    with pytest.raises(UsageError, match=r"--transport mpi: .*\(ZERO_MPI_GPU_AWARE=0\)"):
        made("mpi")


@several_ranks
@pytest.mark.carries("mpi")
@pytest.mark.parametrize("transport", ["auto", "mpi"])
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_certain_yes_is_mpi(transport, reduction, monkeypatch):
    monkeypatch.setattr(device_choice, "find_answer", lambda world: Answer(True, "it arrived"))
    comm, text = made(transport, reduction=reduction)
    assert comm.exact == (reduction == "exact")
    assert text == "mpi, from GPU to GPU, because it arrived"
    comm.close()


@several_ranks
@pytest.mark.carries("mpi")
def test_what_arrives_between_the_ranks_is_looked_at(monkeypatch):
    monkeypatch.setattr(device_choice, "find_answer", lambda world: Answer(True, "it arrived"))
    real = CudaAwareBackend._one

    def altered(self, exchange, *rest):
        if WORLD.Get_rank() == 0:
            exchange.sends[0][0].fill(7)
        return real(self, exchange, *rest)

    monkeypatch.setattr(CudaAwareBackend, "_one", altered)
    comm, text = made("auto")
    comm.close()
    reason = "it arrived, but ranks received wrong bytes"
    assert text.startswith("staged, ")
    assert text.endswith(f", because {reason}")
    with pytest.raises(UsageError, match=rf"--transport mpi: .*\({reason}\)"):
        made("mpi")


@several_ranks
@pytest.mark.carries("nccl")
def test_nccl_is_a_choice(monkeypatch):
    comm, text = made("nccl")
    assert comm.exact
    assert text.startswith("nccl ")
    assert text.endswith("sums in rank order")
    comm.close()
    comm, text = made("nccl", reduction="fast")
    assert not comm.exact
    assert text.endswith("not exact")
    comm.close()


@several_ranks
def test_nccl_that_cannot_start_is_one_line(monkeypatch, gpu):
    if not hasattr(gpu.stream, "do"):
        pytest.skip("the real NCCL cannot be made to fail: only the simulated one tests this")
    nccl = gpu.cupy.cuda.nccl

    def refuse(self, *arguments):
        raise RuntimeError("NCCL_ERROR_INVALID_USAGE: invalid usage")

    monkeypatch.setattr(nccl.NcclCommunicator, "__init__", refuse)
    with pytest.raises(UsageError, match=r"--transport nccl: NCCL does not start \(NCCL_ERROR_INVALID_USAGE"):
        made("nccl")
    monkeypatch.setattr(nccl, "available", False)
    with pytest.raises(UsageError, match="--transport nccl: CuPy finds no NCCL"):
        device_choice.make(kinds.NCCL, True)
