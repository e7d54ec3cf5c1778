"""Tests of `generate` with prompts from files and standard input, and of --chat."""

import io
import json

import pytest
from oracles import open_server
from test_command_bits import needs_mpiexec, train
from test_generate import command, write_story

from zero_mpi.commands.generate.command import LENGTH, STOP, Chat, Reply
from zero_mpi.commands.generate.command import command as generate
from zero_mpi.data import ByteTokenizer
from zero_mpi.data.conversations.chat_template import ChatTemplate
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)
SAID = "=hi"  # the answer to any prompt that ends with "="
END = ByteTokenizer.eos


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    keys = ByteTokenizer().metadata() | {"tokenizer.chat_template": TEMPLATE}
    return write_story(tmp_path_factory.mktemp("chat") / "model.gguf", keys, [*SAID.encode(), END])


def test_a_prompt_is_answered_by_the_template_up_to_the_end(model):
    result = command(str(model), "--chat", "--prompt", "yo", "--temperature", "0", "--json")
    assert json.loads(result.stdout) == {"prompt": "yo", "text": "hi", "tokens": 2, "finish_reason": STOP}
    result = command(str(model), "--chat", "--prompt", "yo", "--temperature", "0", "--tokens", "1", "--json")
    assert json.loads(result.stdout) == {"prompt": "yo", "text": "h", "tokens": 1, "finish_reason": LENGTH}


def test_the_lines_of_a_file_are_prompts_of_their_own(model, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"x=\n\ny=\r\n")
    flags = [str(model), "--prompts", str(file), "--temperature", "0"]
    assert command(*flags).stdout == b"x=hi\n\ny=hi\n"
    assert command(*flags, "--chat").stdout == b"hi\n\nhi\n"
    lines = command(*flags, "--json").stdout.splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["x=", "y="]


def test_lines_of_standard_input_are_turns_of_one_conversation(model):
    flags = [str(model), "--temperature", "0"]
    assert command(*flags, "--chat", typed=b"one\ntwo\n").stdout == b"hi\n\nhi\n"
    assert command(*flags, "--prompts", "-", typed=b"one=\n").stdout == b"one=hi\n"


def test_a_conversation_goes_on_with_what_was_answered():
    talk = Chat(ChatTemplate(TEMPLATE, {}), ByteTokenizer(), "short")
    assert bytes(talk.prompt_ids("one").tolist()) == b"s=short;u=one;a="
    talk.answered(Reply(b"hi", 2, STOP))
    assert bytes(talk.prompt_ids("two").tolist()) == b"s=short;u=one;a=hi;u=two;a="


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "x", "--prompts", "y"], "--prompt and --prompts: "),
        (["--system", "x"], "--chat"),
        (["--prompts", "none.txt"], "--prompts none.txt: no such file"),
        (["--chat", "--chat-template", "none.jinja"], "--chat-template none.jinja: no such file"),
        (["--chat", "--prompts", "-"], "--prompts standard input: expected a prompt in each line"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(model, flags, message, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(UsageError, match=f"^[^\n]*{message}[^\n]*$"):
        generate(World(0, 1), [str(model), *flags])


def test_a_model_without_a_template_is_refused_with_the_remedy(tmp_path):
    path = write_story(tmp_path / "m.gguf", ByteTokenizer().metadata(), list(b"ab"))
    with pytest.raises(UsageError, match="--chat-template FILE"):
        generate(World(0, 1), [str(path), "--chat", "--prompt", "x"])
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}a")
    flags = ["--chat-template", str(template), "--prompt", "x", "--tokens", "1", "--temperature", "0"]
    assert command(str(path), "--chat", *flags).stdout == b"b\n"


def test_a_template_that_refuses_is_told_in_a_line_with_status_2(model, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ raise_exception('no <system>') }}")
    result = command(str(model), "--chat", "--chat-template", str(tmp_path / "t.jinja"), "--prompt", "x")
    assert (result.returncode, result.stdout, result.stderr.count(b"\n")) == (2, b"", 1)
    assert b"the chat template: no <system>" in result.stderr


TURNS = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)
ANSWERS = {"sky?": "blue", "grass?": "green", "snow?": "white"}


@needs_mpiexec
def test_a_model_that_learned_from_conversations_stops_by_itself_in_llama_cpp(tmp_path):
    """The token that ends a turn counts in the loss, so the model learns to stop."""
    lines = [json.dumps({"prompt": prompt, "completion": text}) for prompt, text in ANSWERS.items()]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    (tmp_path / "turns.jinja").write_text(TURNS)
    flags = ["--data", str(tmp_path / "chat.jsonl"), "--chat-template", str(tmp_path / "turns.jinja")]
    flags += ["--layers", "2", "--dim", "32", "--heads", "2", "--context", "32", "--val-fraction", "0"]
    flags += ["--batch-size", "2", "--micro-batch", "1", "--steps", "80", "--lr", "1e-2", "--sample", "0"]
    train(2, tmp_path / "run", *flags)
    path = tmp_path / "run" / "latest" / "model.gguf"
    server, template = open_server(path), ChatTemplate(TURNS, {"eos_token": "<|endoftext|>"})
    for prompt, text in ANSWERS.items():
        ids = Chat(template, ByteTokenizer()).prompt_ids(prompt).tolist()
        (choice,) = server.handle_completions({"prompt": ids, "n_predict": 12, "temperature": 0.0})["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        result = command(str(path), "--chat", "--prompt", prompt, "--temperature", "0", "--json")
        expected = {"prompt": prompt, "text": text, "tokens": len(text), "finish_reason": STOP}
        assert json.loads(result.stdout) == expected
