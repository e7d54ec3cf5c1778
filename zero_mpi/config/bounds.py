"""Limits of each setting by itself: types, least and largest values, durations."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from zero_mpi import environment
from zero_mpi.cli.parser import nearest, refuse_empty
from zero_mpi.config.settings import ANY, FIELDS, FURTHER, STEPS, Config, spelled, step_range
from zero_mpi.data import named
from zero_mpi.data.tokenizers.byte import ALWAYS
from zero_mpi.environment import portable
from zero_mpi.environment.portable import NATIVE, PORTABLE
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.sharding.precision import precision_named
from zero_mpi.telemetry.log import Caution

LEAST = {
    "steps": 0, "epochs": 1, "batch_size": 1, "micro_batch": 1, "context": 1, "layers": 1, "dim": 1,
    "heads": 1, "kv_heads": 1, "ffn": 1, "experts": 1, "experts_used": 1,
    "expert_ffn": 1, "vocab_size": 1, "prefetch": 0, "save_every": 0, "keep": 0,
    "eval_every": 0, "patience": 1, "eval_windows": 1, "log_every": 1, "decay_steps": 0,
    "sample": 0, "lr": 0, "min_lr": 0, "weight_decay": 0, "grad_clip": 0, "beta1": 0, "beta2": 0, "eps": 0,
    "seed": 0, "timeout": 0, "val_fraction": 0, "lora": 1, "lora_alpha": 0,
    "writers_per_node": 1, "label_smoothing": 0, "teacher_weight": 0, "simpo_gamma": 0,
    "balance_loss": 0, "z_loss": 0,
    "desirable_weight": 0, "undesirable_weight": 0,
}  # fmt: skip
LARGEST = 1 << 62  # integer: fits 64 bits, with room for additions
Number = TypeVar("Number", int, float)
BELOW = {"beta1": 1, "beta2": 1, "val_fraction": 1, "label_smoothing": 0.5, "teacher_weight": 1.000001}


def check(config: Config) -> None:
    """Raise UsageError for the first value that is out of range, naming the flag."""
    for name, least in LEAST.items():
        value = getattr(config, name)
        if value is not None:
            within(name, value, least, math.inf if isinstance(value, float) else LARGEST)
    for name, bound in BELOW.items():
        if not getattr(config, name) < bound:
            raise UsageError(f"{spelled(name)} {getattr(config, name)}: expected less than {bound}")
    for name, field in FIELDS.items():
        choices = field.metadata["choices"]
        value = getattr(config, name)
        if choices and value is not None and value not in choices:
            meant = nearest(str(value), choices)
            raise UsageError(f"{spelled(name)} {shown(value)}: expected one of {', '.join(choices)}{meant}")
    if config.ema is not None and not 0 < config.ema < 1:
        raise UsageError(f"--ema {config.ema}: expected more than 0 and less than 1, such as 0.999")
    if not 0 < config.preference_beta < math.inf:
        raise UsageError(f"--preference-beta {config.preference_beta}: expected more than 0, such as 0.1")
    if not 0 < config.bucket_mb < math.inf:
        raise UsageError(f"--bucket-mb {config.bucket_mb}: expected more than 0")
    thread_count(config.threads)
    precision_named(config.precision, config.reduce_dtype)
    seconds(config.max_time)
    rate_scales(config.lr_scale)
    step_range(config.trace_steps, config.steps)
    refuse(config)
    for name in FIELDS.keys() - {"prompt"}:
        refuse_empty(spelled(name), getattr(config, name))


def within(name: str, value: Number, least: float, below: float = LARGEST) -> Number:
    """Return the value of a flag; raises UsageError, naming the flag, unless it is in [least, below)."""
    if not least <= value < below:
        less = "" if value < below else f" and less than {below}"
        raise UsageError(f"{spelled(name)} {shown(value)}: expected at least {least}{less}")
    return value


DURATION = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[hms]"
DURATION_PARTS = r"([0-9.]+)([hms])"


def thread_count(text: str | None) -> int | None:
    """Return `--threads` as a number, 0 for auto, None for not given; raises UsageError."""
    if text is None or text == "auto":
        return None if text is None else 0
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise UsageError(f"--threads {shown(text)}: expected a number of at least 1, or auto")
    return int(text)


def rate_scales(texts: Sequence[str]) -> dict[str, float]:
    """Return `--lr-scale` as pattern -> factor; raises UsageError."""
    found = dict[str, float]()
    for text in texts:
        pattern, _, factor = text.rpartition("=")
        found.pop(pattern, None)  # the last one counts, at its place
        try:
            found[pattern] = float(factor)
        except ValueError:
            pattern = ""
        if not pattern or not 0 <= found[pattern] < math.inf:
            raise UsageError(
                f"--lr-scale {shown(text)}: expected PATTERN=X with X of at least 0, such as *.lora_b=16"
            )
    return found


def seconds(text: str | None) -> float | None:
    """Return a duration such as 3h50m, 90s, 15m or 3600 in seconds; raises UsageError."""
    if text is None:
        return None
    units = {"h": 3600, "m": 60, "s": 1}
    whole = text if text[-1:] in units else f"{text}s"
    if not re.fullmatch(f"({DURATION})+", whole):
        raise UsageError(f"--max-time {shown(text)}: expected a duration such as 3h50m, 90s or 3600")
    return float(sum(float(number) * units[unit] for number, unit in re.findall(DURATION_PARTS, whole)))


if TYPE_CHECKING:
    from zero_mpi.config.settings import Config


class Contradiction(NamedTuple):
    """`name` is invalid if `when` holds. `why` and the remedy, with settings in braces."""

    name: str
    when: Callable[[Config], bool]
    why: str


ADAPTERLESS = "needs an adapter: add --lora RANK"
PLAIN = ["none", None, None, "adamw", None]  # settings beside which float64 is trained
CONTRADICTIONS = (
    Contradiction("lora_alpha", lambda c: c.lora is None, ADAPTERLESS),
    Contradiction("lora_targets", lambda c: c.lora is None and bool(c.lora_targets), ADAPTERLESS),
    Contradiction("lora_init", lambda c: c.lora is None, ADAPTERLESS),
    Contradiction(
        "ema",
        lambda c: c.offload != "none",
        "cannot be combined with --offload {offload}: remove one of them",
    ),
    Contradiction(
        "optimizer",
        lambda c: c.optimizer != "adamw" and c.lora is not None,
        "updates full matrices, not the adapters of --lora: use adamw",
    ),
    Contradiction(
        "optimizer",
        lambda c: c.optimizer != "adamw" and c.offload != "none",
        "cannot be combined with --offload {offload}: remove one of them",
    ),
    Contradiction(
        "precision",
        lambda c: (
            c.precision == "fp64"
            and (c.device == "cuda" or [c.offload, c.lora, c.ema, c.optimizer, c.qat] != PLAIN)
        ),
        "is for CPUs and AdamW: remove --device cuda, --offload, --lora, --ema, --qat and --optimizer",
    ),
    *(
        Contradiction("qat", when, f"cannot be combined with {flag}: remove one of them")
        for flag, when in {
            "--lora": lambda c: c.lora is not None,
            "--freeze": lambda c: bool(c.freeze),
            "--optimizer {optimizer}": lambda c: c.optimizer != "adamw",
            "--ema": lambda c: c.ema is not None,
            "--device cuda": lambda c: c.device == "cuda",
        }.items()
    ),
    Contradiction("epochs", lambda c: c.steps is not None, "give either this or --steps {steps}"),
    Contradiction("trace_steps", lambda c: c.trace is None, "needs a timeline: add --trace FILE"),
    Contradiction(
        "min_lr",
        lambda c: c.min_lr is not None and c.min_lr > c.lr,
        "expected at most --lr {lr}",
    ),
    Contradiction(
        "decay_steps",
        lambda c: c.schedule != "wsd",
        "needs a decay at the end: add --schedule wsd",
    ),
    Contradiction(
        "decay_steps",
        lambda c: c.steps is not None and (c.decay_steps or 0) > max(0, c.steps - c.warmup),
        "expected at most --steps {steps} minus --warmup {warmup}",
    ),
    Contradiction(
        "bits",
        lambda c: c.bits == NATIVE and portable.active,
        "ZERO_MPI_BITS=portable is set: remove it from the environment",
    ),
    Contradiction(
        "bits",
        lambda c: c.bits == PORTABLE and c.precision != "fp32",
        "cannot be combined with --precision {precision}, whose matmuls differ between CPUs: use fp32",
    ),
    Contradiction(
        "bits",
        lambda c: c.bits == PORTABLE and c.reduction != "exact",
        "--reduction {reduction} is not reproducible: use --reduction exact",
    ),
    Contradiction(
        "bits",
        lambda c: c.bits == PORTABLE and c.device == "cuda",
        "not available on a GPU: use --device cpu",
    ),
    Contradiction(
        "loss",
        lambda c: c.loss != "cross-entropy" and not c.data,
        "needs pairs: add --data FILE.jsonl",
    ),
    Contradiction(
        "teacher",
        lambda c: c.loss != "cross-entropy",
        "cannot be combined with --loss {loss}: remove one of them",
    ),
    Contradiction(
        "teacher",
        lambda c: c.bits == PORTABLE,
        "cannot be combined with --bits {bits}: remove one of them",
    ),
    Contradiction("patience", lambda c: not c.holds_out, "--val-fraction 0 leaves no validation data"),
    Contradiction("patience", lambda c: c.eval_every == 0, "--eval-every 0 evaluates only at the end"),
)


@dataclass(frozen=True)
class FlagContext:
    """A configuration, with the kind of data, which also decides what its flags do.

    is_text   the data are text, or are token files with their tokenizer beside them
    are_ids   the data are token files
    """

    config: Config
    is_text: bool
    are_ids: bool = False


class Idle(NamedTuple):
    """`name` does nothing if `when` holds. `why` and the remedy, with settings in braces."""

    name: str
    when: Callable[[FlagContext], bool]
    why: str


CONSTANTS = {"label_smoothing": "dpo", "simpo_gamma": "simpo"}
CONSTANTS |= {"desirable_weight": "kto", "undesirable_weight": "kto"}


def of_losses() -> Iterator[Idle]:
    """Yield a row for each constant that only some losses have."""
    why = "--loss {loss} has no such constant"
    yield Idle("preference_beta", lambda s: s.config.preference is None, why)
    for name, loss in CONSTANTS.items():
        yield Idle(name, lambda s, loss=loss: s.config.loss != loss, why)  # type: ignore[misc]
    yield Idle("teacher_weight", lambda s: s.config.teacher is None, "there is no --teacher")
    yield Idle("loss_on", lambda s: s.config.preference is not None, "answers count with --loss {loss}")


NO_TEXT = "the token files of --data have no tokenizer"
IDS = "the token files of --data are used unchanged"
IDLE = (
    *of_losses(),
    Idle("min_lr", lambda s: s.config.schedule == "constant", "--schedule constant has no decay"),
    Idle("bucket_mb", lambda s: s.config.strategy != "no-shard", "only --strategy no-shard has buckets"),
    Idle(
        "prefetch",
        lambda s: s.config.strategy in ("no-shard", "shard-grad-op"),
        "--strategy {strategy} keeps parameters gathered",
    ),
    Idle("val_fraction", lambda s: bool(s.config.val_data), "--val-data is the validation data"),
    Idle("eval_every", lambda s: not s.config.holds_out, "--val-fraction 0 leaves no validation data"),
    Idle("eval_windows", lambda s: not s.config.holds_out, "--val-fraction 0 leaves no validation data"),
    Idle(
        "writers_per_node",
        lambda s: s.config.checkpoint_io == "gather",
        "--checkpoint-io gather: rank 0 writes",
    ),
    Idle("prompt", lambda s: not s.is_text, NO_TEXT),
    Idle("prompt", lambda s: s.is_text and s.config.sample == 0, "--sample 0 prints no text"),
    Idle("sample", lambda s: not s.is_text and s.config.sample > 0, NO_TEXT),
    Idle("tokenizer", lambda s: not s.is_text, IDS),
    Idle("bos", lambda s: s.config.bos == ALWAYS and (not s.is_text or s.are_ids), IDS),
    Idle("control_tokens", lambda s: not s.is_text or s.are_ids, IDS),
    Idle(
        "micro_batch",
        lambda s: s.config.micro_batch > s.config.batch_size,
        "--batch-size {batch_size} is smaller",
    ),
)


def refuse(config: Config) -> None:
    """Raise UsageError for the first flag that another one contradicts."""
    for name, when, why in CONTRADICTIONS:
        if given(config, name) and when(config):
            raise UsageError(f"{written(config, name)}: {filled(why, config)}")


def without_effect(setting: FlagContext) -> Iterator[str]:
    """Yield a line for each flag that does nothing here, or not what it says."""
    config = setting.config
    for name, when, why in IDLE:
        if given(config, name) and when(setting):
            yield f"{written(config, name)} has no effect: {filled(why, config)}"


def given(config: Config, name: str) -> bool:
    """Return whether a setting differs from its default."""
    return bool(getattr(config, name) != next(f.default for f in fields(config) if f.name == name))


def written(config: Config, name: str) -> str:
    """Return a flag with its value."""
    return f"--{name.replace('_', '-')} {shown(getattr(config, name))}"


def filled(text: str, config: Config) -> str:
    """Return a text with the names in braces replaced by their settings."""
    values: dict[str, Any] = vars(config)
    return text.format_map(values)


MANY_EPOCHS = 10


def in_steps(config: Config, windows: int) -> Config:
    """Return the configuration with its epochs, if any, converted to steps; `windows`: windows in the data.

    Each window is seen at least so many times: the last step may begin the next epoch. Raises UsageError for
    flags that do not fit the number of steps.
    """
    if config.epochs is None:
        return replace(config, **STEPS) if config.steps is None else config
    counted = replace(config, steps=-(-config.epochs * windows // config.batch_size), epochs=None)
    try:
        check(counted)
    except UsageError as error:
        raise UsageError(f"{error} (--epochs {config.epochs} are {counted.steps} steps)") from None
    return counted


def cautions(config: Config, epochs: float) -> Iterator[str]:
    """Yield warnings on the length of a run whose steps read the data so many times."""
    if config.steps <= 2 * config.warmup > 2:
        yield (
            f"--warmup {config.warmup} takes half of --steps {config.steps} or more, at rates below --lr "
            f"{config.lr:g}; try --warmup {ANY['warmup']}"
        )
    if epochs > MANY_EPOCHS:
        yield f"--steps {config.steps} reads the data {epochs:.1f} times; try --epochs 3, or add data"


def remarks(config: Config, is_text: bool, are_ids: bool = False) -> Iterator[str]:
    """Yield notes on a configuration. `is_text`, `are_ids`: as `FlagContext` has them."""
    if config.removed:
        yield f"--config: removed settings have no effect: {', '.join(config.removed)}"
    if config.init is not None and config.lora is None and config.lr == FURTHER["lr"]:
        yield f"--lr {config.lr:g}: the default for pretrained weights (--init)"
    if config.init is not None and not config.data:
        yield Caution(f"--init without --data: training on {named(config.data)}; use --data for other text")
    yield from map(Caution, without_effect(FlagContext(config, is_text, are_ids)))
    for variable in environment.crowded():
        yield Caution(f"{variable}: this rank has {cores()}; more threads only compete for them")


def threads_within(wanted: int | None) -> int | None:
    """Return `wanted` if this rank has that many cores; else raise UsageError."""
    if wanted is not None and wanted > environment.cores():
        raise UsageError(
            f"--threads {wanted}: this rank has {cores()}: use fewer threads or auto, or bind each rank to "
            f"more cores: {environment.binding(wanted)}"
        )
    return wanted


def cores() -> str:
    """Return the number of cores that this process may run on, in words."""
    count = environment.cores()
    return f"{count} core{'s' * (count > 1)}"
