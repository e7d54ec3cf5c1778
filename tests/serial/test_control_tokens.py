"""Tests of --control-tokens: control-token strings in text become characters or tokens."""

import dataclasses
import tomllib
from pathlib import Path

import bpe_files
import numpy as np
import pytest
from corpora import load_corpus
from test_command_bits import assert_same_run, fields, needs_mpiexec, train
from test_resume import refused

from zero_mpi.checkpoint.sound import CheckpointFiles
from zero_mpi.commands.plan import command as plan_flags
from zero_mpi.config.settings import Config
from zero_mpi.data import ByteTokenizer, tokenizer_from_json
from zero_mpi.data.tokenizers.byte import PARSE, PLAIN, READINGS
from zero_mpi.errors import UsageError
from zero_mpi.train import resume
from zero_mpi.train.description import describe

CHAT = "<|begin|>hello <tool>\n<|im_start|>user <|im_start|>a<|endoftext|>"  # tokens of bpe_files
BYTES_CHAT = "<|bos|>hello <|endoftext|>é<|endoftext|><|pad|>"


@pytest.fixture(scope="module")
def bpe_json(tmp_path_factory) -> Path:
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed", exc_type=ImportError)
    config = {"eos_token": "<|endoftext|>"}
    folder = tmp_path_factory.mktemp("bpe")
    return bpe_files.write_json(folder, bpe_files.trained_json("qwen2"), tokenizer_config=config)


@pytest.fixture(params=["bytes", "bpe"])
def case(request):
    """Return a tokenizer, a text with control-token strings, and their counts."""
    if request.param == "bytes":
        return ByteTokenizer(), BYTES_CHAT, {"<|endoftext|>": 2, "<|bos|>": 1, "<|pad|>": 1}
    tokenizer = tokenizer_from_json(request.getfixturevalue("bpe_json"))
    return tokenizer, CHAT, {"<|im_start|>": 2, "<|begin|>": 1, "<|endoftext|>": 1}


def corpus(tmp_path, tokenizer, text, **settings):
    path = tmp_path / "chat"
    path.write_text(text, newline="")
    options = {"val_fraction": 0.0, "context": 4, "seed": 0, "vocab_size": tokenizer.vocab_size}
    return load_corpus([str(path)], tokenizer=tokenizer, **options, **settings)


def control_ids(tokenizer):
    types = tokenizer.metadata()["tokenizer.ggml.token_type"]
    return {place for place, kind in enumerate(types) if kind == 3}


@pytest.mark.parametrize("asked", [{}, {"control_tokens": None}, {"control_tokens": PLAIN}])
def test_plain_and_nothing_said_read_letters(asked, case, tmp_path):
    tokenizer, text, _ = case
    ids = corpus(tmp_path, tokenizer, text, **asked).train.ids
    assert ids.tolist() == [*tokenizer.encode(text), tokenizer.eos]
    assert not control_ids(tokenizer) & set(ids[:-1].tolist())
    if isinstance(tokenizer, ByteTokenizer):
        assert ids.tolist() == [*text.encode(), 257]


def test_parse_reads_each_spelling_as_one_id_as_a_prompt_does(case, tmp_path):
    tokenizer, text, counts = case
    ids = corpus(tmp_path, tokenizer, text, control_tokens=PARSE).train.ids
    assert ids.tolist() == [*tokenizer.encode_prompt(text), tokenizer.eos]
    tokens = tokenizer.metadata()["tokenizer.ggml.tokens"]
    controls = [tokens[i] for i in ids[:-1] if i in control_ids(tokenizer)]
    assert {token: controls.count(token) for token in controls} == counts
    assert ids.dtype == corpus(tmp_path, tokenizer, text, control_tokens=PLAIN).train.ids.dtype


def test_token_files_spell_nothing(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(90, dtype=np.uint16))
    options = {"val_fraction": 0.0, "context": 4, "seed": 0, "vocab_size": 260, "tokenizer": None}
    pair = [load_corpus([str(tmp_path / "ids.npy")], control_tokens=mode, **options) for mode in READINGS]
    assert pair[0].sha256 == pair[1].sha256
    model = plan_flags.find_model(Config())
    settings = describe(Config(control_tokens=PARSE), model, None, None).settings
    assert settings["control_tokens"] == PLAIN


def test_a_checkpoint_that_says_nothing_of_it_read_letters(monkeypatch, tmp_path):
    """Checkpoints from before the flag existed resume with --control-tokens plain only."""
    config = Config()
    description = describe(config, plan_flags.find_model(config), ByteTokenizer(), None)
    before = {key: value for key, value in description.settings.items() if key != "control_tokens"}
    monkeypatch.setattr(resume, "read_json", lambda state, key: before)
    point = resume.ResumePoint(tmp_path, CheckpointFiles(None, None))
    resume.check_resume(point, description)
    parsed = dataclasses.replace(description, settings=description.settings | {"control_tokens": PARSE})
    with pytest.raises(UsageError, match="--control-tokens was plain, now parse"):
        resume.check_resume(point, parsed)


SMALL = "--layers 1 --dim 16 --heads 2 --ffn 16 --context 8 --batch-size 3 --micro-batch 1 --warmup 1"
FLAGS = [*SMALL.split(), "--sample", "0", "--data", "chat", "--val-fraction", "0", "--steps", "2"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "chat").write_text(BYTES_CHAT * 30)
    return tmp_path


def warnings(printed):
    return [line for line in printed.splitlines() if "--control-tokens" in line]


@needs_mpiexec
def test_a_run_warns_in_one_line_if_nobody_said_it(folder):
    (line,) = warnings(train(3, folder / "unsaid", *FLAGS))
    assert "WARNING" in line.upper()
    assert "120 (<|endoftext|> 60, <|bos|> 30, <|pad|> 30)" in line
    assert not warnings(train(1, folder / "plain", *FLAGS, "--control-tokens", PLAIN))
    assert_same_run(folder / "unsaid", folder / "plain")
    (folder / "chat").write_text("nothing of the kind " * 30)
    assert not warnings(train(3, folder / "none", *FLAGS))


@needs_mpiexec
def test_three_ranks_parse_as_one_does_and_a_resume_must_too(folder):
    flags = [*FLAGS, "--control-tokens", PARSE]
    for ranks in (1, 3):
        assert not warnings(train(ranks, folder / str(ranks), *flags))
    assert_same_run(folder / "1", folder / "3")
    assert tomllib.loads((folder / "1" / "config.toml").read_text())["control_tokens"] == PARSE
    for other in ([], ["--control-tokens", PLAIN]):
        line = refused(3, folder / "3", *FLAGS, *other, "--steps", "3")
        assert "is a checkpoint of another run: --control-tokens was parse, now plain" in line
    train(3, folder / "3", *flags, "--steps", "3")
    assert len(fields(folder / "3")) == 3
