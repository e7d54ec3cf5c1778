"""llama.cpp opens the files that the runtime writes and computes the same results from them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import architectures
import numpy as np
import pytest
from gguf_files import random_weights, write_tensors
from jobs import run_job
from oracles import greedy, llama_cpp, open_server, smollm2, tokenize
from test_command_bits import needs_mpiexec

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.data import ByteTokenizer
from zero_mpi.errors import UsageError
from zero_mpi.models import ModelConfig, Qwen2, Qwen3
from zero_mpi.models.rotary import RopeScaling
from zero_mpi.train.text_model import TextModel, weights_of

llama_cpp()  # skips the module if llama.cpp is not installed

PROMPT = b"def f(x):\n  return "
PREFIXES = (1, 2, 7, len(PROMPT))
BIASES = frozenset({"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"})
SIZES: dict[str, Any] = {"vocab_size": ByteTokenizer.vocab_size, "context_length": 32, "embedding_length": 24}
SIZES |= {"feed_forward_length": 97, "head_count": 4, "head_count_kv": 2, "key_length": 6, "value_length": 6}
MODELS = architectures.every(SIZES)
LLAMA, QWEN2, QWEN3 = (MODELS[arch] for arch in ("llama", "qwen2", "qwen3"))
GPT = replace(MODELS["gpt2"], tied=True)
FLAGS = {"layers": 2, "dim": 24, "heads": 3, "kv_heads": 1, "context": 32, "vocab_size": SIZES["vocab_size"]}
FACTORS = (0.75, 1.0, 8.0)
LONG_FACTORS = {"long_factors": (9.0, 3.0, 2.0), "short_factors": (1.5, 2.0, 0.75), "rope_magnitude": 1.25}
PAIRS = {"long_factors": (9.0, 3.0), "short_factors": (1.5, 0.75), "original_context": 8}
PHI3 = replace(MODELS["phi3"], **LONG_FACTORS)
MIXTRAL = replace(LLAMA, expert_count=5, expert_used_count=2)
YARN = replace(LLAMA, rope_freq_base=50.0, rope_scaling=RopeScaling("yarn", 4.0, 64))


@dataclass(frozen=True)
class Case:
    """Model with its tolerance for llama.cpp, whose GELU is a table of 16-bit floats."""

    name: str
    config: ModelConfig
    tolerance: float


CASES = [
    *(Case(arch, config, architectures.ROWS[arch].tolerance) for arch, config in MODELS.items()),
    *(
        Case(name, config, architectures.ROWS[config.arch].tolerance)
        for name, config in architectures.tied(MODELS).items()
    ),
    Case("llama, experts", MIXTRAL, 1e-4),
    Case("llama, one expert used", replace(MIXTRAL, expert_used_count=1), 1e-4),
    Case("qwen3moe, all experts used", replace(MODELS["qwen3moe"], expert_used_count=5), 1e-4),
    Case("granitemoe, none shared", replace(MODELS["granitemoe"], expert_shared_feed_forward_length=0), 1e-4),
    Case("llama, biases", replace(LLAMA, biases=BIASES), 1e-4),
    Case("llama, K = H", replace(LLAMA, head_count_kv=4, rope_freq_base=500.0), 1e-4),
    Case("llama, heads of another width", replace(LLAMA, key_length=8, value_length=8), 1e-4),
    Case("llama, coarse epsilon", replace(LLAMA, rms_epsilon=0.03), 1e-4),
    Case("llama, rope factors", replace(LLAMA, rope_factors=FACTORS), 1e-4),
    Case("llama, linear", replace(LLAMA, rope_scaling=RopeScaling("linear", 2.5)), 1e-4),
    Case("llama, yarn", replace(YARN, rope_factors=FACTORS), 1e-4),
    Case("qwen3, yarn", replace(QWEN3, rope_scaling=RopeScaling("yarn", 6.0, 8)), 1e-4),
    Case("phi3, long", replace(PHI3, original_context=8), 1e-4),
    Case("phi3, short", replace(PHI3, original_context=512), 1e-4),  # llama.cpp has at least 256 positions
    Case("phi3, partial", replace(MODELS["phi3"], rope_dimension_count=4, **PAIRS), 1e-4),
    Case("qwen2, no biases", replace(QWEN2, biases=frozenset()), 1e-4),
    Case("qwen2, flags", Qwen2.from_flags(FLAGS), 1e-4),
    Case("qwen3, biases", replace(QWEN3, biases=QWEN2.biases), 1e-4),
    Case("qwen3, heads of another width", replace(QWEN3, key_length=8, value_length=8), 1e-4),
    Case("qwen3, coarse epsilon", replace(QWEN3, rms_epsilon=0.03, rope_freq_base=500.0), 1e-4),
    Case("qwen3, flags", Qwen3.from_flags(FLAGS | {"tied": True}), 1e-4),
    Case("gpt2, coarse epsilon", replace(GPT, norm_epsilon=0.03), 2e-2),
]


Edit = Callable[[dict[str, np.ndarray]], object]


def write_model(path: Path, config: ModelConfig, weights: dict[str, np.ndarray], **keys: Any) -> Path:
    fields = {f"{config.arch}.{name.replace('__', '.')}": value for name, value in keys.items()}
    metadata = config.metadata() | ByteTokenizer().metadata() | fields
    return write_tensors(path, config.arch, metadata, weights | config.constants())


def next_token(
    server: Any, ids: list[int], size: int = ByteTokenizer.vocab_size, letter: int = ord("a")
) -> np.ndarray:
    """Return llama.cpp's log-probabilities (V,) of the next token after `ids`; V is `size`.

    A bias makes llama.cpp emit a `letter`, because an incomplete character has no log-probabilities. The bias
    does not change the reported log-probabilities.
    """
    request = {"prompt": ids, "n_predict": 1, "n_probs": size, "temperature": 0.0, "cache_prompt": False}
    answer = server.handle_completions(request | {"logit_bias": [[letter, 1000.0]]})
    logprobs = np.full(size, -np.inf)
    for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        logprobs[entry["id"]] = entry["logprob"]
    return logprobs


@pytest.fixture(scope="module")
def readable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Model that generates only printable ASCII, and a llama.cpp server that runs it."""
    weights = random_weights(LLAMA)
    weights["output.weight"][:32] = weights["output.weight"][127:] = 0
    path = write_model(tmp_path_factory.mktemp("readable") / "model.gguf", LLAMA, weights)
    return path, open_server(path)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def training_forward(config: ModelConfig, weights: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    x: Any = np.array([ids])
    for stage in config.stages():
        x, _ = stage.layer.forward(weights, x)
    return x[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_log_probabilities_are_llama_cpps(case, tmp_path):
    weights = random_weights(case.config)
    path = write_model(tmp_path / "model.gguf", case.config, weights)
    ids = list(PROMPT)
    generated = log_softmax(TextModel(path).logits(ids))
    trained = log_softmax(training_forward(case.config, weights, ids))
    server = open_server(path)
    for count in PREFIXES:
        expected = next_token(server, ids[:count])
        assert expected.max() - expected.min() > 2, "logits must not be flat"
        for actual in (generated, trained):
            np.testing.assert_allclose(actual[count - 1], expected, rtol=0, atol=case.tolerance)


@pytest.mark.parametrize(
    "text", ["def f(x):\n\treturn 'it''s'  # 12345", "naïve 😀 \u2581 日本語\r\n\x00\x7f"]
)
def test_llama_cpp_turns_text_into_bytes(readable, text):
    _, server = readable
    assert tokenize(server, text) == list(text.encode())


def test_greedy_text_is_llama_cpps(readable):
    path, server = readable
    ours = bytes(TextModel(path).generate(list(b"def "), 16, temperature=0)).decode()
    theirs = greedy(server, "def ", 16)
    assert len(set(theirs)) > 4, "the text needs many characters"
    assert ours == theirs


@pytest.mark.parametrize(
    "how",
    [
        {"top_k": 7},
        {"top_p": 0.3},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.7, "min_p": 0.15},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_what_is_kept_and_how_it_is_weighted_is_llama_cpps(readable, how):
    """Compare the probabilities after all samplers, in llama.cpp's order, at a temperature other than 1.

    No limit separates equally likely tokens, because llama.cpp's choice among them is undocumented.
    """
    path, server = readable
    settings = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 0.6} | how
    request = {"prompt": list(PROMPT), "n_predict": 1, "n_probs": 259, "post_sampling_probs": True}
    answer = server.handle_completions(request | settings)
    entries = answer["choices"][0]["logprobs"]["content"][0]["top_probs"]
    expected = {entry["id"]: entry["prob"] for entry in entries if entry["prob"] > 0}
    weights = weights_of(TextModel(path).logits(list(PROMPT))[-1], **settings)
    assert 1 < len(expected) < ByteTokenizer.vocab_size
    assert set(np.flatnonzero(weights)) == set(expected)
    for token, share in expected.items():
        assert abs(weights[token] / weights.sum() - share) < 1e-4


def put(name: str, *shape: int) -> Edit:
    return lambda weights: weights.update({name: np.ones(shape, np.float32)})


def drop(name: str) -> Edit:
    return lambda weights: weights.pop(name)


@pytest.mark.parametrize(
    ("config", "spoil"),
    [
        pytest.param(LLAMA, drop("blk.1.ffn_up.weight"), id="missing"),
        pytest.param(LLAMA, put("surplus.weight", 3, 5), id="surplus"),
        pytest.param(LLAMA, put("blk.0.attn_q.weight", 24, 25), id="shape"),
        pytest.param(LLAMA, put("rope_freqs.weight", 4), id="rope factors' shape"),
        pytest.param(QWEN2, put("rope_freqs.weight", 3), id="qwen2 with rope factors"),
        pytest.param(QWEN2, put("blk.0.attn_output.bias", 24), id="qwen2 with another bias"),
        pytest.param(replace(QWEN2, key_length=8, value_length=8), lambda _: None, id="qwen2, wide heads"),
        pytest.param(QWEN3, drop("blk.1.attn_k_norm.weight"), id="qwen3 without a norm"),
        pytest.param(QWEN3, put("blk.0.attn_k_norm.weight", 12), id="qwen3 with a norm of all heads"),
    ],
)
def test_what_we_refuse_llama_cpp_refuses_too(config, spoil: Edit, tmp_path):
    weights = random_weights(config)
    spoil(weights)
    path = write_model(tmp_path / "model.gguf", config, weights)
    with pytest.raises(UsageError, match=r"blk\.|surplus|heads|rope_freqs"):
        TextModel(path)
    with pytest.raises(RuntimeError):
        open_server(path)


WINDOW = 8  # tokens of a window; each target is one request to llama.cpp


def surprise(server: Any, ids: list[int], of: int) -> float:
    return -float(next_token(server, ids)[of])


@needs_mpiexec
def test_an_evaluation_has_llama_cpps_losses(tmp_path):
    """Compare the windows of a text and the answers to a question, token by token."""
    path = write_model(tmp_path / "model.gguf", LLAMA, random_weights(LLAMA))
    (tmp_path / "text").write_bytes(PROMPT)
    line = {"question": "def f", "answers": ["(x)", ":"], "right": 0}
    (tmp_path / "choices").write_text(json.dumps(line))
    flags = ["--data", "text", "--context", str(WINDOW), "--choices", "choices", "--json", "figures.json"]
    status, _, errors = run_job(2, ["-m", "zero_mpi", "evaluate", "model.gguf", *flags], cwd=tmp_path)
    assert status == 0, errors
    (record,) = json.loads((tmp_path / "figures.json").read_text())["models"]
    server = open_server(path)
    ids = list(PROMPT)
    for number, loss in enumerate(record["text"]["window_losses"]):
        window = ids[number * WINDOW : (number + 1) * WINDOW + 1]
        losses = [surprise(server, window[:place], window[place]) for place in range(1, WINDOW + 1)]
        assert loss == pytest.approx(np.mean(losses), abs=1e-3)
    assert number == 1
    for answer, likelihood in zip(line["answers"], record["choices"]["log_likelihoods"][0], strict=True):
        tokens, start = [*(line["question"] + answer).encode()], len(line["question"])
        losses = [surprise(server, tokens[:place], tokens[place]) for place in range(start, len(tokens))]
        assert likelihood == pytest.approx(-sum(losses), abs=1e-3)


# ids of "Water boils at a lower temperature on a mountain because the air pressure is lower there"
WATER = [12615, 36411, 418, 253, 2208, 2779, 335, 253, 6740, 975, 260, 1512, 2456, 314, 2208, 665]


def dump(file: GGUFFile, path: Path) -> Path:
    """Write the model in float32: with quantized weights llama.cpp rounds activations too."""
    metadata = file.metadata | {"general.file_type": np.uint32(0)}
    tensors = {name: file.tensor(name) for name in file.tensors}
    return write_tensors(path, file.metadata["general.architecture"], metadata, tensors)


def pair_halves(model: TextModel) -> None:
    """Bring the rows of q and k into Hugging Face's order, as if a converter had not permuted them."""
    for name, weight in model.weights.items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            heads = weight.reshape(-1, model.config.key_length // 2, 2, weight.shape[1])
            weight[:] = heads.swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.timeout_seconds(300)
def test_log_probabilities_of_a_real_model_are_llama_cpps(tmp_path):
    file = GGUFFile.open(smollm2())
    path = dump(file, tmp_path / "model.gguf")
    server, letter = open_server(path), file.metadata["tokenizer.ggml.tokens"].index("a")
    expected = {
        count: next_token(server, WATER[:count], file.metadata["llama.vocab_size"].item(), letter)
        for count in (1, 2, 7, len(WATER))
    }
    del server
    model = TextModel(path)

    def worst() -> float:
        model.reset()
        actual = log_softmax(model.logits(WATER))
        return max(float(np.abs(actual[count - 1] - of).max()) for count, of in expected.items())

    assert worst() < 1e-3
    pair_halves(model)
    assert worst() > 1
