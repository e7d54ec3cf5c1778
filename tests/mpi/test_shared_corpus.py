"""Every rank has the corpus of rank 0: in memory if it is small, otherwise in files that all ranks see."""

import numpy as np
import pytest
from corpora import load_corpus

from zero_mpi.data import documents
from zero_mpi.data.documents import TokenSpans
from zero_mpi.train import setup
from zero_mpi.train.setup import share_corpus


@pytest.fixture
def shared_file(tmp_path, mpi):
    path = mpi.broadcast_object(str(tmp_path / "ids.npy") if mpi.rank == 0 else None)
    if mpi.rank == 0:
        np.save(path, np.arange(5000, dtype=np.uint16) % 250)
    mpi.barrier()
    return path


def shared(mpi, path):
    corpus, notes = None, list[str]()
    if mpi.rank == 0:
        corpus = load_corpus([path], val_fraction=0.1, context=8, seed=0, tokenizer=None, vocab_size=250)
    copy = share_corpus(mpi, corpus, notes)
    return copy.train.ids, copy.val.ids, notes


def values(ids):
    return (ids.read_all() if isinstance(ids, TokenSpans) else ids).tolist()


@pytest.mark.parametrize(("least", "kind"), [(1 << 24, np.ndarray), (0, TokenSpans)])
def test_all_ranks_have_the_text(least, kind, shared_file, mpi, monkeypatch):
    monkeypatch.setattr(documents, "MOST_HELD", least)
    train, val, notes = shared(mpi, shared_file)
    assert (type(train), notes) == (kind, [])
    assert values(train) + values(val) == [i % 250 for i in range(5000)]


@pytest.mark.world(2, 3, 4, 8)
def test_where_a_rank_does_not_see_the_file_all_hold_it(shared_file, mpi, monkeypatch):
    monkeypatch.setattr(documents, "MOST_HELD", 0)
    if mpi.rank == mpi.size - 1:
        monkeypatch.setattr(setup, "files_digest", lambda in_files: "another one")
    train, val, notes = shared(mpi, shared_file)
    assert type(train) is np.ndarray
    assert values(train) + values(val) == [i % 250 for i in range(5000)]
    assert f"rank {mpi.size - 1} on " in notes[0]
    assert "0 MiB" in notes[0]
