"""Where in the text of a conversation the assistant speaks: what the loss counts.

Where a template marks that itself, by `{% generation %}`, its marks are taken. Else a turn begins where the
text of all messages before it ends, with what stands before an answer when one is asked for, and it ends with
the first token that ends a turn behind what it says. Templates may write a turn otherwise when more follows
(they leave out earlier thoughts, or move the system's message). Then the text is made a second time with
another content for the turn, and its content lies where the two texts differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import count

from zero_mpi.data.conversations.chat_template import ChatTemplate
from zero_mpi.data.conversations.formats import ASSISTANT, USER, Conversation, Message

Span = tuple[int, int]  # of letters: the first, and the one behind the last


class AnswerFinder:
    """Finds answers in the texts of a template. ends: how tokens are spelt that end a turn."""

    def __init__(self, template: ChatTemplate, ends: Sequence[str]) -> None:
        self._template = template
        self._ends = sorted(filter(None, ends), key=len, reverse=True)

    def find(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """The text of a conversation, and where in it the answers are; ValueError as the template raises it.

        A turn that the template leaves out is not among them.
        """
        messages = conversation.messages
        text, marked, _ = self._template.render(messages)
        if marked:
            return text, marked
        turns = [
            place
            for place, message in enumerate(messages)
            if message["role"] == ASSISTANT and place >= conversation.answers
        ]
        spans = [
            self._by_prompt(text, messages, turn) or self._by_content(text, messages, turn) for turn in turns
        ]
        return text, [span for span in spans if span is not None]

    def _by_prompt(self, text: str, messages: Sequence[Message], turn: int) -> Span | None:
        """What follows the text before a turn; None if that is written otherwise when more follows."""
        try:
            before = self._template.render(messages[:turn], generation_prompt=True).text
            known = self._template.render(messages[: turn + 1]).text
        except ValueError:  # not all templates take a part of a conversation
            return None
        start, stop = len(before), self._end_of_turn(known, len(before))
        return (start, stop) if known.startswith(before) and text.startswith(known[:stop]) else None

    def _end_of_turn(self, text: str, start: int) -> int:
        """The end of what is said from `start` on: of the first token that ends a turn of all at the end."""
        at, found = len(text), None
        while True:
            at = start + len(text[start:at].rstrip())
            end = next((end for end in self._ends if text.endswith(end, start, at)), None)
            if end is None:
                return at if found is None else found
            found, at = at, at - len(end)

    def _by_content(self, text: str, messages: Sequence[Message], turn: int) -> Span | None:
        """Where the text differs if a turn says something else, with the token that ends a turn after it."""
        content = messages[turn]["content"]
        letter = next(letter for letter in map(chr, count(ord("A"))) if letter not in content)
        other = [*messages[:turn], messages[turn] | {"content": letter}, *messages[turn + 1 :]]
        instead = self._template.render(other).text
        if instead == text:
            return None
        start = common(text, instead)
        stop = len(text) - common(text[start:][::-1], instead[start:][::-1])
        behind = stop + len(text[stop:]) - len(text[stop:].lstrip())
        ends = (*self._ends, self._closing)
        end = next((end for end in ends if text.startswith(end, behind)), "")
        return start, behind + len(end) if end else stop

    @cached_property
    def _closing(self) -> str:
        """Return the line that the template writes behind an answer, which need not be a token."""
        answer = "\ue000"
        said = [{"role": USER, "content": "A"}, {"role": ASSISTANT, "content": answer}]
        try:
            behind = self._template.render(said).text.partition(answer)[2]
        except ValueError:
            return ""
        return behind.strip().partition("\n")[0].rstrip()


def common(one: str, other: str) -> int:
    """How many letters two texts have in common at their beginnings."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # texts are compared by the interpreter, not letter by letter here
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
