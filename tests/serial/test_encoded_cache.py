"""Text that is encoded once: kept by digest, found again, and made anew where anything differs."""

import os
import time

import numpy as np
import pytest
from test_corpus import load, put

from zero_mpi.data import ByteTokenizer, encoded_cache, token_spans
from zero_mpi.data.token_spans import TokenSpans
from zero_mpi.errors import UsageError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(encoded_cache, "LEAST", 100)
    monkeypatch.setenv("ZERO_MPI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def encoded(monkeypatch):
    """How many texts were encoded."""
    count = []
    encode = ByteTokenizer.encode_batch

    def counted(self, texts, **named):
        count.append(len(texts))
        return encode(self, texts, **named)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", counted)
    return lambda: sum(count)


def ids(stream):
    return (stream.ids.held() if isinstance(stream.ids, TokenSpans) else stream.ids).tolist()


def texts(folder):
    for number in range(5):
        put(folder / f"{number}.txt", f"text {number} " * (20 + number))
    return folder


def test_what_was_encoded_is_found_again(cache, encoded, tmp_path, monkeypatch):
    folder = texts(tmp_path / "texts")
    first = load(folder, val_fraction=0.2)
    assert encoded() == 5
    again = load(folder, val_fraction=0.2)
    assert encoded() == 5
    assert isinstance(again.train.ids, TokenSpans)
    monkeypatch.setattr(token_spans, "MOST_HELD", 0)
    assert again.train.nbytes == again.train.ends.nbytes
    monkeypatch.setattr(encoded_cache, "LEAST", 1 << 30)
    held = load(folder, val_fraction=0.2)
    for each in (first, again):
        assert (ids(each.train), ids(each.val)) == (ids(held.train), ids(held.val))
        assert each.train.ends.tolist() == held.train.ends.tolist()
        assert (each.sha256, each.notes, each.documents) == (held.sha256, held.notes, held.documents)


def test_another_text_or_reading_is_encoded_anew(cache, encoded, tmp_path):
    folder = texts(tmp_path / "texts")
    load(folder)
    put(folder / "0.txt", "another text " * 20)
    load(folder)
    assert encoded() == 10
    load(folder / "0.txt", any_bytes=True)
    load(folder / "0.txt")
    assert encoded() == 12
    assert len(list(cache.iterdir())) == 4


@pytest.mark.parametrize("harm", ["cut", "empty", "no ids"])
def test_an_entry_that_is_not_sound_is_made_anew(harm, cache, encoded, tmp_path):
    folder = texts(tmp_path / "texts")
    wanted = ids(load(folder).train)
    (entry,) = cache.iterdir()
    about = (entry / "about.json").read_text()
    if harm == "no ids":
        (entry / "ids.bin").unlink()
    else:
        (entry / "about.json").write_text(about[: len(about) // 2 if harm == "cut" else 0])
    assert ids(load(folder).train) == wanted
    assert encoded() == 10
    assert ids(load(folder).train) == wanted
    assert encoded() == 10


def test_where_nothing_can_be_kept_text_is_held(cache, encoded, tmp_path, monkeypatch):
    folder = texts(tmp_path / "texts")
    put(tmp_path / "a file", "")
    monkeypatch.setenv("ZERO_MPI_CACHE", str(tmp_path / "a file"))
    assert isinstance(load(folder).train.ids, np.ndarray)
    for name in ("ZERO_MPI_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(load(folder).train.ids, np.ndarray)


def test_text_that_changes_while_it_is_read_is_refused(cache, tmp_path, monkeypatch):
    folder = texts(tmp_path / "texts")
    encode = ByteTokenizer.encode_batch

    def changes(self, given, **named):
        put(folder / "0.txt", f"{time.time()} " * 30)
        return encode(self, given, **named)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", changes)
    with pytest.raises(UsageError, match="--data changed while it was read: start again"):
        load(folder)
    assert not list(cache.iterdir())


def test_what_nobody_uses_goes(cache, tmp_path):
    load(texts(tmp_path / "texts"))
    (entry,) = cache.iterdir()
    os.utime(entry, (0, 0))
    load(put(tmp_path / "other.txt", "other " * 50))
    assert not entry.exists()
    assert len(list(cache.iterdir())) == 1
