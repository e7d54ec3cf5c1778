"""A tiny run that is audited, in a test under MPI; and bits that flip in what a rank computes or keeps."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny
from mpi4py import MPI

from zero_mpi import FULL_SHARD, GradAccum, ShardedAdamW
from zero_mpi.nn import CrossEntropy
from zero_mpi.session.observers import StepMade
from zero_mpi.sharding import witness
from zero_mpi.sharding.passes import Pass
from zero_mpi.sharding.sharded_unit import ShardedUnit
from zero_mpi.train.audit import STOP, Audit, round_of

RANKS = MPI.COMM_WORLD.Get_size()
HOSTS = [f"host{rank}" for rank in range(RANKS)]
CONFIG, MICRO_BATCHES = tiny.MODELS["llama"], 2 * RANKS
SCALE = 1 / (2 * MICRO_BATCHES * CONFIG.context_length)
BITS = 32  # of a number


class Run:
    """A tiny run that is audited every so many steps."""

    def __init__(self, comm, action=STOP, strategy=FULL_SHARD, every=1, update=None, **options):
        self.module = tiny.make(comm, CONFIG, strategy, bucket_mb=0.03, **options)
        self.optimizer = ShardedAdamW(self.module, lr=1e-2, **update or {})
        self.accumulator = GradAccum(self.module, MICRO_BATCHES)
        ways = {"again": self.again, "redo": self.redo}
        self.audit = Audit(every, action, self.accumulator, self.optimizer, HOSTS, **ways)
        self.number = 0  # steps made

    def again(self, number, mine):
        if mine is None:
            return witness.compute_again(self.module, None, None, 1.0)
        x, targets = tiny.micro_batch(number, mine, CONFIG)
        return witness.compute_again(self.module, x, targets, SCALE)

    def redo(self, number):
        self.accumulator.reset()
        self.rounds(number)

    def rounds(self, number):
        for mine in self.accumulator:
            if mine is None:
                self.accumulator.accumulate(None)
                continue
            x, targets = tiny.micro_batch(number, mine, CONFIG)
            self.accumulator.accumulate(x, CrossEntropy(targets, SCALE))

    def step(self, fault=None):
        """One step, a context around its first computing; its loss and norm."""
        number = self.number + 1
        self.audit.begins(number)
        with fault or contextlib.nullcontext():
            self.rounds(number)
        self.computed_loss = self.loss_bits(self.audit._round)
        self.audit.computed(number)
        loss, result = self.accumulator.total_loss(), self.optimizer.step(max_norm=1.0)
        self.audit.ends(StepMade(number, loss, result, 0.0))
        self.number = number
        return loss, result.grad_norm

    def begin_again(self):
        """After an error that all ranks have raised: the step that it ended is the next one."""
        self.accumulator.reset()

    def coming(self):
        """The number of the next step, and the round of it that is audited."""
        return self.number + 1, round_of(self.number + 1, self.accumulator)

    @contextlib.contextmanager
    def seen(self):
        """Gathers what this rank computes in the next step's round that is audited, by no digest.

        A list of bytes: the gradients of each unit as they are summed.
        """
        (_, chosen), found, plain = self.coming(), [], ShardedUnit.start_reduce

        def start_reduce(unit, contributors):
            if self.accumulator.round == chosen:
                found.append(unit.gradient.of_round.tobytes())
            plain(unit, contributors)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShardedUnit, "start_reduce", start_reduce)
            yield found

    def true_bits(self):
        """What `seen` gathers of the next step without a fault, and the loss; the step is forgotten."""
        number, chosen = self.coming()
        with self.seen() as found:
            self.rounds(number)
        found.append(self.loss_bits(chosen))
        self.accumulator.reset()
        return found

    def loss_bits(self, chosen):
        """The loss of this rank's micro-batch in a round, as bytes."""
        return self.accumulator.losses[self.accumulator.rounds.mine(chosen)].tobytes()


def flip(array, draw):
    """One bit of an array of float32, any place and any bit; flipped once more, it is as before."""
    words = array.view(np.uint32) if array.ndim == 1 else array.view(np.uint32).reshape(-1)
    assert np.shares_memory(words, array), "a copy would flip, and the run go on"
    words[draw.randrange(words.size)] ^= np.uint32(1 << draw.randrange(BITS))


# what a rank computes


class Place(NamedTuple):
    """Where a bit flips: before a call of a method, in an array of the object that it is of."""

    what: str
    kind: type
    method: str
    is_at: Callable[[Any, int], bool]
    arrays: Callable[[Any], dict[str, Any]]


def in_stage(what: str, method: str, stage: int, name: str) -> Place:
    """In an attribute of a micro-batch on its way, as a stage is given it."""
    text = f"{what} {stage}"
    return Place(text, Pass, method, lambda _, at: at == stage, lambda this: {name: getattr(this, name)})


def activations(run: Run) -> list[Place]:
    """What each stage hands to the next; the first is given ids."""
    *middle, last = range(1, len(run.module.stages))
    found = [in_stage("activations into stage", "forward", stage, "x") for stage in middle]
    return [*found, in_stage("activations into stage", "loss_and_backward", last, "x")]


def gradients(run: Run) -> list[Place]:
    """The gradient by what each stage hands to the next, and those of each unit before they are summed."""

    def of(name: str) -> Place:
        def views(this):
            return this._unit.gradient.views()

        return Place(
            f"gradients of {name}",
            witness.WitnessedUnit,
            "start_reduce",
            lambda this, _: this._unit.name == name,
            views,
        )

    stages = range(len(run.module.stages) - 1)
    found = [in_stage("gradient by what comes out of stage", "backward", stage, "dy") for stage in stages]
    return [*found, *(of(unit.name) for unit in run.module.units)]


@contextlib.contextmanager
def flipped(run: Run, rank: int, place: Place, draw: random.Random) -> Iterator[None]:
    """One bit flips at a place, in the round of the next step that is audited, on one rank; once.

    Numbers that are none, or far too large, are part of it: nobody is to warn of them.
    """
    plain, (_, chosen) = getattr(place.kind, place.method), run.coming()
    own, left = random.Random(draw.random()), [run.module.comm.rank == rank]  # ranks draw alike

    def other(this, at):
        if left[0] and run.accumulator.round == chosen and place.is_at(this, at):
            left[0] = False
            arrays = place.arrays(this)
            flip(arrays[own.choice(sorted(arrays))], own)
        plain(this, at)

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(place.kind, place.method, other)
        yield
    assert not left[0], f"nothing has flipped: {place.what}"


def in_gradients(run: Run, rank: int, draw: random.Random) -> contextlib.AbstractContextManager[None]:
    """A flip in the gradients of a unit before they are summed, which always shows."""
    places = [place for place in gradients(run) if place.kind is witness.WitnessedUnit]
    return flipped(run, rank, draw.choice(places), draw)


def in_activations(run: Run, rank: int, draw: random.Random) -> contextlib.AbstractContextManager[None]:
    """A flip in what a stage is given."""
    return flipped(run, rank, draw.choice(activations(run)), draw)


# what a rank keeps


@contextlib.contextmanager
def changed_in_memory(array: Any, seed: int, is_here: bool, is_late: bool) -> Iterator[None]:
    """One bit of what a rank keeps flips, before the rounds of a step or after them."""
    if not is_late and is_here:
        flip(array, random.Random(seed))
    with np.errstate(all="ignore"):
        yield
    if is_late and is_here:
        flip(array, random.Random(seed))
