"""Answer of a model to a prompt, up to a token that ends a text, and a conversation of such answers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zero_mpi.data import Tokenizer
from zero_mpi.data.control_tokens import AUTO, bos_of, with_bos
from zero_mpi.data.conversations.chat_template import ChatTemplate
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.train.text_model import TextModel

STOP, LENGTH = "stop", "length"  # why an answer is over, in the words of most servers


@dataclass(frozen=True)
class Reply:
    """The bytes of an answer, how many tokens they are, and why it is over: STOP or LENGTH."""

    text: bytes
    tokens: int
    finish_reason: str


@dataclass(frozen=True)
class Speaker:
    """A model with its tokenizer, and how the next token is drawn (the flags)."""

    model: TextModel
    tokenizer: Tokenizer
    options: argparse.Namespace

    def answer(self, prompt: Sequence[int] | Array, say: Callable[[bytes], object]) -> Reply:
        """What follows the ids of a prompt, said piece by piece as it comes."""
        options, pieces = self.options, list[bytes]()
        ids = self.model.generate(
            prompt,
            options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=options.seed,
        )
        for token in ids:
            if token in self.tokenizer.ends:
                return Reply(b"".join(pieces), len(pieces), STOP)
            pieces.append(self.tokenizer.decode([token]))
            say(pieces[-1])
        return Reply(b"".join(pieces), len(pieces), LENGTH)


Message = dict[str, str]


@dataclass
class Chat:
    """What was said so far, as messages of role and content; `system` stands before them."""

    template: ChatTemplate
    tokenizer: Tokenizer
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})

    def asked(self, text: str) -> Array:
        """Return the ids of the conversation with one more question; UsageError where the template fails."""
        self.messages.append({"role": "user", "content": text})
        try:
            rendered = self.template.render(self.messages, generation_prompt=True)
        except ValueError as error:
            raise UsageError(f"--chat: {error}") from None
        return with_bos(self.tokenizer.encode(rendered.text, special=True), bos_of(self.tokenizer, AUTO))

    def answered(self, answer: Reply) -> None:
        """What the model said becomes a part of the conversation."""
        self.messages.append({"role": "assistant", "content": answer.text.decode("utf-8", "replace")})
