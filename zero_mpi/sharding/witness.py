"""What a rank computed, as digests that another rank's can be held against.

A unit's gradients of a micro-batch are digested where they are about to be summed over ranks. To compute a
micro-batch of another rank again, and to sum nothing, is the same list of actions with other units.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.sharding.actions import run
from zero_mpi.sharding.module import ShardedModule
from zero_mpi.sharding.passes import Pass
from zero_mpi.sharding.sharded_unit import ShardedUnit

WORDS = 2048  # of 64 bits, that an array is folded into
LOSS = "the loss"


class Digest(NamedTuple):
    """Of one thing that was computed or kept: its name, such as a unit's, and 16 bytes."""

    name: str
    value: bytes


def digest(arrays: Iterable[Array]) -> bytes:
    """16 bytes of flat arrays. A changed bit always changes them; made as fast as memory is read.

    The words of each array are added up without carry (exclusive or) into `WORDS` of them, which are hashed.
    """
    total = hashlib.blake2b(digest_size=16)
    for array in arrays:
        raw = array.view(np.uint8)
        folded = raw.size - raw.size % (8 * WORDS)
        if folded:
            rows = raw[:folded].view(np.uint64).reshape(-1, WORDS)
            total.update(np.bitwise_xor.reduce(rows, axis=0))
        total.update(raw[folded:])
        total.update(str(raw.size).encode())
    return total.digest()


class Witness:
    """The digests of gradients as they come to be summed, by unit."""

    def __init__(self) -> None:
        self.seen: list[Digest] = []

    def see(self, unit: ShardedUnit) -> None:
        """Take in the gradients of a unit."""
        if unit.unit.trainable:
            self.seen.append(Digest(unit.name, digest([unit.gradient.of_round])))


class WitnessedUnit:
    """A unit that hands on what a schedule asks of it, and shows its gradients before they are summed.

    `now`: whether they are shown in this round
    """

    def __init__(self, unit: ShardedUnit, witness: Witness, now: Callable[[], bool]) -> None:
        self._unit, self._witness, self._now = unit, witness, now
        self.start_gather, self.wait_gather = unit.start_gather, unit.wait_gather
        self.release, self.wait_reduce = unit.release, unit.wait_reduce

    def start_reduce(self, contributors: int) -> None:
        """Show the gradients, and start to sum them."""
        if self._now():
            self._witness.see(self._unit)
        self._unit.start_reduce(contributors)


class UnsummedUnit(WitnessedUnit):
    """A unit whose gradients are shown and forgotten."""

    def start_reduce(self, contributors: int) -> None:
        if self._now():
            self._witness.see(self._unit)
        self._unit.gradient.forget_round()


def compute_again(module: ShardedModule, x: Any, targets: Any, scale: float) -> list[Digest]:
    """The digests of a micro-batch's gradients and loss, of which nothing is summed or kept. Collective.

    x, targets, scale   as in `ShardedModule.forward_backward`; a rank that computes nothing passes None and
                        gets none
    """
    witness, computes = Witness(), x is not None
    units = [UnsummedUnit(unit, witness, lambda: computes) for unit in module.units]
    micro_batch = Pass(module, x, targets=targets, scale=scale)
    run(module.schedule.training, units, micro_batch)
    if not computes:
        return []
    return [Digest(LOSS, of_loss(micro_batch.loss)), *witness.seen]


def of_loss(loss: Any) -> bytes:
    """The bytes of a micro-batch's loss."""
    return np.float64(loss).tobytes()


def of_state(units: Sequence[ShardedUnit], moments: Callable[[str], Sequence[Array]]) -> list[Digest]:
    """Digests of what a rank keeps between steps: parameters, and `moments` of a trained unit by its name."""
    found = []
    for unit in units:
        found.append(Digest(f"parameters of {unit.name}", digest(unit.parameters.at_rest)))
        if unit.unit.trainable:
            found.append(Digest(f"moments of {unit.name}", digest(moments(unit.name))))
    return found
