"""`--audit`: one bit that flips anywhere is found before the update, and the rank is named; nothing else is.

Ranks compute a tiny model over each transport. Bits are flipped in what one of them computes or keeps.
"""

import contextlib
import random
from collections import Counter

import numpy as np
import pytest
import tiny
from audited import HOSTS, RANKS, Run, in_activations, in_gradients

from zero_mpi import HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP
from zero_mpi.errors import JobError
from zero_mpi.sharding import witness
from zero_mpi.sharding.passes import Pass
from zero_mpi.train.audit import HEAL, WARN, Partners, cost


def test_without_a_fault_there_is_no_alarm_and_no_other_bit(exact, caplog, quick):
    audited, plain = Run(exact), Run(exact, every=1 << 40)
    for _ in range(5 if quick else 20):
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


@contextlib.contextmanager
def rotten(array):
    """A bit of each number that is kept flips after the rounds of a step."""
    yield
    array.view(np.uint32)[:] ^= np.uint32(1 << 22)


def test_a_warning_of_memory_names_nobody_else(exact, caplog):
    """What is computed again with parameters that have changed says nothing of who was wrong."""
    run = Run(exact, WARN)
    array = run.module.units[-1].parameters.own
    rank = int(np.argmax(exact.allgather_object(array.size)))
    run.step(rotten(array if exact.rank == rank else array[:0]))
    assert [r.facts["rank"] for r in caplog.records] == [rank] * (exact.rank == 0)
    run.step()
    assert len(caplog.records) == (exact.rank == 0), "it is said once"


@pytest.mark.parametrize("every", [1, 3])
def test_it_computes_one_round_in_as_many_as_it_says_again_and_no_other(exact, every, monkeypatch):
    """Micro-batches are counted: their forwards, backwards and losses."""
    calls = Counter()
    for name in ("forward", "backward", "loss_and_backward"):
        monkeypatch.setattr(Pass, name, counted(getattr(Pass, name), name, calls))
    run, steps = Run(exact, every=every), 6
    rounds, stages = len(run.accumulator.rounds), len(run.module.stages)
    for _ in range(steps):
        run.step()
    own, again = steps * rounds, steps // every
    assert calls["loss_and_backward"] == own + again
    assert calls["forward"] == calls["backward"] == (own + again) * (stages - 1)
    assert again / own == 1 / (every * rounds)
    assert f" {again / own:.2%} of all" in cost(every, run.accumulator.rounds)


def counted(plain, name, calls):
    """A method of a micro-batch that also counts its calls, but for those of an idle rank."""

    def call(this, stage):
        calls[name] += not this.is_idle
        plain(this, stage)

    return call


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
