"""The task of an evaluation, read from flags. Flags shared with `train` become a `Config` of training."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.checkpoint.weights import WeightSource, adapter_source, open_merged, weights_digest
from zero_mpi.cli.parser import Once, Parser
from zero_mpi.comm import kinds
from zero_mpi.comm.agree import Facts
from zero_mpi.config import inputs
from zero_mpi.config.bounds import check, within
from zero_mpi.config.command_line import add_settings, split_flags
from zero_mpi.config.settings import OF_TEMPLATES, Config, spelled
from zero_mpi.data import Tokenizer, holds_token_files
from zero_mpi.data.corpus import tokenizers_of
from zero_mpi.data.tokenizers.byte import ALWAYS, AUTO
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show, shown
from zero_mpi.files.gguf_keys import TOKENS, GGUFKeys
from zero_mpi.launch.consistency import short_digest
from zero_mpi.models import ModelConfig
from zero_mpi.train.description import input_facts, settings
from zero_mpi.train.resolve import set_threads
from zero_mpi.train.resume import settled_bos

MOST_CONTEXT = 2048  # default limit, because attention's time grows with the square of a window's tokens
SETTINGS = {  # settings that evaluate shares with training; a help text if the meaning differs
    "data": "text, token files or conversations (.jsonl)",
    "tokenizer": "byte, from-init (the model's, default) or a tokenizer file",
    **dict.fromkeys((*OF_TEMPLATES, "system", "loss_on", "skip_bad"), ""),
    "bos": "", "micro_batch": "", "prefetch": "", "transport": "",
    "device": "", "precision": "", "bits": "", "threads": "", "timeout": "",
}  # fmt: skip
FIRST = ("data", "tokenizer")  # these flags come first in --help
TEXT = "data", "a text: add --data PATH"
NEEDS = {  # flag -> the flag that it needs, and what to do
    **dict.fromkeys(("context", "stride", "windows", "imatrix", "top_k_out"), TEXT),
    **dict.fromkeys(("top_k", "temperature"), ("top_k_out", "a file: add --top-k-out FILE")),
    **dict.fromkeys(("shots", "delimiter"), ("choices", "questions: add --task FILE")),
}
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
    """Flags of an evaluation: the models, the data, and the results to compute."""

    config: Config  # settings that evaluate shares with training; `init` is the model
    lora: str | None = None  # adapter for the first model
    against: str | None = None  # second model, to compare with
    choices: Path | None = None  # file of questions with several answers, or of a published task
    shots: int = 0  # number of solved questions shown before each question
    delimiter: str = " "  # text between question and answer in CORE files
    context: int | None = None  # tokens per window; None: the model's context, at most MOST_CONTEXT
    stride: int | None = None  # tokens between the starts of windows; None: `context`
    windows: int | None = None  # maximum number of windows; None: all windows
    json: Path | None = None  # file for all results
    kl: bool = False  # whether to compare the probabilities of both models
    imatrix: Path | None = None  # file for the model's importance matrix
    top_k_out: Path | None = None  # file for the `top_k` most likely ids of each position
    top_k: int = 32
    temperature: float = 1.0

    def facts(self) -> dict[str, str]:
        """Return the settings that must be equal on all ranks."""
        flags = {spelled(name): str(value) for name, value in vars(self).items() if name != "config"}
        return settings(self.config) | flags


def make_parser() -> Parser:
    """Return the parser of the command line. It returns only the flags that the user gave."""
    parser = Parser(
        prog="mpirun -n N zero-mpi evaluate",
        usage="%(prog)s PATH [flags]",
        description="Measure how well a model predicts a text (loss, perplexity, bits per byte) or answers "
        "questions. Results are the same at any number of ranks.",
        epilog=EXAMPLES,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("model", metavar="PATH", help="GGUF file, checkpoint folder, or Hugging Face folder")
    add("--lora", action=Once, metavar="FILE", help="adapter.gguf to apply to the model")
    add("--against", metavar="PATH", help="second model, to evaluate and compare")
    questions = (
        "multiple-choice questions or a published task (HellaSwag, ARC, PIQA, CORE, ...), as JSON lines"
    )
    add("--choices", "--task", metavar="FILE", help=questions)
    add("--shots", type=int, metavar="N", help="solved questions shown before each question (default: 0)")
    text = r"text between question and answer in CORE files, e.g. '\nAnswer: ' (default: a space)"
    add("--delimiter", metavar="TEXT", help=text)
    add_settings(parser, {name: SETTINGS[name] for name in FIRST})
    add("--context", type=int, help=f"tokens per window (default: the model's, at most {MOST_CONTEXT})")
    text = "tokens between starts of windows; each token counts once (default: --context)"
    add("--stride", type=int, help=text)
    add("--windows", type=int, help="number of windows, spread over the text (default: all)")
    add_settings(parser, {name: text for name, text in SETTINGS.items() if name not in FIRST})
    add("--json", metavar="FILE", help="write all results to FILE as JSON")
    text = "compare the models' probabilities on --data (KL divergence, top tokens)"
    add("--kl", action="store_true", help=text)
    add("--imatrix", metavar="FILE", help="write the importance matrix of the model on --data, for export")
    text = "write the most likely tokens of each position, for train --teacher"
    add("--top-k-out", metavar="FILE", help=text)
    add("--top-k", type=int, metavar="K", help="tokens per position in --top-k-out (default: 32)")
    add("--temperature", type=float, metavar="T", help="temperature of --top-k-out (default: 1)")
    return parser


def read_task(arguments: Sequence[str]) -> Task:
    """Return the task of a command line. Raise UsageError for flags that do not fit together."""
    settings, flags = split_flags(make_parser(), arguments, SETTINGS)
    config = Config(init=flags.pop("model"), val_fraction=0.0, freeze=["*"], **settings)
    check(config)
    flags |= {key: Path(flags[key]) for key in ("choices", "json", "imatrix", "top_k_out") if key in flags}
    if not config.data and "choices" not in flags:
        raise UsageError("nothing to evaluate on: give --data PATH, --choices FILE or both")
    if "kl" in flags and ("against" not in flags or not config.data):
        raise UsageError("--kl: compares two models on a text: give --against PATH and --data PATH as well")
    for key, (other, need) in NEEDS.items():
        if key in flags and not (config.data if other == "data" else other in flags):
            raise UsageError(f"{spelled(key)} {shown(str(flags[key]))}: needs {need}")
    if {"top_k_out", "windows"} <= flags.keys():
        raise UsageError(f"--windows {flags['windows']}: --top-k-out needs all windows: remove --windows")
    for key, least in {"context": 1, "stride": 1, "windows": 1, "top_k": 1, "temperature": 1e-3}.items():
        within(key, flags.get(key, 1), least)
    flags["delimiter"] = flags.get("delimiter", " ").replace(r"\n", "\n")
    return Task(config, **flags)


# Keys of a tokenizer that determine ids. A difference in whether BOS is added has its own warning.
DECIDES = tuple(
    "tokenizer.ggml." + each
    for each in ("model", "pre", "merges", "scores", "token_type", "bos_token_id", "eos_token_id")
)
LONGEST_NAME = 40  # maximum number of characters of a model's path in a table


@dataclass(frozen=True)
class Candidate:
    """Model to evaluate: the paths in the flags, the reader of its weights, and its configuration."""

    path: str
    source: WeightSource
    model: ModelConfig
    lora: str | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer that came with the model; None if missing, unreadable, or of another vocabulary size."""
        try:
            tokenizer = inputs.tokenizer_of(self.source, self.model)
        except UsageError:
            return None
        return tokenizer if tokenizer.vocab_size == self.model.vocab_size else None

    @property
    def keys(self) -> dict[str, Any]:
        return {} if self.tokenizer is None else self.tokenizer.metadata()

    @property
    def title(self) -> str:
        return self.path if self.lora is None else f"{self.path} + {self.lora}"

    @property
    def name(self) -> str:
        return shown(self.title, LONGEST_NAME)


@dataclass(frozen=True)
class OpenInputs:
    """Inputs that every rank opens before it reads large data."""

    config: Config  # settings, with `context` set to the length of a window
    candidates: tuple[Candidate, ...]  # the model, and the model of --against if given
    tokenizer: Tokenizer | None  # of the text; for token files, of the first model (None if unreadable)
    threads: int  # number of threads of this rank


def open_models(task: Task, number: int) -> tuple[OpenInputs, Facts]:
    """Return the inputs that this rank opens, and facts that must be equal on all ranks.

    `number`: this rank's index on its node, used if the launcher sets none. Raises UsageError for bad inputs.
    """
    device.use(task.config.device, number)
    kinds.check_flag(task.config.transport, device.in_use().name == "cuda")
    threads = set_threads(task.config)
    paths = (task.config.init, task.lora), (task.against, None)
    opened = [(path, lora, open_merged(path, lora)) for path, lora in paths if path is not None]
    candidates = tuple(Candidate(path, file, inputs.read_model(file), lora) for path, lora, file in opened)
    tokenizer = choose_tokenizer(task, candidates[0])
    for base in candidates[1:]:
        check_same_vocabulary(candidates[0], base)
    if task.top_k_out is not None and task.top_k > (size := candidates[0].model.vocab_size):
        raise UsageError(f"--top-k {task.top_k}: the model has only {size} tokens")
    context = task.context or min(MOST_CONTEXT, *(each.model.context_length for each in candidates))
    for each in candidates:
        if context > (longest := each.model.context_length):
            raise UsageError(f"--context {context}: the model {shown(each.path)} allows at most {longest}")
    config = replace(task.config, context=context, bos=settled_bos(task.config, tokenizer, None))
    facts: dict[str, object] = {}
    for subject in candidates:
        of_model = replace(config, init=subject.path)
        facts |= input_facts(of_model, None, subject.source, subject.model, tokenizer)
        if subject.lora is not None:
            adapter = adapter_source(subject.lora, subject.source.metadata)
            facts[f"the adapter of --lora {subject.lora}"] = weights_digest(adapter)
    digests = {name: short_digest(value) for name, value in facts.items()}
    return OpenInputs(config, candidates, tokenizer, threads), digests


def choose_tokenizer(task: Task, subject: Candidate) -> Tokenizer | None:
    """Return the tokenizer for text and questions; for token files the model's tokenizer, if it can be read.

    Raises UsageError if the model and the token files use an id for different tokens.
    """
    config = task.config
    inputs.check_kind_of_data(config)
    if task.choices is not None or not holds_token_files(config.data):
        tokenizer: Tokenizer | None = inputs.fitting_tokenizer(config, subject.source, subject.model)
    else:
        tokenizer = subject.tokenizer
    for path in tokenizers_of(config.data):
        if tokenizer is not None:
            inputs.check_same_tokens(shown(subject.path), tokenizer, path, inputs.tokenizer_in(path))
    return tokenizer


def check_same_vocabulary(subject: Candidate, base: Candidate) -> None:
    """Raise UsageError if two models have different tokens according to their files."""
    sizes = subject.model.vocab_size, base.model.vocab_size
    problem = "" if sizes[0] == sizes[1] else f"{sizes[1]} tokens, expected {sizes[0]}"
    ours, theirs = (GGUFKeys(candidate.keys).texts(TOKENS) or [] for candidate in (subject, base))
    for place, (expected, token) in enumerate(zip(ours, theirs, strict=False)):
        if token != expected and not problem:
            problem = f"token {place} is {show(token)}, expected {show(expected)}"
    if problem:
        raise UsageError(
            f"--against {shown(base.path)}: {problem} as in {shown(subject.path)}: only models with the same "
            "tokens can be compared"
        )


def cautions(task: Task, opened: OpenInputs) -> Iterator[str]:
    """Yield warnings about BOS tokens and about differences between the models' tokenizers."""
    config, path = task.config, shown(task.against or "")
    if config.bos == ALWAYS and config.data and holds_token_files(config.data):
        yield f"--bos {ALWAYS}: no BOS token is added to token files"
    asks = [each.tokenizer is not None and each.tokenizer.add_bos for each in opened.candidates]
    if config.bos == AUTO and len({*asks}) > 1:
        one, other = (opened.candidates[asks.index(add_bos)].name for add_bos in (True, False))
        yield (
            f"--against: {one} expects a BOS token, {other} does not: both get what the first expects; set "
            "--bos always or never for both"
        )
    ours, *theirs = (each.keys for each in opened.candidates)
    keys = sorted(
        key
        for each in theirs
        for key in ours.keys() & each.keys()
        if key.startswith(DECIDES) and not np.array_equal(ours[key], each[key])
    )
    if keys:
        yield (
            f"--against {path}: {', '.join(keys)} differ from {opened.candidates[0].name}: both models "
            "read the tokens of the first model's tokenizer"
        )
