"""`zero-mpi samples MODEL --data chat.jsonl`: shows conversations and pairs as training sees them.

Text that counts in the loss is in « ».
"""

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from zero_mpi.checkpoint.weights import open_weights
from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import percent, plural, write
from zero_mpi.config.bounds import within
from zero_mpi.config.command_line import add_settings
from zero_mpi.config.inputs import read_model, template_inputs, tokenizer_in, tokenizer_of, with_template
from zero_mpi.config.settings import OF_TEMPLATES
from zero_mpi.data import collect_files, named
from zero_mpi.data.conversations import tokenized
from zero_mpi.data.conversations.formats import BadRows, are_conversations, holds_pairs
from zero_mpi.data.conversations.row_sources import HEAD, beginning
from zero_mpi.data.text_files import kind_of
from zero_mpi.data.tokenizers.byte import AUTO, bos_of
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import readable, shown
from zero_mpi.files.open import is_folder
from zero_mpi.launch.world import World, run


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="zero-mpi samples",
        description="Show conversations as training sees them: the text from the chat template, the tokens "
        "that count in the loss, and totals.",
        epilog="Example:\n\n  zero-mpi samples MODEL.gguf --data chat.jsonl",
    )
    add = parser.add_argument
    add("path", metavar="MODEL", help="GGUF file, checkpoint or Hugging Face folder, or a tokenizer.json")
    add("--data", nargs="+", action="extend", required=True, metavar="PATH", help="files of conversations")
    add_settings(parser, dict.fromkeys((*OF_TEMPLATES, "system", "loss_on", "skip_bad"), ""))
    add("--count", type=int, default=3, help="conversations to show; totals cover all")
    add("--json", action="store_true", help="print one JSON object instead")
    return parser


def command(world: World, arguments: Sequence[str]) -> int:
    """Print samples and totals. Return the exit status."""
    options = make_parser().parse_args(arguments)
    within("count", options.count, 0)
    files = collect_files(options.data)
    are_pairs = False not in {holds_pairs(path, labels=True) for _, path in files}
    if not are_pairs and not are_conversations(files):
        for name, path in files:
            if kind := kind_of(beginning(path, bool)[:HEAD], name):
                detail = f"found {kind.name}: {kind.remedy}"
                raise UsageError(f"--data {shown(path)}: expected conversations as .jsonl, {detail}")
        raise UsageError(f"--data {named(options.data)}: expected conversations as .jsonl, found none")
    reader, bad = make_reader(options), BadRows() if options.skip_bad else None
    samples, totals = list[dict[str, Any]](), tokenized.Totals()
    conversations = reader.read(files, bad)
    if are_pairs:
        pairs = reader.read_pairs(files, bad, labels=True)
        conversations = (side for pair in pairs for side in pair if side is not None)
    for conversation in conversations:
        totals.add(conversation.name, conversation.facts)
        if len(samples) < options.count * (1 + are_pairs):
            parts = [{"text": text, "counted": counts} for text, counts in parts_of(conversation)]
            samples.append({"name": conversation.name, **conversation.facts, "parts": parts})
    notes = [*totals.cautions(), *(bad.notes() if bad else ())]
    if notes and not totals.sums:
        raise UsageError(f"--data {named(options.data)}: expected a row that can be read; {notes[-1]}")
    if options.json:
        figures = {"samples": samples, **totals.sums, "longest": totals.longest, "notes": notes}
        write(json.dumps(figures, indent=2).replace("\x7f", "\\u007f").split("\n"))
    else:
        write(lines(samples, totals, notes))
    return 0


def make_reader(options: Namespace) -> tokenized.ConversationReader:
    """Return the reader of conversations for a model or tokenizer and the flags of templates."""
    source = open_weights(options.path) if is_folder(options.path) else None
    tokenizer = tokenizer_of(source, read_model(source)) if source else tokenizer_in(options.path)
    tokenizer = with_template(tokenizer, options.chat_template)
    loss_on, inputs = options.loss_on or tokenized.ANSWERS, template_inputs(options, tokenizer)
    return tokenized.ConversationReader(tokenizer, loss_on, bos_of(tokenizer, AUTO), inputs)


def parts_of(conversation: tokenized.TokenizedConversation) -> Iterator[tuple[str, bool]]:
    """Yield the text of a conversation as pairs (part, True if its tokens count in the loss)."""
    changes = np.flatnonzero(np.diff(conversation.counted)) + 1
    ends, raw = np.concatenate(([0], np.cumsum(conversation.lengths))), conversation.text.encode()
    for first, last in pairwise([0, *changes.tolist(), len(conversation.ids)]):
        if first < last:
            yield raw[ends[first] : ends[last]].decode(errors="replace"), bool(conversation.counted[first])


def lines(samples: list[dict[str, Any]], totals: tokenized.Totals, notes: list[str]) -> Iterator[str]:
    """Yield the lines of samples, totals and notes; counted text is in « »."""
    for sample in samples:
        yield f"{shown(sample['name'])}: {tokenized.description(tokenized.Facts(sample))}"
        text = ""
        for part in sample["parts"]:
            inner = readable(part["text"])
            text += f"«{inner}»" if part["counted"] else inner
        yield from (*text.split("\n"), "")
    sums = totals.sums
    share = percent(sums["counted"] / max(1, sums["tokens"]))
    yield (
        f"{plural(sums['conversations'], 'conversation')}: {plural(sums['tokens'], 'token')}, "
        f"{sums['counted']:,} of them counted ({share}); the longest has {totals.longest:,}"
    )
    yield from notes


main = partial(run, "samples", command, alone=True)
