"""The safetensors reader and writer agree with the `safetensors` library; damaged files are refused."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from zero_mpi.checkpoint.safetensors import INDEX, SafetensorsModel, pack_header
from zero_mpi.errors import FileError

safetensors = pytest.importorskip(
    "safetensors", reason="no library to compare with: pip install safetensors", exc_type=ImportError
)
library = pytest.importorskip("safetensors.numpy")

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


def arrays(dtype: str = "F32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"a": (3, 5), "b": (7,), "c": (2, 3, 4), "scalar": (), "none": (0, 4)}
    return {name: rng.standard_normal(shape).astype(DTYPES[dtype]) for name, shape in shapes.items()}


def packed(header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_library_writes_is_read_with_its_values(tmp_path: Path, dtype: str) -> None:
    library.save_file(arrays(dtype), tmp_path / "m.safetensors", metadata={"format": "np"})
    model = SafetensorsModel.open(tmp_path / "m.safetensors")
    assert set(model.tensors) == set(arrays())
    for name, array in arrays(dtype).items():
        assert model.tensors[name].shape == array.shape
        assert model.tensors[name].dtype == dtype
        full, part = array.astype(np.float32).ravel(), slice(array.size // 3, array.size - array.size // 4)
        np.testing.assert_array_equal(model.read(name), full)
        np.testing.assert_array_equal(model.read(name, part.start, part.stop), full[part])
        assert b"".join(model.raw_chunks(name, 5)) == array.tobytes()
    with pytest.raises(ValueError, match=r"range \[0, 16\) is not inside"):
        model.read("a", 0, 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_we_write_the_library_reads_with_the_same_bits(tmp_path: Path, dtype: str) -> None:
    tensors = arrays(dtype)
    announced = [(name, dtype, array.shape) for name, array in tensors.items()]
    data = b"".join(array.tobytes() for array in tensors.values())
    (tmp_path / "m.safetensors").write_bytes(pack_header(announced) + data)
    copies = library.load_file(tmp_path / "m.safetensors")
    assert {name: (array.dtype, array.shape, array.tobytes()) for name, array in copies.items()} == {
        name: (array.dtype, array.shape, array.tobytes()) for name, array in tensors.items()
    }


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.bool_, np.uint8])
def test_a_type_that_holds_no_weights_is_listed_but_not_read(tmp_path: Path, dtype: Any) -> None:
    library.save_file({"x": np.ones(4, dtype)}, tmp_path / "m.safetensors")
    model = SafetensorsModel.open(tmp_path / "m.safetensors")
    assert model.tensors["x"].shape == (4,)
    with pytest.raises(FileError, match="tensor 'x': expected F32, F16 or BF16, found"):
        model.read("x")


A = {"a": entry()}
DAMAGE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "expected a safetensors file .* found a file of 0 bytes"),
    "no header": (b"\0" * 8, "expected a safetensors file .* found 0"),
    "header past the end": (packed(A, bytes(8), 1000), "with a header of 2 to [0-9]+ bytes, found 1000"),
    "huge header": (packed(A, bytes(8), 2**64 - 1), "found 18446744073709551615"),
    "no JSON": (packed(b"{nothing}"), "not valid JSON"),
    "twice": (packed(b'{"a": 1, "a": 2}'), "expected 'a' once, found it twice"),
    "half a character": (packed({"\ud800": entry()}, bytes(8)), "expected a name that UTF-8 can hold"),
    "no object": (packed({"a": 1}), "tensor 'a': expected dtype, shape and data_offsets"),
    "a field more": (packed({"a": entry() | {"x": 1}}, bytes(8)), "expected dtype, shape and data_offsets"),
    "unknown dtype": (packed({"a": entry("F31")}, bytes(8)), "expected a known dtype, found 'F31'"),
    "shape of a float": (packed({"a": entry(shape=[2.0])}, bytes(8)), "expected a shape of whole numbers"),
    "shape below 0": (packed({"a": entry(shape=[-2, -1])}, bytes(8)), "expected a shape of whole numbers"),
    "shape that would wrap": (packed({"a": entry(shape=[2**62, 4, 2])}, bytes(8)), "expected 1.*found 8"),
    "shape of 65 dims": (packed({"a": entry(shape=[1] * 65)}, bytes(8)), "expected a shape"),
    "too short": (packed({"a": entry(offsets=[0, 4])}, bytes(4)), "expected 8 bytes for F32 .*found 4"),
    "half a byte": (packed({"a": entry("F4", [3], [0, 1])}, bytes(1)), "expected 1.5 bytes for F4"),
    "data cut": (packed(A, bytes(7)), "expected a file of [0-9]+ bytes, found"),
    "a gap": (packed({"a": entry(offsets=[4, 12])}, bytes(12)), "a gap or an overlap"),
    "an overlap": (packed(A | {"b": entry(offsets=[4, 12])}, bytes(12)), "tensor 'b': .*a gap or an overlap"),
    "metadata of numbers": (packed(A | {"__metadata__": {"a": 1}}, bytes(8)), "__metadata__: expected names"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    content, message = DAMAGE[name]
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(FileError, match=message) as caught:
        SafetensorsModel.open(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    str(caught.value).encode()
    if name not in ("a field more", "shape of 65 dims"):  # faults that the library accepts
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(content)


def in_parts(folder: Path, files: dict[str, str] | None = None) -> None:
    usual = {}
    for file, names in {"x-1.safetensors": ["a", "b"], "x-2.safetensors": ["c", "scalar"]}.items():
        library.save_file({name: arrays()[name] for name in names}, folder / file)
        usual |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": usual if files is None else files}))


def test_a_folder_of_parts_is_one_model(tmp_path: Path) -> None:
    in_parts(tmp_path)
    model = SafetensorsModel.open_folder(tmp_path)
    for name in ("a", "b", "c", "scalar"):
        np.testing.assert_array_equal(model.read(name), arrays()[name].ravel())
    library.save_file({"only": arrays()["a"]}, tmp_path / "model.safetensors")
    assert set(SafetensorsModel.open_folder(tmp_path).tensors) == {"only"}
