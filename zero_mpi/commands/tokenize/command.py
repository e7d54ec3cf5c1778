"""`zero-mpi tokenize`: from the flags to a complete folder of token files, on all ranks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from zero_mpi import __version__, environment
from zero_mpi.cli.parser import Parser
from zero_mpi.commands.tokenize.text_formats import FLAG
from zero_mpi.commands.tokenize.work import tokenize
from zero_mpi.commands.tokenize.work_folder import Table
from zero_mpi.config.bounds import within
from zero_mpi.config.command_line import add_settings
from zero_mpi.config.inputs import fingerprint, tokenizer_from_file
from zero_mpi.config.settings import BYTE, Config
from zero_mpi.data import ByteTokenizer, Tokenizer
from zero_mpi.data.document_reader import separator
from zero_mpi.data.text_files import TOKENIZER
from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import TOKENIZER as KIND
from zero_mpi.launch.consistency import SAME_FILES, check_installation, check_not_alone, same
from zero_mpi.launch.stopping import signals
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World, run
from zero_mpi.telemetry import log

OPTIONS = ("field", "skip_bad", "control_tokens", "part_mb")
THREADS = "RAYON_NUM_THREADS"  # variable of the package tokenizers
LEAST_PART_MB, MOST_PART_MB = 0.001, 16384
EXAMPLES = """\
Examples:

  mpirun -n 8 zero-mpi tokenize my-texts --tokenizer MODEL.gguf
  mpirun -n 8 zero-mpi tokenize a.jsonl.zst --tokenizer tokenizer.json
  mpirun -n 8 python -m zero_mpi.train --data tokens"""


def make_parser() -> Parser:
    """Make the parser of the command line."""
    parser = Parser(
        prog="zero-mpi tokenize",
        description="Convert text to token files (Megatron's .bin and .idx) for zero_mpi.train --data. The "
        "files are the same at any number of ranks. The same command resumes a job that was stopped.",
        epilog=EXAMPLES,
    )
    inputs = "text, .jsonl, either as .gz or .zst, .parquet, or folders (default: Python's library)"
    size = "MiB of text per token file (default: 1/256 of all, from 1 to 256)"
    field = "JSON field or Parquet column with the text (default: text)"
    add = parser.add_argument
    add("path", nargs="*", metavar=FLAG, help=inputs)
    add("--tokenizer", required=True, metavar="FILE", help="GGUF file, tokenizer.json, or byte")
    add("--out", default="tokens", metavar="DIR", help="folder for the token files")
    add("--field", metavar="NAME", default="text", help=field)
    add("--skip-bad", action="store_true", help="skip and count lines or rows without text")
    add_settings(parser, {"control_tokens": "", "timeout": ""})
    add("--part-mb", type=float, metavar="X", help=size)
    return parser


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the flags; raises UsageError for values out of range."""
    options = make_parser().parse_args(arguments)
    if options.part_mb is not None and not LEAST_PART_MB <= options.part_mb <= MOST_PART_MB:
        raise UsageError(f"--part-mb {options.part_mb:g}: expected {LEAST_PART_MB} to {MOST_PART_MB}")
    options.timeout = within("timeout", Config.timeout if options.timeout is None else options.timeout, 0)
    return options


@signals.heard()
def command(world: World, arguments: Sequence[str]) -> int:
    """Write the missing parts of the folder. Return the exit status."""
    check_not_alone(world)
    check_installation(world)
    options = world.together(lambda: read_options(arguments))
    log.install(world.rank, world.size)
    tokenizer: Tokenizer = same(world.comm, lambda: look(options), SAME_FILES)
    watchdog = Watchdog(world.rank, options.timeout, world.kill)
    try:
        return tokenize(world, options, tokenizer, about(options, tokenizer), watchdog)
    finally:
        watchdog.stop()


def look(options: argparse.Namespace) -> tuple[Tokenizer, dict[str, object]]:
    """Return the tokenizer of the flags, and what must be the same on all ranks."""
    given = options.tokenizer
    tokenizer = ByteTokenizer() if given == BYTE else tokenizer_from_file(Path(given))
    return tokenizer, {"the flags": sorted(vars(options).items()), "the tokenizer": fingerprint(tokenizer)}


def about(options: argparse.Namespace, tokenizer: Tokenizer) -> Table:
    """Return all settings, without the inputs, that decide what is written."""
    return {
        "zero_mpi": __version__,
        "tokenizer": {
            "file": TOKENIZER,
            "kind": BYTE if isinstance(tokenizer, ByteTokenizer) else str(tokenizer.metadata().get(KIND)),
            "vocabulary": tokenizer.vocab_size,
            "digest": fingerprint(tokenizer),
            "closes_documents": separator(tokenizer),
        },
        "options": {name: getattr(options, name) for name in OPTIONS},
    }


def main() -> None:
    """Run the command."""
    signals.listen()
    os.environ.setdefault(THREADS, str(environment.cores_per_rank()))  # ranks share the cores of a node
    run("tokenize", command, sys.argv[1:])
