"""Files of conversations and questions, and chat templates, that lie or go on without end."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from random import Random
from typing import Any

import fuzz_gguf
import numpy as np
from chat_templates import CALLING, TEMPLATES, chat_keys
from fuzz_texts import ODD, lines, zstd
from gguf_files import GGUFStream

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
CALLS: list[dict[str, Any]] = [
    {"role": "assistant", "tool_calls": [{"type": "function", "id": "abcdefghi", "function": CALL}]},
    {"role": "Assistant", "content": None, "function_call": CALL},
    {"role": "function_call", "content": json.dumps([CALL])},
]
TEXTS = ["{", '{"a": ', "[" * 5000, '"\\ud800"', "1e999", "null", "7", "\ud800", '{"a":1,"a":2}', "9" * 5000]
SAYING = [
    "v=", "=", "v", "messages=1", "1=1", "v=[" * 99, "v=\x1b[31m", "v=" + "9" * 5000, "v=1e999", "\u2028=1",
]  # fmt: skip
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
    """The command on a file of these bytes, with this template in a file beside it."""
    with GGUFStream(folder / "m.gguf", "llama", chat_keys(), []):
        pass
    (folder / name).write_bytes(raw)
    (folder / "t.jinja").write_text(template, "utf-8", "surrogatepass")
    command = ["-m", "zero_mpi", "samples", "m.gguf", "--data", name, "--chat-template", "t.jinja"]
    return [*command, *flags]


def sound(random: Random, folder: Path) -> list[str]:
    name = random.choice(["chatml", "phi 3", "zephyr", "qwen 3", "marked"])
    return samples(folder, lines(*random.choices(FORMS, k=5)), TEMPLATES[name])


def values(random: Random, folder: Path) -> list[str]:
    form = json.loads(json.dumps(random.choice(FORMS)))
    places = [form, *(turn for turns in form.values() if isinstance(turns, list) for turn in turns)]
    place = random.choice(places)
    place[random.choice([*place, "system", "more"])] = random.choice([*ODD, TURNS])
    return samples(folder, lines(FORMS[0], form), random.choice([*TEMPLATES.values()]))


def pairs(random: Random, folder: Path) -> list[str]:
    """Pairs and answers with labels, another value in one place, or a place that is not there."""
    rows = json.loads(json.dumps(random.choices(PAIRS, k=3)))
    turns = [turn for row in rows for value in row.values() if isinstance(value, list) for turn in value]
    place = random.choice([*rows, *turns])
    key = random.choice([*place, "label", "rejected"])
    place[key] = random.choice([*ODD, TURNS, TURNS[:1], True])
    if random.random() < 0.3:
        del place[key]
    flags = random.choice([[], ["--skip-bad"], ["--json"]])
    return samples(folder, lines(*PAIRS[:1], *rows), TEMPLATES["chatml"], *flags)


def others(random: Random, folder: Path) -> list[str]:
    return samples(folder, lines(FORMS[0], random.choice(ODD)))


def damaged(random: Random, folder: Path) -> list[str]:
    raw = bytearray(lines(*FORMS))
    for _ in range(random.randint(1, 4)):
        raw[random.randrange(len(raw))] = random.randrange(256)
    return samples(folder, bytes(raw[: random.randint(1, len(raw))]), TEMPLATES["chatml"], "--json")


def table(random: Random, rows: list[dict[str, Any]], kind: str) -> bytes:
    """Rows as Parquet or Arrow, a column of texts in the place of one at times."""
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
    raw = bytearray(kinds[name]())
    for _ in range(random.choice([0, 0, 1, 4])):
        raw[random.randrange(len(raw))] = random.randrange(256)
    raw = raw[: random.choice([len(raw), len(raw), random.randint(1, len(raw))])]
    flags = ["--skip-bad"] * random.randint(0, 1)
    return samples(folder, bytes(raw), TEMPLATES["chatml"], *flags, name=name)


def programs(random: Random, folder: Path) -> list[str]:
    return samples(folder, lines(FORMS[0]), random.choice(PROGRAMS))


def templates(random: Random, folder: Path) -> list[str]:
    text = list(random.choice([*TEMPLATES.values()]))
    for _ in range(random.randint(1, 2)):
        text[random.randrange(len(text))] = random.choice("{}%-'|()[].=x \n\\\udc80é")
    return samples(folder, lines(*FORMS), "".join(text[: random.randint(1, 9 * len(text))]))


def calls(random: Random, folder: Path) -> list[str]:
    """Calls of tools with another value in one place, at whatever depth, by templates that show them."""
    turn = json.loads(json.dumps(random.choice(CALLS)))
    row = {"messages": [TURNS[0], turn, {"role": "Tool", "content": "0"}], "tools": TOOLS}
    places: list[Any] = [row]
    for place in places:
        inner = place.values() if isinstance(place, dict) else place
        places += [each for each in inner if isinstance(each, dict | list) and each]
    place = random.choice(places[2:])
    key = random.choice([*place]) if isinstance(place, dict) else random.randrange(len(place))
    place[key] = random.choice([*ODD, *TEXTS, CALL, [CALL], {"function": CALL}])
    flags = random.choice([[], ["--loss-on", "all"]])
    return samples(folder, lines(FORMS[0], row), random.choice([*CALLING.values()])[0], *flags)


def variables(random: Random, folder: Path) -> list[str]:
    flags = {
        "--template-var": random.choice(SAYING),
        "--template-date": random.choice(
            ["2024-02-30", "x", "0001-01-01", "9999-12-31", "\x1b[31m", "20240101"]
        ),
        "--system": random.choice(["\x1b[31m", "<|im_end|>", "x" * 5000, "\u2028"]),
    }
    chosen = [word for flag in random.sample([*flags], 2) for word in (flag, flags[flag])]
    return samples(folder, lines(*FORMS), "{{ v }}{{ strftime_now('%c') }}" + TEMPLATES["chatml"], *chosen)


SIZES = {"layers": 1, "dim": 8, "heads": 2, "ffn": 8, "context": 32, "vocab_size": ByteTokenizer.vocab_size}
QUESTION = {"question": "Two and two are", "answers": [" four", " five"], "right": 0}


def evaluate(folder: Path, raw: bytes) -> list[str]:
    config = GPT2.from_flags(SIZES | {"tied": True})
    params = config.params()
    table = [(name, param.shape) for name, param in params.items()]
    keys = config.metadata() | ByteTokenizer().metadata()
    with GGUFStream(folder / "model.gguf", config.arch, keys, table) as stream:
        for name, shape in table:
            stream.write(name, np.ones(shape, np.float32))
    (folder / "choices.jsonl").write_bytes(raw)
    return ["-m", "zero_mpi", "evaluate", "model.gguf", "--choices", "choices.jsonl"]


def sound_questions(random: Random, folder: Path) -> list[str]:
    return evaluate(folder, lines(*[QUESTION] * random.randint(1, 5)))


def questions(random: Random, folder: Path) -> list[str]:
    kind, odd = random.randrange(4), random.choice(ODD)
    if kind == 0:
        return evaluate(folder, lines(QUESTION, odd))
    if kind == 1:
        return evaluate(folder, lines(QUESTION, QUESTION | {random.choice([*QUESTION, "context"]): odd}))
    if kind == 2:
        raw = bytearray(lines(QUESTION, QUESTION))
        for _ in range(random.randint(1, 4)):
            raw[random.randrange(len(raw))] = random.randrange(256)
        return evaluate(folder, bytes(raw[: random.randint(1, len(raw))]))
    texts = [b"", b"\n" * 9999, b"[" * 99999, b"\0" * 99, b"{}", b"\xff\xfe{}"]
    return evaluate(folder, random.choice(texts))


# Templates that need no filter to take all time or memory: loops, products, slices, comparisons.
NUMBERS = ("0", "1", "-1", "2", "99", "9999", "99999", "10 ** 7", "10 ** 9", "2 ** 70", "9 ** 9 ** 9")


def number_of(random: Random) -> str:
    return random.choice(NUMBERS)


def text_of(random: Random, depth: int) -> str:
    if not depth:
        return random.choice(["'xy'", "messages[0].content", "s", "n.s"])
    one = text_of(random, depth - 1)
    many, other = number_of(random), text_of(random, 0)
    kinds = (
        *(f"({one} * {many})", f"({one} * {many})", f"{one}[{many}:{number_of(random)}]", f"{one}[::{many}]"),
        *(f"({one} ~ {other})", f"({one} + {one})", f"{one}.replace('x', {other})", f"('%{many}d' % 1)"),
        *(
            f"'{{:{many}}}'.format(1)",
            f"{one}.ljust({many})",
            f"{other}.join([{one}, {one}])",
            f"({one} ~ {many})",
        ),
    )
    return random.choice(kinds)


def sequence(random: Random, depth: int) -> str:
    if not depth:
        return random.choice(["messages", "range(9999)", "range(99999)", "'xy'", "['x', 'y']", "n.l", "s"])
    one, many = sequence(random, depth - 1), number_of(random)
    kinds = (
        *(f"(['x'] * {many})", f"([{one}] * {many})", f"range({many})", f"([{one}, {one}] * 9)"),
        *(f"{one}[{many}:]", f"{one}[::-1]", text_of(random, depth), f"{text_of(random, depth)}.split('x')"),
    )
    return random.choice(kinds)


def condition(random: Random, depth: int) -> str:
    one, other = text_of(random, depth), text_of(random, depth)
    many = sequence(random, depth)
    return random.choice([f"{one} in {other}", f"{one} == {other}", f"{one} < {other}", f"{one} in {many}"])


def statement(random: Random, depth: int) -> str:
    kind, inner = random.randrange(6), statement(random, depth - 1) if depth else "{{ s }}"
    deep = random.choice([0, 0, 1, 1, 2, 3])
    if kind <= 1:
        return f"{{% for i in {sequence(random, deep)} %}}{inner}{{% endfor %}}"
    if kind == 2:
        return f"{{% set n.s = {text_of(random, deep)} ~ n.s[1:] %}}{{% set n.l = n.l + [n.s] %}}{inner}"
    if kind == 3:
        return f"{{% if {condition(random, deep)} %}}{inner}{{% else %}}{{{{ s }}}}{{% endif %}}"
    if kind == 4:
        return (
            f"{{% macro m(s) %}}{inner}{{{{ m({text_of(random, deep)}) }}}}{{% endmacro %}}{{{{ m('x') }}}}"
        )
    return f"{{{{ {text_of(random, deep)} }}}}{inner}"


def program(random: Random) -> str:
    begin = "{% set s = 'xy' %}{% set n = namespace(s='xy', l=['x']) %}"
    return begin + "".join(
        statement(random, random.choice([0, 1, 2, 4])) for _ in range(random.choice([1, 2]))
    )


def grown_programs(random: Random, folder: Path) -> list[str]:
    return samples(folder, lines(*FORMS), program(random))


def chats(random: Random, folder: Path) -> list[str]:
    file = fuzz_gguf.model(random, odd_frequencies=0)
    file.keys = [pair for pair in file.keys if pair[0] != "tokenizer.chat_template"]
    file.keys.append(("tokenizer.chat_template", fuzz_gguf.typed(fuzz_gguf.STRING, program(random))))
    (folder / "x.gguf").write_bytes(file.bytes())
    return ["-m", "zero_mpi", "generate", "x.gguf", "--chat", "--prompt", "ab", "--tokens", "2"]


CASES = {"sound": sound, "calls": calls, "variables": variables, "values": values, "others": others}
CASES |= {"pairs": pairs, "damaged": damaged, "packed": packed, "programs": programs, "templates": templates}
CASES |= {"questions.sound": sound_questions, "questions": questions}
CASES |= {"loops": grown_programs, "chats": chats}
