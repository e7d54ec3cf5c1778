"""`--audit N`: ranks compute again what others have computed, and watch over what each keeps.

Every N steps, before the update, each rank computes one micro-batch of another rank again, on another host
where there is one. All bits of its loss and gradients must be the same; where they are not, a third rank
decides who was wrong. And at every step what a rank keeps (parameters, moments) must have the bits that it
had after the update before: all ranks have known its digests since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from zero_mpi.comm import Comm
from zero_mpi.errors import JobError
from zero_mpi.session.observers import Observer, StepMade
from zero_mpi.sharding.grad_accum import GradAccum, Rounds
from zero_mpi.sharding.optimizer import FlatMoments, ShardedAdamW
from zero_mpi.sharding.witness import (
    LOSS,
    Digest,
    Witness,
    WitnessedUnit,
    of_loss,
    of_state,
)
from zero_mpi.telemetry import log

STOP, WARN, HEAL = "stop", "warn", "heal"
ACTIONS = STOP, WARN, HEAL
MOST_HEALED = 2  # times in a row that a step is computed again
SEED = 0x5EED
SOUND = "checkpoints of earlier steps hold nothing of it"
Digests = Sequence[Digest]
Again = Callable[[int, int | None], Digests]
"""(step, micro-batch or None) -> digests of that, computed again. Collective."""


class Fault(NamedTuple):
    """Who computed what wrongly; rank is -1 where it cannot be told."""

    rank: int
    what: str
    micro_batch: int
    why: str
    counts: bool  # in the sums of this step


@dataclass(frozen=True)
class Partners:
    """Who computes whose micro-batch again: rank r that of r - shift."""

    hosts: Sequence[str]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.hosts)

    @property
    def shift(self) -> int:
        """The least shift by which most ranks come to another host."""

        def apart(shift: int) -> int:
            return sum(a != self.hosts[(r + shift) % self.ranks] for r, a in enumerate(self.hosts))

        return max(range(1, self.ranks), key=lambda shift: (apart(shift), -shift), default=0)

    def owner(self, auditor: int) -> int:
        """Whose micro-batch a rank computes again."""
        return (auditor - self.shift) % self.ranks

    def auditor(self, owner: int) -> int:
        """Who computes a rank's micro-batch again."""
        return (owner + self.shift) % self.ranks

    def third(self, owner: int) -> int:
        """Who decides between them: on a third host where there is one; of two ranks the owner, once more."""
        two = (owner, self.auditor(owner))
        others = [(owner + more) % self.ranks for more in range(1, self.ranks)]
        others = [rank for rank in others if rank not in two]
        taken = {self.hosts[rank] for rank in two}
        return next((r for r in others if self.hosts[r] not in taken), others[0] if others else owner)


class Audit(Observer):
    """Audits the steps of a run. Collective, at every step.

    every    steps between those whose micro-batches are computed again
    action   what follows a fault: STOP raises JobError on all ranks, WARN tells, HEAL computes the step again
    again    computes a micro-batch of a step again
    redo     computes a step again, as if it had not been computed
    """

    def __init__(
        self,
        every: int,
        action: str,
        accumulator: GradAccum,
        optimizer: ShardedAdamW,
        hosts: Sequence[str],
        *,
        again: Again,
        redo: Callable[[int], None],
    ) -> None:
        self._every, self._action, self._accumulator, self._optimizer = every, action, accumulator, optimizer
        self._partners, self._again, self._redo = Partners(hosts), again, redo
        self._comm: Comm = accumulator.module.comm
        self._round, self._witness = 0, Witness()
        self._kept = self._exchange_state()

    # ------------------------------------------------------------------------------------ what is computed

    def begins(self, number: int) -> None:
        module, self._witness = self._accumulator.module, Witness()
        module.in_round = module.units
        if number % self._every == 0:
            self._round = round_of(number, self._accumulator)
            watched = [WitnessedUnit(unit, self._witness, self._is_watched) for unit in module.units]
            module.in_round = watched

    def _is_watched(self) -> bool:
        """Whether this rank computes a micro-batch in the round that others will compute again."""
        rounds = self._accumulator
        return rounds.round == self._round and rounds.rounds.mine(rounds.round) is not None

    def computed(self, number: int) -> None:
        """Compare, and do what is to follow."""
        if not self._check_state(number):
            return  # what is computed again with other parameters says nothing of who was wrong
        for healed in range(MOST_HEALED + 1):
            if number % self._every != 0:
                return
            heals = [self._tell(number, fault) for fault in self._faults(number)]
            if not any(heals):
                return
            if healed == MOST_HEALED:
                raise JobError(f"step {number}: wrong again after it was computed {healed + 1} times")
            self.begins(number)
            self._redo(number)

    def _faults(self, number: int) -> list[Fault]:
        """What is wrong in the sums of this step, and with those who looked."""
        accumulator, partners = self._accumulator, self._partners
        own = accumulator.rounds.mine(self._round)
        seen = [] if own is None else [Digest(LOSS, of_loss(accumulator.losses[own])), *self._witness.seen]
        owner = partners.owner(self._comm.rank)
        theirs = self._micro_batch(owner)
        looked = self._again(number, theirs)
        told: list[tuple[Digests, Digests]] = self._comm.allgather_object((seen, looked))
        found = []
        for owner in range(partners.ranks):
            first, second = told[owner][0], told[partners.auditor(owner)][1]
            if first != second:
                found.append(self._decide(number, owner, first, second))
        return found

    def _micro_batch(self, rank: int) -> int | None:
        """That of a rank in the round which is computed again."""
        rounds = self._accumulator.rounds
        index = self._round * rounds.ranks + rank
        return index if index < rounds.micro_batches else None

    def _decide(self, number: int, owner: int, first: Digests, second: Digests) -> Fault:
        """A third rank computes it: whoever differs from that was wrong."""
        index, judge = self._micro_batch(owner), self._partners.third(owner)
        assert index is not None, "who has none differs from nobody"
        third = self._again(number, index if self._comm.rank == judge else None)
        third = self._comm.allgather_object(third)[judge]
        auditor = self._partners.auditor(owner)
        if third == second:
            return Fault(owner, differing(first, second), index, f"{both(auditor, judge)} agree", True)
        if third == first:
            return Fault(auditor, differing(second, first), index, f"{both(owner, judge)} agree", False)
        return Fault(
            -1, differing(first, second), index, f"{both(owner, auditor)} and rank {judge} differ", True
        )

    def _tell(self, number: int, fault: Fault) -> bool:
        """Say what was found; returns whether the step is to be computed again. Raises JobError to stop."""
        host = "" if fault.rank < 0 else self._partners.hosts[fault.rank]
        who = f"rank {fault.rank} on {host} computed" if host else "somebody computed"
        text = f"step {number}, micro-batch {fault.micro_batch}: {who} {fault.what} wrongly ({fault.why})"
        if self._action == STOP or (self._action == HEAL and fault.rank < 0):
            raise JobError(f"{text}; {SOUND}: start again without that machine")
        heals = self._action == HEAL and fault.counts
        if self._comm.rank == 0:
            facts = {"rank": fault.rank, "host": host, "micro_batch": fault.micro_batch}
            more = "; the step is computed again" * heals
            log.warning("%s%s", text, more, extra={"facts": facts})
        return heals

    # ------------------------------------------------------------------------------------------ what is kept

    def ends(self, step: StepMade) -> None:
        module = self._accumulator.module
        module.in_round = module.units
        self._kept = self._exchange_state()

    def _exchange_state(self) -> list[Digests]:
        """What each rank keeps now, as digests, known to all."""

        def moments(name: str) -> Sequence[Any]:
            kept = self._optimizer.moments[name]
            assert isinstance(kept, FlatMoments), "others are of GPUs"
            average = self._optimizer.average
            return [kept.first, kept.second, *([] if average is None else [average.values[name]])]

        found: list[Digests] = self._comm.allgather_object(of_state(self._accumulator.module.units, moments))
        return found

    def _check_state(self, number: int) -> bool:
        """Whether what ranks keep is as it was after the update before; raises JobError or warns if not."""
        now = self._exchange_state()
        for rank, (before, after) in enumerate(zip(self._kept, now, strict=True)):
            if before == after:
                continue
            host, what = self._partners.hosts[rank], differing(after, before)
            whose = f"the {what} changed in the memory of rank {rank} on {host}"
            text = f"step {number}: {whose} since they were updated"
            if self._action != WARN:
                raise JobError(f"{text}; {SOUND}: start again without that machine")
            if self._comm.rank == 0:
                log.warning("%s", text, extra={"facts": {"rank": rank, "host": host}})
        return now == self._kept


def cost(every: int, rounds: Rounds) -> str:
    """What an audit will take, for people."""
    share = 1 / (every * len(rounds))
    return (
        f"audit:     every {every} steps one of {len(rounds)} rounds is computed again, {share:.2%} of all; "
        "parameters and moments are read twice a step"
    )


def round_of(number: int, accumulator: GradAccum) -> int:
    """The round of a step that is computed again, drawn for each step; one in which all ranks compute."""
    rounds = accumulator.rounds
    full = max(1, rounds.micro_batches // rounds.ranks)
    return int(np.random.default_rng((SEED, number)).integers(full))


def differing(found: Digests, expected: Digests) -> str:
    """The name of the first digest that is not as expected; backward comes from behind, and so do these."""
    pairs = zip(found, expected, strict=True)
    return next(one.name for one, other in pairs if one != other)


def both(a: int, b: int) -> str:
    """Two ranks, or one that computed twice."""
    return f"rank {a}, twice," if a == b else f"ranks {a} and {b}"
