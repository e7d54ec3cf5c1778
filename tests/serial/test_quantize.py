"""Exports in llama.cpp's mixes have its types, bytes and logits, with and without an importance matrix."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_tensors
from jobs import run_job
from oracles import open_server
from test_command_bits import needs_mpiexec
from test_export import export

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.mixes import MIXES, is_matrix, needs_weights, types_of
from zero_mpi.commands.export import command as module
from zero_mpi.data import ByteTokenizer
from zero_mpi.errors import UsageError
from zero_mpi.models import ARCHITECTURES, ModelConfig
from zero_mpi.ops import ggml
from zero_mpi.train.text_model import TextModel

GOLDEN = Path(__file__).parents[1] / "llama_quantize_types.txt"
V = ByteTokenizer.vocab_size
USUAL = {"layers": 2, "dim": 256, "heads": 4, "kv_heads": 4, "ffn": 256, "context": 32, "vocab_size": V}
FAST = ["q2_k", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_m", "q6_k", "iq4_nl", "iq4_xs", "iq3_s", "tq1_0", "tq2_0"]
TOKENS = list(b"def f(x):")


def model(arch: str, **sizes: Any) -> ModelConfig:
    settings = {"tied": False} | USUAL | sizes
    if arch == "gpt2":
        settings = {name: size for name, size in settings.items() if name not in ("kv_heads", "ffn")}
    return ARCHITECTURES[arch].from_flags(settings)


MODELS = {
    "llama": model("llama", layers=17, heads=8, kv_heads=2),
    "llama-70b": model("llama", layers=80, heads=2, kv_heads=1),
    "qwen3": model("qwen3", layers=9, tied=True),
    "gemma3": model("gemma3", layers=8, kv_heads=1, ffn=288, tied=True),
    "odd": model("llama", dim=288, ffn=97),
    "gpt2": model("gpt2", layers=8, tied=True),
}
WIDE = model("llama", dim=512, heads=8, kv_heads=2, ffn=768)


LINES = [line for line in GOLDEN.read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition(":")[0].replace(" ", "-"))
def test_types_of_tensors_are_those_of_llama_cpp(line: str) -> None:
    case, _, parts = line.partition(":")
    name, mix = case.split()
    config = MODELS[name]
    keys = {"general.architecture": config.arch} | config.metadata()
    shapes = {tensor: param.shape for tensor, param in config.params().items()}
    actual = types_of(keys, shapes, mix.rstrip("+"), weighted=mix.endswith("+"))
    expected = {}
    for part in parts.split(";"):
        stems, _, runs = part.partition(" = ")
        kinds = [run.partition("*") for run in runs.split()]
        row = [*itertools.chain(*([kind] * int(count or 1) for kind, _, count in kinds))]
        for stem in stems.strip().split(","):
            is_outer = stem in ("token_embd", "output")
            names = [f"{stem}.weight"] if is_outer else [f"blk.{i}.{stem}.weight" for i in range(len(row))]
            expected |= dict(zip(names, row, strict=True))
    assert {name: kind.name for name, kind in actual.items() if kind != Kind.F32} == expected


KEPT = ["attn_norm", "attn_rel_b", "ffn_gate_inp", "position_embd", "ssm_conv1d", "shortconv.conv"]
KEPT += ["altup_router", "laurel_l", "per_layer_model_proj"]
KEPT += [f"time_mix_{end}" for end in ("first", "lerp_fused", "decay_w1", "w0", "v1", "a2", "g2")]
QUANTIZED = ["attn_q", "ssm_in", "shortconv.in_proj", "time_mix_key", "time_mix_gate", "ffn_gate_exps"]


def test_small_matrices_of_other_architectures_stay_float32_as_in_llama_cpp() -> None:
    matrices = [part for part in KEPT + QUANTIZED if is_matrix(f"blk.0.{part}.weight", (8, 256))]
    assert matrices == QUANTIZED


def write(path: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    rng, weights = np.random.default_rng(0), {}
    for name, param in config.params().items():
        scale = 0.3 if name == "output.weight" else 0.05
        weights[name] = (scale * rng.standard_normal(param.shape)).astype(np.float32)
        weights[name] += len(param.shape) == 1
    write_tensors(path, config.arch, config.metadata() | ByteTokenizer().metadata(), weights)
    return weights


def write_matrix(path: Path, weights: dict[str, np.ndarray], **extra: Any) -> dict[str, np.ndarray]:
    """Write an importance matrix of a model's blocks as llama.cpp does; return its mean squares."""
    rng, tensors, means = np.random.default_rng(1), {}, {}
    for name, array in weights.items():
        if is_matrix(name, array.shape) and name.startswith("blk."):
            sums = (rng.random((1, array.shape[-1])) + 0.1).astype(np.float32)
            tensors |= {f"{name}.in_sum2": sums, f"{name}.counts": np.full((1, 1), 3, np.float32)}
            means[name] = sums[0] / np.float32(3)
    keys = {"general.type": "imatrix", "imatrix.datasets": ["x"], "imatrix.chunk_count": np.uint32(1)}
    write_tensors(path, "imatrix", keys | extra, tensors)
    return means


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("wide")
    weights = write(folder / "m.gguf", WIDE)
    return folder, weights, write_matrix(folder / "im.gguf", weights)


def check_bytes(path: Path, weights: dict[str, np.ndarray], means: dict[str, np.ndarray]) -> None:
    file = GGUFFile.open(path)
    for name, info in file.tensors.items():
        rows = weights[name].reshape(-1, weights[name].shape[-1])
        raw = rows.tobytes() if info.type == Kind.F32 else ggml.quantize(rows, info.type, means.get(name))
        assert b"".join(file.raw_chunks(name, 1 << 20)) == bytes(raw), name


@pytest.mark.parametrize(("mix", "weighted"), [(mix, place % 2 == 0) for place, mix in enumerate(FAST)])
def test_bytes_are_those_of_ggml(wide: Any, tmp_path: Path, mix: str, weighted: bool) -> None:
    folder, weights, means = wide
    flags = ["--imatrix", folder / "im.gguf"] if weighted else []
    export(folder / "m.gguf", tmp_path / "x.gguf", "--type", mix, *flags)
    check_bytes(tmp_path / "x.gguf", weights, means if weighted else {})
    keys = GGUFFile.open(tmp_path / "x.gguf").metadata
    assert keys["general.file_type"] == MIXES[mix].number
    assert ("quantize.imatrix.file" in keys) == weighted


@needs_mpiexec
@pytest.mark.parametrize(("mix", "more"), [("q4_k_m", []), ("q2_k_s", ["--imatrix", "im.gguf"])])
def test_bytes_are_the_same_on_three_ranks(
    wide: Any, monkeypatch: pytest.MonkeyPatch, mix: str, more: list[str]
) -> None:
    """q2_k_s requires an importance matrix."""
    folder, weights, means = wide
    monkeypatch.chdir(folder)
    export("m.gguf", "one.gguf", "--type", mix, "--force", *more)
    arguments = ["m.gguf", "three.gguf", "--type", mix, "--force", "--split-size", "1GB", *more]
    status, printed, _ = run_job(3, ["-m", "zero_mpi", "export", *arguments])
    assert (status, printed.count("\n")) == (0, 1)
    assert Path("three.gguf").read_bytes() == Path("one.gguf").read_bytes()
    check_bytes(folder / "three.gguf", weights, means if more else {})


def test_parts_are_one_model(wide: Any, tmp_path: Path) -> None:
    folder, weights, _ = wide
    export(folder / "m.gguf", tmp_path / "x.gguf", "--type", "q4_k_m", "--split-size", "500KB")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"x-{i:05d}-of-{len(names):05d}.gguf" for i in range(1, len(names) + 1)]
    assert len(names) > 3
    check_bytes(tmp_path / names[0], weights, {})
    (tmp_path / names[0]).unlink()
    with pytest.raises(UsageError, match=names[1]):
        export(folder / "m.gguf", tmp_path / "x.gguf", "--type", "q4_k_m", "--split-size", "500KB")


@pytest.mark.parametrize("mix", [*FAST, "mxfp4"])
def test_llama_cpp_opens_the_file_and_has_our_logits(wide: Any, tmp_path: Path, mix: str) -> None:
    from test_llamacpp import log_softmax, next_token  # skips the test without llama.cpp

    before, after = wide[0] / "m.gguf", tmp_path / "x.gguf"
    export(before, after, "--type", mix)
    full, ours = (log_softmax(TextModel(path).logits(TOKENS)[-1]) for path in (before, after))
    assert np.abs(next_token(open_server(after), TOKENS) - ours).max() < 0.03 * np.ptp(full)


@pytest.mark.parametrize("variable", ["", "none.so", "m.gguf"])
def test_without_a_library_there_is_one_line(
    wide: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    folder, *_ = wide
    monkeypatch.setattr(ggml, "find_spec", lambda name: None)
    monkeypatch.setenv(ggml.VARIABLE, str(folder / variable) if variable else "")
    ggml.library.cache_clear()
    with pytest.raises(UsageError, match=r"--type q4_k_m.*zero-mpi\[ggml\].*ZERO_MPI_GGML") as caught:
        export(folder / "m.gguf", tmp_path / "x.gguf", "--type", "q4_k_m")
    assert "\n" not in str(caught.value)
    export(folder / "m.gguf", tmp_path / "x.gguf", "--type", "q4_0")
    ggml.library.cache_clear()


def test_a_site_has_its_own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(ggml.library("test")._name)
    monkeypatch.setenv(ggml.VARIABLE, str(path))
    monkeypatch.setattr(ggml, "find_spec", lambda name: None)
    ggml.library.cache_clear()
    assert ggml.library("test")._name == str(path)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        ({"general.type": "model"}, "'model'"),
        ({"blk.0.attn_q.weight.counts": np.ones((2, 1))}, "attn_q"),
        ({"blk.0.attn_q.weight.in_sum2": np.ones((1, 256))}, "attn_q"),
        ({"blk.0.attn_q.weight.in_sum2": np.full((1, 512), np.nan)}, "attn_q"),
        (None, "m.gguf"),
    ],
)
def test_a_wrong_matrix_is_refused_in_one_line(wide: Any, tmp_path: Path, spoil: Any, named: str) -> None:
    folder, *_ = wide
    path = folder / "m.gguf"
    if spoil is not None:
        file = GGUFFile.open(folder / "im.gguf")
        tensors = {name: file.tensor(name) for name in file.tensors}
        tensors |= {name: a.astype(np.float32) for name, a in spoil.items() if name in tensors}
        keys = file.metadata | {name: value for name, value in spoil.items() if isinstance(value, str)}
        path = tmp_path / "im.gguf"
        write_tensors(path, "imatrix", keys, tensors)
    with pytest.raises(UsageError, match=named) as caught:
        export(folder / "m.gguf", tmp_path / "x.gguf", "--type", "q4_k_m", "--imatrix", path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "x.gguf").exists()


def test_types_that_need_a_matrix_ask_for_it(wide: Any, tmp_path: Path) -> None:
    folder, *_ = wide
    for mix in ("q2_k_s", "iq2_xxs", "iq3_xxs"):
        with pytest.raises(UsageError, match=rf"--type {mix}: .*--imatrix"):
            export(folder / "m.gguf", tmp_path / "x.gguf", "--type", mix)
    assert not needs_weights("token_embd.weight", Kind.Q2_K, "q2_k_s")
    assert module.mixes.known_type("q4_k") == "q4_k_m"
