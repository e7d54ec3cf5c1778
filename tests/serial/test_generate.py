"""Tests of generation: cached forward, sampling, the command."""

import os
import pty
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import architectures
import jobs
import numpy as np
import pytest
from gguf_files import random_weights, write_tensors

from zero_mpi.commands.generate.command import command as generate
from zero_mpi.data import ByteTokenizer
from zero_mpi.data.tokenizers.byte import byte_characters
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World
from zero_mpi.models import ModelConfig
from zero_mpi.ops import threads
from zero_mpi.train.text_model import TextModel, choose

CONTEXT = 13
SIZES: dict[str, Any] = {"vocab_size": ByteTokenizer.vocab_size, "context_length": CONTEXT}
SIZES |= {"embedding_length": 12, "feed_forward_length": 17, "head_count": 6, "head_count_kv": 3}
SIZES |= {"key_length": 4, "value_length": 3}
MODELS = architectures.every(SIZES)
LLAMA = MODELS["llama"]
SCALED = replace(LLAMA, rope_factors=(1.0, 4.0))
LONG = replace(
    MODELS["phi3"], long_factors=(3.0,), short_factors=(0.5,), original_context=5, rope_magnitude=1.5
)
PARTIAL = replace(LLAMA, rope_dimension_count=2)
CONFIGS = MODELS | {"llama, rope factors": SCALED, "llama, partial": PARTIAL, "phi3, long": LONG}
PROMPT = list(b"def f(")


def write_model(path: Path, config: ModelConfig, metadata: dict[str, Any] | None = None) -> Path:
    keys = config.metadata() | (ByteTokenizer().metadata() if metadata is None else metadata)
    return write_tensors(path, config.arch, keys, random_weights(config, 0.4) | config.constants())


@pytest.fixture(scope="module", params=CONFIGS, ids=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel(write_model(tmp_path_factory.mktemp("model") / "model.gguf", CONFIGS[request.param]))


def full_forward(model: TextModel, ids: list[int]) -> np.ndarray:
    x: Any = np.array([ids])
    for stage in model.config.stages():
        x, _ = stage.layer.forward(model.weights, x)
    return x[0]


@pytest.mark.parametrize("pieces", [[13], [1] * 13, [5, 1, 4, 3], [1, 12], [12, 1]], ids=str)
def test_cached_logits_are_those_of_the_full_forward(model, pieces):
    ids = np.random.default_rng(0).integers(256, size=sum(pieces)).tolist()
    expected = full_forward(model, ids)
    assert np.ptp(expected, axis=-1).min() > 1, "logits must not be flat"
    model.reset()
    ends = np.cumsum(pieces)
    logits = [model.logits(ids[end - piece : end]) for piece, end in zip(pieces, ends, strict=True)]
    assert model.decoder.cache.position == CONTEXT
    bound = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(np.concatenate(logits), expected, rtol=0, atol=bound)
    assert logits[0].dtype == np.float32


def test_prompts_at_once_continue_as_each_alone(model):
    prompts, expected = [PROMPT[:3], PROMPT[:5], PROMPT[:1]], []
    for prompt in prompts:
        model.reset()
        expected.append(list(model.generate(prompt, 7, temperature=0)))
    threads.use(3)
    try:
        assert model.generate_each(prompts, 7, temperature=0) == expected
        end = expected[1][2]
        cut = [ids[: ids.index(end) + 1] if end in ids else ids for ids in expected]
        assert model.generate_each(prompts, 7, {end}, temperature=0) == cut
        assert model.generate_each([PROMPT, PROMPT], CONTEXT, temperature=0)[1] == greedy(
            model, PROMPT, CONTEXT
        )
    finally:
        threads.use(1)


def greedy(model: TextModel, prompt: list[int], tokens: int) -> list[int]:
    """Return the tokens for temperature 0, computed by a full forward for every token.

    When the context is full, it restarts with its newest half (six of 13 positions).
    """
    history, start = list(prompt), max(0, len(prompt) - 6) if len(prompt) > CONTEXT else 0
    for _ in range(tokens):
        if len(history) - start > CONTEXT:
            start = len(history) - 6
        history.append(int(np.argmax(full_forward(model, history[start:])[-1])))
    return history[len(prompt) :]


@pytest.mark.parametrize("length", [1, 6, 12, 13, 14, 40])
def test_greedy_text_goes_on_past_the_context(model, length):
    prompt = np.random.default_rng(length).integers(256, size=length).tolist()
    assert list(model.generate(prompt, 30, temperature=0)) == greedy(model, prompt, 30)


def test_the_likeliest_of_one_is_the_likeliest_and_seeds_repeat_and_differ(model):
    expected = list(model.generate(PROMPT, 20, temperature=0, seed=1))
    assert list(model.generate(PROMPT, 20, temperature=1.7, top_k=1, seed=2)) == expected
    texts = [list(model.generate(PROMPT, 20, temperature=1.0, seed=seed)) for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


def test_no_tokens_and_no_prompt(model):
    assert list(model.generate(PROMPT, 0)) == []
    with pytest.raises(UsageError, match="the prompt is empty"):
        list(model.generate([], 1))


LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


@pytest.mark.parametrize(
    ("temperature", "top_k", "expected"),
    [
        (1.0, 0, [0.1, 0.4, 0.2, 0.3]),
        (1.0, 99, [0.1, 0.4, 0.2, 0.3]),
        (1.0, 2, [0, 4 / 7, 0, 3 / 7]),
        (1.0, 3, [0, 4 / 9, 2 / 9, 3 / 9]),
        (0.5, 0, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        (0.5, 2, [0, 16 / 25, 0, 9 / 25]),
        (0, 0, [0, 1, 0, 0]),
    ],
)
def test_ids_come_as_often_as_the_softmax_says(temperature, top_k, expected):
    generator = np.random.default_rng(0)
    ids = [choose(LOGITS, generator, temperature=temperature, top_k=top_k) for _ in range(4000)]
    shares = np.bincount(ids, minlength=4) / 4000
    np.testing.assert_allclose(shares, expected, rtol=0, atol=0.035)  # 4 standard deviations for 4000 draws
    assert np.all((shares == 0) == (np.array(expected) == 0))


def kept(logits: list[float] | np.ndarray, top_k: int = 0, **options: float) -> set[int]:
    """Return all ids that are ever drawn; the temperature is high, so all kept ids occur."""
    generator = np.random.default_rng(0)
    values = np.asarray(logits, np.float32)
    return {choose(values, generator, temperature=1e6, top_k=top_k, **options) for _ in range(400)}


def test_as_many_as_asked_for_are_kept_of_equally_likely_ones():
    assert kept([1, 2, 2, 2, 0], 2) == {1, 2}
    assert kept([2, 1, 2, 2, 0], 2) == {0, 2}
    assert kept([3, 3, 3, 3], 3) == {0, 1, 2}
    assert kept([0, 7, 5, 5, 5], 3) == {1, 2, 3}
    assert kept([5, 5, 5], 1) == {0}
    assert kept([1, 1, 1, 1], top_p=0.45) == {0, 1}
    assert kept([1, 1, 1, 1], min_p=1.0) == {0, 1, 2, 3}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-300, 1e-49, 1e-47, 1e-30])
def test_a_temperature_near_zero_takes_the_likeliest_without_a_warning(temperature):
    generator = np.random.default_rng(0)
    huge, tiny = np.array([-3e38, 3e38, 0, 1], np.float32), np.array([0, 1e-45, 0, 0], np.float32)
    for logits in (LOGITS, huge, tiny) if temperature < 1e-47 else (LOGITS, huge):
        for top_k in (0, 2):
            assert choose(logits, generator, temperature=temperature, top_k=top_k, top_p=0.9, min_p=0.1) == 1


def command(*arguments: str, typed: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    line, environ = [sys.executable, "-m", "zero_mpi", "generate", *arguments], jobs.clean_environment()
    return subprocess.run(line, input=typed, capture_output=True, timeout=50, env=environ, check=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("step-00000001")
    write_model(folder / "model.gguf", LLAMA)
    return folder


@pytest.mark.parametrize("name", ["model.gguf", ""], ids=["file", "folder"])
def test_the_command_prints_prompt_and_text(checkpoint, name):
    arguments = ["--prompt", "naïve (", "--tokens", "5", "--temperature", "0.9", "--seed", "3"]
    result = command(str(checkpoint / name), *arguments)
    model, prompt = TextModel(checkpoint / "model.gguf"), "naïve (".encode()
    ids = list(model.generate(list(prompt), 5, temperature=0.9, top_k=40, seed=3))
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout == prompt + ByteTokenizer().decode(ids) + b"\n"


def write_story(path: Path, keys: dict[str, Any], ids: list[int]) -> Path:
    config = replace(LLAMA, vocab_size=len(keys["tokenizer.ggml.tokens"]))
    params = config.params().items()
    arrays = {name: np.full(param.shape, param.init == "ones", np.float32) for name, param in params}
    for place, (token, following) in enumerate(pairwise(ids)):
        arrays["token_embd.weight"][token, place] = 1
        arrays["output.weight"][following, place] = 1
    return write_tensors(path, config.arch, config.metadata() | keys, arrays)


def with_bpe() -> dict[str, Any]:
    tokens = [*byte_characters(), "na", "¯v", "<|im_end|>"]
    types = np.array([1] * 258 + [3], np.int32)
    special = {"tokenizer.ggml.eos_token_id": np.uint32(258), "tokenizer.ggml.bos_token_id": np.uint32(258)}
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types} | special
    return ByteTokenizer().metadata() | keys | {"tokenizer.ggml.merges": ["n a", "¯ v"]}


@pytest.mark.parametrize(
    ("keys", "ids"),
    [(ByteTokenizer().metadata(), [*"naïv".encode(), 257]), (with_bpe(), [256, 0xC3, 257, 258])],
    ids=["bytes", "bpe"],
)
def test_the_command_writes_bytes_as_they_come_and_ends_with_the_text(keys, ids, tmp_path):
    path = write_story(tmp_path / "model.gguf", keys, [*ids, ids[1]])
    start = ["--prompt", "na" if len(ids) == 4 else "n", "--temperature", "0"]
    result = command(str(path), *start, "--tokens", "9")
    assert (result.returncode, result.stdout.decode()) == (0, "naïv\n"), result.stderr
    assert list(TextModel(path).generate(ids[:1], len(ids), temperature=0)) == [*ids[1:], ids[1]]
    half = command(str(path), *start, "--tokens", str(ids.index(0xC3)))
    assert half.stdout == b"na\xc3\n"


def test_on_a_terminal_control_letters_are_escaped_and_elsewhere_bytes_are_exact(tmp_path):
    text = "\x1b[2Jï\n\r".encode()
    path = write_story(tmp_path / "model.gguf", ByteTokenizer().metadata(), [ord("a"), *text, 257])
    arguments = [str(path), "--prompt", "a", "--temperature", "0", "--tokens", "9"]
    assert command(*arguments).stdout == b"a" + text + b"\n"
    master, terminal = pty.openpty()
    line = [sys.executable, "-m", "zero_mpi", "generate", *arguments]
    subprocess.run(line, stdout=terminal, timeout=50, check=True, env=jobs.clean_environment())
    os.close(terminal)
    assert os.read(master, 1000).decode() == "a\\x1b[2Jï\r\n\\r\r\n", "terminals write \\r\\n for \\n"
    os.close(master)


def test_batches_of_prompts_are_answered_as_one_after_the_other(checkpoint, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("def \nnaïve\na\n")
    arguments = [str(checkpoint), "--prompts", str(path), "--tokens", "4", "--temperature", "0", "--json"]
    assert command(*arguments, "--batch", "2").stdout == command(*arguments).stdout


@pytest.mark.parametrize(
    "flags", ["--batch 2", "--engine llamacpp --lora x", "--tokens -1", "--temperature nan"]
)
def test_the_command_refuses_bad_flags(checkpoint, flags):
    with pytest.raises(UsageError, match=f"^[^\n]*{flags.split()[0]}[^\n]*$"):
        generate(World(0, 1), [str(checkpoint), *flags.split()])
