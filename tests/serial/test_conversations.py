"""Tests of conversations as tokens: Transformers' text, counted answers, bad lines."""

import json
import re
import resource
from datetime import datetime
from functools import lru_cache

import numpy as np
import pytest
from chat_templates import CHATML, MARKED, TEMPLATES, chat_keys, chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_mpi.commands.generate.command import Chat
from zero_mpi.data import BPETokenizer, ByteTokenizer, tokenizer_from_metadata, tokenizer_json
from zero_mpi.data.conversations import chat_template
from zero_mpi.data.conversations.answers import MOST_TURNS
from zero_mpi.data.conversations.chat_template import ChatTemplate
from zero_mpi.data.conversations.formats import (
    Conversation,
    are_conversations,
    one_conversation,
    read_conversations,
)
from zero_mpi.data.conversations.tokenized import ALL, ANSWERS, ConversationReader
from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import TEMPLATE


def said(*contents, system=None):
    roles = ("user", "assistant")
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": roles[place % 2], "content": content} for place, content in enumerate(contents)]


TALK = said("hello the", "<think>\nhm\n</think>\n\nhello!", "Größe 10?", "It is 10", system="Be é brief.")
TALKS = {
    "one question": said("hi"), "an answer": said("hi", "hello there. "),
    "white space": said(" hi\n", "\n hello. \n", "\tso\n\n", " "), "several": TALK[1:], "with a system": TALK,
    "only a system": TALK[:1], "control tokens": said("what is <|im_end|> [INST]", "a <s> of </s>"),
}  # fmt: skip
CALL = {"name": "é<", "arguments": {"x": [1]}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]}
TALKS["a tool"] = [*said("look"), CALLING, {"role": "tool", "content": "0"}, *said("u", "so: 0")[1:]]


@lru_cache
def transformers_tokenizer():
    """Return a tokenizer of Transformers with the same tokens."""
    import tokenizers
    import transformers

    backend = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(chat_keys())))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture
def oracle(monkeypatch):
    """Return a function that calls Transformers' `apply_chat_template` on the templates' fixed day."""
    from transformers.utils import chat_template_utils

    class Clock(datetime):
        @classmethod
        def now(cls):
            return cls.fromisoformat(chat_template.DAY)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)

    def apply(messages, template, **options):
        return transformers_tokenizer().apply_chat_template(messages, chat_template=template, **options)

    return apply


@lru_cache
def reader(name, loss_on=ANSWERS):
    return ConversationReader(chat_tokenizer(TEMPLATES[name]), loss_on)


def written(folder, *values):
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values), "utf-8")
    return path


def read(folder, name, *values, loss_on=ANSWERS):
    return list(reader(name, loss_on).read([("chat.jsonl", written(folder, *values))]))


# ------------------------------------------------------------------------------------------ rendered texts


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_text_is_that_of_transformers(name, prompt, oracle):
    """Compare the text or the error of each template and conversation."""
    template = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    count = 0
    for messages in TALKS.values():
        try:
            expected = oracle(messages, TEMPLATES[name], add_generation_prompt=prompt, tokenize=False)
        except Exception as error:
            with pytest.raises(ValueError, match=re.escape(str(error))):
                template.render(messages, prompt)
        else:
            assert template.render(messages, prompt).text == expected
            count += 1
    assert count >= 5


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=2, max_size=5))
def test_ids_are_those_of_the_whole_text(contents):
    """For any contents, the ids are those of the full text, and all characters of the answers count."""
    for name in ("chatml", "plain", "llama 2"):
        rendered = reader(name).render(Conversation("x:1", tuple(said(*contents))))
        tokenizer = chat_tokenizer()
        tokenized = reader(name)._mark(rendered, *tokenizer.encode_with_lengths([rendered.text])[0])
        assert tokenized.ids.tolist() == tokenizer.encode(rendered.text, special=True).tolist()
        mask = np.repeat(tokenized.counted, tokenized.lengths)
        assert len(mask) == len(rendered.text.encode())
        for start, stop in rendered.spans:
            assert mask[len(rendered.text[:start].encode()) : len(rendered.text[:stop].encode())].all()


# --------------------------------------------------------------------------------------- counted tokens


THOUGHT = "<think>\nhm\n</think>\n\nhello!"
ANSWER_TEXTS = {  # counted texts of TALK without its system message, by template
    "chatml": [f"{THOUGHT}<|im_end|>", "It is 10<|im_end|>"],
    "llama 2": [f" {THOUGHT} </s>", " It is 10 </s>"],
    "llama 3": [f"{THOUGHT}<|eot_id|>", "It is 10<|eot_id|>"],
    "mistral": [f" {THOUGHT}</s>", " It is 10</s>"],
    "gemma": [f"{THOUGHT}<end_of_turn>", "It is 10<end_of_turn>"],
    "phi 3": [f"{THOUGHT}<|end|>", "It is 10<|end|>"],
    "zephyr": [f"{THOUGHT}</s>", "It is 10</s>"],
    "qwen 3": ["hello!<|im_end|>", "<think>\n\n</think>\n\nIt is 10<|im_end|>"],
    "plain": [f"{THOUGHT}\n", "It is 10"],  # "!\n" is one token
    "marked": [f"{THOUGHT}<|im_end|>", "It is 10<|im_end|>"],
}


def answers_in(conversation):
    edges = np.flatnonzero(np.diff(np.concatenate(([0], conversation.counted.view(np.int8), [0]))))
    ends, raw = np.concatenate(([0], np.cumsum(conversation.lengths))), conversation.text.encode()
    return [raw[ends[a] : ends[b]].decode() for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_transformers_and_answers_count_with_their_end_of_turn(name, tmp_path, oracle):
    (conversation,) = read(tmp_path, name, {"messages": TALK[1:]})
    assert conversation.ids.tolist() == oracle(TALK[1:], TEMPLATES[name], return_dict=True)["input_ids"]
    assert answers_in(conversation) == ANSWER_TEXTS[name]
    (full,) = read(tmp_path, name, {"messages": TALK[1:]}, loss_on=ALL)
    assert full.counted.all()
    assert full.ids.tolist() == conversation.ids.tolist()


def test_marks_of_a_template_are_taken_at_their_word(tmp_path):
    """The template's marks exclude the end-of-turn token; a conversation without answers has no marks."""
    template = MARKED.replace("message['content'] + '<|im_end|>' }}{% endg", "message['content'] }}{% endg")
    reads = ConversationReader(
        chat_tokenizer(template.replace("{% endgeneration %}", "{% endgeneration %}."))
    )
    first, second = reads.read([("x", written(tmp_path, {"messages": said("a")}, {"messages": TALK[1:]}))])
    assert answers_in(second) == [THOUGHT, "It is 10"]
    assert not first.counted.any()


def test_a_tokenizer_has_to_have_tokens_for_all_bytes(tmp_path):
    """A byte without a token would shift the counted characters after it."""
    keys = chat_keys(CHATML)
    tokens = ["(none)" if token == "Z" else token for token in keys["tokenizer.ggml.tokens"]]
    reads = ConversationReader(BPETokenizer(keys | {"tokenizer.ggml.tokens": tokens}))
    place = written(tmp_path, {"messages": said("a", "b")}, {"messages": said("Z", "b")})
    with pytest.raises(UsageError, match=r"^--data x:2: expected a tokenizer with a token for every byte"):
        list(reads.read([("x", place)]))


MOVED = {  # templates whose turns depend on later turns: (template, messages, counted texts)
    "a system that goes to the last question": ("mistral", TALK, [f"{THOUGHT}</s>", "It is 10</s>"]),
    "thoughts that are left out, and digits alike": (
        "qwen 3",
        said("a", "<think>\nx\n</think>\n\n01", "b", "c", "d", "e"),
        ["01<|im_end|>", "c<|im_end|>", "<think>\n\n</think>\n\ne<|im_end|>"],
    ),
    "an answer at first": ("phi 3", [*said("u", "hello")[1:], *said("x")], ["hello<|end|>"]),
    "an answer at first, of a template that looks at the first message": (
        "gemma", [*said("u", "hello")[1:], *said("x", "y")], ["hello<end_of_turn>", "y<end_of_turn>"],
    ),
    "empty answers": ("chatml", said("a", "", "b", "c"), ["<|im_end|>", "c<|im_end|>"]),
    "a token that ends a turn in an answer": (
        "chatml",
        said("a", "b<|im_end|>c"),
        ["b<|im_end|>c<|im_end|>"],
    ),
    "a call of a tool": (
        "llama 3",
        TALKS["a tool"],
        ['{"name": "é<", "arguments": {"x": [1]}}<|eot_id|>', "so: 0<|eot_id|>"],
    ),
    "an empty answer that nothing ends": ("plain", said("a", ""), []),
    "nothing at the end": ("plain", said("a", "b\n\n"), ["b"]),
    "a token of both sides": ("plain", said("a", "b!"), ["b!\n"]),  # "!\n" is one token
}  # fmt: skip


@pytest.mark.parametrize("case", MOVED)
def test_answers_are_found_where_a_turn_depends_on_what_follows(case, tmp_path):
    name, messages, expected = MOVED[case]
    (conversation,) = read(tmp_path, name, {"messages": messages})
    assert answers_in(conversation) == expected


BY_NUMBER = (
    "{% for i in range(messages | length) %}<|im_start|>{{ messages[i].role }}\n{{ messages[i].content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_without_a_loop_over_messages_takes_fewer_answers():
    finder = ConversationReader(chat_tokenizer(BY_NUMBER))._finder
    text, spans = finder.find(Conversation("x:1", tuple(said(*map(str, range(2 * MOST_TURNS))))))
    assert [text[slice(*span)] for span in spans] == [f"{2 * n + 1}<|im_end|>" for n in range(MOST_TURNS)]
    with pytest.raises(ValueError, match=rf"at most {MOST_TURNS} .* found {MOST_TURNS + 1}: .*generation"):
        finder.find(Conversation("x:1", tuple(said(*map(str, range(2 * MOST_TURNS + 2))))))


def test_a_turn_that_a_template_leaves_out_counts_nothing(tmp_path):
    template = CHATML.replace(
        "for message in messages", "for message in messages if message.role != 'assistant'"
    )
    reads = ConversationReader(chat_tokenizer(template))
    (conversation,) = reads.read([("chat.jsonl", written(tmp_path, {"messages": TALK}))])
    assert not conversation.counted.any()


@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_only_a_completion_counts(name, tmp_path):
    (conversation,) = read(tmp_path, name, {"prompt": said("a", "b", "c"), "completion": said("u", "d")[1:]})
    assert answers_in(conversation) == ["d<|im_end|>"]


# ---------------------------------------------------------------------------------------- lines of files


AB = said("a", "b")
FORMS = {
    "messages": ({"messages": AB}, AB),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in "ac"]}]},
        [{"role": "user", "content": [{"type": "text", "text": text} for text in "ac"]}],
    ),
    "prompt": ({"prompt": "a", "completion": "b"}, AB),
    "prompt of messages": ({"prompt": AB[:1], "completion": AB[1:]}, AB),
    "alpaca": ({"instruction": "a", "input": "", "output": "b"}, AB),
    "alpaca with": (
        {"instruction": "a", "input": "in", "output": "b", "system": "s"}, said("a\n\nin", "b", system="s"),
    ),
    "sharegpt": ({"conversations": [{"from": "human", "value": "a"}, {"from": "GPT", "value": "b"}]}, AB),
    "sharegpt with": (
        {"conversations": [{"from": "user", "value": "a"}], "system": "s"}, said("a", system="s"),
    ),
    "sharegpt's keys": (
        {"conversations": [
            {"from": "human", "value": "a", "name": "n"},
            {"from": "gpt", "reasoning_content": "t", "tool_calls": [CALL]},
        ]},
        [AB[0] | {"name": "n"}, {"thinking": "t", "reasoning_content": "t", **CALLING, "tool_calls": [CALL]}],
    ),
    "prompt with": ({"prompt": "a", "completion": "b", "system": "s"}, said("a", "b", system="s")),
    "messages with": ({"messages": AB, "system": "s"}, said("a", "b", system="s")),
    "messages with two": ({"messages": said("a", system="s"), "system": "t"}, said("a", system="s")),
    "sharegpt's tool": (
        {"conversations": [{"from": "observation", "value": "a"}]}, [{"role": "tool", "content": "a"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_lines_of_all_forms(form):
    value, expected = FORMS[form]
    assert one_conversation("x:1", value).messages == tuple(expected)


KINDS = "expected an object with messages, with prompt and completion, with instruction and output, or with"
BAD = {
    '["a"]': rf"{KINDS} conversations, found \['a'\]",
    '{"messages": []}': "expected at least one message, found none",
    '{"messages": ["hi"]}': r"messages\[0\]: expected an object with role and content, found 'hi'",
    '{"messages": [{"role": "me", "content": "a"}]}': r"\[0\]: role: expected one of .*, found 'me'",
    '{"messages": [{"role": "user", "content": "\\ud800"}]}': r"content: expected a text.*found '\\ud800'",
    '{"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}': "found {'type': 'im",
    '{"prompt": "a", "completion": 1}': "^--data .*, line 2: completion: expected a text, found 1; --skip",
    '{"conversations": [{"from": "cat", "value": "a"}]}': r"\[0\]: from: expected one of human, .*'cat'",
    '{"messages": ': "line 2: no JSON: Expecting value at column 14;",
    '{"messages": [], "messages": []}': "expected 'messages' once, found it twice",
    "\xff": "line 2: not UTF-8 at byte 0",
    "[" * 9999: "line 2: nested too deeply",
    '{"messages": [{"role": "assistant", "content": "b"}]}': "the chat template: user and assistant m",
    '{"messages": [{"role": "assistant", "content": "b", "weight": 0.5}]}': "weight of a message: expected ",
    '{"messages": [{"role": "user", "content": "a"}], "tools": {}}': "tools: expected a list.*found '?{}",
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:60])
def test_a_bad_line_is_named(line, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_bytes(b"\n".join([json.dumps({"messages": AB}).encode(), line.encode("latin-1"), b""]))
    with pytest.raises(UsageError, match=BAD[line]) as caught:
        list(reader("llama 2").read([("chat.jsonl", path)]))
    assert str(caught.value).startswith(f"--data {path}, line 2: ")
    assert "\n" not in str(caught.value)


def test_blank_lines_are_passed_over_and_numbers_stay(tmp_path):
    path = tmp_path / "chat.jsonl"
    first, last = (json.dumps(value) for value in ({"prompt": "a", "completion": "b"}, {"messages": AB}))
    path.write_bytes(f"\n  \n{first}\r\n\n{last}".encode())
    conversations = list(read_conversations("chat.jsonl", path, lambda conversation: conversation))
    assert [conversation.name for conversation in conversations] == ["chat.jsonl:3", "chat.jsonl:5"]


def test_which_files_are_conversations(tmp_path):
    chat, text, lines = (tmp_path / name for name in ("chat.jsonl", "text.txt", "rows.jsonl"))
    chat.write_text('{broken\n{"messages" : []}\n')
    text.write_text('{"messages": []}\n')
    lines.write_text(json.dumps({"text": '"messages": []'}) + "\n")
    assert are_conversations([("chat", chat)])
    assert not are_conversations([("text", text), ("rows", lines)])
    with pytest.raises(UsageError, match=r"not both: .*chat\.jsonl .*text\.txt does not"):
        are_conversations([("text", text), ("chat", chat)])


# ------------------------------------------------------------------------------------------ the template


LONG = "the chat template: .* [0-9.]+ s of CPU time"
MEMORY = "the chat template: .* 256 MiB of memory"
LETTERS = "the chat template: .* 10[0-9]{5} characters"
WICKED = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": LONG,
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}": LONG,
    "{{ [] | slice(1000000000000) | max }}": LONG,  # an endless filter
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
    "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}": LONG,  # an endless comparison
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "its recursion is too deep",
    "{{ 'a' * 10**10 }}": MEMORY,
    "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}": MEMORY,
    "{{ 'a ' * 15000000 }}": LETTERS,
    "{{ ''.__class__.__mro__ }}": "SecurityError",
    "{{ messages.append(1) }}": "SecurityError",
    "{{ raise_exception('no\x1b\nway') }}": r"the chat template: no\\x1b\\nway$",
    "{{ '\\ud800' }}": "surrogates",
    "{% if %}": "the chat template: TemplateSyntaxError",
    "{{" + "(" * 5000 + ")" * 5000 + "}}": "its recursion is too deep",
}


@pytest.mark.parametrize("source", WICKED, ids=lambda source: source[:60])
def test_a_template_is_bounded(source, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.2 if WICKED[source] == LONG else 20)
    with pytest.raises(ValueError, match=WICKED[source]) as caught:
        ChatTemplate(source, {}).render(AB)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_template_that_was_ended_renders_the_next_conversation(monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    endless = "{% if messages | length > 1 %}{{ messages[2:] | slice(10**12) | max }}{% endif %}"
    template = ChatTemplate(endless + "{{ messages[0].content }}", {})
    limits = [resource.getrlimit(kind) for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    for _ in range(2):
        with pytest.raises(ValueError, match=LONG):
            template.render(AB)
        assert template.render(AB[:1]).text == "a"
    assert [resource.getrlimit(kind) for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)] == limits
    process = template._process
    del template
    assert process.returncode is not None


def test_json_in_a_template_is_that_of_transformers(oracle):
    source = "{{ messages | tojson(indent=2) }}{{ messages | tojson(sort_keys=true, separators=(',', ':')) }}"
    expected = oracle(said("é<&>'"), source, tokenize=False)
    assert ChatTemplate(source, {}).render(said("é<&>'")).text == expected


def test_the_template_comes_with_the_tokenizer(tmp_path):
    for tokenizer in (chat_tokenizer(), ByteTokenizer()):
        with pytest.raises(UsageError, match="--chat-template FILE"):
            ConversationReader(tokenizer)
    copy = tokenizer_from_metadata(ByteTokenizer(CHATML).metadata())
    assert copy.metadata()[TEMPLATE] == CHATML
    (conversation,) = ConversationReader(copy).read([("chat.jsonl", written(tmp_path, {"messages": AB}))])
    assert conversation.ids.tolist() == list(conversation.text.encode())
    assert answers_in(conversation) == ["b<|im_end|>"]


# ------------------------------------------------------------------------------------- messages and tools

SILENT = [{"weight": 0}, {"train": False}, {"train_on_turn": False}, {"training": False}, {"weight": 0.0}]


@pytest.mark.parametrize("name", ["chatml", "marked"])
@pytest.mark.parametrize("key", SILENT, ids=str)
def test_a_message_that_is_not_trained_stays_in_the_text(key, name, tmp_path):
    talk = said("a", "wrong", "b", "right")
    messages = [talk[0], talk[1] | key, talk[2], talk[3] | {next(iter(key)): 1}]
    speakers = [{"from": m["role"], "value": m["content"]} | m for m in messages]
    rows = {"messages": messages}, {"conversations": speakers}, {"messages": messages[:2]}
    plain, shared, none = read(tmp_path, name, *rows)
    assert plain.text == shared.text == reader(name).render(Conversation("x", tuple(talk))).text
    assert answers_in(plain) == answers_in(shared) == ["right<|im_end|>"]
    assert not none.counted.any()


NULLS = {
    "calls": ({"messages": [m | {"tool_calls": None, "name": None} for m in AB]}, AB),
    "no calls": ({"messages": [m | {"tool_calls": []} for m in AB]}, AB),
    "arguments": (
        {"messages": [
            CALLING
            | {"content": None, "tool_calls": [{"function": CALL | {"arguments": {"x": [], "y": None}}}]}
        ]},
        [CALLING | {"tool_calls": [{"function": CALL | {"arguments": {"x": [], "y": None}}}]}],
    ),
    "forms": ({"messages": None, "conversations": [], "prompt": "a", "completion": "b"}, AB),
    "empty": ({"messages": [AB[0], AB[1] | {"content": None, "tool_calls": []}]}, said("a", "")),
}  # fmt: skip


@pytest.mark.parametrize("case", NULLS)
def test_a_key_without_a_value_is_no_key(case):
    """Rows of Arrow tables have every key, with null for unused keys; TRL removes these keys too."""
    value, expected = NULLS[case]
    assert one_conversation("x:1", value).messages == tuple(expected)


TOOL_LIST = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TOOLS = "{% if tools %}T{{ tools | tojson }}{% endif %}" + CHATML


@pytest.mark.parametrize("tools", [TOOL_LIST, json.dumps(TOOL_LIST), [], "[]", "", None], ids=str)
@pytest.mark.parametrize("loss_on", [ANSWERS, ALL])
def test_tools_reach_the_template(tools, loss_on, tmp_path, oracle):
    reads = ConversationReader(chat_tokenizer(TOOLS), loss_on)
    (conversation,) = reads.read([("x", written(tmp_path, {"messages": AB, "tools": tools}))])
    expected = TOOL_LIST if tools and tools != "[]" else None
    assert conversation.text == oracle(AB, TOOLS, tools=expected, tokenize=False)
    assert answers_in(conversation) == ["b<|im_end|>"] if loss_on == ANSWERS else conversation.counted.all()


@pytest.mark.parametrize("name", ["chatml", "llama 3", "gemma"])
@pytest.mark.parametrize("loss_on", [ANSWERS, ALL])
def test_a_model_that_asks_for_bos_has_it_once(name, loss_on, tmp_path):
    """BOS is added once, as by llama.cpp, and counted tokens do not shift."""
    tokenizer, path = chat_tokenizer(TEMPLATES[name]), written(tmp_path, {"messages": AB})
    (bare,) = ConversationReader(tokenizer, loss_on).read([("x", path)])
    (conversation,) = ConversationReader(tokenizer, loss_on, tokenizer.bos).read([("x", path)])
    has_bos = bare.ids[0] == tokenizer.bos
    assert has_bos == (name != "chatml")
    assert conversation.ids.tolist() == ([] if has_bos else [tokenizer.bos]) + bare.ids.tolist()
    assert conversation.ids.tolist().count(tokenizer.bos) == 1
    assert conversation.counted[-len(bare.ids) :].tolist() == bare.counted.tolist()
    assert answers_in(conversation) == answers_in(bare)
    prompt = Chat(ChatTemplate(TEMPLATES[name], {"bos_token": "<s>"}), tokenizer).prompt_ids("a").tolist()
    assert (prompt[0], prompt.count(tokenizer.bos)) == (tokenizer.bos, 1)


PARTS = [m | {"content": [{"type": "text", "text": text} for text in (m["content"], "x")]} for m in AB]
WALKS = {  # (template, its text if contents are lists of parts, its text if they are strings)
    "both": (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endif %}{% endfor %}", "axbx", "ab"
    ),
    "parts": (
        "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
        "{% endif %}{% endfor %}{% endfor %}", "[user]ax[assistant]bx", "[user]a[assistant]b"
    ),
    "adds": ("{% for m in messages %}{{ '[' + m.content }}{% endfor %}", "[a\nx[b\nx", "[a[b"),
    "prints": ("{% for m in messages %}{{ m.content }};{% endfor %}", "a\nx;b\nx;", "a;b;"),
}  # fmt: skip


@pytest.mark.parametrize("name", WALKS)
def test_a_content_comes_as_the_template_takes_it(name, tmp_path):
    source, parts, texts = WALKS[name]
    reads = ConversationReader(chat_tokenizer(source))
    conversations = reads.read([("x", written(tmp_path, {"messages": PARTS}, {"messages": AB}))])
    assert [conversation.text for conversation in conversations] == [parts, texts]
