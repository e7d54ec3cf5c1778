"""Tests of --add-tokens: ids of the new tokens, their rows, training, export."""

import json
from dataclasses import replace

import numpy as np
import pytest
import sentencepiece_files
import tiny
from bpe_files import smollm2_keys
from jobs import run_job
from oracles import llama_cpp, open_server, tokenize
from test_command_bits import fields, needs_mpiexec, train
from test_llamacpp import log_softmax, next_token
from test_lora import DATA, SIZES
from test_resume import refused

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.weights import GrownWeights, open_weights
from zero_mpi.commands.export.command import command
from zero_mpi.data import tokenizer_from_metadata
from zero_mpi.data.tokenizers.added_tokens import read_tokens, with_tokens
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World
from zero_mpi.models.lora import LoRA
from zero_mpi.train.text_model import TextModel

NEW = ["<ask>", "</ask>", "Zürich now"]
TEXT = "<ask>line 7</ask> of\n49 in Zürich now<|endoftext|>"


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b" <a>\r\n\n<b> \n", ["<a>", "<b>"]),
        (b'\xef\xbb\xbf[" a", "\\n"]', [" a", "\n"]),
        (b"[a]\n[b]", ["[a]", "[b]"]),
        (b"<a>\n<b>\n<a>", "<a>"),
        (b"<a>\n\xff", "UTF-8"),
        (b'["<a>", 3]', "found 3"),
        (b"\n".join(b"%d" % number for number in range(65537)), "65,537"),
    ],
)
def test_a_file_of_tokens(raw, found, tmp_path):
    (tmp_path / "tokens").write_bytes(raw)
    if isinstance(found, list):
        assert read_tokens(tmp_path / "tokens") == found
        return
    with pytest.raises(UsageError, match=f"--add-tokens .*{found}") as error:
        read_tokens(tmp_path / "tokens")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keys", [smollm2_keys, sentencepiece_files.merged, sentencepiece_files.likely])
def test_every_kind_of_tokenizer_takes_them(keys):
    before = keys()
    after, first = with_tokens(before, NEW)
    old, new = tokenizer_from_metadata(before), tokenizer_from_metadata(after)
    assert (first, new.vocab_size) == (old.vocab_size, old.vocab_size + 3)
    ids = new.encode(f"a{NEW[0]}b {NEW[2]}").tolist()
    assert [id for id in ids if id >= first] == [first, first + 2]
    assert new.encode("plain text").tolist() == old.encode("plain text").tolist()
    with pytest.raises(UsageError, match=r"--add-tokens: .*</ask>"):
        with_tokens(after, ["<other>", "</ask>"])


def test_unused_rows_at_the_end_are_taken_first(tmp_path):
    keys = smollm2_keys()
    size = len(keys["tokenizer.ggml.tokens"])
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], *(f"[PAD{size + n}]" for n in range(2))]
    keys["tokenizer.ggml.token_type"] = np.append(keys["tokenizer.ggml.token_type"], [5, 5]).astype(np.int32)
    for count, total in ((1, size + 2), (2, size + 2), (3, size + 3)):
        after, first = with_tokens(keys, NEW[:count])
        assert (first, len(after["tokenizer.ggml.tokens"])) == (size, total)
        assert after["tokenizer.ggml.tokens"][size : size + count] == NEW[:count]


@pytest.mark.parametrize("name", ["llama", "llama tied", "gemma3", "granite"])
def test_split_rows_compute_what_the_full_matrices_do(name):
    """Compare loss and gradients of the added rows, for ids below and above the first added id."""
    full = {**tiny.MODELS, **tiny.OTHERS}[name]
    split = replace(full, lora=LoRA(1, 1.0, ("none",), added=5))
    random = np.random.default_rng(0)
    p = {key: random.standard_normal(param.shape) for key, param in full.params().items()}
    parts = {f"{key}.added": p[key][-5:] for key in ("token_embd.weight", "output.weight") if key in p}
    halves = {key: value[:-5] if f"{key}.added" in parts else value for key, value in p.items()} | parts
    x = random.integers(0, full.vocab_size, (2, full.context_length))
    x[0, :3] = full.vocab_size - 6, full.vocab_size - 5, full.vocab_size - 1
    results = []
    for model, weights in ((full, p), (split, halves)):
        assert {key: param.shape for key, param in model.params().items()} == {
            k: w.shape for k, w in weights.items()
        }
        g = {key: np.zeros_like(w) for key, w in weights.items() if key in parts or model is full}
        y, activations, stages = x, [], model.stages()
        for stage in stages[:-1]:
            y, saved = stage.layer.forward(weights, y)
            activations.append(saved)
        loss, dy = tiny.cross_entropy(stages[-1].layer.forward(weights, y)[0], x, 1.0)
        dy = stages[-1].layer.backward(weights, stages[-1].layer.forward(weights, y)[1], dy, g)
        for stage, saved in zip(reversed(stages[:-1]), reversed(activations), strict=True):
            dy = stage.layer.backward(weights, saved, dy, g)
        results.append(
            (loss, {key: g[key] if key in g else g[key.removesuffix(".added")][-5:] for key in parts})
        )
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    for key in parts:
        np.testing.assert_allclose(results[1][1][key], results[0][1][key], rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Return flags that name a text with the new tokens, and a model that lacks them."""
    folder = tmp_path_factory.mktemp("given")
    lines = (f"<ask>line {number}</ask> of {number * number} in Zürich now\n" for number in range(300))
    (folder / "text.txt").write_text("".join(lines))
    (folder / "tokens").write_text("\n".join(NEW))
    text = ["--data", str(folder / "text.txt")]
    train(1, folder / "run", *SIZES, *DATA, *text, "--steps", "3")
    base = folder / "run" / "latest" / "model.gguf"
    return [*DATA, *text, "--init", str(base), "--add-tokens", str(folder / "tokens")], base


@pytest.fixture(scope="module")
def adapted(given, tmp_path_factory):
    out = tmp_path_factory.mktemp("adapted") / "run"
    flags = [*given[0], "--lora", "2", "--ema", "0.9", "--steps", "6", "--lr", "0.02"]
    train(1, out, *flags)
    return out, flags


@needs_mpiexec
def test_an_adapter_has_the_same_bits_on_three_ranks_and_after_a_resume(adapted, tmp_path):
    out, flags = adapted
    train(3, tmp_path / "run", *flags, "--steps", "3")
    train(2, tmp_path / "run", *flags, "--strategy", "no-shard")
    assert fields(tmp_path / "run") == fields(out)
    for name in ("adapter.gguf", "ema.gguf", "optimizer.gguf"):
        assert (tmp_path / "run" / "latest" / name).read_bytes() == (out / "latest" / name).read_bytes()
    assert run_job(1, ["-m", "zero_mpi", "verify", str(out)])[0] == 0
    other = tmp_path / "tokens"
    other.write_text("<ask>\n</ask>\nBern")
    assert "data.tokenizer was" in refused(1, tmp_path / "run", *flags, "--add-tokens", str(other))


def test_only_the_new_rows_are_trained_and_the_loss_falls(given, adapted):
    adapter = GGUFFile.open(adapted[0] / "latest" / "adapter.gguf")
    added = {name: spec.shape for name, spec in adapter.tensors.items() if name.endswith(".added")}
    assert added == {"token_embd.weight.added": (3, 48), "output.weight.added": (3, 48)}
    base = GrownWeights(open_weights(given[1]), NEW)
    assert all((adapter.tensor(name) != base.read(name).reshape(3, 48)).all(axis=1).all() for name in added)
    mean = open_weights(given[1]).tensor("token_embd.weight").mean(axis=0, dtype=np.float64)
    np.testing.assert_allclose(base.tensor("token_embd.weight")[-3:], np.tile(mean, (3, 1)), rtol=1e-6)
    records = [json.loads(line) for line in (adapted[0] / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["val_loss"] < records[0]["val_loss_before"] - 0.1


def test_the_merged_export_is_llama_cpps(given, adapted, tmp_path):
    """Base plus adapter gives the logits of the merged file, and llama.cpp computes the same logits."""
    (out, _), (_, base) = adapted, given
    llama_cpp()
    merged = tmp_path / "merged.gguf"
    assert command(World(0, 1), [str(base), str(merged), "--merge", str(out / "latest")]) == 0
    pair = TextModel(base, GGUFFile.open(out / "latest" / "adapter.gguf"))
    model, server = TextModel(merged), open_server(merged)
    tokenizer = tokenizer_from_metadata(model.file.metadata)
    ids = tokenizer.encode(TEXT, special=True).tolist()
    assert tokenize(server, TEXT) == ids
    assert tokenize(server, TEXT, parse_special=False) == tokenizer.encode(TEXT).tolist()
    assert [id for id in ids if id > 259] == [260, 261, 262]
    ids, logits = ids[:16], model.logits(ids[:16])
    np.testing.assert_array_equal(logits, pair.logits(ids))
    for count in (1, 9, 15):  # llama.cpp needs space for one more token
        expected = next_token(server, ids[:count], 263)
        np.testing.assert_allclose(log_softmax(logits)[count - 1], expected, rtol=0, atol=1e-4)
    average = tmp_path / "average.gguf"
    assert command(World(0, 1), [str(base), str(average), "--merge", str(out / "latest" / "ema.gguf")]) == 0
    assert len(TextModel(average).logits([262])[0]) == 263


@pytest.mark.parametrize("target", ["adapter.gguf", "peft"])
def test_an_adapter_alone_is_not_exported(target, given, adapted, tmp_path):
    arguments = ["export", str(adapted[0] / "latest"), str(tmp_path / target), "--base", str(given[1])]
    status, _, errors = run_job(1, ["-m", "zero_mpi", *arguments])
    assert (status, errors.count("\n"), "--merge" in errors) == (2, 1, True)
    assert not (tmp_path / target).exists()


@needs_mpiexec
def test_full_training_has_more_rows(given, tmp_path):
    flags, _ = given
    for ranks in (1, 3):
        train(ranks, tmp_path / str(ranks), *flags, "--steps", "2")
    files = [(tmp_path / run / "latest" / "model.gguf") for run in ("1", "3")]
    assert files[0].read_bytes() == files[1].read_bytes()
    model = TextModel(files[0])
    assert model.config.vocab_size == len(tokenizer_from_metadata(model.file.metadata).tokens) == 263


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--lora", "2", "--lora-targets", "output.weight"], "--lora-targets"),
        (["--lora", "2", "--lora-init", "ADAPTER", "--add-tokens", "OTHER"], "--lora-init"),
        (["--tokenizer", "byte"], "--tokenizer byte"),
        (["--add-tokens", "missing"], "missing"),
    ],
)
def test_what_cannot_work_is_refused(more, said, given, adapted, tmp_path):
    (tmp_path / "other").write_text("<a>\n<b>\n<c>")
    places = {"ADAPTER": str(adapted[0] / "latest"), "OTHER": str(tmp_path / "other")}
    more = [places.get(flag, flag) for flag in more]
    assert said in refused(1, tmp_path / "run", *given[0], *more)
