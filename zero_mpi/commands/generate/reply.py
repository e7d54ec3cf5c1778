"""What a model says to a prompt: tokens up to one that ends a text, or until there are enough."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zero_mpi.data import Tokenizer
from zero_mpi.device.types import Array
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
