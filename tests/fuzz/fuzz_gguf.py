"""GGUF files with wrong types, lengths, counts, names and duplicates, and special files.

The files are written as raw bytes, because the package's writer would refuse most of them.
"""

import struct
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import architectures
import numpy as np
import wild

from zero_mpi.data.tokenizers.byte import byte_characters

STRING, ARRAY, BOOL = 8, 9, 7
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
F32, F16 = 0, 1


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def scalar(kind: int, value: Any) -> bytes:
    if kind in (6, 12):
        try:
            return struct.pack(f"<{FORMATS[kind]}", value)
        except (OverflowError, struct.error):  # an integer of hundreds of digits
            return struct.pack(f"<{FORMATS[kind]}", float("inf"))
    if kind == BOOL:
        return bytes([bool(value)])
    size = struct.calcsize(FORMATS[kind])
    integer = int(value) if value == value and abs(value) != float("inf") else 2**63
    return (integer % (1 << 8 * size)).to_bytes(size, "little")


def typed(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return struct.pack("<I", STRING) + string(encoded(value))
    return struct.pack("<I", kind) + scalar(kind, value)


def array(kind: int, values: list[Any], count: int | None = None) -> bytes:
    items = b"".join(string(encoded(v)) if kind == STRING else scalar(kind, v) for v in values)
    return struct.pack("<IIQ", ARRAY, kind, len(values) if count is None else count) + items


def plain(value: Any) -> bytes:
    if isinstance(value, bool):
        return typed(BOOL, value)
    if isinstance(value, str):
        return typed(STRING, value)
    if isinstance(value, list):
        return array(STRING if value and isinstance(value[0], str) else 5, value)
    return typed(6 if isinstance(value, float) else 4, value)


@dataclass
class File:
    keys: list[tuple[str, bytes]]
    tensors: list[tuple[str, tuple[int, ...], int]]  # name, shape in NumPy's order, type
    counts: dict[str, int] = field(default_factory=dict)
    head: bytes = b"GGUF\3\0\0\0"
    data: bytes | None = None

    def table(self) -> tuple[bytes, int]:
        """Return the tensor table as bytes, and the size of the tensors' data in bytes."""
        lines, offset = [], 0
        for name, shape, kind in self.tensors:
            dims = struct.pack(f"<I{len(shape)}Q", len(shape), *(d % 2**64 for d in reversed(shape)))
            lines.append(string(encoded(name)) + dims + struct.pack("<IQ", kind, offset % 2**64))
            size = int(np.prod([float(d) for d in shape])) * (2 if kind == F16 else 4)
            offset += -(-size // 32) * 32
        return b"".join(lines), offset

    def bytes(self) -> bytes:
        lines, size = self.table()
        counts = (self.counts.get("tensors", len(self.tensors)), self.counts.get("keys", len(self.keys)))
        keys = b"".join(string(encoded(key)) + value for key, value in self.keys)
        raw = self.head + struct.pack("<QQ", *counts) + keys + lines
        raw += bytes(-len(raw) % 32)
        return raw + (self.data if self.data is not None else values(min(size, 1 << 20)))


@cache
def values(size: int) -> bytes:
    return np.random.default_rng(0).normal(0, 0.05, size // 4 + 1).astype(np.float32).tobytes()[:size]


def tokenizer(random: Random) -> dict[str, Any]:
    """Return keys of a byte-level BPE with one merge."""
    special = ["<|bos|>", "<|endoftext|>", "<|pad|>"]
    tokens, merges = [*byte_characters(), *special, "".join(special[:2])], [" ".join(special[:2])]
    if random.random() < 0.5:
        tokens[-1], merges = "ab", ["a b"]
    types = [1] * 256 + [3] * 3 + [1]
    head = "tokenizer.ggml."
    return {
        f"{head}model": "gpt2",
        f"{head}pre": random.choice(["gpt-2", "smollm", "qwen2", "llama-bpe", "default"]),
        f"{head}tokens": tokens,
        f"{head}token_type": types,
        f"{head}merges": merges,
        f"{head}bos_token_id": 256,
        f"{head}eos_token_id": 257,
        f"{head}padding_token_id": 258,
        f"{head}add_bos_token": False,
        f"{head}add_eos_token": False,
        f"{head}add_space_prefix": False,
        "tokenizer.chat_template": "{{ messages }}",
    }


SIZES = {"vocab_size": 260, "context_length": 32, "embedding_length": 8, "block_count": 1}
SIZES |= {"feed_forward_length": 16, "head_count": 2, "head_count_kv": 1, "key_length": 4, "value_length": 4}


def model(random: Random, odd_frequencies: float = 0.3) -> File:
    """Return a valid model of one block; `odd_frequencies`: chance of RoPE factors in a tensor."""
    arch = random.choice(["llama", *architectures.ROWS])
    config = architectures.build(arch, SIZES, tied=architectures.ROWS[arch].ties)
    keys = {"general.architecture": arch, "general.name": "fuzz", **config.metadata()}
    keys = {key: value.item() if isinstance(value, np.generic) else value for key, value in keys.items()}
    shapes = architectures.tensors(config)
    if arch == "llama" and random.random() < odd_frequencies:
        shapes["rope_freqs.weight"] = (2,)
    keys |= tokenizer(random)
    tensors = [(name, shape, F32) for name, shape in shapes.items()]
    file = File([(key, plain(value)) for key, value in keys.items()], tensors)
    if "rope_freqs.weight" in shapes:
        file.data = np.abs(np.frombuffer(values(file.table()[1]), np.float32) + 1).tobytes()
    return file


def odd_value(random: Random) -> bytes:
    kind = random.choice([*FORMATS, STRING, STRING, ARRAY, ARRAY, ARRAY])
    if kind == STRING:
        return typed(STRING, wild.text(random))
    if kind != ARRAY:
        return typed(kind, wild.number(random))
    inner = random.choice([*FORMATS, STRING, STRING, STRING])
    length = random.choice([0, 1, 2, 3, 260, 261, 5000])
    words = ["a", "", "a b", "x\n", "\x1b[1m"]
    items = [random.choice(words) if inner == STRING else wild.number(random) for _ in range(length)]
    return array(inner, items)


def changed_keys(random: Random, file: File) -> None:
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        place = random.randrange(len(file.keys))
        key, value = file.keys[place]
        kind = random.randrange(10)
        if kind <= 6:
            file.keys[place] = key, odd_value(random)
        elif kind == 7:
            del file.keys[place]
        elif kind == 8:
            file.keys.append((key if random.random() < 0.5 else wild.name(random, [key]), value))
        else:
            file.keys[place] = key, random.choice(file.keys)[1]


def changed_tensors(random: Random, file: File) -> None:
    for _ in range(random.choice([1, 1, 2])):
        place = random.randrange(len(file.tensors))
        name, shape, kind = file.tensors[place]
        case = random.randrange(6)
        if case == 0:
            file.tensors[place] = wild.name(random, [name]), shape, kind
        elif case == 1:
            dims = [0, 1, 2, 8, 2**31, 2**32, 2**40, 2**63]
            dims = tuple(random.choice(dims) for _ in range(random.randint(0, 5)))
            file.tensors[place] = name, dims, kind
        elif case == 2:
            file.tensors[place] = name, shape, random.choice([*range(42), 2**31, 2**32 - 1])
        elif case == 3:
            file.tensors.append(file.tensors[place])
        elif case == 4:
            del file.tensors[place]
        else:
            file.tensors[place] = name, (*shape[:-1], random.choice([1, 3, 7, 2**20])), kind


DATA = "some text that is long enough for a window or two of training, a b a b\n" * 20


def command(random: Random, folder: Path, name: str = "x.gguf") -> list[str]:
    kind = random.randrange(10)
    if kind <= 2:
        flags = random.sample(["--keys", "--tensors", "--json"], random.randint(0, 3))
        return ["-m", "zero_mpi", "inspect", name, *flags]
    if kind == 3:
        return ["-m", "zero_mpi", "inspect", name, name]
    if kind <= 5:
        target = random.choice([["y.gguf", "--type", random.choice(["f16", "q8_0", "f32"])], ["folder"]])
        return ["-m", "zero_mpi", "export", name, *target]
    if kind <= 7:
        prompt = random.choice(["ab", "", "é"])
        return ["-m", "zero_mpi", "generate", name, "--tokens", "2", "--prompt", prompt]
    if kind == 8:
        return ["-m", "zero_mpi", "plan", "--context", "16", "--init", name]
    return train(folder, "--init", name)


def train(folder: Path, *flags: str) -> list[str]:
    (folder / "data.txt").write_text(DATA)
    sizes = ["--context", "16", "--sample", "0", "--steps", "1"]
    sizes += ["--batch-size", "1", "--micro-batch", "1", "--val-fraction", "0"]
    return ["-m", "zero_mpi.train", "--out", "out", "--data", "data.txt", *sizes, *flags]


def sound(random: Random, folder: Path) -> list[str]:
    (folder / "x.gguf").write_bytes(model(random, odd_frequencies=0).bytes())
    return command(random, folder)


def keys(random: Random, folder: Path) -> list[str]:
    file = model(random)
    changed_keys(random, file)
    (folder / "x.gguf").write_bytes(file.bytes())
    return command(random, folder)


def tensors(random: Random, folder: Path) -> list[str]:
    file = model(random)
    changed_tensors(random, file)
    (folder / "x.gguf").write_bytes(file.bytes())
    return command(random, folder)


def counts(random: Random, folder: Path) -> list[str]:
    file = model(random)
    odd = [n for n in wild.INTEGERS if 0 <= n < 2**64]
    case = random.randrange(5)
    if case == 0:
        file.counts = {random.choice(["tensors", "keys"]): random.choice(odd)}
    elif case == 1:
        kind = random.choice([*FORMATS, STRING, ARRAY, 13, 2**31])
        entry = struct.pack("<IIQ", ARRAY, kind, random.choice(odd))
        file.keys.insert(random.randrange(len(file.keys)), ("odd", entry))
    elif case == 2:
        file.keys.insert(0, ("odd", struct.pack("<IQ", STRING, random.choice(odd))))
    elif case == 3:
        file.head = random.choice([b"GGUF", b"GGML", b"FUGG"]) + struct.pack("<I", random.choice(odd) % 2**32)
    else:
        file.keys.insert(0, ("general.alignment", typed(4, random.choice(odd) % 2**32)))
    (folder / "x.gguf").write_bytes(file.bytes())
    return command(random, folder)


def noise(random: Random, folder: Path) -> list[str]:
    raw = model(random).bytes()
    start = random.choice([len(raw), 12_000, 1000, 100])
    (folder / "x.gguf").write_bytes(
        wild.edited(random, raw[:start]) + (raw[start:] if random.random() < 0.8 else b"")
    )
    return command(random, folder)


def many(random: Random, folder: Path) -> list[str]:
    file, count = model(random), random.choice([10_000, 70_000, 300_000])
    case = random.randrange(7)
    if case == 0:
        file.keys += [(f"k{i}", typed(4, i)) for i in range(count)]
    elif case == 1:
        file.keys += [(f"k{i}", typed(STRING, "v" * 20)) for i in range(count)]
    elif case == 2:
        file.tensors += [(f"t{i}", (1,), F32) for i in range(count // 10)]
        file.data = bytes(file.table()[1])
    elif case == 3:
        file.keys = [k for k in file.keys if k[0] != "tokenizer.ggml.tokens"]
        file.keys.append(("tokenizer.ggml.tokens", array(STRING, [f"t{i}" for i in range(count)])))
    elif case == 4:
        file.keys.append(("odd", array(STRING, [""] * (20 * count))))
    elif case == 5:
        file.keys.append(("odd", array(0, [0] * count)))
    else:
        file.keys.append(("k" * 65535, typed(STRING, "\n\x1b" * 10 * count)))
    (folder / "x.gguf").write_bytes(file.bytes())
    return command(random, folder)


def special(random: Random, folder: Path) -> list[str]:
    if random.random() < 0.5:
        wild.special(random, folder / "x.gguf")
        return command(random, folder)
    name = "x-00001-of-00003.gguf"
    for number in range(3):
        file = model(random) if number == 0 else File([], [(f"more.{number}", (8,), F32)])
        parts = {"no": number, "count": 3}
        file.keys += [(f"split.{key}", typed(2, value)) for key, value in parts.items()]
        file.keys.append(("split.tensors.count", typed(5, len(file.tensors) + 2 * (number == 0))))
        if random.random() < 0.4:
            place = random.randrange(len(file.keys))
            file.keys[place] = file.keys[place][0], odd_value(random)
        (folder / f"x-{number + 1:05d}-of-00003.gguf").write_bytes(file.bytes())
    if random.random() < 0.5:
        wild.special(random, folder / f"x-{random.randint(1, 3):05d}-of-00003.gguf")
    return command(random, folder, name)


CASES = {"sound": sound, "keys": keys, "tensors": tensors, "counts": counts, "noise": noise}
CASES |= {"many": many, "special": special}
