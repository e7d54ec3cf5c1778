"""Tests of documents in windows: targets appear once, none crosses a border, few positions stay unused."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_mpi.arguments import UNCOUNTED
from zero_mpi.data import PackedWindows, StepLoader
from zero_mpi.data.documents import Document, Stream, stream_of
from zero_mpi.data.packing import best_fit
from zero_mpi.errors import UsageError


def text(*lengths):
    return stream_of([Document(str(d), 1000 * d + np.arange(n), b"") for d, n in enumerate(lengths)])


def talks(*masks):
    ids = [1000 * d + np.arange(len(mask)) for d, mask in enumerate(masks)]
    return stream_of([Document("", x, b"", np.array(mask, bool)) for x, mask in zip(ids, masks, strict=True)])


def pairs(windows):
    batch = windows.batch(range(len(windows)))
    places = np.arange(batch.inputs.shape[1]) - batch.begins
    rows = zip(batch.inputs.tolist(), batch.targets.tolist(), places.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]


def counted(windows):
    return sorted((x, t) for row in pairs(windows) for x, t, _ in row if t != UNCOUNTED)


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@given(lengths=LENGTHS, context=st.integers(1, 12))
def test_every_target_of_a_text_is_there_once_and_from_its_own_document(lengths, context):
    windows = PackedWindows(text(*lengths), context)
    expected = [(1000 * d + i, 1000 * d + i + 1) for d, n in enumerate(lengths) for i in range(n - 1)]
    assert counted(windows) == expected
    assert windows.counted(range(len(windows))) == len(expected)
    for row in pairs(windows):
        for (x, _, place), (y, _, after) in pairwise(row):
            assert after == 0 or (after, y) == (place + 1, x + 1), "positions must be consecutive"


@given(
    masks=st.lists(st.lists(st.booleans(), min_size=2, max_size=20), min_size=1), context=st.integers(1, 9)
)
def test_of_conversations_what_counts_is_there_once_up_to_the_end_of_a_window(masks, context):
    for mask in masks:
        mask[0] = False
    expected = [
        (1000 * d + i, 1000 * d + i + 1)
        for d, mask in enumerate(masks)
        for i in range(min(len(mask) - 1, context))
        if mask[i + 1]
    ]
    for packs in (True, False):
        windows = PackedWindows(talks(*masks), context, packs)
        assert counted(windows) == expected
        assert all(windows.counted([i]) > 0 for i in range(len(windows))), "each window has counted tokens"
    assert len(windows) == sum(any(mask[1 : context + 1]) for mask in masks), "a document has its own window"
    cut = sum(len(mask) - 1 > context for mask in masks)
    notes = " ".join(windows.notes())
    assert (f"{cut} of {len(masks)} conversations are longer than --context {context}" in notes) == (cut > 0)
    assert ("no token to train on" in notes) == (len(windows) < len(masks))


@given(sizes=st.lists(st.integers(1, 20), max_size=60))
def test_best_fit_overfills_nothing_and_begins_a_window_only_where_nothing_fits(sizes):
    window = best_fit(np.array(sizes, np.int64), 20)
    filled = np.bincount(window, sizes).astype(int).tolist()
    assert max(filled, default=0) <= 20
    assert sorted(set(window.tolist())) == list(range(len(filled)))
    if len(filled) > 1:
        assert sum(sorted(filled)[:2]) > 20, "two windows would fit into one"


def test_many_documents_fill_their_windows():
    lengths = np.random.default_rng(0).lognormal(5, 1, 5000).astype(int) + 2
    stream = Stream(np.zeros(lengths.sum(), np.uint16), np.cumsum(lengths))
    windows = PackedWindows(stream, 1024)
    assert windows.filled > 0.99
    assert windows.about().endswith(f"in {len(windows):,} windows, 99 % full")
    twin = PackedWindows(Stream(stream.ids.copy(), stream.ends.copy()), 1024)
    numbers = range(0, len(windows), 97)
    assert windows.batch(numbers).begins.tobytes() == twin.batch(numbers).begins.tobytes()


def test_a_window_is_filled_up_with_what_does_not_count():
    batch = PackedWindows(talks([False, True, True], [False, False, True]), 6).batch([0])
    assert batch.inputs.tolist() == [[0, 1, 1000, 1001, 0, 0]]
    assert batch.targets.tolist() == [[1, 2, UNCOUNTED, 1002, UNCOUNTED, UNCOUNTED]]
    assert batch.begins.tolist() == [[0, 0, 2, 2, 4, 5]]
    assert all(part.dtype == np.int64 for part in (batch.inputs, batch.targets, batch.begins))


def test_nothing_to_learn_is_refused():
    with pytest.raises(UsageError, match="no document with a token"):
        StepLoader(PackedWindows(talks([False, False]), 4), batch_size=1, micro_batch=1, seed=0)
