"""A model in several files is opened through its first part, and all parts are checked."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import write_tensors

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.errors import UsageError

SHAPES = {f"t{i}": (i + 1, 32) for i in range(5)}
Edit = dict[str, Any]


def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def part(folder: Path, number: int) -> Path:
    return folder / f"m-{number:05d}-of-00003.gguf"


def by_gguf(folder: Path, kind: gguf.GGMLQuantizationType | None = None) -> Path:
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=2)
    writer.add_context_length(7)
    for name, array in values().items():
        writer.add_tensor(name, array if kind is None else gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part(folder, 1)


def by_us(folder: Path, edits: dict[int, Edit] | None = None) -> Path:
    for number, tensors in ((1, ["t0", "t1"]), (2, ["t2", "t3"]), (3, ["t4"])):
        keys: Edit = {
            "llama.context_length": np.uint32(7) if number == 1 else None,
            "split.no": np.uint16(number - 1),
            "split.count": np.uint16(3),
            "split.tensors.count": np.int32(5),
        }
        keys |= (edits or {}).get(number, {})
        architecture = keys.pop("general.architecture", "llama")
        meta = {key: value for key, value in keys.items() if value is not None}
        write_tensors(part(folder, number), architecture, meta, {name: values()[name] for name in tensors})
    return part(folder, 1)


@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.Q8_0])
def test_the_parts_of_the_gguf_package_are_one_model(tmp_path: Path, kind: Any) -> None:
    file = GGUFFile.open(by_gguf(tmp_path, kind))
    assert list(file.tensors) == list(SHAPES)
    assert set(file.metadata) == {"general.architecture", "llama.context_length"}
    assert file.split == {"split.no": 0, "split.count": 3, "split.tensors.count": 5}
    assert file.path == part(tmp_path, 1)
    assert [info.part for info in file.tensors.values()] == [0, 0, 1, 1, 2]
    for name, array in values().items():
        expected = array if kind is None else gguf.dequantize(gguf.quantize(array, kind), kind)
        np.testing.assert_array_equal(file.tensor(name), expected)
        np.testing.assert_array_equal(file.read(name, 5, 29), expected.ravel()[5:29])
    raw = values()["t4"] if kind is None else gguf.quantize(values()["t4"], kind)
    assert b"".join(file.raw_chunks("t4", 100)) == raw.tobytes()
    assert file.nbytes == sum(path.stat().st_size for path in tmp_path.glob("*.gguf"))


def test_links_lead_to_the_parts(tmp_path: Path) -> None:
    """All parts may be links, or only the first part, whose target then determines the other names."""
    by_us(tmp_path)
    (tmp_path / "store").mkdir()
    for number in (1, 2, 3):
        part(tmp_path, number).rename(tmp_path / "store" / f"blob{number}")
        part(tmp_path, number).symlink_to(f"store/blob{number}")
    assert len(GGUFFile.open(part(tmp_path, 1)).tensors) == 5
    (tmp_path / "whole").mkdir()
    by_us(tmp_path / "whole")
    (tmp_path / "latest").symlink_to(part(tmp_path / "whole", 1))
    assert len(GGUFFile.open(tmp_path / "latest").tensors) == 5


@pytest.mark.parametrize("number", [2, 3])
def test_a_missing_part_is_named(tmp_path: Path, number: int) -> None:
    by_gguf(tmp_path)
    part(tmp_path, number).unlink()
    with pytest.raises(UsageError, match=rf"{part(tmp_path, number)}: no such file"):
        GGUFFile.open(part(tmp_path, 1))


def test_a_part_under_another_name(tmp_path: Path) -> None:
    by_us(tmp_path).rename(tmp_path / "model.gguf")
    with pytest.raises(UsageError, match=r"expected a name that ends in -00001-of-00003\.gguf"):
        GGUFFile.open(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({2: {"split.no": np.uint16(2)}}, "00002.*key split.no: expected 1, as part 2 of 3, found 2"),
        ({3: {"split.count": "3"}}, "00003.*key split.count: expected UINT16 .*found 'str 3'"),
        ({1: {"split.count": np.uint32(3)}}, "key split.count: expected UINT16 .*found 'uint32 3'"),
        ({1: {"split.tensors.count": np.int32(6)}}, "expected 5, .*, found 6"),
        ({2: {"llama.context_length": 9}}, "00002.*key 'llama.context_length': expected only split"),
        ({2: {"general.architecture": "gpt2"}}, "00002.*expected architecture 'llama'"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, edits: dict[int, Edit], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        GGUFFile.open(by_us(tmp_path, edits))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"split.no": np.uint16(0), "split.count": np.uint16(0), "split.tensors.count": np.int32(5)},
        {"split.no": np.uint16(0), "split.count": np.uint16(1), "split.tensors.count": np.int32(1)},
    ],
    ids=["merged", "one part"],
)
def test_a_whole_model_may_carry_the_keys(tmp_path: Path, keys: Edit) -> None:
    """A split count of 1, or of 0, which llama.cpp's merge program writes, means one file."""
    path = write_tensors(tmp_path / "any name.gguf", "llama", keys, {"t0": values()["t0"]})
    file = GGUFFile.open(path)
    assert set(file.metadata) == {"general.architecture"}
    assert list(file.tensors) == ["t0"]
