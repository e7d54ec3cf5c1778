"""A Hugging Face folder gives its model's tensors with GGUF's names; unknown models are refused."""

import tracemalloc
from pathlib import Path
from typing import Any

import hf_models
import ml_dtypes
import numpy as np
import pytest
from gguf_files import write_raw

from zero_mpi.checkpoint.huggingface import names as tables
from zero_mpi.checkpoint.huggingface.folder import HuggingFaceFolder
from zero_mpi.checkpoint.weights import WeightSource, open_weights
from zero_mpi.commands.export.huggingface import config_json
from zero_mpi.config.inputs import ignored_parts
from zero_mpi.errors import UsageError
from zero_mpi.models import config_from_gguf

pytest.importorskip(
    "safetensors.numpy",
    reason="no safetensors to write folders with: pip install safetensors",
    exc_type=ImportError,
)

Edit = dict[str, Any]


def make(folder: Path, name: str, edits: Edit | None = None, **tensors: np.ndarray | None) -> Path:
    config = hf_models.CONFIGS[name]
    arrays = hf_models.random_tensors(config) | {
        key.replace("__", "."): value for key, value in tensors.items()
    }
    settings = {key: value for key, value in (config | (edits or {})).items() if value is not ...}
    return hf_models.write_folder(folder, settings, {key: a for key, a in arrays.items() if a is not None})


def our_logits(source: WeightSource, ids: np.ndarray) -> np.ndarray:
    shapes = {name: spec.shape for name, spec in source.tensors.items()}
    config = config_from_gguf(source.metadata, shapes, str(source.path), source.read)
    config.check_tensors(shapes, str(source.path))
    weights, x = {name: source.tensor(name) for name in shapes}, ids[None]
    for stage in config.stages():
        x, _ = stage.layer.forward(weights, x)
    return x[0]


IDS = np.random.default_rng(5).integers(0, 61, 30)


@pytest.mark.parametrize("chunk", [1, 50])
@pytest.mark.parametrize("name", ["llama, wide heads", "llama, biases", "gpt2", "qwen3moe", "granitemoe"])
def test_any_range_is_the_slice_of_the_whole(tmp_path, monkeypatch, name, chunk):
    source, rng = HuggingFaceFolder.open(make(tmp_path, name)), np.random.default_rng(0)
    tensors = {key: source.tensor(key).ravel() for key in source.tensors}
    monkeypatch.setattr(tables, "CHUNK", chunk)
    for key, array in tensors.items():
        cuts = np.sort(rng.integers(0, array.size + 1, (12, 2)), axis=1).tolist()
        near = [(0, 1), (array.size - 1, array.size), (array.size // 2, array.size // 2)]
        buffer = np.zeros(array.size, np.float32)
        for start, stop in [*cuts, *near]:
            source.read(key, start, stop, out=buffer[start:stop])
            np.testing.assert_array_equal(buffer[start:stop], array[start:stop])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_read_exactly(tmp_path, dtype):
    tensors = hf_models.random_tensors(hf_models.CONFIGS["llama"])
    halves = {name: array.astype(dtype) for name, array in tensors.items()}
    rounded = {name: array.astype(np.float32) for name, array in halves.items()}
    hf_models.write_folder(tmp_path / "half", hf_models.CONFIGS["llama"], halves)
    hf_models.write_folder(tmp_path / "full", hf_models.CONFIGS["llama"], rounded)
    half, full = open_weights(tmp_path / "half"), open_weights(tmp_path / "full")
    assert {spec.type.name for spec in half.tensors.values()} == {"F16" if dtype is np.float16 else "BF16"}
    for name in full.tensors:
        assert half.tensor(name).tobytes() == full.tensor(name).tobytes()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_slice_of_a_large_matrix_takes_the_memory_of_a_slice(tmp_path, name):
    """A slice takes little memory even if the matrix (64 MiB) is reordered (q) or transposed (gpt2)."""
    shape = (4096, 4096)
    big = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    q = "model.layers.{}.self_attn.q_proj.weight"
    theirs, ours, edits, others = "transformer.h.0.mlp.c_fc.weight", "blk.0.ffn_up.weight", {}, {}
    if name == "llama":
        theirs, ours = q.format(0), "blk.0.attn_q.weight"
        edits = {"num_attention_heads": 64, "head_dim": 64}
        others = {
            f"model.layers.{i}.self_attn.k_proj.weight": np.zeros((128, 24), np.float32) for i in (0, 1)
        }
        others[q.format(1)] = np.zeros((4096, 24), np.float32)
    source = HuggingFaceFolder.open(make(tmp_path, name, edits, **{theirs: big}, **others))
    tracemalloc.start()
    rows = source.read(ours, 100 * 4096 + 5, 110 * 4096 + 7)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    full = big.T if name == "gpt2" else big.reshape(64, 2, 32, 4096).swapaxes(1, 2).reshape(shape)
    np.testing.assert_array_equal(rows, full.reshape(-1)[100 * 4096 + 5 : 110 * 4096 + 7])
    buffer = np.empty(shape, np.float32)
    tracemalloc.start()
    source.read(ours, out=buffer)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20
    np.testing.assert_array_equal(buffer, full)


def test_the_prefix_may_be_missing_and_what_holds_no_weights_is_dropped(tmp_path):
    for name, mask in (("llama", "layers.0.self_attn.rotary_emb.inv_freq"), ("gpt2", "h.1.attn.bias")):
        config, tensors = hf_models.CONFIGS[name], hf_models.random_tensors(hf_models.CONFIGS[name])
        bare = {key.removeprefix("model.").removeprefix("transformer."): a for key, a in tensors.items()}
        bare[mask] = np.ones((1, 1, 3, 3), np.uint8)
        source = open_weights(hf_models.write_folder(tmp_path / name, config, bare))
        expected = hf_models.logits(config, tensors, IDS)
        np.testing.assert_allclose(our_logits(source, IDS), expected, rtol=0, atol=2e-5)


def test_a_copy_of_a_tied_head_is_dropped(tmp_path):
    embedding = hf_models.random_tensors(hf_models.CONFIGS["llama, tied"])["model.embed_tokens.weight"]
    source = open_weights(make(tmp_path / "same", "llama, tied", lm_head__weight=embedding))
    assert "output.weight" not in source.tensors
    with pytest.raises(UsageError, match=r"lm_head\.weight .*tie_word_embeddings"):
        open_weights(make(tmp_path / "other", "llama, tied", lm_head__weight=embedding + 1))


def test_llama_3_factors_are_those_of_transformers(tmp_path):
    """Our rotary factors of Llama 3.1 equal those of transformers 5.23."""
    scaling = hf_models.LLAMA3 | {"original_max_position_embeddings": 8192}
    edits = {"hidden_size": 24, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    edits |= {"rope_theta": 500000.0, "rope_scaling": scaling}
    names = [f"model.layers.{i}.self_attn.{n}_proj.weight" for i in range(2) for n in "qk"]
    zeros = dict.fromkeys(names, np.zeros((256, 24), np.float32))
    factors = open_weights(make(tmp_path, "llama", edits, **zeros)).read("rope_freqs.weight")
    assert factors.shape == (64,)
    assert (factors[:29] == 1).all()
    between = [1.207484, 1.553415, 2.026313, 2.69453, 3.684253, 5.257327]
    np.testing.assert_allclose(factors[29:35], between, rtol=1e-6)
    assert (factors[35:] == 8).all()


TWO_ROPES = {"full_attention": {}, "sliding_attention": {"rope_theta": 500.0}}
REFUSED: list[tuple[str, Edit, str]] = [
    ("llama", {"model_type": "mamba"}, "model_type: expected one of llama, .*found 'mamba'"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act: expected silu or swish.*found 'gelu'"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type: .*found 'dynamic'"),
    ("llama", {"rope_scaling": hf_models.YARN | {"attention_factor": 2}}, "attention_factor: .*1.13863"),
    ("llama", {"rope_scaling": hf_models.YARN | {"truncate": False}}, "truncate: expected True"),
    ("qwen2", {"rope_scaling": hf_models.LLAMA3}, "rope_type: .*'llama3'"),
    ("llama", {"rope_parameters": {"full_attention": {}}}, "one setting for all layers"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: expected none"),
    ("llama", {"head_dim": 5}, "head_dim: expected an even width"),
    ("llama", {"num_key_value_heads": 4}, "k_proj.weight': expected 24 rows .*config.json.*, found 12"),
    ("llama", {"num_attention_heads": 2, "head_dim": 6}, "q_proj.weight': expected 12 rows"),
    ("llama, tied", {"tie_word_embeddings": ...}, "lm_head.weight is missing, and tie_word_embeddings"),
    ("llama", {"attention_bias": True}, "sets a bias for attn_q, "),
    ("llama, biases", {"mlp_bias": False}, "sets no bias for ffn_gate, "),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window: expected False"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: expected full"),
    ("qwen3", {"attention_bias": True}, "attention_bias: expected False"),
    ("smollm3", {"attention_bias": True}, "attention_bias: expected False"),
    ("smollm3", {"no_rope_layer_interval": 3}, "no_rope_layer_interval: expected 4"),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, "no_rope_layers: expected 1, 1, 1, 0"),
    ("gemma3", {"layer_types": ["sliding_attention"] * 7}, "layer_types: expected full_attention"),
    ("gemma3", {"layer_types": ["full_attention"] * 6}, "layer_types: expected full_attention in every 6th"),
    ("gemma3", {"query_pre_attn_scalar": 24}, "query_pre_attn_scalar: expected 10"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: expected none"),
    ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation: expected gelu_pytorch_tanh"),
    ("gemma3", {"rope_local_base_freq": 500.0}, "rope_local_base_freq: expected 10000"),
    ("gemma3", {"rope_parameters": TWO_ROPES}, "rope_theta: expected 10000"),
    ("mistral", {"sliding_window": 31}, "sliding_window: expected null or at least 32"),
    ("mixtral", {"sliding_window": 31}, "sliding_window: expected null or at least 32"),
    ("phi3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected an even part .*found 3"),
    ("phi3", {"sliding_window": 31}, "sliding_window: expected null or at least 32"),
    ("phi3", {"rope_scaling": hf_models.LONGROPE | {"long_factor": [1.0]}}, "long_factor: .* 3"),
    ("llama", {"rope_scaling": hf_models.LONGROPE}, "rope_type: expected default, linear, yarn, llama3"),
    ("phi3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type: .*longrope.*'linear'"),
    (
        "phi3",
        {"rope_scaling": hf_models.LONGROPE | {"original_max_position_embeddings": 8}},
        "original_max_position_embeddings: expected .*8",
    ),
    ("qwen3moe", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("qwen3moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ("qwen3moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ("granitemoe", {"attention_bias": True}, "attention_bias"),
    ("gpt2", {"activation_function": "relu"}, "activation_function: expected gelu_new"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights: expected True"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: expected False"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention: expected False"),
]


@pytest.mark.parametrize(("name", "edits", "message"), REFUSED)
def test_what_would_be_another_model_is_refused(tmp_path, name, edits, message):
    with pytest.raises(UsageError, match=message) as caught:
        open_weights(make(tmp_path, name, edits))
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"score__weight": np.zeros((2, 24), np.float32)}, "tensor 'score.weight'"),
        ({"norm__weight": np.zeros(24, np.float32)}, "expected once, found again"),
        ({"model__norm__weight": np.zeros(24)}, "model.norm.weight': expected F32, F16 or BF16, found F64"),
        ({"model__norm__weight": np.zeros(0, np.float32)}, "expected at least one element"),
    ],
)
def test_tensors_that_have_no_place_are_refused(tmp_path, tensors, message):
    arrays = {name: np.asarray(array) for name, array in tensors.items()}
    with pytest.raises(UsageError, match=message):
        open_weights(make(tmp_path, "llama", **arrays))


def test_open_weights_takes_files_checkpoints_and_folders(tmp_path):
    write_raw(tmp_path / "model.gguf", "llama", {}, [])
    assert open_weights(tmp_path / "model.gguf").path == tmp_path / "model.gguf"
    assert open_weights(tmp_path).path == tmp_path / "model.gguf"
    make(tmp_path, "llama")
    assert open_weights(tmp_path).path == tmp_path / "model.gguf", "model.gguf is preferred"
    (tmp_path / "model.gguf").unlink()
    assert open_weights(str(tmp_path)).path == tmp_path


@pytest.mark.parametrize(
    ("name", "edits", "expected"),
    [
        ("llama", {}, ""),
        ("gpt2", {"embd_pdrop": 0, "attn_pdrop": 0.0, "resid_pdrop": 0.5}, "resid_pdrop 0.5"),
    ],
)
def test_dropout_that_is_asked_for_is_told(tmp_path, name, edits, expected):
    lines = ignored_parts(open_weights(make(tmp_path, name, edits)))
    assert [f"dropout ({expected})" in line for line in lines] == [True] * bool(expected)


class Fake:
    """Source of weights that no config.json can describe."""

    path = Path("m.gguf")

    def __init__(self, source: WeightSource, **changes: Any) -> None:
        keys = source.metadata | changes.pop("metadata", {})
        self.metadata = {key: value for key, value in keys.items() if value is not None}
        self.tensors = dict(source.tensors)
        self.values = changes
        for name in changes:
            self.tensors[name.replace("__", ".")] = source.tensors["output_norm.weight"]

    def read(self, name: str, *_: Any) -> np.ndarray:
        return np.asarray(self.values[name.replace(".", "__")], np.float32)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"blk__0__attn_q__bias": 0}, "biases of attn_q "),
        ("llama", {"rope_freqs__weight": [1.0, 1.5, 2.0]}, "rope_freqs.weight is not "),
        ("llama", {"metadata": {"llama.attention.value_length": np.uint32(8)}}, "heads of q and v differ"),
        ("mistral", {"metadata": {"llama.attention.value_length": None}}, "heads of q and v differ"),
        ("llama", {"metadata": {"general.architecture": "mamba"}}, "architecture 'mamba'"),
        ("phi3", {"metadata": {"phi3.rope.scaling.factor": np.float32(2)}}, "by keys, .*config.json of phi3"),
        ("phi3", {"metadata": {"phi3.rope.scaling.attn_factor": np.float32(2)}}, "attn_factor "),
        ("phi3", {"rope_factors_long__weight": [1.0, 1.5, 2.0]}, "rope_factors_long.weight "),
    ],
)
def test_what_a_configuration_cannot_say_is_refused(tmp_path, name, changes, message):
    source = Fake(open_weights(make(tmp_path, name)), **changes)
    with pytest.raises(UsageError, match=message):
        config_json(source, "float32")


@pytest.mark.parametrize("value", [None, np.float32(0)])
@pytest.mark.parametrize("name", ["granite", "granitemoe"])
def test_multipliers_that_are_zero_or_missing_get_the_value_that_is_computed(tmp_path, name, value):
    keys = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
    source = Fake(open_weights(make(tmp_path, name)), metadata={f"{name}.{key}": value for key in keys})
    config = config_json(source, "float32")
    expected = {"embedding_multiplier": 1, "residual_multiplier": 1, "logits_scaling": 1}
    assert {key: config[key] for key in hf_models.GRANITE} == expected | {"attention_multiplier": 6**-0.5}


@pytest.mark.parametrize(
    ("name", "key"),
    [("phi3", "phi3.rope.scaling.attn_factor"), ("llama, linear", "llama.rope.scaling.factor")],
)
def test_a_factor_of_zero_scales_nothing(tmp_path, name, key):
    source = Fake(open_weights(make(tmp_path, name)), metadata={key: np.float32(0)})
    assert config_json(source, "float32")["rope_scaling"] is None


@pytest.mark.parametrize("name", ["qwen3moe", "olmoe"])
def test_experts_may_be_merged_as_transformers_has_them_in_memory(tmp_path, name):
    config, tensors = hf_models.CONFIGS[name], hf_models.random_tensors(hf_models.CONFIGS[name])
    merged = {key: array for key, array in tensors.items() if ".experts." not in key}
    for i in range(config["num_hidden_layers"]):
        P = f"model.layers.{i}.mlp.experts."
        gate, up, down = (
            [tensors[f"{P}{e}.{part}.weight"] for e in range(5)] for part in hf_models.PROJECTIONS
        )
        merged[f"{P}gate_up_proj"] = np.stack([np.concatenate(pair) for pair in zip(gate, up, strict=True)])
        merged[f"{P}down_proj"] = np.stack(down)
    one, other = make(tmp_path / "one", name), hf_models.write_folder(tmp_path / "other", config, merged)
    for key, spec in open_weights(one).tensors.items():
        assert open_weights(other).tensor(key).tobytes() == open_weights(one).tensor(key).tobytes()
        assert open_weights(other).tensors[key].shape == spec.shape


def test_a_missing_expert_is_named(tmp_path):
    edits = {"model__layers__0__mlp__experts__1__up_proj__weight": None}
    with pytest.raises(UsageError, match=r"blk\.0\.ffn_up_exps\.weight"):
        HuggingFaceFolder.open(make(tmp_path, "olmoe", **edits))
