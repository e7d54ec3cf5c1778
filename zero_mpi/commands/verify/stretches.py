"""The stretches of steps that can be computed again: each begins at a state which is in the run folder.

That is a checkpoint, or the first weights. A stretch ends at the next checkpoint that is there, so what
`--keep` has removed lies within one; the last may end where the records do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zero_mpi.commands.verify.findings import Differs
from zero_mpi.files.foreign import quoted
from zero_mpi.telemetry.proof import CHAIN, ORIGIN
from zero_mpi.train.identity import SETTINGS

MOST_JOBS = 1 << 14  # of a run: all that each has said is kept


@dataclass(frozen=True)
class Stretch:
    """Steps that can be computed again.

    start   the step of the checkpoint that it begins at; 0: of the first weights
    last    the last step of it
    ends    whether there is a checkpoint of that step
    run     which of the run's jobs says what is computed, as a place in `Story.runs`
    """

    start: int
    last: int
    ends: bool
    run: int

    @property
    def text(self) -> str:
        """Its steps, for people."""
        return f"steps {self.start + 1} to {self.last}"


@dataclass
class Story:
    """What happened to a run, told in order, and the stretches that come of it.

    id_of     the id of the checkpoint of a step; None where there is none
    runs      what each job said that its bits depend on
    saved     steps of the checkpoints that were told of, by what was saved or gone on from
    at        the last step
    """

    id_of: Callable[[int], str | None]
    runs: list[Mapping[str, Any]] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    at: int = -1
    _since: int = 0
    _is_there: bool = False
    _tip: tuple[int, Any] = (-1, None)

    def begin(self, step: int, run: Mapping[str, Any]) -> None:
        """A job begins at a step; raises Differs for one that cannot."""
        origin = run.get(ORIGIN)
        continues = origin == CHAIN and step == self.at
        if continues and step == self._tip[0]:
            origin = self._tip[1]
        goes_on = continues or (step, origin) == self._tip
        if step < self.at or (step == 0) != (origin is None):
            raise Differs(f"no job can begin at step {step} from {quoted(origin)} after step {self.at}")
        if len(self.runs) == MOST_JOBS:
            raise Differs(f"expected at most {MOST_JOBS} jobs of a run")
        stays = goes_on and run.get(SETTINGS) == self.runs[-1].get(SETTINGS)
        if not stays and not (goes_on and self._is_there and self._since == step):
            self._close(self.at, ends=False)
            self._since = step
            self._is_there = origin is None or self.id_of(step) == origin
            if origin is not None and self._is_there and step not in self.saved:
                self.saved.append(step)
        self.at, self._tip = step, (step, origin)
        self.runs.append(run)

    def record(self, step: int) -> None:
        """A step was made; raises Differs if it is not the next one."""
        if not self.runs or step != self.at + 1:
            raise Differs(f"step {step} follows on step {self.at}")
        self.at = step

    def save(self, step: int, name: object) -> None:
        """A checkpoint was written, maybe behind later steps; raises Differs if the folder has another."""
        in_order = (self.saved or [-1])[-1] < step and self._since <= step <= self.at
        if not self.runs or not in_order:
            raise Differs(f"a checkpoint of step {step} follows on step {self.at}")
        found = self.id_of(step)
        if found is not None and found != name:
            raise Differs(
                f"the checkpoint of step {step} has the id {quoted(found)}, expected {quoted(name)}"
            )
        self.saved.append(step)
        self._tip = step, name
        if found is not None:
            self._close(step, ends=True)
            self._since, self._is_there = step, True

    def end(self) -> None:
        """Nothing more has happened to it."""
        self._close(self.at, ends=False)

    def _close(self, step: int, *, ends: bool) -> None:
        """The stretch that is open ends at a step."""
        if self._is_there and step > self._since:
            self.stretches.append(Stretch(self._since, step, ends, len(self.runs) - 1))


def between(stretches: Sequence[Stretch], first: int, last: int) -> list[Stretch]:
    """Return those with a step after `first`, up to `last`."""
    return [stretch for stretch in stretches if stretch.last > first and stretch.start < last]


def gaps(stretches: Sequence[Stretch], first: int, last: int) -> list[tuple[int, int]]:
    """Return (start, last) of the steps after `first`, up to `last`, that are in none of these in between."""
    found, reached = [], first
    for stretch in [*stretches, Stretch(last, last, False, 0)]:
        if stretch.start > reached:
            found.append((reached, stretch.start))
        reached = stretch.last
    return found


def drawn(stretches: Sequence[Stretch], count: int, seed: int) -> list[Stretch]:
    """So many of them, drawn by a seed, in their order."""
    places = random.Random(seed).sample(range(len(stretches)), min(count, len(stretches)))
    return [stretches[place] for place in sorted(places)]
