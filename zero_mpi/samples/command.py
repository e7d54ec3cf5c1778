"""`python -m zero_mpi.samples MODEL --data chat.jsonl`: conversations as a model is given them in training.

What counts is coloured on a terminal, and stands between « and » elsewhere and where NO_COLOR is set.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from zero_mpi.checkpoint.weights import open_weights
from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import percent, plural, write
from zero_mpi.config.bounds import within
from zero_mpi.config.command_line import OF_TEMPLATES, add_settings
from zero_mpi.config.inputs import read_model, template_inputs, tokenizer_in, tokenizer_of, with_template
from zero_mpi.data import Tokenizer, collect_files, named
from zero_mpi.data.bos import AUTO, bos_of
from zero_mpi.data.conversations.formats import are_conversations
from zero_mpi.data.conversations.tokenized import ANSWERS, ConversationReader, TokenizedConversation
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import readable, shown
from zero_mpi.files.open import is_folder
from zero_mpi.launch.world import World, run

MARKS, COLOURS = ("«", "»"), ("\x1b[32m", "\x1b[0m")


@dataclass
class Totals:
    """What was found in all, and the first conversations of it.

    longest     tokens of the longest conversation, which a window has to hold
    left_out    conversations of which nothing counts: training leaves them out
    """

    samples: list[dict[str, Any]] = field(default_factory=list)
    conversations: int = 0
    tokens: int = 0
    counted: int = 0
    longest: int = 0
    left_out: int = 0

    def add(self, found: TokenizedConversation, keep: bool) -> None:
        """Count a conversation, and keep it to be shown."""
        tokens, counted = len(found.ids), int(found.counted.sum())
        self.conversations += 1
        self.tokens += tokens
        self.counted += counted
        self.longest = max(self.longest, tokens)
        self.left_out += counted == 0
        if keep:
            parts = [{"text": text, "counted": counts} for text, counts in parts_of(found)]
            self.samples.append({"name": found.name, "tokens": tokens, "counted": counted, "parts": parts})


def make_parser() -> Parser:
    """The parser of the command line."""
    parser = Parser(
        prog="python -m zero_mpi.samples",
        description="Show conversations as training reads them: the text that the chat template makes, "
        "which of its tokens the loss counts, and how many there are.",
        epilog="Example:\n\n  python -m zero_mpi.samples MODEL.gguf --data chat.jsonl",
    )
    parser.add_argument(
        "path", metavar="MODEL", help="GGUF file, checkpoint or Hugging Face folder, or a tokenizer.json"
    )
    parser.add_argument(
        "--data", nargs="+", required=True, metavar="PATH", help="conversations as .jsonl, or folders of them"
    )
    add_settings(parser, dict.fromkeys((*OF_TEMPLATES, "system", "loss_on"), ""))
    parser.add_argument("--count", type=int, default=3, help="so many are shown, of all the totals")
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    return parser


def command(world: World, arguments: Sequence[str]) -> int:
    """Print samples and totals. Returns the exit status."""
    options = make_parser().parse_args(arguments)
    within("count", options.count, 0)
    files = collect_files(options.data)
    if not are_conversations(files):
        raise UsageError(f"--data {named(options.data)}: expected conversations as .jsonl, found none")
    tokenizer = with_template(tokenizer_at(options.path), options.chat_template)
    totals = Totals()
    reader = ConversationReader(
        tokenizer, options.loss_on or ANSWERS, bos_of(tokenizer, AUTO), template_inputs(options, tokenizer)
    )
    for found in reader.read(files):
        totals.add(found, keep=totals.conversations < options.count)
    if options.json:
        write(json.dumps(asdict(totals), indent=2).replace("\x7f", "\\u007f").split("\n"))
    elif sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        write(lines(totals, *COLOURS), keep="\x1b")
    else:
        write(lines(totals, *MARKS))
    return 0


def tokenizer_at(path: str) -> Tokenizer:
    """The tokenizer of a model, or of a file that holds nothing else; raises UsageError."""
    if not is_folder(path):
        return tokenizer_in(path)
    source = open_weights(path)
    return tokenizer_of(source, read_model(source))


def parts_of(found: TokenizedConversation) -> Iterator[tuple[str, bool]]:
    """The text of a conversation in runs of tokens that all count, or all do not."""
    changes = np.flatnonzero(np.diff(found.counted)) + 1
    ends, raw = np.concatenate(([0], np.cumsum(found.lengths))), found.text.encode()
    for first, last in pairwise([0, *changes.tolist(), len(found.ids)]):
        if first < last:
            yield raw[ends[first] : ends[last]].decode(errors="replace"), bool(found.counted[first])


def lines(totals: Totals, begin: str, end: str) -> Iterator[str]:
    """The text of samples and totals, what counts between two signs."""
    for sample in totals.samples:
        counts = f"{plural(sample['tokens'], 'token')}, {sample['counted']:,} counted"
        yield f"{shown(sample['name'])}: {counts}"
        text = "".join(
            marked(readable(part["text"]), begin, end) if part["counted"] else readable(part["text"])
            for part in sample["parts"]
        )
        yield from text.split("\n")
        yield ""
    share = percent(totals.counted / max(1, totals.tokens))
    yield (
        f"{plural(totals.conversations, 'conversation')}: {plural(totals.tokens, 'token')}, "
        f"{totals.counted:,} of them counted ({share}); the longest has {totals.longest:,}"
    )
    if totals.left_out:
        yield f"without an answer, which training leaves out: {totals.left_out:,}"


def marked(text: str, begin: str, end: str) -> str:
    """A text between two signs; colours end with each line, and begin again."""
    inner = text.replace("\n", f"{end}\n{begin}") if begin in COLOURS else text
    return f"{begin}{inner}{end}"


def main() -> None:
    """The entry point of the command."""
    run("samples", command, sys.argv[1:], alone=True)
