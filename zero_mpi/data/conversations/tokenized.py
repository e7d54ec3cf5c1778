"""Encodes conversations as tokens and marks each token as counted in the loss or not.

The full text of a conversation is encoded. The number of bytes of each token is known, so cumulative lengths
show which tokens overlap an answer. A token that crosses the end of an answer counts, because the model has
to produce all of it.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise, tee
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data.conversations.answers import AnswerFinder, Span
from zero_mpi.data.conversations.chat_template import NO_INPUTS, TOOL_USE, TemplateInputs, template_of
from zero_mpi.data.conversations.formats import BadRows, Conversation, Sides, one_pair, read_conversations
from zero_mpi.data.documents import in_groups
from zero_mpi.data.tokenizers.byte import Tokenizer, with_bos
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.gguf_keys import TOKENS, GGUFKeys

Facts = Counter[str]
"""Counts for one row or many: tokens; counted: tokens in the loss; bos: rows that begin with BOS; turns:
trained segments; silent: answers with weight 0; tools: rows with tools; and the keys of `CAUTIONS`."""
CAUTIONS = {
    "left_out": "skipped conversations without an answer: {:,}",
    "unwritten": "answers that the chat template drops, so they are not trained on: {:,}",
    "unread": "conversations whose tools the chat template ignores: {:,}",
    "endless": "turns without an end-of-turn token: {:,}; the chat template ends them with plain text, so "
    "the model cannot learn to stop",
}


def description(of: Facts) -> str:
    """Return a text with the counts of one row or of many rows."""
    bos = f"bos in {of['bos']:,}" if of["conversations"] else "with bos" if of["bos"] else "no bos"
    text = f"{of['tokens']:,} tokens, {of['counted']:,} counted, {bos}, "
    text += f"end of turn in {of['turns'] - of['endless']:,} of {of['turns']:,}"
    text += f", answers not trained on: {of['silent']:,}" * (of["silent"] > 0)
    return text + f", tools used: {of['tools'] - of['unread']:,} of {of['tools']:,}" * (of["tools"] > 0)


class Totals:
    """Sums of the rows' counts, the largest number of tokens in a row, and a description of the first row."""

    def __init__(self) -> None:
        self.sums, self.longest, self.first = Facts(), 0, ""

    def add(self, name: str, facts: Facts) -> None:
        self.first = self.first or f"{shown(name)}: {description(facts)}"
        self.longest = max(self.longest, facts["tokens"])
        self.sums.update(facts, conversations=1, left_out=int(not facts["counted"]))

    def remarks(self) -> list[str]:
        total = f"conversations: {self.sums['conversations']:,}, {description(self.sums)}"
        return [total, f"first conversation: {self.first}"]

    def cautions(self) -> list[str]:
        return [text.format(self.sums[key]) for key, text in CAUTIONS.items() if self.sums[key]]


Files = Iterable[tuple[str, Path]]
ANSWERS, ALL = "answers", "all"
LOSSES = (ANSWERS, ALL)
GROUP = 1 << 20  # characters of text that are encoded together


class TokenizedConversation(NamedTuple):
    """A conversation as text and as tokens.

    name      file name and line number
    ids       (n,) uint16 or uint32; counted (n,) bool: whether the loss counts each id
    lengths   (n,) int64: bytes of text of each token
    facts     counts that are reported to the user
    """

    name: str
    text: str
    ids: NDArray[np.unsignedinteger[Any]]
    counted: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    facts: Facts

    @property
    def digest(self) -> bytes:
        """Digest of the text and of the tokens that count. It depends on the template and on --loss-on."""
        return hashlib.sha256(hashlib.sha256(self.text.encode()).digest() + self.counted.tobytes()).digest()


class RenderedConversation(NamedTuple):
    """A conversation as text, and the positions of the answers in it."""

    name: str
    text: str
    spans: list[Span]
    facts: Facts


class ConversationReader:
    """Reader of conversations with a tokenizer and the chat template that came with it.

    loss_on   tokens that the loss counts: "answers" of the assistant, or "all"
    bos       token to put before each conversation, if the template does not write it
    inputs    inputs that flags set for the template

    Raises UsageError if there is no template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        loss_on: str = ANSWERS,
        bos: int | None = None,
        inputs: TemplateInputs = NO_INPUTS,
    ) -> None:
        self._tokenizer, self._counts_all = tokenizer, loss_on == ALL
        self._bos, self._system = bos, inputs.system
        spelt = GGUFKeys(tokenizer.metadata()).texts(TOKENS) or []
        self._is_end = np.isin(np.arange(tokenizer.vocab_size), list(tokenizer.ends))
        ends = [spelt[place] for place in tokenizer.ends]
        self._finder = self._tools_finder = AnswerFinder(template_of(tokenizer, inputs), ends)
        if TOOL_USE in tokenizer.metadata():
            self._tools_finder = AnswerFinder(template_of(tokenizer, inputs, TOOL_USE), ends)

    def read(self, files: Files, bad: BadRows | None = None) -> Iterator[TokenizedConversation]:
        """Yield the conversations of files in order. Raise FileError, which names the line, or UsageError.

        Invalid rows are added to `bad`, if it is given.
        """
        rows = (read_conversations(name, path, self.render, bad) for name, path in files)
        yield from self._encode(chain.from_iterable(rows))

    def read_pairs(
        self, files: Files, bad: BadRows | None = None, labels: bool = False
    ) -> Iterator[list[TokenizedConversation | None]]:
        """Yield the better and the worse side of each pair in the files, as `read` does; see `one_pair`."""

        def make(pair: Sides) -> list[RenderedConversation | None]:
            return [None if side is None else self.render(side) for side in pair]

        parse = partial(one_pair, labels=labels)
        rows = (read_conversations(name, path, make, bad, parse) for name, path in files)
        pairs, rendered = tee(chain.from_iterable(rows))
        encoded = self._encode(side for pair in rendered for side in pair if side is not None)
        for pair in pairs:
            yield [None if side is None else next(encoded) for side in pair]

    def _encode(self, rendered: Iterable[RenderedConversation]) -> Iterator[TokenizedConversation]:
        for group in in_groups(rendered, lambda row: len(row.text), GROUP):
            encoded = self._tokenizer.encode_with_lengths([row.text for row in group])
            for row, (ids, lengths) in zip(group, encoded, strict=True):
                yield self._mark(row, ids, lengths)

    def _mark(
        self, row: RenderedConversation, ids: NDArray[np.unsignedinteger[Any]], lengths: NDArray[np.int64]
    ) -> TokenizedConversation:
        """Return a conversation whose answer tokens are marked. `lengths` (n,): bytes of each token.

        A bos in front has 0 bytes. Raises UsageError if the tokens do not cover the full text.
        """
        ends, size = np.cumsum(lengths), len(row.text.encode())
        if lengths.sum() != size:
            raise UsageError(
                f"--data {shown(row.name)}: expected a tokenizer with a token for every byte, found "
                f"{lengths.sum()} of {size} bytes in its tokens"
            )
        counted, begins = np.zeros(len(ids), bool), ends - lengths
        for start, stop in in_bytes(row.text, row.spans):
            if start < stop:
                counted[np.searchsorted(ends, start, "right") : np.searchsorted(begins, stop)] = True
        if len(with_bos(ids, self._bos)) > len(ids):
            ids, lengths = with_bos(ids, self._bos), np.insert(lengths, 0, 0)
            counted = np.insert(counted, 0, self._counts_all)
        turns = np.flatnonzero(counted & ~np.append(False, counted[:-1]))
        turns = turns[:1] if self._counts_all else turns  # with --loss-on all, the row is a single segment
        ended = np.add.reduceat(self._is_end[ids] & counted, turns) if turns.size else turns
        bos = int(ids[:1].tolist() == [self._tokenizer.bos])
        row.facts.update({"tokens": len(ids), "counted": int(counted.sum())}, bos=bos, turns=turns.size)
        row.facts["endless"] = int((ended == 0).sum())
        return TokenizedConversation(row.name, row.text, ids, counted, lengths, row.facts)

    def render(self, conversation: Conversation) -> RenderedConversation:
        """Return a conversation's text and trained spans. Raise ValueError, in one line, if that fails."""
        if self._system is not None:
            conversation = conversation.with_system(self._system)
        tools = conversation.tools
        silent = sum(place >= conversation.answers for place in conversation.silent)
        facts = Facts(silent=silent, tools=int(tools is not None), unwritten=0, unread=0)
        finder = self._finder if tools is None else self._tools_finder
        with finder.template.sharing_time():
            text, spans = finder.find(conversation, silent=self._counts_all)
            if tools is not None:
                facts["unread"] = int(not finder.reads_tools(conversation, text))
        if self._counts_all:  # all text before, between and after the silent turns
            borders = [0, *chain.from_iterable(spans), len(text)]
            spans = list(zip(borders[::2], borders[1::2], strict=True))
        else:
            facts["unwritten"] = max(0, len(conversation.turns) - sum(a < b for a, b in spans))
        return RenderedConversation(conversation.name, text, spans, facts)


def in_bytes(text: str, spans: Sequence[Span]) -> list[Span]:
    """Convert positions counted in characters to positions counted in UTF-8 bytes."""
    if text.isascii():
        return list(spans)
    places = sorted({place for span in spans for place in span})
    sizes = accumulate(len(text[start:stop].encode()) for start, stop in pairwise([0, *places]))
    offsets = dict(zip(places, sizes, strict=True))
    return [(offsets[start], offsets[stop]) for start, stop in spans]
