"""A model's chat template: the text that it makes of messages, as Transformers would make it.

Jinja2, one of the dependencies, is loaded when there is a template. https://jinja.palletsprojects.com
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zero_mpi.data.tokenizers.byte import Tokenizer
from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.gguf_keys import TEMPLATE, TOKENS, GGUFKeys
from zero_mpi.files.json_lines import is_text
from zero_mpi.files.open import read_file

if TYPE_CHECKING:
    from zero_mpi.data.conversations.formats import Message

MOST_BYTES = 1 << 20  # of a template: those of models have some thousands
MOST_LETTERS = 1 << 26  # of a conversation's text
NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep", "mask": "mask"}
REMEDY = "give one with --chat-template FILE, such as the chat_template.jinja of a model like it"


class RenderedText(NamedTuple):
    """A text, and from where to where the template itself says that the assistant speaks."""

    text: str
    marked: list[tuple[int, int]]


class ChatTemplate:
    """A template with the special tokens that it may name. Raises UsageError for one that does not parse."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        from zero_mpi.data.conversations.sandbox import Sandbox

        self._sandbox, self._tokens = Sandbox(), dict(tokens)
        try:
            with self._sandbox.bounded():
                self._template = self._sandbox.compiled(source)
        except Exception as error:
            raise UsageError(f"the chat template is none that Jinja2 takes: {told(error)}") from None

    def render(self, messages: Sequence[Message], generation_prompt: bool = False) -> RenderedText:
        """The text of messages; `generation_prompt`: with what comes before an answer.

        Raises ValueError, in one line, for whatever goes wrong in the template.
        """
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._tokens}
        variables |= {"messages": list(messages), "add_generation_prompt": generation_prompt}
        parts, size = list[str](), 0
        try:
            with self._sandbox.bounded():
                for part in self._sandbox.parts(self._template, variables):
                    parts.append(part)
                    if (size := size + len(part)) > MOST_LETTERS:
                        raise OverflowError(f"the text has more than {MOST_LETTERS} letters")
                text = "".join(parts)
        except Exception as error:  # a stranger's program may raise anything
            raise ValueError(f"the chat template: {told(error)}") from None
        if not is_text(text):
            raise ValueError("the chat template: the text has halves of letters, which UTF-8 cannot hold")
        return RenderedText(text, self._sandbox.marked)


def told(error: Exception) -> str:
    """What went wrong in a template, in one line."""
    name = type(error).__name__
    return {
        "Endless": "it takes too long",
        "MemoryError": "it takes too much memory",
        "RecursionError": "it calls itself too deeply",
        "TemplateError": shown(str(error)),
    }.get(name, f"{name}: {shown(str(error))}")


def template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template that came with a tokenizer; raises UsageError where there is none."""
    metadata = tokenizer.metadata()
    keys = GGUFKeys(metadata)
    source = keys.text(TEMPLATE)
    if source is None:
        raise UsageError(f"the tokenizer has no chat template: {REMEDY}")
    return ChatTemplate(source, special_tokens(keys))


def special_tokens(keys: GGUFKeys) -> dict[str, str]:
    """What a template calls the special tokens, as bos_token, and how they are spelt."""
    tokens = keys.texts(TOKENS) or []
    ids = {theirs: keys.token_id(ours, len(tokens)) for ours, theirs in NAMES.items()}
    return {f"{name}_token": tokens[place] for name, place in ids.items() if place is not None}


def read_template(path: str | Path) -> str:
    """The text of a file; raises FileError."""
    try:
        return read_file(path, MOST_BYTES, "a chat template").decode()
    except FileError as error:
        raise FileError(f"--chat-template {error}") from None
    except UnicodeDecodeError as error:
        raise FileError(
            f"--chat-template {shown(path)}: expected a template in UTF-8, found other bytes at {error.start}"
        ) from None
