"""Parser of all command lines: a compact `--help`, `--version`, and errors that suggest the right flag.

Errors are UsageErrors: the caller decides which rank prints them. An unknown flag is reported before any
other error, with the most similar known flag; for a flag that was removed, the error names its replacement.
This module imports only modules that load fast.
"""

import argparse
import copy
import difflib
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from zero_mpi import __version__, environment
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show, shown

COLUMN = 26  # column at which the texts of --help begin
NEAR = 0.6  # difflib cutoff: minimum share of letters that two similar names have in common
PLACES = ("DIR", "PATH", "FILE")  # metavars of values that are paths
KINDS: dict[Any, str] = {int: "N", float: "X"}  # metavars by type
RATES = ("--flops", "--memory-bandwidth", "--host-bandwidth", "--alpha-node", "--beta-node")
REMOVED = {  # flags that 0.1.0 had, and their replacements
    **dict.fromkeys(RATES, "use --machine FILE.toml or --doctor FILE"),
    "--max-mb": "leave it out",
    "--audit": "use zero-mpi verify RUN after the run",
    "--audit-action": "use zero-mpi verify RUN after the run",
    "--text": "use the page of zero-mpi report, or metrics.jsonl",
    "--why": "give only the two run folders",
}


def nearest(wrong: str, candidates: Iterable[str]) -> str:
    """Return the end of an error message: "; did you mean X?", or "" if no known name is similar."""
    names = list(candidates)
    completions = sorted((name for name in names if wrong and name.startswith(wrong)), key=len)
    matches = completions[:1] or difflib.get_close_matches(wrong, names, 1, NEAR)
    return f"; did you mean {matches[0]}?" if matches else ""


def version_lines() -> list[str]:
    """Return the version of the package, and those of NumPy and MPI if they are already loaded."""
    lines, versions = [f"zero_mpi {__version__}"], []
    if "numpy" in sys.modules:
        versions.append(f"NumPy {sys.modules['numpy'].__version__}")
    if "mpi4py.MPI" in sys.modules:
        mpi = sys.modules["mpi4py.MPI"].Get_library_version()
        versions.append(" ".join(mpi.replace("Version:", "").partition("\n")[0].partition(",")[0].split()))
    return [*lines, *([", ".join(versions)] if versions else [])]


def with_choices(text: str, choices: Sequence[str]) -> str:
    """Return the help text of a flag, with its choices appended unless the text names all of them."""
    complete = all(re.search(rf"\b{re.escape(choice)}\b", text) for choice in choices)
    return text if complete else f"{text} [{', '.join(choices)}]"


def refuse_empty(name: str, value: Any) -> None:
    """Raise UsageError for an empty text, such as a path from an unset shell variable."""
    if value == "" or (isinstance(value, list) and "" in value):
        raise UsageError(f"{name} '': expected a value, got an empty text; is a shell variable unset?")


class Help(argparse.HelpFormatter):
    """Help formatter: texts in one column, with their defaults. Indented lines do not change."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"max_help_position": COLUMN, **options})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines()
        return "\n".join(line if line[:1].isspace() else textwrap.fill(line, width) for line in lines)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        if not text or action.nargs == 0:
            return text
        text = with_choices(text, [str(choice) for choice in action.choices or ()])
        no_default = action.default is None or action.default is argparse.SUPPRESS
        return text if no_default or "(default" in text else f"{text} (default: %(default)s)"

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Any:
        """Return a formatter that shows a value's type instead of its choices, which the help text names."""
        if action.metavar is None and action.option_strings:
            action = copy.copy(action)
            action.metavar = "NAME" if action.choices else KINDS.get(action.type, "TEXT")
        return super()._metavar_formatter(action, default_metavar)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == argparse.ONE_OR_MORE and isinstance(action.metavar, str):
            return f"{action.metavar}..."
        return super()._format_args(action, default_metavar)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Return all names of a flag if they fit in the column, else the first name."""
        text = super()._format_action_invocation(action)
        if len(action.option_strings) < 2 or len(text) <= COLUMN - 4:
            return text
        first = copy.copy(action)
        first.option_strings = action.option_strings[:1]
        return super()._format_action_invocation(first)


class Version(argparse.Action):
    """Action that prints the version and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        if environment.launch_rank() == 0:
            print("\n".join(version_lines()))
        parser.exit()


class Once(argparse.Action):
    """Action that stores the value of a flag, and refuses the flag a second time."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        first = getattr(namespace, self.dest, None)
        if first is not None:
            raise UsageError(f"{option_string} {shown(values)}: was given before, with {shown(first)}")
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """Argument parser of this package. Flags cannot be abbreviated."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": Help, "allow_abbrev": False, **options})
        self.add_argument("--version", action=Version, nargs=0, help="show the version and exit")

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def print_help(self, file: Any = None) -> None:
        """Print help only on rank 0, even before MPI starts, when every rank seems to be the only process."""
        if environment.launch_rank() == 0:
            super().print_help(file)

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        for name in map(flag_of, words[: words.index("--")] if "--" in words else words):
            if name and name not in self._option_string_actions:
                if name in REMOVED:
                    raise UsageError(f"{name} was removed: {REMOVED[name]}")
                flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
                raise UsageError(f"unknown flag {shown(name)}{nearest(name, flags) or '; see --help'}")
        namespace, surplus = self.parse_known_args(words)
        for action in self._actions:
            if not action.option_strings or action.metavar in PLACES:
                name = (action.option_strings or [str(action.metavar or action.dest)])[0]
                refuse_empty(name, getattr(namespace, action.dest, None))
        if surplus:
            raise UsageError(f"unexpected {show(surplus[0])}: it does not belong to a flag; see --help")
        return namespace

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += nearest(str(value), map(str, action.choices or ()))
            raise


def flag_of(text: str) -> str:
    """Return the flag's name if the argument is a flag; empty if it is a value, such as a negative number."""
    name = text.partition("=")[0]
    if len(name) < 2 or name[0] != "-" or any(letter.isspace() for letter in name):
        return ""
    try:
        float(text)
    except ValueError:
        return name
    return ""
