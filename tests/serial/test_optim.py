"""Tests of ShardedAdamW against AdamW in float64, of clipping and skipped steps, and of initial values."""

import math

import numpy as np
import pytest

from zero_mpi.comm import SerialComm
from zero_mpi.compat.module import ShardedModule
from zero_mpi.compat.optimizer import ShardedAdamW, ShardedOptimizer
from zero_mpi.nn import Embedding, Experts, LayerNorm, Linear, Param, Stage
from zero_mpi.nn.layer import DRAW_BLOCK, initial_values
from zero_mpi.optim.rule import AdamW, Rule
from zero_mpi.sharding.precision import BF16, FP16, FP32, FP64
from zero_mpi.sharding.strategy import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP

OPTIONS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.4}
WAYS = {
    "full-shard": {"strategy": FULL_SHARD},
    "full-shard by rows": {"strategy": FULL_SHARD, "by_rows": True},
    "shard-grad-op": {"strategy": SHARD_GRAD_OP},
    "no-shard": {"strategy": NO_SHARD},
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
MATRICES = {"token_embd.weight", "blk.0.a.weight", "output.weight"}


def make_module(strategy=FULL_SHARD, **options) -> ShardedModule:
    stages = [
        Stage("token_embd", Embedding("token_embd", 301, 5, std=0.5)),
        Stage("blk.0", Linear("blk.0.a", 5, 7, bias=True, std=0.5)),
        Stage("blk.1", LayerNorm("blk.1.norm", 7, 1e-3)),
        Stage("output", Linear("output", 7, 3, std=0.5)),
    ]
    module = ShardedModule(stages, SerialComm(), strategy, **options)
    module.initialize(seed=3)
    return module


def accumulate_gradients(module: ShardedModule, number: int) -> None:
    rng = np.random.default_rng(number)
    y = module.forward(rng.integers(301, size=(2, 5)))
    dy = rng.standard_normal(y.shape).astype(np.float32) * 10.0 ** rng.uniform(-2, 1)
    module.backward(dy.astype(y.dtype))
    module.sync_gradients()


def gradients(module: ShardedModule) -> dict[str, np.ndarray]:
    views = {}
    for unit in module.units:
        if unit.unit.trainable:
            views |= unit.unit.views(unit.gradient.sum)
    return {name: views[name].astype(np.float64) for name in module.params if name in views}


def norm_of(arrays: dict[str, np.ndarray]) -> float:
    return math.sqrt(math.fsum(math.fsum(array.ravel() ** 2) for array in arrays.values()))


class PlainAdamW:
    def __init__(self, params: dict[str, np.ndarray], lr, betas, eps, weight_decay) -> None:
        self.p = {name: array.astype(np.float64) for name, array in params.items()}
        self.m = {name: np.zeros(array.shape) for name, array in params.items()}
        self.v = {name: np.zeros(array.shape) for name, array in params.items()}
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.steps = 0

    def step(self, grads: dict[str, np.ndarray], lr: float | None = None, scale: float = 1.0) -> None:
        self.steps += 1
        lr, (beta1, beta2) = self.lr if lr is None else lr, self.betas
        for name, g in grads.items():
            g = g * scale
            self.m[name] = beta1 * self.m[name] + (1 - beta1) * g
            self.v[name] = beta2 * self.v[name] + (1 - beta2) * g**2
            m_hat = self.m[name] / (1 - beta1**self.steps)
            v_hat = self.v[name] / (1 - beta2**self.steps)
            decay = self.weight_decay if self.p[name].ndim >= 2 else 0.0
            self.p[name] -= lr * (m_hat / (np.sqrt(v_hat) + self.eps) + decay * self.p[name])


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        bound = 1e-6 * np.abs(array).max()
        np.testing.assert_allclose(actual[name], array, rtol=0, atol=bound, err_msg=name)


def moments(optimizer: ShardedAdamW) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    first, second = {}, {}
    for unit in optimizer.units:
        states = optimizer.states[unit.name]
        first |= unit.unit.views(states["adam.first_moments"])
        second |= unit.unit.views(states["adam.second_moments"])
    return first, second


def state_bytes(optimizer: ShardedAdamW) -> list[bytes]:
    arrays = [*optimizer.module.state_dict().values()]
    for states in optimizer.states.values():
        arrays += states.values()
    return [array.tobytes() for array in arrays]


@every_way
@pytest.mark.parametrize("max_norm", [None, 0.5, 1e9])
def test_steps_are_those_of_plain_adamw(way, max_norm):
    module = make_module(**way)
    optimizer = ShardedAdamW(module, **OPTIONS)
    plain = PlainAdamW(module.state_dict(), **OPTIONS)
    assert {name for name, array in plain.p.items() if array.ndim >= 2} == MATRICES
    for number in range(6):
        accumulate_gradients(module, number)
        grads = gradients(module)
        norm = norm_of(grads)
        lr = None if number < 4 else 0.003
        result = optimizer.step(lr=lr, max_norm=max_norm)
        factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        plain.step(grads, lr, factor)
        assert result.grad_norm == pytest.approx(norm, rel=1e-12)
        assert not result.skipped
        assert_same(module.state_dict(), plain.p)
    assert (optimizer.steps, optimizer.skipped) == (6, 0)
    first, second = moments(optimizer)
    assert_same({name: first[name] for name in plain.m}, plain.m)
    assert_same({name: second[name] for name in plain.v}, plain.v)


SCALES = {"*": 0.5, "blk.*": 3.0, "blk.0.a.bias": 0.0}


@every_way
def test_rates_by_name_are_those_of_plain_adamw_with_groups(way):
    module = make_module(**way)
    optimizer = ShardedAdamW(module, **OPTIONS, lr_scale=SCALES)
    first = module.state_dict()
    groups = {x: [name for name in first if factor_of(name) == x] for x in (0.5, 3.0, 0.0)}
    assert all(groups.values())
    plain = {
        x: PlainAdamW({name: first[name] for name in names}, **OPTIONS | {"lr": x * OPTIONS["lr"]})
        for x, names in groups.items()
    }
    for number in range(4):
        accumulate_gradients(module, number)
        grads = gradients(module)
        optimizer.step()
        for x, names in groups.items():
            plain[x].step({name: grads[name] for name in names})
    assert_same(module.state_dict(), {name: array for one in plain.values() for name, array in one.p.items()})
    assert np.array_equal(module.state_dict()["blk.0.a.bias"], first["blk.0.a.bias"])


@every_way
def test_decays_by_name_also_apply_to_vectors(way):
    results, scales = [], {"*": np.float32(0.5), "blk.0.*": 2}
    for weight_decay in (0.4, 0.0):
        module = make_module(**way)
        first = module.state_dict()
        optimizer = ShardedAdamW(module, **OPTIONS | {"weight_decay": weight_decay}, decay_scale=scales)
        accumulate_gradients(module, 0)
        optimizer.step()
        results.append(module.state_dict())
    decayed, plain = results
    for name, values in first.items():
        decay = 0.01 * 0.4 * (2 if name.startswith("blk.0.") else 0.5)
        np.testing.assert_allclose(decayed[name], plain[name] - decay * values, rtol=1e-5, atol=1e-7)


def factor_of(name):
    return 0.0 if name == "blk.0.a.bias" else 3.0 if name.startswith("blk.") else 0.5


@pytest.mark.parametrize(
    ("scales", "named"),
    [
        ({"blk.7*": 2.0}, r"'blk\.7\*'"),
        ({"output*": 2.0}, r"'output\*'"),  # matches a frozen parameter
        ({"*": -1.0}, r"lr_scale: \*: "),
        ({3: 1.0}, "name patterns"),
        (["*=2"], "mapping"),
    ],
)
def test_rates_of_nothing_are_refused(scales, named):
    with pytest.raises(ValueError, match=named):
        ShardedAdamW(make_module(frozen=["output*"]), lr_scale=scales)


@every_way
def test_a_frozen_parameter_has_no_moments_and_does_not_move(way):
    module = make_module(**way, frozen=["blk.0.*"])
    optimizer = ShardedAdamW(module, **OPTIONS)
    before = module.state_dict()
    accumulate_gradients(module, 0)
    grads = gradients(module)
    assert grads.keys() == before.keys() - {"blk.0.a.weight", "blk.0.a.bias"}
    assert optimizer.step().grad_norm == pytest.approx(norm_of(grads), rel=1e-12)
    after = module.state_dict()
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved == grads.keys()
    assert not moments(optimizer)[0].keys() & {"blk.0.a.weight", "blk.0.a.bias"}


@every_way
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_skips_the_step(way, bad):
    module, twin = make_module(**way), make_module(**way)
    optimizer, untroubled = ShardedAdamW(module, **OPTIONS), ShardedAdamW(twin, **OPTIONS)
    for each in (optimizer, untroubled):
        accumulate_gradients(each.module, 0)
        each.step(max_norm=1.0)
    accumulate_gradients(module, 1)
    list(module.gradients())[-1][1][2] = bad
    before = state_bytes(optimizer)
    result = optimizer.step(max_norm=1.0)
    assert result.skipped
    assert not math.isfinite(result.grad_norm)
    assert state_bytes(optimizer) == before
    assert (optimizer.steps, optimizer.skipped) == (1, 1)
    for each in (optimizer, untroubled):  # the skipped step must not affect later steps
        accumulate_gradients(each.module, 2)
        assert not each.step(max_norm=1.0).skipped
    assert state_bytes(optimizer) == state_bytes(untroubled)
    assert (optimizer.steps, optimizer.skipped) == (2, 1)


class Signs(Rule):
    type, states = "signs", ()

    def update(self, part, lr, grad_scale, step):
        np.subtract(part.parameters, np.float32(lr) * np.sign(part.gradients), out=part.parameters)


class Halved(AdamW):
    def update(self, part, lr, grad_scale, step):
        super().update(part, lr, grad_scale, step)
        np.multiply(part.parameters, np.float32(0.5), out=part.parameters)


@every_way
@pytest.mark.parametrize("precision", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("rule", [Signs(), Halved()], ids=["signs", "halved"])
def test_layers_read_what_a_rule_of_ones_own_has_updated(way, precision, rule):
    module, tokens = make_module(**way, precision=precision), np.arange(10).reshape(2, 5)
    optimizer, before = ShardedOptimizer(module, rule, lr=0.1), module.forward(tokens)
    accumulate_gradients(module, 0)
    optimizer.step()
    after = module.forward(tokens)
    module.load_state_dict(module.state_dict())
    assert np.array_equal(after, module.forward(tokens))
    assert not np.array_equal(after, before)


LARGE = Param((3, DRAW_BLOCK), std=0.05)  # three blocks of random numbers


def draw(name="a.weight", param=LARGE, seed=1, start=0, stop=None):
    return initial_values(name, param, seed, start, param.size if stop is None else stop)


def test_initial_values_differ_by_name_and_by_seed_and_repeat_nothing():
    full = draw()
    others = [draw(name="b.weight"), draw(seed=2), draw(name="a.weight.")]
    others += [full[DRAW_BLOCK:], full[2 * DRAW_BLOCK :]]  # each block has a separate random stream
    for other in others:
        a, b = full[: other.size], other
        assert np.mean(a == b) < 1e-3
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(other.size)
    assert draw().tobytes() == draw(param=Param((DRAW_BLOCK, 3), std=0.05)).tobytes() == full.tobytes()
    # Blocks that were cut from one random stream could overlap and share numbers.
    assert np.unique(full).size > 0.95 * 3 * DRAW_BLOCK  # one number in a hundred occurs twice by chance


def test_initial_values_are_normal_with_the_std_asked_for():
    values = draw().astype(np.float64) / 0.05
    error = 1 / math.sqrt(values.size)
    assert abs(values.mean()) < 5 * error
    assert abs(values.std() - 1) < 5 * error
    assert abs(np.mean(values**4) - 3) < 5 * error * math.sqrt(96)  # 96: variance of x^4
    assert np.mean(np.abs(values) < 1) == pytest.approx(math.erf(math.sqrt(0.5)), abs=5 * error)


def test_step_on_params_by_name_counts_the_steps_of_each_name():
    """An array that is passed later starts with zero moments and its own step count."""
    early, late = (ShardedAdamW(make_module(), **OPTIONS) for _ in range(2))
    g = np.array([0.5, -2.0], np.float32)
    p, q, r = (np.ones(2, np.float32) for _ in range(3))
    early.step_on_params({"p": p}, {"p": g})
    early.step_on_params({"q": q, "p": p}, {"p": g, "q": g})
    late.step_on_params([r], [g])
    assert (q == r).all()
    late.step_on_params([r], [g])
    assert (p == r).all()


@pytest.mark.parametrize(
    ("x", "dx"),
    [
        (np.ones(3, np.float32), np.ones(3, np.float32)),
        (np.ones((1, 2), np.float32), np.ones((1, 2), np.float32)),
        (np.ones(2, np.float32), np.ones(2)),
        (np.ones(2), np.ones(2)),
        (np.frombuffer(bytes(8), np.float32), np.ones(2, np.float32)),
        (np.ones(4, np.float32)[::2], np.ones(2, np.float32)),
        (np.ones(2, np.float16), np.ones(2, np.float16)),
    ],
    ids=["size", "shape", "types", "another type", "read-only", "strided", "float16"],
)
def test_step_on_params_refuses_arrays_before_it_updates_any(x, dx):
    optimizer, p, q = ShardedAdamW(make_module(), **OPTIONS), *np.ones((2, 2), np.float32)
    g = np.ones(2, np.float32)
    optimizer.step_on_params({"q": q}, {"q": g})
    with pytest.raises(ValueError, match="step_on_params"):
        optimizer.step_on_params({"p": p, "q": x}, {"p": g, "q": dx})
    assert (p == 1).all()


@pytest.mark.parametrize("precision", [FP32, FP64], ids=["fp32", "fp64"])
def test_step_on_params_updates_shards_as_step_does(precision):
    scales = {"lr_scale": {"*_exps*": 0.1}, "decay_scale": {"*_up_exps.weight": 3, "out.bias": 1}}
    results = []
    for by_hand in (False, True):
        experts, head = Experts("blk.0", 32, 32, 8, 2, normalized=True), Linear("out", 32, 3, bias=True)
        stages = [Stage("blk.0", experts), Stage("out", head)]
        module = ShardedModule(stages, SerialComm(), bucket_mb=0.004, precision=precision)
        module.initialize(seed=3)
        optimizer = ShardedAdamW(module, **OPTIONS, **scales)
        x = np.random.default_rng(0).standard_normal((2, 5, 32)).astype(precision.compute)
        module.backward(np.ones_like(module.forward(x)))
        if by_hand:
            module.sync_gradients()
            optimizer.step_on_params(dict(module.named_parameters()), dict(module.named_gradients()))
            module.broadcast_updated_params()
        else:
            optimizer.step()
        results.append({name: array.tobytes() for name, array in module.state_dict().items()})
    assert len(dict(module.named_parameters())) > len(module.params)
    assert results[0] == results[1]
