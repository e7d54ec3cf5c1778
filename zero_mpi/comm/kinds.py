"""Facts about the transports: names, sizes of chunks, and the memory that they need.

Every `Comm` has a kind (`comm.kind`). This is the only list of kinds: the values of `--transport`, the
transport that a run uses and the sizes in a plan come from here. This module needs neither MPI nor a GPU.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from zero_mpi.device.types import ALIGNMENT
from zero_mpi.errors import UsageError

AUTO = "auto"  # value of --transport: the best transport that is available
PAGE = 4096  # bytes of a memory page
SUM = 4  # bytes of an element of a sum: float32, also for gradients of another type

# Exact sums by messages (`comm.mpi`).
EXACT_CHUNK = 1 << 18  # elements of a slice per round: 1 MiB, so that chunks of 8 ranks fit in cache
EXACT_DEPTH = 2  # chunks in flight

# Counters of a rank in shared memory (`comm.shared`): each has its own cache line; words have 8 bytes.
POSTED, SUMMED, WRITTEN, GATHERED, RELEASED, TABLE = 0, 8, 16, 24, 32, 40
ENTRIES = 64  # numbers in a rank's table
WORDS = TABLE + ENTRIES
RANK_BYTES = 8 * WORDS

# Sums that travel from node to node (`comm.nodes`).
CHAIN_CHUNK = 1 << 17  # elements: 512 KiB, so that a few chunks fit in cache and polls are rare
FULL_CHUNKS = 8  # maximum number of nodes with chunks of CHAIN_CHUNK; more nodes have shorter chunks
LEAST_CHAIN_CHUNK = 1 << 13  # elements: for shorter chunks, polling takes longer than sending
CHAIN_DEPTH = 4  # chunks in flight

# Arrays of a GPU (`comm.gpu`).
TRANSFERS = 4  # maximum number of transfers in progress: gathers of prefetched stages, and reductions
AWARE_CHUNK = 1 << 20  # elements of a slice per round: enough for a fast link, with small buffers
AWARE_DEPTH = 2  # rounds in progress
NCCL_CHUNK = 1 << 20  # elements of a slice per round of an exact reduction
NCCL_DEPTH = 1  # rounds in progress: one stream orders all work, so each round can reuse the buffers
STAGE_BYTES = 8 << 20  # bytes of a stage (pinned memory) per direction, divided among the other ranks
LEAST_STAGE = 64 << 10  # minimum bytes of a staged chunk; it applies if there are many ranks
STAGED_DEPTH = 3  # stages of a transfer: one on its way to the host, one in MPI, one on its way back
STAGED_ALIGNED = 1024  # elements: a longer chunk is a multiple of this number


# ----------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Reductions:
    """Properties of a job's reductions that determine the scratch memory of rank 0.

    slices          elements of rank 0's slice of each trained unit
    itemsize        bytes of an element of a gradient that is sent
    in_flight       maximum number of reductions in progress
    contributors    the different numbers of ranks that contribute to a round
    exact           whether sums are in rank order
    accumulates     whether sums are added to the sums of earlier rounds
    replicated      whether each node has all slices
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
        return max(self.slices, default=0)


def of_messages(reductions: Reductions) -> int:
    """Return the bytes that a rank on a CPU needs for received data until it is added.

    An exact reduction in progress has up to two chunks of every contributor; rounds with fewer contributors
    have separate chunks. Only the memory pages that slices fill are counted. The library writes its sums in
    place, unless they are added to the sums of earlier rounds.
    """
    if reductions.replicated:
        return by_chain(reductions, posted=reductions.per_node - 1)
    if not reductions.exact:
        return SUM * reductions.longest * reductions.in_flight if reductions.accumulates else 0
    chunk_bytes = -(-min(reductions.longest, EXACT_CHUNK) * reductions.itemsize // PAGE) * PAGE
    buffers = min(EXACT_DEPTH, -(-reductions.longest // EXACT_CHUNK)) * reductions.in_flight
    return buffers * chunk_bytes * sum(count - 1 for count in reductions.contributors)


def chain_chunk(nodes: int) -> int:
    """Return the chunk length of a sum over nodes, in elements; chunks are shorter for many nodes."""
    return max(LEAST_CHAIN_CHUNK, CHAIN_CHUNK * FULL_CHUNKS // max(FULL_CHUNKS, nodes))


def by_chain(reductions: Reductions, posted: int = 0) -> int:
    """Return the bytes of buffers for chunks from the previous node and from `posted` ranks of this node.

    A lane sums one slice per node, or only the rank's own slice if each node has all slices.
    """
    length = reductions.longest * (1 if reductions.replicated else reductions.nodes)
    chunk = chain_chunk(reductions.nodes)
    chunks = min(CHAIN_DEPTH, -(-length // chunk))
    sizes = SUM + posted * reductions.itemsize
    return reductions.in_flight * chunks * min(chunk, reductions.longest) * sizes


def on_gpus(depth: int, length: int, reductions: Reductions) -> int:
    """Return the bytes on a GPU of `depth` chunks of `length` elements from each other rank, for exact sums.

    If the library's sums are added to earlier sums, they need a buffer for each slice length.
    """
    if reductions.exact:
        return reductions.in_flight * depth * (reductions.ranks - 1) * length * reductions.itemsize
    return SUM * sum(set(reductions.slices)) if reductions.accumulates else 0


def staged_chunk(others: int) -> int:
    """Return the bytes of pinned memory for one rank's chunk in a stage that `others` ranks share."""
    return max(LEAST_STAGE, STAGE_BYTES // others)


def through_host(reductions: Reductions) -> int:
    """Return the bytes on the GPU of the staged transport, without its host memory."""
    length = staged_chunk(reductions.ranks - 1) // reductions.itemsize // STAGED_ALIGNED * STAGED_ALIGNED
    return on_gpus(STAGED_DEPTH, length, reductions)


def padded(length: int) -> int:
    """Return the bytes of `length` float32 elements, rounded up to full cache lines."""
    return -(-length * SUM // ALIGNMENT) * ALIGNMENT


def window_bytes(full: Iterable[int], buffers: Iterable[int], ranks: int) -> int:
    """Return the bytes of a node's window: the full arrays once, and every rank's buffers."""
    return max(1, sum(map(padded, full)) + ranks * sum(map(padded, buffers)))


@dataclass(frozen=True)
class Transport:
    """Transport for the collectives of a run.

    name            name in one word
    flag            value of --transport that selects it; empty if no value does
    text            description of how data is sent, for messages
    on_gpu          whether it carries arrays on GPUs
    adds            whether the library can sum, in its own order (`--reduction fast`)
    stages          whether data of GPUs passes through pinned host memory
    shares_memory   whether ranks of a node see each other's gradients
    spans_nodes     whether ranks may be on several nodes
    takes           function that returns the bytes of scratch for reductions on several ranks
    """

    name: str
    flag: str
    text: str
    on_gpu: bool = False
    adds: bool = False
    stages: bool = False
    shares_memory: bool = False
    spans_nodes: bool = True
    takes: Callable[[Reductions], int] = lambda reductions: 0

    def scratch(self, reductions: Reductions) -> int:
        """Return the bytes of a rank's receive buffers, on the device of its arrays."""
        return self.takes(reductions) if reductions.ranks > 1 else 0

    def pinned(self, ranks: int) -> int:
        """Return the bytes of pinned host memory through which a rank's transfers pass."""
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
    """Return the transports that a --transport value allows on a device; none if it is for other devices."""
    return tuple(kind for kind in TRANSPORTS if kind.flag == flag and kind.on_gpu == on_gpu)


def check_flag(flag: str, on_gpu: bool) -> None:
    """Raise UsageError for a --transport value that is only for the other device."""
    if flag != AUTO and not asked_for(flag, on_gpu):
        reason = "it needs GPU arrays; use --device cuda or --transport mpi"
        if on_gpu:
            reason = "it cannot share GPU memory; with --device cuda use auto, mpi, staged or nccl"
        raise UsageError(f"--transport {flag}: {reason}")


def expected(flag: str, *, on_gpu: bool, ranks: int, nodes: int) -> Transport:
    """Return the transport that a --transport value selects, assuming that it works.

    On the host, `auto` is shared memory if a node has several ranks. On GPUs, `auto` is assumed to be
    `staged`, which works everywhere. `check_flag` checks whether a value fits the device.
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
