"""Tests of conversations as `--data`: corpus, flags, training, evaluation."""

import json
import math
import tomllib
from dataclasses import replace

import pytest
from chat_templates import CHATML, ZEPHYR, chat_tokenizer
from corpora import load_corpus
from jobs import run_job
from test_command_bits import assert_same_run, needs_mpiexec, train
from test_evaluate import surprises
from test_generate import LLAMA, write_model

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.config.inputs import check_kind_of_data
from zero_mpi.config.settings import Config
from zero_mpi.data import ByteTokenizer
from zero_mpi.data.conversations.tokenized import ConversationReader
from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import TEMPLATE
from zero_mpi.train.text_model import TextModel

TALK = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "They are four."}]
SAME = {"prompt": "Two and two?", "completion": "They are four."}
ASKED = {"messages": TALK[:1]}


def write_lines(path, *values):
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return str(path)


def corpus(path, template=CHATML, **options):
    settings = {"val_fraction": 0.0, "context": 8, "seed": 0, "vocab_size": 400} | options
    return load_corpus([path], tokenizer=chat_tokenizer(template), **settings)


def test_each_conversation_is_a_document_and_what_has_no_answer_is_left_out(tmp_path):
    path = write_lines(tmp_path / "chat.jsonl", {"messages": TALK}, ASKED, SAME, ASKED)
    full = corpus(path)
    assert full.documents == 2
    assert [note[-3:] for note in full.notes[2:]] == [": 2"]
    assert corpus(path, loss_on="all").documents == 4
    split = corpus(path, val_fraction=0.5)
    assert (split.documents, split.val_documents) == (2, 1), "full conversations are held out"
    single = corpus(write_lines(tmp_path / "chat.jsonl", SAME), val_fraction=0.5)
    assert (single.documents, single.val_documents, single.val.size) == (1, 0, 0), "its end must be learned"


def test_the_digest_is_of_the_text_and_of_what_counts(tmp_path):
    """The digest is equal for all forms of a row, and depends on template, counted tokens and texts."""
    path = tmp_path / "chat.jsonl"
    first = corpus(write_lines(path, {"messages": TALK})).sha256
    assert corpus(write_lines(path, SAME)).sha256 == first
    others = [
        corpus(str(path), ZEPHYR).sha256,
        corpus(str(path), loss_on="all").sha256,
        corpus(write_lines(path, {"messages": TALK[:1]} | {"messages": [*TALK, *TALK]})).sha256,
    ]
    assert len({first, *others}) == 4


REFUSED = {
    "a template for text": ({"data": ["text"], "chat_template": "t"}, "--chat-template t: --data "),
    "a template for the library": ({"chat_template": "t"}, "--chat-template t: --data "),
    "a loss for text": ({"data": ["text"], "loss_on": "all"}, "--loss-on all: --data "),
    "tokens": ({"data": ["chat.jsonl"], "control_tokens": "plain"}, "--control-tokens plain: --data "),
    "both": ({"data": ["chat.jsonl", "text"]}, "--data takes conversations or other data, not both"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_flags_that_do_not_go_with_the_data_are_refused(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "chat.jsonl", SAME)
    (tmp_path / "text").write_text("some text")
    settings, expected = REFUSED[case]
    with pytest.raises(UsageError, match=f"^{expected}"):
        check_kind_of_data(Config(**settings))
    check_kind_of_data(Config(data=["chat.jsonl"], chat_template="t", loss_on="all"))
    check_kind_of_data(Config(data=["text"], control_tokens="plain"))


# ------------------------------------------------------------------------------------------------- a run


FLAGS = ["--data", "chat.jsonl", "--chat-template", "t.jinja", "--layers", "1", "--dim", "8", "--heads", "2"]
FLAGS += ["--context", "192", "--batch-size", "2", "--micro-batch", "1", "--steps", "2", "--warmup", "1"]
FLAGS += ["--sample", "0", "--eval-windows", "2", "--val-fraction", "0.3"]


@pytest.fixture
def folder(tmp_path):
    write_lines(tmp_path / "chat.jsonl", *[{"messages": TALK}, SAME, ASKED] * 6)
    (tmp_path / "t.jinja").write_text(CHATML)
    return tmp_path


def refusal(folder, *command):
    status, _, errors = run_job(1, ["-m", *command], cwd=folder, timeout=50)
    assert (status, errors.count("\n")) == (2, 1), errors
    return errors


@needs_mpiexec
def test_a_run_carries_its_template_and_a_resume_keeps_to_what_counts(folder):
    """The checkpoint keeps the chat template, and evaluation uses it."""
    printed = train(2, folder / "out", *FLAGS)
    assert "conversations without an answer: 6" in printed
    model = folder / "out" / "latest" / "model.gguf"
    assert GGUFFile.open(model).metadata[TEMPLATE] == CHATML
    settings = tomllib.loads((folder / "out" / "config.toml").read_text())
    assert settings["chat_template"] == str(folder / "t.jinja")
    start = ["zero_mpi.train", "--out", "out", *FLAGS, "--steps", "3"]
    line = refusal(folder, *start, "--loss-on", "all")
    assert "another run" in line
    assert "--chat-template" in line
    (folder / "t.jinja").write_text(ZEPHYR)
    assert "--chat-template" in refusal(folder, *start)
    (folder / "t.jinja").write_text(CHATML)
    train(1, folder / "out", *FLAGS, "--steps", "3", "--loss-on", "answers")
    command = ["-m", "zero_mpi", "evaluate", str(model), "--data", "chat.jsonl", "--json", "figures.json"]
    status, _, errors = run_job(1, command, cwd=folder, timeout=50)
    assert (status, errors.count("\n")) == (0, 2), errors  # the second line: no end-of-turn token
    assert "conversations without an answer: 6" in errors


@needs_mpiexec
@pytest.mark.parametrize(("ranks", "context"), [(1, 200), (2, 110)])
def test_evaluation_counts_answers_alone(ranks, context, folder):
    """Each conversation is one window; bits are divided by the bytes of the answers."""
    model = replace(LLAMA, context_length=200, value_length=4)
    write_model(folder / "m.gguf", model, ByteTokenizer(CHATML).metadata())
    reader = ConversationReader(ByteTokenizer(CHATML))
    nats, nbytes = 0.0, 0
    for conversation in reader.read([("x", folder / "chat.jsonl")]):
        losses = surprises(TextModel(folder / "m.gguf"), conversation.ids.tolist())[:context]
        mask = conversation.counted[1 : context + 1]
        nats, nbytes = nats + losses[mask].sum(), nbytes + int(mask.sum())  # a token is a byte
    command = ["m.gguf", "--data", "chat.jsonl", "--context", str(context), "--json", "f.json"]
    status, printed, errors = run_job(ranks, ["-m", "zero_mpi", "evaluate", *command], cwd=folder, timeout=50)
    assert status == 0, errors
    assert f"12 conversations of at most {context} tokens, " in printed
    assert (f"--context {context} " in errors) == (context == 110)
    figures = json.loads((folder / "f.json").read_text())
    (row,) = figures["models"]
    assert figures["text"]["tokens"] == figures["text"]["bytes"] == nbytes > 0
    assert row["text"]["loss"] == pytest.approx(nats / nbytes, rel=1e-5)
    assert row["text"]["bits_per_byte"] == pytest.approx(nats / math.log(2) / nbytes, rel=1e-5)
    line = refusal(folder, "zero_mpi", "evaluate", *command, "--stride", "9")
    assert "--stride 9: " in line
    assert "no answer" in refusal(folder, "zero_mpi", "evaluate", *command, "--context", "9")


@needs_mpiexec
def test_bad_rows_are_left_out_alike_at_each_number_of_ranks(folder):
    """`--skip-bad` skips bad rows; without it the error names file, line and flag."""
    raw = (folder / "chat.jsonl").read_text()
    model = replace(LLAMA, context_length=200, value_length=4)
    write_model(folder / "m.gguf", model, ByteTokenizer(CHATML).metadata())
    (folder / "chat.jsonl").write_text("{broken\n" + raw + '{"messages": 1}\n')
    for command in ("train", "evaluate", "samples"):
        names = ["m.gguf"] if command != "train" else []
        options = FLAGS if command == "train" else FLAGS[:4]
        line = refusal(folder, f"zero_mpi.{command}", *names, *options)
        assert "chat.jsonl, line 1: " in line
        assert "--skip-bad" in line
        status, printed, errors = run_job(
            1, ["-m", f"zero_mpi.{command}", *names, *options, "--skip-bad"], cwd=folder, timeout=50
        )
        assert status == 0, errors
        assert " 2 rows" in printed + errors
    printed = train(3, folder / "3", *FLAGS, "--skip-bad")
    assert printed.count(" 2 rows") == 1
    assert printed.count("conversations: 18, ") == printed.count("first conversation: chat.jsonl:2: ") == 1
    train(1, folder / "1", *FLAGS, "--skip-bad")
    assert_same_run(folder / "1", folder / "3")
    (folder / "chat.jsonl").write_text('{"messages": 1}\n{broken\n')
    assert " 2 rows" in refusal(folder, "zero_mpi.train", *FLAGS, "--skip-bad")
    assert " 2 rows" in refusal(folder, "zero_mpi", "samples", "m.gguf", *FLAGS[:4], "--skip-bad")
    (folder / "chat.jsonl").write_text("text")
    line = refusal(folder, "zero_mpi.train", *FLAGS[:2], *FLAGS[4:], "--skip-bad")
    assert "--skip-bad: " in line
