"""Task of an evaluation: its flags, of which those that training has as well are training's own settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_mpi.cli.parser import Parser
from zero_mpi.config.bounds import check, within
from zero_mpi.config.command_line import OF_TEMPLATES, add_settings, given
from zero_mpi.config.settings import Config, spelled
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show
from zero_mpi.train.same_bits import settings

MOST_CONTEXT = 2048  # default tokens of a window: attention takes the square of it
SETTINGS = {  # those of training that an evaluation has, and what --help says where it means something else
    "data": "text, token files or conversations (.jsonl)",
    "tokenizer": "byte, from-init (the model's, default) or a tokenizer file",
    **dict.fromkeys((*OF_TEMPLATES, "system", "loss_on", "skip_bad"), ""),
    "bos": "", "micro_batch": "", "prefetch": "", "transport": "",
    "device": "", "precision": "", "bits": "", "threads": "", "timeout": "",
}  # fmt: skip
FIRST = ("data", "tokenizer")  # these flags come first in --help
OF_QUESTIONS = ("shots", "delimiter")
OF_WINDOWS = ("context", "stride", "windows")
EXAMPLES = """\
Examples:

  mpirun -n 2 zero-mpi evaluate MODEL.gguf --data TEXT
  zero-mpi evaluate NEW.gguf --data TEXT --against OLD.gguf
  zero-mpi evaluate OLD.gguf --lora ADAPTER.gguf --data TEXT
  mpirun -n 2 zero-mpi evaluate MODEL.gguf --choices FILE.jsonl

A line of FILE.jsonl (answers are counted from 0):

  {"question": "Two and two are", "answers": [" four", " five"], "right": 0}"""


@dataclass(frozen=True)
class Task:
    """Evaluation to do.

    config    the settings that training has as well; `init` is the model, which is not trained
    lora      an adapter of the first model
    against   a second model
    choices   a file of questions with several answers, or of a published task
    shots     number of solved questions before each
    delimiter   text between question and answer of CORE
    context   tokens of a window, None: the model's, at most MOST_CONTEXT
    stride    tokens from a window to the next, None: as many as a window has
    windows   maximum number of windows, None: all
    json      a file for all figures
    kl        whether the probabilities of both models are compared
    imatrix   a file for the importance matrix of the model
    """

    config: Config
    lora: str | None = None
    against: str | None = None
    choices: Path | None = None
    shots: int = 0
    delimiter: str = " "
    context: int | None = None
    stride: int | None = None
    windows: int | None = None
    json: Path | None = None
    kl: bool = False
    imatrix: Path | None = None

    def facts(self) -> dict[str, str]:
        """Return the facts that all ranks must share."""
        own = {spelled(name): str(value) for name, value in vars(self).items() if name != "config"}
        return settings(self.config) | own


def make_parser() -> Parser:
    """Make the parser of the command line. Flags that are not given are absent from the result."""
    parser = Parser(
        prog="mpirun -n N zero-mpi evaluate",
        usage="%(prog)s PATH [flags]",
        description="Measure how well a model predicts a text (loss, perplexity, bits per byte) or answers "
        "questions. Results are the same at any number of ranks.",
        epilog=EXAMPLES,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("model", metavar="PATH", help="GGUF file, checkpoint folder, or Hugging Face folder")
    parser.add_argument("--lora", metavar="FILE", help="adapter.gguf to apply to the model")
    parser.add_argument("--against", metavar="PATH", help="second model, to evaluate and compare")
    parser.add_argument(
        "--choices",
        "--task",
        metavar="FILE",
        help="multiple-choice questions or a published task (HellaSwag, ARC, PIQA, CORE, ...), as JSON lines",
    )
    parser.add_argument(
        "--shots", type=int, metavar="N", help="solved questions shown before each question (default: 0)"
    )
    parser.add_argument(
        "--delimiter",
        metavar="TEXT",
        help=r"text between question and answer in CORE files, e.g. '\nAnswer: ' (default: a space)",
    )
    add_settings(parser, {name: SETTINGS[name] for name in FIRST})
    parser.add_argument(
        "--context", type=int, help=f"tokens per window (default: the model's, at most {MOST_CONTEXT})"
    )
    parser.add_argument(
        "--stride", type=int, help="tokens between starts of windows; each token counts once "
        "(default: --context)"
    )  # fmt: skip
    parser.add_argument("--windows", type=int, help="number of windows, spread over the text (default: all)")
    add_settings(parser, {name: text for name, text in SETTINGS.items() if name not in FIRST})
    add_files(parser)
    return parser


def add_files(parser: Parser) -> None:
    """Add the flags about quantization and files to write."""
    parser.add_argument("--json", metavar="FILE", help="write all results to FILE as JSON")
    parser.add_argument(
        "--kl", action="store_true", help="KL divergence and equal likeliest tokens of both models, on --data"
    )
    parser.add_argument(
        "--imatrix", metavar="FILE", help="write the importance matrix of the model on --data, for export"
    )


def read_task(arguments: Sequence[str]) -> Task:
    """Return the task of a command line; raises UsageError for invalid combinations."""
    settings, own = given(make_parser(), arguments, SETTINGS)
    config = Config(init=own.pop("model"), val_fraction=0.0, freeze=["*"], **settings)
    check(config)
    own |= {name: Path(own[name]) for name in ("choices", "json", "imatrix") if name in own}
    if not config.data and "choices" not in own:
        raise UsageError("nothing to evaluate on: give --data PATH, --choices FILE or both")
    if "kl" in own and ("against" not in own or not config.data):
        raise UsageError("--kl: compares two models on a text: give --against PATH and --data PATH as well")
    for name in (*OF_WINDOWS, "imatrix"):
        if name in own and not config.data:
            raise UsageError(f"{spelled(name)} {own[name]}: needs a text: add --data PATH")
    for name in OF_WINDOWS:
        within(name, own.get(name, 1), 1)
    for name in OF_QUESTIONS:
        if name in own and "choices" not in own:
            raise UsageError(f"--{name} {show(own[name])}: needs questions: add --task FILE")
    if "delimiter" in own:
        own["delimiter"] = own["delimiter"].replace(r"\n", "\n")
    return Task(config, **own)
