"""`zero-mpi samples` prints the conversations of a small file as text and as JSON."""

import json

import pytest
from chat_templates import CHATML, ZEPHYR, chat_keys
from gguf_files import write_tensors

from zero_mpi.commands.samples import command
from zero_mpi.data import ByteTokenizer, tokenizer_config, tokenizer_json
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World

SAID = {"role": "assistant", "content": "One.\n\nTwo é"}
LINES = [
    {"messages": [{"role": "user", "content": "hi\x1b[31m"}, SAID]},
    {"instruction": "Sum", "input": "1 2", "output": "3"},
    {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "x"}]},
]
SHOWN = """\
chat.jsonl:1: 56 tokens, 11 counted, with bos, end of turn in 1 of 1
<|im_start|>system
You help.<|im_end|>
<|im_start|>user
hi\\x1b[31m<|im_end|>
<|im_start|>assistant
«One.

Two é<|im_end|>»


chat.jsonl:3: 47 tokens, 2 counted, with bos, end of turn in 1 of 1
<|im_start|>system
You help.<|im_end|>
<|im_start|>user
Sum

1 2<|im_end|>
<|im_start|>assistant
«3<|im_end|>»


3 conversations: 124 tokens, 13 of them counted (10.5 %); the longest has 56
skipped conversations without an answer: 1
"""


@pytest.fixture
def chat(tmp_path):
    write_model(tmp_path / "m.gguf", chat_keys(CHATML))
    first, *rest = map(json.dumps, LINES)
    (tmp_path / "chat.jsonl").write_text("\n".join([first, "", *rest, ""]))
    return tmp_path


def write_model(path, keys):
    write_tensors(path, "llama", keys, {})


def printed(capfdbinary, *arguments):
    assert command(World(0, 1), [str(argument) for argument in arguments]) == 0
    return capfdbinary.readouterr().out.decode()


def test_samples_as_text(chat, capfdbinary):
    flags = (chat / "m.gguf", "--data", chat / "chat.jsonl", "--count", "2")
    assert printed(capfdbinary, *flags) == SHOWN
    totals = "".join(SHOWN.splitlines(keepends=True)[-2:])
    assert printed(capfdbinary, *flags, "--count", "0") == totals
    (chat / "more.jsonl").write_text(json.dumps(LINES[1]))
    assert printed(capfdbinary, *flags, "--count", "0", "--data", chat / "more.jsonl").startswith("4 conv")


def test_samples_as_json(chat, capfdbinary):
    dump = json.loads(printed(capfdbinary, chat / "m.gguf", "--data", chat / "chat.jsonl", "--json"))
    assert [sample["name"] for sample in dump["samples"]] == ["chat.jsonl:1", "chat.jsonl:3", "chat.jsonl:4"]
    assert dump["samples"][1]["parts"] == [
        {
            "text": "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nSum\n\n1 2<|im_end|>\n"
            "<|im_start|>assistant\n",
            "counted": False,
        },
        {"text": "3<|im_end|>", "counted": True},
        {"text": "\n", "counted": False},
    ]
    totals = {"conversations": 3, "tokens": 124, "counted": 13, "longest": 56, "left_out": 1}
    totals |= {"bos": 3, "turns": 2, "endless": 0, "silent": 0, "tools": 0, "unread": 0, "unwritten": 0}
    assert totals == {name: dump[name] for name in totals}
    facts = {"tokens": 47, "counted": 2, "bos": 1, "turns": 1, "endless": 0, "tools": 0}
    assert facts == {name: dump["samples"][1][name] for name in facts}


def test_all_counts_and_another_template(chat, capfdbinary):
    (chat / "z.jinja").write_text(ZEPHYR)
    flags = ("--data", chat / "chat.jsonl", "--count", "2", "--chat-template", chat / "z.jinja")
    text = printed(capfdbinary, chat / "m.gguf", *flags, "--loss-on", "all")
    assert text.startswith(
        "chat.jsonl:1: 26 tokens, 26 counted, with bos, end of turn in 1 of 1\n"
        "«<|user|>\nhi\\x1b[31m</s>\n<|assistant|>\nOne."
    )
    assert "(100 %)" in text


def test_tokenizers_from_wherever_they_are(chat, capfdbinary):
    """The tokenizer comes from a Hugging Face folder or from a GGUF with the byte tokenizer."""
    folder = chat / "hf"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(chat_keys())))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(chat_keys(CHATML))))
    flags = ("--data", chat / "chat.jsonl", "--count", "2")
    assert printed(capfdbinary, folder / "tokenizer.json", *flags) == SHOWN
    write_model(chat / "bytes.gguf", ByteTokenizer(CHATML).metadata())
    assert "«3<|im_end|>»" in printed(capfdbinary, chat / "bytes.gguf", *flags)


REFUSED = {
    "no conversations": (["m.gguf", "--data", "m.gguf"], "--data m.gguf: expected conversations as .jsonl"),
    "no template": (["none.gguf", "--data", "chat.jsonl"], "--chat-template FILE"),
    "a template that refuses": (
        ["m.gguf", "--data", "chat.jsonl", "--chat-template", "no"], "--data chat.jsonl, line 1: the .*: no!",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shown_is_refused_in_a_line(case, chat, monkeypatch):
    monkeypatch.chdir(chat)
    write_model(chat / "none.gguf", chat_keys())
    (chat / "no").write_text("{{ raise_exception('no!') }}")
    arguments, expected = REFUSED[case]
    with pytest.raises(UsageError, match=expected) as caught:
        command(World(0, 1), arguments)
    assert "\n" not in str(caught.value)
