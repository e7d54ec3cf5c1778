"""Readers of files: their work and their memory grow no faster than their input."""

import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from chat_templates import TEMPLATES, chat_tokenizer

from zero_mpi.commands.evaluate.choices import encode_choices
from zero_mpi.commands.tokenize.command import command
from zero_mpi.data import ByteTokenizer
from zero_mpi.data.conversations import tokenized
from zero_mpi.data.conversations.answers import MOST_TURNS
from zero_mpi.data.conversations.chat_template import ChatTemplate
from zero_mpi.data.conversations.formats import Conversation
from zero_mpi.data.conversations.tokenized import ConversationReader, in_bytes
from zero_mpi.data.token_formats import MEGATRON, read_tokens
from zero_mpi.errors import UsageError
from zero_mpi.files.parse import _unique
from zero_mpi.launch.world import World

CONTENTS = ("some words.", "\n <think>\nhm\n</think>\n\n", " <|im_end|> é", "\n")


def turns(count: int, system: bool = False, contents: tuple[str, ...] = CONTENTS) -> Conversation:
    roles = ("user", "assistant")
    said = [f"{contents[n % len(contents)]}{n}\n" for n in range(count)]
    asked = [{"role": role, "content": text} for text in said for role in roles]
    return Conversation("x:1", tuple([{"role": "system", "content": "short"}] * system + asked))


def peak(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Letters(str):
    read = 0

    def __getitem__(self, place):
        part = super().__getitem__(place)
        Letters.read += len(part)
        return part


def letters_read(call: Callable[[], object]) -> int:
    Letters.read = 0
    call()
    return Letters.read


NAMES = [(name, system) for name in TEMPLATES for system in (False, True) if name != "marked"]
NAMES.remove(("gemma", True))  # which takes no system message


@pytest.mark.parametrize(("name", "system"), NAMES)
def test_answers_of_a_long_conversation_take_a_few_texts_of_it(name, system, monkeypatch):
    """By every template; and they are the answers that texts for each turn show."""
    reader, render = ConversationReader(chat_tokenizer(TEMPLATES[name])), ChatTemplate.render
    sizes = list[int]()

    def counted(self, *given, **options):
        found = render(self, *given, **options)
        sizes.append(len(found.text))
        return found

    monkeypatch.setattr(ChatTemplate, "render", counted)
    found = list[tuple[int, int]]()
    reader._finder.find(turns(2, system=system))  # what it learns of the template it learns once
    for count in (30, 60, 200):
        sizes.clear()
        conversation = turns(count, system=system)
        text, spans = reader._finder.find(conversation)
        found.append((len(sizes), sum(sizes)))
        assert len(spans) == count
        assert sum(sizes) <= 3 * len(text)
        if count <= MOST_TURNS:
            messages = conversation.messages
            places = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
            whole = reader._finder.template.render(messages)
            assert spans == [*reader._finder._by_renders(whole, messages, places).values()]
    assert len({calls for calls, _ in found}) == 1


BY_NUMBER = (
    "{% for i in range(messages | length) %}<|im_start|>{{ messages[i].role }}\n{{ messages[i].content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_without_a_loop_over_messages_takes_fewer_answers():
    reader = ConversationReader(chat_tokenizer(BY_NUMBER))
    text, spans = reader._finder.find(turns(MOST_TURNS, contents=("n",)))
    assert [text[slice(*span)] for span in spans] == [f"n{n}\n<|im_end|>" for n in range(MOST_TURNS)]
    with pytest.raises(ValueError, match=rf"at most {MOST_TURNS} .* found {MOST_TURNS + 1}: .*generation"):
        reader._finder.find(turns(MOST_TURNS + 1))


def test_places_in_a_text_that_is_not_ascii_are_counted_once():
    once, twice = (
        letters_read(lambda n=n: in_bytes(Letters("é" + "a" * n), [(i, i + 5) for i in range(0, n, 10)]))
        for n in (1000, 2000)
    )
    assert 0 < twice <= 2 * once + 10
    assert in_bytes("éaéa", [(2, 3), (0, 1), (3, 4)]) == [(3, 5), (0, 2), (5, 6)]


def test_conversations_are_encoded_by_so_many_letters(monkeypatch, tmp_path):
    monkeypatch.setattr(tokenized, "GROUP", 1000)
    tokenizer, groups = ByteTokenizer("{% for m in messages %}{{ m.content }}{% endfor %}"), list[list[int]]()
    encode = tokenizer.encode_with_lengths
    tokenizer.encode_with_lengths = lambda texts: groups.append(list(map(len, texts))) or encode(texts)
    rows = [
        {"messages": [{"role": "user", "content": "a" * size}]} for size in [300] * 10 + [5000] + [1] * 90
    ]
    (tmp_path / "c.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = list(ConversationReader(tokenizer).read([("c", tmp_path / "c.jsonl")]))
    assert [len(each.ids) for each in found] == [300] * 10 + [5000] + [1] * 90
    assert all(sum(sizes) - max(sizes) < 1000 for sizes in groups)
    assert len(groups) == 4


class Name(str):
    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Name.compared += 1
        return super().__eq__(other)


def test_a_name_that_comes_twice_is_found_in_one_pass():
    counts = []
    for count in (500, 1000):
        Name.compared = 0
        with pytest.raises(ValueError, match=f"'n{count - 1}' once"):
            _unique([(Name(f"n{n}"), n) for n in [*range(count), count - 1]])
        counts.append(Name.compared)
    assert counts[1] <= 2 * counts[0] + 100


def test_a_question_and_its_answers_have_a_bound_of_letters(tmp_path):
    """Each answer is encoded behind its question, so a long question of many answers takes much memory."""
    peaks = []
    for size in (1000, 4000, 8000):
        value = {"question": "q" * size, "answers": ["a"] * 1000, "right": 0}
        (tmp_path / "q.jsonl").write_text(json.dumps(value))

        def encode():
            with suppress(UsageError):
                encode_choices(tmp_path / "q.jsonl", ByteTokenizer(), 10_000)

        peaks.append(peak(encode))
    assert peaks[1] < 100 << 20
    assert peaks[2] < peaks[0]


def test_a_question_has_a_bound_of_answers(tmp_path):
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "q", "answers": ["a"] * 1001, "right": 0}))
    with pytest.raises(UsageError, match=r"q\.jsonl, line 1: answers: .*2 to 1000 .*, found 1001"):
        encode_choices(tmp_path / "q.jsonl", ByteTokenizer(), 10)


@pytest.mark.parametrize("length", [0, 1 << 33], ids=["no ids", "a sparse file of ids"])
def test_a_sparse_index_is_refused_before_it_is_held(length, tmp_path):
    count = 1 << 24
    head = MEGATRON + (1).to_bytes(8, "little") + bytes([8]) + np.array([count, 1], "<u8").tobytes()
    (tmp_path / "t.idx").write_bytes(head)
    os.truncate(tmp_path / "t.idx", len(head) + 12 * count + 8)
    (tmp_path / "t.bin").touch()
    os.truncate(tmp_path / "t.bin", length)

    def refused():
        with pytest.raises(UsageError, match=r"t\.bin as a token file: expected"):
            read_tokens("t.bin", tmp_path / "t.bin", 300)

    assert peak(refused) < 12 * count // 4


def test_a_packed_text_has_a_bound_by_the_size_of_its_file(tmp_path):
    path = tmp_path / "t.txt.gz"
    path.write_bytes(gzip.compress(b"a" * (9 << 20)))
    with pytest.raises(UsageError, match=rf"t\.txt\.gz: .* at most {8 << 20:,} bytes"):
        command(World(0, 1), [str(path), "--tokenizer", "byte", "--out", str(tmp_path / "out")])
