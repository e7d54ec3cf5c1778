"""Reads files with one conversation per line or row. The keys of a row show which of these forms it has.

    {"messages": [{"role": "user", "content": "..."}, ...]}
    {"prompt": "...", "completion": "..."}                               or both are lists of messages
    {"instruction": "...", "input": "...", "output": "..."}
    {"conversations": [{"from": "human", "value": "..."}, ...]}

Rows of preferences hold a better and a worse answer to one prompt, or one answer with a label (good or bad):

    {"prompt": "...", "chosen": "...", "rejected": "..."}                or lists of messages
    {"chosen": "...", "rejected": "..."}                                 the prompt is their common beginning
    {"prompt": "...", "completion": "...", "label": true}                for KTO

Each form may also have `tools` and `system`, a text. Other keys of a line are ignored; keys beside `role` and
`content` go to the template. A key of a row or message whose value is null counts as absent; in tables, so
does such a key inside other values.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from zero_mpi.data.conversations import row_sources
from zero_mpi.data.conversations.chat_template import Message
from zero_mpi.data.text_files import LINES
from zero_mpi.errors import FileError, UsageError, prefixed
from zero_mpi.files.foreign import quoted, show, shown
from zero_mpi.files.parse import parse_json
from zero_mpi.files.text_streams import each_line, is_text

T = TypeVar("T")

USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
INSTRUCTING = (SYSTEM, "developer")
TRAINED = ("weight", "train", "train_on_turn", "training")  # keys of a message; 0 or false: no loss on it
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # keys of a message that hold the model's thoughts
CALLERS = ("function_call", "tool_call")  # roles whose content is an assistant's tool call as JSON
SPEAKERS = {  # roles by their common names, in upper or lower case
    **dict.fromkeys(("human", "user", "prompter"), USER),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "bard", "bing", "model"), ASSISTANT),
    "system": SYSTEM,
    **dict.fromkeys(("tool", "function", "function_response", "observation"), TOOL),
    "developer": "developer",
}
EXPECTED = (
    "expected an object with messages, with prompt and completion, with instruction and output, or with "
    "conversations"
)
ROWS = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:\[\s*\{|\{\s*"
    rb'"(?:data|messages|conversations|prompt|instruction|chosen|rejected|completion)")'
)
KEYS = re.compile(rb'"(?:messages|completion|instruction|conversations)"\s*:')
OF_PAIRS, OF_LABELS = re.compile(rb'"rejected"\s*:'), re.compile(rb'"(?:rejected|label)"\s*:')
PAIR, LABELLED = ("chosen", "rejected"), ("prompt", "completion", "label")
FIRST_ROWS = 8  # number of valid rows that are parsed to recognise pairs
MOST_REASONS = 6  # number of reasons that are counted separately
VALUES = re.compile(r"\[\d+\]|, found .*|(?<=^no JSON):.*", re.DOTALL)  # parts of a reason that vary


class BadRows:
    """Counts of skipped invalid rows by reason, with the first row of each reason."""

    def __init__(self) -> None:
        self.counts, self._first = Counter[str](), dict[str, str]()

    def add(self, name: str, number: int, error: ValueError) -> None:
        key = VALUES.sub("", str(error))
        key = key if key in self.counts or len(self.counts) < MOST_REASONS else "other reasons"
        self.counts[key] += 1
        self._first.setdefault(key, f"{shown(str(error))} ({shown(name)}:{number})")

    def notes(self) -> list[str]:
        """Return one line with all reasons; an empty list if there are no bad rows."""
        reasons = "; ".join(f"{count:,} with {self._first[key]}" for key, count in self.counts.items())
        return [f"--skip-bad skipped {self.counts.total():,} rows: {reasons}"] if reasons else []


@dataclass(frozen=True)
class Conversation:
    """Messages of a line. name: file and line number; answers: index of the first message to learn from.

    A message is a dictionary with `role` and `content`. The loss counts assistant messages from `answers`
    on, except those in `silent`. tools: the tools passed to the template.
    """

    name: str
    messages: tuple[Message, ...]
    answers: int = 0
    silent: frozenset[int] = frozenset()
    tools: list[Any] | None = None

    @property
    def turns(self) -> list[int]:
        """Indices of the messages that the loss counts."""
        answers = range(self.answers, len(self.messages))
        return [n for n in answers if self.messages[n]["role"] == ASSISTANT and n not in self.silent]

    def with_system(self, text: str) -> Conversation:
        """Return the conversation with a system message in front, unless it has one already."""
        if any(message["role"] in INSTRUCTING for message in self.messages):
            return self
        silent = frozenset(place + 1 for place in self.silent)
        messages = ({"role": SYSTEM, "content": text}, *self.messages)
        return replace(self, messages=messages, answers=self.answers + 1, silent=silent)


Sides = tuple[Conversation | None, Conversation | None]
"""The better and the worse conversation of a row."""


def are_conversations(files: Sequence[tuple[str, Path]]) -> bool:
    """Return whether all files hold conversations; raises UsageError if only some do or one is unreadable."""
    kinds = [holds_conversations(path) for _, path in files]
    if any(kinds) and not all(kinds):
        one, other = (shown(files[kinds.index(kind)][1]) for kind in (True, False))
        raise UsageError(
            f"--data takes conversations or other data, not both: {one} has conversations, {other} does not: "
            "use files of one kind"
        )
    return any(kinds)


def holds_pairs(path: Path, labels: bool = False) -> bool:
    """Return whether a file holds pairs or, if `labels`, answers with labels; see `holds_conversations`.

    Nested keys of these names mean nothing, so the first rows are parsed.
    """
    forms = [PAIR, *[LABELLED] * labels]
    if not holds_conversations(path, OF_LABELS if labels else OF_PAIRS, forms):
        return False
    rows = read_conversations("", path, lambda row: row, BadRows(), lambda _, row: _row(row, ""))
    return any(
        row.keys() >= set(keys) and (keys != LABELLED or isinstance(row["label"], bool))
        for row in islice(rows, FIRST_ROWS)
        for keys in forms
    )


def holds_conversations(
    path: Path, first: re.Pattern[bytes] = KEYS, forms: Sequence[tuple[str, ...]] = ()
) -> bool:
    """Return whether a file holds conversations. A damaged table has none; other damage raises FileError.

    first: pattern of keys that show this in a JSON file; forms: sets of columns that show it in a table
    """
    suffix = row_sources.suffix_of(path)
    if suffix not in (*LINES, row_sources.DOCUMENT, *row_sources.TABLES):
        return False
    try:
        if suffix in row_sources.TABLES:
            columns = row_sources.columns_of(path)
            return any(all(key in columns for key in keys) for keys in forms or [keys for keys, _ in FORMS])
        with prefixed("--data"):
            head = row_sources.beginning(path, first.search)
    except UsageError as error:  # no library, or a damaged table
        if suffix not in row_sources.TABLES and isinstance(error, FileError):
            raise
        return False
    return first.search(head) is not None and (suffix in LINES or ROWS.match(head) is not None)


def read_conversations(
    name: str,
    path: Path,
    make: Callable[[Any], T],
    bad: BadRows | None = None,
    parse: Callable[[str, Any], Any] | None = None,
) -> Iterator[T]:
    """Yield make(conversation) for each conversation of a file. `name` is the file's name in errors.

    An invalid row, or a row for which `make` raises ValueError, is added to `bad` or becomes a FileError that
    names the file, the line, what was expected and what was found. `parse` replaces `one_conversation`.
    """

    def one(number: int, row: Any) -> T:
        return make((parse or one_conversation)(f"{name}:{number}", row))

    def fail(number: int, error: ValueError) -> None:
        if bad is None:
            place = f"--data {shown(path)}, {kind} {number}"
            raise FileError(f"{place}: {error}; --skip-bad skips such rows") from None
        bad.add(name, number, error)

    with prefixed("--data"):
        kind, rows = row_sources.rows_of(path)
    return each_line(path, "--data", one, rows, fail)


def one_conversation(name: str, row: Any) -> Conversation:
    """Return the conversation of a line. Raise ValueError if the line is not a conversation."""
    row = _row(row, EXPECTED)
    filled = {key for key, field in row.items() if field != []}
    forms = (form for names in (filled, row) for keys, form in FORMS if all(key in names for key in keys))
    form = next(forms, None)
    if form is None:
        raise ValueError(f"{EXPECTED}, found {_keys_of(row)}")
    earlier, messages = form(row)
    if not messages:
        raise ValueError("expected at least one message, found none")
    everything = (*earlier, *messages)
    silent = frozenset(place for place, message in enumerate(everything) if not _is_trained(message))
    return _with_system(row, Conversation(name, everything, len(earlier), silent, _tools(row.get("tools"))))


def one_pair(name: str, row: Any, labels: bool) -> Sides:
    """Return the better and the worse conversation of a line; a line with a label has only one of them.

    The loss counts only the answers, which follow the prompt. Raises ValueError for any other line.
    """
    expected = (
        "expected an object with chosen and rejected" + ", or with prompt, completion and label" * labels
    )
    row = _row(row, expected)
    tools = _tools(row.get("tools"))

    def side(key: str, earlier: list[Message], answer: list[Message]) -> Conversation:
        messages = (*earlier, *answer)
        conversation = _with_system(row, Conversation(f"{name} {key}", messages, len(earlier), tools=tools))
        if not conversation.turns:
            raise ValueError(f"{key}: expected an answer of the assistant, found none")
        return conversation

    if all(key in row for key in PAIR):
        earlier, chosen, rejected = _prompt_and_answers(row)
        return side("chosen", earlier, chosen), side("rejected", earlier, rejected)
    if not labels or not all(key in row for key in LABELLED):
        raise ValueError(f"{expected}, found {_keys_of(row)}")
    if not isinstance(label := row["label"], bool):
        raise ValueError(f"label: expected true or false, found {quoted(label)}")
    conversation = side("completion", *_by_prompt(row))
    return (conversation, None) if label else (None, conversation)


def _prompt_and_answers(row: Message) -> tuple[list[Message], list[Message], list[Message]]:
    """Return the messages of the prompt, of the better answer and of the worse answer."""
    prompt, kinds = row.get("prompt"), {type(row[key]) for key in PAIR}
    if kinds == {list}:
        better, worse = (_messages(key, row[key]) for key in PAIR)
        if isinstance(prompt, list):
            return _messages("prompt", prompt), better, worse
        if prompt is not None:
            better, worse = (_after_prompt(row, messages) for messages in (better, worse))
        at = _first_difference(better, worse)  # the common beginning of the two answers is the prompt
        return better[:at], better[at:], worse[at:]
    if list in kinds:
        raise ValueError("chosen and rejected: expected texts or lists of messages, found one of each")
    texts = [_text_message(ASSISTANT, row, key)["content"] for key in PAIR]
    if prompt is None:
        at = _first_difference(*texts)
        at -= at > 0 and texts[0][at - 1] == " "
        prompt, texts = texts[0][:at], [text[at:] for text in texts]
        if not prompt:
            raise ValueError("chosen and rejected: expected texts with a common beginning, or a prompt")
    is_list = isinstance(prompt, list)
    earlier = _messages("prompt", prompt) if is_list else [_text_message(USER, {"prompt": prompt}, "prompt")]
    chosen, rejected = ([{"role": ASSISTANT, "content": text}] for text in texts)
    return earlier, chosen, rejected


def _after_prompt(row: Message, messages: list[Message]) -> list[Message]:
    """Return an answer's messages with the text `prompt` as the first user message, unless they have one."""
    roles = [message["role"] for message in messages]
    at = next((place for place, role in enumerate(roles) if role not in INSTRUCTING), len(roles))
    prompt = [] if roles[at : at + 1] == [USER] else [_text_message(USER, row, "prompt")]
    return [*messages[:at], *prompt, *messages[at:]]


def _first_difference(a: Any, b: Any) -> int:
    """Return the first index at which two texts or lists differ, at most the last index of the shorter."""
    return min(common(a, b), max(0, min(len(a), len(b)) - 1))


def common(a: Any, b: Any) -> int:
    """Return the length of the common beginning of two texts or lists."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))


def _row(value: Any, expected: str) -> Message:
    """Return `value` without the keys whose value is null. Raise ValueError if `value` is not an object."""
    if not isinstance(value, dict):
        raise ValueError(f"{expected}, found {quoted(value)}")
    return {key: field for key, field in value.items() if field is not None}


def _keys_of(row: Message) -> str:
    return ", ".join(map(show, list(row)[:5])) or "nothing"


def _is_trained(message: Message) -> bool:
    """Return whether the keys of a message let the loss count it. Raise ValueError for an invalid value."""
    flags = {key: message[key] for key in TRAINED if key in message and message["role"] == ASSISTANT}
    for key, flag in flags.items():
        if flag not in (0, 1):
            expected = "0 or 1" if key == "weight" else "true or false"
            raise ValueError(f"{key} of a message: expected {expected}, found {quoted(flag)}")
    return all(flags.values())


def _tools(value: Any) -> list[Any] | None:
    """Return the tools in `value`, a list or its JSON text; None for no tools. Raise ValueError otherwise."""
    tools = None if value == "" else value
    if is_text(value) and value.strip():
        tools = parse_json(value.encode())
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"tools: expected a list, or the JSON text of a list, found {quoted(value)}")
    return tools or None


def _by_prompt(row: Message) -> tuple[list[Message], list[Message]]:
    """Return a prompt and its completion; texts become a user message and an assistant message."""
    kinds = {type(row[name]) for name in ("prompt", "completion")}
    if kinds == {list}:
        return _messages("prompt", row["prompt"]), _messages("completion", row["completion"])
    if list in kinds:
        raise ValueError(
            "prompt and completion: expected two texts, or two lists of messages, found one of each"
        )
    return [_text_message(USER, row, "prompt")], [_text_message(ASSISTANT, row, "completion")]


def _by_instruction(row: Message) -> tuple[list[Message], list[Message]]:
    """Return prompt and answer of a row of Alpaca; its input follows the instruction after a blank line."""
    question = _text_message(USER, row, "instruction")
    if row.get("input"):
        question["content"] += "\n\n" + _text_message(USER, row, "input")["content"]
    return [question], [_text_message(ASSISTANT, row, "output")]


def _by_speakers(row: Message) -> tuple[list[Message], list[Message]]:
    """Return an empty prompt, and the messages of ShareGPT's form."""
    messages = []
    for place, turn in enumerate(_message_list("conversations", row["conversations"])):
        label = f"conversations[{place}]"
        if not isinstance(turn, dict) or turn.get("from") is None:
            raise ValueError(f"{label}: expected an object with from and value, found {quoted(turn)}")
        others = {key: field for key, field in turn.items() if key not in ("from", "value")}
        message = {**others, "role": turn["from"], "content": turn.get("value")}
        messages.append(_message(label, message, "from", "value"))
    return [], messages


FORMS: tuple[tuple[tuple[str, ...], Callable[[Message], tuple[list[Message], list[Message]]]], ...] = (
    (("messages",), lambda row: ([], _messages("messages", row["messages"]))),  # OpenAI's form
    (("conversations",), _by_speakers),
    (("prompt", "completion"), _by_prompt),
    (("instruction", "output"), _by_instruction),
)


def _with_system(row: Message, conversation: Conversation) -> Conversation:
    """Return the conversation of a row with the row's system message, if the messages have none."""
    if not row.get("system"):
        return conversation
    return conversation.with_system(_text_message(SYSTEM, row, "system")["content"])


def _text_message(role: str, row: Message, key: str) -> Message:
    if not is_text(row[key]):
        raise ValueError(f"{key}: expected a text, found {quoted(row[key])}")
    return {"role": role, "content": row[key]}


def _message_list(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{key}: expected a list of messages, found {quoted(value)}")
    return value


def _messages(key: str, value: Any) -> list[Message]:
    return [_message(f"{key}[{place}]", message) for place, message in enumerate(_message_list(key, value))]


def _message(label: str, value: Any, of_role: str = "role", of_content: str = "content") -> Message:
    """Return a message; it may lack content if it calls tools. `of_role`, `of_content`: keys in errors."""
    if not isinstance(value, dict) or value.get("role") is None:
        raise ValueError(f"{label}: expected an object with role and content, found {quoted(value)}")
    value = {key: field for key, field in value.items() if field is not None}
    name, content = str(value["role"]).lower(), value.get("content")
    message: Message = {key: field for key, field in value.items() if field != []}
    if name in CALLERS:
        message["tool_calls"], name, content = _calls(f"{label}: {of_content}", content), ASSISTANT, ""
    if name not in SPEAKERS:
        names = ", ".join(SPEAKERS)
        raise ValueError(f"{label}: {of_role}: expected one of {names}, found {quoted(value['role'])}")
    message["role"] = SPEAKERS[name]
    if message["role"] == ASSISTANT and isinstance(message.get("function_call"), dict):
        message.setdefault("tool_calls", [{"type": "function", "function": message["function_call"]}])
    if (thoughts := next((message[key] for key in THOUGHTS if key in message), None)) is not None:
        message = {THOUGHTS[1]: thoughts, **message, THOUGHTS[0]: thoughts}  # as Transformers does
    if content is None and message["role"] == ASSISTANT and {"tool_calls", "function_call"} & value.keys():
        content = ""
    _check_content(f"{label}: {of_content}", content)
    return message | {"content": content}


def _check_content(label: str, content: Any) -> None:
    """Raise ValueError unless a message's content is a text or a list of parts that are texts."""
    parts: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not is_text(part.get("text")):
            expected = 'expected a text, or parts such as {"type": "text", "text": "..."}'
            value = part if isinstance(content, list) else content
            raise ValueError(f"{label}: {expected}, found {quoted(value)}")


def _calls(label: str, value: Any) -> list[Message]:
    """Return the tool calls in a JSON text: a call or a list. Raise ValueError for any other value."""
    try:
        content = parse_json(value) if is_text(value) else value
    except ValueError:
        content = None
    calls: list[Any] = content if isinstance(content, list) else [content]
    if not calls or not all(isinstance(call, dict) and is_text(call.get("name")) for call in calls):
        raise ValueError(f"{label}: expected a call as JSON with name and arguments, found {quoted(value)}")
    return [{"type": "function", "function": call} for call in calls]
