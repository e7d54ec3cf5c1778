"""Copies of the state in the memory of hosts (`--peer-checkpoint`): what they take, and how long one takes.

A rank writes its slices into shared memory and hashes them; for another host it reads them again piece by
piece, hands them over, and writes what it gets. What leaves a node goes over its link, which its ranks share.
Held to the one measurement that there is, in docs/checkpoints.md.
"""

from __future__ import annotations

from zero_mpi.checkpoint.copy_file import SLOTS
from zero_mpi.plan.case import Case
from zero_mpi.plan.machine import ASSUMED, Machine
from zero_mpi.plan.rank_memory import saved_bytes

# How often a byte passes a rank's memory: read, written, and read for its digest; and of what goes to another
# host, in and out of a message as well.
AT_HOME, ELSEWHERE = 3, 6


def rank_bytes(case: Case) -> int:
    """Of the slices that a rank copies."""
    return sum(saved_bytes(case, unit, own) for unit, own in case.slices)


def node_bytes(case: Case) -> int:
    """Of shared memory of a node for copies of the state: in each slot its own, and a neighbour's.

    Where every node has all slices those of one are enough, so a node has its own or a neighbour's.
    """
    if case.peer_checkpoint is None:
        return 0
    return SLOTS * (1 + (case.nodes > 1 and not case.hybrid)) * case.per_node * rank_bytes(case)


def copy_seconds(case: Case, machine: Machine) -> float | None:
    """For which training waits while a copy is made, from the third on; None where none are made."""
    if case.peer_checkpoint is None:
        return None
    own, brought, moves = rank_bytes(case), 0.0, machine.moves
    if case.on_gpu:  # its slices come to the host first, whose memory is another than the GPU's
        brought, moves = own / machine.host_link, ASSUMED.moves
    if case.nodes == 1:
        return brought + AT_HOME * own / moves
    link = machine.joining(case.nodes).between
    return brought + (AT_HOME + ELSEWHERE) * own / moves + link.alpha + link.beta * case.per_node * own
