"""Vocabularies with long tokens, merges or spellings, and texts that match them everywhere."""

import json
from pathlib import Path
from random import Random
from typing import Any

import bpe_files
import numpy as np
import sentencepiece_files
import wild
from gguf_files import write_tensors

from zero_mpi.data import tokenizer_from_metadata
from zero_mpi.data.tokenizers.byte import byte_characters
from zero_mpi.data.tokenizers.huggingface_rules import FLAGS, RULES
from zero_mpi.data.tokenizers.pretokenizers import PRE_TOKENIZERS

MOST = 20 << 20  # maximum number of characters in all tokens of a file
KINDS = ("llama", "t5")


def run(folder: Path, keys: dict[str, Any], text: str) -> list[str]:
    write_tensors(folder / "m.gguf", "llama", keys, {})
    (folder / "t.txt").write_text(text)
    return ["-m", "zero_mpi", "tokenize", "t.txt", "--tokenizer", "m.gguf", "--out", "tokens"]


def lengths(random: Random) -> list[int]:
    kind, limit = random.randrange(4), random.choice([100, 3000, 70_000, 1 << 20])
    sizes = {
        0: lambda: [limit],
        1: lambda: list(range(2, min(limit, 3000))),
        2: lambda: [1 << power for power in range(1, limit.bit_length())],
        3: lambda: [random.randint(2, limit) for _ in range(50)],
    }[kind]()
    while sum(sizes) > MOST:
        sizes.pop()
    return sizes


def text(random: Random, letter: str) -> str:
    size = random.choice([10, 5000, 200_000])
    end = random.choice(["", "b", " b\n"])
    return random.choice([letter * size + end, (letter * random.choice([3, 99]) + end) * (size // 50 + 1)])


def words(random: Random, letter: str) -> list[str]:
    end = random.choice(["", "", "c"])
    return list(dict.fromkeys(letter * size + end for size in lengths(random)))


def merges(random: Random, folder: Path) -> list[str]:
    letters, letter = byte_characters(), "a"
    sizes, halves = {1}, list[str]()
    for size in sorted(set(lengths(random))):
        half = max(s for s in sizes if s < size) if size > 1 else 0
        rest = size - half
        if rest in sizes and rest:
            halves.append(f"{letter * half} {letter * rest}")
            sizes.add(size)
    halves += [f"{letter} {letter}"] * (not halves)
    if random.random() < 0.3:
        random.shuffle(halves)
    tokens = [*letters, *dict.fromkeys(pair.replace(" ", "") for pair in halves)]
    keys = bpe_files.keys_of(tokens, halves, pre=random.choice(["gpt-2", "qwen2"]), eos_token_id=np.uint32(0))
    return run(folder, keys, text(random, letter))


def spelt(random: Random, folder: Path) -> list[str]:
    tokens = list(dict.fromkeys([*byte_characters(), "aa", *words(random, "a")]))
    types = [1] * 257 + [random.choice([1, 3, 4]) for _ in tokens[257:]]
    keys = bpe_files.keys_of(tokens, ["a a"], types=types, eos_token_id=np.uint32(0))
    return run(folder, keys, text(random, "a"))


def keys_of(random: Random, extra: list[str], types: tuple[int, ...] = (1,), **keys: Any) -> dict[str, Any]:
    tokens = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *sentencepiece_files.BYTES]
    words = dict.fromkeys([*"abestx", sentencepiece_files.SPACE, "te", "text", *extra])
    tokens += [(word, random.choice(types)) for word in words]
    scores = [random.choice([0.0, -1.0, -float(place)]) for place in range(len(tokens))]
    return sentencepiece_files.keys_of(
        random.choice(KINDS), tokens, scores, eos_token_id=np.uint32(2), **keys
    )


def pieces(random: Random, folder: Path) -> list[str]:
    letter, spelling = random.choice([("a", "a"), (sentencepiece_files.SPACE, " "), ("é", "é")])
    keys = keys_of(random, words(random, letter), (1, 1, 1, 4))
    return run(folder, keys, text(random, spelling))


def spellings(random: Random, folder: Path) -> list[str]:
    long = "b" * random.choice([10, 3000, 60_000])
    prefix = "a" * random.choice([1, 50, 150])
    raw = sentencepiece_files.charsmap({"a": long, prefix: "", "é": "e", "x" * 9: long}).tobytes()
    if random.random() < 0.6:
        raw = wild.edited(random, raw)
    if random.random() < 0.2:
        raw = random.choice([b"", raw[:3], raw[: random.randrange(len(raw))], b"\xff\xff\xff\x7f" + raw[4:]])
    keys = keys_of(random, [], precompiled_charsmap=np.frombuffer(raw, np.uint8))
    return run(folder, keys, text(random, "a"))


def sound(random: Random, folder: Path) -> list[str]:
    return run(folder, keys_of(random, []), "a text\n" * 20)


LETTERS = ["a", "A", " ", "\n", "\r\n", "é", "e\u0301", "\u0301", "日", "1", "!", "'s", "~", "\u3000"]
LETTERS += ["\ufdfa", "<x>"]
NAMES = ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "Prepend"]
NAMES += ["Replace", "Sequence", "Nmt", "Precompiled"]


def normalizer(random: Random, depth: int = 0) -> Any:
    if random.random() < 0.05:
        return random.choice([None, [], "NFC", 3, {}, {"type": None}])
    long = random.choice(LETTERS) * random.choice([0, 1, 1, 1, 2, 15, 900, 100_000])
    pattern = {random.choice(["String", "String", "Regex"]): random.choice([*LETTERS, "", "(a+)+b"])}
    content = {"type": random.choice(NAMES), "prepend": long, "content": long, "pattern": pattern}
    content |= {"strip_left": random.random() < 0.5, "strip_right": random.choice([True, False, None])}
    if content["type"] == "Sequence":
        inner = [normalizer(random, depth + 1) for _ in range(random.choice([0, 1, 3]) if depth < 3 else 0)]
        content["normalizers"] = inner * random.choice([1, 1, 1, 50])
    return content


def rules(random: Random, folder: Path) -> list[str]:
    """Write Hugging Face rules into a GGUF: flags of similar tokens and any normalizer."""
    added = random.sample([*LETTERS, "aa", "  ", " a", "a ", "AA"], 6)
    tokens = list(dict.fromkeys([*byte_characters(), "ab", *added]))
    types = [1] * 257 + [random.choice([3, 4]) for _ in tokens[257:]]
    flags = {t: [f for f in FLAGS if random.random() < 0.5] for t in added}
    content = {
        "added_tokens": flags,
        "normalizer": random.choice([None, normalizer(random)]),
        "original": random.random() < 0.5,
    }
    raw = json.dumps(content | {"ignore_merges": random.choice([None, True, 3, "x"])})
    if random.random() < 0.2:
        others = [wild.edited(random, raw.encode()).decode("utf-8", "replace"), "[1]", "{", "null"]
        raw = random.choice(others)
    pre = random.choice(list(PRE_TOKENIZERS))
    keys = bpe_files.keys_of(
        tokens, ["a b"], types=types, pre=pre, eos_token_id=np.uint32(0), add_bos_token=False
    )
    parts = [random.choice(LETTERS) * random.choice([1, 3, 30_000]) for _ in range(random.choice([1, 3, 9]))]
    return run(folder, keys | {RULES: raw.replace("\0", "")}, "".join(parts))


CASES = {"sound": sound, "rules": rules, "merges": merges, "spelt": spelt, "pieces": pieces}
CASES |= {"spellings": spellings}

for seed in range(8):  # tokenizers of both kinds compile all kernels before any process is forked
    tokenizer_from_metadata(keys_of(Random(seed), ["texts"])).encode(b"a text")
