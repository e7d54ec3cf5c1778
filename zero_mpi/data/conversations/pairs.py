"""Rows of preferences: a better and a worse answer to one prompt, or one answer with a label.

    {"prompt": "...", "chosen": "...", "rejected": "..."}         or lists of messages
    {"chosen": "...", "rejected": "..."}                          the prompt is how both begin
    {"prompt": "...", "completion": "...", "label": true}         for KTO

A row becomes two conversations, the better one first, of which only the answers count. These follow the
prompt; `tools` may stand beside each form.
"""

from __future__ import annotations

from typing import Any

from zero_mpi.data.conversations.formats import (
    ASSISTANT,
    USER,
    Conversation,
    Message,
    by_prompt,
    messages_of,
    said,
    tools_of,
    without_nulls,
)
from zero_mpi.files.foreign import quoted, show

PAIR, LABELLED = ("chosen", "rejected"), ("prompt", "completion", "label")
Sides = tuple[Conversation | None, Conversation | None]
EXPECTED = "expected an object with chosen and rejected"


def one_pair(name: str, value: Any, labels: bool) -> Sides:
    """Return the better and the worse conversation of a line; with `labels` one may be missing.

    Raises ValueError for anything else.
    """
    expected = f"{EXPECTED}, or with prompt, completion and label" if labels else EXPECTED
    if not isinstance(value, dict):
        raise ValueError(f"{expected}, found {quoted(value)}")
    value = without_nulls(value)
    tools = tools_of(value.get("tools"))

    def side(key: str, earlier: list[Message], answer: list[Message]) -> Conversation:
        found = Conversation(f"{name} {key}", (*earlier, *answer), len(earlier), tools=tools)
        if not found.turns:
            raise ValueError(f"{key}: expected an answer of the assistant, found none")
        return found

    if all(key in value for key in PAIR):
        earlier, *answers = prompt_and_answers(value)
        return side(PAIR[0], earlier, answers[0]), side(PAIR[1], earlier, answers[1])
    if not labels or not all(key in value for key in LABELLED):
        raise ValueError(f"{expected}, found {', '.join(map(show, list(value)[:5])) or 'nothing'}")
    if not isinstance(label := value["label"], bool):
        raise ValueError(f"label: expected true or false, found {quoted(label)}")
    found = side("completion", *by_prompt(value))
    return (found, None) if label else (None, found)


def prompt_and_answers(value: Message) -> tuple[list[Message], list[Message], list[Message]]:
    """Return the messages of the prompt, and those of both answers."""
    prompt, kinds = value.get("prompt"), {type(value[key]) for key in PAIR}
    if kinds == {list}:
        answers = [messages_of(key, value[key]) for key in PAIR]
        if isinstance(prompt, list):
            return messages_of("prompt", prompt), answers[0], answers[1]
        at = first_difference(*answers)  # a prompt as text is how both begin
        return answers[0][:at], answers[0][at:], answers[1][at:]
    if list in kinds:
        raise ValueError("chosen and rejected: expected texts or lists of messages, found one of each")
    texts = [said(ASSISTANT, value, key)["content"] for key in PAIR]
    if prompt is None:
        at = first_difference(*texts)
        at -= at > 0 and texts[0][at - 1] == " "
        prompt, texts = texts[0][:at], [text[at:] for text in texts]
        if not prompt:
            raise ValueError("chosen and rejected: expected texts with a common beginning, or a prompt")
    is_list = isinstance(prompt, list)
    earlier = messages_of("prompt", prompt) if is_list else [said(USER, {"prompt": prompt}, "prompt")]
    chosen, rejected = ([{"role": ASSISTANT, "content": text}] for text in texts)
    return earlier, chosen, rejected


def first_difference(a: Any, b: Any) -> int:
    """Return the first place where two texts or lists differ; the last common one if none does."""
    least = min(len(a), len(b))
    return next((place for place in range(least) if a[place] != b[place]), max(0, least - 1))
