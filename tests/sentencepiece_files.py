"""Test vocabularies of SentencePiece's two kinds, trained on test texts, some with many equal scores."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import bpe_files
import numpy as np

SPACE = "▁"
CONTROL = ("<s>", "</s>", "<|endoftext|>", "<|user|>")
SPECIAL = [("<unk>", 2), *((t, 3) for t in CONTROL), *((t, 4) for t in ("<|tool|>", "\n\n\n", "  "))]
BYTES = [(f"<0x{byte:02X}>", 6) for byte in range(256)]


def texts() -> list[str]:
    samples = [*bpe_files.TEXTS, *bpe_files.random_texts(50), Path(__file__).read_text()]
    return [text.replace("\0", "") for text in samples] * 3  # llama.cpp ends tokens at a zero byte


def keys_of(model: str, tokens: list[tuple[str, int]], scores: Any, **extra: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, _ in tokens],
        "tokenizer.ggml.token_type": np.array([kind for _, kind in tokens], np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        **{f"tokenizer.ggml.{name}": value for name, value in extra.items()},
    }


@cache
def learnt_merges(size: int) -> list[str]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, show_progress=False, limit_alphabet=300)
    tokenizer.train_from_iterator(texts(), trainer)
    vocab = tokenizer.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


@cache
def learnt_unigram(size: int) -> list[tuple[str, float]]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = tokenizers.trainers.UnigramTrainer(vocab_size=size, show_progress=False, unk_token="<unk>")
    tokenizer.train_from_iterator(texts(), trainer)
    return [(token, score) for token, score in json.loads(tokenizer.to_str())["model"]["vocab"]]


def merged(size: int = 1500, levels: int = 0, **extra: Any) -> dict[str, Any]:
    base = [*SPECIAL, *BYTES]
    named = {token for token, _ in base}
    tokens = [(token, 1) for token in learnt_merges(size) if token not in named]
    scores = [-float(i % levels if levels else i) for i in range(len(tokens))]
    extra = {"bos_token_id": np.uint32(1), "eos_token_id": np.uint32(2), **extra}
    return keys_of("llama", [*base, *tokens], [0.0] * len(base) + scores, **extra)


def likely(size: int = 1500, **extra: Any) -> dict[str, Any]:
    special = [("<pad>", 3), ("</s>", 3), ("<unk>", 2), ("<s>", 3), ("<|user|>", 3), ("<|tool|>", 4)]
    special.append(("de", 5))
    named = {token for token, _ in special}
    learnt = [(token, score) for token, score in learnt_unigram(size) if token not in named]
    tokens = [*special, *((token, 1) for token, _ in learnt)]
    scores = [0.0] * 6 + [-3.0] + [score for _, score in learnt]
    return keys_of("t5", tokens, scores, **extra)


def fuzzed(count: int, seed: int = 7) -> list[str]:
    draw = random.Random(seed)
    sources = [text for text in bpe_files.TEXTS if text] + texts()[-1:]
    spelt = [token for token, _ in SPECIAL]
    spelt += ["<0x41>", "<|use", "▁", "▁▁", "<s", "\u3000", "ﬁ", "①", "Å", "e\u0301", "--", "ab"]
    planes = [*range(32, 0x3000), *range(0x3000, 0xD800, 7), *range(0xE000, 0x110000, 97)]
    samples = []
    for _ in range(count):
        parts = []
        for _ in range(draw.randint(1, 8)):
            kind = draw.random()
            if kind < 0.5:
                source = draw.choice(sources)
                start = draw.randrange(len(source))
                parts.append(source[start : start + draw.randint(1, 25)])
            elif kind < 0.65:
                parts.append(draw.choice(spelt))
            elif kind < 0.8:
                parts.append(draw.choice("a -=.日е▁ \n0") * draw.randint(1, 12))
            elif kind < 0.9:
                parts.append(" " * draw.randint(1, 4))
            else:
                parts.append("".join(map(chr, draw.choices(planes, k=4))))
        samples.append("".join(parts))
    return samples


SPELLINGS = {  # text -> its spelling in a charsmap: cases of NFKC, spaces, longest prefixes, empty spellings
    "\t": " ",
    "\n": " ",
    "\u3000": " ",
    "\u00a0": " ",
    "ﬁ": "fi",
    "①": "1",
    "½": "1\u20442",
    "Å": "\u00c5",
    "e\u0301": "é",
    "e\u0301\u0302": "\u1ebf",
    "A\u030a": "\u00c5",
    "日": "本日",
    "\u200b": "",
    "--": "—",
    "ﷺ": "صلى الله عليه وسلم",
    "ab": "b a",
    "\x7f": "",
}


def charsmap(spellings: dict[str, str] = SPELLINGS) -> np.ndarray:
    """Return a charsmap with these spellings; its double array is placed at the first free positions."""
    texts, offsets = b"", {}
    for prefix, spelling in spellings.items():
        offsets[prefix.encode()] = len(texts)
        texts += spelling.encode() + b"\0"
    nodes = np.zeros(1 << 14, np.uint32)
    taken = np.zeros(len(nodes), bool)
    taken[0] = True
    place_children(b"", 0, offsets, nodes, taken)
    size = int(np.flatnonzero(taken)[-1]) // 256 * 256 + 256
    content = (4 * size).to_bytes(4, "little") + nodes[:size].astype("<u4").tobytes() + texts
    return np.frombuffer(content, np.uint8)


def place_children(prefix: bytes, node: int, offsets: dict[bytes, int], nodes: Any, taken: Any) -> None:
    """Place the children of a prefix's node: choose a base at which their slots are free."""
    longer = [key for key in offsets if key.startswith(prefix) and len(key) > len(prefix)]
    letters = sorted({key[len(prefix)] for key in longer})
    codes = [0, *letters] if prefix in offsets else letters
    base = next(b for b in range(1, len(nodes)) if not any(taken[b ^ c] for c in codes))
    nodes[node] |= (node ^ base) << 10 | (prefix in offsets) << 8
    taken[[base ^ c for c in codes]] = True
    if prefix in offsets:
        nodes[base] = 1 << 31 | offsets[prefix]
    for letter in letters:
        nodes[base ^ letter] = letter
        place_children(prefix + bytes([letter]), base ^ letter, offsets, nodes, taken)


def over_words(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the same keys with tokens that cross the border between two words."""
    names = ("tokens", "token_type", "scores")
    tokens, types, scores = (list(keys[f"tokenizer.ggml.{name}"]) for name in names)
    extra = [token for token in ("e▁", "e▁t", "n▁", "n▁a", "a▁▁", ".▁") if token not in tokens]
    added = (extra, [1] * len(extra), [-2.5 - i for i in range(len(extra))])
    values = (tokens + added[0], np.int32(types + added[1]), np.float32(scores + added[2]))
    return keys | {f"tokenizer.ggml.{name}": value for name, value in zip(names, values, strict=True)}
