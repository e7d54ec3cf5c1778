"""Token files with faulty headers, lengths, types or ids, and other files with names of token files."""

import json
import os
import struct
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import wild

from zero_mpi.data.teacher_file import HEAD, TeacherFile


def header(text: bytes, version: tuple[int, int] = (1, 0), length: int | None = None) -> bytes:
    width = "<H" if version == (1, 0) else "<I"
    claim = (len(text) if length is None else length) % 2 ** (8 * struct.calcsize(width))
    return b"\x93NUMPY" + bytes(version) + struct.pack(width, claim) + text


def usual(descr: Any = "<u2", order: Any = False, shape: Any = (500,)) -> bytes:
    text = f"{{'descr': {descr!r}, 'fortran_order': {order!r}, 'shape': {shape!r}, }}"
    return text.encode("utf-8", "surrogatepass").ljust(117) + b"\n"


IDS = (np.arange(500, dtype=np.uint16) % 61).tobytes()
ODD_HEADERS = (
    *(b"", b"\\", b"\\\n" * 50, b"\\" + b"\n" * 60, b"\n" * 117, b"\0" * 117, b"{", b"}", b"{}", b"[]", b"1"),
    *(b"(" * 5000, b"{'descr': " + b"[" * 5000, b"-" * 9000 + b"1", b"'" * 3, b'"""', b"lambda: 0"),
    *(b"__import__('os').system('true')", b"{**{}}", b"{'descr': '<u2'}", b"{1: {2: 3}}", b"9" * 9000),
    *(b"{'descr': '<u2', 'shape': (500,)}", b"# -*- coding: nonsense -*-\n{}", b"\xff\xfe", b"f'{1}'"),
    *(b"0x" + b"f" * 5000, b"1e999"),
)


def file(random: Random) -> bytes:
    kind = random.randrange(9)
    version = random.choice([(1, 0), (1, 0), (2, 0), (3, 0), (0, 0), (255, 255)])
    if kind == 0:
        return header(random.choice(ODD_HEADERS), version) + IDS
    if kind == 1:
        types = ["<u4", ">u2", "|u1", "<i8", "O", "|O", "u2,u2", "", "<u999", wild.text(random), 5]
        return header(usual(random.choice(types)), version) + IDS
    if kind == 2:
        count = random.choice(wild.INTEGERS)
        shapes = [(count,), (500, 1), (), (1,) * 70, count, [500], "500", (500.0,), (True,), None]
        return header(usual(shape=random.choice(shapes)), version) + IDS
    if kind == 3:
        return header(usual(order=random.choice([True, None, 1, "x", []])), version) + IDS
    if kind == 4:
        return header(usual(), version, random.choice([0, 1, 64, 65535, 2**31, 2**32 - 1])) + IDS
    if kind == 5:
        return wild.edited(random, header(usual()) + IDS)
    if kind == 6:
        return (header(usual()) + IDS)[: random.randrange(1200)]
    if kind == 7:
        return header(usual()) + random.randbytes(1000)
    return header(wild.edited(random, usual()), version) + IDS


def llm_c() -> dict[str, bytes]:
    return {"ids.bin": np.array([20240520, 1, 500] + [0] * 253, "<i4").tobytes() + IDS}


def megatron() -> dict[str, bytes]:
    """Return Megatron's file and index of 50 documents of ten ids."""
    index = b"MMIDIDX\0\0" + np.uint64(1).tobytes() + b"\x08" + np.array([50, 51], "<u8").tobytes()
    index += np.full(50, 10, "<i4").tobytes() + np.arange(0, 1000, 20, "<i8").tobytes()
    return {"ids.bin": IDS, "ids.idx": index + np.arange(51, dtype="<i8").tobytes()}


def arrow() -> dict[str, bytes]:
    """Return an Arrow stream of 50 documents of ten ids, or llm.c's file without pyarrow."""
    try:
        import pyarrow
    except ImportError:
        return llm_c()
    ids = np.frombuffer(IDS, np.uint16).astype(np.int32).reshape(50, 10).tolist()
    batch = pyarrow.record_batch({"input_ids": pyarrow.array(ids, pyarrow.list_(pyarrow.int32()))})
    out = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(out, batch.schema) as stream:
        stream.write_batch(batch)
    return {"ids.arrow": out.getvalue().to_pybytes()}


def others(random: Random, folder: Path) -> list[str]:
    files = random.choice([llm_c, megatron, arrow])()
    victim = random.choice(list(files))
    data = files[victim]
    files[victim] = random.choice([data, data[: random.randrange(len(data))], wild.edited(random, data)])
    for name, data in files.items():
        (folder / name).write_bytes(data)
    name = next(iter(files))
    mark = "nanogpt:" if name.endswith(".bin") and random.random() < 0.2 else ""
    return command(folder, random, mark + name)


def command(folder: Path, random: Random, name: str = "ids.npy") -> list[str]:
    sizes = ["--dim", "8", "--layers", "1", "--heads", "2", "--context", "16", "--vocab-size", "61"]
    steps = ["--sample", "0", "--steps", "1", "--batch-size", "1", "--micro-batch", "1", "--out", "out"]
    data = random.choice([[name], [name, name.replace("ids", "./ids")]])
    return ["-m", "zero_mpi.train", "--data", *data, *sizes, *steps]


def sound(random: Random, folder: Path) -> list[str]:
    (folder / "ids.npy").write_bytes(header(usual()) + IDS)
    return command(folder, random)


def bytes_of(random: Random, folder: Path) -> list[str]:
    (folder / "ids.npy").write_bytes(file(random))
    return command(folder, random)


def special(random: Random, folder: Path) -> list[str]:
    path = folder / "ids.npy"
    if random.random() < 0.4:
        path.write_bytes(header(usual(shape=(random.choice([500, 2**40, 2**32 - 64 + 2**20]),))))
        os.truncate(path, 8 << 30)
    else:
        wild.special(random, path)
    return command(folder, random)


def teachers(random: Random, folder: Path) -> list[str]:
    """Write a teacher's predictions with a changed header, edited bytes or another length."""
    (folder / "ids.npy").write_bytes(header(usual()) + IDS)
    teacher = TeacherFile(3, 1.0, 500, 61, "d", "t", "s")
    fields, records = json.loads(teacher.header()), bytes(500 * teacher.record.itemsize)
    fields[random.choice([*fields, "more"])] = wild.value(random)
    lie = wild.as_text(fields, random)[:HEAD].ljust(HEAD) + records
    sound = teacher.header() + records
    raw = random.choice([lie, lie[: random.randrange(len(lie))], sound + b"x", wild.edited(random, sound)])
    (folder / "top").write_bytes(raw)
    return [*command(folder, random), "--teacher", "top"]


CASES = {"sound": sound, "bytes": bytes_of, "special": special, "others": others, "teachers": teachers}
