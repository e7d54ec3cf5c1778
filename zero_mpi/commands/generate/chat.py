"""A conversation with a model: its turns by the model's template, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from zero_mpi.commands.generate.reply import Reply
from zero_mpi.data import Tokenizer
from zero_mpi.data.bos import AUTO, bos_of, with_bos
from zero_mpi.data.conversations.chat_template import ChatTemplate
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError

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
