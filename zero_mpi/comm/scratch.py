"""Scratch memory of transports beside the arrays that they carry: sizes of pieces, and their bytes.

The transports cut their buffers by these numbers and a plan asks for their sum, so neither can be wrong about
the other. Nothing here needs MPI or a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE = 4096  # bytes that the system gives at once
SUM = 4  # bytes of an element of a sum, which is a float32 whatever type gradients travel in

# Exact sums of messages (`comm.mpi`).
EXACT_PIECE = 1 << 18  # elements of a slice per round: 1 MiB, in cache at 8 ranks
EXACT_DEPTH = 2  # pieces in flight

# Sums that travel from node to node (`comm.nodes`).
CHAIN_PIECE = 1 << 17  # elements: 512 KiB, a few of which stay in cache, and polls are few
WHOLE_PIECES = 8  # nodes up to which pieces are as long; of more, those of a node take no longer to pass all
LEAST_CHAIN_PIECE = 1 << 13  # elements: shorter ones are polled for longer than they travel
CHAIN_DEPTH = 4  # pieces on their way at once

# Arrays of a GPU (`comm.gpu`).
TRANSFERS = 4  # in progress at once: gathers of prefetched stages, and reductions behind backward
AWARE_PIECE = 1 << 20  # elements of a slice per round: long enough for a fast link, short for the rooms
AWARE_DEPTH = 2  # rounds in progress
NCCL_PIECE = 1 << 20  # elements of a slice per round of an exact reduction
NCCL_DEPTH = 1  # everything is in the order of one stream, so that rooms are used again at once
STAGE_BYTES = 8 << 20  # bytes of a stage in each direction, shared by the other ranks' pieces
LEAST_STAGE = 64 << 10  # bytes of a piece, where ranks are many
STAGED_DEPTH = 3  # stages of a transfer: one on its way to the host, one in MPI, one on its way back
STAGED_ALIGNED = 1024  # elements, at whose multiples longer pieces end


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


def nothing(asked: Reductions) -> int:
    """Return 0: sums are made where gradients were written."""
    return 0


def of_messages(asked: Reductions) -> int:
    """Return the bytes for what arrives at a rank of the host before it is added."""
    if asked.replicated:
        return by_chain(asked, posted=asked.per_node - 1)
    return in_order(asked) if asked.exact else by_library(asked)


def in_order(asked: Reductions) -> int:
    """Return the bytes of pages for pieces of the other ranks' slices in an exact reduction over messages.

    Each reduction in progress has up to two pieces of every contributor; rounds with fewer contributors have
    rooms of their own. A room has places of EXACT_PIECE elements; shorter slices touch their beginnings.
    """
    place = -(-min(asked.longest, EXACT_PIECE) * asked.itemsize // PAGE) * PAGE
    rooms = min(EXACT_DEPTH, -(-asked.longest // EXACT_PIECE)) * asked.in_flight
    return rooms * place * sum(count - 1 for count in asked.contributors)


def by_library(asked: Reductions) -> int:
    """Return the bytes for slices that are added to those of earlier rounds; others arrive in place."""
    return SUM * asked.longest * asked.in_flight if asked.accumulates else 0


def of_nodes(asked: Reductions) -> int:
    """Return the bytes for sums that arrive; ranks that share memory read gradients where they lie."""
    return by_chain(asked, posted=0)


def chain_piece(nodes: int) -> int:
    """Return the elements of a piece of a sum that passes `nodes` nodes; the last waits for the first."""
    return max(LEAST_CHAIN_PIECE, CHAIN_PIECE * WHOLE_PIECES // max(WHOLE_PIECES, nodes))


def by_chain(asked: Reductions, posted: int) -> int:
    """Return the bytes of pieces from the node before, and of `posted` gradients from ranks of the node.

    A lane carries a slice of each node's owner, or only the rank's own slice where every node has all slices.
    """
    carried = asked.longest * (1 if asked.replicated else asked.nodes)
    piece = chain_piece(asked.nodes)
    pieces = min(CHAIN_DEPTH, -(-carried // piece))
    sizes = SUM + posted * asked.itemsize
    return asked.in_flight * pieces * min(piece, asked.longest) * sizes


def from_gpu_to_gpu(asked: Reductions) -> int:
    """Return the bytes for what arrives by an MPI library that takes memory of a GPU."""
    return rooms(asked, AWARE_DEPTH, AWARE_PIECE) if asked.exact else arrivals(asked)


def by_nccl(asked: Reductions) -> int:
    """Return the bytes that NCCL needs for what arrives."""
    return rooms(asked, NCCL_DEPTH, NCCL_PIECE) if asked.exact else arrivals(asked)


def through_host(asked: Reductions) -> int:
    """Return the bytes on the GPU, beside the memory of the host that everything passes through."""
    place = staged_piece(asked.ranks - 1) // asked.itemsize // STAGED_ALIGNED * STAGED_ALIGNED
    return rooms(asked, STAGED_DEPTH, place)


def rooms(asked: Reductions, depth: int, place: int) -> int:
    """Return the bytes on a GPU for pieces of `place` elements of other ranks, for reductions in progress."""
    return asked.in_flight * depth * (asked.ranks - 1) * place * asked.itemsize


def arrivals(asked: Reductions) -> int:
    """Return the bytes on a GPU for sums of the library that are added to earlier ones: one of each size."""
    return SUM * sum(set(asked.slices)) if asked.accumulates else 0


def staged_piece(others: int) -> int:
    """Return the bytes of pinned memory for a piece of one of the other ranks."""
    return max(LEAST_STAGE, STAGE_BYTES // others)


def pinned(ranks: int) -> int:
    """Return the bytes of pinned memory of the host, for as many transfers as may be in progress through
    it.
    """
    others = ranks - 1
    return TRANSFERS * STAGED_DEPTH * 2 * staged_piece(others) * others
