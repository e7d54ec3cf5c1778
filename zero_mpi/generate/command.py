"""`python -m zero_mpi.generate MODEL.gguf --prompt "def "`: text from a model file, in one process.

What a model says goes to a file or pipe as its very bytes. On a terminal control letters are escaped: a
model, or whoever wrote its text, could otherwise move the cursor, rename the window or worse.
"""

from __future__ import annotations

import argparse
import codecs
import os
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile

from zero_mpi import environment, ops
from zero_mpi.checkpoint.merged import open_merged
from zero_mpi.cli.parser import Parser
from zero_mpi.config.inputs import tokenizer_of
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import readable
from zero_mpi.generate.text_model import TextModel
from zero_mpi.launch.world import World, run


def make_parser() -> Parser:
    """The parser of the command line."""
    parser = Parser(
        prog="python -m zero_mpi.generate",
        description="Generate text from a GGUF model, in one process.",
        epilog="Example:\n\n  python -m zero_mpi.generate runs/default/latest --prompt 'def ' --tokens 200",
    )
    parser.add_argument("model", help="GGUF file, checkpoint folder, or Hugging Face folder")
    parser.add_argument("--lora", metavar="FILE", help="adapter.gguf to use with it")
    parser.add_argument("--prompt", default="def ", help="text to continue")
    parser.add_argument("--tokens", type=int, default=200, help="how many to generate at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=40, help="draw from so many likeliest; 0: from all")
    parser.add_argument("--top-p", type=float, default=1.0, help="of those, from the best that make up X")
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="of those, from all with X of the best one's"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    return parser


def command(world: World, arguments: Sequence[str]) -> int:
    """Print prompt and continuation, byte by byte as it comes, up to a token that ends a text."""
    options = make_parser().parse_args(arguments)
    if world.size > 1:
        raise UsageError("generation runs in one process: leave mpirun out")
    check(options)
    ops.use_threads(None if environment.threads_were_set else environment.cores())
    path = options.model
    model = TextModel(open_merged(path, options.lora))
    tokenizer = tokenizer_of(model.file, model.config)
    prompt = tokenizer.encode_prompt(options.prompt).tolist()
    ids = model.generate(
        prompt,
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
    )
    write = escaping(write_bytes) if sys.stdout.isatty() else write_bytes
    try:
        write(options.prompt.encode("utf-8", "surrogateescape"))
        for token in takewhile(lambda token: token not in tokenizer.ends, ids):
            write(tokenizer.decode([token]))
        write(b"\n")
    except BrokenPipeError:  # the reader has enough, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def check(options: argparse.Namespace) -> None:
    """Raise UsageError for the first number that is out of range."""
    for name in ("tokens", "temperature", "top_k", "top_p", "min_p", "seed"):
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if not value >= 0:
            raise UsageError(f"{flag} {value}: expected at least 0")
        if name in ("top_p", "min_p") and value > 1:
            raise UsageError(f"{flag} {value}: expected at most 1")


def write_bytes(data: bytes) -> None:
    """Hand bytes on at once."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def escaping(write: Callable[[bytes], object]) -> Callable[[bytes], None]:
    """A `write` for a terminal: letters as soon as they are whole, those that would control it escaped."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(data: bytes) -> None:
        write(readable(decoder.decode(data)).encode("utf-8", "backslashreplace"))

    return show


def main() -> None:
    """The entry point of the command."""
    run("generate", command, sys.argv[1:], alone=True)
