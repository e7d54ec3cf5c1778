"""Tests of layers' auxiliary losses and buffers: gradients, their part in the objective, and updates."""

import numpy as np
import pressed
import pytest
from pressed import COUNT

from zero_mpi import GradAccum, SerialComm
from zero_mpi.nn import Chain
from zero_mpi.nn.batch import BatchContext, StageWeights

FACTORS = {"pressure": 0.3, "size": 0.02}


def objective(model, p, x, d):
    """Return the scalar whose gradient backward computes if `d` is the gradient of the output."""
    batch = BatchContext(factors=FACTORS)
    y, _ = model.forward(StageWeights(p, batch), x)
    return np.vdot(y, d) + sum(
        factor * {"pressure": pressed.square, "size": lambda sums: sums["size"]}[name](batch.sums)
        for name, factor in FACTORS.items()
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_backward_is_the_slope_of_loss_and_auxiliary_losses(recompute):
    """One loss is nonlinear in the sums over layers; a recomputed forward counts no value twice."""
    draw, h = np.random.default_rng(0).standard_normal, 1e-6
    chain = Chain(*(stage.layer for stage in pressed.stages(recompute)))
    p, way = ({name: draw(param.shape) for name, param in chain.params().items()} for _ in range(2))
    way |= {name: 0 * way[name] for name, param in chain.params().items() if param.buffer}
    x, way_x, d = draw((3, 7)), draw((3, 7)), draw((3, 5))
    weights = StageWeights(p, BatchContext(factors=FACTORS))
    _, saved = chain.forward(weights, x)
    g = {name: np.zeros(value.shape) for name, value in p.items()}
    dx = chain.backward(weights, saved, d, g)
    actual = np.vdot(dx, way_x) + sum(np.vdot(g[name], way[name]) for name in p)
    ahead, behind = (
        objective(chain, {name: p[name] + by * way[name] for name in p}, x + by * way_x, d) for by in (h, -h)
    )
    assert (ahead - behind) / (2 * h) == pytest.approx(actual, rel=1e-7)


def wide(stages, p, xs):
    """Return gradients in float64, summed over micro-batches, and the means of the auxiliary losses."""
    model = Chain(*(stage.layer for stage in stages))
    g, means = {name: np.zeros(value.shape) for name, value in p.items()}, np.zeros(2)
    for x in xs:
        batch = BatchContext(factors={name: factor / len(xs) for name, factor in FACTORS.items()})
        y, saved = model.forward(StageWeights(p, batch), x.astype(np.float64))
        model.backward(StageWeights(p, batch), saved, 2e-3 * y, g)
        means += pressed.square(batch.sums) / len(xs), batch.sums["size"] / len(xs)
    return g, dict(zip(FACTORS, means, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_the_objective_has_their_mean_over_micro_batches(recompute):
    module, _ = pressed.make(SerialComm(), recompute=recompute)
    p = {name: value.astype(np.float64) for name, value in module.state_dict().items()}
    expected, losses = wide(pressed.stages(), p, [pressed.read(0, i) for i in range(COUNT)])
    accum = GradAccum(module, COUNT)
    pressed.rounds(accum, 0)
    module.sync_gradients()
    for name, gradient in module.named_gradients():
        np.testing.assert_allclose(gradient, expected[name].ravel(), rtol=0, atol=2e-5)
    assert pressed.losses(module) == pytest.approx(losses, rel=1e-6)
    assert "body.center" not in dict(module.named_gradients())


def test_scales_of_the_caller_stand_in_for_the_layers():
    def gradients(**scales):
        module, _ = pressed.make(SerialComm(), auxiliary=scales)
        pressed.rounds(GradAccum(module, COUNT), 0)
        return np.concatenate([gradient for _, gradient in module.named_gradients()])

    zero, one, two = (gradients(pressure=scale, size=0.0) for scale in (0.0, 0.3, 0.6))
    np.testing.assert_allclose(two - zero, 2 * (one - zero), rtol=0, atol=1e-5)
    assert abs(one - zero).max() > 0.01
    with pytest.raises(ValueError, match=r"body\.center\.sum"):
        pressed.make(SerialComm(), auxiliary={"body.center.sum": 1.0})


def test_an_evaluation_applies_and_tallies_nothing():
    module, _ = pressed.make(SerialComm())
    pressed.rounds(GradAccum(module, COUNT), 0)
    module.forward(pressed.read(1, 0), training=False)
    losses = pressed.losses(module)
    other, _ = pressed.make(SerialComm())
    pressed.rounds(GradAccum(other, COUNT), 0)
    assert losses == pressed.losses(other)


def test_a_buffer_follows_the_mean_over_all_micro_batches():
    module, optimizer = pressed.make(SerialComm())
    w = module.all_gather_param("body.1.weight")
    pressed.train(optimizer, range(1))
    mean = np.concatenate([pressed.read(0, i) @ w.T for i in range(COUNT)]).mean(axis=0)
    np.testing.assert_allclose(module.all_gather_param("body.center"), 0.1 * mean, rtol=0, atol=1e-6)


def test_a_frozen_buffer_and_one_of_a_step_that_is_skipped_stay():
    module, optimizer = pressed.make(SerialComm(), frozen=["other.*"])
    pressed.train(optimizer, range(1))
    assert not module.all_gather_param("other.center").any()
    before = module.all_gather_param("body.center")
    accum = GradAccum(module, 1)
    for _ in accum:
        accum.accumulate(pressed.read(0, 0), lambda y: (0.0, y * y.dtype.type("nan")))
    assert optimizer.step().skipped
    assert before.any()
    assert np.array_equal(module.all_gather_param("body.center"), before)
