"""Command line of `zero_mpi.train`: makes a parser from the settings and joins flags with a --config file."""

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_mpi.cli.parser import KINDS, Parser, with_choices
from zero_mpi.config.bounds import check
from zero_mpi.config.settings import ALIASES, FIELDS, LENGTH, Config, default_text, spelled
from zero_mpi.config.toml import read_toml

METAVARS = {  # names of values in --help; other flags show N, X, TEXT, or NAME if they have choices
    "out": "DIR", "resume": "WHAT", "init": "PATH", "data": "PATH", "val_data": "PATH", "freeze": "PATTERN",
    "lr_scale": "W=X", "lora": "R", "lora_alpha": "A", "lora_targets": "W", "lora_init": "FILE",
    "add_tokens": "FILE", "teacher": "FILE", "tokenizer": "WHICH", "control_tokens": "HOW",
    "chat_template": "FILE", "template_var": "KV", "enable_thinking": "B", "template_date": "DAY",
    "threads": "N", "max_time": "TIME", "warmup": "N", "prometheus": "FOLDER", "wandb": "PROJECT",
    "mlflow": "NAME", "trace": "FILE", "trace_steps": "A:B", "reduce_dtype": "TYPE",
}  # fmt: skip
FIRST = {  # flags that --help shows; --help-all shows all flags
    "out", "steps", "epochs", "resume", "dry_run", "init", "arch", "layers", "dim", "heads", "context",
    "lora", "data", "tokenizer", "batch_size", "micro_batch", "lr", "warmup", "strategy", "device",
    "precision", "threads", "save_every", "eval_every", "max_time",
}  # fmt: skip
EVERY = "--help-all"
EXAMPLES = """\
--no-x turns off a switch --x. The same command resumes a stopped run.

Examples:

  mpirun -n 8 python -m zero_mpi.train
  mpirun -n 8 python -m zero_mpi.train --data TEXT --out runs/mine
  mpirun -n 2 python -m zero_mpi.train --init MODEL.gguf --data TEXT --lr 1e-4"""


def make_parser(every: bool = True) -> Parser:
    """Return the parser of the command line. Its result has only the flags that the user gave.

    every: whether --help shows all flags, or only those in FIRST
    """
    parser = Parser(
        prog="mpirun -n N python -m zero_mpi.train",
        usage="%(prog)s [flags]",
        description="Train a transformer, sharded over MPI ranks. The result is a GGUF file for llama.cpp.",
        epilog=EXAMPLES,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(EVERY, action="help", help="show all flags and exit")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings, named as the flags")
    titles = dict.fromkeys(field.metadata["group"] for field in FIELDS.values())
    groups = {title: parser.add_argument_group(title) for title in titles}
    for field in FIELDS.values():
        aliases = [spelled(name) for name, setting in ALIASES.items() if setting == field.name]
        hidden = {} if every or field.name in FIRST else {"help": argparse.SUPPRESS}
        group = groups[field.metadata["group"]]
        group.add_argument(spelled(field.name), *aliases, **argument(field) | hidden)
    return parser


def argument(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Return the arguments with which argparse adds the flag of a setting."""
    metadata = field.metadata
    text, kind = with_choices(metadata["text"], metadata["choices"]), metadata["kind"]
    if not any(field.default is empty for empty in (None, False, dataclasses.MISSING)):
        text += f" (default: {field.default})"
    text += default_text(field.name)
    common = {"help": text.replace("%", "%%")}
    if kind is bool:
        return {**common, "action": argparse.BooleanOptionalAction}
    if metadata["choices"]:
        return {**common, "choices": metadata["choices"], "metavar": METAVARS.get(field.name)}
    metavar = METAVARS.get(field.name, KINDS.get(kind, "TEXT"))
    if kind is list:
        return {**common, "nargs": "+", "metavar": metavar, "action": "extend"}
    return {**common, "type": kind, "metavar": metavar}


def add_settings(parser: Parser, texts: Mapping[str, str]) -> None:
    """Add training settings as flags of another command. A text that is not empty replaces the help text."""
    for name, text in texts.items():
        parser.add_argument(spelled(name), **argument(FIELDS[name]) | ({"help": text} if text else {}))


def split_flags(
    parser: Parser, arguments: Sequence[str], names: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flags of a command line in two dictionaries: the flags in `names`, and all others."""
    flags = vars(parser.parse_args(arguments))
    return {name: flags.pop(name) for name in names if name in flags}, flags


def parse(arguments: Sequence[str]) -> Config:
    """Return the configuration that a command line describes. Raise UsageError for invalid settings."""
    flags = vars(make_parser(EVERY in arguments).parse_args(arguments))
    path = flags.pop("config", None)
    removed: list[str] = []
    settings = read_toml(Path(path), removed) if path else {}
    config = Config(**joined(settings, flags))
    config.removed = tuple(removed)
    check(config)
    return config


def joined(settings: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Join settings of a file with flags, which override them. --steps and --epochs replace each other."""
    overrides = LENGTH if LENGTH & flags.keys() else set()
    return {name: value for name, value in settings.items() if name not in overrides} | dict(flags)
