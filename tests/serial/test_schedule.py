"""When units are gathered, released and reduced: small models by hand, random ones by their properties.

The properties: a unit is there when a stage needs it, is started as early as `prefetch` says and not
earlier, is started at most once in a direction and released after its last use there; every trained unit
is reduced once, after the last backward that adds to it.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_mpi.sharding.schedule import StagePlan, make_schedule

NOTHING = StagePlan((), (), ())


def plans(*rows):
    """StagePlans from (start, need, drop[, reduce]), each a string of unit numbers."""
    return tuple(StagePlan(*(tuple(map(int, units)) for units in row)) for row in rows)


def schedule(uses, prefetch, *, reads=None, trainable=None):
    """make_schedule for stages given as strings of unit numbers; all trained and read unless told."""
    uses = [tuple(map(int, units)) for units in uses]
    units = 1 + max(unit for stage in uses for unit in stage)
    return make_schedule(uses, reads or [True] * len(uses), trainable or [True] * units, prefetch)


# ------------------------------------------------------------------------------------------------ by hand


FOUR = {
    0: (
        plans(("0", "0", "0"), ("1", "1", "1"), ("2", "2", "2"), ("3", "3", "")),
        plans(("0", "0", "0", "0"), ("1", "1", "1", "1"), ("2", "2", "2", "2"), ("", "3", "3", "3")),
    ),
    1: (
        plans(("01", "0", "0"), ("2", "1", "1"), ("3", "2", "2"), ("", "3", "")),
        plans(("", "0", "0", "0"), ("0", "1", "1", "1"), ("1", "2", "2", "2"), ("2", "3", "3", "3")),
    ),
    2: (
        plans(("012", "0", "0"), ("3", "1", "1"), ("", "2", "2"), ("", "3", "")),
        plans(("", "0", "0", "0"), ("", "1", "1", "1"), ("0", "2", "2", "2"), ("21", "3", "3", "3")),
    ),
}


@pytest.mark.parametrize("prefetch", FOUR)
def test_four_plain_stages(prefetch):
    """The last unit stays between forward and backward, the others are gathered again."""
    made = schedule("0123", prefetch)
    forward, backward = FOUR[prefetch]
    assert made.forward == forward
    assert made.backward == backward
    assert made.last_backward == 0


def test_evaluation_keeps_nothing():
    made = schedule("0123", 1)
    assert made.evaluate[:3] == made.forward[:3]
    assert made.evaluate[3] == StagePlan((), (3,), (3,))


def test_tied_first_and_last_stage():
    """The shared unit is gathered once a micro-step and reduced at its last use in backward."""
    made = schedule("0120", 1)
    assert made.forward == plans(("01", "0", ""), ("2", "1", "1"), ("", "2", "2"), ("", "0", ""))
    assert made.evaluate == (*made.forward[:3], StagePlan((), (0,), (0,)))
    assert made.backward == plans(
        ("", "0", "0", "0"), ("", "1", "1", "1"), ("1", "2", "2", "2"), ("2", "0", "", "")
    )


def test_tied_embedding_that_does_not_read_is_released_after_the_head():
    made = schedule("0120", 1, reads=[False, True, True, True])
    assert made.backward == plans(
        ("", "", "", "0"), ("", "1", "1", "1"), ("1", "2", "2", "2"), ("2", "0", "0", "")
    )


def test_embedding_that_does_not_read_is_not_gathered_in_backward():
    made = schedule("012", 1, reads=[False, True, True])
    assert made.forward == plans(("01", "0", "0"), ("2", "1", "1"), ("", "2", ""))
    assert made.backward == plans(("", "", "", "0"), ("", "1", "1", "1"), ("1", "2", "2", "2"))


def test_last_stage_that_does_not_read_is_not_kept():
    made = schedule("012", 0, reads=[True, True, False])
    assert made.forward[2] == StagePlan((2,), (2,), (2,))
    assert made.backward[2] == StagePlan((), (), (), (2,))


def test_frozen_first_stages_end_backward_early():
    made = schedule("0123", 2, trainable=[False, False, True, True])
    assert made.last_backward == 2
    assert made.forward == schedule("0123", 2).forward
    assert made.backward == (NOTHING, NOTHING, *plans(("", "2", "2", "2"), ("2", "3", "3", "3")))


def test_frozen_stage_in_the_middle_is_gathered_and_not_reduced():
    made = schedule("012", 0, trainable=[True, False, True])
    assert made.backward == plans(("0", "0", "0", "0"), ("1", "1", "1", ""), ("", "2", "2", "2"))


def test_nothing_trained_has_no_backward():
    made = schedule("012", 1, trainable=[False] * 3)
    assert made.last_backward == 3
    assert made.backward == (NOTHING,) * 3
    assert made.forward == made.evaluate


def test_neighbours_that_share_a_unit_release_it_between_forward_and_backward():
    made = schedule(["0", "1", "1", "2"], 0)
    assert made.forward == plans(("0", "0", "0"), ("1", "1", ""), ("", "1", "1"), ("2", "2", ""))
    assert made.backward == plans(
        ("0", "0", "0", "0"), ("", "1", "1", "1"), ("1", "1", "", ""), ("", "2", "2", "2")
    )


def test_stages_without_parameters_and_with_two_units():
    """A frozen part of a scope is a unit of its own; activations between stages own nothing."""
    made = schedule(["01", "", "2"], 1, trainable=[True, False, True])
    assert made.forward == plans(("01", "01", "01"), ("2", "", ""), ("", "2", ""))
    assert made.backward == plans(("", "01", "01", "0"), ("01", "", "", ""), ("", "2", "2", "2"))


# ------------------------------------------------------------------------------------------- random models

UNITS = 6
stage_uses = st.lists(st.integers(0, UNITS - 1), max_size=3, unique=True).map(tuple)


@st.composite
def models(draw):
    """(uses, reads in backward, trainable, prefetch): chains of own and shared units."""
    uses = draw(st.lists(stage_uses, min_size=1, max_size=8))
    reads = draw(st.lists(st.booleans(), min_size=len(uses), max_size=len(uses)))
    trainable = draw(st.lists(st.booleans(), min_size=UNITS, max_size=UNITS))
    return uses, reads, trainable, draw(st.integers(0, 4))


def walk(plans_in_order, needs, prefetch, held):
    """Follow the plans, check every one, and return the units that are held at the end."""
    held, ever = set(held), set(held)
    shared = held | {u for units in needs for u in units if sum(u in other for other in needs) > 1}
    for position, (plan, need) in enumerate(zip(plans_in_order, needs, strict=True)):
        assert not ever & set(plan.start), "started twice"
        assert len(set(plan.start)) == len(plan.start)
        assert all(position == max(0, first_need(needs, u) - prefetch) for u in plan.start), "not on time"
        held.update(plan.start)
        ever.update(plan.start)
        window = {u for units in needs[position : position + prefetch + 1] for u in units}
        assert held <= window | shared, "held longer than need be"
        assert plan.need == need
        assert set(need) <= held, "not there when it is needed"
        assert set(plan.drop) <= held, "dropped what is not held"
        assert len(set(plan.drop)) == len(plan.drop)
        held.difference_update(plan.drop)
    return held


def first_need(needs, unit):
    return min(position for position, units in enumerate(needs) if unit in units)


def stages_of(uses, unit):
    return [stage for stage, units in enumerate(uses) if unit in units]


def apart(uses, unit):
    """Whether a stage that does not use the unit lies between two that do."""
    stages = stages_of(uses, unit)
    return stages != list(range(stages[0], stages[-1] + 1))


def backward_needs(made, uses, reads):
    """What each stage's backward needs, in order of stages."""
    wanted = zip(uses, reads, strict=True)
    return [units if read and i >= made.last_backward else () for i, (units, read) in enumerate(wanted)]


@settings(deadline=None, max_examples=300)
@given(models())
def test_units_are_there_when_needed_and_no_longer(model):
    uses, reads, _, prefetch = model
    made = make_schedule(*model)
    needs = backward_needs(made, uses, reads)
    carried = walk(made.forward, uses, prefetch, set())
    for unit in carried:
        assert unit in uses[-1] or apart(uses, unit), "kept without a reason"
        assert any(unit in units for units in needs), "kept though backward does not need it"
    assert walk(made.evaluate, uses, prefetch, set()) == set()
    assert walk(made.backward[::-1], needs[::-1], prefetch, carried) == set()


@settings(deadline=None, max_examples=300)
@given(models())
def test_what_is_shared_by_distant_stages_or_used_last_is_gathered_once(model):
    uses, reads, _, _ = model
    made = make_schedule(*model)
    again = {u for plan in made.backward for u in plan.start}
    needed = {u for units in backward_needs(made, uses, reads) for u in units}
    assert again == {u for u in needed if not apart(uses, u)} - set(uses[-1])


@settings(deadline=None, max_examples=300)
@given(models())
def test_every_trained_unit_is_reduced_once_after_its_last_backward_use(model):
    uses, _, trainable, _ = model
    made = make_schedule(*model)
    trained = [u for u in range(UNITS) if trainable[u] and stages_of(uses, u)]
    reduced = [(u, stage) for stage, plan in enumerate(made.backward) for u in plan.reduce]
    assert sorted(reduced) == [(u, stages_of(uses, u)[0]) for u in trained]
    assert made.last_backward == min((stage for _, stage in reduced), default=len(uses))
    assert all(plan == NOTHING for plan in made.backward[: made.last_backward])
    assert not any(plan.reduce for plan in (*made.forward, *made.evaluate))
