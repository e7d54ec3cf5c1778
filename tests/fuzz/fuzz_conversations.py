"""Faulty files of conversations and questions, and chat templates that fail or do not end."""

import gzip
import io
import json
from pathlib import Path
from random import Random
from typing import Any

import fuzz_gguf
import numpy as np
import wild
from chat_templates import CALLING, TEMPLATES, chat_keys
from fuzz_texts import ODD, lines, zstd
from gguf_files import write_tensors

from zero_mpi.data import ByteTokenizer
from zero_mpi.models import GPT2

TURNS = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
FORMS: list[dict[str, Any]] = [
    {"messages": TURNS},
    {"prompt": "Two and two?", "completion": "Four."},
    {"prompt": TURNS[:1], "completion": TURNS[1:]},
    {"instruction": "Add", "input": "2 2", "output": "4", "system": "Be brief."},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hi!"}], "system": ""},
]
PAIRS: list[dict[str, Any]] = [
    {"prompt": "Two and two?", "chosen": "Four.", "rejected": "Five."},
    {"chosen": "Two and two? Four.", "rejected": "Two and two? Five."},
    {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]},
    {"prompt": "", "chosen": TURNS, "rejected": TURNS[:1] * 2 + TURNS[1:], "tools": []},
    {"prompt": "Two and two?", "completion": "Five.", "label": False},
]
CALL = {"name": "f", "arguments": '{"a": [1, "é"]}'}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
TURNS_WITH_CALLS: list[dict[str, Any]] = [
    {"role": "assistant", "tool_calls": [{"type": "function", "id": "abcdefghi", "function": CALL}]},
    {"role": "Assistant", "content": None, "function_call": CALL},
    {"role": "function_call", "content": json.dumps([CALL])},
]
CALLS = [
    {"messages": [TURNS[0], turn, {"role": "Tool", "content": "0"}], "tools": TOOLS}
    for turn in TURNS_WITH_CALLS
]
TEXTS = ["{", '{"a": ', "[" * 5000, '"\\ud800"', "1e999", "null", "7", "\ud800", '{"a":1,"a":2}', "9" * 5000]
PROGRAMS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% for a in range(99999) %}{{ messages[0].content * 9999 }}{% endfor %}",
    "{{ 'x' | center(10 ** 12) }}", "{{ 9 ** 9 ** 9 }}", "{{ ('x' * 9999999) | join('y' * 9999999) }}",
    "{{ [['a'] * 9999] * 9999 | tojson }}", "{{ range(99999) | map('tojson') | batch(3) | list }}",
    "{{ raise_exception('\x1b[31m' * 9999) }}", "{{ '\x1b]0;title\x07' }}", "{{ messages[0]['\\ud800'] }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.__init__.__globals__ }}", "{% if %}",
    "{% include 'm.gguf' %}", "{{ self._TemplateReference__context }}", "{{" + "(" * 9999, "{{ 1 // 0 }}",
    "{% generation %}{{ messages }}{% endgeneration %}", "{% generation %}", "", "x",
]  # fmt: skip


def samples(
    folder: Path, raw: bytes, template: str = TEMPLATES["chatml"], *flags: str, name: str = "chat.jsonl"
) -> list[str]:
    """Write a file of these bytes and a template; return the command that reads both."""
    write_tensors(folder / "m.gguf", "llama", chat_keys(), {})
    (folder / name).write_bytes(raw)
    (folder / "t.jinja").write_text(template, "utf-8", "surrogatepass")
    command = ["-m", "zero_mpi", "samples", "m.gguf", "--data", name, "--chat-template", "t.jinja"]
    return [*command, *flags]


def sound(random: Random, folder: Path) -> list[str]:
    name = random.choice(["chatml", "phi 3", "zephyr", "qwen 3", "marked"])
    return samples(folder, lines(*random.choices(FORMS, k=5)), TEMPLATES[name])


def rows(random: Random, folder: Path) -> list[str]:
    """Replace or delete a value at any depth of conversations, pairs or calls."""
    kind = random.choice([FORMS, PAIRS, CALLS])
    content = json.loads(json.dumps([kind[0], random.choice(kind)]))
    place, key = random.choice(wild.places(content))
    if isinstance(place, dict):
        key = random.choice([key, key, key, "system", "label", "rejected"])
    place[key] = random.choice([*ODD, *TEXTS, TURNS, TURNS[:1], CALL, [CALL], {"function": CALL}])
    if random.random() < 0.2:
        del place[key]
    flags = random.choice([[], ["--skip-bad"], ["--json"], ["--loss-on", "all"]])
    calling = [template for template, *_ in CALLING.values()]
    return samples(folder, lines(*content), random.choice([*TEMPLATES.values(), *calling]), *flags)


def table(random: Random, rows: list[dict[str, Any]], kind: str) -> bytes:
    """Return rows as Parquet or Arrow, sometimes with a column replaced by texts."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        return b"PAR1"
    keys = dict.fromkeys(key for row in rows for key in row)
    columns: dict[str, Any] = {key: [row.get(key) for row in rows] for key in keys}
    if random.random() < 0.3:
        columns[random.choice([*columns])] = [random.choice(["", "x", "[]"]) for _ in rows]
    sink, rows_at_once = io.BytesIO(), 2
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table(columns), sink, row_group_size=rows_at_once)
    else:
        make = random.choice([pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
        with make(sink, pyarrow.table(columns).schema) as writer:
            writer.write_table(pyarrow.table(columns), max_chunksize=rows_at_once)
    return sink.getvalue()


def packed(random: Random, folder: Path) -> list[str]:
    form = random.choice(FORMS)
    bad = [json.loads(json.dumps(form)) | {random.choice([*form]): random.choice(["", 1, [], {}])}]
    rows = [form] * 3 + bad * random.randint(0, 2)
    text = lines(*rows) + random.choice([b"", b"{broken\n", b"\xff\n"])
    kinds = {
        "chat.jsonl": lambda: text,
        "chat.jsonl.gz": lambda: gzip.compress(text),
        "chat.ndjson.zst": lambda: zstd(text),
        "chat.json": lambda: json.dumps(rows).encode(),
        "chat.json.gz": lambda: gzip.compress(json.dumps(rows).encode()),
        "chat.parquet": lambda: table(random, [form] * 9, "parquet"),
        "chat.arrow": lambda: table(random, [form] * 9, "arrow"),
    }
    name = random.choice([*kinds])
    raw = kinds[name]()
    if random.random() < 0.5:
        raw = wild.edited(random, raw)
    flags = ["--skip-bad"] * random.randint(0, 1)
    return samples(folder, raw, TEMPLATES["chatml"], *flags, name=name)


def programs(random: Random, folder: Path) -> list[str]:
    return samples(folder, lines(FORMS[0]), random.choice(PROGRAMS))


def templates(random: Random, folder: Path) -> list[str]:
    text = list(random.choice([*TEMPLATES.values()]))
    for _ in range(random.randint(1, 2)):
        text[random.randrange(len(text))] = random.choice("{}%-'|()[].=x \n\\\udc80é")
    return samples(folder, lines(*FORMS), "".join(text[: random.randint(1, 9 * len(text))]))


SIZES = {"layers": 1, "dim": 8, "heads": 2, "ffn": 8, "context": 32, "vocab_size": ByteTokenizer.vocab_size}
QUESTION = {"question": "Two and two are", "answers": [" four", " five"], "right": 0}


def evaluate(folder: Path, raw: bytes) -> list[str]:
    config = GPT2.from_flags(SIZES | {"tied": True})
    ones = {name: np.ones(param.shape, np.float32) for name, param in config.params().items()}
    write_tensors(folder / "model.gguf", config.arch, config.metadata() | ByteTokenizer().metadata(), ones)
    (folder / "choices.jsonl").write_bytes(raw)
    return ["-m", "zero_mpi", "evaluate", "model.gguf", "--choices", "choices.jsonl"]


def sound_questions(random: Random, folder: Path) -> list[str]:
    return evaluate(folder, lines(*[QUESTION] * random.randint(1, 5)))


def questions(random: Random, folder: Path) -> list[str]:
    rows = json.loads(json.dumps([QUESTION, QUESTION]))
    place, key = random.choice(wild.places(rows))
    place[key] = random.choice(ODD)
    raw = lines(*rows)
    texts = [b"", b"\n" * 9999, b"[" * 99999, b"\0" * 99, b"{}", b"\xff\xfe{}"]
    return evaluate(folder, random.choice([raw, raw, wild.edited(random, raw), random.choice(texts)]))


def chats(random: Random, folder: Path) -> list[str]:
    file = fuzz_gguf.model(random, odd_frequencies=0)
    file.keys = [pair for pair in file.keys if pair[0] != "tokenizer.chat_template"]
    template = fuzz_gguf.typed(fuzz_gguf.STRING, random.choice(PROGRAMS))
    file.keys.append(("tokenizer.chat_template", template))
    (folder / "x.gguf").write_bytes(file.bytes())
    return ["-m", "zero_mpi", "generate", "x.gguf", "--chat", "--prompt", "ab", "--tokens", "2"]


CASES = {"sound": sound, "rows": rows, "packed": packed, "programs": programs, "templates": templates}
CASES |= {"questions.sound": sound_questions, "questions": questions, "chats": chats}
