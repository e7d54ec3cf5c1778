"""llama.cpp opens what the runtime writes, and computes the same from it.

Models with random weights, large enough that logits are far from flat, go through a GGUF file; llama.cpp's
log-probabilities over the whole vocabulary are compared with those of the generation path and of the
training forward. Skipped where the `xllamacpp` wheel is not installed.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zero_mpi.checkpoint.writer import GGUFStream
from zero_mpi.data import ByteTokenizer
from zero_mpi.models import GPT2, Llama, ModelConfig
from zero_mpi.textmodel import TextModel

xllamacpp = pytest.importorskip(
    "xllamacpp", reason="no llama.cpp to compare with: pip install xllamacpp", exc_type=ImportError
)

PROMPT = b"def f(x):\n  return "
PREFIXES = (1, 2, 7, len(PROMPT))
BIASES = frozenset({"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"})
LLAMA = Llama(
    vocab_size=ByteTokenizer.vocab_size,
    context_length=32,
    embedding_length=24,
    block_count=2,
    feed_forward_length=97,
    head_count=4,
    head_count_kv=2,
    key_length=6,
    value_length=6,
    tied=False,
)
GPT = GPT2(
    vocab_size=ByteTokenizer.vocab_size,
    context_length=32,
    embedding_length=24,
    block_count=2,
    feed_forward_length=97,
    head_count=3,
    tied=True,
)


@dataclass(frozen=True)
class Case:
    """A model and how near llama.cpp comes: its GELU is a table of 16-bit floats."""

    name: str
    config: ModelConfig
    tolerance: float


CASES = [
    Case("llama", LLAMA, 1e-4),
    Case("llama, tied", replace(LLAMA, tied=True), 1e-4),
    Case("llama, biases", replace(LLAMA, biases=BIASES), 1e-4),
    Case("llama, K = H", replace(LLAMA, head_count_kv=4, rope_freq_base=500.0), 1e-4),
    Case("llama, heads of another width", replace(LLAMA, key_length=8, value_length=8), 1e-4),
    Case("llama, coarse epsilon", replace(LLAMA, rms_epsilon=0.03), 1e-4),
    Case("gpt2, tied", GPT, 2e-2),
    Case("gpt2", replace(GPT, tied=False), 2e-2),
    Case("gpt2, coarse epsilon", replace(GPT, norm_epsilon=0.03), 2e-2),
]

# ------------------------------------------------------------------------------------------------ files

Edit = Callable[[dict[str, np.ndarray]], None]


def random_weights(config: ModelConfig) -> dict[str, np.ndarray]:
    """Matrices and biases of deviation 0.2, norms around one."""
    rng = np.random.default_rng(0)
    return {
        name: ((param.init == "ones") + 0.2 * rng.standard_normal(param.shape)).astype(np.float32)
        for name, param in config.params().items()
    }


def write_model(path: Path, config: ModelConfig, weights: dict[str, np.ndarray]) -> Path:
    """A model file with the byte tokenizer."""
    metadata = config.metadata() | ByteTokenizer().metadata()
    table = [(name, array.shape) for name, array in weights.items()]
    with GGUFStream(path, config.arch, metadata, table) as stream:
        for name, array in weights.items():
            stream.write(name, array)
    return path


# -------------------------------------------------------------------------------------------- llama.cpp


def open_server(path: Path) -> Any:
    """llama.cpp with all of it in float32: its defaults round keys and values to 16 bits."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 32
    params.cpuparams.n_threads = 1
    params.warmup = False
    params.verbosity = -1  # a thread writes its log, past pytest's capture
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


def next_token(server: Any, ids: list[int]) -> np.ndarray:
    """llama.cpp's log-probabilities (V,) of what follows `ids`.

    The bias makes it emit an "a": an incomplete character would come without log-probabilities. It does not
    change the reported ones.
    """
    size = ByteTokenizer.vocab_size
    request = {"prompt": ids, "n_predict": 1, "n_probs": size, "temperature": 0.0, "cache_prompt": False}
    answer = server.handle_completions(request | {"logit_bias": [[ord("a"), 1000.0]]})
    found = np.full(size, -np.inf)
    for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        found[entry["id"]] = entry["logprob"]
    return found


def tokenize(server: Any, text: str) -> list[int]:
    """llama.cpp's ids of a text, from its own little web server on the loopback."""
    request = urllib.request.Request(
        f"{server.listening_address}/tokenize",
        data=json.dumps({"content": text}).encode(),
        headers={"Content-Type": "application/json"},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a site's proxy is not asked
    with direct.open(request, timeout=20) as answer:
        return json.load(answer)["tokens"]


@pytest.fixture(scope="module")
def readable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model whose head can only win with printable ASCII, so that its text is text; and llama.cpp on it."""
    weights = random_weights(LLAMA)
    weights["output.weight"][:32] = weights["output.weight"][127:] = 0
    path = write_model(tmp_path_factory.mktemp("readable") / "model.gguf", LLAMA, weights)
    return path, open_server(path)


# -------------------------------------------------------------------------------------------- ourselves


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of logits (..., V)."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def training_forward(config: ModelConfig, weights: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Logits (T, V) as training computes them: no cache."""
    x: Any = np.array([ids])
    for stage in config.stages():
        x, _ = stage.layer.forward(weights, x)
    return x[0]


# ---------------------------------------------------------------------------------------------- tests


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
        assert expected.max() - expected.min() > 2, "logits are flat: agreement would say little"
        for found in (generated, trained):
            np.testing.assert_allclose(found[count - 1], expected, rtol=0, atol=case.tolerance)


@pytest.mark.parametrize(
    "text", ["def f(x):\n\treturn 'it''s'  # 12345", "naïve 😀 \u2581 日本語\r\n\x00\x7f"]
)
def test_llama_cpp_turns_text_into_bytes(readable, text):
    _, server = readable
    assert tokenize(server, text) == list(text.encode())


def test_greedy_text_is_llama_cpps(readable):
    path, server = readable
    ours = bytes(TextModel(path).generate(list(b"def "), 16, temperature=0)).decode()
    request = {"prompt": "def ", "n_predict": 16, "temperature": 0.0}
    theirs = server.handle_completions(request)["choices"][0]["text"]
    assert len(set(theirs)) > 4, "a text of few characters would show little"
    assert ours == theirs


@pytest.mark.parametrize(
    "spoil",
    [
        lambda weights: weights.pop("blk.1.ffn_up.weight"),
        lambda weights: weights.update({"surplus.weight": np.zeros((3, 5), np.float32)}),
        lambda weights: weights.update({"blk.0.attn_q.weight": np.zeros((24, 25), np.float32)}),
    ],
    ids=["missing", "surplus", "shape"],
)
def test_what_we_refuse_llama_cpp_refuses_too(spoil: Edit, tmp_path):
    """The check of tensors is as strict as llama.cpp's own."""
    weights = random_weights(LLAMA)
    spoil(weights)
    path = write_model(tmp_path / "model.gguf", LLAMA, weights)
    with pytest.raises(ValueError, match=r"blk\.|surplus"):
        TextModel(path)
    with pytest.raises(RuntimeError):
        open_server(path)
