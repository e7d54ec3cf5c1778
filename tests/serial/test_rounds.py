"""How a step's micro-batches fall to the ranks: in order, round by round, each to exactly one."""

import pytest

from zero_mpi.sharding.grad_accum import Rounds

COUNTS = [1, 2, 5, 8, 9, 13]
RANKS = [1, 2, 3, 5, 8]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("count", COUNTS)
def test_rounds_deal_micro_batches_in_order(count, ranks):
    per_rank = [Rounds(count, rank, ranks) for rank in range(ranks)]
    assert {len(rounds) for rounds in per_rank} == {-(-count // ranks)}
    table = [[rounds.mine(number) for rounds in per_rank] for number in range(len(per_rank[0]))]
    assert [i for row in table for i in row if i is not None] == list(range(count))
    assert all(i % ranks == rank for row in table for rank, i in enumerate(row) if i is not None)
    assert all(None not in row for row in table[:-1])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("count", COUNTS)
def test_contributors_are_the_ranks_that_have_a_micro_batch(count, ranks):
    for number in range(len(Rounds(count, 0, ranks))):
        having = [rank for rank in range(ranks) if Rounds(count, rank, ranks).mine(number) is not None]
        assert having == list(range(Rounds(count, 0, ranks).contributors(number)))


def test_a_step_without_micro_batches_is_refused():
    with pytest.raises(ValueError, match="a whole number of at least 1, got 0"):
        Rounds(0, 0, 1)
