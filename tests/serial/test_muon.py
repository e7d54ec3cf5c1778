"""Tests of Muon's directions and settings, and of the owner of each matrix.

tests/mpi/test_muon_ranks.py compares trained weights with a program in float64.
"""

import numpy as np
import pytest
import tiny

from zero_mpi import NO_SHARD, AdamW, GradAccum, Muon, SerialComm, ShardedModule, ShardedOptimizer
from zero_mpi.optim import muon
from zero_mpi.sharding.layout import products_of
from zero_mpi.sharding.unit import QUANTUM, Param, Unit, with_owners


def flat(matrix):
    buffer = np.zeros(-(-matrix.size // QUANTUM) * QUANTUM, np.float32)
    buffer[: matrix.size] = matrix.reshape(-1)
    return buffer


def directed(rule, gradient, momentum, lr=1.0, name="blk.0.w.weight"):
    buffer = flat(gradient)
    rule.direct(name, gradient.shape, buffer, {"muon.momentum": momentum}, lr, 1.0)
    return buffer[: gradient.size].reshape(gradient.shape)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
@pytest.mark.parametrize("coefficients", [muon.KELLER, muon.JIACHENG, muon.KELLER[:3]])
def test_singular_values_follow_the_polynomial(shape, coefficients):
    x = np.random.default_rng(1).standard_normal(shape)
    actual = Muon(coefficients=coefficients).orthogonal(x.astype(np.float32))
    u, s, vt = np.linalg.svd(x / np.linalg.norm(x), full_matrices=False)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    assert np.abs(actual - (u * s) @ vt).max() < 2e-5


def test_sizes_of_updates():
    gradient = np.random.default_rng(2).standard_normal((48, 12))
    one = directed(Muon(scale="spectral"), gradient, flat(gradient * 0)) / 2.0
    for scale, factor in (("adamw", 0.2 * np.sqrt(48)), ("keller", 2.0)):
        actual = directed(Muon(scale=scale), gradient, flat(gradient * 0))
        assert np.allclose(actual, factor * one, rtol=1e-5)
    with pytest.raises(ValueError, match="scale"):
        Muon(scale="none")
    with pytest.raises(ValueError, match="momentum"):
        Muon(momentum=1.0)


def test_fused_matrices_and_experts_are_matrices_of_their_own():
    gradient = np.random.default_rng(3).standard_normal((24, 8))
    rule = Muon(parts={"*": (20, 4), "*attn_qkv*": (12, 6, 6)})  # the last match is used
    fused = directed(rule, gradient, flat(gradient * 0), name="blk.0.attn_qkv.weight")
    for rows in (slice(0, 12), slice(12, 18), slice(18, 24)):
        single = directed(Muon(), gradient[rows], flat(gradient[rows] * 0))
        assert np.allclose(fused[rows], single, atol=1e-6)
    experts = directed(Muon(), gradient.reshape(3, 8, 8), flat(gradient * 0))
    assert np.allclose(experts[1], directed(Muon(), gradient[8:16], flat(gradient[:8] * 0)), atol=1e-6)


def test_without_nesterov_the_momentum_alone_counts():
    rng = np.random.default_rng(4)
    first, second = rng.standard_normal((2, 8, 8))
    momentum, rule = flat(first * 0), Muon(nesterov=False, momentum=0.5)
    directed(rule, first, momentum)
    actual = directed(rule, second, momentum)
    expected = directed(Muon(momentum=0.0), 0.25 * first + 0.5 * second, flat(first * 0))
    assert np.allclose(actual, expected, atol=1e-5)


def test_nothing_is_the_direction_of_nothing():
    assert not directed(Muon(), np.zeros((4, 6)), flat(np.zeros((4, 6)))).any()


def test_owners_share_the_cost_and_own_whole_matrices():
    shapes = {f"m{i}": (64, 64 << (i % 3)) for i in range(9)}
    units = [
        Unit(f"u{i}", {n: Param(shapes[n]) for n in list(shapes)[3 * i : 3 * i + 3]}, QUANTUM, True, True)
        for i in range(3)
    ]
    for ranks in (1, 2, 3, 5, 8, 16):
        load = [0] * ranks
        for unit in with_owners(units, ranks, products_of):
            bounds = unit.partition(ranks).bounds
            assert (bounds[0], bounds[-1], len(bounds)) == (0, unit.length, ranks + 1)
            for name, offset in unit.offsets.items():
                owners = [r for r in range(ranks) if bounds[r] <= offset < bounds[r + 1]]
                assert offset + unit.params[name].size <= bounds[owners[0] + 1]
                load[owners[0]] += products_of(shapes[name])
        assert max(load) - min(load) <= max(map(products_of, shapes.values()))
        assert sum(load) == sum(map(products_of, shapes.values()))


def test_whole_matrices_and_rules_go_together():
    stages = tiny.MODELS["llama"].stages()
    module = ShardedModule(stages, SerialComm())
    with pytest.raises(ValueError, match=r"whole=\["):
        ShardedOptimizer(module, {"*": AdamW(), "blk.*.weight": Muon()})
    with pytest.raises(ValueError, match="pattern"):
        ShardedOptimizer(module, {"blk.*": AdamW()})
    with pytest.raises(ValueError, match=r"'blk\.7\.\*'"):
        ShardedOptimizer(module, {"*": AdamW(), "blk.7.*": AdamW()})
    whole = ShardedModule(stages, SerialComm(), whole=["blk.0.attn_q.weight"])
    for rows in [(8,), (1000, 8), (), (-8, 16)]:
        with pytest.raises(ValueError, match=r"blk\.0\.attn_q\.weight: "):
            ShardedOptimizer(whole, {"*": AdamW(), "blk.0.attn_q.weight": Muon(parts={"*attn_q*": rows})})
    with pytest.raises(ValueError, match="matches no parameter"):
        ShardedModule(stages, SerialComm(), whole=["blk.7.none"])
    with pytest.raises(ValueError, match="by_rows"):
        ShardedModule(stages, SerialComm(), whole=["blk.*.attn_q.weight"], by_rows=True)


def test_a_gradient_that_is_not_finite_leaves_momentum_and_count(monkeypatch):
    model = tiny.MODELS["llama"]
    matrices = [name for name, p in model.params().items() if name.startswith("blk.") and len(p.shape) > 1]
    module = ShardedModule(model.stages(), SerialComm(), NO_SHARD, whole=matrices)
    module.initialize(0)
    optimizer = ShardedOptimizer(module, {"*": AdamW(), **dict.fromkeys(matrices, Muon())}, lr=1e-3)
    accumulator, calls, real = GradAccum(module, 4), [], Muon.direct

    def counted(self, name, *arguments):
        calls.append(name)
        real(self, name, *arguments)

    monkeypatch.setattr(Muon, "direct", counted)
    tiny.run_step(module, accumulator, model, 0, 4)
    optimizer.step(max_norm=1.0)
    assert sorted(calls) == sorted(matrices)  # one direction per matrix and step, for any number of rounds
    saved = {unit: {k: v.copy() for k, v in states.items()} for unit, states in optimizer.states.items()}
    tiny.run_step(module, accumulator, model, 1, 4)
    for unit in module.units:
        unit.wait_reduce()
    module.units[0].gradient.sum[0] = np.inf
    assert optimizer.step().skipped
    assert len(calls) == len(matrices)
    for unit, states in optimizer.states.items():
        for name, state in states.items():
            assert (state == saved[unit][name]).all()
