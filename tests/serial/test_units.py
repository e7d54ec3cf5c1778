"""Parameters of a model are assigned to units, and units to ranks."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from zero_mpi.comm import Partition
from zero_mpi.nn.layer import Layer, Param, Stage, stage_params
from zero_mpi.sharding.unit import FROZEN, QUANTUM, TRAINED, units_by_bytes, units_by_scope

shapes = st.lists(
    st.one_of(st.tuples(st.integers(1, 3000)), st.tuples(st.integers(1, 40), st.integers(1, 99)))
)


def named(shapes_of):
    return {name: Param(shape) for name, shape in shapes_of.items()}


class Bag(Layer):
    def __init__(self, shapes_of):
        self.named = named(shapes_of)

    def params(self):
        return self.named


def model():
    block = {"w": (6, 300), "b": (6,)}
    return [
        Stage("token_embd", Bag({"token_embd.weight": (50, 40)})),
        Stage("blk.0", Bag({f"blk.0.{name}": shape for name, shape in block.items()})),
        Stage("blk.0", Bag({"blk.0.extra": (3,)})),
        Stage("act", Bag({})),
        Stage("blk.1", Bag({f"blk.1.{name}": shape for name, shape in block.items()})),
        Stage("token_embd", Bag({"norm.weight": (40,), "token_embd.weight": (50, 40)})),
    ]


def kinds(trainable):
    return lambda name: TRAINED if trainable(name) else FROZEN


def by_scope(stages):
    return units_by_scope(stages, stage_params(stages), kinds(lambda name: True))


def contents(units):
    return [(unit.name, list(unit.params), unit.trainable) for unit in units]


def test_one_unit_a_scope_and_a_tied_head_is_no_other():
    tied = [Stage("first", Bag({"tied": (4, 4)})), Stage("second", Bag({"tied": (4, 4), "own": (4,)}))]
    assert contents(by_scope(tied)) == [("first", ["tied"], True), ("second", ["own"], True)]
    assert contents(by_scope(model())) == [
        ("token_embd", ["token_embd.weight", "norm.weight"], True),
        ("blk.0", ["blk.0.w", "blk.0.b", "blk.0.extra"], True),
        ("blk.1", ["blk.1.w", "blk.1.b"], True),
    ]
    assert {unit.quantum for unit in by_scope(model())} == {QUANTUM}


def bytes_of(unit):
    return 4 * sum(param.size for param in unit.params.values())


@settings(deadline=None)
@given(shapes, st.integers(1, 40_000), st.integers(0, 2**32))
def test_buckets_hold_every_parameter_once_and_keep_the_limit(chosen, limit, frozen):
    params = named({f"p{i}": shape for i, shape in enumerate(chosen)})
    free = [name for i, name in enumerate(params) if not frozen >> (i % 32) & 1]
    units = units_by_bytes(params, kinds(lambda name: name in free), limit)
    buckets = [unit for unit in units if unit.trainable]
    assert [name for unit in buckets for name in unit.params] == free[::-1]
    assert all(bytes_of(unit) <= limit or len(unit.params) == 1 for unit in buckets)
    for unit, following in pairwise(buckets):
        first = next(iter(following.params.values()))
        assert bytes_of(unit) + 4 * first.size > limit, "the next parameter would fit"
    rest = [name for unit in units if not unit.trainable for name in unit.params]
    assert rest == [name for name in params if name not in free]
    assert len(units) - len(buckets) == bool(rest)


def test_lengths_beyond_32_bits():
    partition = Partition(5 * 2**31 + 3, 4, 1024)
    assert partition.bounds[-1] == 5 * 2**31 + 3
    assert all(count > 2**31 for count in partition.counts)
    assert all(max(piece.counts) <= 2**30 for piece in partition.cut(2**30))
    assert sum(sum(piece.counts) for piece in partition.cut(2**30)) == partition.length
