"""SentencePiece tokenizers from GGUF keys restore texts, give equal ids in chunks, and refuse faulty keys."""

import os
import pickle
import subprocess
import sys

import bpe_files
import numpy as np
import pytest
import sentencepiece_files as files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zero_mpi.data import tokenizer_from_metadata
from zero_mpi.data.tokenizers import sentencepiece
from zero_mpi.errors import FileError, UsageError

pytest.importorskip("tokenizers", reason="the package tokenizers is not installed", exc_type=ImportError)

TEXTS = [*bpe_files.TEXTS, *files.fuzzed(60)]
MAKERS = {"merges": files.merged, "unigram": lambda: files.likely(add_space_prefix=True)}
MAKERS |= {f"{name}, over words": lambda make=make: files.over_words(make()) for name, make in MAKERS.items()}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request):
    return tokenizer_from_metadata(MAKERS[request.param]())


@pytest.fixture(scope="module")
def merges():
    return tokenizer_from_metadata(files.merged())


# ids and bytes


def test_every_text_comes_back_by_merges(merges):
    for text in TEXTS:
        decoded = merges.decode(merges.encode(text)).decode()
        parts = [part for part in merges._standing[False].cut(text.replace("▁", " ")) if part]
        if "▁" not in text and "<unk>" not in text:  # "▁" became a space, and <unk> has no spelling
            assert decoded == "".join(merges.tokens[p] if isinstance(p, int) else " " + p for p in parts)


def test_many_documents_have_the_ids_of_each(tokenizer):
    batch = tokenizer.encode_batch(TEXTS, special=True)
    for text, ids in zip(TEXTS, batch, strict=True):
        assert (ids.tolist(), ids.dtype) == (tokenizer.encode(text, special=True).tolist(), np.uint16)
    assert tokenizer.encode_batch([]) == []


@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_and_threads_have_the_ids_of_the_whole(tokenizer, threads, monkeypatch):
    expected = [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(threads))
    for size in (1, 7, 100):
        monkeypatch.setattr(sentencepiece.gguf, "PIECE", size)
        assert [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)] == expected


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.lists(st.sampled_from(TEXTS) | st.text(max_size=4), max_size=12).map("".join))
def test_lengths_are_those_of_the_text(merges, text):
    text = text.encode("utf-8", "replace").decode()
    [(ids, lengths)] = merges.encode_with_lengths([text])
    assert ids.tolist() == merges.encode(text, special=True).tolist()
    assert (lengths.sum(), len(lengths)) == (len(text.encode()), len(ids))


def test_tokens_are_spelt_by_their_types():
    names = ["<unk>", "<s>", "</s>", "▁a▁b", "▁c", "<0xC3>", "<0xZZ>", "d"]
    tokens = list(zip(names, (2, 3, 3, 1, 4, 6, 6, 5), strict=True))
    model = tokenizer_from_metadata(files.keys_of("llama", tokens, np.zeros(8)))
    assert [model.decode([i]) for i in range(8)] == [b"", b"", b"", b" a b", "▁c".encode(), b"\xc3", b"", b""]
    with pytest.raises(ValueError, match="id 8 is outside the vocabulary of 8"):
        model.decode([8])


def test_the_same_loops_run_in_the_interpreter(tmp_path):
    both = [files.merged(), files.likely(precompiled_charsmap=files.charsmap())]
    (tmp_path / "keys").write_bytes(pickle.dumps(both))
    program = """if True:
        import pickle, sys
        sys.modules["numba"] = None
        import sentencepiece_files as files
        from zero_mpi.data import tokenizer_from_metadata
        from zero_mpi.data.tokenizers import segmentation
        assert segmentation.numba is None
        for keys in pickle.load(open(sys.argv[1], "rb")):
            print([ids.tolist() for ids in tokenizer_from_metadata(keys).encode_batch(files.fuzzed(30))])
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(tmp_path / "keys")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    batches = [tokenizer_from_metadata(keys).encode_batch(files.fuzzed(30)) for keys in both]
    assert done.stdout.splitlines() == [str([ids.tolist() for ids in each]) for each in batches]


# refused keys


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scores": np.zeros(3, np.float32)}, FileError, "scores.*: expected an array of .* finite float32"),
        ({"scores": "many"}, FileError, "expected an array of .* finite float32 numbers, found 'many'"),
        ({"unknown_token_id": np.uint32(10**6)}, FileError, "unknown_token_id.*expected an id below"),
        ({"add_space_prefix": 1}, FileError, "add_space_prefix.*: expected true or false, found 1"),
    ],
)
def test_keys_that_do_not_fit_are_refused(change, error, message):
    for keys in (files.merged(), files.likely()):
        changed = keys | {f"tokenizer.ggml.{name}": value for name, value in change.items()}
        with pytest.raises(error, match=message):
            tokenizer_from_metadata(changed)


def test_a_unigram_model_without_an_unknown_token_is_refused():
    with pytest.raises(UsageError, match="names no unknown token"):
        sentencepiece.UnigramTokenizer(files.keys_of("t5", [("a", 1), ("b", 1)], [0, 0]))
