"""Tokenizers that would take excessive memory or time are refused."""

import tracemalloc

import bpe_files
import numpy as np
import pytest
import sentencepiece_files as files

from zero_mpi.data import tokenizer_from_metadata
from zero_mpi.data.tokenizers.byte import byte_characters
from zero_mpi.errors import FileError

pytest.importorskip("tokenizers", reason="the package tokenizers is not installed", exc_type=ImportError)

NORMAL, USER_DEFINED = 1, 4


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile the loops before memory is traced."""
    for make in (files.merged, files.likely):
        tokenizer_from_metadata(make(precompiled_charsmap=files.charsmap())).encode("ab")


def with_token(keys, token, kind=NORMAL):
    edited = keys | {"tokenizer.ggml.tokens": [*keys["tokenizer.ggml.tokens"], token]}
    edited["tokenizer.ggml.token_type"] = np.append(keys["tokenizer.ggml.token_type"], np.int32(kind))
    if "tokenizer.ggml.scores" in keys:
        edited["tokenizer.ggml.scores"] = np.append(keys["tokenizer.ggml.scores"], np.float32(-1))
    return edited


KEYS = {"merges": files.merged, "unigram": files.likely}
KEYS["bpe"] = lambda: bpe_files.keys_of([*byte_characters(), "he"], ["h e"])
REFUSED = {
    f"{kind}: a token of {size:,} {name}": (
        lambda make=make, size=size, letter=letter, of=of: with_token(make(), letter * size, of),
        "abc",
    )
    for kind, make in KEYS.items()
    for name, letter in (("letters", "a"), ("spaces", "▁"), ("signs", "日"))
    for of in (NORMAL, USER_DEFINED)
    for size in (5_000, 400_000)
}
REFUSED |= {
    f"a letter becomes {size:,} bytes{', without an end' * (1 - end)}": (
        lambda size=size, end=end: files.likely(
            precompiled_charsmap=files.charsmap({"a": "b" * size})[: None if end else -1]
        ),
        "a." * 9_999,
    )
    for size, end in ((50, 1), (250, 1), (1_000, 1), (100_000, 1), (10, 0), (100_000, 0))
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_out_of_proportion_is_refused(name):
    make, text = REFUSED[name]
    keys = make()
    tracemalloc.start()
    with pytest.raises(FileError, match=r"tokenizer\.ggml\.(tokens|precompiled_charsmap)") as caught:
        tokenizer_from_metadata(keys).encode(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)
    assert peak < 32 << 20


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("token", ["a" * 256, "▁" * 256, "日" * 128])
def test_long_tokens_of_models_are_read(kind, token):
    tokenizer = tokenizer_from_metadata(with_token(KEYS[kind](), token, USER_DEFINED))
    assert tokenizer.encode(token).tolist()[-1:] == [tokenizer.vocab_size - 1]


def test_a_charsmap_in_a_circle_is_left_after_a_while():
    nodes, text = np.zeros(256, "<u4"), "a" * 1_000_000
    nodes[97] = 97 << 10 | 97
    circle = np.frombuffer((4 * len(nodes)).to_bytes(4, "little") + nodes.tobytes() + b"x\0", np.uint8)
    result = tokenizer_from_metadata(files.likely(precompiled_charsmap=circle)).prepare(text)
    assert result[-9:] == text[-9:]
