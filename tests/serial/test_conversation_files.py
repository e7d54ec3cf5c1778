"""Tests of conversation files: tables, packed files, bad rows, facts."""

import gzip
import json
import tracemalloc

import pytest
from chat_templates import CHATML, chat_tokenizer
from corpora import load_corpus
from test_conversations import AB, written
from test_tokenize import zstd

from zero_mpi.commands.evaluate.choices import read_choices
from zero_mpi.commands.tokenize.command import command
from zero_mpi.data.conversations.formats import (
    BadRows,
    are_conversations,
    holds_pairs,
    one_conversation,
    read_conversations,
)
from zero_mpi.data.conversations.row_sources import TABLES
from zero_mpi.data.conversations.tokenized import CAUTIONS, ConversationReader, Totals
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World

OPTIONS = {"val_fraction": 0, "context": 8, "seed": 0, "vocab_size": 400}


def parquet(rows):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet as library

    sink = pa.BufferOutputStream()
    library.write_table(table(rows), sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


def table(rows):
    pa = pytest.importorskip("pyarrow")
    keys = dict.fromkeys(key for row in rows for key in row)
    return pa.table({key: [row.get(key) for row in rows] for key in keys} | {"extra": [b"\xff"] * len(rows)})


def arrow(rows, make="new_stream", **columns):
    pa = pytest.importorskip("pyarrow")
    content, sink = table(rows), pa.BufferOutputStream()
    for name, column in columns.items():
        content = content.append_column(name, [column])
    with getattr(pa.ipc, make)(sink, content.schema) as writer:
        writer.write_table(content, max_chunksize=2)
    return sink.getvalue().to_pybytes()


CALL = {"type": "function", "function": {"name": "f", "arguments": {"unit": None, "city": "Oslo"}}}
TABLE = [
    {"messages": AB, "tools": '[{"type": "function"}]'},
    {"messages": [*AB, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": None},
    {"messages": [{"role": "user", "content": "\u2028é"}, {"role": "assistant", "content": "b"}]},
]
LATE = {"id": "x" * 70_000, "messages": AB}
MADE = {
    "t.parquet": parquet,
    "T.PARQUET": parquet,
    "t.arrow": arrow,
    "T.ARROW": lambda rows: arrow(rows, "new_file"),
    "t.jsonl.gz": lambda rows: gzip.compress("\r\n".join(map(json.dumps, rows)).encode()),
    "t.ndjson.zst": lambda rows: zstd("\n".join(map(json.dumps, rows)).encode()),
    "t.json.gz": lambda rows: gzip.compress(json.dumps(rows).encode()),
    "t.jsonl": lambda rows: "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode(),
}
SPELLED = MADE | {
    "bom.jsonl": lambda rows: "\n".join(map(json.dumps, rows)).encode("utf-8-sig"),
    "bom.json": lambda rows: json.dumps(rows).encode("utf-8-sig"),
    "lines.json": lambda rows: "\n".join(map(json.dumps, rows)).encode(),
    "pretty.json": lambda rows: json.dumps(rows, indent=2).encode(),
    "data.json": lambda rows: json.dumps({"data": rows}).encode(),
}


@pytest.mark.parametrize("name", SPELLED)
@pytest.mark.parametrize(
    "rows",
    [
        TABLE,
        [{"prompt": AB[:1], "completion": AB[1:]}] * 130,
        [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}]}],
        [{"instruction": "a", "input": "", "output": "b", "system": "s"}],
    ],
    ids=["messages", "prompt", "conversations", "instruction"],
)
def test_tables_and_packed_files_of_conversations(name, rows, tmp_path):
    path = tmp_path / name
    path.write_bytes(SPELLED[name](rows))
    assert are_conversations([(name, path)])
    conversations = list(read_conversations("x", path, lambda conversation: conversation))
    if path.suffix.lower() in TABLES:  # rows of tables have all keys, with null for those that a value lacks
        rows = json.loads(json.dumps(rows).replace('"unit": null, ', ""))
    assert conversations == [one_conversation(f"x:{n}", row) for n, row in enumerate(rows, 1)]


@pytest.mark.parametrize(
    ("row", "pairs", "labelled"),
    [
        ({"chosen": "a", "rejected": "b"}, True, True),
        ({"prompt": "a", "completion": "b", "label": True}, False, True),
        ({"prompt": "a", "completion": "b", "label": "good"}, False, False),
        ({"messages": AB, "tools": [{"label": 1, "chosen": 1, "rejected": True}]}, False, False),
        ({"text": "a", "meta": {"chosen": 1, "rejected": False}}, False, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl", "t.json.gz"])
def test_pairs_and_labels_are_keys_of_the_row(name, row, pairs, labelled, tmp_path):
    (tmp_path / name).write_bytes(MADE[name]([row]))
    assert (holds_pairs(tmp_path / name), holds_pairs(tmp_path / name, labels=True)) == (pairs, labelled)


@pytest.mark.parametrize("name", MADE)
def test_the_deciding_key_may_come_late(name, tmp_path):
    (tmp_path / name).write_bytes(MADE[name]([LATE, {"messages": AB}]))
    assert are_conversations([(name, tmp_path / name)])
    (tmp_path / name).write_bytes(MADE[name]([{"text": "x" * 70_000}]))
    assert not are_conversations([(name, tmp_path / name)])


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("t.jsonl.gz", MADE["t.jsonl.gz"](TABLE)[:-20], r"t\.jsonl\.gz: cannot be read"),
        ("t.jsonl.gz", b"{}", r"t\.jsonl\.gz: cannot be read"),
        ("t.jsonl.gz", gzip.compress(b'{"messages": 1}'), r"t\.jsonl\.gz, line 1: messages: expected a list"),
        ("t.json.gz", gzip.compress(b'[{"messages": 1}]'), r"t\.json\.gz, row 1: messages: expected a list"),
    ],
)
def test_what_is_wrong_with_such_files_is_one_line(name, data, expected, tmp_path):
    files = [(name, tmp_path / name)]
    files[0][1].write_bytes(data)
    with pytest.raises(UsageError, match=f"^--data .*{expected}") as caught:
        list(read_conversations(*files[0], lambda one: one) if are_conversations(files) else ())
    assert "\n" not in str(caught.value)


def test_a_damaged_table_is_none_of_conversations(tmp_path):
    """A damaged table does not count as conversations; --data refuses it as a Parquet file."""
    path = tmp_path / "t.parquet"
    path.write_bytes(parquet(TABLE)[:-20])
    assert not are_conversations([("t.parquet", path)])
    with pytest.raises(UsageError, match=r"t\.parquet looks like a Parquet file.*zero-mpi\[arrow\]"):
        load_corpus([str(path)], tokenizer=chat_tokenizer(CHATML), **OPTIONS)


def test_a_folder_of_the_package_datasets_is_one_of_conversations(tmp_path):
    """The folder's JSON files are skipped, a table of ids is a token file, and damage is a one-line error."""
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(arrow(TABLE))
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    tokenizer = chat_tokenizer(CHATML)
    assert load_corpus([str(tmp_path)], tokenizer=tokenizer, **OPTIONS).documents == len(TABLE)
    raw = arrow(TABLE)
    for data, found in ((raw[:-200], "cannot be read"), (raw.replace(b"assistant", b"\xff" * 9), "UTF8")):
        (tmp_path / "data-00000-of-00001.arrow").write_bytes(data)
        with pytest.raises(UsageError, match=rf"^--data .*\.arrow.*{found}") as caught:
            load_corpus([str(tmp_path)], tokenizer=tokenizer, **OPTIONS)
        assert "\n" not in str(caught.value)
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(arrow(TABLE, input_ids=[[1, 2, 3]] * len(TABLE)))
    found = load_corpus([str(tmp_path)], tokenizer=None, **OPTIONS)
    assert found.tokens[0] == 3 * len(TABLE)


def test_packed_lines_and_tables_are_read_in_pieces(tmp_path):
    """Peak memory is less than half the size of the unpacked files."""
    rows = [{"messages": [{"role": "user", "content": "x" * 20_000}, AB[1]]}] * 1000  # 20 MB
    for name in ("t.jsonl.gz", "t.parquet", "t.arrow"):
        (tmp_path / name).write_bytes(MADE[name](rows))
        list(read_conversations("x", tmp_path / name, lambda conversation: None))  # loads modules
        tracemalloc.start()
        assert sum(1 for _ in read_conversations("x", tmp_path / name, lambda conversation: None)) == 1000
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 << 20


def facts_of(tmp_path, template, *rows, loss_on="answers"):
    totals = Totals()
    for conversation in ConversationReader(chat_tokenizer(template), loss_on).read(
        [("x", written(tmp_path, *rows))]
    ):
        totals.add(conversation.name, conversation.facts)
    return totals


SILENT = [*AB, AB[0], {**AB[1], "weight": 0}]
LETTERS_END = "{% for m in messages %}{{ m.role + ': ' + m.content + '###' }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "f"}}]
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML


@pytest.mark.parametrize(
    ("template", "row", "loss_on", "expected"),
    [
        (CHATML, {"messages": AB}, "answers", {"turns": 1}),
        (CHATML, {"messages": SILENT}, "answers", {"turns": 1, "silent": 1}),
        (CHATML, {"messages": SILENT}, "all", {"turns": 1, "silent": 1}),
        (CHATML, {"messages": AB, "tools": TOOLS}, "answers", {"turns": 1, "tools": 1, "unread": 1}),
        (WITH_TOOLS, {"messages": AB, "tools": TOOLS}, "answers", {"turns": 1, "tools": 1}),
        (LETTERS_END, {"messages": AB}, "answers", {"turns": 1, "endless": 1}),
        (CHATML, {"messages": AB[:1]}, "answers", {"left_out": 1}),
        ("{{ messages[0].content }}", {"messages": AB}, "answers", {"unwritten": 1, "left_out": 1}),
    ],
)
def test_facts_tell_how_a_row_is_read(template, row, loss_on, expected, tmp_path):
    """Each fact in `CAUTIONS` that occurs in the rows gives a caution."""
    totals = facts_of(tmp_path, template, row, loss_on=loss_on)
    names = ("turns", "silent", "tools", *CAUTIONS)
    assert {name: totals.sums[name] for name in names if totals.sums[name]} == expected
    assert len(totals.cautions()) == len(expected.keys() & CAUTIONS.keys())
    assert totals.first.startswith("x:1: ")


BAD = ["{broken", '{"messages": [{"role": "x", "content": ""}]}', '{"no": 1}', "{broken2", '{"messages": []}']


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.json"])
def test_bad_rows_are_left_out_and_counted_by_reason(name, tmp_path):
    """The note has the count and first row of each reason; names of valid rows do not change."""
    good, rows = json.dumps({"messages": AB}), [row for row in BAD if name != "t.json" or "broken" not in row]
    lines = [good, *rows, good]
    text = f"[{','.join(lines)}]" if name == "t.json" else "\n".join(lines)
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    bad = BadRows()
    read = ConversationReader(chat_tokenizer(CHATML)).read
    names = [conversation.name for conversation in read([(name, tmp_path / name)], bad)]
    assert names == [f"{name}:1", f"{name}:{len(lines)}"]
    (note,) = bad.notes()
    assert "ValueError" not in note
    assert sorted(bad.counts.values()) == [1, 1, 1] + [2] * (len(rows) == 5)
    assert all(f"({name}:{2 + rows.index(row)})" in note for row in rows if row != BAD[3])
    with pytest.raises(UsageError, match=rf"{name}, (line|row) 2: .*; --skip-bad"):
        list(read([(name, tmp_path / name)]))


@pytest.mark.parametrize(("name", "pack"), [("q.jsonl.gz", gzip.compress), ("q.jsonl.zst", zstd)])
def test_questions_may_be_packed(name, pack, tmp_path):
    question = {"question": "a", "answers": ["b", "c"], "right": 0}
    (tmp_path / name).write_bytes(pack(json.dumps(question).encode()))
    assert [choice.right for choice in read_choices(tmp_path / name)] == [0]


def test_a_packed_text_has_a_bound_by_the_size_of_its_file(tmp_path):
    path = tmp_path / "t.txt.gz"
    path.write_bytes(gzip.compress(b"a" * (9 << 20)))
    with pytest.raises(UsageError, match=rf"t\.txt\.gz: .* at most {8 << 20:,} bytes"):
        command(World(0, 1), [str(path), "--tokenizer", "byte", "--out", str(tmp_path / "out")])
