"""Tool calls in conversations get the same text and marks as in Transformers, in each form of row."""

import json
from functools import lru_cache

import pytest
from chat_templates import CALLING, HERMES, chat_tokenizer
from jinja2 import TemplateError
from test_conversations import answers_in, said, transformers_tokenizer, written
from transformers.utils.chat_template_utils import render_jinja_template

from zero_mpi.data.conversations.tokenized import ALL, ANSWERS, ConversationReader
from zero_mpi.errors import UsageError

OBJECT = {"city": 'Pé"rth', "n": [1, 2.5], "deep": {"a": True, "b": ""}}
TEXT = json.dumps(OBJECT, ensure_ascii=False)
TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TOOL}]


@lru_cache
def reader(template, loss_on=ANSWERS):
    return ConversationReader(chat_tokenizer(template), loss_on)


def talk(arguments, content=None):
    function = {"name": "look", "arguments": arguments}
    calls = [{"id": "abcdefghi", "type": "function", "function": function}]
    call = {"role": "assistant", "content": content, "tool_calls": calls}
    answer = {"role": "assistant", "content": "Here."}
    return [*said("where?"), call, {"role": "tool", "content": "here"}, answer]


THOUGHT = [*said("a"), {"role": "assistant", "content": "b", "reasoning": "hm"}]
ROWS = {
    "reasoning": THOUGHT,
    "plain": said("a", "b", "c", "d"),
    "system": said("a", "b", system="s"),
    "object": talk(OBJECT),
    "text": talk(TEXT),
    "empty content": talk(TEXT, ""),
    "with content": talk(OBJECT, "Let me see."),
    "null": [message | {"name": None} for message in talk(OBJECT)],
    "no JSON": talk("{no"),
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, *said("u", "b")[1:]],
}


def as_taken(messages, kind, content):
    copies = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None or key == "content"}
        if isinstance(message["content"], list):
            message["content"] = message["content"][0]["text"]
        if "tool_calls" in message:
            (call,) = message["tool_calls"]
            arguments = call["function"]["arguments"]
            if kind is dict and arguments == TEXT:
                arguments = OBJECT
            if kind is str and arguments == OBJECT:
                arguments = TEXT
            call = call | {"function": call["function"] | {"arguments": arguments}}
            message = message | {"tool_calls": [call], "content": message["content"] or content}
        copies.append(message)
    return copies


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", CALLING)
def test_texts_and_marks_are_those_of_transformers(name, row, tmp_path):
    template, kind = CALLING[name]
    messages = as_taken(ROWS[row], kind, None if name == "deepseek" else "")
    oracle, options = transformers_tokenizer(), {"chat_template": template, "tools": TOOLS}
    line = written(tmp_path, {"messages": ROWS[row], "tools": TOOLS})
    conversation = reader(template, ALL).read([("c", line)])
    try:
        if name == "deepseek":  # apply_chat_template drops a content of None, which this template needs
            special = {"bos_token": "<s>", "eos_token": "</s>"}
            text = render_jinja_template(conversations=[messages], **options, **special)[0][0]
        else:
            text = oracle.apply_chat_template(messages, tokenize=False, **options)
    except (TemplateError, TypeError):
        with pytest.raises(UsageError, match="chat template"):
            list(conversation)
        return
    (conversation,) = conversation
    assert conversation.text == text
    if "{% generation %}" in template:
        marks = oracle.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, **options
        )
        (conversation,) = reader(template).read([("c", line)])
        assert conversation.counted.tolist() == list(map(bool, marks["assistant_masks"]))


def rows_of_calls():
    function = {"name": "look", "arguments": TEXT}
    question, _, result, answer = talk(TEXT)
    call = {"role": "assistant", "content": None, "function_call": function}
    turns = [("human", "where?"), ("Function_Call", json.dumps(function))]
    turns += [("observation", "here"), ("gpt", "Here.")]
    return {
        "tool calls": talk(TEXT),
        "capitals": [message | {"role": message["role"].title()} for message in talk(TEXT)],
        "function call": [question, call, result, answer],
        "result of a function": [*talk(TEXT)[:2], result | {"role": "function"}, answer],
        "flat": [question, {"role": "assistant", "tool_calls": [function]}, result, answer],
        "role": [question, {"role": "function_call", "content": json.dumps([function])}, result, answer],
        "sharegpt": [{"from": speaker, "value": value} for speaker, value in turns],
        "object": [{"from": s, "value": json.loads(v) if s == "Function_Call" else v} for s, v in turns],
    }


@pytest.mark.parametrize("form", rows_of_calls())
def test_calls_of_all_forms_are_one_text_and_count(form, tmp_path):
    messages = rows_of_calls()[form]
    line = written(tmp_path, {"conversations" if "from" in messages[0] else "messages": messages})
    (conversation,) = reader(HERMES).read([("c", line)])
    call = f'<tool_call>\n{{"name": "look", "arguments": {TEXT}}}\n</tool_call><|im_end|>'
    assert [answer.strip() for answer in answers_in(conversation)] == [call, "Here.<|im_end|>"]


THINKING = HERMES.replace(
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}", "{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)


def test_a_call_counts_where_the_prompt_is_written_otherwise(tmp_path):
    """The prompt for an answer ends with `<think>`, which turns lack; comparing two texts finds the call."""
    assert THINKING != HERMES
    line = written(tmp_path, {"messages": talk(TEXT)})
    (conversation,) = reader(THINKING).read([("c", line)])
    assert f'"arguments": {TEXT}}}\n</tool_call><|im_end|>' in answers_in(conversation)[0]


BAD = ["{no", "7", "[]", '{"arguments": {}}', '[{"name": "a"}, 1]', '{"name": 1}', "[" * 9999, None, 5]


@pytest.mark.parametrize("value", BAD, ids=lambda value: str(value)[:20])
def test_a_call_that_is_none_is_named(value, tmp_path):
    line = written(tmp_path, {"messages": [*said("a"), {"role": "function_call", "content": value}]})
    with pytest.raises(UsageError, match=r"line 1: messages\[1\]: content: expected a call"):
        list(reader(HERMES).read([("c", line)]))
