"""The packed header: what is written by it, the gguf package reads with the same bits; what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import GGUFStream

from zero_mpi.checkpoint.gguf.header import pack_file
from zero_mpi.checkpoint.gguf.reader import GGUFError, GGUFFile

Kind = gguf.GGMLQuantizationType

SHAPES = [("token_embd.weight", (5, 8)), ("output_norm.weight", (3,)), ("deep", (2, 1, 3, 4))]

VALUES: dict[str, Any] = {
    "str": "grüße, 🎈\nzwei Zeilen",
    "str.empty": "",
    "bool.true": True,
    "bool.false": False,
    "u8": np.uint8(255),
    "i8": np.int8(-128),
    "u16": np.uint16(65535),
    "i16": np.int16(-32768),
    "u32": np.uint32(2**32 - 1),
    "i32": np.int32(-(2**31)),
    "u64": np.uint64(2**64 - 1),
    "i64": np.int64(-(2**63)),
    "f32": np.float32(0.1),
    "f64": np.float64(0.1),
    "f64.nan": np.array([0x7FF0000000000001], np.uint64).view(np.float64)[0],
    "a.u8": np.array([0, 255], np.uint8),
    "a.i8": np.array([-128, 127], np.int8),
    "a.u16": np.array([0, 65535], np.uint16),
    "a.i16": np.array([-32768, 32767], np.int16),
    "a.u32": np.array([0, 2**32 - 1], np.uint32),
    "a.i32": np.array([-(2**31), 2**31 - 1], np.int32),
    "a.u64": np.array([0, 2**64 - 1], np.uint64),
    "a.i64": np.array([-(2**63), 2**63 - 1], np.int64),
    "a.f32": np.array([0.1, -0.0, np.inf], np.float32),
    "a.f64": np.array([0.1, -0.0, 1e300], np.float64),
    "a.bool": np.array([True, False, True]),
    "a.str": ["", "a", "Ġthe", "\x00"],
    "a.empty.f64": np.zeros(0, np.float64),
    "a.empty.bool": np.zeros(0, bool),
    "a.empty.str": [],
}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES}


def write(path: Path, metadata: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> GGUFStream:
    arrays = tensors() if arrays is None else arrays
    announced = [(name, array.shape) for name, array in arrays.items()]
    with GGUFStream(path, "llama", metadata, announced) as stream:
        for name, array in arrays.items():
            stream.write(name, array)
    return stream


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("keys", [[], *([key] for key in VALUES), list(VALUES)])
def test_a_value_comes_back_with_its_type_and_a_second_trip_has_the_same_bytes(
    tmp_path: Path, keys: list[str]
) -> None:
    write(tmp_path / "one.gguf", {key: VALUES[key] for key in keys}, {})
    file = GGUFFile.open(tmp_path / "one.gguf")
    assert (list(file.metadata), file.tensors) == (["general.architecture", *keys], {})
    assert all(same(file.metadata[key], VALUES[key]) for key in keys), file.metadata
    write(tmp_path / "two.gguf", file.metadata, {})
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (7, np.uint32(7)),
        (2**32 - 1, np.uint32(2**32 - 1)),
        (0.1, np.float32(0.1)),
        (float("inf"), np.float32(np.inf)),
        (np.bool_(True), True),
        (np.array([1, 2], ">u2"), np.array([1, 2], np.uint16)),
        (np.arange(6, dtype=np.int32)[::2], np.array([0, 2, 4], np.int32)),
        (np.array([5], np.longlong), np.array([5], np.int64)),
    ],
)
def test_plain_and_foreign_values_are_stored_as(tmp_path: Path, value: Any, stored: Any) -> None:
    write(tmp_path / "m.gguf", {"k": value})
    assert same(GGUFFile.open(tmp_path / "m.gguf").metadata["k"], stored)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "expected an int from 0 to"),
        (2**32, "expected an int from 0 to"),
        (1e39, "range of FLOAT32"),
        (None, "found NoneType"),
        (b"x", "found bytes"),
        ({"a": 1}, "found dict"),
        (("a", "b"), "found tuple"),
        ([1, 2], "found int at place 0"),
        (["a", 2], "found int at place 1"),
        (["a", ["b"]], "found list at place 1"),
        (np.float16(1), "found dtype float16"),
        (np.zeros(2, np.complex64), "found dtype complex64"),
        (np.array(["a"]), "found dtype <U1"),
        (np.zeros((2, 2), np.float32), "found shape"),
        (np.zeros((), np.float32), "found shape"),
        ("\ud800", "UTF-8"),
        (["ok", "\ud800"], "UTF-8"),
    ],
)
def test_a_value_that_gguf_cannot_hold_is_refused_by_key(value: Any, message: str) -> None:
    with pytest.raises(GGUFError, match=f"key 'some.key': .*{message}") as caught:
        pack_file("llama", {"some.key": value}, [])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "announced", "found"),
    [
        ({"": 1}, [], "65535 bytes, found 0"),
        ({"k" * 65536: 1}, [], "found 65536"),
        ({}, [("", (1,))], "63 bytes, found 0"),
        ({}, [("n" * 64, (1,))], "found 64"),
        ({}, [("ü" * 32, (1,))], "found 64"),
        ({}, [("t", (1,)), ("t", (2,))], "twice"),
        ({}, [("t", ())], "4 dims"),
        ({}, [("t", (1, 1, 1, 1, 1))], "4 dims"),
        ({}, [("t", (2, 0))], "dims of 1"),
        ({"general.architecture": "gpt2"}, [], "general.architecture"),
        ({"general.architecture": np.zeros(2)}, [], "general.architecture"),
        *(({"general.alignment": n}, [], "2") for n in (48, 4, 1 << 21, np.uint64(32), "32")),
    ],
)
def test_keys_names_and_shapes_that_a_loader_would_refuse(
    tmp_path: Path, metadata: dict[str, Any], announced: list[tuple[str, tuple[int, ...]]], found: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"the last good one")
    with pytest.raises(GGUFError, match=found):
        GGUFStream(path, "llama", metadata, announced)
    assert path.read_bytes() == b"the last good one"


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_the_file_equals_the_gguf_packages_byte_for_byte(tmp_path: Path, alignment: int | None) -> None:
    theirs = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    ours: dict[str, Any] = {}
    if alignment is not None:
        theirs.add_custom_alignment(alignment)
        ours["general.alignment"] = alignment
    theirs.add_array("tokens", ["a", "bé"])
    theirs.add_float64("lr", 0.1)
    theirs.add_bool("flag", True)
    theirs.add_array("types", [1, -3])
    for name, array in tensors().items():
        theirs.add_tensor(name, array)
    theirs.write_header_to_file()
    theirs.write_kv_data_to_file()
    theirs.write_tensors_to_file()
    theirs.close()
    ours |= {"tokens": ["a", "bé"], "lr": np.float64(0.1), "flag": True, "types": np.array([1, -3], np.int32)}
    write(tmp_path / "ours.gguf", ours)
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_tensors_come_back_whatever_their_strides(tmp_path: Path) -> None:
    base = np.arange(48, dtype=np.float32).reshape(6, 8)
    arrays = {"turned": base.T, "every.other": base[:, ::2], "backwards": base[0, ::-1]}
    write(tmp_path / "m.gguf", {}, arrays)
    file = GGUFFile.open(tmp_path / "m.gguf")
    for name, array in arrays.items():
        np.testing.assert_array_equal(file.tensor(name), array)


MIXED = [("a", (3, 5)), ("b", (2, 64), Kind.Q8_0), ("c", (7,), Kind.F16), ("d", (1, 32), Kind.Q4_1)]


def mixed() -> dict[str, bytes]:
    rng = np.random.default_rng(3)
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape, *_ in MIXED}
    kinds = {name: kind[0] if kind else Kind.F32 for name, _, *kind in MIXED}
    return {name: gguf.quants.quantize(values[name], kinds[name]).tobytes() for name in values}


def test_rows_fill_blocks() -> None:
    with pytest.raises(GGUFError, match=r"tensor 't': .* 32 elements for Q8_0"):
        pack_file("llama", {}, [("t", (2, 33), Kind.Q8_0)])


@pytest.mark.parametrize("alignment", [32, 8, 4096])
@pytest.mark.parametrize("table", [[], MIXED[:1], MIXED], ids=["none", "one", "all"])
def test_each_tensor_lies_at_its_aligned_place(tmp_path: Path, table: list[Any], alignment: int) -> None:
    keys = {"general.alignment": alignment, "tokens": ["a", "bé"], "n": np.int8(-1)}
    header, offsets, total = pack_file("llama", keys, table)
    with GGUFStream(tmp_path / "m.gguf", "llama", keys, table) as stream:
        for name, *_ in table:
            stream.write_raw(name, [mixed()[name]])
    file = GGUFFile.open(tmp_path / "m.gguf")
    assert {name: b"".join(file.raw_chunks(name, 64)) for name in offsets} == {
        name: mixed()[name] for name in offsets
    }
    assert [info.type for info in file.tensors.values()] == [(*spec, Kind.F32)[2] for spec in table]
    assert all(offset % alignment == 0 for offset in offsets.values())
    assert file.nbytes == total
    assert len(header) % alignment == 0
