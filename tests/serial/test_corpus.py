"""Tests of corpora: accepted, held-out and refused files, and the hash."""

import math
import os
import re
from hashlib import sha256

import numpy as np
import pytest
from corpora import load_corpus

from zero_mpi.data import ByteTokenizer, collect_files, text_files, unigram_entropy
from zero_mpi.data import corpus as corpus_module
from zero_mpi.errors import UsageError

TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos


def load(*paths, val_paths=(), **options):
    settings = {"val_fraction": 0.0, "context": 4, "seed": 0, "tokenizer": TOKENIZER, "vocab_size": 260}
    settings |= {"any_bytes": False, "val_paths": list(map(str, val_paths))}
    return load_corpus(list(map(str, paths)), **settings | options)


def write(root, **files):
    for name, content in files.items():
        put(root / name.replace("__", "/"), content)
    return root


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def many(root, count=40, size=50):
    return write(root, **{f"d{i:02}": bytes([i + 1]) * size for i in range(count)})


def documents_of(tokens):
    return set(np.unique(tokens).tolist()) - {EOS}


def test_folders_are_read_in_order_of_name_and_hidden_files_skipped(tmp_path):
    write(tmp_path, b="1", a__z="2", a__c__x="3", B="4", a0="5")
    for hidden in (".git/config", "a/.hidden", "a/.cache/x"):
        put(tmp_path / hidden, "no")
    assert [name for name, _ in collect_files([str(tmp_path)])] == ["B", "a/c/x", "a/z", "a0", "b"]
    assert all(path == tmp_path / name for name, path in collect_files([str(tmp_path)]))


def test_files_come_as_given_and_hidden_ones_too_if_named(tmp_path):
    write(tmp_path, b="1", a="2", sub__c="3")
    paths = [str(tmp_path / name) for name in ("sub/c", "b", "a")]
    assert [name for name, _ in collect_files(paths)] == ["c", "b", "a"]
    hidden = put(tmp_path / ".secret" / ".x", "4")
    assert [name for name, _ in collect_files([str(hidden)])] == [".x"]
    assert collect_files([str(hidden.parent)]) == []


def test_a_file_reached_twice_is_taken_once(tmp_path):
    write(tmp_path, a="1", b="2")
    (tmp_path / "c").symlink_to(tmp_path / "a")
    names = [name for name, _ in collect_files([str(tmp_path / "b"), str(tmp_path), str(tmp_path / "b")])]
    assert names == ["b", "a"]


def test_linked_folders_are_followed_and_loops_end(tmp_path):
    outside = write(tmp_path / "outside", x="1")
    inside = write(tmp_path / "inside", y="2")
    (inside / "loop").symlink_to(inside)
    (inside / "link").symlink_to(outside)
    assert [name for name, _ in collect_files([str(inside)])] == ["link/x", "y"]
    (inside / "broken").symlink_to(tmp_path / "nowhere")  # as in an incomplete cache of Hugging Face
    with pytest.raises(UsageError, match=r"--data .*/broken "):
        collect_files([str(inside)])


def test_a_missing_path_and_a_pipe_are_named_and_a_pipe_in_a_folder_is_skipped(tmp_path):
    """Reading a pipe could wait forever, and only one rank could read it."""
    os.mkfifo(tmp_path / "pipe")
    assert collect_files([str(tmp_path)]) == []
    put(tmp_path / "here", "text")
    for name in ("nowhere.txt", "pipe"):
        with pytest.raises(UsageError, match=rf"--data .*/{name} "):
            load(tmp_path / "here", tmp_path / name)


def test_documents_are_bytes_each_closed_by_eos(tmp_path):
    write(tmp_path, a="hi", b=b"\xc3\xbf\r\n", c="")
    corpus = load(tmp_path)
    assert corpus.train.ids.tolist() == [*b"hi", EOS, *b"\xc3\xbf\r\n", EOS]
    assert corpus.train.ids.dtype == np.uint16
    assert (corpus.documents, corpus.val_documents, corpus.val.size, corpus.notes) == (2, 0, 0, ())


def test_binary_files_of_a_folder_are_left_out_and_counted(tmp_path):
    write(tmp_path, a="text " * 9, b=b"x\0y", c=b"z" * 8191 + b"\0", d=b"late" * 2048 + b"\0")
    corpus = load(tmp_path)
    assert corpus.documents == 2
    assert "2 (b: binary data, c: binary data)" in corpus.notes[0]
    assert corpus.train.ids[-2] == 0  # bytes beyond the first 8 KiB are not checked


def test_a_binary_file_that_the_user_names_is_refused_unless_bytes_are_asked_for(tmp_path):
    """--tokenizer byte reads binary files that are named, but skips binary files in folders."""
    write(tmp_path, a="text", b=b"x\0y", c=b"\x1f\x8b\x08")
    for paths in ([tmp_path / "b"], [tmp_path, tmp_path / "b"]):
        with pytest.raises(UsageError, match=r"--data .*/b "):
            load(*paths)
    corpus = load(tmp_path / "b", context=3, any_bytes=True)
    assert corpus.train.ids.tolist() == [*b"x\0y", EOS]
    assert "(--tokenizer byte): 1 (b: " in corpus.notes[0]
    assert load(tmp_path, tmp_path / "b", any_bytes=True).documents == 2


def test_text_in_another_encoding_is_taken_and_told(tmp_path):
    """Latin-1 text is accepted with a caution, wherever its first non-ASCII byte is."""
    write(tmp_path, a="né".encode("latin-1") * 9, b="plain " * 9, c=b"x" * (3 << 20) + "é".encode("latin-1"))
    corpus = load(tmp_path)
    assert corpus.documents == 3
    (note,) = corpus.notes
    assert re.match(r"text that is not UTF-8.*: 2 \(a, c\); .*iconv", note)


def test_the_default_corpus_is_all_of_pythons_library(monkeypatch):
    """Python's files are not checked by kind, so a new check cannot change the corpus and its digest."""
    monkeypatch.setattr("zero_mpi.data.text_files.kind_of", lambda *_: pytest.fail("looked at"))
    corpus = load()
    assert corpus.documents == sum(path.stat().st_size > 0 for _, path in text_files.library_files())
    assert corpus.notes == ()


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.zeros(9, np.float32), "float32"),
        (np.zeros((3, 3), np.uint16), r"uint16 of shape \(3, 3\)"),
        (np.zeros(9, np.dtype(np.uint16).newbyteorder()), "[<>]u2"),
    ],
)
def test_other_arrays_are_refused_with_what_came(tmp_path, array, found):
    np.save(tmp_path / "ids.npy", array)
    with pytest.raises(UsageError, match=f"ids.npy: .*found {found}"):
        load(tmp_path / "ids.npy")


def test_text_and_token_files_are_not_mixed(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(9, dtype=np.uint16))
    write(tmp_path, a="text " * 9)
    for paths in ([tmp_path], [tmp_path / "a", tmp_path / "ids.npy"]):
        with pytest.raises(UsageError, match=r"not both: .*ids.npy is one, .*a is not"):
            load(*paths)


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.1, 0.33, 0.5, 0.9])
def test_whole_documents_are_held_out(tmp_path, fraction):
    corpus = load(many(tmp_path), val_fraction=fraction)
    train, val = documents_of(corpus.train.ids), documents_of(corpus.val.ids)
    assert train | val == set(range(1, 41))
    assert not train & val
    assert corpus.train.size + corpus.val.size == 40 * 51
    assert len(val) == corpus.val_documents == math.ceil(40 * fraction)
    assert corpus.train.size % 51 == corpus.val.size % 51 == 0
    assert corpus.notes == ()


def test_the_draw_depends_on_the_seed_alone_and_keeps_the_order(tmp_path):
    many(tmp_path)
    corpora = [load(tmp_path, val_fraction=0.2, seed=seed) for seed in (0, 0, 1, 2)]
    samples = [frozenset(documents_of(corpus.val.ids)) for corpus in corpora]
    assert samples[0] == samples[1]
    assert len(set(samples)) == 3
    for side in (corpora[0].train.ids, corpora[0].val.ids):
        assert np.all(np.diff(side[side != EOS].astype(int)) >= 0)
        assert side[-1] == EOS


@pytest.mark.parametrize("seed", range(8))
def test_a_giant_is_not_held_out_where_others_do(tmp_path, seed):
    write(tmp_path, **{f"d{i}": "s" * 99 for i in range(9)}, giant="g" * 9099)
    corpus = load(tmp_path, val_fraction=0.05, seed=seed)
    assert ord("g") not in corpus.val.ids
    assert corpus.val.size == 500


def test_of_a_single_document_the_tail_is_held_out(tmp_path):
    corpus = load(put(tmp_path / "a", bytes(range(1, 100))), val_fraction=0.101)
    assert corpus.train.ids.tolist() == list(range(1, 90))
    assert corpus.val.ids.tolist() == [*range(90, 100), EOS]
    assert (corpus.documents, corpus.val_documents, corpus.notes) == (1, 0, ())


def test_without_a_held_out_set_a_note_says_why(tmp_path):
    many(tmp_path / "many", count=10, size=3)
    corpus = load(tmp_path / "many", val_fraction=0.1)
    assert (corpus.val.size, corpus.train.size, corpus.val_documents) == (0, 40, 0)
    assert all(part in corpus.notes[0] for part in ("4 tokens", "--val-fraction", "--context"))
    corpus = load(put(tmp_path / "one", "abcd"), val_fraction=0.5)
    assert "2 tokens" in corpus.notes[0]
    assert corpus.train.ids.tolist() == [*b"abcd", EOS]
    corpus = load(tmp_path / "many", val_fraction=0)
    assert (corpus.val.size, corpus.train.size, corpus.notes) == (0, 40, ())


def test_a_single_window_is_enough_and_one_token_less_is_not(tmp_path):
    path = put(tmp_path / "a", "abcd")
    assert load(path, context=4, val_fraction=0.05).train.size == 5
    with pytest.raises(UsageError, match=r"^context 5 .*6 tokens.* 5"):
        load(path, context=5)


@pytest.mark.parametrize("files", [{}, {"a": "", "b": ""}, {"b": b"\0" * 99}, {"ids.npy": None}])
def test_data_without_text_or_tokens_are_named(tmp_path, files):
    for name, content in files.items():
        np.save(tmp_path / name, np.zeros(0, np.uint16)) if content is None else put(tmp_path / name, content)
    with pytest.raises(UsageError, match=f"--data .*{tmp_path}") as caught:
        load(tmp_path)
    assert files != {"b": b"\0" * 99} or ": 1" in str(caught.value)


def test_other_data_are_held_out_whole(tmp_path):
    paths, others = [write(tmp_path / name, a=name * 9, b="x" * 9) for name in ("some", "other")]
    corpus, plain = load(paths, val_paths=[others], val_fraction=0.5), load(paths)
    assert bytes(corpus.train.ids.tolist()[:9]) == b"somesomes"
    assert corpus.train.ids.tolist() == plain.train.ids.tolist(), "it must not be held out"
    assert corpus.val.ids.tolist() == load(others).train.ids.tolist()
    assert (corpus.documents, corpus.val_documents) == (4, 2)
    digests = {part.sha256 for part in (corpus, plain, load(paths, others), load(others, val_paths=[paths]))}
    assert len(digests) == 4


def test_other_data_must_have_a_window_and_a_text(tmp_path):
    folder = write(tmp_path, a="some text", b="xy", empty__c="", pdf="%PDF-1")
    for name, word in (("b", "3"), ("empty", "empty"), ("pdf", "pdf")):
        with pytest.raises(UsageError, match=f"--val-data.* {word}|--val-data.*/{word}"):
            load(folder / "a", val_paths=[folder / name])
    with pytest.raises(UsageError, match=f"--val-data {folder}/a=0.5 .*shares"):
        load(folder / "a", val_paths=[f"{folder}/a=0.5", f"{folder}/b=0.5"])


def test_the_hash_is_pinned_and_does_not_depend_on_place_split_or_context(tmp_path, monkeypatch):
    """The hash must never change, because checkpoints record it and a resume compares it."""
    monkeypatch.chdir(write(tmp_path, a="one " * 9, b__c="two " * 9))
    recipe = [(b"a", b"one " * 9), (b"b/c", b"two " * 9)]
    parts = [len(name).to_bytes(8, "little") + name + sha256(data).digest() for name, data in recipe]
    for corpus in (load(tmp_path), load("."), load(tmp_path, val_fraction=0.3, context=7, seed=5)):
        assert corpus.sha256 == sha256(b"".join(parts)).hexdigest()


def test_a_library_of_any_layout_is_cut_to_its_sources(tmp_path, monkeypatch):
    sources = ["a.py", "email/b.py", "testing.py"]
    folders = ("test", "lib2to3/tests", "idlelib/idle_test", "site-packages", "dist-packages", "__pycache__")
    others = [*(f"{folder}/x.py" for folder in folders), "a.pyc", "_sysconfigdata__linux.py", ".x.py"]
    for name in sources + others:
        put(tmp_path / name, "x = 1\n")
    monkeypatch.setattr(text_files, "stdlib_root", lambda: tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for _, path in text_files.library_files()] == sources


@pytest.mark.parametrize("block", [3, 1 << 20])
def test_the_entropy_of_a_unigram_model(monkeypatch, block):
    monkeypatch.setattr(corpus_module, "_BLOCK", block)
    assert str(unigram_entropy(np.array([7] * 9, np.uint16))) == "0.0"
    assert unigram_entropy(np.arange(64, dtype=np.uint32)[::-1]) == pytest.approx(math.log(64))
    tokens = np.array([300, 0, 0, 0], np.uint16)
    assert unigram_entropy(tokens) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert math.isnan(unigram_entropy(tokens[:0]))
