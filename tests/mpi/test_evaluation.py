"""Losses without gradients: each part of a micro-batch has its own loss, the same at any number of ranks."""

import numpy as np
import pytest
import tiny

from zero_mpi import SerialComm
from zero_mpi.nn.loss import PartLosses
from zero_mpi.sharding.rounds import part_losses

ROWS, MICRO_BATCHES = 2, 5
PARTS = ((0, slice(0, None)), (1, slice(4, 7)), (1, np.array([0, 2, 10])))  # full row, range, positions


def batch(number, config):
    x, targets = tiny.micro_batch(0, number, config, ROWS)
    return x, PartLosses(targets, PARTS), number * len(PARTS)


def losses(comm, config, **options):
    module = tiny.make(comm, config, **options)
    return part_losses(module, MICRO_BATCHES, MICRO_BATCHES * len(PARTS), lambda i: batch(i, config))


def direct(config):
    module, terms = tiny.make(SerialComm(), config), []
    for number in range(MICRO_BATCHES):
        x, targets = tiny.micro_batch(0, number, config, ROWS)
        logits = module.forward(x, training=False).astype(np.float64)
        surprise = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
        terms += [surprise[part].sum() for part in PARTS]
    return np.array(terms)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_each_part_has_its_loss(exact, name):
    config = tiny.MODELS[name]
    np.testing.assert_allclose(losses(exact, config), direct(config), rtol=1e-5)


def test_nothing_needs_to_be_trained(exact):
    config = tiny.MODELS["llama"]
    assert tiny.make(exact, config, frozen=["*"]).gradient_pool.nbytes == 0
    assert losses(exact, config, frozen=["*"]).tobytes() == losses(SerialComm(), config).tobytes()
