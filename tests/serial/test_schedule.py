"""The schedule of gathers, releases and reductions has the required properties on random models."""

from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from zero_mpi.sharding.actions import (
    Backward,
    Evaluate,
    Forward,
    Gather,
    Loss,
    Progress,
    Reduce,
    Release,
    Wait,
    WaitReduce,
    by_stage,
)
from zero_mpi.sharding.schedule import REDUCTIONS_IN_FLIGHT, make_schedule

COMPUTES = (Forward, Backward, Loss, Evaluate)


class Around:
    """Units that are gathered, awaited, released and reduced around one stage that computes."""

    def __init__(self, actions):
        (self.compute,) = [action for action in actions if isinstance(action, COMPUTES)]
        self.stage = self.compute.stage
        kinds = (Gather, Wait, Release, Reduce)
        self.start, self.need, self.drop, self.reduce = (
            tuple(action.unit for action in actions if isinstance(action, kind)) for kind in kinds
        )
        order = [kinds.index(type(action)) for action in actions if type(action) in kinds]
        assert order == sorted(order), "gathers start first, reductions last"
        assert isinstance(actions[-1], Progress)


def around(actions):
    plans = [Around(stage) for stage in by_stage(actions)]
    assert sum(1 for action in actions if isinstance(action, Progress)) == len(plans)
    return sorted(plans, key=lambda moves: moves.stage)


UNITS = 6
schedule_of = partial(make_schedule, gathers=[True] * UNITS, parts={})
stage_uses = st.lists(st.integers(0, UNITS - 1), max_size=3, unique=True).map(tuple)


@st.composite
def models(draw):
    """Draw (uses, reads in backward, trainable, prefetch) of a chain of separate and shared units."""
    uses = draw(st.lists(stage_uses, min_size=1, max_size=8))
    reads = draw(st.lists(st.booleans(), min_size=len(uses), max_size=len(uses)))
    trainable = draw(st.lists(st.booleans(), min_size=UNITS, max_size=UNITS))
    return uses, reads, trainable, draw(st.integers(0, 4))


def walk(moves_in_order, needs, prefetch, live):
    live, started = set(live), set(live)
    shared = live | {u for units in needs for u in units if sum(u in other for other in needs) > 1}
    for position, (plan, need) in enumerate(zip(map(Around, by_stage(moves_in_order)), needs, strict=True)):
        assert not started & set(plan.start), "started twice"
        assert len(set(plan.start)) == len(plan.start)
        assert all(position == max(0, first_need(needs, u) - prefetch) for u in plan.start), "not on time"
        live.update(plan.start)
        started.update(plan.start)
        window = {u for units in needs[position : position + prefetch + 1] for u in units}
        assert live <= window | shared, "held longer than needed"
        assert plan.need == need
        assert set(need) <= live, "missing when needed"
        assert set(plan.drop) <= live, "a dropped unit is not held"
        assert len(set(plan.drop)) == len(plan.drop)
        live.difference_update(plan.drop)
    return live


def first_need(needs, unit):
    return min(position for position, units in enumerate(needs) if unit in units)


def stages_of(uses, unit):
    return [stage for stage, units in enumerate(uses) if unit in units]


def apart(uses, unit):
    stages = stages_of(uses, unit)
    return stages != list(range(stages[0], stages[-1] + 1))


def backward_needs(plan, uses, reads):
    stages = [action.stage for action in plan.backward if isinstance(action, Backward)]
    assert stages == list(range(len(uses) - 1, len(uses) - 1 - len(stages), -1))
    return [uses[stage] if reads[stage] else () for stage in stages]


@settings(deadline=None, max_examples=300)
@given(models())
def test_units_are_there_when_needed_and_no_longer(model):
    uses, reads, _, prefetch = model
    plan = schedule_of(*model)
    needs = backward_needs(plan, uses, reads)
    carried = walk(plan.forward, uses, prefetch, set())
    for unit in carried:
        assert unit in uses[-1] or apart(uses, unit), "kept without a reason"
        assert any(unit in units for units in needs), "kept although backward does not need the unit"
    assert walk(plan.inference, uses, prefetch, set()) == set()
    assert walk(plan.backward, needs, prefetch, carried) == set()


@settings(deadline=None, max_examples=300)
@given(models())
def test_every_trained_unit_is_reduced_once_after_its_last_backward_use(model):
    uses, _, trainable, _ = model
    plan = schedule_of(*model)
    trained = [u for u in range(UNITS) if trainable[u] and stages_of(uses, u)]
    reduced = [(u, moves.stage) for moves in around(plan.backward) for u in moves.reduce]
    assert sorted(reduced) == [(u, stages_of(uses, u)[0]) for u in trained]
    lowest = min((stage for _, stage in reduced), default=len(uses))
    assert [moves.stage for moves in around(plan.backward)] == list(range(lowest, len(uses)))
    assert not any(isinstance(action, Reduce) for action in (*plan.forward, *plan.evaluation))
    assert [a.unit for a in plan.training if isinstance(a, Reduce)] == list(plan.reductions)


@settings(deadline=None, max_examples=300)
@given(models())
def test_no_more_reductions_are_in_flight_than_the_limit(model):
    """Over three rounds, no more reductions than allowed are in flight; each wait is for the oldest one."""
    plan = schedule_of(*model)
    in_flight = []
    for action in plan.training * 3:
        if isinstance(action, WaitReduce):
            assert action.unit not in in_flight[1:], "the wait is not for the oldest reduction"
            in_flight = [unit for unit in in_flight if unit != action.unit]
        elif isinstance(action, Reduce):
            in_flight = [unit for unit in in_flight if unit != action.unit]  # backward waited for it
            in_flight.append(action.unit)
        assert len(in_flight) <= REDUCTIONS_IN_FLIGHT
    assert len(in_flight) == min(REDUCTIONS_IN_FLIGHT, len(plan.reductions)), "waits come too early"


@settings(deadline=None, max_examples=300)
@given(models())
def test_training_is_forward_and_backward(model):
    """In training, the last stage computes once, not in both directions, and waits once for its units."""
    plan = schedule_of(*model)
    parts = [*plan.forward, *plan.backward]
    for kind in (Gather, Release, Reduce, WaitReduce):
        assert [a for a in plan.training if isinstance(a, kind)] == [a for a in parts if isinstance(a, kind)]
    assert {a for a in plan.training if isinstance(a, Wait)} == {a for a in parts if isinstance(a, Wait)}
