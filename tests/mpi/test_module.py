"""The public interface of ShardedModule, DDP, ShardedLinear and GradAccum: correct use and misuse."""

import numpy as np
import pytest
import tiny

from zero_mpi import DDP, NO_SHARD, SerialComm, ShardedAdamW, ShardedLinear, clip_grad_norm, cross_entropy
from zero_mpi.compat.accumulation import GradAccum
from zero_mpi.compat.optimizer import ShardedOptimizer
from zero_mpi.optim.rule import Rule
from zero_mpi.sharding.precision import BF16
from zero_mpi.sharding.strategy import STRATEGIES

CONFIG = tiny.MODELS["llama"]
strategies = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))


def whole_state(seed=0):
    return tiny.make(SerialComm(), CONFIG, seed=seed).state_dict()


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@strategies
def test_state_dict_goes_out_and_in(exact, strategy):
    module = tiny.make(exact, CONFIG, strategy)
    assert same(module.state_dict(), whole_state())
    module.load_state_dict(whole_state(seed=5))
    assert same(module.state_dict(), whole_state(seed=5))
    stages, inner = module.into_inner()
    assert stages is module.module
    assert same(inner, whole_state(seed=5))


class Anchored(Rule):
    """Pulls parameters back to their initial values, divided by two."""

    type, states = "anchored", ("anchor",)

    def begin(self, part):
        np.divide(part.parameters, np.float32(2), out=part.parameters)
        part.states["anchor"][...] = part.parameters

    def update(self, part, lr, grad_scale, step):
        part.parameters[...] = part.states["anchor"]


@strategies
def test_a_rule_begins_once_before_the_first_update(exact, strategy):
    module = tiny.make(exact, CONFIG, strategy, precision=BF16)
    optimizer, accum, state = ShardedOptimizer(module, Anchored()), GradAccum(module, 5), whole_state()
    for step in range(3):
        tiny.run_step(module, accum, CONFIG, step, 5)
        optimizer.step()
    assert same(module.state_dict(), {name: array / 2 for name, array in state.items()})
    x, _ = tiny.micro_batch(0, 0, CONFIG)
    before = module.forward(x, training=False)
    module.load_state_dict(module.state_dict())
    assert np.array_equal(module.forward(x, training=False), before)


@strategies
@pytest.mark.parametrize("by_rows", [False, True])
def test_named_parameters_and_shard_info_tell_who_owns_what(exact, strategy, by_rows):
    module, full = tiny.make(exact, CONFIG, strategy, by_rows=by_rows), whole_state()
    infos = module.shard_info()
    assert list(infos) == list(module.params)
    owned = dict(module.named_parameters())
    for name, info in infos.items():
        assert info.full_shape == full[name].shape
        assert info.by_rows == (by_rows and not strategy.buckets)
        part = (full[name] if info.by_rows else full[name].reshape(-1))[info.offset : info.offset + info.size]
        assert np.array_equal(owned.get(name, np.empty(0)), part.reshape(-1))
    sizes = exact.allgather_object({name: info.size for name, info in infos.items()})
    for name, array in full.items():
        assert sum(rank[name] for rank in sizes) == (len(array) if infos[name].by_rows else array.size)


def test_what_was_gathered_before_parameters_change_is_dropped(exact):
    """After an update, a prefetch or a forward without its backward would hold outdated parameters."""
    module = tiny.make(exact, CONFIG, prefetch=2)
    x, _ = tiny.micro_batch(0, 0, CONFIG)
    module.prefetch_forward_params()
    module.load_state_dict(whole_state(seed=5))
    module.prefetch_forward_params()
    module.update_shards(np.concatenate(tiny.make(exact, CONFIG, seed=9).parameters()))
    assert np.array_equal(module.forward(x, training=False), tiny.make(exact, CONFIG, seed=9).forward(x))


def test_a_step_drops_what_was_gathered_before_it(exact):
    x, _ = tiny.micro_batch(0, 0, CONFIG)
    outputs = []
    for early in (False, True):
        module = tiny.make(exact, CONFIG, prefetch=2)
        optimizer = ShardedAdamW(module, lr=0.1)
        one_round(module, exact)
        if early:
            module.forward(x)
        optimizer.step()
        outputs.append(module.forward(x, training=False))
    assert np.array_equal(*outputs)


def one_round(module, comm, rank=None):
    x, targets = tiny.micro_batch(0, comm.rank if rank is None else rank, CONFIG)
    _, dy = cross_entropy(module.forward(x), targets, 1 / (comm.size * targets.size))
    module.backward(dy)


def whole_gradients(comm):
    module = tiny.make(SerialComm(), CONFIG, NO_SHARD)
    for rank in range(comm.size):
        one_round(module, comm, rank)
    module.sync_gradients()
    return {name: view for unit in module.units for name, view in unit.unit.views(unit.gradient.full).items()}


@strategies
def test_sync_gradients_leaves_the_sum_in_the_slices(exact, strategy):
    module, full = tiny.make(exact, CONFIG, strategy), whole_gradients(exact)
    one_round(module, exact)
    handle = module.overlapped_sync_gradients()
    handle.wait()
    module.sync_gradients()  # a second call has no effect
    assert len(dict(module.gradients())) == len(module.units)
    for unit in module.units:
        for segment in unit.unit.segments(unit.part):
            size = segment.where.stop - segment.where.start
            expected = full[segment.name].reshape(-1)[segment.offset : segment.offset + size]
            assert np.array_equal(unit.gradient.sum[segment.where], expected), segment.name
    if strategy is NO_SHARD:
        for unit in module.units:
            views = unit.unit.views(unit.gradient.full)
            assert all(np.array_equal(views[name], full[name]) for name in views)


@strategies
def test_the_norm_is_the_norm_of_the_whole_and_counts_tied_once(exact, strategy):
    module = tiny.make(exact, CONFIG, strategy)
    one_round(module, exact)
    module.sync_gradients()
    squares = sum((g.astype(np.float64) ** 2).sum() for g in whole_gradients(exact).values())
    assert module.gradient_norm() == pytest.approx(np.sqrt(squares), rel=1e-12)
    norm = clip_grad_norm(module, 0.5 * np.sqrt(squares))
    assert norm == pytest.approx(np.sqrt(squares), rel=1e-12)
    assert module.gradient_norm() == pytest.approx(0.5 * np.sqrt(squares), rel=1e-5)


def test_fast_no_shard_reduces_once_a_step(fast):
    module = tiny.make(fast, CONFIG, NO_SHARD)
    one_round(module, fast)
    if fast.size > 1:
        with pytest.raises(ValueError, match="last=False"):
            one_round(module, fast)


@strategies
def test_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(exact, strategy):
    module = tiny.make(exact, CONFIG, strategy)
    optimizer = ShardedAdamW(module)
    x, _ = tiny.micro_batch(0, 0, CONFIG)
    y = module.forward(x)
    dy = np.zeros_like(y)
    if exact.rank == exact.size - 1:
        dy[0, 0, 0] = np.inf  # only one rank has an infinite gradient
    with np.errstate(invalid="ignore", over="ignore"):
        module.backward(dy)
        result = optimizer.step(max_norm=1.0)
    assert (result.skipped, optimizer.skipped, optimizer.steps) == (True, 1, 0)
    assert same(module.state_dict(), whole_state())


def test_ddp_broadcasts_the_roots_parameters(exact):
    root = exact.size - 1
    module = DDP(CONFIG.stages(), exact, bucket_mb=0.02)
    module.initialize(seed=exact.rank)
    module.broadcast_parameters(root)
    assert same(module.state_dict(), whole_state(seed=root))


def test_a_sharded_linear_layer_holds_rows_and_drops_them_at_once(exact):
    layer = ShardedLinear(exact, 5, 7)
    layer.initialize(3)
    info = layer.shard_info()["linear.weight"]
    sizes = exact.allgather_object(info.size)
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == 7
    state = layer.state_dict()
    rng = np.random.default_rng(exact.rank)
    x, dy = rng.standard_normal((4, 5), np.float32), rng.standard_normal((4, 7), np.float32)
    y = layer.forward(x)
    assert not layer.parameter_pool._lent
    np.testing.assert_allclose(y, x @ state["linear.weight"].T + state["linear.bias"], rtol=1e-5, atol=1e-6)
    dx = layer.backward(dy)
    assert not layer.parameter_pool._lent
    np.testing.assert_allclose(dx, dy @ state["linear.weight"], rtol=1e-5, atol=1e-6)
    layer.sync_gradients()
    total = np.sum(exact.allgather_object(dy.T @ x), axis=0).reshape(-1)
    expected = total[5 * info.offset : 5 * (info.offset + info.size)]
    gradient = dict(layer.gradients())["linear.weight"]
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


def test_clipping_what_the_library_has_summed_scales_all_of_it(fast):
    """Every rank updates the full unit, so the full gradient must be scaled, not only the rank's slice."""
    module = tiny.make(fast, CONFIG, NO_SHARD)
    one_round(module, fast)
    norm = clip_grad_norm(module, 1e-3)
    assert norm > 1e-3
    squares = sum(float(np.square(unit.gradient.full, dtype=np.float64).sum()) for unit in module.units)
    assert np.sqrt(squares) == pytest.approx(1e-3, rel=1e-4)
