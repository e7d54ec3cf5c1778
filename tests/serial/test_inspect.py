"""Tests of `zero-mpi inspect`: contents, flipped bits, comparison of two states."""

import json
import math
import re
import shutil
import sys
import tracemalloc
from pathlib import Path

import gguf
import hf_models
import ml_dtypes
import numpy as np
import pytest
from gguf_files import write_raw, write_tensors
from jobs import run_command
from test_command_bits import SETTINGS, SIZES, needs_mpiexec, train, write_text
from test_export import export

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.commands.inspect import command as inspect_command
from zero_mpi.commands.inspect.compare import compare
from zero_mpi.commands.inspect.examine import SCALES, elements, examine, not_finite
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World

PAIR = ("model.gguf", "optimizer.gguf")
NAME = "blk.1.ffn_up.weight"  # 97 x 48
CHANGED = "has a key that was changed"


def run(*arguments) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "zero_mpi", "inspect", *map(str, arguments)]
    return run_command(command, timeout=60)


def inside(*arguments) -> int:
    return inspect_command.command(World(0, 1), [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[int, tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("trained")
    flags = ["--data", *write_text(folder), *SIZES, *SETTINGS, "--batch-size", "7", "--micro-batch", "2"]
    outs = {ranks: folder / f"out-{ranks}" for ranks in (1, 3)}
    return {ranks: (out, train(ranks, out, *flags)) for ranks, out in outs.items()}


@pytest.fixture
def checkpoint(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained[1][0] / "latest", tmp_path / "checkpoint"))


def flip(path: Path, name: str, element: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[GGUFFile.open(path).tensors[name].offset + 4 * element] ^= mask
    path.write_bytes(data)


def put(path: Path, name: str, element: int, value: float) -> None:
    with path.open("r+b") as file:
        file.seek(GGUFFile.open(path).tensors[name].offset + 4 * element)
        file.write(np.float32(value).tobytes())


def rewrite(path: Path, **keys) -> None:
    file = GGUFFile.open(path)
    metadata = file.metadata | {key.replace("__", "."): value for key, value in keys.items()}
    tensors = {name: file.tensor(name) for name in file.tensors}
    write_tensors(path, metadata["general.architecture"], metadata, tensors)


def foreign(path: Path) -> Path:
    keys = {"strange.block_count": 3, "strange.note": "two\nlines \x1b[31m" + "x" * 200, "odd\x1b\nname": "x"}
    keys |= dict.fromkeys(("tokenizer.ggml.model", "tokenizer.chat_template"), "odd")
    keys["strange.list"] = np.arange(50, dtype=np.int32)
    kinds = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0", "Q4_1")]
    draw, data = np.random.default_rng(0), {}
    for kind in kinds:
        values = draw.normal(size=(64, 256)).astype(np.float32)
        data[kind.name.lower()] = gguf.quants.quantize(values, kind).tobytes()
    return write_raw(path, "strange", keys, [(kind.name.lower(), (64, 256), kind) for kind in kinds], **data)


@needs_mpiexec
@pytest.mark.parametrize("ranks", [1, 3])
def test_state_is_the_one_that_training_announced(ranks, trained):
    out, printed = trained[ranks]
    digest = re.search(r"saved \S+ in \S+ s, state ([0-9a-f]{16})\b", printed)[1]
    for path in (out, out / "latest", out / "step-00000003"):
        status, text, errors = run(path)
        assert (status, errors) == (0, "")
        assert re.search(rf"state digest +{digest}[0-9a-f]{{48}}\n", text), text
        assert re.search(r"checksums +63\n", text)
    base = examine(trained[1][0])
    assert examine(out)["state_digest"] == base["state_digest"] == base["training"]["recorded_state_digest"]


@needs_mpiexec
def test_json_says_the_same(trained):
    status, text, errors = run(trained[3][0], "--json", "--keys", "--tensors")
    report = json.loads(text, parse_constant=pytest.fail)
    assert (status, errors, report["sound"]) == (0, "", True)
    file = GGUFFile.open(trained[3][0] / "latest" / "model.gguf")
    rows = {row["name"]: (tuple(row["shape"]), row["bytes"]) for row in report["tensors"]["model"]}
    assert rows == {name: (info.shape, info.nbytes) for name, info in file.tensors.items()}
    digests = [f"{row['digest']} {row['name']}" for row in report["tensors"]["model"]]
    assert digests == file.metadata["training.tensor_digests"]
    assert report["keys"]["model"]["tokenizer.ggml.tokens"] == file.metadata["tokenizer.ggml.tokens"]
    assert report["keys"]["model"].keys() == file.metadata.keys()
    assert (report["training"]["step"], report["tokenizer"]["chat_template"]) == (3, False)


@needs_mpiexec
@pytest.mark.parametrize("file", PAIR)
@pytest.mark.parametrize("alone", [False, True])
def test_a_flipped_bit_is_found_and_named(file, alone, checkpoint):
    name = NAME if file == "model.gguf" else f"optimizer.adam.second_moments.{NAME}"
    flip(checkpoint / file, name, 1000)
    status, text, errors = run(checkpoint / file if alone else checkpoint)
    assert (status, errors) == (1, "")
    assert text.count("checksum differs") == 1
    assert re.search(rf"problems .*{file}: tensor '{re.escape(name)}' .*checksum differs", text)
    assert re.search(r"sound +no\n", text)


@needs_mpiexec
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"training__settings": '{"seed": 3}'}, CHANGED),
        ({"training__model_digests": []}, CHANGED),
        ({"training__checkpoint_id": np.arange(3)}, "checkpoint_id: expected a text, found an array of 3"),
        ({"optimizer__file_version": np.uint32(9)}, "version 2, found"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_keys_that_were_changed(change, named, checkpoint):
    rewrite(checkpoint / "optimizer.gguf")
    assert inside(checkpoint) == 0
    rewrite(checkpoint / "optimizer.gguf", **change)
    status, text, errors = run(checkpoint)
    assert (status, errors) == (1, "")
    assert named in text


def test_a_foreign_file_has_no_checksums(tmp_path):
    status, text, errors = run(foreign(tmp_path / "foreign.gguf"))
    assert (status, errors) == (0, "")
    for part in (r"checksums +0\n", "type Q4_1, tensors 1, bytes 10,240", "cannot_run [^n]", "template yes"):
        assert re.search(part, text)
    assert "not finite" not in text
    keys = run(tmp_path / "foreign.gguf", "--keys")[1]
    assert "\x1b" not in text + keys
    assert "x" * 200 in keys
    assert "48, 49]" in keys


@pytest.mark.parametrize("name", SCALES)
def test_values_of_blocks_that_are_not_finite_are_counted(name):
    """`not_finite` counts correctly, although it decodes only blocks whose scales are not finite."""
    kind = gguf.GGMLQuantizationType[name]
    shape = (4000, gguf.constants.GGML_QUANT_SIZES[kind][1])
    raw = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8).tobytes()
    values = elements(raw, kind)
    assert not_finite(raw, kind) == np.count_nonzero(~np.isfinite(values)) > 0


def test_a_safetensors_folder(tmp_path):
    config = hf_models.CONFIGS["llama"]
    tensors = {name: array.astype(np.float16) for name, array in hf_models.random_tensors(config).items()}
    folder = hf_models.write_folder(tmp_path / "hf", config, tensors)
    status, text, errors = run(folder)
    assert (status, errors) == (0, "")
    assert "safetensors" in text
    assert "sizes: blocks 2, width 24, heads 4, key/value heads 2, feed-forward 40, context 32" in text
    assert f"type F16, tensors {len(tensors)}" in text
    assert inside(folder, hf_models.write_folder(tmp_path / "same", config, tensors)) == 0
    norm = tensors["model.norm.weight"].copy()
    norm[3] = math.nan
    broken = hf_models.write_folder(tmp_path / "broken", config, tensors | {"model.norm.weight": norm})
    assert inside(broken) == 1
    values = compare(folder, broken)["difference"]["values"]
    assert values == [pytest.approx(float(tensors["model.norm.weight"][3]), rel=1e-3), "nan"]


@pytest.mark.parametrize(("dtype", "low"), [(ml_dtypes.bfloat16, 1e-3), (np.float32, 1e-9)])
def test_norms_that_a_folder_stores_minus_1_are_compared_by_their_stored_bits(dtype, low, tmp_path):
    """1 + weight rounds to the same bits in both folders. GGUF files have these norms in float32."""
    config, folders = hf_models.CONFIGS["gemma3"], []
    tensors = {name: array.astype(dtype) for name, array in hf_models.random_tensors(config).items()}
    for value in (low, 1.5 * low):
        tensors["model.norm.weight"] = np.full(24, value, dtype)
        folders.append(hf_models.write_folder(tmp_path / str(value), config, tensors))
    report = compare(*folders)
    assert report["differing"] == ["output_norm.weight"]
    assert report["difference"]["values"] == [pytest.approx(value, rel=0.01) for value in (low, 1.5 * low)]
    export(folders[0], tmp_path / "m.gguf")
    norms = [name for name in compare(folders[0], tmp_path / "m.gguf")["differing"] if "norm" in name]
    assert bool(norms) == (dtype != np.float32)


@needs_mpiexec
def test_the_first_difference_is_named(checkpoint, trained):
    path, tensor = checkpoint / "model.gguf", GGUFFile.open(checkpoint / "model.gguf").tensor(NAME).copy()
    put(path, NAME, 10 * 48 + 7, 0.5)
    put(path, NAME, 96 * 48 + 47, 100.0)
    flip(checkpoint / "optimizer.gguf", f"optimizer.adam.first_moments.{NAME}", 0)
    status, text, errors = run(trained[1][0], checkpoint)
    assert (status, errors) == (1, "")
    assert re.search(r"tensors +63\n", text)
    assert f"name {NAME}, element [10, 7], " in text
    assert re.search(r"elements 2\b", text)
    difference = compare(trained[1][0], checkpoint)["difference"]
    assert difference["element"] == [10, 7]
    assert difference["values"] == [float(str(tensor[10, 7])), 0.5]
    assert difference["largest"] == float(np.float64(100) - tensor[96, 47])
    assert f"values [{difference['values'][0]!r}, 0.5]" in text
    assert json.loads(run(trained[1][0], checkpoint, "--json")[1])["difference"] == difference


def test_every_element_is_looked_at(tmp_path):
    """One flipped bit near the borders of chunks is found and located."""
    shape = (3, 300_000)  # more than three chunks of 1 MiB
    for name in ("a", "b"):
        ones = {"t": np.ones(shape, np.float32), "u": np.ones(4, np.float32)}
        write_tensors(tmp_path / f"{name}.gguf", "strange", {}, ones)
    assert inside(tmp_path / "a.gguf", tmp_path / "b.gguf") == 0
    for element in (0, 1023, 262_143, 262_144, 524_288, 899_999):
        flip(tmp_path / "b.gguf", "t", element)
        diff = compare(tmp_path / "a.gguf", tmp_path / "b.gguf")
        assert diff["difference"]["element"] == [element // 300_000, element % 300_000]
        assert diff["difference"]["elements"] == 1
        assert diff["difference"]["largest"] == pytest.approx(2**-23)
        flip(tmp_path / "b.gguf", "t", element)
    put(tmp_path / "b.gguf", "t", 9, -1.0)
    put(tmp_path / "a.gguf", "u", 2, 0.0)
    put(tmp_path / "b.gguf", "u", 2, -0.0)  # 0.0 and -0.0 differ in the sign bit
    assert len(compare(tmp_path / "a.gguf", tmp_path / "b.gguf")["differing"]) == 2
    put(tmp_path / "b.gguf", "t", 9, 1.0)
    put(tmp_path / "b.gguf", "t", 5, -6.0)  # largest difference; a later chunk differs less
    put(tmp_path / "b.gguf", "t", 899_999, 2.0)
    diff = compare(tmp_path / "a.gguf", tmp_path / "b.gguf")["difference"]
    assert (diff["element"], diff["values"], diff["elements"], diff["largest"]) == ([0, 5], [1, -6], 2, 7)


def test_blocks_are_compared_by_their_values(tmp_path):
    first, second = foreign(tmp_path / "a.gguf"), foreign(tmp_path / "b.gguf")
    data, offset = bytearray(second.read_bytes()), GGUFFile.open(second).tensors["q8_0"].offset
    data[offset + 3 * 34 + 2 + 5] ^= 1  # the sixth value of the fourth block
    second.write_bytes(data)
    difference = compare(first, second)["difference"]
    assert (difference["name"], difference["element"], difference["blocks"]) == ("q8_0", [0, 101], 1)
    assert difference["values"][0] != difference["values"][1]


def test_shapes_names_and_keys_that_differ(tmp_path):
    def write(name, keys, tensors):
        ones = {tensor: np.ones(shape, np.float32) for tensor, shape in tensors}
        return write_tensors(tmp_path / name, "strange", keys, ones)

    tensors = [("t", (4, 8)), ("u", (4,))]
    keys = {"same": 1, "wide": np.uint32(1), "list": np.ones(2, np.int32), "gone": "x"}
    first = write("a.gguf", keys, tensors)
    for other, key in (([("t", (8, 4)), ("u", (4,))], "differing"), ([("t", (4, 8))], "only_in_first")):
        report = compare(first, write("b.gguf", keys, other))
        assert (report["same"], len(report[key])) == (False, 1)
    changed = {"same": 1, "wide": np.uint64(1), "list": np.ones(2, np.uint32), "new": "y"}
    report = compare(first, write("b.gguf", changed, tensors))
    assert {key["key"]: key["values"] for key in report["keys"]} == {
        "wide": [1, 1], "list": [[1, 1], [1, 1]], "gone": ["x", None], "new": [None, "y"],
    }  # fmt: skip
    assert inside(first, tmp_path / "b.gguf") == 1


@pytest.mark.parametrize(
    "arguments",
    [[], ["--nothing"], ["a", "b", "c"], ["/dev/null"], ["/dev"], ["--why", "."], ["--audit", "."]],
)
def test_bad_usage_is_one_line(arguments):
    with pytest.raises(UsageError) as caught:
        inside(*arguments)
    assert "\n" not in str(caught.value)
    assert all(flag in str(caught.value) for flag in arguments if flag.startswith("--"))


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Two tensors of 48 and 17 MiB are read in chunks of 1 MiB."""
    for name in ("a", "b"):
        q8 = gguf.GGMLQuantizationType.Q8_0
        tensors = [("t", (3, 1 << 22)), ("q", (4, 1 << 22), q8)]
        ones = np.ones((3, 1 << 22), np.float32).tobytes()
        write_raw(tmp_path / f"{name}.gguf", "strange", {}, tensors, t=ones)
    flip(tmp_path / "b.gguf", "t", 5)
    examine(foreign(tmp_path / "warm-up.gguf"))
    tracemalloc.start()
    try:
        assert inside(tmp_path / "a.gguf") == 0
        assert inside(tmp_path / "a.gguf", tmp_path / "b.gguf") == 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20, f"{peak / 2**20:.1f} MiB"


def test_two_run_folders_differ_first_in_a_record_and_a_tensor(trained, tmp_path, capfdbinary):
    copies = [(out, tmp_path / str(ranks)) for ranks, (out, _) in trained.items()]
    folders = [Path(shutil.copytree(*pair, symlinks=True)) for pair in copies]

    def compared(status):
        assert inside(*folders, "--json") == status
        return json.loads(capfdbinary.readouterr().out)

    report = compared(0)
    assert (report["same"], report["records"]["step"], report["checkpoint"]["step"]) == (True, None, None)
    assert (report["records"]["common"], report["checkpoint"]["common"] >= 1) == (3, True)
    lines = (folders[1] / "metrics.jsonl").read_text().splitlines()
    record = json.loads(lines[2])
    lines[2] = json.dumps(record | {"loss": record["loss"] + 1e-9})
    (folders[1] / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    flip(folders[1] / "latest" / "model.gguf", NAME, 0)
    report = compared(1)
    assert (report["records"]["step"], report["records"]["field"]) == (3, "loss")
    assert report["checkpoint"]["difference"]["name"] == NAME
