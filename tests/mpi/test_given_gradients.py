"""Tests of gradients and arrays passed by name, partial states, and a forward without a backward."""

import numpy as np
import pytest
import tiny
from test_module_files import refused

from zero_mpi import (
    FULL_SHARD,
    NO_SHARD,
    SHARD_GRAD_OP,
    GradAccum,
    SerialComm,
    ShardedAdamW,
    ShardedModule,
    cross_entropy,
)
from zero_mpi.nn import Linear, Stage
from zero_mpi.sharding.precision import BF16, FP32
from zero_mpi.sharding.strategy import STRATEGIES as ALL_STRATEGIES

STRATEGIES = [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD]
CONFIG = tiny.MODELS["llama tied"]
COUNT = 5


def by_hand(state, number, frozen=()):
    x, targets = tiny.micro_batch(0, number, CONFIG)
    stages, saved = CONFIG.stages(), []
    for stage in stages:
        x, entry = stage.layer.forward(state, x)
        saved.append(entry)
    loss, dy = cross_entropy(x, targets, 1e-2)
    gradients = {name: np.zeros_like(value) for name, value in state.items() if name not in frozen}
    for stage, entry in zip(stages[::-1], saved[::-1], strict=True):
        dy = stage.layer.backward(state, entry, dy, gradients)
    return loss, gradients


def accumulated(comm, strategy, own=False, frozen=(), **options):
    module = tiny.make(comm, CONFIG, strategy, bucket_mb=0.02, frozen=frozen, **options)
    optimizer, accum, state = ShardedAdamW(module, lr=1e-2), GradAccum(module, COUNT), module.state_dict()
    for number in accum:
        if number is None:
            accum.add_gradients(None) if own else accum.accumulate(None)
        elif own:
            loss, gradients = by_hand(state, number, frozen)
            accum.add_gradients(gradients, loss=float(loss))
        else:
            x, targets = tiny.micro_batch(0, number, CONFIG)
            accum.accumulate(x, lambda y, targets=targets: cross_entropy(y, targets, 1e-2))
    return accum.total_loss(), optimizer.step(max_norm=1.0).grad_norm, tiny.digest(module.state_dict())


@pytest.mark.parametrize("options", [{}, {"by_rows": True}, {"frozen": ["blk.0.attn_q.weight"]}])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_added_gradients_have_the_bits_of_a_backward(exact, strategy, options):
    # A strategy that does not shard ignores by_rows: its norm is summed by chunks, not by rows.
    cut = {k: v for k, v in options.items() if k != "by_rows" or strategy.shards_moments}
    expected = accumulated(SerialComm(), FULL_SHARD, **cut)
    assert accumulated(exact, strategy, own=True, **options) == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_on_the_local_shard_is_the_step_of_the_module(exact, strategy):
    module, twin = (tiny.make(exact, CONFIG, strategy) for _ in range(2))
    optimizer, other = ShardedAdamW(module, lr=1e-2), ShardedAdamW(twin, lr=1e-2)
    accum = GradAccum(module, COUNT)
    for step, lr in enumerate([None, 0.003]):
        tiny.run_step(module, accum, CONFIG, step, COUNT)
        module.sync_gradients()
        grads = {
            segment.name: unit.gradient.sum[segment.where].copy()
            for unit in module.units
            for segment in unit.unit.segments(unit.part)
        }
        optimizer.step(lr)
        twin.drop_gathered()
        other.step_on_params(dict(twin.named_parameters()), grads, lr)
        twin.broadcast_updated_params()
    assert other.steps == 0, "step_on_params must not count as steps of the module"
    assert tiny.digest(twin.state_dict()) == tiny.digest(module.state_dict())
    x, _ = tiny.micro_batch(0, 0, CONFIG)
    assert twin.forward(x, training=False).tobytes() == module.forward(x, training=False).tobytes()


class Lion:
    """Optimizer Lion (Chen et al., 2023) as a user would write it, in place on the shards of this rank."""

    def __init__(self, module):
        self.module, self.moments = module, [np.zeros_like(p) for p in module.parameters()]

    def step(self):
        self.module.sync_gradients()
        gradients = dict(self.module.gradients())
        for unit, p, m in zip(self.module.units, self.module.parameters(), self.moments, strict=True):
            if unit.name in gradients:
                p -= 1e-3 * np.sign(0.9 * m + 0.1 * gradients[unit.name])
                m[...] = 0.99 * m + 0.01 * gradients[unit.name]
        self.module.broadcast_updated_params()
        self.module.zero_gradients()


def by_lion(comm, strategy, precision, frozen=()):
    """Train with the user's optimizer and AdamW in turns; return losses and parameters."""
    module = tiny.make(comm, CONFIG, strategy, bucket_mb=0.02, precision=precision, frozen=frozen)
    optimizers, accum, losses = [Lion(module), ShardedAdamW(module, lr=1e-3)], GradAccum(module, COUNT), []
    for name, values in module.named_parameters():
        if name in frozen:
            values += 0.5
    module.broadcast_updated_params()
    for step in range(3):
        tiny.run_step(module, accum, CONFIG, step, COUNT)
        losses.append(accum.total_loss())
        if strategy.shards_parameters and step == 2:
            module.prefetch_forward_params()  # the parameters change after this prefetch
        optimizers[step % 2].step()
    fresh, (x, _) = tiny.make(SerialComm(), CONFIG, precision=precision), tiny.micro_batch(0, 0, CONFIG)
    fresh.load_state_dict(state := module.state_dict())
    assert module.forward(x, training=False).tobytes() == fresh.forward(x, training=False).tobytes()
    return losses, tiny.digest(state)


@pytest.mark.parametrize("frozen", [[], ["blk.0.attn_q.weight"]], ids=["all", "some"])
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ALL_STRATEGIES.values(), ids=list(ALL_STRATEGIES))
def test_an_optimizer_of_ones_own_has_the_bits_of_one_process(exact, strategy, precision, frozen):
    assert by_lion(exact, strategy, precision, frozen) == by_lion(SerialComm(), FULL_SHARD, precision, frozen)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_partial_state_fills_what_it_names(exact, strategy):
    module = tiny.make(exact, CONFIG, strategy)
    before = module.state_dict()
    names = list(before)
    state = {names[0]: before[names[0]] + 1, "other": np.zeros(3)}
    missing, unexpected = module.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (names[1:], ["other"])
    expected = before | {names[0]: state[names[0]]}
    assert tiny.digest(module.state_dict()) == tiny.digest(expected)
    assert module.load_state_dict(before) == ([], [])
    assert tiny.digest(module.state_dict()) == tiny.digest(before)
    refused(exact, lambda: module.load_state_dict(state), "surplus other", ValueError)
    wrong = {names[0]: np.zeros(2)}
    refused(
        exact, lambda: module.load_state_dict(wrong, strict=False), r"expected shape .*got \(2,\)", ValueError
    )


def test_eval_keeps_nothing_for_a_backward_and_training_goes_on(exact):
    module = ShardedModule([Stage("a", Linear("a", 3, 2))], exact)
    module.initialize(0)
    x = np.ones((4, 3), np.float32)
    assert module.is_training
    assert module.eval() is module
    assert not module.is_training
    y = module.forward(x)
    refused(exact, lambda: module.backward(y), "backward needs a forward", ValueError)
    GradAccum(module, exact.size).accumulate(x, lambda y: (0.0, y))
    assert module.train().is_training
    assert (module.forward(x) == y).all()
    module.backward(y)
    refused(exact, lambda: module.train("yes"), "train: mode: expected True or False, got 'yes'", ValueError)
