"""What is to be verified: the flags, and the settings of the run as its config.toml has them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero_mpi.cli.parser import Parser
from zero_mpi.config import replay
from zero_mpi.config.bounds import check, within
from zero_mpi.config.command_line import add_settings, given, joined
from zero_mpi.config.settings import Config
from zero_mpi.config.toml import checked_type, read_toml
from zero_mpi.data.control_tokens import NEVER
from zero_mpi.data.conversations.chat_template import DAY
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import exists
from zero_mpi.train.identity import NAMES
from zero_mpi.train.same_flags import settings

PLACES = ("data", "val_data", "init", "lora_init", "tokenizer", "chat_template")
MEANS = ("strategy", "transport", "prefetch", "device", "timeout")  # of computing, which move no bit
SETTINGS = {
    **dict.fromkeys(PLACES, "where it lies now (default: where it lay)"),
    **dict.fromkeys(MEANS, "(default: as in the run)"),
}
MOST_SEED = 1 << 32
EXAMPLES = """\
Examples:

  mpirun -n 2 zero-mpi verify runs/mine
  mpirun -n 4 zero-mpi verify runs/mine --sample 3
  zero-mpi verify runs/mine --from 200 --to 300 --data TEXT

Exit status 0: the run is what it says; 1: it is not, and a line says what differs first; 3: nothing
differs, but not all that was asked for could be computed again."""


@dataclass(frozen=True)
class Request:
    """What is to be verified.

    run       the folder
    config    the settings of the run, but for where things lie now and how is computed
    first, last   states between which the steps are to be computed; None: all
    sample    how many stretches at most; None: all
    seed      by which they are drawn; None: by any
    expect    the digest that the chain has to end with
    """

    run: Path
    config: Config
    first: int | None = None
    last: int | None = None
    sample: int | None = None
    seed: int | None = None
    expect: str | None = None

    def facts(self) -> dict[str, str]:
        """What all ranks must share."""
        own = {name: str(value) for name, value in vars(self).items() if name != "config"}
        return settings(self.config) | own


def make_parser() -> Parser:
    """The command line. Flags that are not given are absent from the result."""
    parser = Parser(
        prog="mpirun -n N zero-mpi verify",
        usage="%(prog)s DIR [flags]",
        description="Whether a run is what its folder says: its steps are computed again, on any number of "
        "ranks, and every bit is compared.",
        epilog=EXAMPLES,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("run", metavar="DIR", help="run folder, --out of training")
    parser.add_argument("--from", type=int, metavar="STEP", help="compute from the state after this step on")
    parser.add_argument("--to", type=int, metavar="STEP", help="up to the state after this step")
    parser.add_argument(
        "--sample", type=int, metavar="K", help="compute K of the stretches between checkpoints; 0: none"
    )
    parser.add_argument("--seed", type=int, help="by which these are drawn (default: any, which is told)")
    parser.add_argument("--expect", metavar="HEX", help="what the run has printed as its proof at the end")
    add_settings(parser, SETTINGS)
    return parser


def read_request(arguments: Sequence[str]) -> Request:
    """What a command line asks for; raises UsageError for what cannot be meant."""
    now, own = given(make_parser(), arguments, SETTINGS)
    run, first, last = Path(own.pop("run")), own.get("from"), own.get("to")
    for name in ("from", "to", "sample", "seed"):
        within(name, own.get(name, 0), 0, MOST_SEED)
    return Request(
        run, config_of(run, now), first, last, own.get("sample"), own.get("seed"), own.get("expect")
    )


def config_of(run: Path, now: dict[str, Any]) -> Config:
    """The settings of a run folder with what is given now; raises UsageError for a folder that is none."""
    place = run / replay.NAME
    if not exists(place):
        raise UsageError(
            f"{shown(run)}: expected a run folder, --out of zero_mpi.train; there is no {replay.NAME} in it"
        )
    # Nothing is to be written or gone on with: the folder of this job is none.
    now |= {"out": os.devnull, "resume": "never", "dry_run": False}
    config = Config(**joined(read_toml(place, []), now))
    check(config)
    return config


def config_then(config: Config, said: dict[str, Any], proof: Path) -> Config:
    """The settings with those that a job of the run has said; raises UsageError for what is no setting."""
    said = {"bos": NEVER, "template_date": DAY, **said}  # as before there were such settings
    then = {name: said.get(name) for name in NAMES if name in said}
    checked = {
        name: value if value is None else checked_type(proof, name, value) for name, value in then.items()
    }
    found: Config = replace(config, **checked)  # type: ignore[arg-type]
    check(found)
    return found
