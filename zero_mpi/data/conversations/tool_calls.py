"""Tool calls in messages: arguments as objects or as JSON text, whichever the template shows.

Most templates write `arguments | tojson`, which puts a backslash before each quote of a text; others add the
text to another one, which fails for an object. So a template is probed once for both, as llama.cpp does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

from zero_mpi.files.parse import parse_json

Message = dict[str, Any]
KEY, VALUE = "zq_key", "zq_value"
TEXT = f'{{"{KEY}": "{VALUE}"}}'
NO_PARAMETERS = {"type": "object", "properties": {}, "required": []}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": NO_PARAMETERS}}


class CallForm(NamedTuple):
    """Form of calls that a template shows: the content of a message that only calls, and the arguments.

    If it shows arguments both as text and as objects, or as neither, they stay unchanged.
    """

    content: str | None = ""
    text: bool = True
    objects: bool = True

    def fitted(self, message: Message) -> Message:
        """Return a message whose calls have this form."""
        calls, content = list(map(self._call, message["tool_calls"])), message["content"]
        return message | {"tool_calls": calls, "content": self.content if content == "" else content}

    def _call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return call | {"function": self._call(call["function"])}
        return call | {"arguments": self._arguments(call["arguments"])} if "arguments" in call else call

    def _arguments(self, value: Any) -> Any:
        if self.text == self.objects or isinstance(value, str) is self.text:
            return value
        if self.text:
            return json.dumps(value, ensure_ascii=False)
        try:
            return parse_json(value)
        except ValueError:
            return value


def form_of(render: Callable[[list[Message], list[Any] | None], str]) -> CallForm:
    """Return the form that a template shows, with tools or without; `render` raises ValueError for others."""

    def shows(content: str | None, arguments: Any, tools: list[Any] | None, *texts: str) -> bool:
        function = {"name": "f", "arguments": arguments}
        call = {"id": "call12345", "type": "function", "function": function}  # an id in Mistral's form
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        try:
            found = render([{"role": "user", "content": "a"}, answer], tools)
        except ValueError:
            return False
        return all(text in found for text in texts)

    for content, tools in product(("", None), (None, [TOOL])):
        text, objects = shows(content, TEXT, tools, TEXT), shows(content, {KEY: VALUE}, tools, KEY, VALUE)
        if text or objects:
            return CallForm(content, text, objects)
    return CallForm()
