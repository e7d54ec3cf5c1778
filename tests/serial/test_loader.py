"""The samples of a micro-batch depend on seed, step and micro-batch number, not on the number of ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zero_mpi.data import EvalLoader, StepLoader, Windows
from zero_mpi.data.loader import permutation, window_of


def windows_of(count, context=4):
    return Windows(np.arange(count * context + 1, dtype=np.uint32), context)


def test_a_window_holds_its_tokens_and_the_targets_one_place_on():
    batch = windows_of(3).batch([2, 0])
    inputs, targets = batch.inputs, batch.targets
    assert batch.begins is None, "a row is one document"
    assert inputs.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert targets.tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]


@given(windows=st.integers(1, 40), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
def test_an_epoch_has_each_window_once(windows, seed, epoch):
    samples = np.arange(windows) + epoch * windows
    assert sorted(window_of(samples, windows, seed).tolist()) == list(range(windows))


def test_the_order_is_pinned():
    """These numbers must never change; otherwise a resume would train on other samples than the first job."""
    assert permutation(8, 1, 2).tolist() == [5, 6, 3, 2, 1, 0, 4, 7]
    assert window_of(np.arange(16), 8, 0).tolist() == [3, 4, 1, 6, 5, 2, 7, 0, 1, 4, 0, 6, 3, 5, 2, 7]


def test_the_steps_of_an_epoch_read_each_window_once():
    """With 10 windows and 4 per step, five steps are two epochs, and step 2 (from 0) spans two epochs."""
    loader = StepLoader(windows_of(10), batch_size=4, micro_batch=3, seed=3)
    read = [loader.micro(step, i).inputs for step in range(5) for i in range(loader.micro_batches)]
    starts = np.concatenate(read)[:, 0] // 4
    assert sorted(starts[:10].tolist()) == sorted(starts[10:].tolist()) == list(range(10))


@given(total=st.integers(1, 60), limit=st.none() | st.integers(0, 99))
def test_evaluation_windows_are_spread_evenly_in_order(total, limit):
    loader, count = EvalLoader(windows_of(total), 7, limit), total if limit is None else min(total, limit)
    assert (loader.micro_batches, loader.counted) == (-(-count // 7), 4 * count)
    if count == 0:
        return
    parts = [loader.micro(i).inputs[:, 0] // 4 for i in range(loader.micro_batches)]
    gaps = np.diff([*np.concatenate(parts), total])
    assert (parts[0][0], len(gaps)) == (0, count)
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1
