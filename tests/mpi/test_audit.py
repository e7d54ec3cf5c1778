"""`--audit`: one bit that flips anywhere is found before the update, and the rank is named; nothing else is.

Ranks compute a tiny model over each transport. Bits are flipped in what one of them computes or keeps.
"""

import random
import re

import numpy as np
import pytest
import tiny
from mpi4py import MPI

from zero_mpi import FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP, GradAccum, ShardedAdamW
from zero_mpi.errors import JobError
from zero_mpi.nn import CrossEntropy
from zero_mpi.sharding import witness
from zero_mpi.sharding.passes import Pass
from zero_mpi.train.audit import HEAL, STOP, WARN, Audit, Partners
from zero_mpi.train.observers import StepMade

RANKS = MPI.COMM_WORLD.Get_size()
HOSTS = [f"host{rank}" for rank in range(RANKS)]
CONFIG, MICRO_BATCHES = tiny.MODELS["llama"], 2 * RANKS
FOUND = r"step (\d+), micro-batch (\d+): rank (\d+) on (\w+) computed (.+) wrongly"
FLIPS = 25 if RANKS <= 3 else 5  # of each kind
SCALE = 1 / (2 * MICRO_BATCHES * CONFIG.context_length)


class Run:
    """A tiny run that is audited at each step."""

    def __init__(self, comm, action=STOP, strategy=FULL_SHARD, **options):
        self.module = tiny.make(comm, CONFIG, strategy, bucket_mb=0.03, **options)
        self.optimizer = ShardedAdamW(self.module, lr=1e-2)
        self.accumulator = GradAccum(self.module, MICRO_BATCHES)
        ways = {"again": self.again, "redo": self.redo}
        self.audit = Audit(1, action, self.accumulator, self.optimizer, HOSTS, **ways)
        self.number, self.fault = 0, None  # what happens in the first computing of a step

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
        """One step; its loss and norm."""
        self.number += 1
        self.audit.begins(self.number)
        with fault or pytest.MonkeyPatch.context():
            self.rounds(self.number)
        self.audit.computed(self.number)
        loss, result = self.accumulator.total_loss(), self.optimizer.step(max_norm=1.0)
        self.audit.ends(StepMade(self.number, loss, result, 0.0))
        return loss, result.grad_norm

    def begin_again(self):
        """After an error that all ranks have raised."""
        self.accumulator.reset()


def flip(array, draw):
    """One bit of an array of float32, not the sign: a flipped zero is no other number."""
    words = array.reshape(-1).view(np.uint32)
    words[draw.randrange(words.size)] ^= np.uint32(1 << draw.randrange(12, 31))


class Once:
    """A context in which a method of a class does something else at one of its calls, on one rank."""

    def __init__(self, kind, name, rank, comm, call, before):
        self.kind, self.name, self.is_here = kind, name, comm.rank == rank
        self.left, self.before = call, before

    def __enter__(self):
        plain = self.plain = getattr(self.kind, self.name)

        def other(this, *given):
            self.left -= 1
            if self.is_here and self.left == -1:
                self.before(this, *given)
            return plain(this, *given)

        setattr(self.kind, self.name, other)

    def __exit__(self, *error):
        setattr(self.kind, self.name, self.plain)


def watched_calls(run, calls):
    """The calls that are made before those of the round that is audited."""
    return run.audit._round * calls


def in_activations(run, rank, draw):
    """A flip in what a stage is given."""
    stages = len(run.module.stages)
    stage = draw.randrange(1, stages - 1)
    run.audit.begins(run.number + 1)
    call = watched_calls(run, stages - 1) + stage  # the last stage runs both ways
    own = random.Random(draw.random())  # ranks draw alike
    return Once(Pass, "forward", rank, run.module.comm, call, lambda this, stage: flip(this.x, own))


def in_gradients(run, rank, draw):
    """A flip in the gradients of a unit before they are summed."""
    unit, own = draw.randrange(len(run.module.units)), random.Random(draw.random())

    def spoil(_, unit):
        weights = unit.gradient.views()
        flip(weights[own.choice(sorted(weights))], own)

    return Once(witness.Witness, "see", rank, run.module.comm, unit, spoil)


def test_without_a_fault_there_is_no_alarm_and_no_other_bit(exact, caplog):
    audited, plain = Run(exact), Run(exact)
    plain.audit._every = 1 << 40
    for _ in range(20):
        assert audited.step() == plain.step()
    assert tiny.digest(audited.module.state_dict()) == tiny.digest(plain.module.state_dict())
    assert not caplog.records


@pytest.mark.parametrize("strategy", [SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD], ids=lambda s: s.name)
def test_under_each_strategy(exact, strategy):
    run = Run(exact, strategy=strategy)
    plain = tiny.digest(Run(exact).module.state_dict())
    for _ in range(3):
        run.step()
    assert tiny.digest(run.module.state_dict()) != plain
    draw = random.Random(1)
    rank = draw.randrange(RANKS)
    with pytest.raises(JobError, match=f"rank {rank} on host{rank} computed"):
        run.step(in_gradients(run, rank, draw))


@pytest.mark.parametrize("kind", [in_activations, in_gradients])
def test_what_is_computed_wrongly_is_found_and_the_rank_named(exact, kind):
    run, draw = Run(exact), random.Random(7)
    for _ in range(FLIPS):
        rank = draw.randrange(RANKS)
        with pytest.raises(JobError) as caught:
            run.step(kind(run, rank, draw))
        found = re.match(FOUND, str(caught.value))
        number, micro_batch, named, host, _ = found.groups()
        assert (int(number), int(named), host) == (run.number, rank, HOSTS[rank])
        assert int(micro_batch) % RANKS == rank
        run.begin_again()
        run.step()


@pytest.mark.parametrize("kept", ["parameters", "moments"])
def test_what_rots_in_memory_is_found_and_the_rank_named(exact, kept):
    run, draw = Run(exact), random.Random(11)
    run.step()
    for _ in range(FLIPS):
        rank, unit = draw.randrange(RANKS), draw.choice(run.module.units)
        moments = run.optimizer.moments[unit.name]
        arrays = [unit.parameters.own] if kept == "parameters" else [moments.first, moments.second]
        array = draw.choice(arrays)
        sizes = exact.allgather_object(array.size)
        if not sizes[rank]:
            continue  # the rank has nothing of this unit
        place, bit = draw.randrange(sizes[rank]), np.uint32(1 << draw.randrange(32))
        if exact.rank == rank:
            array.view(np.uint32)[place] ^= bit
        exact.barrier()
        with pytest.raises(JobError, match=f"the {kept} of {unit.name} changed .* rank {rank} on"):
            run.step()
        if exact.rank == rank:
            array.view(np.uint32)[place] ^= bit
        exact.barrier()
        run.begin_again()
        run.step()


def test_a_healed_run_has_the_bits_of_one_without_a_fault(exact, caplog):
    sound, healed = Run(exact), Run(exact, HEAL)
    draw = random.Random(3)
    for kind in (in_gradients, in_activations, in_gradients):
        rank = draw.randrange(RANKS)
        assert healed.step(kind(healed, rank, draw)) == sound.step()
    assert tiny.digest(healed.module.state_dict()) == tiny.digest(sound.module.state_dict())
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3 * (exact.rank == 0)
    assert all("; the step is computed again" in record.getMessage() for record in caplog.records)


def test_a_warning_goes_on_with_what_was_computed(exact, caplog):
    sound, warned = Run(exact), Run(exact, WARN)
    draw = random.Random(5)
    assert warned.step(in_gradients(warned, RANKS - 1, draw)) != sound.step()
    records = [(r.facts["rank"], r.facts["host"]) for r in caplog.records]
    assert records == [(RANKS - 1, HOSTS[-1])] * (exact.rank == 0)


def test_a_fault_that_comes_again_and_again_ends_a_run_that_heals(exact):
    run, draw = Run(exact, HEAL), random.Random(9)
    rounds = run.rounds

    def always(number):
        with in_gradients(run, 0, draw):
            rounds(number)

    run.rounds = always
    with pytest.raises(JobError, match="step 1: wrong again after it was computed 3 times"):
        run.step()


@pytest.mark.world(2, 3, 4, 8)
def test_who_looks_wrongly_is_named_and_the_sums_are_kept(exact, caplog):
    """The one who computes again is the one that is wrong: a third rank says so, and nothing is healed."""
    sound, run = Run(exact), Run(exact, HEAL)
    again, owner = run.again, 0
    auditor = Partners(HOSTS).auditor(owner)

    def wrong(number, mine):
        found = again(number, mine)
        if exact.rank == auditor and len(calls) == 0:
            calls.append(1)
            return [found[0], *(witness.Digest(name, b"") for name, _ in found[1:])]
        return found

    calls = []
    run.audit._again = wrong
    assert run.step() == sound.step()
    assert [r.facts["rank"] for r in caplog.records] == [auditor] * (exact.rank == 0)


# partners


@pytest.mark.parametrize(
    ("hosts", "shift"),
    [("aabb", 2), ("aaabbb", 3), ("abc", 1), ("aab", 1), ("a", 0), ("aa", 1), ("aabbcc", 2)],
)
def test_as_many_as_can_be_look_at_another_host(hosts, shift):
    partners = Partners(list(hosts))
    assert partners.shift == shift
    assert sorted(map(partners.owner, range(len(hosts)))) == list(range(len(hosts)))
    assert all(partners.owner(partners.auditor(rank)) == rank for rank in range(len(hosts)))


def test_the_third_is_on_a_third_host_if_there_is_one():
    assert [Partners(list("aabbcc")).third(rank) for rank in (0, 2, 4)] == [4, 0, 2]
    assert Partners(list("aabb")).third(0) == 1
    assert Partners(list("ab")).third(1) == 1, "of two, the owner once more"
