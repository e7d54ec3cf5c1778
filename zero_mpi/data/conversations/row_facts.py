"""Counts of conversations and tokens for the user: how training reads the rows, and which rows it skips."""

from __future__ import annotations

import re
from collections import Counter

from zero_mpi.files.foreign import shown

Facts = Counter[str]
"""Counts of one row or many. tokens; counted: tokens in the loss; bos: rows that begin with BOS; turns:
trained segments; silent: answers with weight 0; tools: rows with tools; and the keys of `CAUTIONS`."""
CAUTIONS = {
    "left_out": "skipped conversations without an answer: {:,}",
    "unwritten": "answers that the chat template drops, so they are not trained on: {:,}",
    "unread": "conversations whose tools the chat template ignores: {:,}",
    "endless": "turns without an end-of-turn token: {:,}; the chat template ends them with plain text, so "
    "the model cannot learn to stop",
}
MOST_REASONS = 6  # reasons that are counted separately
VALUES = re.compile(r"\[\d+\]|, found .*|(?<=^no JSON):.*", re.DOTALL)  # parts that do not make a new reason


def described(of: Facts) -> str:
    """Return the facts on one row or on many as text."""
    bos = f"bos in {of['bos']:,}" if of["conversations"] else "with bos" if of["bos"] else "no bos"
    text = f"{of['tokens']:,} tokens, {of['counted']:,} counted, {bos}, "
    text += f"end of turn in {of['turns'] - of['endless']:,} of {of['turns']:,}"
    text += f", answers not trained on: {of['silent']:,}" * (of["silent"] > 0)
    return text + f", tools used: {of['tools'] - of['unread']:,} of {of['tools']:,}" * (of["tools"] > 0)


class Totals:
    """Sums of facts, the largest number of tokens in a row, and a text on the first row."""

    def __init__(self) -> None:
        self.sums, self.longest, self.first = Facts(), 0, ""

    def add(self, name: str, facts: Facts) -> None:
        """Add a row."""
        self.first = self.first or f"{shown(name)}: {described(facts)}"
        self.longest = max(self.longest, facts["tokens"])
        self.sums.update(facts, conversations=1, left_out=int(not facts["counted"]))

    def remarks(self) -> list[str]:
        """Return notes on what is read, in total and of the first row."""
        total = f"conversations: {self.sums['conversations']:,}, {described(self.sums)}"
        return [total, f"first conversation: {self.first}"]

    def cautions(self) -> list[str]:
        """Return notes on what is left out, or read differently than a row says."""
        return [text.format(self.sums[key]) for key, text in CAUTIONS.items() if self.sums[key]]


class BadRows:
    """Rows in error that are left out, counted by reason, each reason with its first row."""

    def __init__(self) -> None:
        self.counts, self._first = Counter[str](), dict[str, str]()

    def add(self, name: str, number: int, error: ValueError) -> None:
        """Count a row of a file."""
        key = VALUES.sub("", str(error))
        key = key if key in self.counts or len(self.counts) < MOST_REASONS else "other reasons"
        self.counts[key] += 1
        self._first.setdefault(key, f"{shown(str(error))} ({shown(name)}:{number})")

    def notes(self) -> list[str]:
        """Return a line on all reasons; none if there are no bad rows."""
        told = "; ".join(f"{count:,} with {self._first[key]}" for key, count in self.counts.items())
        return [f"--skip-bad skipped {self.counts.total():,} rows: {told}"] if told else []
