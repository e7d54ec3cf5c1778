"""Tests of byte-level BPE from GGUF keys: ids, bytes, pieces of long texts, refused keys."""

import json

import bpe_files
import numpy as np
import pytest
from corpora import load_corpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zero_mpi.data import BPETokenizer, document_reader, tokenizer_from_json, tokenizer_from_metadata
from zero_mpi.data.tokenizers import bpe
from zero_mpi.data.tokenizers.byte import byte_characters
from zero_mpi.data.tokenizers.gguf_tokenizer import CONTROL
from zero_mpi.errors import UsageError

pytest.importorskip("tokenizers", reason="the package tokenizers is not installed", exc_type=ImportError)

TEXTS = [*bpe_files.TEXTS, *bpe_files.random_texts(40)]
BYTES = byte_characters()
# "he", "ll", "hell", "hello"; then a control token, a user-defined token, an unused token
TOKENS = [*BYTES, "he", "ll", "hell", "hello", "<|im_end|>", "<mark>", "[PAD262]"]
MERGES = ["h e", "l l", "he ll", "hell o"]
TYPES = [1] * 260 + [3, 4, 5]
KEYS = bpe_files.keys_of(
    TOKENS, MERGES, types=TYPES, eos_token_id=np.uint32(260), bos_token_id=np.uint32(260)
)
SMALL = BPETokenizer(KEYS)


@pytest.fixture(scope="module", params=bpe_files.KINDS)
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return tokenizer_from_json(bpe_files.write_json(folder, bpe_files.trained_json(request.param)))


def test_words_are_merged_and_special_tokens_are_text_unless_asked_for():
    text = "hello <|im_end|><mark>"
    plain = SMALL.encode(text).tolist()
    assert plain == [259, *b" <|im_end|>", 261]
    assert SMALL.encode(text, special=True).tolist() == [259, 32, 260, 261]
    assert SMALL.decode(plain) == text.encode()
    assert SMALL.decode([259, 260, 262, 261]) == b"hello<mark>", "control and unused tokens have no text"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\xffb", "a\ufffdb"),
        (b"\xe4\xbdhello", "\ufffd\ufffdhello"),  # an incomplete character: one U+FFFD per byte
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        (b"\xf0\x9f\x98", "\ufffd\ufffd\ufffd"),
        ("a\udcffb", "a\ufffdb"),  # a byte as a surrogate in a string
        ("\udcc3\udca9", "é"),
    ],
)
def test_a_byte_that_is_not_utf8_becomes_the_replacement_character(data, text):
    assert SMALL.decode(SMALL.encode(data)).decode() == text


def test_ids_are_as_wide_as_the_vocabulary_needs():
    assert SMALL.encode("hello").dtype == np.uint16
    for size, dtype in ((1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)):
        tokens = [*BYTES, "he", *(f"[PAD{i}]" for i in range(257, size))]
        tokenizer = BPETokenizer(bpe_files.keys_of(tokens, ["h e"]))
        assert (tokenizer.vocab_size, tokenizer.encode("he").dtype) == (size, dtype)
        assert tokenizer.encode("he!").tolist() == [256, 33]
        assert tokenizer.encode("").dtype == dtype


def test_every_text_comes_back(trained):
    for text in TEXTS:
        assert trained.decode(trained.encode(text)).decode() == text
        assert trained.encode(text.encode()).tolist() == trained.encode(text).tolist()
        assert trained.decode(trained.encode(text, special=True)) == without(trained, text).encode()


def without(tokenizer, text):
    for token, kind in zip(tokenizer.tokens, tokenizer.types, strict=True):
        text = text.replace(token, "") if kind == CONTROL else text
    return text


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    text=st.lists(st.sampled_from(TEXTS) | st.text(max_size=4), max_size=12).map("".join),
    size=st.integers(1, 9),
)
def test_pieces_have_the_ids_of_the_whole(trained, text, size):
    expected = trained.encode(text).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe.gguf, "PIECE", size)
        assert trained.encode(text).tolist() == expected


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize(
    "pre", ["qwen35", "tekken", "gpt-4o", "deepseek-llm", "deepseek-coder", "deepseek-v3"]
)
def test_pieces_of_each_splitting_have_the_ids_of_the_whole(pre, original, monkeypatch):
    rules = {"tokenizer.huggingface.rules": json.dumps({"original": original})}
    tokenizer = BPETokenizer(bpe_files.pair_keys(pre) | rules)
    texts = ["".join(bpe_files.mixed_texts(20, seed=seed)) for seed in range(30)]
    expected = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    monkeypatch.setattr(bpe.gguf, "PIECE", 3)
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected


@pytest.mark.parametrize(
    "text",
    ["a" * 50_000, "日本" * 20_000, "Zm9vYmFy+/4" * 5_000, "0123456789" * 5_000],
    ids=lambda text: text[:3],
)
def test_of_a_long_line_little_is_encoded_at_once(text, trained, monkeypatch):
    """Long texts are split, because the library needs 70 to 300 bytes per character."""
    sizes, encoder = [], trained._encoder
    monkeypatch.setattr(bpe, "_WINDOW", 4000)
    monkeypatch.setattr(bpe, "_OVERLAP", 512)

    class Seen:
        def encode(self, text, **options):
            sizes.append(len(text))
            return encoder.encode(text, **options)

        def encode_batch_fast(self, texts, **options):
            sizes.append(sum(map(len, texts)))
            return encoder.encode_batch_fast(texts, **options)

    (expected,) = encoder.encode_batch_fast([text], add_special_tokens=False)
    monkeypatch.setitem(trained.__dict__, "_encoder", Seen())
    assert trained.encode(text).tolist() == expected.ids
    assert max(sizes) == 4000


def test_a_prompt_begins_with_bos_where_the_file_asks_for_it():
    assert SMALL.encode_prompt("hello<|im_end|>").tolist() == [259, 260]
    with_bos = BPETokenizer(KEYS | {"tokenizer.ggml.add_bos_token": True})
    assert with_bos.encode_prompt("hello").tolist() == [260, 259]
    assert with_bos.encode("hello").tolist() == [259], "a document has no BOS"
    llama = KEYS | {"tokenizer.ggml.pre": "llama-bpe"}
    assert BPETokenizer(llama).encode_prompt("hello").tolist() == [260, 259], "as in llama.cpp"
    without_bos = BPETokenizer(llama | {"tokenizer.ggml.add_bos_token": False})
    assert without_bos.encode_prompt("hello").tolist() == [259]


def test_an_empty_prompt_becomes_the_edge_of_a_document():
    ids = {"tokenizer.ggml.eos_token_id": np.uint32(256), "tokenizer.ggml.bos_token_id": np.uint32(257)}
    assert BPETokenizer(KEYS | ids).encode_prompt("").tolist() == [256]
    assert BPETokenizer(KEYS | ids | {"tokenizer.ggml.eos_token_id": None}).encode_prompt("").tolist() == [
        257
    ]
    nulls = dict.fromkeys(ids)
    assert BPETokenizer(KEYS | nulls).encode_prompt("").tolist() == []


def test_a_token_that_ends_texts_is_a_control_token_whatever_its_type():
    tokenizer = BPETokenizer(KEYS | {"tokenizer.ggml.token_type": np.array([1] * 260 + [4, 4, 5], np.int32)})
    assert tokenizer.encode("<|im_end|>").tolist() == list(b"<|im_end|>")
    assert tokenizer.decode([260]) == b""


@pytest.mark.parametrize(
    ("model", "found"), [("bert", "the tokenizer 'bert'"), ("none", "no tokenizer"), (None, "no tokenizer")]
)
def test_another_kind_is_refused_with_the_way_out(model, found):
    with pytest.raises(UsageError, match=f"the model file has {found}, .*token files for --data"):
        tokenizer_from_metadata(KEYS | {"tokenizer.ggml.model": model})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "kimi-k2"}, "has tokenizer.ggml.pre 'kimi-k2', expected one of gpt-2, .* token files"),
        ({"tokens": [*TOKENS[:-1], "he"]}, "tokens: expected each token once, found 'he' again"),
        ({"token_type": np.array([1, 2], np.int32)}, "token_type: expected an array of 263 whole numbers"),
        ({"merges": ["he"]}, "merges: expected two parts of a token .* found 'he'"),
        ({"eos_token_id": np.uint32(263)}, "eos_token_id: expected an id below 263, found .*263"),
        ({"add_bos_token": True, "bos_token_id": None}, "asks for a bos token and names none"),
    ],
)
def test_keys_that_do_not_fit_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        BPETokenizer(KEYS | {f"tokenizer.ggml.{name}": value for name, value in change.items()})


def test_an_empty_token_has_llama_cpps_name():
    tokenizer = BPETokenizer(KEYS | {"tokenizer.ggml.tokens": [*TOKENS[:-1], ""]})
    assert tokenizer.tokens[262] == "[EMPTY_262]"


def corpus_of(folder, tokenizer, **changes):
    options = {"val_fraction": 0.0, "context": 4, "seed": 0, "vocab_size": 300, "control_tokens": "plain"}
    return load_corpus([str(folder)], tokenizer=tokenizer, **(options | changes))


@pytest.fixture
def documents(tmp_path):
    for name, text in {"a": "hello <|im_end|>", "b": "<mark>hell", "c": "", "d": "hello"}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("group", [1, 20, 1 << 23])
def test_documents_are_encoded_whole_with_eos_behind_each(documents, group, monkeypatch):
    monkeypatch.setattr(document_reader, "_ENCODED", group)
    corpus = corpus_of(documents, SMALL)
    expected = [259, *b" <|im_end|>", 260, 261, 258, 260, 259, 260]
    assert (corpus.train.ids.tolist(), corpus.train.ids.dtype) == (expected, np.uint16)
    assert (corpus.documents, corpus.notes) == (3, ())


def test_without_eos_a_bos_stands_between_documents_and_without_both_a_note_says_so(documents):
    keys = KEYS | {"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.bos_token_id": np.uint32(33)}
    assert corpus_of(documents, BPETokenizer(keys)).train.ids.tolist()[-2:] == [259, 33]
    corpus = corpus_of(documents, BPETokenizer(keys | {"tokenizer.ggml.bos_token_id": None}))
    assert corpus.train.ids.tolist() == [259, *b" <|im_end|>", 261, 258, 259]
    (note,) = corpus.notes
    assert "neither EOS nor BOS" in note
