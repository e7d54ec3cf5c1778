"""How long a checkpoint takes to write: its bytes over what the disk takes from so many writers.

Where rank 0 writes for several nodes, what the others hold comes over its node's link while it writes. But
what is written lies in memory at first: the disk begins when the system brings old pages to it, or when the
last is there and the file is synced. Writers of every node have what they write from their own node. Ranks
meet for each array of a unit, whoever writes.
"""

from __future__ import annotations

from zero_mpi.checkpoint.writers import assigned
from zero_mpi.files.file_systems import OF_MANY
from zero_mpi.plan import rank_memory
from zero_mpi.plan.case import Case
from zero_mpi.plan.cost_model import slowest
from zero_mpi.plan.machine import Machine
from zero_mpi.sharding.unit import BYTES

LEFT_IN_MEMORY = 30.0  # seconds: what Linux has as dirty_expire_centisecs, unless it is told otherwise
MEETINGS = 3  # for each array of a unit: its values, a barrier, and digests


def saved_bytes(case: Case) -> int:
    """Of a checkpoint's tensors: weights (of adapters alone, where these are trained), averages, moments."""
    sizes = ((unit, sum(p.size for p in unit.params.values())) for unit in case.layout.units)
    return sum(rank_memory.saved_bytes(case, unit, elements) for unit, elements in sizes)


def writers(case: Case) -> int:
    """How many ranks write, on a file system that serves many nodes."""
    if case.checkpoint_io == "gather":
        return 1
    nodes = [rank // case.per_node for rank in range(case.ranks)]
    return len(set(assigned(nodes, OF_MANY, case.writers_per_node)))


def save_seconds(case: Case, machine: Machine) -> float | None:
    """To write a checkpoint; None where nothing is known of the disk."""
    if machine.disk is None:
        return None
    rate = min(machine.disk.rate, writers(case) * machine.disk.writer_rate)
    machine = machine.joining(case.nodes)
    arrays = sum(rank_memory.saved_bytes(case, unit, 1) // BYTES for unit in case.layout.units)
    latency = (case.ranks - 1).bit_length() * slowest(case, machine).alpha
    brought = brought_bytes(case) * machine.between.beta
    moved = max(brought, min(brought, LEFT_IN_MEMORY) + saved_bytes(case) / rate)
    return moved + MEETINGS * arrays * latency


def brought_bytes(case: Case) -> float:
    """What comes to rank 0's node: nothing where writers are on all nodes, or where it has all slices."""
    if case.hybrid or case.checkpoint_io != "gather":
        return 0.0
    return saved_bytes(case) * (1 - case.per_node / case.ranks)
