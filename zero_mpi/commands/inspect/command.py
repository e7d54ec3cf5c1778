"""`zero-mpi inspect PATH [OTHER]`: shows and checks a model or checkpoint, or compares two of them.

The result is one dictionary (`examine`, `compare`), which `--json` prints and `lines_of` formats as text.
Exit status 0: valid, or equal; 1: damaged, or different; 2: cannot be read.
"""

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import WIDTH, write
from zero_mpi.commands.inspect.examine import Report, examine
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import LONGEST, LONGEST_LINE, shown
from zero_mpi.launch.world import World, run

TITLE = 16  # width of the column of titles
FEW, MANY = 8, 200  # maximum numbers of names and of keys shown by default
NO_BREAK = "\u00a0"  # replaces a space at which a line must not be broken


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="zero-mpi inspect",
        description="Show and check a model or checkpoint. With OTHER, compare the two bit by bit. Exit "
        "status 0: valid, or equal; 1: damaged, or different; 2: cannot be read.",
        epilog="Examples:\n\n"
        "  zero-mpi inspect runs/default/latest\n"
        "  zero-mpi inspect runs/a/latest runs/b/latest\n"
        "  zero-mpi inspect runs/a runs/b",
    )
    add = parser.add_argument
    kinds = "GGUF file (the first of a split file), checkpoint or Hugging Face folder"
    add("path", help=f"{kinds}; with OTHER also a run folder")
    add("other", nargs="?", help="path to compare with, of one of these kinds")
    add("--keys", action="store_true", help="show all keys, with full arrays and texts")
    add("--tensors", action="store_true", help="show all tensors, or all tensors that differ")
    add("--json", action="store_true", help="print one JSON object instead")
    return parser


def command(world: World, arguments: Sequence[str]) -> int:
    """Print the report. Return the exit status."""
    options = make_parser().parse_args(arguments)
    path = Path(options.path)
    try:
        if options.other is None:
            report = examine(path, keys=options.keys, tensors=options.tensors)
        else:
            from zero_mpi.commands.inspect.compare import compare_paths  # its imports are slow

            report = compare_paths(path, Path(options.other))
    except OSError as error:  # for example, the folder is not readable
        raise UsageError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from None
    if options.json:
        write(json.dumps(report, indent=2, allow_nan=False).replace("\x7f", "\\u007f").split("\n"))
    else:
        write(lines_of(report, options.keys or options.tensors))
    return 0 if report.get("sound", report.get("same")) else 1


def lines_of(report: Report, everything: bool) -> Iterator[str]:
    """Yield the lines of a report: each entry that has a value, with its title on the left.

    If `everything` is false, only the first keys and names are shown.
    """
    entries = ((name, value) for name, value in report.items() if value is not None)
    for name, value in entries:
        title = name.replace("_", " ")
        for text in key_lines(value, everything) if name == "keys" else texts_of(value, everything):
            yield f"{title:{TITLE}}{text}"
            title = ""


def texts_of(value: Any, everything: bool) -> Iterator[str]:
    """Yield a value as lines. Short entries of a dictionary share a line; long entries do not."""
    if isinstance(value, list):
        lines = (text for item in value for text in texts_of(item, everything))
        are_names = any(isinstance(item, str) for item in value)
        yield from first(lines, FEW if are_names and not everything else sys.maxsize)
    elif not isinstance(value, dict) or is_short(value):
        yield text_of(value, LONGEST_LINE)
    else:
        value = {name: entry for name, entry in value.items() if entry is not None}
        pairs = (f"{shown(name)} {text_of(entry)}" for name, entry in value.items() if is_short(entry))
        paragraph = ", ".join(text.replace(" ", NO_BREAK) for text in pairs)
        for line in textwrap.wrap(paragraph, WIDTH - TITLE, break_long_words=False, break_on_hyphens=False):
            yield line.replace(NO_BREAK, " ")
        for name, entry in value.items():
            prefix = f"{shown(name)}: "
            for text in () if is_short(entry) else texts_of(entry, everything):
                yield prefix + text
                prefix = "  "


def key_lines(keys: Any, everything: bool) -> Iterator[str]:
    """Yield a line for each key of each file, or for each key whose values differ between two files."""
    if isinstance(keys, dict):
        rows = ((role, key, text_of(x, sys.maxsize)) for role, own in keys.items() for key, x in own.items())
    else:
        rows = ((key["file"], key["key"], " and ".join(map(text_of, key["values"]))) for key in keys)
    lines = (f"{role}: {shown(key)} = {text}" for role, key, text in rows)
    yield from first(lines, sys.maxsize if everything else MANY)


def first(lines: Iterable[str], most: int) -> Iterator[str]:
    """Yield at most `most` lines, and then a line with the number of remaining lines."""
    rest = iter(lines)
    yield from islice(rest, most)
    if remaining := sum(1 for _ in rest):
        yield f"and {remaining:,} more (show all with --keys --tensors)"


def is_short(value: Any) -> bool:
    """Return whether a value is so short that it shares a line with its name and other values."""
    if isinstance(value, dict):
        return value.keys() == {"array", "length", "first"}  # an array shortened by `as_json`
    return not isinstance(value, list) or (len(value) < FEW and not any(isinstance(x, dict) for x in value))


def text_of(value: Any, most: int = LONGEST) -> str:
    """Return a short value as text of at most `most` characters."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, dict):
        items = ", ".join(map(repr, value["first"]))
        return shown(f"{value['length']:,} {value['array']}: {items}, ...", most)
    if isinstance(value, int):
        return shown(f"{value:,}", most)
    return shown(value if isinstance(value, str) and value else repr(value), most)


main = partial(run, "inspect", command, alone=True)
