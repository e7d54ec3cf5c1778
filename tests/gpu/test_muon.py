"""Muon on a GPU matches Muon on the host."""

import numpy as np
import pytest
import tiny

from zero_mpi import AdamW, GradAccum, Muon, SerialComm, ShardedModule, ShardedOptimizer, device

pytestmark = pytest.mark.world(1)
MODEL = tiny.MODELS["llama"]
MATRICES = [name for name, p in MODEL.params().items() if name.startswith("blk.") and len(p.shape) > 1]


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
def test_directions(gpu, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    actual = Muon().orthogonal(gpu.from_host(x))
    device.adopt(device.HOST)
    assert np.abs(gpu.to_host(actual) - Muon().orthogonal(x)).max() < 2e-5


def weights(steps=2):
    """Return the weights after some steps on the device in use."""
    module = ShardedModule(MODEL.stages(), SerialComm(), whole=MATRICES)
    module.initialize(0)
    optimizer = ShardedOptimizer(module, {"*": AdamW(), **dict.fromkeys(MATRICES, Muon())}, lr=1e-2)
    accumulator = GradAccum(module, 2)
    for step in range(steps):
        tiny.run_step(module, accumulator, MODEL, step, 2)
        optimizer.step(max_norm=1.0)
    return {name: device.in_use().to_host(x) for name, x in module.state_dict().items()}


def test_steps(gpu):
    actual = weights()
    device.adopt(device.HOST)
    for name, expected in weights().items():
        assert np.abs(actual[name] - expected).max() < 2e-4, name
