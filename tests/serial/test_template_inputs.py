"""Flags set variables of chat templates, choose a template, and set the date that it sees."""

import json
import tomllib
from datetime import date

import pytest
from chat_templates import CHATML, LLAMA3, chat_keys, chat_tokenizer
from jobs import run_job
from test_chat_data import FLAGS, corpus, write_lines
from test_command_bits import needs_mpiexec, train
from test_conversations import answers_in, said, transformers_tokenizer, written
from test_samples import printed, write_model

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.state import read_json
from zero_mpi.config.command_line import parse
from zero_mpi.config.inputs import template_inputs, tokenizer_in
from zero_mpi.config.settings import Config
from zero_mpi.data import BPETokenizer, tokenizer_config, tokenizer_json
from zero_mpi.data.conversations.chat_template import TemplateInputs
from zero_mpi.data.conversations.tokenized import ConversationReader
from zero_mpi.errors import UsageError

SHOWING = "{{ v | default('-') | tojson }}{{ enable_thinking | default('-') }}" + CHATML
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


def inputs(**settings):
    return template_inputs(Config(**settings), chat_tokenizer(LLAMA3))


VARIABLES = {
    'v={"a": [1, null]}': {"v": {"a": [1, None]}},
    "v=true": {"v": True},
    "v=a=b": {"v": "a=b"},
    "v=": {"v": ""},
    "v=1e999": {"v": "1e999"},
    "date_string=1 Jan": {"date_string": "1 Jan"},
}


@pytest.mark.parametrize("text", VARIABLES)
def test_a_variable_is_json_or_text(text):
    assert inputs(template_var=[text]).variables == VARIABLES[text]
    assert parse(["--template-var", text, "--template-var", "b=1"]).template_var == [text, "b=1"]


BAD = {
    "template_var": ["v", "=1", "1v=2", "messages=[]", "tools=1", "a b=1"],
    "template_date": ["today", "2024-02-30", ""],
}
BAD_FLAGS = [(name, value) for name, values in BAD.items() for value in values]


@pytest.mark.parametrize(("name", "value"), BAD_FLAGS)
def test_what_is_no_variable_and_no_day_is_refused(name, value):
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(UsageError, match=f"^{flag} ") as caught:
        inputs(**{name: [value] if name == "template_var" else value})
    assert "\n" not in str(caught.value)


def test_a_template_is_given_what_flags_say_as_in_transformers(tmp_path):
    line = written(tmp_path, {"messages": said("a", "b")}, {"messages": said("a", "b", system="own")})
    settings = inputs(template_var=["v=[1]"], enable_thinking="false", system="s")
    chats = list(ConversationReader(chat_tokenizer(SHOWING), inputs=settings).read([("c", line)]))
    for chat, system in zip(chats, ("s", "own"), strict=True):
        expected = transformers_tokenizer().apply_chat_template(
            said("a", "b", system=system), chat_template=SHOWING, v=[1], enable_thinking=False, tokenize=False
        )
        assert chat.text == expected
        assert answers_in(chat) == ["b<|im_end|>"]


def test_a_message_of_the_system_moves_what_counts(tmp_path):
    row = {"prompt": said("a", "no", "b"), "completion": said("", "yes")[1:]}
    silent = {"role": "assistant", "content": "no", "weight": 0}
    line = written(tmp_path, row, {"messages": [*said("a", "yes", "b"), silent]})
    reads = ConversationReader(chat_tokenizer(CHATML), inputs=TemplateInputs(system="s"))
    for chat in reads.read([("c", line)]):
        assert chat.text.startswith("<|im_start|>system\ns<|im_end|>")
        assert answers_in(chat) == ["yes<|im_end|>"]


def test_variables_are_of_the_digest_of_data_and_of_the_entry_of_encoded_text(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "chat.jsonl", *[{"messages": said("a", "b")}] * 4)
    keys = list[dict[str, object]]()
    from zero_mpi.data import document_reader

    read_documents = document_reader.read_documents
    monkeypatch.setattr(
        document_reader,
        "read_documents",
        lambda files, settings, *rest: keys.append(settings) or read_documents(files, settings, *rest),
    )
    cases = [{}, {"variables": {"v": 1}}, {"system": "s"}, {"day": "2025-01-01"}]
    digests = [corpus(path, SHOWING, inputs=TemplateInputs(**each)).sha256 for each in cases]
    assert len(set(digests)) == 3, "no template here uses the date"
    assert len({repr(sorted(each.items())) for each in keys}) == 4


# ----------------------------------------------------------------------------------- choice of a template


def named_folder(folder, others=None, **templates):
    """Write a tokenizer folder with templates in files; `others` go to its tokenizer_config.json."""
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(chat_keys())))
    config = tokenizer_config(chat_keys()) | ({"chat_template": others} if others else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in templates.items():
        place = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        (folder / place).write_text(text)
    return folder / "tokenizer.json"


LISTED = [{"name": name, "template": name} for name in ("default", "tool_use", "rag")]
FOLDERS = {
    "files": (None, {"default": "D", "tool_use": "T", "rag": "R"}),
    "a list": (LISTED, {}),
    "files before a list": (LISTED, {"default": "D"}),
    "one of a list": (LISTED[:1], {}),
    "a text": ("X", {}),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_rows_with_tools_take_the_template_that_transformers_takes(case, tmp_path):
    import transformers

    others, files = FOLDERS[case]
    path = named_folder(tmp_path / "m", others, **files)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(path.parent), tokenizer_in(str(path))
    line = written(tmp_path, {"messages": said("a")}, {"messages": said("a"), "tools": TOOLS})
    chats = ConversationReader(ours, "all").read([("c", line)])
    rendered = [theirs.apply_chat_template(said("a"), tools=tools, tokenize=False) for tools in (None, TOOLS)]
    assert [chat.text for chat in chats] == rendered
    write_model(tmp_path / "m.gguf", ours.metadata())
    twin = BPETokenizer(GGUFFile.open(tmp_path / "m.gguf").metadata)
    assert [chat.text for chat in ConversationReader(twin, "all").read([("c", line)])] == rendered
    (tmp_path / "out").mkdir()
    for name, content in (("tokenizer.json", tokenizer_json), ("tokenizer_config.json", tokenizer_config)):
        (tmp_path / "out" / name).write_text(json.dumps(content(twin.metadata())))
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [
        exported.apply_chat_template(said("a"), tools=t, tokenize=False) for t in (None, TOOLS)
    ] == rendered


# ----------------------------------------------------------------------------------------------- commands


@pytest.fixture
def folder(tmp_path):
    write_lines(tmp_path / "chat.jsonl", *[{"messages": said("Two?", "Four.")}] * 12)
    (tmp_path / "t.jinja").write_text(LLAMA3.replace("{{- bos_token }}", "{{- v | default('-') }}"))
    return tmp_path


def test_samples_and_chat_take_the_flags(folder, capfdbinary):
    write_model(folder / "m.gguf", chat_keys(LLAMA3))
    flags = [folder / "m.gguf", "--data", folder / "chat.jsonl", "--count", "1"]
    flags += ["--chat-template", folder / "t.jinja"]
    day = ["--template-date", "2025-02-03"]
    output = printed(capfdbinary, *flags, "--template-var", "v=[1]", "--system", "Be so", *day)
    assert "[1]" in output
    assert "Be so" in output
    assert "Today: 03 Feb 2025" in output
    today = {date.today()}
    output = printed(capfdbinary, *flags)
    assert any(f"{day:Today: %d %b %Y}" in output for day in today | {date.today()})


@needs_mpiexec
def test_a_run_keeps_the_day_of_its_beginning(folder, monkeypatch):
    """A resume without --template-date trains on the same text; another date or variable is refused."""
    flags = [*FLAGS, "--save-every", "1", "--template-var", "v=1"]
    train(2, folder / "out", *flags, "--template-date", "2025-02-03")
    settings = tomllib.loads((folder / "out" / "config.toml").read_text())
    assert (settings["template_date"], settings["template_var"]) == ("2025-02-03", ["v=1"])
    state = GGUFFile.open(folder / "out" / "latest" / "optimizer.gguf")
    assert read_json(state, "training.settings")["template_date"] == "2025-02-03"
    longer = ["3" if flag == "2" and flags[at - 1] == "--steps" else flag for at, flag in enumerate(flags)]
    train(1, folder / "out", *longer)
    for other, named in (
        (["--template-date", "2025-02-04"], "2025-02-04"),
        (["--template-var", "v=2"], "--data"),
    ):
        words = ["-m", "zero_mpi.train", "--out", str(folder / "out"), *longer, *other]
        status, _, errors = run_job(1, words, cwd=folder, timeout=100)
        assert (status, errors.count("\n")) == (2, 1), errors
        assert named in errors
