"""The transports, as data: their names, and the facts that a plan or a summary asks for.

Every `Comm` has its kind (`comm.kind`). This is the only list: the values of `--transport`, the choices of a
run and the numbers of a plan all come from here. Nothing here needs MPI or a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zero_mpi.comm import scratch
from zero_mpi.comm.scratch import Reductions
from zero_mpi.errors import UsageError

AUTO = "auto"  # value of --transport: the best transport that is there


@dataclass(frozen=True)
class Transport:
    """Carrier of the collectives of a run.

    name            in one word
    flag            the value of --transport that asks for it; empty: none does
    text            how things travel, for messages
    on_gpu          carries arrays that lie on GPUs
    adds            has sums of the library, in an order of its own (`--reduction fast`)
    stages          what GPUs send goes through pinned memory of the host
    shares_memory   ranks of a node see each other's gradients
    spans_nodes     ranks may be on several nodes
    takes           bytes of scratch, beside the arrays that it carries, for reductions on several ranks
    """

    name: str
    flag: str
    text: str
    on_gpu: bool = False
    adds: bool = False
    stages: bool = False
    shares_memory: bool = False
    spans_nodes: bool = True
    takes: Callable[[Reductions], int] = scratch.nothing

    def scratch(self, asked: Reductions) -> int:
        """Return the bytes that a rank needs, where its arrays lie, for what arrives before it is added."""
        return self.takes(asked) if asked.ranks > 1 else 0

    def pinned(self, ranks: int) -> int:
        """Return bytes of pinned memory of the host that a rank's transfers go through."""
        return scratch.pinned(ranks) if self.stages and ranks > 1 else 0


SERIAL = Transport("serial", "", "one process, no communication", spans_nodes=False)
MPI = Transport("mpi", "mpi", "messages", adds=True, takes=scratch.of_messages)
SHARED = Transport(
    "shared",
    "shared",
    "shared memory of the node",
    shares_memory=True,
    spans_nodes=False,
)
NODES = Transport(
    "nodes",
    "shared",
    "shared memory inside nodes, messages between nodes",
    shares_memory=True,
    takes=scratch.of_nodes,
)
GPU_MPI = Transport("mpi", "mpi", "mpi", on_gpu=True, adds=True, takes=scratch.from_gpu_to_gpu)
STAGED = Transport("staged", "staged", "staged", on_gpu=True, stages=True, takes=scratch.through_host)
NCCL = Transport("nccl", "nccl", "nccl", on_gpu=True, adds=True, takes=scratch.by_nccl)

TRANSPORTS = (SERIAL, MPI, SHARED, NODES, GPU_MPI, STAGED, NCCL)
CHOICES = (AUTO, *dict.fromkeys(kind.flag for kind in TRANSPORTS if kind.flag))


def asked_for(flag: str, on_gpu: bool) -> tuple[Transport, ...]:
    """Return the transports that a --transport value may mean on a device; none: it is of the other one."""
    return tuple(kind for kind in TRANSPORTS if kind.flag == flag and kind.on_gpu == on_gpu)


def check_flag(flag: str, on_gpu: bool) -> None:
    """Raise UsageError for a value of --transport that is of the other device only."""
    if flag != AUTO and not asked_for(flag, on_gpu):
        why = "it needs GPU arrays; use --device cuda or --transport mpi"
        if on_gpu:
            why = "it cannot share GPU memory; with --device cuda use "
            why += "auto, mpi, staged or nccl"
        raise UsageError(f"--transport {flag}: {why}")


def expected(flag: str, *, on_gpu: bool, ranks: int, nodes: int) -> Transport:
    """Return the transport that a --transport value becomes where everything is in order.

    On the host this is shared memory wherever several ranks are on a node. `auto` on GPUs is taken to send
    through the host, which works everywhere. `asked_for` tells whether a value
    is one of the device.
    """
    if ranks == 1 and (on_gpu or flag == AUTO):
        return SERIAL
    if on_gpu:
        return next(iter(asked_for(flag, on_gpu)), STAGED)
    if flag == MPI.flag:
        return MPI
    if nodes == 1:
        return SHARED
    return NODES if ranks > nodes else MPI
