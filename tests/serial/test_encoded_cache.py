"""Tests of the cache of encoded texts: reuse, damage, interruption."""

import functools
import json
import os
import time

import bpe_files
import numpy as np
import pytest
import sentencepiece_files
from chat_templates import CHATML
from corpora import load_corpus
from test_corpus import load, put

from zero_mpi.data import ByteTokenizer, collect_files, documents, encoded_cache, tokenizer_from_metadata
from zero_mpi.data.documents import Remark, TokenSpans
from zero_mpi.data.encoded_cache import Batches
from zero_mpi.data.tokenizers import bpe, sentencepiece
from zero_mpi.data.tokenizers.byte import byte_characters
from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import TEMPLATE


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(encoded_cache, "LEAST", 100)
    monkeypatch.setenv("ZERO_MPI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def encoded(monkeypatch):
    count = []
    encode = ByteTokenizer.encode_batch

    def counted(self, texts, **options):
        count.append(len(texts))
        return encode(self, texts, **options)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", counted)
    return lambda: sum(count)


def ids(stream):
    return (stream.ids.read_all() if isinstance(stream.ids, TokenSpans) else stream.ids).tolist()


def texts(folder):
    for number in range(5):
        put(folder / f"{number}.txt", f"text {number} " * (20 + number))
    return folder


def test_what_was_encoded_is_found_again(cache, encoded, tmp_path, monkeypatch):
    folder = texts(tmp_path / "texts")
    first = load(folder, val_fraction=0.2)
    assert encoded() == 5
    second = load(folder, val_fraction=0.2)
    assert encoded() == 5
    assert isinstance(second.train.ids, TokenSpans)
    monkeypatch.setattr(documents, "MOST_HELD", 0)
    assert second.train.nbytes == second.train.ends.nbytes
    monkeypatch.setattr(encoded_cache, "LEAST", 1 << 30)
    cold = load(folder, val_fraction=0.2)
    for copy in (first, second):
        assert (ids(copy.train), ids(copy.val)) == (ids(cold.train), ids(cold.val))
        assert copy.train.ends.tolist() == cold.train.ends.tolist()
        assert (copy.sha256, copy.notes, copy.documents) == (cold.sha256, cold.notes, cold.documents)


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


def about(**changes):
    """Return a function that changes keys of the record; None removes a key."""
    return lambda content: json.dumps(
        {k: v for k, v in (json.loads(content) | changes).items() if v is not None}
    )


HARMS = {  # damage -> (file of a cache entry, function that changes the file's content)
    "ids of zeros": ("ids.bin", lambda ids: bytes(len(ids))),
    "a bit of an id": ("ids.bin", lambda ids: ids[:-1] + bytes([ids[-1] ^ 1])),
    "fewer ids": ("ids.bin", lambda ids: ids[:-2]),
    "more ids": ("ids.bin", lambda ids: ids + b"\0\0"),
    "no ids": ("ids.bin", None),
    "counts of text": ("counted.bin", lambda counts: b"\1"),
    "no counts": ("counted.bin", None),
    "other digests": ("about.json", about(sha256={})),
    "nothing said": ("about.json", None),
    "half": ("about.json", lambda content: content[: len(content) // 2]),
}


@pytest.mark.parametrize("harm", HARMS)
def test_an_entry_that_is_not_sound_is_made_anew(harm, cache, encoded, tmp_path):
    folder = texts(tmp_path / "texts")
    digest = load(folder).sha256  # the first load encodes the documents
    (entry,) = cache.iterdir()
    name, change = HARMS[harm]
    content = (entry / name).read_bytes()
    if change is None:
        (entry / name).unlink()
    else:
        harmed = change(content)
        (entry / name).write_bytes(harmed.encode() if isinstance(harmed, str) else harmed)
    for _ in range(2):
        result = load(folder)
        assert (result.sha256, result.notes, encoded()) == (digest, (), 10)
    assert (entry / name).read_bytes() == content


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

    def changes(self, batch, **options):
        put(folder / "0.txt", f"{time.time()} " * 30)
        return encode(self, batch, **options)

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


@pytest.fixture
def batches(monkeypatch):
    """Return the sizes of encoded batches, and the number of the interrupted batch."""
    seen, ends_at, call = [], [None], Batches.__call__

    def watched(self, pieces, encode):
        @functools.wraps(encode)
        def run(pieces):
            if len(seen) == ends_at[0]:
                raise KeyboardInterrupt
            seen.append(sum(map(len, pieces)))
            return encode(pieces)

        return call(self, pieces, run)

    monkeypatch.setattr(Batches, "__call__", watched)
    monkeypatch.setattr(bpe, "_BATCH", 200)
    monkeypatch.setattr(bpe.gguf, "PIECE", 50)
    monkeypatch.setattr(bpe, "_WINDOW", 400)
    monkeypatch.setattr(bpe, "_OVERLAP", 100)
    monkeypatch.setattr(sentencepiece, "_BATCH", 4)
    return seen, ends_at


def bpe_keys():
    tokens = [*byte_characters(), "he", "ll", "hell", "hello", "<|im_end|>"]
    keys = bpe_files.keys_of(tokens, ["h e", "l l", "he ll", "hell o"], types=[1] * 260 + [3])
    return keys | {"tokenizer.ggml.eos_token_id": np.uint32(260), TEMPLATE: CHATML}


KINDS = {"bpe": bpe_keys, "merges": sentencepiece_files.merged, "unigram": sentencepiece_files.likely}
CASES = [(kind, form) for kind in KINDS for form in ("one document", "documents")]
CASES += [("bpe", "no seams"), ("bpe", "conversations")]


def data(folder, form):
    if form == "conversations":
        question, answer = {"role": "user", "content": "hello"}, {"role": "assistant"}
        lines = ({"messages": [question, answer | {"content": f"hell {n} " * 90}]} for n in range(20))
        return put(folder / "a.jsonl", "\n".join(map(json.dumps, lines)))
    if form == "documents":
        for number in range(40):
            put(folder / f"{number}.txt", f"hello {number} " * 15)
        return folder
    word = "hellohe{}!!" if form == "no seams" else "hello <|im_end|> {} "
    return put(folder / "a.txt", "".join(map(word.format, range(500))))


def corpus(path, kind, **changes):
    tokenizer = tokenizer_from_metadata(KINDS[kind]())
    options = {"val_fraction": 0.0, "context": 4, "seed": 0, "vocab_size": tokenizer.vocab_size}
    return load_corpus([str(path)], tokenizer=tokenizer, **options, **changes)


def test_a_cached_start_says_the_same_of_conversations(cache, tmp_path):
    """Cached conversations give the same notes; --skip-bad is part of the name of a cache entry."""
    path = data(tmp_path / "data", "conversations")
    path.write_text(path.read_text() + "\n{broken")
    first, second = (corpus(path, "bpe", skip_bad=True) for _ in range(2))
    assert first.notes == second.notes
    assert len(list(cache.iterdir())) == 1
    assert [isinstance(note, Remark) for note in second.notes] == [True, True, False]
    with pytest.raises(UsageError, match=r"a\.jsonl, line 21: "):
        corpus(path, "bpe")


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_encoding_goes_on_where_it_was_ended(kind, form, cache, batches, tmp_path):
    seen, ends_at = batches
    path = data(tmp_path / "data", form)
    expected = ids(corpus(path, kind, batches=Batches(uses_cache=False)).train)
    number = len(seen)
    assert number > 8
    seen.clear()
    ends_at[0] = number // 2
    with pytest.raises(KeyboardInterrupt):
        corpus(path, kind)
    assert len(seen) == number // 2
    (store,) = cache.iterdir()
    first, *_, last = sorted(store.iterdir())
    content = first.read_bytes()
    first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    last.unlink()
    ends_at[0] = None
    actual = corpus(path, kind)
    assert ids(actual.train) == expected
    assert len(seen) <= number + 2, "only damaged batches are encoded again"
    (entry,) = cache.iterdir()
    assert (entry / "ids.bin").exists()


@pytest.mark.parametrize(("kind", "form"), CASES)
@pytest.mark.parametrize("cached", [True, False])
def test_each_batch_and_file_is_a_sign_of_life(kind, form, cached, cache, batches, tmp_path):
    seen, _ = batches
    path, beats = data(tmp_path / "data", form), []
    corpus(path, kind, batches=Batches(lambda: beats.append(len(seen)), cached))
    assert set(range(len(seen))) <= set(beats), "one before each batch"
    assert len(beats) >= len(seen) + cached * len(collect_files([str(path)]))


def test_what_a_killed_job_left_goes_after_a_day(cache, tmp_path):
    for name, age in (("new-old", 2), ("new-young", 0)):
        file = put(cache / name / "ids.bin", "x")
        os.utime(file, (time.time() - age * 86400,) * 2)
    load(texts(tmp_path / "texts"))
    assert {path.name for path in cache.glob("new-*")} == {"new-young"}
