"""Tokenizers and texts for tests: small vocabularies that tests train, and SmolLM2's real vocabulary."""

# ruff: noqa: RUF001 (texts of many scripts)

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf_files import write_tensors
from oracles import smollm2

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.data.tokenizers.byte import byte_characters
from zero_mpi.models import Llama

TINY = Llama(
    vocab_size=0,
    context_length=32,
    embedding_length=8,
    block_count=1,
    feed_forward_length=8,
    head_count=1,
    head_count_kv=1,
    key_length=8,
    value_length=8,
    tied=True,
)

CASELESS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The pre_tokenizer of each kind, as in Hugging Face's files of GPT-2, SmolLM, Qwen 2 and Llama 3.
GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def split(regex):
    """Return the definition of a pre-tokenizer that splits by a regex and maps bytes."""
    cut = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, GPT2 | {"use_regex": False}]}


DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]}
QWEN2 = split(CASELESS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST)
LLAMA3 = split(CASELESS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST)
KINDS = {  # name in a GGUF -> (pre_tokenizer, ignore_merges)
    "gpt-2": (GPT2, False),
    "smollm": (DIGITS, False),
    "qwen2": (QWEN2, False),
    "llama-bpe": (LLAMA3, True),
    "dbrx": (LLAMA3, False),
}
CONTROL = ("<|begin|>", "<|endoftext|>", "<|im_start|>")
USERS = ("<tool>", "l><tool", "\n\n\n\n")
TEXTS = [
    *("", " ", "  ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "a", " a", "a ", "  a", "a  b", "a   b"),
    *("it's", "IT'S", "I'll we've they're he'd I'm can't", "''s 's' 'S 'tis 'LL 'vE", "l'été", "x'"),
    *("'ſ 'ſe", "1", "12", "123", "1234", "12345678 9", "3.14159", "1,000,000", "0x1F", "v2.0.1"),
    *("１２３ ²³¹ ½ Ⅷ ٣٤٥ 五", "def f(x):\n\treturn x ** 2  # square\n", "x=>y!==z", "\n\na"),
    *("for (int i = 0; i < n; ++i) {\r\n\ta[i] += 1;\r\n}", "    four\n        eight\n\n\n\nlines"),
    *("trailing   \n", "\n   \n", "a\u00a0b", "a\u3000b", "\u2028x\u2029y", "\u0085x", "a\u200bb"),
    *("\ufeffbom", "\u1680 \u2009\u202f", "naïve café", "cafe\u0301", "Ω≈ç√∫", "Привет, мир!"),
    *("שלום עולם", "مرحبا بالعالم ١٢٣", "नमस्ते दुनिया", "สวัสดีชาวโลก", "你好，世界。", "こんにちは世界"),
    *("안녕하세요", "ქართული", "አማርኛ", "ᚠᚢᚦ", "𝔘𝔫𝔦", "𓀀𓂀", "ᠮᠣᠩᠭᠣᠯ", "ǅ ǈ ʰ ʷ", "한글\u1161"),
    *("😀", "👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 🇩🇪", "👍🏽!", "a😀b 1😀2", "e\u0301\u0302\u0303", "\u0301"),
    *("\0", "a\0b", "\x01\x02\x03\x04\x05\x06", "\x1b[31mred\x1b[0m", "\x7f", "\x1c\x1d\x1e\x1f"),
    *("\x0b\x0c", "\ufffd", "\ufffe\uffff", "\U0010ffff", "\ue000\U000f0000", "\u0378\u0379", "\ud7ff"),
    *("!!!", "...", "?!", "a.b", "a .b", "--", "_x_", "#1", "$5+=`~^|", "«»“”‘’—…", "(((", " ,", ",\n\n"),
    *(";\r\n\r\nx", "<|endoftext|>", "a<|im_start|>b", "<|begin|><|begin|>", "<|im_start", "<tool>"),
    *("a <tool>\n<tool>b", "<tool><tool>", '{"key": [1, null, true]}', "https://example.org/a?b=c&d=%20#e"),
    *("C:\\dir\\file.txt", "user@example.org", "a" * 300, " " * 300, "ab " * 100, "\n" * 50, "0" * 100),
    *("!" * 100, "日" * 100, "a\nb\n" * 60, "z " * 10 + "1" * 7),
]


def random_texts(count):
    """Yield texts of random code points, and of mixed white space, letters and signs, from a fixed seed."""
    draw = random.Random(20240229)
    ranges = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    mixed = " \n\r\t'sStTlLdDrevE019.,!?-_(){}é日👍\u00a0\u3000\u0301"
    for number in range(count):
        if number % 2:
            yield "".join(draw.choices(mixed, k=40))
        else:
            yield "".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(30))


PARTS = [
    *("'s", "'S", "'LL", "'ve", "'RE", "'d", "’s", "\r\n", "\n", "\r", "\t", " ", "  ", "     "),
    *("\n\n\n", " \n ", "12", "1234567", "3.14", "٣٤", "½", "Ⅷ", "don't", "aB", "XMLHttp", "ÉCOLE"),
    *("École", "ẞ", "naïve", "cafe\u0301", "\u0301", "Привет", "МИР", "Ελλάδα", "שלום", "مرحبا"),
    *("नमस्ते", "สวัสดี", "ქართული", "Աբ", "漢字", "かな", "カナ", "ー", "한국어", "。", "、", "！"),
    *("Ａｂ", "１２", "😀", "👩\u200d👧", "🇩🇪", "\u200b", "\u00a0", "\u3000", "\u2028", "\u0085"),
    *("\x0b", "\x1c", "\0", "ǅ", "ʰ", "ſ", "ℓ", "~", "~~", "/", "//", "$", "^", "`", "|", "<=", "=>"),
    *("--", "...", "!?", "_", "{", "[", "\\", "€", "\u0378", "\U000e0fff", "\ufffd", "\ue000"),
    *("\U0001d400", "𐐨", "\U0001e943", "a", "Z", "x "),
]


def mixed_texts(count, more=(), seed=7):
    """Yield texts that mix scripts, signs, numbers, contractions and white space; determined by a seed."""
    draw = random.Random(seed)
    for _ in range(count):
        yield "".join(draw.choices([*PARTS, *more * 9], k=draw.randint(1, 14)))


def pair_keys(pre, **extra):
    """Return keys of a vocabulary with a token for each pair of bytes; its ids show nearly every split."""
    letters = byte_characters()
    pairs = [(a, b) for a in letters for b in letters]
    random.Random(1).shuffle(pairs)
    tokens = [*letters, *(a + b for a, b in pairs), "<|end|>"]
    end = {f"{name}_token_id": np.uint32(len(tokens) - 1) for name in ("bos", "eos")}
    keys = keys_of(tokens, [f"{a} {b}" for a, b in pairs], pre=pre, add_bos_token=False, **end, **extra)
    return {key: value for key, value in keys.items() if value is not None}


def trained_json(kind, tokens=900):
    """Return a tokenizer.json trained on texts of this module, with added tokens and unused ids."""
    import tokenizers

    definition, ignore_merges = KINDS[kind]
    empty = tokenizers.Tokenizer(tokenizers.models.BPE())
    content = json.loads(empty.to_str()) | {
        "pre_tokenizer": definition,
        "decoder": {"type": "ByteLevel"} | GPT2,
    }
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=tokens, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, *random_texts(50), Path(__file__).read_text()] * 3, trainer)
    content = json.loads(tokenizer.to_str())
    content["model"]["ignore_merges"] = ignore_merges
    first = len(content["model"]["vocab"]) + 2  # leaves two ids unused
    names = [(token, True) for token in CONTROL] + [(token, False) for token in USERS]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["model"]["vocab"] |= {token: first + place for place, (token, _) in enumerate(names)}
    content["added_tokens"] = [
        {"id": first + place, "content": token, "special": special} | flags
        for place, (token, special) in enumerate(names)
    ]
    return content


def write_json(folder, content, **others):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"tokenizer": content, **others}.items():
        (folder / f"{name}.json").write_text(json.dumps(text))
    return folder / "tokenizer.json"


def smollm2_keys():
    """Return SmolLM2's tokenizer as GGUF keys; skip the test if its package is not installed."""
    metadata = GGUFFile.open(smollm2()).metadata
    return {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}


def keys_of(tokens, merges, *, pre="gpt-2", types=None, **extra):
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types or [1] * len(tokens), np.int32),
        "tokenizer.ggml.merges": merges,
        **{f"tokenizer.ggml.{name}": value for name, value in extra.items()},
    }


def write_model(path: Path, keys: dict[str, Any], **sizes: int) -> Path:
    config = replace(TINY, vocab_size=len(keys["tokenizer.ggml.tokens"]), **sizes)
    rng = np.random.default_rng(0)
    weights = {
        name: rng.standard_normal(param.shape).astype(np.float32) for name, param in config.params().items()
    }
    return write_tensors(path, config.arch, config.metadata() | keys, weights)
