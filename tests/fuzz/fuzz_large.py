"""Files that are small on disk and large when read: sparse files behind indices, gzip and zstd bombs."""

import gzip
import os
import struct
from functools import cache
from pathlib import Path
from random import Random

import fuzz_gguf
import fuzz_safetensors
import fuzz_texts
import fuzz_tokens
import numpy as np

COUNTS = (0, 1, 50, 10**5, 10**7, 2 * 10**8, 10**9, 2**31, 2**40, 2**62, 2**64 - 1)
SIZES = (0, 1 << 20, 1 << 30, 8 << 30)
BLOCK = 4 << 20  # uncompressed bytes of one gzip member or zstd frame
ROWS = 1 << 20  # bytes of short lines, all of which a reader reads
ENDLESS = (b"\0", b" ", b"a", b"[", b'{"text": "' + b"a" * 4096, b'{"a": ')
SHORT = (b"a", b" ", b"\n", b"{}\n", b'{"text": "a"}\n', b"\xff\n")
LARGE_PARTS = ("--part-mb", "1")


def sparse(path: Path, head: bytes, size: int) -> None:
    path.write_bytes(head)
    os.truncate(path, max(size, len(head)))


def megatron(random: Random, folder: Path) -> list[str]:
    """Write an index of up to 2**64 - 1 empty documents, and sparse ids."""
    count = random.choice(COUNTS)
    head = b"MMIDIDX\0\0" + np.uint64(1).tobytes() + random.choice([b"\x08", b"\x04", b"\x01"])
    head += struct.pack("<QQ", count, random.choice([count, (count + 1) % 2**64, 0]))
    size = 34 + 12 * count + 8 * (count + 1)
    sparse(folder / "ids.idx", head, random.choice([size, size, *SIZES]) if size < 8 << 30 else 8 << 30)
    sparse(folder / "ids.bin", b"", random.choice(SIZES))
    return fuzz_tokens.command(folder, random, "ids.bin")


def headers(random: Random, folder: Path) -> list[str]:
    """Write headers of llm.c, NumPy, safetensors or GGUF before up to 8 GiB of zeros."""
    count, size, kind = random.choice(COUNTS), random.choice(SIZES), random.randrange(4)
    if kind == 0:
        sparse(folder / "ids.bin", struct.pack("<3i", 20240520, 1, min(count, 2**31 - 1)), size)
        return fuzz_tokens.command(folder, random, random.choice(["ids.bin", "nanogpt:ids.bin"]))
    if kind == 1:
        head = fuzz_tokens.header(fuzz_tokens.usual(shape=(count,)))
        sparse(folder / "ids.npy", head, len(head) + 2 * count if count < 2**32 else size)
        return fuzz_tokens.command(folder, random)
    if kind == 2:
        place, *_ = fuzz_safetensors.write(random, folder)
        names = ["model.safetensors", "model.safetensors.index.json", "tokenizer.json", "config.json"]
        name = random.choice(names)
        sparse(place / name, struct.pack("<Q", count) + b"{" if name.endswith("tensors") else b"{", size)
        return fuzz_gguf.command(random, folder, "m")
    file = fuzz_gguf.model(random)
    type_of = random.choice([0, 4, 7, 8, 9, 12])
    file.keys.append(("odd", struct.pack("<IIQ", fuzz_gguf.ARRAY, type_of, count)))
    file.tensors = []
    sparse(folder / "x.gguf", file.bytes(), size)
    return fuzz_gguf.command(random, folder)


@cache
def member(unit: bytes, size: int) -> bytes:
    """Return `size` bytes of a repeated unit as a gzip member; members may be joined."""
    return gzip.compress((unit * (size // len(unit) + 1))[:size], 9)


def bombs(random: Random, folder: Path) -> list[str]:
    """Write one line of up to half a gigabyte, or 1 MiB of short lines, compressed once or twice."""
    endless = random.random() < 0.6  # one line or zeros, which a reader need not read to the end
    unit = random.choice(ENDLESS if endless else SHORT)
    many, size = (random.choice([1, 16, 128]), BLOCK) if endless else (1, ROWS)
    name = random.choice(["t.jsonl", "t.jsonl", "t.txt" if unit == b"\0" or not endless else "t.jsonl"])
    if random.random() < 0.3:
        zipped = fuzz_texts.zstd(unit * (size // len(unit))) * many
        return [*fuzz_texts.tokenize(random, folder, f"{name}.zst", zipped), *LARGE_PARTS]
    raw = random.choice([b"", gzip.compress(fuzz_texts.GOOD)]) + member(unit, size) * many
    if random.random() < 0.2:
        raw = gzip.compress(raw)
    return [*fuzz_texts.tokenize(random, folder, f"{name}.gz", raw), *LARGE_PARTS]


CASES = {"megatron": megatron, "headers": headers, "bombs": bombs}
