"""Files of questions that lie: other values in every place, cut and changed bytes, what is no JSON at all."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from zero_mpi.checkpoint.gguf.header import GGUFStream
from zero_mpi.data import ByteTokenizer
from zero_mpi.models import GPT2

SIZES = {"layers": 1, "dim": 8, "heads": 2, "ffn": 8, "context": 32, "vocab_size": ByteTokenizer.vocab_size}
SOUND = {"question": "Two and two are", "answers": [" four", " five"], "right": 0}
ODD: list[Any] = [
    None, True, -1, 0, 1, 2, 1e300, 10**30, "", "\x1b[31m", "\ud800", "x" * 5000, [], {}, ["a"],
    ["a", "\ud800"], ["a", ""], ["a", 1], [[["a"]]], ["a"] * 99, {"a": "b"}, "\u2028\u202e",
]  # fmt: skip


def evaluate(folder: Path, raw: bytes) -> list[str]:
    """The command on a file of these bytes, with a small model."""
    config = GPT2.from_flags(SIZES | {"tied": True})
    params = config.params()
    table = [(name, param.shape) for name, param in params.items()]
    keys = config.metadata() | ByteTokenizer().metadata()
    with GGUFStream(folder / "model.gguf", config.arch, keys, table) as stream:
        for name, shape in table:
            stream.write(name, np.ones(shape, np.float32))
    (folder / "choices.jsonl").write_bytes(raw)
    return ["-m", "zero_mpi", "evaluate", "model.gguf", "--choices", "choices.jsonl"]


def lines(*values: Any) -> bytes:
    return "\n".join(map(json.dumps, values)).encode()


def sound(random: Random, folder: Path) -> list[str]:
    return evaluate(folder, lines(*[SOUND] * random.randint(1, 5)))


def values(random: Random, folder: Path) -> list[str]:
    name = random.choice([*SOUND, "context", "more"])
    return evaluate(folder, lines(SOUND, SOUND | {name: random.choice(ODD)}))


def others(random: Random, folder: Path) -> list[str]:
    return evaluate(folder, lines(SOUND, random.choice(ODD)))


def damaged(random: Random, folder: Path) -> list[str]:
    """Bytes changed, cut or put in."""
    raw = bytearray(lines(SOUND, SOUND))
    for _ in range(random.randint(1, 4)):
        raw[random.randrange(len(raw))] = random.randrange(256)
    return evaluate(folder, bytes(raw[: random.randint(1, len(raw))]))


def texts(random: Random, folder: Path) -> list[str]:
    return evaluate(
        folder, random.choice([b"", b"\n" * 9999, b"[" * 99999, b"\0" * 99, b"{}", b"\xff\xfe{}"])
    )


CASES = {"sound": sound, "values": values, "others": others, "damaged": damaged, "texts": texts}
