"""The reader decodes files as the package gguf does, and refuses damaged files."""

import os
import pickle
import struct
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import write_raw, write_tensors

from zero_mpi.checkpoint import tensor_file
from zero_mpi.checkpoint.gguf import index
from zero_mpi.checkpoint.gguf.reader import GGUFError, GGUFFile
from zero_mpi.config.inputs import ignored_parts
from zero_mpi.errors import FileError

Kind = gguf.GGMLQuantizationType


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(name) + u32(kind) + payload


def array(item: int, count: int, payload: bytes) -> bytes:
    return u32(item) + u64(count) + payload


def tensor(
    name: str | bytes, ne: tuple[int, ...], offset: int, kind: int = Kind.F32, dims: int | None = None
) -> bytes:
    count = u32(len(ne) if dims is None else dims)
    return text(name) + count + b"".join(map(u64, ne)) + u32(kind) + u64(offset)


@dataclass
class Parts:
    """Parts of a valid file: two keys; tensors a (3, 5) F32, b (2,) F16, c (64,) Q8_0."""

    magic: bytes = b"GGUF"
    version: bytes = u32(3)
    n_tensors: int | None = None
    n_keys: int | None = None
    keys: Sequence[bytes] = (
        key("general.architecture", 8, text("llama")),
        key("tokens", 9, array(8, 3, text("a") + text("") + text("ü"))),
    )
    tensors: Sequence[bytes] = (
        tensor("a", (5, 3), 0),
        tensor("b", (2,), 64, Kind.F16),
        tensor("c", (64,), 96, Kind.Q8_0),
    )
    alignment: int = 32
    data: bytes = bytes(range(192))
    tail: bytes = b""

    def head(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        head = self.magic + self.version + u64(n_tensors) + u64(n_keys)
        return head + b"".join(self.keys) + b"".join(self.tensors)

    def pack(self) -> bytes:
        head = self.head()
        return head + bytes(-len(head) % self.alignment) + self.data + self.tail


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def load(content: bytes | Parts) -> GGUFFile:
        path = tmp_path / "m.gguf"
        path.write_bytes(content.pack() if isinstance(content, Parts) else content)
        return GGUFFile.open(path)

    return load


def keys(*pairs: bytes) -> list[bytes]:
    return [*Parts().keys, *pairs]


def test_the_undamaged_file_loads(load):
    file = load(Parts())
    assert file.metadata == {"general.architecture": "llama", "tokens": ["a", "", "ü"]}
    start = file.nbytes - 192
    assert start % 32 == 0
    a, b, c = file.tensors.values()
    assert a == index.TensorInfo("a", (3, 5), Kind.F32, start)
    assert b == index.TensorInfo("b", (2,), Kind.F16, start + 64)
    assert c == index.TensorInfo("c", (64,), Kind.Q8_0, start + 96)
    assert (a.nbytes, b.nbytes, c.nbytes) == (60, 4, 68)
    assert (a.size, b.size, c.size) == (15, 2, 64)
    assert list(file.tensors) == ["a", "b", "c"]


@pytest.mark.parametrize("changes", [{"version": u32(2)}, {"data": bytes(96 + 68)}], ids=["v2", "no padding"])
def test_version_2_loads_and_the_last_padding_may_be_missing(load, changes):
    assert len(load(Parts(**changes)).tensors) == 3


@pytest.mark.parametrize("tail", [b"\0", bytes(32), bytes(4096), b"hello" * 10, bytes(1 << 20)], ids=len)
def test_bytes_behind_the_last_tensor_are_not_read(load, tmp_path, tail):
    plain, file = load(Parts()), load(Parts(tail=tail))
    assert (file.metadata, file.tensors) == (plain.metadata, plain.tensors)
    assert (plain.surplus, file.surplus) == (0, len(tail))
    assert [str(len(tail)) in line for line in ignored_parts(file)] == [True]
    tensors = gguf.GGUFReader(tmp_path / "m.gguf").tensors
    assert [np.asarray(info.data).tobytes() for info in tensors] == [
        b"".join(file.raw_chunks(name, 7)) for name in file.tensors
    ]


CHECKPOINT = key("training.checkpoint_id", 8, text("x"))


def keyed(entry: bytes) -> Parts:
    return Parts(keys=keys(entry))


def valued(kind: int, payload: bytes) -> Parts:
    return keyed(key("k", kind, payload))


def aligned(kind: int, payload: bytes) -> Parts:
    return keyed(key("general.alignment", kind, payload))


def single(*line: Any, **options: Any) -> Parts:
    return Parts(tensors=[tensor(*line, **options)])


def two(offset: int) -> Parts:
    return Parts(tensors=[tensor("a", (5, 3), 0), tensor("b", (2,), offset)])


def strings(second: bytes) -> bytes:
    return array(8, 2, text("x") + second)


BIG = 2**63
NEXT = 192  # offset of a fourth tensor, if there were one
LONG = key("line\nbreak " * 5000, 4, u32(1))
DAMAGE: dict[str, tuple[Parts | bytes, str]] = {  # (content, text in the error)
    "empty file": (b"", "empty"),
    "magic": (Parts(magic=b"GGML"), "at byte 0: "),
    "version 1": (Parts(version=u32(1)), "found 1"),
    "big-endian": (Parts(version=struct.pack(">I", 3)), "big-endian"),
    "huge tensor count": (Parts(n_tensors=2**64 - 1), "18446744073709551615 tensors"),
    "one key less than there are": (Parts(n_keys=1), "at byte"),
    "key without a name": (keyed(key("", 4, u32(1))), "1 to 65535 bytes, found 0"),
    "key too long": (keyed(key("k" * 65536, 4, u32(1))), "found 65536"),
    "a long key of lines twice": (Parts(keys=keys(LONG, LONG)), "line"),
    "unknown value type": (valued(13, u64(0)), "0 to 12, found 13"),
    "string with a huge length": (valued(8, u64(BIG)), f"expected {BIG} bytes"),
    "string not UTF-8": (valued(8, text(b"ab\xc3")), "key 'k': expected UTF-8, found byte 0xc3"),
    "bool of 2": (valued(7, b"\2"), "bools of 0 or 1"),
    "array of arrays": (valued(9, array(9, 0, b"")), "nested arrays"),
    "numbers, huge count": (valued(9, array(10, 2**61, b"")), f"'k': expected {2**64} bytes"),
    "strings, huge count": (valued(9, array(8, 2**61, b"")), f"'k': expected {2**64} bytes"),
    "strings, one huge": (valued(9, strings(u64(2**64 - 8))), "key 'k': "),
    "strings, one a byte too long": (
        Parts(tensors=[], keys=[key("k", 9, strings(u64(1)))]).head(),
        "key 'k': ",
    ),
    "strings, one not UTF-8": (valued(9, strings(text(b"\xed\xa0\x80"))), "key 'k': expected UTF-8"),
    "alignment 48": (aligned(4, u32(48)), "8..2^20, found uint32 '48'"),
    "alignment 2^31": (aligned(4, u32(2**31)), f"uint32 '{2**31}'"),
    "alignment u64": (aligned(10, u64(32)), "found uint64"),
    "alignment str": (aligned(8, text("32")), "found str"),
    "tensor name of 64": (single("n" * 64, (1,), 0), "1 to 63 bytes, found 64"),
    "tensor twice": (Parts(tensors=[*Parts().tensors, tensor("b", (2,), NEXT)]), "tensor 'b'"),
    "five dims": (single("a", (1,) * 5, 0), "'a': expected 1 to 4 dims, found 5"),
    "a dim of 0": (single("a", (5, 0), 0), "found shape (0, 5)"),
    "dims that would wrap 64 bits": (single("a", (2**62, 4, 1, 1), 0), "'a': expected data up to"),
    "unknown tensor type": (single("a", (32,), 0, 4), "found 4"),
    "a row of half a block": (single("a", (48, 2), 0, Kind.Q8_0), "32 elements, found 48"),
    "a gap": (two(96), "'b': expected offset 64, found 96"),
    "data cut by one byte": (Parts(data=bytes(96 + 67)), "tensor 'c': "),
    "a byte behind a checkpoint": (Parts(keys=keys(CHECKPOINT), tail=b"\0"), "1 more bytes"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(load, tmp_path, name):
    content, message = DAMAGE[name]
    with pytest.raises(GGUFError) as caught:
        load(content)
    error = str(caught.value)
    assert message in error
    assert error.startswith(str(tmp_path / "m.gguf"))
    assert "\n" not in error
    assert len(error) - len(str(tmp_path)) < 500


def test_every_truncation_is_refused(load):
    content = Parts(data=bytes(96 + 68)).pack()
    for size in range(len(content)):
        with pytest.raises(GGUFError):
            load(content[:size])


@pytest.mark.parametrize("path", ["none.gguf", "none/m.gguf", ".", "pipe", "loop", "a\0b"])
def test_what_is_no_file(tmp_path, path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(FileError) as caught:
        GGUFFile.open(f"{tmp_path}/{path}")
    assert "\n" not in str(caught.value)


RANGES = [(0, 0), (0, 1), (0, 31), (1, 33), (31, 32), (32, 64), (33, 34), (255, 257)]
RANGES += [(700, 768), (767, 768), (768, 768)]
LOADABLE = [
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "TQ1_0",
]  # fmt: skip


@pytest.mark.parametrize("chunk", [7, 50, 1 << 20])
@pytest.mark.parametrize("name", LOADABLE)
def test_any_range_of_any_type_that_models_come_in(load, monkeypatch, name, chunk):
    """Blocks are random bytes, because the package gguf cannot encode all of these types."""
    monkeypatch.setattr(tensor_file, "CHUNK", chunk)
    kind = Kind[name]
    block, width = gguf.GGML_QUANT_SIZES[kind]
    columns = 768
    raw = np.random.default_rng(kind).integers(0, 256, 5 * columns // block * width, np.uint8)
    file = load(Parts(tensors=[tensor("a", (columns, 5), 0, kind)], data=raw.tobytes()))
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind).astype(np.float32)
    assert np.isfinite(expected).mean() > 0.5
    for start, stop in [*RANGES, (1, 3839), (0, 3840), (250, 1030), (3839, 3840)]:
        np.testing.assert_array_equal(file.read("a", start, stop), expected[start:stop])
    np.testing.assert_array_equal(file.tensor("a"), expected.reshape(5, columns))


def test_only_the_bytes_of_the_range_are_read(tmp_path: Path) -> None:
    """Reading a slice of a sparse tensor of 4 GiB takes only the memory of the slice."""
    path = write_raw(tmp_path / "m.gguf", "llama", {}, [("x", (1 << 15, 1 << 15))])
    file = GGUFFile.open(path)
    with open(path, "r+b") as handle:
        handle.seek(file.tensors["x"].offset + 4 * 1_000_000_007)
        handle.write(b"\0\0\x80\x3f")
    tracemalloc.start()
    values = file.read("x", 1_000_000_005, 1_000_000_010)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert values.tolist() == [0, 0, 1, 0, 0]
    assert peak < 1 << 20


@pytest.mark.parametrize("kind", [Kind.I32, Kind.F64, Kind.Q8_K])
def test_a_type_that_holds_no_weights(load, kind):
    block, width = gguf.GGML_QUANT_SIZES[kind]
    file = load(Parts(tensors=[tensor("a", (block,), 0, kind)], data=bytes(width)))
    with pytest.raises(FileError, match=f"tensor 'a': .* {kind.name}"):
        file.read("a")


def test_a_file_that_changed_under_the_index(load):
    file = load(Parts())
    os.truncate(file.path, file.nbytes - 1)
    with pytest.raises(FileError, match="changed while in use: expected"):
        file.read("a")
    file.path.unlink()
    with pytest.raises(FileError, match="no such file"):
        file.read("a")


def test_an_index_stays_on_the_file_it_was_opened_on(tmp_path):
    for step in (1, 2):
        (tmp_path / str(step)).mkdir()
        write_tensors(tmp_path / str(step) / "m.gguf", "llama", {}, {"x": np.full(4, step, np.float32)})
    (tmp_path / "latest").symlink_to("1")
    file = GGUFFile.open(tmp_path / "latest" / "m.gguf")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("2")
    assert file.read("x").tolist() == [1, 1, 1, 1]

    assert pickle.loads(pickle.dumps(file)) == file, "a file can be pickled"
