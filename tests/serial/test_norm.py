"""The sum of the gradient's squares has the bits of NumPy's sum, however values are dealt out."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as some

from zero_mpi.nn.layer import Param
from zero_mpi.sharding.norm import SquaresSum, runs_of
from zero_mpi.sharding.unit import Unit


@some.composite
def units(draw):
    """Units of a few parameters, in which these do not stand in the model's order."""
    sizes = draw(some.lists(some.integers(1, 2000), min_size=1, max_size=6))
    names = [str(number) for number in range(len(sizes))]
    order, cut = draw(some.permutations(names)), draw(some.integers(0, len(names)))
    kinds = [(order[:cut], draw(some.integers(1, 5)), True), (order[cut:], 3, draw(some.booleans()))]
    made = [
        Unit(str(number), {name: Param((sizes[int(name)],), "zeros") for name in of_unit}, quantum, trained)
        for number, (of_unit, quantum, trained) in enumerate(kinds)
    ]
    return names, [unit for unit in made if unit.params]


@given(units(), some.integers(1, 5), some.integers(0, 2**31))
def test_the_sum_is_that_of_the_vector(given, ranks, seed):
    names, of_model = given
    runs = runs_of(of_model, names, ranks)
    values = np.random.default_rng(seed).lognormal(sigma=9.0, size=int(runs[1].max(initial=0)))
    sent = []
    for rank in range(ranks):
        own = sorted((at, first, end) for first, end, at, owner in runs.T.tolist() if owner == rank)
        squares = SquaresSum(runs, rank)
        sent.append(squares.part([values[first:end] for _, first, end in own]))
    assert (np.count_nonzero(sent, axis=0) <= 1).all(), "a place of two ranks"
    assert squares.total(np.sum(sent, axis=0)) == values.sum()
