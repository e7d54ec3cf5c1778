"""Finds the assistant's answers in the text of a conversation, because the loss counts only their tokens.

If a template marks the answers with `{% generation %}`, its marks are used. Otherwise an answer begins where
the text of all earlier messages plus the generation prompt ends, and it ends with the first end-of-turn token
after its content. Some templates write a turn differently if more messages follow (they drop earlier
thoughts, or move the system message). Then the text is rendered a second time with other content for the
turn, and the answer is the part in which the two texts differ.

Rendering a text for each turn would take quadratic time. So the position of each message comes from the
template's loop over messages, and the generation prompt is rendered once for each role that precedes an
answer. A template whose loop hides the positions is rendered for each turn, for at most `MOST_TURNS` turns.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import count, pairwise

from zero_mpi.data.conversations.chat_template import ChatTemplate, Message, RenderedText, Tools
from zero_mpi.data.conversations.formats import ASSISTANT, USER, Conversation, common

Span = tuple[int, int]  # start and stop, in characters
Spans = dict[int, Span | None]  # keyed by message number
Groups = dict[object, list[int]]  # turns, keyed by the role of the message before them
Messages = Sequence[Message]
MOST_TURNS = 64
BLANKS = re.compile(r"\s*")


class AnswerFinder:
    """Finder of answers in texts that a template rendered. ends: spellings of the tokens that end a turn."""

    def __init__(self, template: ChatTemplate, ends: Sequence[str]) -> None:
        self.template = template
        self._ends = sorted(filter(None, ends), key=len, reverse=True)

    def find(self, conversation: Conversation, silent: bool = False) -> tuple[str, list[Span]]:
        """Return a conversation's text and the positions of its answers. Raise ValueError if rendering fails.

        Answers that the template drops have no position. silent: find the answers without loss instead.
        """
        turns = sorted(conversation.silent) if silent else conversation.turns
        messages = conversation.messages
        by_role = Groups()
        for turn in [] if self.template.marks else turns:
            by_role.setdefault(messages[turn - 1]["role"] if turn else None, []).append(turn)
        firsts = [group[0] for group in by_role.values()]
        rendered = self.template.render(messages, tools=conversation.tools, prompts=firsts)
        if not turns:
            return rendered.text, []
        if self.template.marks:
            return rendered.text, self._marked_spans(rendered, messages, turns)
        spans = self._by_loop(rendered, conversation, by_role)
        spans = spans or self._by_renders(rendered, conversation, turns)
        return rendered.text, [span for turn in turns if (span := spans[turn]) is not None]

    def reads_tools(self, conversation: Conversation, text: str) -> bool:
        """Return whether a conversation's text depends on its tools."""
        return self._text(conversation.messages, None) != text  # the template may fail without the tools

    def _marked_spans(self, rendered: RenderedText, messages: Messages, turns: Sequence[int]) -> list[Span]:
        """Return the spans that the template marks in these turns. Raise ValueError if that is ambiguous."""
        answers = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT]
        if len(turns) == len(answers) or not rendered.marked:
            return rendered.marked
        places = segments(rendered)
        if places.keys() >= set(answers):
            spans = [places[n] for n in turns]
            return [mark for mark in rendered.marked if any(start <= mark[0] < stop for start, stop in spans)]
        if len(rendered.marked) == len(answers):
            return [mark for n, mark in zip(answers, rendered.marked, strict=True) if n in turns]
        raise ValueError(
            "the chat template: expected a {% generation %} block around each answer, because some "
            "answers are not trained on"
        )

    def _by_loop(self, rendered: RenderedText, conversation: Conversation, by_role: Groups) -> Spans:
        """Return each turn's answer, found by the messages' positions; {} if a turn's position is unknown."""
        places, spans = segments(rendered), Spans()
        turns = {turn for group in by_role.values() for turn in group}
        if not places.keys() >= turns:
            return {}
        text = rendered.text
        for group in by_role.values():
            begin, prefix = places[group[0]][0], rendered.before[group[0]]
            if prefix is None or not text.startswith(prefix):  # then try the last turn's prefix
                begin = places[group[-1]][0]
                prefix = self._text(conversation.messages[: group[-1]], conversation.tools, True)
                if prefix is None or not text.startswith(prefix):
                    continue
            lead, size = prefix[begin:], len(prefix) - begin
            for turn in group:
                start, stop = places[turn]
                if text.startswith(lead, start, stop):
                    start += size  # `size` is negative if `prefix` ends before the message begins
                    spans[turn] = start, self._end_of_turn(text, start, stop)
        if rest := turns - spans.keys():
            variant = self._variant(rendered, conversation, rest)
            variant_places = segments(variant)
            if not variant_places.keys() >= rest:
                return {}
            for turn in rest:
                spans[turn] = self._difference(text, places[turn], variant.text, variant_places[turn])
        return spans

    def _by_renders(self, rendered: RenderedText, conversation: Conversation, turns: Sequence[int]) -> Spans:
        """Return each turn's answer, found by rendering the conversation for each turn."""
        if len(turns) > MOST_TURNS:
            raise ValueError(
                f"expected at most {MOST_TURNS} answers, found {len(turns)}: the chat template has no loop "
                "over messages; mark its answers with {% generation %}"
            )
        text, spans = rendered.text, Spans()
        messages, tools = conversation.messages, conversation.tools
        for turn in turns:
            prefix = self._text(messages[:turn], tools, True)
            partial = self._text(messages[: turn + 1], tools)
            if prefix is not None and partial is not None and partial.startswith(prefix):
                stop = self._end_of_turn(partial, len(prefix), len(partial))
                if text.startswith(partial[:stop]):
                    spans[turn] = len(prefix), stop
                    continue
            variant = self._variant(rendered, conversation, {turn}).text
            spans[turn] = self._difference(text, (0, len(text)), variant, (0, len(variant)))
        return spans

    def _text(self, messages: Messages, tools: Tools, generation_prompt: bool = False) -> str | None:
        """Return the text of some messages; None if the template rejects them."""
        try:
            return self.template.render(messages, generation_prompt, tools).text
        except ValueError:
            return None

    def _variant(self, rendered: RenderedText, conversation: Conversation, turns: set[int]) -> RenderedText:
        """Render the messages; a character that the text lacks replaces the content of `turns`."""
        letters = set(rendered.text)
        filler = {"content": next(letter for letter in map(chr, count(ord("A"))) if letter not in letters)}
        calls = ("tool_calls", "function_call")
        variant = list(conversation.messages)
        for turn in turns:
            variant[turn] = {k: v for k, v in variant[turn].items() if k not in calls} | filler
        return self.template.render(variant, tools=conversation.tools)

    def _end_of_turn(self, text: str, start: int, at: int) -> int:
        """Return where the turn text[start:at] ends: after the first of the end-of-turn tokens at its end."""
        place = None
        while True:
            while at > start and text[at - 1].isspace():
                at -= 1
            end = next((end for end in self._ends if text.endswith(end, start, at)), None)
            if end is None:
                return at if place is None else place
            place, at = at, at - len(end)

    def _difference(self, text: str, place: Span, variant: str, variant_place: Span) -> Span | None:
        """Return where `text` differs from `variant`, with the end of turn after it; None if it does not."""
        segment, replacement = text[slice(*place)], variant[slice(*variant_place)]
        if segment == replacement:
            return None
        start = common(segment, replacement)
        stop = place[1] - common(segment[start:][::-1], replacement[start:][::-1])
        tail = BLANKS.match(text, stop).end()  # type: ignore[union-attr]  # BLANKS always matches
        ends = (*self._ends, self._closing)
        end = next((end for end in ends if text.startswith(end, tail)), "")
        return place[0] + start, tail + len(end) if end else stop

    @cached_property
    def _closing(self) -> str:
        """First line that the template writes after an answer; it need not be a token."""
        answer = "\ue000"
        messages = [{"role": USER, "content": "A"}, {"role": ASSISTANT, "content": answer}]
        tail = (self._text(messages, None) or "").partition(answer)[2]
        return tail.strip().partition("\n")[0].rstrip()


def segments(rendered: RenderedText) -> dict[int, Span]:
    """Return message number -> (start, stop) in the text; {} if the template's loop does not show them.

    In a macro, all messages seem to begin at one place, because the macro's text is written at its end.
    """
    begins = {place: begin for place, begin in enumerate(rendered.begins) if begin is not None}
    starts = list(begins.values())
    if starts != sorted(starts) or 1 == len(set(starts)) < len(starts):
        return {}
    return dict(zip(begins, pairwise([*starts, len(rendered.text)]), strict=True))
