"""How long a checkpoint takes to write: its bytes over what the disk takes from so many writers.

What ranks send to those who write for them is left out: it goes on while these write.
"""

from __future__ import annotations

from zero_mpi.checkpoint.writers import assigned
from zero_mpi.files.file_systems import OF_MANY
from zero_mpi.plan import rank_memory
from zero_mpi.plan.case import Case
from zero_mpi.plan.machine import Machine


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
    return saved_bytes(case) / rate
