"""Choice of the transport for arrays on a GPU: by the user's flag, or by what the MPI library can do.

`auto` is `mpi`, device memory straight into the library, where that is certain, and `staged`, through pinned
memory of the host, everywhere else. NCCL is never chosen by itself. The transport describes itself; the
reason for it is returned beside it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from zero_mpi import device
from zero_mpi.comm import kinds
from zero_mpi.comm.base import Comm
from zero_mpi.comm.kinds import Transport
from zero_mpi.comm.partition import Partition
from zero_mpi.comm.serial import SerialComm
from zero_mpi.device import Cuda
from zero_mpi.errors import UsageError

if TYPE_CHECKING:
    from zero_mpi.comm.gpu.comm import DeviceComm
    from zero_mpi.comm.gpu.detect import Answer

POLL_SECONDS = 5e-4  # seconds: each look takes the interpreter from the thread that launches
TRIAL_ELEMENTS = 1 << 20  # elements, 4 MiB: messages that libraries send in another way than small ones


def choose(flag: str, ranks: int, exact: bool) -> tuple[Comm, str]:
    """Return the transport of a GPU's arrays for a value of --transport, and why it is this one. Collective.

    `exact`: sums in rank order; otherwise the library's where it has them. Raises UsageError on all
    ranks alike.
    """
    kinds.check_flag(flag, on_gpu=True)
    if ranks == 1:
        return SerialComm(), ""
    from zero_mpi.comm.gpu.detect import find_answer
    from zero_mpi.comm.gpu.exchanges import MPI as library

    wanted = kinds.asked_for(flag, on_gpu=True)
    if wanted and kinds.GPU_MPI not in wanted:
        return make(wanted[0], exact), ""
    comm, answer = None, find_answer(library.COMM_WORLD)
    if answer.yes:
        comm, answer = try_out(make(kinds.GPU_MPI, exact), answer)
    if comm is None and wanted:
        raise UsageError(
            f"--transport mpi: with --device cuda it needs a CUDA-aware MPI ({answer.why}); use --transport "
            "auto or staged; see zero-mpi doctor"
        )
    return comm or make(kinds.STAGED, exact), answer.why


def make(kind: Transport, exact: bool) -> DeviceComm:
    """Return the transport of that kind, of those that carry arrays of a GPU. Collective."""
    from zero_mpi.comm.gpu.backends import CudaAwareBackend, NcclBackend, StagedBackend
    from zero_mpi.comm.gpu.comm import DeviceComm
    from zero_mpi.comm.gpu.streams import GpuStreams
    from zero_mpi.comm.mpi import MPIComm
    from zero_mpi.device.ordered_sum import kernels

    gpu = device.in_use()
    assert isinstance(gpu, Cuda), "there is a GPU in use"
    streams = GpuStreams(gpu)
    kernels()  # compiled now, or loaded from CuPy's cache, and not while others wait for a sum
    if kind == kinds.GPU_MPI:
        inner = MPIComm(exact=exact, poll=POLL_SECONDS)
        return DeviceComm(inner, CudaAwareBackend(streams), streams, "mpi, from GPU to GPU")
    if kind == kinds.STAGED:
        staged = StagedBackend(streams)
        inner = MPIComm(exact=True, poll=POLL_SECONDS)
        return DeviceComm(inner, staged, streams, f"staged, through {staged.about}")
    nccl = NcclBackend(streams)
    sums = "sums in rank order" if exact else "sums in its own order: not exact"
    inner = MPIComm(exact=exact, threaded=False)  # transfers in the order of a stream need no push
    return DeviceComm(inner, nccl, streams, f"nccl {nccl.version}, {sums}")


def try_out(comm: DeviceComm, answer: Answer) -> tuple[DeviceComm | None, Answer]:
    """Return the transport if what arrives is what was sent, between the very ranks of the job. Collective.

    The live test before it was of a rank with itself; a crash in this one ends the job, wrong bytes do not.
    """
    gpu, length = device.in_use(), TRIAL_ELEMENTS // comm.size
    partition = Partition(length * comm.size, comm.size)
    sent = np.arange(partition.length, dtype=np.float32)
    full = gpu.zeros(partition.length)
    comm.allgather(gpu.from_host(sent[partition.part(comm.rank)]), full, partition, "a trial").wait()
    if all(comm.allgather_object(bool((gpu.to_host(full) == sent).all()))):
        return comm, answer
    comm.close()
    return None, replace(answer, yes=False, why=f"{answer.why}, but ranks received wrong bytes")
