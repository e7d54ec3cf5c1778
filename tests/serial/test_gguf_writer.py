"""Written files equal files of the package gguf, and keys keep their types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import write_tensors

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


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("keys", [[], *([key] for key in VALUES), list(VALUES)])
def test_a_value_comes_back_with_its_type_and_a_second_trip_has_the_same_bytes(
    tmp_path: Path, keys: list[str]
) -> None:
    write_tensors(tmp_path / "one.gguf", "llama", {key: VALUES[key] for key in keys}, {})
    file = GGUFFile.open(tmp_path / "one.gguf")
    assert (list(file.metadata), file.tensors) == (["general.architecture", *keys], {})
    assert all(same(file.metadata[key], VALUES[key]) for key in keys), file.metadata
    write_tensors(tmp_path / "two.gguf", "llama", file.metadata, {})
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


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
    write_tensors(tmp_path / "ours.gguf", "llama", ours, tensors())
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_rows_fill_blocks() -> None:
    with pytest.raises(GGUFError, match=r"tensor 't': .* 32 elements for Q8_0"):
        pack_file("llama", {}, [("t", (2, 33), Kind.Q8_0)])
