"""The byte tokenizer: ids are bytes, and its GGUF keys have exact values."""

import numpy as np
import pytest

from zero_mpi.data import ByteTokenizer

TOKENIZER = ByteTokenizer()
TOKENS = "tokenizer.ggml.tokens"


def test_every_byte_is_its_own_id_and_comes_back():
    data = bytes(range(256))
    ids = TOKENIZER.encode(data)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(range(256))
    assert TOKENIZER.decode(ids) == data


def test_a_string_with_smuggled_bytes_gives_those_bytes():
    assert TOKENIZER.encode(b"\xff\xfea".decode("utf-8", "surrogateescape")).tolist() == [0xFF, 0xFE, 97]


def test_a_batch_is_each_text_and_a_prompt_is_never_empty():
    assert [ids.tolist() for ids in TOKENIZER.encode_batch([b"hi", "é", b""])] == [[104, 105], [195, 169], []]
    assert TOKENIZER.encode_prompt("hi").tolist() == [104, 105]
    assert TOKENIZER.encode_prompt("").tolist() == [TOKENIZER.eos]


def test_special_ids_decode_to_nothing():
    assert TOKENIZER.decode([256, 104, 257, 105, 258, 259]) == b"hi"
    assert TOKENIZER.decode([]) == b""
    assert TOKENIZER.decode(np.array([[97], [98]])) == b"ab"


@pytest.mark.parametrize("strange", [-1, 260, 65536 + 97])
def test_ids_outside_the_vocabulary_are_refused(strange):
    with pytest.raises(ValueError, match=f"id {strange} is outside the byte vocabulary of 260"):
        TOKENIZER.decode([97, strange])


def expected_characters():
    """Return GPT-2's byte table, written differently from the package's."""
    runs = [(0, 33, 256), (33, 127, 33), (127, 161, 289), (161, 173, 161), (173, 174, 323), (174, 256, 174)]
    return [chr(byte - start + image) for start, stop, image in runs for byte in range(start, stop)]


def test_the_metadata_is_exact():
    metadata = TOKENIZER.metadata()
    types = metadata.pop("tokenizer.ggml.token_type")
    assert (types.dtype, types.tolist()) == (np.int32, [1] * 256 + [3, 3, 3, 5])
    assert metadata == {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        TOKENS: [*expected_characters(), "<|bos|>", "<|endoftext|>", "<|pad|>", "<|bos|><|endoftext|>"],
        "tokenizer.ggml.merges": ["<|bos|> <|endoftext|>"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.padding_token_id": 258,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
