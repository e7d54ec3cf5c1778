"""`zero-mpi completion SHELL`: prints a shell script that completes commands, flags, values and files.

The package shtab makes the script from the parsers of the commands. The script works without Python. It
completes commands that begin with `zero-mpi`, but not words after `mpirun`.
"""

import argparse
import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import write
from zero_mpi.commands.main import COMMANDS, module_of
from zero_mpi.errors import import_optional
from zero_mpi.launch.world import World, run

SHELLS = ("bash", "zsh", "fish", "tcsh")
FILES, FOLDERS = ("FILE", "PATH", "WHICH", "WHAT"), ("DIR",)  # metavars of flags for a file; for a folder
INSTALL = """\
Install the script as:

  bash  ~/.local/share/bash-completion/completions/zero-mpi
  zsh   _zero-mpi in a folder of $fpath
  fish  ~/.config/fish/completions/zero-mpi.fish
  tcsh  a file sourced by ~/.tcshrc

Examples (the second is for the current bash session only):

  zero-mpi completion fish > ~/.config/fish/completions/zero-mpi.fish
  eval "$(zero-mpi completion bash)\""""


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="zero-mpi completion",
        description="Print a shell script that completes the commands and flags of zero-mpi.",
        epilog=INSTALL,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")
    return parser


def command(world: World, arguments: Sequence[str]) -> int:
    """Print the script. Return the exit status."""
    options = make_parser().parse_args(arguments)
    shtab = import_optional("completion", "completion", "shtab")
    write(shtab.complete(whole_parser(shtab), options.shell).splitlines())
    return 0


def whole_parser(shtab: Any) -> argparse.ArgumentParser:
    """Return one parser for `zero-mpi` that has a subparser for each command."""
    parser = argparse.ArgumentParser(prog="zero-mpi")
    parser.add_argument("--version", action="version", version="", help="show the version and exit")
    parts = parser.add_subparsers(dest="command")
    for name, text in COMMANDS.items():
        part = parts.add_parser(name, parents=[parser_of(name)], add_help=False, help=text)
        for action in part._actions:
            if action.metavar in FILES + FOLDERS or action.dest in ("path", "other", "source", "target"):
                place = shtab.DIRECTORY if action.metavar in FOLDERS else shtab.FILE
                action.complete = place  # type: ignore[attr-defined]
    return parser


def parser_of(name: str) -> argparse.ArgumentParser:
    module = "zero_mpi.config.command_line" if name == "train" else module_of(name)
    parser: argparse.ArgumentParser = importlib.import_module(module).make_parser()
    return parser


main = partial(run, "completion", command, alone=True)
