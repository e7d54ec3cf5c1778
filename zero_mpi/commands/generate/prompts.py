"""Where prompts come from: a flag, the lines of a file, or those of standard input."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from zero_mpi.errors import UsageError, prefixed
from zero_mpi.files.open import read_file

STANDARD_INPUT = "-"
DEFAULT = "def "
MARK = b"> "  # before each line that a person types


def prompts(options: argparse.Namespace) -> Iterator[str]:
    """The prompts of the flags in order, one at least. Raises UsageError for a file that has none.

    With `--chat` and neither flag they are the lines of standard input, as they are typed.
    """
    if options.prompts is None and not (options.chat and options.prompt is None):
        yield DEFAULT if options.prompt is None else options.prompt
        return
    found = False
    for line in typed() if options.prompts in (None, STANDARD_INPUT) else lines_of(Path(options.prompts)):
        if line.strip():
            found = True
            yield line
    if not found:
        where = "standard input" if options.prompts in (None, STANDARD_INPUT) else options.prompts
        raise UsageError(f"--prompts {where}: expected a prompt in each line, found no line")


def lines_of(path: Path) -> list[str]:
    """The lines of a file, without their ends."""
    with prefixed("--prompts"):
        text = read_file(path, expected="a file of prompts, one in each line")
    return [line.decode("utf-8", "surrogateescape").rstrip("\r") for line in text.split(b"\n")]


def typed() -> Iterator[str]:
    """The lines of standard input, each as soon as it is there; a person is shown where to type."""
    while True:
        if sys.stdin.isatty() and sys.stdout.isatty():
            sys.stdout.buffer.write(MARK)
            sys.stdout.buffer.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            return
        yield line.decode("utf-8", "surrogateescape").rstrip("\r\n")
