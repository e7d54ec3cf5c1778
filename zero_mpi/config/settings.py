"""The flags of `zero_mpi.train`, as one data class: name, default, meaning and place in `--help`.

A TOML file (`--config`) sets the same names; flags on the command line win. `fixed` marks what a run must
keep when it is resumed, beside the sizes of its model, because another value would make it another run.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_mpi.cli.parser import KINDS, Parser, nearest, refuse_empty, with_choices
from zero_mpi.config import conflicts
from zero_mpi.config.defaults import defaults, told
from zero_mpi.config.step_range import step_range
from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.open import read_file
from zero_mpi.files.parse import parse_toml
from zero_mpi.files.text import LONGEST, show, shown
from zero_mpi.models import ARCHITECTURES
from zero_mpi.sharding.precision import precision_named


def flag(
    default: Any, kind: Any, group: str, text: str, *, fixed: bool = False, choices: Sequence[str] = ()
) -> Any:
    """A field of the configuration; `kind` is int, float, str, bool or list."""
    about = {"kind": kind, "group": group, "text": text, "fixed": fixed, "choices": tuple(choices)}
    if kind is list:
        return dataclasses.field(default_factory=list, metadata=about)
    return dataclasses.field(default=default, metadata=about)


@dataclass
class Config:
    """Everything that a run depends on. None means: worked out from the rest."""

    out: str = flag("runs/default", str, "run", "run directory")
    steps: int = flag(440, int, "run", "optimizer steps")
    seed: int = flag(0, int, "run", "of the first weights and the order of data", fixed=True)
    resume: str = flag("auto", str, "run", "auto: newest in OUT; never; or a folder")
    dry_run: bool = flag(False, bool, "run", "say what the run would take and do, and stop")
    sample: int = flag(400, int, "run", "tokens of text to show at the end; 0: none")
    prompt: str = flag("def ", str, "run", "what that text continues")

    arch: str | None = flag(None, str, "model", "architecture", choices=tuple(ARCHITECTURES))
    layers: int | None = flag(None, int, "model", "blocks")
    dim: int | None = flag(None, int, "model", "width")
    heads: int | None = flag(None, int, "model", "query heads")
    kv_heads: int | None = flag(None, int, "model", "key/value heads (default: as many as heads)")
    ffn: int | None = flag(None, int, "model", "feed-forward width (default: by architecture)")
    context: int = flag(128, int, "model", "tokens per training window", fixed=True)
    tied: bool | None = flag(None, bool, "model", "head tied to the embedding (default: gpt2)")
    vocab_size: int | None = flag(None, int, "model", "vocabulary, for token files")
    init: str | None = flag(None, str, "model", "GGUF or safetensors folder to start from instead")
    freeze: list[str] = flag(
        None, list, "model", "parameters to leave as they are, by their names", fixed=True
    )

    data: list[str] = flag(None, list, "data", "text or .npy token files (default: Python's library)")
    tokenizer: str | None = flag(
        None,
        str,
        "data",
        "byte, from-init (default with --init), or a file",
    )
    val_fraction: float = flag(0.05, float, "data", "of the documents to hold out; 0: none", fixed=True)

    batch_size: int = flag(16, int, "batch", "sequences per step over all ranks", fixed=True)
    micro_batch: int = flag(2, int, "batch", "sequences per forward", fixed=True)

    lr: float = flag(None, float, "optimizer", "learning rate after the warm-up")
    min_lr: float | None = flag(None, float, "optimizer", "learning rate at the end (default: lr / 10)")
    warmup: int = flag(40, int, "optimizer", "steps of linear warm-up")
    schedule: str = flag("cosine", str, "optimizer", "decay", choices=("cosine", "linear", "constant"))
    weight_decay: float = flag(0.1, float, "optimizer", "decay of matrices")
    beta1: float = flag(0.9, float, "optimizer", "decay of the first moment")
    beta2: float = flag(0.95, float, "optimizer", "decay of the second moment")
    eps: float = flag(1e-8, float, "optimizer", "added to the second moment's root")
    grad_clip: float = flag(1.0, float, "optimizer", "largest norm of the gradient; 0: any")

    strategy: str = flag(
        "full-shard",
        str,
        "sharding",
        "what is sharded; hybrid-shard: full-shard inside a node",
        choices=("full-shard", "shard-grad-op", "no-shard", "hybrid-shard"),
    )
    bucket_mb: float = flag(25.0, float, "sharding", "MiB per bucket of no-shard")
    prefetch: int = flag(1, int, "sharding", "stages to gather parameters ahead")
    recompute: bool = flag(False, bool, "sharding", "keep only each block's input for backward")
    reduction: str = flag(
        "exact",
        str,
        "sharding",
        "exact: same bits on any ranks; or fast",
        choices=("exact", "fast"),
    )
    transport: str = flag(
        "auto",
        str,
        "sharding",
        "mpi: messages; shared: memory that the ranks of a node share; auto: shared where it is possible. "
        "On a GPU, mpi: straight from it; staged: through host memory; nccl; auto: mpi where MPI can do it",
        choices=("auto", "mpi", "shared", "staged", "nccl"),
    )
    device: str = flag(
        "auto",
        str,
        "machine",
        "where arrays live",
        choices=("auto", "cpu", "cuda"),
    )
    precision: str = flag(
        "fp32",
        str,
        "machine",
        "of what is computed",
        choices=("fp32", "bf16", "fp16"),
    )
    reduce_dtype: str | None = flag(
        None, str, "machine", "of gradients on their way (default: --precision's)"
    )
    offload: str = flag(
        "none",
        str,
        "machine",
        "from the GPU to the host's memory: moments; or state, with the fp32 parameters of bf16",
        choices=("none", "moments", "state"),
    )
    threads: str | None = flag(None, str, "machine", "of BLAS per rank, auto: its cores (default: 1)")

    save_every: int | None = flag(
        None, int, "records", "steps between checkpoints; 0: at the end only (default: every ten minutes)"
    )
    keep: int = flag(3, int, "records", "checkpoints to keep; 0: all")
    async_save: bool = flag(False, bool, "records", "go on training while a checkpoint is written")
    checkpoint_io: str = flag(
        "gather",
        str,
        "records",
        "gather: rank 0 writes; parallel: all ranks write their ranges by MPI-IO",
        choices=("gather", "parallel"),
    )
    eval_every: int = flag(110, int, "records", "steps between evaluations; 0: at the end")
    eval_windows: int = flag(128, int, "records", "held-out windows per evaluation")
    log_every: int = flag(20, int, "records", "steps between lines where no progress bar is shown")
    log_level: str = flag(
        "info",
        str,
        "records",
        "least level of what is said",
        choices=("debug", "info", "warning", "error"),
    )
    tensorboard: bool = flag(False, bool, "records", "TensorBoard's event files in OUT/tensorboard")
    trace: str | None = flag(None, str, "records", "time line of all ranks to write: .json or .json.gz")
    trace_steps: str | None = flag(None, str, "records", "as 10:13, which is 10 to 12 (default: three)")
    timeout: float = flag(
        600.0, float, "records", "end the job after such seconds without progress; 0: never"
    )
    check_collectives: bool = flag(False, bool, "records", "compare ranks before each collective: slow")
    max_time: str | None = flag(
        None,
        str,
        "records",
        "save and stop (status 75) within 3h50m, say",
    )

    def __post_init__(self) -> None:
        for name, value in defaults(self.init).items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def fixed(self) -> dict[str, Any]:
        """The settings that a resumed run must keep, beside the model's sizes."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["fixed"]}

    def plan(self) -> dict[str, Any]:
        """The settings that a resumed run may change, with which its rest becomes another one."""
        names = [f.name for f in dataclasses.fields(self) if f.metadata["group"] == "optimizer"]
        return {name: getattr(self, name) for name in ("steps", *names)}


MOST_SETTINGS = 1 << 20  # bytes of a TOML file
FIELDS = {field.name: field for field in dataclasses.fields(Config)}


ALIASES = {"learning_rate": "lr"}  # another name of a setting, as a flag and in a file
METAVARS = {  # what a value is called in --help; the others are N, X and TEXT
    "out": "DIR",
    "resume": "WHAT",
    "init": "PATH",
    "data": "PATH",
    "freeze": "PATTERN",
    "tokenizer": "WHICH",
    "threads": "N",
    "max_time": "TIME",
    "trace": "FILE",
    "trace_steps": "A:B",
    "reduce_dtype": "TYPE",
}
EXAMPLES = """\
Any switch --x is turned off by --no-x. Examples:

  mpirun -n 8 python -m zero_mpi.train
  mpirun -n 8 python -m zero_mpi.train --data TEXT --out runs/mine
  mpirun -n 2 python -m zero_mpi.train --init MODEL.gguf --data TEXT --lr 1e-4

The same command goes on where a run stopped; with --dry-run it says what it would do."""


def spelled(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def make_parser() -> Parser:
    """The command line, in groups. Flags that are not given are absent from the result."""
    parser = Parser(
        prog="mpirun -n N python -m zero_mpi.train",
        usage="%(prog)s [flags]",
        description="Train a transformer sharded over MPI ranks, into a GGUF that llama.cpp opens.",
        epilog=EXAMPLES,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file that sets the same names as the flags")
    groups: dict[str, Any] = {}
    for field in FIELDS.values():
        about = field.metadata
        group = groups.setdefault(about["group"], None) or parser.add_argument_group(about["group"])
        groups[about["group"]] = group
        others = [spelled(name) for name, setting in ALIASES.items() if setting == field.name]
        group.add_argument(spelled(field.name), *others, **argument(field))
    return parser


def argument(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """What argparse needs to know of a setting."""
    about = field.metadata
    text, kind = with_choices(about["text"], about["choices"]), about["kind"]
    if not any(field.default is nothing for nothing in (None, False, dataclasses.MISSING)):
        text += f" (default: {field.default})"
    text += told(field.name)
    common = {"help": text.replace("%", "%%")}
    if kind is bool:
        return {**common, "action": argparse.BooleanOptionalAction}
    if about["choices"]:
        return {**common, "choices": about["choices"]}
    metavar = METAVARS.get(field.name, KINDS.get(kind, "TEXT"))
    if kind is list:
        return {**common, "nargs": "+", "metavar": metavar}
    return {**common, "type": kind, "metavar": metavar}


def parse(arguments: Sequence[str]) -> Config:
    """The configuration of a command line; raises UsageError for what cannot be meant."""
    given = vars(make_parser().parse_args(arguments))
    path = given.pop("config", None)
    settings = read_toml(Path(path)) if path else {}
    config = Config(**{**settings, **given})
    check(config)
    return config


def read_toml(path: Path) -> dict[str, Any]:
    """Settings of a TOML file, by flag names with - or _; raises UsageError naming file and key."""
    try:
        raw = parse_toml(read_file(path, MOST_SETTINGS, "a TOML file"))
    except FileError as error:
        raise UsageError(f"--config {error}") from None
    except ValueError as error:
        raise UsageError(f"--config {shown(path)}: not a TOML file: {error}") from None
    return {setting_of(name): checked_type(path, name, value) for name, value in raw.items()}


def setting_of(key: str) -> str:
    """The name of the setting that a key of a file means."""
    name = key.replace("-", "_")
    return ALIASES.get(name, name)


def checked_type(path: Path, key: str, value: Any) -> Any:
    """`value` as the setting's type; raises UsageError for an unknown key or another type."""
    field = FIELDS.get(setting_of(key))
    if field is None:
        meant = nearest(key.replace("-", "_"), [*FIELDS, *ALIASES]) or "; see --help for the names"
        raise UsageError(f"--config {shown(path)}: {show(key)} is not a setting{meant}")
    kind = field.metadata["kind"]
    if kind is float and type(value) is int and abs(value) < LARGEST:
        return float(value)
    if field.name in ("threads", "max_time") and type(value) is int and abs(value) < LARGEST:
        return str(value)  # a number is one of the ways to write these
    if kind is list and isinstance(value, list) and not all(isinstance(item, str) for item in value):
        raise UsageError(f"--config {shown(path)}: {key} = {shown([*value[:9]])}, expected a list of texts")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UsageError(f"--config {shown(path)}: {key} = {quoted(value)}, expected {kind.__name__}")
    return value


def quoted(value: Any) -> str:
    """A value of a TOML file for people, a text in quotes."""
    return show(value, LONGEST) if isinstance(value, str) else shown(value)


def write_toml(config: Config) -> str:
    """The configuration as TOML text that `--config` reads back."""
    import tomli_w

    settings: Mapping[str, Any] = dataclasses.asdict(config)
    return tomli_w.dumps({name: value for name, value in settings.items() if value is not None})


LEAST = {
    "steps": 0, "batch_size": 1, "micro_batch": 1, "context": 1, "layers": 1, "dim": 1, "heads": 1,
    "kv_heads": 1, "ffn": 1, "vocab_size": 1, "prefetch": 0, "save_every": 0, "keep": 0, "eval_every": 0,
    "eval_windows": 1, "log_every": 1, "warmup": 0, "sample": 0, "lr": 0, "min_lr": 0, "weight_decay": 0,
    "grad_clip": 0, "beta1": 0, "beta2": 0, "eps": 0, "seed": 0, "timeout": 0, "val_fraction": 0,
}  # fmt: skip
LARGEST = 1 << 62  # whole number: what 64 bits hold, and what is added to it
BELOW = {"beta1": 1, "beta2": 1, "val_fraction": 1}


def check(config: Config) -> None:
    """Raise UsageError for the first value that is out of range, naming the flag."""
    for name, least in LEAST.items():
        value = getattr(config, name)
        most = math.inf if isinstance(value, float) else LARGEST
        if value is not None and not least <= value < most:
            less = "" if value < most else f" and less than {most}"
            raise UsageError(f"{spelled(name)} {shown(value)}: expected at least {least}{less}")
    for name, bound in BELOW.items():
        if not getattr(config, name) < bound:
            raise UsageError(f"{spelled(name)} {getattr(config, name)}: expected less than {bound}")
    for name, field in FIELDS.items():
        choices = field.metadata["choices"]
        value = getattr(config, name)
        if choices and value is not None and value not in choices:
            meant = nearest(str(value), choices)
            raise UsageError(f"{spelled(name)} {shown(value)}: expected one of {', '.join(choices)}{meant}")
    if not 0 < config.bucket_mb < math.inf:
        raise UsageError(f"--bucket-mb {config.bucket_mb}: expected more than 0")
    thread_count(config.threads)
    precision_named(config.precision, config.reduce_dtype)
    seconds(config.max_time)
    step_range(config.trace_steps, config.steps)
    conflicts.refuse(config)
    for name in FIELDS.keys() - {"prompt"}:
        refuse_empty(spelled(name), getattr(config, name))


DURATION = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[hms]"
DURATION_PARTS = r"([0-9.]+)([hms])"


def thread_count(text: str | None) -> int | None:
    """`--threads` as a number, 0 for auto, None for not given; raises UsageError."""
    if text is None or text == "auto":
        return None if text is None else 0
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise UsageError(f"--threads {shown(text)}: expected a number of at least 1, or auto")
    return int(text)


def seconds(text: str | None) -> float | None:
    """A duration such as 3h50m, 90s, 15m or 3600 in seconds; raises UsageError."""
    if text is None:
        return None
    units = {"h": 3600, "m": 60, "s": 1}
    whole = text if text[-1:] in units else f"{text}s"
    if not re.fullmatch(f"({DURATION})+", whole):
        raise UsageError(f"--max-time {shown(text)}: expected a duration such as 3h50m, 90s or 3600")
    return float(sum(float(number) * units[unit] for number, unit in re.findall(DURATION_PARTS, whole)))
