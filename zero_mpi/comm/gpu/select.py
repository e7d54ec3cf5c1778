"""Choice of the transport for arrays on a GPU, by --transport or by the features of the MPI library.

`auto` selects `mpi`, which passes device memory to the library, if that certainly works, and otherwise
`staged`, through pinned host memory. `auto` never selects NCCL. The reason is returned with the transport.

A library that does not support device memory crashes the process when it reads device memory. So the user,
the library or a setting of the site must first claim support. Some libraries claim support wrongly, so
`probe_says` then runs a test on one rank of each node. If a GPU admits only one process, `try_out` is the
only test. All ranks get the same answer.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zero_mpi import device
from zero_mpi.comm import kinds
from zero_mpi.comm.base import Comm
from zero_mpi.comm.gpu.probe import PROBE, run_probe
from zero_mpi.comm.kinds import Transport
from zero_mpi.comm.partition import Partition
from zero_mpi.comm.serial import SerialComm
from zero_mpi.device import Cuda
from zero_mpi.errors import UsageError

if TYPE_CHECKING:
    from zero_mpi.comm.gpu.comm import DeviceComm

POLL_SECONDS = 5e-4  # seconds between polls; a poll takes the GIL from the thread that launches kernels
TRIAL_ELEMENTS = 1 << 20  # elements, 4 MiB: libraries use their protocol for large messages
FORCED = "ZERO_MPI_GPU_AWARE"  # 1: the library supports device memory, whatever it reports; 0: it does not
KINDS = "mpi_memory_alloc_kinds"  # key of a communicator's info object since MPI 4.1
SITE = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "MVP_USE_CUDA")  # variables of HPE Cray and MVAPICH
LIBRARY = re.compile(r"/\S*/libmpi(?!cxx|_cxx|_mpifh|_usempi|fort)[^/\s]*\.so[^/\s]*$")
CUDA = 0  # MPICH's number for CUDA GPUs
COMPUTE_MODE, EXCLUSIVE = 20, 3  # cudaDevAttrComputeMode, cudaComputeModeExclusiveProcess


def choose(flag: str, ranks: int, exact: bool) -> tuple[Comm, str]:
    """Return the transport for GPU arrays for a value of --transport, and the reason for it. Collective.

    `exact`: sums in rank order; otherwise the library adds if it can. UsageError is raised on all ranks.
    """
    kinds.check_flag(flag, on_gpu=True)
    if ranks == 1:
        return SerialComm(), ""
    from zero_mpi.comm.start_mpi import MPI as library

    candidates = kinds.asked_for(flag, on_gpu=True)
    if candidates and kinds.GPU_MPI not in candidates:
        return make(candidates[0], exact), ""
    comm, answer = None, find_answer(library.COMM_WORLD)
    if answer.yes:
        comm, answer = try_out(make(kinds.GPU_MPI, exact), answer)
    if comm is None and candidates:
        raise UsageError(
            f"--transport mpi: with --device cuda it needs a CUDA-aware MPI ({answer.reason}); use "
            "--transport auto or staged; see zero-mpi doctor"
        )
    return comm or make(kinds.STAGED, exact), answer.reason


def make(kind: Transport, exact: bool) -> DeviceComm:
    """Return a new transport of a kind that carries GPU arrays. Collective."""
    from zero_mpi.comm.gpu.backends import CudaAwareBackend, NcclBackend, StagedBackend
    from zero_mpi.comm.gpu.comm import DeviceComm
    from zero_mpi.comm.gpu.exchanges import GpuStreams
    from zero_mpi.comm.mpi import MPIComm
    from zero_mpi.device.ordered_sum import kernels

    gpu = device.in_use()
    assert isinstance(gpu, Cuda), "expected a GPU in use"
    streams = GpuStreams(gpu)
    kernels()  # compile or load them now, not when other ranks wait for a sum
    if kind == kinds.GPU_MPI:
        inner = MPIComm(exact=exact, poll=POLL_SECONDS)
        return DeviceComm(inner, CudaAwareBackend(streams), streams, "mpi, from GPU to GPU")
    if kind == kinds.STAGED:
        staged = StagedBackend(streams)
        inner = MPIComm(exact=True, poll=POLL_SECONDS)
        return DeviceComm(inner, staged, streams, f"staged, through {staged.about}")
    inner = MPIComm(exact=exact, threaded=False)  # the stream advances transfers
    nccl = NcclBackend(streams, inner)
    sums = "sums in rank order" if exact else "sums in its own order: not exact"
    return DeviceComm(inner, nccl, streams, f"nccl {nccl.version}, {sums}")


def try_out(comm: DeviceComm, answer: Answer) -> tuple[DeviceComm | None, Answer]:
    """Return the transport, or None if a test between the ranks changes data, and the answer. Collective.

    The test in `probe_says` used a single rank. A crash in this test ends the job, but wrong bytes do not.
    """
    gpu, length = device.in_use(), TRIAL_ELEMENTS // comm.size
    partition = Partition(length * comm.size, comm.size)
    values = np.arange(partition.length, dtype=np.float32)
    full = gpu.zeros(partition.length)
    comm.allgather(gpu.from_host(values[partition.part(comm.rank)]), full, partition, "a trial").wait()
    if all(comm.allgather_object(bool((gpu.to_host(full) == values).all()))):
        return comm, answer
    comm.close()
    return None, replace(answer, yes=False, reason=f"{answer.reason}, but ranks received wrong bytes")


# --------------------------------------------------------------------------- what the library can do


@dataclass(frozen=True)
class Answer:
    """Answer whether device memory may be passed to MPI (`yes`), and the source of the answer (`reason`)."""

    yes: bool
    reason: str


def find_answer(
    world: Any, environ: Mapping[str, str] = os.environ, command: Sequence[str] = PROBE
) -> Answer:
    """Return the answer for all ranks of `world`, mpi4py's communicator. Collective."""
    from zero_mpi.comm.topology import node_communicator  # starts MPI

    node = node_communicator(world)
    answer = claim(world, environ)
    if answer.yes and node.Get_rank() == 0:
        answer = (
            Answer(True, f"{answer.reason}, and exclusive GPUs") if alone() else probe_says(answer, command)
        )
    node.Free()
    answers: list[Answer] = world.allgather(answer)
    return next((reply for reply in answers if not reply.yes), answers[0])


def alone() -> bool:
    """Return whether the GPU allows only one process, so that a child process cannot use it."""
    gpu = device.in_use()
    if not isinstance(gpu, device.Cuda):
        return False
    return bool(gpu.cupy.cuda.runtime.deviceGetAttribute(COMPUTE_MODE, gpu.number) == EXCLUSIVE)


def claim(world: Any, environ: Mapping[str, str] = os.environ) -> Answer:
    """Return MPI's claim about device memory: FORCED, else the first positive claim, else the first claim."""
    forced = environ.get(FORCED, "")
    if forced in ("0", "1"):
        return Answer(forced == "1", f"{FORCED}={forced}")
    answers = [*memory_kinds(world), *library_says()]
    answers += [Answer(environ[name] == "1", f"{name}={environ[name]}") for name in SITE if name in environ]
    return next(
        (answer for answer in answers if answer.yes),
        answers[0] if answers else Answer(False, "support not reported"),
    )


def memory_kinds(world: Any) -> Iterator[Answer]:
    """Yield an answer from MPI's list of supported kinds of memory, if the library has that list."""
    info = world.Get_info()
    kinds = info.get(KINDS)
    info.Free()
    if kinds:
        yield Answer("cuda" in {kind.partition(":")[0] for kind in kinds.split(",")}, f"{KINDS} is {kinds}")


def loaded_libraries(maps: str) -> list[str]:
    """Return the paths of MPI libraries in a text like /proc/self/maps; `CDLL(None)` lacks their symbols."""
    matches = (LIBRARY.search(line) for line in maps.splitlines())
    return list(dict.fromkeys(match[0] for match in matches if match))


def library_says(libraries: Sequence[str] | None = None) -> Iterator[Answer]:
    """Ask Open MPI and MPICH whether they support CUDA, and yield each answer."""

    def of_mpich(call: Any) -> int:
        flag = ctypes.c_int(0)
        return flag.value if call(CUDA, ctypes.byref(flag)) == 0 else 0

    if libraries is None:
        maps = Path("/proc/self/maps")
        libraries = loaded_libraries(maps.read_text()) if maps.exists() else []
    queries: tuple[tuple[str, Callable[[Any], int]], ...] = (
        ("MPIX_Query_cuda_support", lambda call: int(call())),
        ("MPIX_GPU_query_support", of_mpich),
    )
    for path in libraries:
        library = ctypes.CDLL(path)
        for name, ask in queries:
            if hasattr(library, name):
                support = ask(getattr(library, name))
                yield Answer(support == 1, f"{name} says {support}")


def probe_says(answer: Answer, command: Sequence[str] = PROBE) -> Answer:
    """Return the answer of the test process; its reason begins with the reason of the claim `answer`."""
    lines, end = run_probe(command)
    facts = [json.loads(line) for line in lines]
    if facts and facts[-1].get("takes_memory"):
        return Answer(True, f"{answer.reason}, and {facts[-1]['mpi']}")
    problem = next((entry[key] for entry in reversed(facts) for key in ("mpi", "error") if key in entry), end)
    return Answer(False, f"{answer.reason}, but {problem}")
