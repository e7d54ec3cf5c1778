"""Faulty inputs of tokenize (lines, compressed files, Parquet) and faulty files of an earlier run."""

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import wild

ODD: list[Any] = [
    None, True, -1, 0, 1, 2, 1e300, 10**30, "", "\x1b[31m", "\ud800", "x" * 5000, [], {}, ["a"],
    ["a", "\ud800"], ["a", ""], ["a", 1], [[["a"]]], ["a"] * 99, {"a": "b"}, "\u2028\u202e",
]  # fmt: skip
TEXTS = [f"{number} " * (number % 40) for number in range(90)]
Written = Callable[[bytes], bytes]


def lines(*values: Any) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode("utf-8", "surrogatepass")


GOOD = lines(*({"text": text} for text in TEXTS))


def zstd(data: bytes) -> bytes:
    try:
        import pyarrow
    except ImportError:
        return data
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def parquet(texts: list[Any]) -> bytes:
    try:
        import pyarrow.parquet
    except ImportError:
        return b"PAR1"
    sink = io.BytesIO()
    table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string()), "id": list(range(len(texts)))})
    pyarrow.parquet.write_table(table, sink, row_group_size=20)
    return sink.getvalue()


PACKED: dict[str, Written] = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstd}


def tokenize(random: Random, folder: Path, name: str, raw: bytes) -> list[str]:
    (folder / name).write_bytes(raw)
    command = ["-m", "zero_mpi", "tokenize", name, "--tokenizer", "byte", "--out", "tokens"]
    command += ["--part-mb", "0.001"]
    return command + ["--skip-bad"] * random.randint(0, 1)


def sound(random: Random, folder: Path) -> list[str]:
    suffix = random.choice([*PACKED])
    return tokenize(random, folder, f"t{suffix}", PACKED[suffix](GOOD))


def values(random: Random, folder: Path) -> list[str]:
    odd = [random.choice(ODD) for _ in range(3)]
    raw = GOOD + lines(*odd, *({"text": value} for value in odd)) + GOOD
    suffix = random.choice([*PACKED])
    return tokenize(random, folder, f"t{suffix}", PACKED[suffix](raw))


def damaged(random: Random, folder: Path) -> list[str]:
    suffix = random.choice([*PACKED, ".parquet", ".txt.gz"])
    raw = parquet(TEXTS) if suffix == ".parquet" else PACKED.get(suffix, gzip.compress)(GOOD)
    return tokenize(random, folder, f"t{suffix}", wild.edited(random, raw))


def other(random: Random, folder: Path) -> list[str]:
    suffix = random.choice([*PACKED, ".parquet", ".txt", ".txt.gz", ".txt.zst"])
    raw = random.choice([b"", GOOD, gzip.compress(GOOD), zstd(GOOD), parquet(TEXTS), random.randbytes(5000)])
    return tokenize(random, folder, f"t{suffix}", raw)


def left(random: Random, folder: Path) -> list[str]:
    """Write a plan, a record and sometimes a manifest that differ from those of the command."""
    work = folder / "tokens" / ".tokenize"
    work.mkdir(parents=True)
    plan = {"about": {"options": {}}, "looked": [{"name": "t.jsonl", "bytes": len(GOOD), "weights": [1]}]}
    for path in (work / "plan.json", work / "00000.json", folder / "tokens" / "manifest.json"):
        raw = random.choice([b"", b"{}", b"[" * 9000, b"\xff", lines(plan), *(lines(value) for value in ODD)])
        if path.name != "manifest.json" or random.randrange(2):
            path.write_bytes(raw)
    return tokenize(random, folder, "t.jsonl", GOOD)


CASES = {"sound": sound, "values": values, "damaged": damaged, "other": other, "left": left}
