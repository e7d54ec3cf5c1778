"""The transports, as data: their names, the sizes of their chunks, and the memory that they take.

Every `Comm` has its kind (`comm.kind`). This is the only list: the values of `--transport`, the choices of a
run and the numbers of a plan all come from here. The transports cut their buffers by the sizes below and a
plan asks for their sum, so neither can be wrong about the other. Nothing here needs MPI or a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from zero_mpi.device.types import ALIGNMENT
from zero_mpi.errors import UsageError

AUTO = "auto"  # value of --transport: the best transport that is there
PAGE = 4096  # bytes that the system gives at once
SUM = 4  # bytes of an element of a sum, which is a float32 whatever type gradients travel in

# Exact sums of messages (`comm.mpi`).
EXACT_CHUNK = 1 << 18  # elements of a slice per round: 1 MiB, in cache at 8 ranks
EXACT_DEPTH = 2  # chunks in flight

# Counters of a rank in shared memory (`comm.shared`): each begins a cache line, words have 8 bytes.
POSTED, SUMMED, WRITTEN, GATHERED, RELEASED, TABLE = 0, 8, 16, 24, 32, 40
ENTRIES = 64  # entries of the table
WORDS = TABLE + ENTRIES
RANK_BYTES = 8 * WORDS

# Sums that travel from node to node (`comm.nodes`).
CHAIN_CHUNK = 1 << 17  # elements: 512 KiB, a few of which stay in cache, and polls are few
FULL_CHUNKS = 8  # nodes up to which chunks are as long; of more, those of a node take no longer to pass all
LEAST_CHAIN_CHUNK = 1 << 13  # elements: shorter ones are polled for longer than they travel
CHAIN_DEPTH = 4  # chunks on their way at once

# Arrays of a GPU (`comm.gpu`).
TRANSFERS = 4  # in progress at once: gathers of prefetched stages, and reductions behind backward
AWARE_CHUNK = 1 << 20  # elements of a slice per round: long enough for a fast link, short for the buffers
AWARE_DEPTH = 2  # rounds in progress
NCCL_CHUNK = 1 << 20  # elements of a slice per round of an exact reduction
NCCL_DEPTH = 1  # everything is in the order of one stream, so that buffers are used again at once
STAGE_BYTES = 8 << 20  # bytes of a stage in each direction, shared by the other ranks' chunks
LEAST_STAGE = 64 << 10  # bytes of a chunk, where ranks are many
STAGED_DEPTH = 3  # stages of a transfer: one on its way to the host, one in MPI, one on its way back
STAGED_ALIGNED = 1024  # elements, at whose multiples longer chunks end


# ----------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Reductions:
    """The reductions of a job, as far as a transport's scratch depends on them, from the view of rank 0.

    slices          elements of its slice of each unit that is trained
    itemsize        bytes of an element of a gradient on its way
    in_flight       reductions in progress at once, at most
    contributors    the different numbers of ranks that give something to a round
    exact           sums are in rank order
    accumulates     sums are added to those of earlier rounds
    replicated      every node has all slices
    """

    ranks: int
    nodes: int
    per_node: int
    slices: tuple[int, ...]
    itemsize: int
    in_flight: int
    contributors: tuple[int, ...]
    exact: bool
    accumulates: bool
    replicated: bool

    @property
    def longest(self) -> int:
        """Elements of the largest slice."""
        return max(self.slices, default=0)


def of_messages(asked: Reductions) -> int:
    """Return the bytes for what arrives at a rank of the host before it is added.

    An exact reduction in progress has up to two chunks of every contributor; rounds with fewer contributors
    have their own. Each has places of EXACT_CHUNK elements; shorter slices touch their beginnings.
    The library's sums arrive in place, unless they are added to those of earlier rounds.
    """
    if asked.replicated:
        return by_chain(asked, posted=asked.per_node - 1)
    if not asked.exact:
        return SUM * asked.longest * asked.in_flight if asked.accumulates else 0
    place = -(-min(asked.longest, EXACT_CHUNK) * asked.itemsize // PAGE) * PAGE
    buffers = min(EXACT_DEPTH, -(-asked.longest // EXACT_CHUNK)) * asked.in_flight
    return buffers * place * sum(count - 1 for count in asked.contributors)


def chain_chunk(nodes: int) -> int:
    """Return the elements of a chunk of a sum that passes `nodes` nodes; the last waits for the first."""
    return max(LEAST_CHAIN_CHUNK, CHAIN_CHUNK * FULL_CHUNKS // max(FULL_CHUNKS, nodes))


def by_chain(asked: Reductions, posted: int = 0) -> int:
    """Return the bytes of chunks from the node before, and of `posted` gradients from ranks of the node.

    A lane carries a slice of each node's owner, or only the rank's own slice where every node has all slices.
    """
    carried = asked.longest * (1 if asked.replicated else asked.nodes)
    chunk = chain_chunk(asked.nodes)
    chunks = min(CHAIN_DEPTH, -(-carried // chunk))
    sizes = SUM + posted * asked.itemsize
    return asked.in_flight * chunks * min(chunk, asked.longest) * sizes


def on_gpus(depth: int, place: int, asked: Reductions) -> int:
    """Return the bytes on a GPU for `depth` chunks of `place` elements of each other rank, if sums are exact.

    The library's sums need a buffer of each size where they are added to earlier ones.
    """
    if asked.exact:
        return asked.in_flight * depth * (asked.ranks - 1) * place * asked.itemsize
    return SUM * sum(set(asked.slices)) if asked.accumulates else 0


def staged_chunk(others: int) -> int:
    """Return the bytes of pinned memory for a chunk of one of the other ranks."""
    return max(LEAST_STAGE, STAGE_BYTES // others)


def through_host(asked: Reductions) -> int:
    """Return the bytes on the GPU, beside the memory of the host that everything passes through."""
    place = staged_chunk(asked.ranks - 1) // asked.itemsize // STAGED_ALIGNED * STAGED_ALIGNED
    return asked.in_flight * STAGED_DEPTH * (asked.ranks - 1) * place * asked.itemsize


def padded(length: int) -> int:
    """Return the bytes of `length` float32 elements, up to the next cache line."""
    return -(-length * SUM // ALIGNMENT) * ALIGNMENT


def window_bytes(full: Iterable[int], buffers: Iterable[int], ranks: int) -> int:
    """Return the bytes of a node's window, from elements: the full arrays once, the buffers of each rank."""
    return max(1, sum(map(padded, full)) + ranks * sum(map(padded, buffers)))


# ------------------------------------------------------------------------------------------- transports


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
    takes: Callable[[Reductions], int] = lambda asked: 0

    def scratch(self, asked: Reductions) -> int:
        """Return the bytes of receive buffers of a rank, on the device of its arrays."""
        return self.takes(asked) if asked.ranks > 1 else 0

    def pinned(self, ranks: int) -> int:
        """Return bytes of pinned memory of the host that a rank's transfers go through."""
        if not self.stages or ranks == 1:
            return 0
        return TRANSFERS * STAGED_DEPTH * 2 * staged_chunk(ranks - 1) * (ranks - 1)


SERIAL = Transport("serial", "", "one process, no communication", spans_nodes=False)
MPI = Transport("mpi", "mpi", "messages", adds=True, takes=of_messages)
SHARED = Transport("shared", "shared", "shared memory of the node", shares_memory=True, spans_nodes=False)
NODES = Transport(
    "nodes",
    "shared",
    "shared memory inside nodes, messages between nodes",
    shares_memory=True,
    takes=by_chain,
)
GPU_MPI = Transport(
    "mpi", "mpi", "mpi", on_gpu=True, adds=True, takes=partial(on_gpus, AWARE_DEPTH, AWARE_CHUNK)
)
STAGED = Transport("staged", "staged", "staged", on_gpu=True, stages=True, takes=through_host)
NCCL = Transport(
    "nccl", "nccl", "nccl", on_gpu=True, adds=True, takes=partial(on_gpus, NCCL_DEPTH, NCCL_CHUNK)
)

TRANSPORTS = (SERIAL, MPI, SHARED, NODES, GPU_MPI, STAGED, NCCL)
CHOICES = (AUTO, *dict.fromkeys(kind.flag for kind in TRANSPORTS if kind.flag))


def asked_for(flag: str, on_gpu: bool) -> tuple[Transport, ...]:
    """Return the transports of a --transport value on a device; none if it is for the other device."""
    return tuple(kind for kind in TRANSPORTS if kind.flag == flag and kind.on_gpu == on_gpu)


def check_flag(flag: str, on_gpu: bool) -> None:
    """Raise UsageError for a value of --transport that only the other device has."""
    if flag != AUTO and not asked_for(flag, on_gpu):
        why = "it needs GPU arrays; use --device cuda or --transport mpi"
        if on_gpu:
            why = "it cannot share GPU memory; with --device cuda use auto, mpi, staged or nccl"
        raise UsageError(f"--transport {flag}: {why}")


def expected(flag: str, *, on_gpu: bool, ranks: int, nodes: int) -> Transport:
    """Return the transport that a --transport value becomes where everything is in order.

    On the host this is shared memory wherever several ranks are on a node. `auto` on GPUs is taken to send
    through the host, which works everywhere. `asked_for` tells whether a value is one of the device.
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
