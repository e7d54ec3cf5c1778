"""Quantization-aware training uses exactly the weights of the exported file, at any number of ranks."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from jobs import run_job
from test_command_bits import COMPILED, fields, needs_mpiexec, train_compiled, write_text

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.mixes import ENDS, QAT_TYPES, is_matrix
from zero_mpi.commands.export.command import command
from zero_mpi.launch.world import World
from zero_mpi.ops import ggml
from zero_mpi.ops.block_kinds import BLOCK_KINDS
from zero_mpi.ops.rounding import round_to

SIZES = "--layers 2 --dim 256 --heads 4 --ffn 288 --context 16 --batch-size 3 --micro-batch 1 --warmup 1"
MORE = ["--lr", "0.01", "--sample", "0", "--eval-windows", "2", "--save-every", "2", "--no-tied"]
RUN = [*SIZES.split(), *MORE]
TYPES = ("q4_0", "q8_0", "q4_k")


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K", "IQ4_NL", "F16"])
def test_rounding_is_that_of_the_file(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Rounded weights equal those of ggml's library and, if it supports the type, of the package gguf."""
    monkeypatch.setattr("zero_mpi.ops.rounding.CHUNK", 1 << 11)
    x, kind = np.random.default_rng(0).standard_normal(5 << 10).astype(np.float32), Kind[name]
    x[:256] = 0
    width = BLOCK_KINDS[name].elements
    rows = x.reshape(-1, max(width, 32))
    raw = gguf.quantize(x, kind) if name == "F16" else ggml.quantize(rows, kind)
    expected = gguf.dequantize(raw.reshape(-1), kind).astype(np.float32).tobytes()
    rounded = np.empty_like(x)
    round_to(name, x, rounded)
    assert rounded.tobytes() == expected
    if name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        monkeypatch.setattr(ggml, "reader", lambda kind: None)
        round_to(name, x, rounded)
        assert rounded.tobytes() == expected


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qat")
    text = write_text(folder)
    for name in TYPES:
        train_compiled(1, folder / name, *RUN, "--steps", "4", "--qat", name, "--data", *text)
    return folder


@needs_mpiexec
@pytest.mark.parametrize("name", TYPES)
def test_a_checkpoint_and_its_export_hold_rounded_weights(runs: Path, tmp_path: Path, name: str) -> None:
    """Rows of ffn_down have 288 elements, not a multiple of 256; master weights are not rounded."""
    model, state = (GGUFFile.open(runs / name / "latest" / file) for file in ("model.gguf", "optimizer.gguf"))
    target = tmp_path / "x.gguf"
    assert command(World(0, 1), [str(model.path), str(target), "--type", name]) == 0
    exported = GGUFFile.open(target)
    for tensor, info in exported.tensors.items():
        master = f"optimizer.master.{tensor}"
        assert (master in state.tensors) == is_matrix(tensor, info.shape)
        assert model.read(tensor).tobytes() == exported.read(tensor).tobytes(), tensor
        if master in state.tensors:
            rounded = np.empty(info.size, np.float32)
            round_to(info.type.name, state.read(master), rounded)
            assert rounded.tobytes() == model.read(tensor).tobytes()
            assert (rounded != state.read(master)).any()
    kinds = {info.type for info in exported.tensors.values()}
    assert {exported.tensors[end].type for end in ENDS} == {Kind.Q8_0}
    assert kinds - {Kind.F32, Kind.Q8_0} == {"q4_0": {Kind.Q4_0}, "q8_0": set()}.get(
        name, {Kind.Q4_K, Kind.Q5_0, Kind.Q6_K}
    )
    flags = ["--against", str(model.path), "--data", *write_text(tmp_path), "--json", "figures.json"]
    status, _, errors = run_job(2, ["-m", "zero_mpi", "evaluate", str(target), *flags], cwd=tmp_path)
    assert (status, errors) == (0, "")
    ours, theirs = (each["text"] for each in json.loads((tmp_path / "figures.json").read_text())["models"])
    assert ours == theirs


@needs_mpiexec
@pytest.mark.parametrize(
    ("name", "ranks", "more"),
    [("q4_0", 2, []), ("q4_k", 3, []), ("q8_0", 3, ["no-shard"]), ("q4_k", 2, ["shard-grad-op"])],
)
def test_bits_are_the_same_on_any_ranks_and_after_a_resume(
    runs: Path, tmp_path: Path, name: str, ranks: int, more: list[str]
) -> None:
    text = write_text(runs)
    flags = [*RUN, *(["--strategy", *more] if more else []), "--qat", name, "--data", *text]
    half = runs / name / "step-00000002"
    train_compiled(ranks, tmp_path / "all", *flags, "--steps", "4")
    train_compiled(ranks, tmp_path / "half", *flags, "--steps", "4", "--resume", str(half))
    expected = fields(runs / name)
    assert (fields(tmp_path / "all"), fields(tmp_path / "half")) == (expected, expected[2:])
    models = (run / "latest/model.gguf" for run in (runs / name, tmp_path / "all", tmp_path / "half"))
    assert len({GGUFFile.open(model).metadata["training.state_digest"] for model in models}) == 1


@needs_mpiexec
@pytest.mark.parametrize(("name", "ranks"), [("q4_0", 3), ("q4_k", 1)])
def test_adapters_are_trained_for_the_merged_file(runs: Path, tmp_path: Path, name: str, ranks: int) -> None:
    """The merged file has exactly the run's last loss; the base is quantized to q8_0."""
    text, base, file = write_text(runs), tmp_path / "base.gguf", tmp_path / "x.gguf"
    assert command(World(0, 1), [str(runs / "q8_0/latest"), str(base), "--type", "q8_0"]) == 0
    flags = ["--context", "16", "--batch-size", "3", "--micro-batch", "1", "--warmup", "1"]
    flags += [*MORE[:-1], "--data"]
    adapt = ["--init", str(base), "--lora", "4", "--lora-targets", "blk.*", "--qat", name, "--steps", "2"]
    train_compiled(ranks, tmp_path / "run", *flags, *text, *adapt)
    assert (
        command(World(0, 1), [str(base), str(file), "--merge", str(tmp_path / "run/latest"), "--type", name])
        == 0
    )
    train_compiled(1, tmp_path / "next", *flags, *text, "--init", str(file), "--steps", "1")
    rows, after = (
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("run", "next")
    )
    assert rows[-1]["val_loss"] == after[0]["val_loss_before"] != rows[0]["val_loss_before"]
    exported = GGUFFile.open(file)
    assert {exported.tensors[end].type for end in ENDS} == {Kind.Q8_0}
    assert "training.qat" not in exported.metadata
    if ranks > 1:
        train_compiled(1, tmp_path / "one", *flags, *text, *adapt)
        assert fields(tmp_path / "one") == fields(tmp_path / "run")


@needs_mpiexec
def test_verify_repeats_the_steps(runs: Path) -> None:
    status, printed, errors = run_job(
        2, ["-m", "zero_mpi", "verify", "q4_0"], cwd=runs, timeout=100, env=COMPILED
    )
    assert (status, errors) == (0, ""), printed


@needs_mpiexec
def test_the_type_may_not_change(runs: Path, tmp_path: Path) -> None:
    flags = [*RUN, "--data", *write_text(runs), "--steps", "6", "--resume", str(runs / "q4_0/latest")]
    command = ["-m", "zero_mpi.train", "--out", str(tmp_path / "x"), "--qat", "q8_0", *flags]
    status, _, errors = run_job(1, command)
    assert (status, errors.count("\n"), "qat" in errors) == (2, 1, True)
    assert not {"q2_k_s", "iq2_xxs", "f16"} & {*QAT_TYPES}
