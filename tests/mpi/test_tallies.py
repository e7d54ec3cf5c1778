"""Auxiliary losses and buffers are bit-identical to those of one process, with any strategy and transport."""

import functools

import numpy as np
import pressed
import pytest

import zero_mpi
from zero_mpi import SerialComm
from zero_mpi.sharding.precision import BF16, FP16, FP32
from zero_mpi.sharding.strategy import STRATEGIES

PRECISIONS = {precision.name: precision for precision in (FP32, BF16, FP16)}
strategies = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))


@functools.cache
def alone(precision="fp32"):
    return pressed.train(pressed.make(SerialComm(), precision=PRECISIONS[precision])[1], range(4))


@strategies
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_norms_parameters_and_buffers(exact, strategy, recompute, precision):
    _, optimizer = pressed.make(exact, strategy, recompute=recompute, precision=PRECISIONS[precision])
    records = pressed.train(optimizer, range(4))
    assert records == alone(precision)
    assert np.isfinite(records[0][-1]), "the first step was skipped, so the test would check nothing"


def test_row_sharding(mpi):
    actual, expected = (
        pressed.train(pressed.make(comm, by_rows=True)[1], range(4)) for comm in (mpi, SerialComm())
    )
    assert actual == expected


def test_a_run_saved_by_all_ranks_goes_on_under_another_strategy(exact, tmp_path_factory):
    folder = exact.broadcast_object(tmp_path_factory.mktemp("run") / "saved")
    _, optimizer = pressed.make(exact)
    first, _ = pressed.train(optimizer, range(2))
    zero_mpi.save(folder, optimizer.module, optimizer)
    module, optimizer = pressed.make(exact, STRATEGIES["no-shard"])
    zero_mpi.load(folder, module, optimizer)
    rest, digest = pressed.train(optimizer, range(2, 4))
    assert (first + rest, digest) == alone()
