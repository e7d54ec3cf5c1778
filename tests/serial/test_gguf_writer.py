"""Written files equal those of the package gguf, and keys keep their types."""

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
    "f32": np.float32(0.1),
    "f64": np.float64(0.1),
    "f64.nan": np.array([0x7FF0000000000001], np.uint64).view(np.float64)[0],
    "a.f32": np.array([0.1, -0.0, np.inf], np.float32),
    "a.f64": np.array([0.1, -0.0, 1e300], np.float64),
    "a.bool": np.array([True, False, True]),
    "a.str": ["", "a", "Ġthe", "\x00"],
    "a.empty.f64": np.zeros(0, np.float64),
    "a.empty.bool": np.zeros(0, bool),
    "a.empty.str": [],
}
for kind in (np.dtype(f"{sign}{size}") for sign in "iu" for size in (1, 2, 4, 8)):
    ends = np.array([np.iinfo(kind).min, np.iinfo(kind).max], kind)
    VALUES |= {f"{kind}.least": ends[0], f"{kind}.most": ends[1], f"a.{kind}": ends}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("keys", [[], *([key] for key in VALUES), list(VALUES)])
def test_a_value_comes_back_with_its_type_and_a_second_trip_has_the_same_bytes(tmp_path, keys):
    write_tensors(tmp_path / "one.gguf", "llama", {key: VALUES[key] for key in keys}, {})
    file = GGUFFile.open(tmp_path / "one.gguf")
    assert (list(file.metadata), file.tensors) == (["general.architecture", *keys], {})
    assert all(same(file.metadata[key], VALUES[key]) for key in keys), file.metadata
    write_tensors(tmp_path / "two.gguf", "llama", file.metadata, {})
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_the_file_equals_the_gguf_packages_byte_for_byte(tmp_path, alignment):
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    ours: dict[str, Any] = {}
    if alignment is not None:
        writer.add_custom_alignment(alignment)
        ours["general.alignment"] = alignment
    writer.add_array("tokens", ["a", "bé"])
    writer.add_float64("lr", 0.1)
    writer.add_bool("flag", True)
    writer.add_array("types", [1, -3])
    for name, array in tensors().items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours |= {"tokens": ["a", "bé"], "lr": np.float64(0.1), "flag": True, "types": np.array([1, -3], np.int32)}
    write_tensors(tmp_path / "ours.gguf", "llama", ours, tensors())
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_rows_fill_blocks():
    with pytest.raises(GGUFError, match=r"tensor 't': .* 32 elements for Q8_0"):
        pack_file("llama", {}, [("t", (2, 33), Kind.Q8_0)])
