"""Tests of several sources with given shares: samples, epochs and held-out documents of each source."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import run_job
from test_command_bits import SIZES, assert_same_run, needs_mpiexec

from zero_mpi.data import MixedWindows, PackedWindows, SampleOrder, Windows, sources_of
from zero_mpi.data.documents import Document, stream_of
from zero_mpi.data.loader import DEALT, window_of
from zero_mpi.errors import UsageError

shares = st.lists(st.floats(0.01, 1), min_size=1, max_size=5)


@given(shares=shares, blocks=st.integers(0, 3), rest=st.integers(0, DEALT - 1), seed=st.integers(0, 99))
def test_each_source_has_its_share_to_a_sample_and_no_number_twice(shares, blocks, rest, seed):
    order = SampleOrder([7] * len(shares), shares, seed)
    sources, numbers = order.places(np.arange(blocks * DEALT + rest))
    dealt = sources[: blocks * DEALT]
    for source, share in enumerate(shares):
        assert abs((dealt == source).sum() - blocks * DEALT * share / sum(shares)) <= 1
        assert sorted(numbers[sources == source].tolist()) == list(range(int((sources == source).sum())))


def test_epochs_of_each_source_have_each_window_once():
    order = SampleOrder([6, 10], [3, 1], 0)
    numbers = order.windows(np.arange(4000))
    first, second = numbers[numbers < 6], numbers[numbers >= 6] - 6
    for windows, count in ((first, 6), (second, 10)):
        for start in range(0, len(windows) - count, count):
            assert sorted(windows[start : start + count].tolist()) == list(range(count))
    assert order.epochs(4000) == [len(first) / 6, len(second) / 10]
    assert order.epoch == 40
    assert SampleOrder([6], [1.0], 0).epoch == 6
    assert SampleOrder([90, 10], [0.9, 0.1], 0).epoch == 100


def test_many_windows_are_dealt_out_once_each():
    windows = (1 << 20) + 17  # too many windows to shuffle by sorting
    samples = np.arange(3 << 12)
    numbers = window_of(samples, windows, 1)
    assert np.unique(numbers).size == samples.size
    assert abs(numbers.mean() / windows - 0.5) < 0.02
    assert window_of(12000, windows, 1) == numbers[12000] == 601795  # pinned for resumes


def test_text_and_conversations_share_a_batch():
    text = Windows(np.arange(100, 130), 4)
    talks = PackedWindows(
        stream_of([Document("", np.arange(n), b"", np.arange(n) > 0) for n in (3, 2, 3)]), 4
    )
    mixed = MixedWindows([text, talks])
    assert len(mixed) == len(text) + len(talks)
    batch = mixed.batch([1, len(text), 0])
    assert batch.inputs[0].tolist() == [104, 105, 106, 107]
    assert batch.begins.tolist()[0] == [0, 0, 0, 0]
    assert batch.begins[1].tolist() == talks.batch([0]).begins[0].tolist()
    assert mixed.counted([1, len(text)]) == 4 + talks.counted([0])
    assert mixed.batch([0, 2]).begins is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a=1", "b"], "b has none"),
        (["a=1", "a=2"], "a path comes twice"),
        (["a=0.0001", "b=9"], "a=0.0001: expected a share of at least 0.001 of all"),
        (["a=0"], "a=0: expected a share"),
        (["a=1e999", "b=1"], "expected a share"),
    ],
)
def test_shares_that_make_no_sense_are_refused(given, expected):
    with pytest.raises(UsageError, match=expected):
        sources_of(given)


def test_a_path_that_is_there_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=1").touch()
    assert [source.paths for source in sources_of(["a=1", "b"])] == [["a=1", "b"]]
    sources = sources_of(["x/a=3", "y/a=.1e1"])
    assert [(source.name, source.paths, source.share) for source in sources] == [
        ("a", ["x/a"], 0.75),
        ("a-2", ["y/a"], 0.25),
    ]
    assert [each.name for each in sources_of(["x/a=1", "a-2=1", "y/a=1"])] == ["a", "a-2", "a-3"]


@needs_mpiexec
def test_a_mixture_has_the_same_bits_anywhere_and_goes_on(tmp_path):
    for name, words in (("prose", "the cat sat on the mat; "), ("code", "for x in y: print(x)\n")):
        (tmp_path / name).mkdir()
        for number in range(6):
            (tmp_path / name / f"{number}.txt").write_text(words * (20 + number))
    data = [f"{tmp_path}/prose=0.75", f"{tmp_path}/code=0.25"]
    flags = ["-m", "zero_mpi.train", *SIZES, "--data", *data, "--sample", "0"]
    flags += ["--val-fraction", "0.2", "--eval-every", "2", "--batch-size", "4", "--warmup", "40", "--steps"]
    outputs = {}
    for ranks in (1, 3):
        out = ["--out", str(tmp_path / str(ranks))]
        if ranks == 3:
            assert run_job(ranks, [*flags, "2", *out])[0] == 0
        status, outputs[ranks], errors = run_job(ranks, [*flags, "4", *out])
        assert status == 0, outputs[ranks] + errors
    lines = [(tmp_path / str(ranks) / "metrics.jsonl").read_text().splitlines() for ranks in (1, 3)]
    records = [[json.loads(line) for line in file] for file in lines]
    for one, other in zip(*records, strict=True):
        for key in ("loss", "val_loss", "val_losses"):
            assert one.get(key) == other.get(key)
    assert all("mfu" in record for record in records[0])
    losses = records[0][3]["val_losses"]
    assert losses.keys() == {"prose", "code"}
    assert min(losses.values()) < records[0][3]["val_loss"] < max(losses.values())
    assert "source:    prose: 75.0% of the windows" in outputs[1]
    assert f"val loss {records[0][3]['val_loss']:.4f}  prose {losses['prose']:.4f}  code" in outputs[1]
    assert_same_run(tmp_path / "1", tmp_path / "3")
