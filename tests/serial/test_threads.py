"""Kernels on several threads are bit-identical to one thread, except sums over rows."""

import os
from functools import partial

import numpy as np
import pytest
from test_command_bits import assert_same_run, needs_mpiexec, train_compiled

from zero_mpi import ops
from zero_mpi.config.settings import Config
from zero_mpi.environment import LOCAL_RANKS, limits
from zero_mpi.ops import threads, trial
from zero_mpi.ops.low_precision import BFLOAT16
from zero_mpi.train.resolve import set_threads

# Part of the trial -> indices of its results that are sums over rows (gradients of biases and norms, losses).
SUMS = {"products": range(4, 42, 6)}  # all other results with fewer than two axes are sums over rows


@pytest.fixture
def of_threads(monkeypatch):
    """Return a function that sets the number of threads, which then share even small operations."""
    monkeypatch.setattr(threads, "LEAST", 64)
    monkeypatch.setattr(threads, "LEAST_PRODUCT", 64)
    yield threads.use
    threads.use(1)


def results_by_place():
    """Return {(type, part of the trial, index): result} of all operations."""
    parts = {("float32", "updates"): trial.updates()}
    for part in trial.PARTS:
        parts["float32", part.__name__] = part(trial.numbers)
        parts["bfloat16", part.__name__] = part(partial(trial.numbers, kind=BFLOAT16))
    return {(*name, place): np.array(x) for name, part in parts.items() for place, x in enumerate(part)}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("least", [64, 1 << 40])
def test_all_operations_on_threads(of_threads, count, least, monkeypatch):
    """If products stay on one thread, only sums over rows differ in bits from a run on one thread.

    Several threads may use BLAS for parts of a product that one thread computes by oneDNN: the summation
    order differs, and the rounding depends on the terms even if they cancel.
    """
    monkeypatch.setattr(threads, "LEAST_PRODUCT", least)
    ops.prepare(kind=BFLOAT16)
    serial = results_by_place()
    of_threads(count)
    shared, repeat = results_by_place(), results_by_place()
    assert {place: x.tobytes() for place, x in shared.items()} == {
        place: x.tobytes() for place, x in repeat.items()
    }
    differ = [place for place, x in serial.items() if x.tobytes() != shared[place].tobytes()]
    assert differ
    sums = [each for each in differ if each[2] in SUMS.get(each[1], ()) or serial[each].ndim < 2]
    assert least == 64 or sums == differ
    for place in differ:
        x, y = serial[place], shared[place]
        a, b = x.astype(np.float64), y.astype(np.float64)
        terms = 1e-6 * abs(a).max()
        assert (abs(a - b) <= (2.0**-7 if x.dtype == BFLOAT16 else 1e-5) * (1 + abs(a)) + terms).all()


def test_an_error_of_any_part_is_raised(of_threads):
    of_threads(2)

    def work(part):
        if part.start == 0:
            raise ValueError("of the first part")

    with pytest.raises(ValueError, match="of the first part"):
        threads.in_parts((2, 64), work)


def test_threads_auto_under_the_quota_of_a_group(monkeypatch, tmp_path):
    """`--threads auto` respects a control group that allows the time of one of two cores."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "own").write_text("0::/job\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    for name in LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(limits.group_limits, "__defaults__", (tmp_path, tmp_path / "own"))
    try:
        assert set_threads(Config(threads="auto")) == 1
    finally:
        ops.use_threads(1)


@needs_mpiexec
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: a rank may have one thread")
def test_ranks_of_two_threads_give_the_run_of_one_such_rank(tmp_path):
    flags = "--arch llama --dim 192 --layers 1 --heads 3 --context 256 --batch-size 6 --micro-batch 2"
    flags += " --steps 2 --precision bf16 --sample 0 --threads 2"
    for ranks in (1, 3):
        train_compiled(ranks, tmp_path / str(ranks), *flags.split())
    assert_same_run(tmp_path / "3", tmp_path / "1")
