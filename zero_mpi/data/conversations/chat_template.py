"""A model's chat template. It turns messages into the same text as Hugging Face Transformers does.

A template is untrusted code and runs in a separate process (`sandbox`). Before the first rendering, trials
show whether the template accepts contents as text or as lists of parts, and in which form it accepts tool
calls. Most templates write `arguments | tojson`, which would quote a JSON string a second time. Other
templates append the arguments to a string, which fails if they are an object.
"""

import json
import marshal
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from zero_mpi.data.tokenizers.byte import Tokenizer
from zero_mpi.errors import FileError, UsageError, prefixed
from zero_mpi.files.foreign import shown
from zero_mpi.files.gguf_keys import TEMPLATE, TOKENS, GGUFKeys
from zero_mpi.files.open import read_file
from zero_mpi.files.parse import parse_json

Message = dict[str, Any]
Tools = list[Any] | None
TOOL_USE = f"{TEMPLATE}.tool_use"  # key of the template for rows with tools
DAY = "2024-07-26"  # the date that `strftime_now` returns by default
PROGRAM = str(Path(__file__).with_name("sandbox.py"))
SECONDS = 2.0  # CPU time for all renderings of one conversation; most templates need milliseconds
MOST_BYTES = 1 << 20  # limit in bytes of a template; most have a few thousand
NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep", "mask": "mask"}
REMEDY = "add --chat-template FILE, such as the chat_template.jinja of a similar model"
KEY, VALUE = "zq_key", "zq_value"  # strings for trials, which no template contains
NO_PARAMETERS = {"type": "object", "properties": {}, "required": []}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": NO_PARAMETERS}}


class TemplateInputs(NamedTuple):
    """Inputs that flags set for templates: variables, the system message, the date of `strftime_now`."""

    variables: Mapping[str, Any] = MappingProxyType({})
    system: str | None = None
    day: str = DAY


NO_INPUTS = TemplateInputs()


class RenderedText(NamedTuple):
    """Text of a conversation, and positions in it.

    marked    (start, stop) of each segment that the template marks as the assistant's
    begins    where the text of each message begins; None if the template has no loop over messages
    before    message number -> text of the earlier messages plus the generation prompt; None if rejected
    """

    text: str
    marked: list[tuple[int, int]]
    begins: list[int | None]
    before: dict[int, str | None]


class CallForm(NamedTuple):
    """Form in which a template takes tool calls. content: the content of a message that only has calls.

    text, objects: whether arguments may be JSON text, or objects; if both or neither, they are not converted.
    """

    content: str | None = ""
    text: bool = True
    objects: bool = True

    def adapt(self, message: Message) -> Message:
        calls, content = list(map(self._call, message["tool_calls"])), message["content"]
        return message | {"tool_calls": calls, "content": self.content if content == "" else content}

    def _call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return call | {"function": self._call(call["function"])}
        if "arguments" not in call or self.text == self.objects:
            return call
        arguments = call["arguments"]
        if isinstance(arguments, str) is self.text:
            return call
        if self.text:
            return call | {"arguments": json.dumps(arguments, ensure_ascii=False)}
        with suppress(ValueError):
            return call | {"arguments": parse_json(arguments)}
        return call


class EndlessTemplate(Exception):
    """Raised if a template uses up its time or its process ends; the conversation is then invalid."""


class ChatTemplate:
    """A chat template with its special tokens. Raises UsageError if Jinja cannot parse the template.

    The template's process is restarted after a rendering that took too long. All renderings of a conversation
    share `SECONDS` of CPU time; for the first conversation this includes the trials.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], inputs: TemplateInputs = NO_INPUTS) -> None:
        self._source, self._day, self._variables = source, inputs.day, {**tokens, **inputs.variables}
        self._seconds_left, self._is_shared = SECONDS, False
        self.marks = re.search(r"\{%[-+]?\s*generation\b", source) is not None  # whether it marks answers
        try:
            self._process = self._new_process()
        except (ValueError, OSError, EndlessTemplate) as error:
            raise UsageError(str(error)) from None

    def render(
        self,
        messages: Sequence[Message],
        generation_prompt: bool = False,
        tools: Tools = None,
        prompts: Sequence[int] = (),
    ) -> RenderedText:
        """Return the text of messages. `generation_prompt`: append the text that asks for an answer.

        `prompts`: message numbers; for each, the earlier messages plus the generation prompt are rendered.
        Raises ValueError with a message of one line if the template fails for any reason.
        """
        with self.sharing_time():
            fitted = [self._adapt(message) for message in messages]
            return self._render(fitted, generation_prompt, tools, prompts)

    @contextmanager
    def sharing_time(self) -> Iterator[None]:
        """Let all renderings in the `with` block share `SECONDS`. Raise ValueError if they need more time."""
        if self._is_shared:
            yield
            return
        self._is_shared = True
        try:
            yield
        except EndlessTemplate as error:
            raise ValueError(str(error)) from None
        finally:
            self._seconds_left, self._is_shared = SECONDS, False

    def _adapt(self, message: Message) -> Message:
        """Return the message with its content as the template accepts it: as text or as a list of parts."""
        if isinstance(message.get("tool_calls"), list):
            message = self._calls.adapt(message)
        content = message["content"]
        if isinstance(content, list):
            joined = "\n".join(part["text"] for part in content)
            return message if self._takes_parts else message | {"content": joined}
        if content is not None and not self._takes_text and self._takes_parts:
            return message | {"content": parts_of(content)}
        return message

    @cached_property
    def _calls(self) -> CallForm:
        for content, tools in product(("", None), (None, [TOOL])):
            as_text = f'{{"{KEY}": "{VALUE}"}}'
            text = self._shows_call(content, as_text, tools, as_text)
            objects = self._shows_call(content, {KEY: VALUE}, tools, KEY, VALUE)
            if text or objects:
                return CallForm(content, text, objects)
        return CallForm()

    def _shows_call(self, content: str | None, arguments: Any, tools: Tools, *texts: str) -> bool:
        function = {"name": "f", "arguments": arguments}
        call = {"id": "call12345", "type": "function", "function": function}  # Mistral needs nine characters
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        rendered = self._trial([{"role": "user", "content": "a"}, answer], tools)
        return all(text in rendered for text in texts)

    @cached_property
    def _takes_text(self) -> bool:
        return self._shows("\ue000", "\ue000")

    @cached_property
    def _takes_parts(self) -> bool:
        return self._shows(parts_of("\ue000", "\ue001"), "\ue000", "\ue001")

    def _shows(self, content: Any, *texts: str) -> bool:
        """Return whether the template prints the `texts` of the content, and not the list that holds them."""
        rendered = self._trial([{"role": "user", "content": content}], None)
        as_list = any(f"{q}text{q}: {q}\ue000" in rendered for q in "'\"")
        return all(text in rendered for text in texts) and not as_list

    def _trial(self, messages: list[Message], tools: Tools) -> str:
        """Return the text of messages; empty if the template rejects them."""
        try:
            return self._render(messages, False, tools).text
        except ValueError:
            return ""

    def _render(
        self, messages: list[Message], generation_prompt: bool, tools: Tools, prompts: Sequence[int] = ()
    ) -> RenderedText:
        variables: dict[str, Any] = {"tools": tools, "documents": None, **self._variables}
        variables |= {"messages": messages, "add_generation_prompt": generation_prompt}
        if self._process.returncode is not None:
            self._process = self._new_process()
        reply = self._ask(self._process, variables | {"prompts": list(prompts)})
        before = [None if text is None else text.decode() for text in reply["before"]]
        text: str = reply["text"].decode()
        return RenderedText(text, reply["marked"], reply["begins"], dict(zip(prompts, before, strict=True)))

    def _new_process(self) -> subprocess.Popen[bytes]:
        command, pipe = [sys.executable, "-P", PROGRAM], subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        weakref.finalize(self, end_process, process)
        self._ask(process, {"source": self._source, "day": self._day})
        return process

    def _ask(self, process: subprocess.Popen[bytes], request: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the template's process and return its answer.

        Raises ValueError if the template fails, and EndlessTemplate if the process had to be ended.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            payload = marshal.dumps(request | {"seconds": self._seconds_left})
            process.stdin.write(len(payload).to_bytes(8, "little") + payload)
            process.stdin.flush()
            size = int.from_bytes(process.stdout.read(8), "little")
            reply: dict[str, Any] = marshal.loads(process.stdout.read(size))
        except BaseException as error:
            status, self._seconds_left = end_process(process), 0.0  # so that no request gets this answer
            if not isinstance(error, BrokenPipeError | EOFError):
                raise
            timeout = f"it takes more than {SECONDS:g} s of CPU time for a conversation"
            reason = timeout if status == -signal.SIGPROF else f"its process ended with status {status}"
            raise EndlessTemplate(f"the chat template: {reason}") from None
        self._seconds_left = reply["left"]
        if "error" in reply:
            raise ValueError(f"the chat template: {shown(reply['error'])}")
        return reply


def parts_of(*texts: str) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


def end_process(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    process.communicate()
    return process.returncode


def template_of(
    tokenizer: Tokenizer, inputs: TemplateInputs = NO_INPUTS, key: str = TEMPLATE
) -> ChatTemplate:
    """Return the chat template that came with a tokenizer. Raise UsageError if there is none.

    The template may refer to special tokens by their common names, such as bos_token.
    """
    keys = GGUFKeys(tokenizer.metadata())
    source = keys.text(key)
    if source is None:
        raise UsageError(f"the tokenizer has no chat template: {REMEDY}")
    tokens = keys.texts(TOKENS) or []
    ids = {hf: keys.token_id(gguf, len(tokens)) for gguf, hf in NAMES.items()}
    special = {f"{name}_token": tokens[place] for name, place in ids.items() if place is not None}
    return ChatTemplate(source, special, inputs)


def asks_day(tokenizer: Tokenizer) -> bool:
    keys = tokenizer.metadata().items()
    return any(key.startswith(TEMPLATE) and "strftime_now" in str(text) for key, text in keys)


def read_template(path: str | Path) -> str:
    """Return the text of a template file. Raise FileError if it cannot be read."""
    with prefixed("--chat-template"):
        try:
            return read_file(path, MOST_BYTES, "a chat template").decode()
        except UnicodeDecodeError as error:
            problem = f"expected a template in UTF-8, found other bytes at {error.start}"
            raise FileError(f"{shown(path)}: {problem}") from None
