"""`--audit` and bits that flip at random: each that changes what is summed or kept is found, its rank named.

A hundred of each kind at three ranks, any place, any bit: sign, exponent and mantissa. A flip in an
activation may change nothing at all, as where it is rounded away. Whether it does is told by the bytes of the
loss and the gradients, with the flip and without, which are compared here. If not there must be no alarm, and
it is counted apart. A failure names its seed: ZERO_MPI_TEST_SEED=N begins with that one.
"""

import os
import random
import re

import pytest
from audited import HOSTS, RANKS, Run, activations, changed_in_memory, flipped, gradients

from zero_mpi import MPIComm
from zero_mpi.errors import JobError

FLIPS, FEW = 100, 8  # of each kind that show; at other numbers of ranks, and in `make test`
SEED = int(os.environ.get("ZERO_MPI_TEST_SEED", "1000"))
FOUND = r"step (\d+), micro-batch (\d+): rank (\d+) on (\w+) computed (.+) wrongly"


@pytest.fixture
def flips(quick, exact):
    """How many must be found: all of them over one transport, for it does not matter which."""
    return FLIPS if RANKS == 3 and not quick and type(exact) is MPIComm else FEW


@pytest.mark.timeout_seconds(300)
@pytest.mark.parametrize("kind", [activations, gradients])
def test_each_bit_that_flips_in_what_is_computed_is_found_and_the_rank_named(exact, kind, flips):
    run, seed, shown, ranks = Run(exact), SEED, 0, set()
    while shown < flips:
        draw = random.Random(seed)
        rank, place = draw.randrange(RANKS), draw.choice(kind(run))
        text = f"seed {seed}: {place.what} of rank {rank}"
        said, changed = computed_with(run, flipped(run, rank, place, draw))
        assert changed in ([], [rank]), text
        if changed:
            number, micro_batch, named, host, _ = re.match(FOUND, said).groups()
            assert (int(number), int(named), host) == (run.number + 1, rank, HOSTS[rank]), text
            assert int(micro_batch) % RANKS == rank, text
            run.begin_again()
            assert seed % 4 or outcome(run) == "", text  # the weights move on, too
        else:
            assert said == "", text
        shown, seed, ranks = shown + len(changed), seed + 1, ranks | set(changed)
    if exact.rank == 0:
        print(
            f"{kind.__name__}: {shown} flips found, {seed - SEED - shown} without effect, seeds from {SEED}"
        )
    assert seed - SEED < 2 * flips, "most flips have an effect"
    assert flips < FLIPS or len(ranks) == RANKS


def computed_with(run, fault):
    """What a step with a fault said, and the ranks whose loss or gradients have other bits than without."""
    expected = run.true_bits()
    with run.seen() as found:
        said = outcome(run, fault)
    changed = [*found, run.computed_loss] != expected
    return said, [rank for rank, has in enumerate(run.module.comm.allgather_object(changed)) if has]


def outcome(run, fault=None):
    """What a step said as it stopped the run, or nothing."""
    try:
        run.step(fault)
    except JobError as error:
        return str(error)
    return ""


KEPT = {
    "parameters": lambda run, unit: unit.parameters.own,
    "first moments": lambda run, unit: run.optimizer.moments[unit.name].first,
    "second moments": lambda run, unit: run.optimizer.moments[unit.name].second,
    "averages": lambda run, unit: run.optimizer.average.values[unit.name],
}


@pytest.mark.parametrize("kept", KEPT)
def test_each_bit_that_flips_in_what_is_kept_is_found_and_the_rank_named(exact, kept, flips):
    run = Run(exact, update={"ema": 0.9})
    assert outcome(run) == ""
    for seed in range(SEED, SEED + flips):
        draw = random.Random(seed)
        unit = draw.choice(run.module.units)
        array = KEPT[kept](run, unit)
        sizes = exact.allgather_object(array.size)
        rank, late = draw.choice([rank for rank in range(RANKS) if sizes[rank]]), draw.random() < 0.5
        said = outcome(run, changed_in_memory(array, seed, exact.rank == rank, late))
        name = "parameters" if kept == "parameters" else "moments"
        whose = f"the {name} of {unit.name} changed in the memory of rank {rank} on {HOSTS[rank]} since"
        assert said.startswith(f"step {run.number + 1}: {whose}"), f"seed {seed}: {said}"
        with changed_in_memory(array, seed, exact.rank == rank, False):  # as it was
            run.begin_again()
        assert seed % 4 or outcome(run) == "", f"seed {seed}"
    if exact.rank == 0:
        print(f"{kept}: {flips} flips found, seeds from {SEED}")


@pytest.mark.exhaustive
@pytest.mark.world(3)
@pytest.mark.timeout_seconds(600)
def test_two_thousand_steps_without_a_flip_give_no_alarm(shared, caplog):
    run = Run(shared)
    for _ in range(2000):
        assert outcome(run) == ""
    assert run.number == 2000
    assert not caplog.records
