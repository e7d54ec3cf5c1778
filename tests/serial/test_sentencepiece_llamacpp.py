"""SentencePiece tokenizers give llama.cpp's ids for text in many scripts.

llama.cpp tokenizes in its web server on the loopback interface; a tiny model with random weights holds the
vocabularies. The tests are skipped if the `xllamacpp` wheel is not installed.
"""

from pathlib import Path
from typing import Any

import bpe_files
import numpy as np
import pytest
import sentencepiece_files as files
from bpe_files import write_model
from oracles import llama_cpp, open_server, tokenize

from zero_mpi.data import Tokenizer, tokenizer_from_metadata

llama_cpp()  # skips the module without llama.cpp
pytest.importorskip("tokenizers", reason="the package tokenizers is not installed", exc_type=ImportError)

SOME = 400
KINDS: dict[str, Any] = {
    "merges": files.merged,
    "merges of few scores": lambda: files.merged(levels=7),
    "merges over words": lambda: files.over_words(files.merged()),
    "merges, no space before": lambda: files.merged(add_space_prefix=False, add_bos_token=False),
    "unigram": files.likely,
    "unigram, space before": lambda: files.likely(add_space_prefix=True),
    "unigram, spaces removed": lambda: files.likely(remove_extra_whitespaces=True, add_space_prefix=True),
    "unigram, charsmap": lambda: files.likely(precompiled_charsmap=files.charsmap()),
    "unigram like t5": lambda: files.likely(
        remove_extra_whitespaces=True, add_space_prefix=True, precompiled_charsmap=files.charsmap()
    ),
    "unigram over words": lambda: files.over_words(files.likely(add_space_prefix=True)),
}


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    keys = KINDS[request.param]()
    path = tmp_path_factory.mktemp("vocabulary") / "model.gguf"
    return open_server(write_model(path, keys)), tokenizer_from_metadata(keys)


def assert_same(server: Any, tokenizer: Tokenizer, text: str) -> None:
    """Compare the ids of a document as plain text and with its control tokens parsed."""
    assert tokenizer.encode(text).tolist() == tokenize(server, text, parse_special=False), repr(text)
    expected = tokenize(server, text, parse_special=True)
    assert tokenizer.encode(text, special=True).tolist() == expected, repr(text)


def test_the_ids_of_fuzzed_text_are_llama_cpps(both, quick):
    for text in files.fuzzed(SOME // 4 if quick else SOME):
        assert_same(*both, text)


def test_the_ids_of_texts_of_many_scripts_are_llama_cpps(both):
    for text in [*bpe_files.TEXTS, *bpe_files.random_texts(40), Path(__file__).read_text()]:
        assert_same(*both, text)


def test_prompts_begin_as_llama_cpp_begins_them(both):
    """llama.cpp adds EOS to prompts of a unigram model; our prompts have none."""
    server, tokenizer = both
    for text in files.fuzzed(50, seed=2):
        expected = tokenize(server, text, parse_special=True, add_special=True)
        if tokenizer.metadata()["tokenizer.ggml.model"] == "t5":
            assert expected.pop() == tokenizer.eos
        assert tokenizer.encode_prompt(text).tolist() == (expected or [tokenizer.eos])


def test_white_space_behind_tokens_of_phi_3_is_left_out(tmp_path):
    keys = files.merged() | {"general.name": "Phi 3 Mini (phi-3)"}
    server, tokenizer = open_server(write_model(tmp_path / "model.gguf", keys)), tokenizer_from_metadata(keys)
    text = "<|user|>\n  Hello <s> you </s> \n\t<|tool|> \u00a0x<|user|> \n<|user|>\n"
    assert_same(server, tokenizer, text)
    plain = tokenizer_from_metadata(files.merged()).encode(text, special=True)
    assert len(plain) > len(tokenizer.encode(text, special=True)), "the name must change the ids"
    twin = tokenizer_from_metadata(tokenizer.metadata())
    assert twin.encode(text, special=True).tolist() == tokenizer.encode(text, special=True).tolist()
    [(ids, lengths)] = tokenizer.encode_with_lengths([text])
    assert (ids.tolist(), lengths.sum()) == (tokenize(server, text, parse_special=True), len(text.encode()))


def test_a_letter_without_tokens_for_its_bytes_is_unknown(tmp_path):
    """llama.cpp rejects this text; we give the unknown token, as SentencePiece does."""
    keys = files.merged()
    tokens = keys["tokenizer.ggml.tokens"]
    tokens[tokens.index("<0xF0>")] = "no byte"
    tokenizer = tokenizer_from_metadata(keys)
    ids = tokenizer.encode("\U0001f9ff").tolist()
    assert [tokens[i] for i in ids] == ["▁", "<unk>", "<0x9F>", "<0xA7>", "<0xBF>"]
    assert np.unique(ids).size == len(ids)
