"""Checks of settings: the range of each value, flags that contradict each other, and flags without effect.

A flag is an error if the run cannot do what the flag asks for. A flag that merely changes nothing causes a
warning of one line at the start, because a settings file often has more than a run needs. A flag counts as
given if its value is not the default, because OUT/config.toml contains all flags.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from zero_mpi import environment
from zero_mpi.cli.parser import nearest, refuse_empty
from zero_mpi.cli.text import plural
from zero_mpi.config.settings import ANY, CROSS_ENTROPY, FIELDS, FURTHER, STEPS, Config, spelled, step_range
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
LARGEST = 1 << 62  # exclusive limit of integer settings; the sum of two still fits in 64 bits
BELOW = {"beta1": 1, "beta2": 1, "val_fraction": 1, "label_smoothing": 0.5, "teacher_weight": 1.000001}
MANY_EPOCHS = 10
DURATION = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([hms])"  # number and unit
Number = TypeVar("Number", int, float)


def check(config: Config) -> None:
    """Raise UsageError, which names the flag, for the first invalid value or combination."""
    for name, minimum in LEAST.items():
        value = getattr(config, name)
        if value is not None:
            within(name, value, minimum, math.inf if isinstance(value, float) else LARGEST)
    for name, limit in BELOW.items():
        if not getattr(config, name) < limit:
            raise UsageError(f"{spelled(name)} {getattr(config, name)}: expected less than {limit}")
    for name, field in FIELDS.items():
        choices = field.metadata["choices"]
        value = getattr(config, name)
        if choices and value is not None and value not in choices:
            hint = nearest(str(value), choices)
            raise UsageError(f"{spelled(name)} {shown(value)}: expected one of {', '.join(choices)}{hint}")
    if config.ema is not None and not 0 < config.ema < 1:
        raise UsageError(f"--ema {config.ema}: expected more than 0 and less than 1, such as 0.999")
    for name, example in (("preference_beta", "0.1"), ("bucket_mb", "25")):
        if not 0 < (value := getattr(config, name)) < math.inf:
            raise UsageError(f"{spelled(name)} {value}: expected more than 0, such as {example}")
    thread_count(config.threads)
    precision_named(config.precision, config.reduce_dtype)
    seconds(config.max_time)
    rate_scales(config.lr_scale)
    step_range(config.trace_steps, config.steps)
    for name, condition, reason in CONTRADICTIONS:
        if is_given(config, name) and condition(config):
            raise UsageError(f"{written(config, name)}: {reason.format_map(vars(config))}")
    for name in FIELDS.keys() - {"prompt"}:
        refuse_empty(spelled(name), getattr(config, name))


def within(name: str, value: Number, minimum: float, limit: float = LARGEST) -> Number:
    """Return the value of a flag. Raise UsageError, with the flag, unless it is in [minimum, limit)."""
    if not minimum <= value < limit:
        clause = "" if value < limit else f" and less than {limit}"
        raise UsageError(f"{spelled(name)} {shown(value)}: expected at least {minimum}{clause}")
    return value


def thread_count(text: str | None) -> int | None:
    """Return the number in `--threads`: 0 for auto, None if not given. Raise UsageError for other text."""
    if text is None or text == "auto":
        return None if text is None else 0
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise UsageError(f"--threads {shown(text)}: expected a number of at least 1, or auto")
    return int(text)


def rate_scales(texts: Sequence[str]) -> dict[str, float]:
    """Return `--lr-scale` as pattern -> factor. Raise UsageError if an entry is invalid."""
    scales = dict[str, float]()
    for text in texts:
        pattern, _, factor = text.rpartition("=")
        scales.pop(pattern, None)  # if a pattern is repeated, only its last entry counts
        try:
            scales[pattern] = float(factor)
        except ValueError:
            pattern = ""
        if not pattern or not 0 <= scales[pattern] < math.inf:
            raise UsageError(
                f"--lr-scale {shown(text)}: expected PATTERN=X with X of at least 0, such as *.lora_b=16"
            )
    return scales


def seconds(text: str | None) -> float | None:
    """Return the seconds of a duration such as 3h50m, 90s, 15m or 3600. Raise UsageError for other text."""
    if text is None:
        return None
    units = {"h": 3600, "m": 60, "s": 1}
    duration = f"{text}s" if re.fullmatch(DURATION, f"{text}s") else text
    if not re.fullmatch(f"({DURATION})+", duration):
        raise UsageError(f"--max-time {shown(text)}: expected a duration such as 3h50m, 90s or 3600")
    return float(sum(float(number) * units[unit] for number, unit in re.findall(DURATION, duration)))


# ----------------------------------------------------------------------------------- combinations of flags


class Rule(NamedTuple):
    """Setting that is invalid or has no effect if `condition` is true. `reason`: {x} is setting x."""

    name: str
    condition: Callable[..., bool]  # gets the configuration, and for IDLE also the kind of data
    reason: str


class DataKind(NamedTuple):
    """Properties of --data: whether it has a tokenizer, and whether it consists of token files."""

    is_text: bool
    are_ids: bool = False


def apart(name: str, condition: Callable[[Config], bool], flag: str) -> Rule:
    return Rule(name, condition, f"cannot be combined with {flag}: remove one of them")


NO_ADAPTER = "needs an adapter: add --lora RANK"
NOT_FULL = "updates full matrices, not the adapters of --lora: use adamw"
FOR_FP64 = "is for CPUs and AdamW: remove --device cuda, --offload, --lora, --ema, --qat and --optimizer"
DIFFERS = "cannot be combined with --precision {precision}, whose matmuls differ between CPUs: use fp32"
EXACT_ONLY = "--reduction {reduction} is not reproducible: use --reduction exact"
CPU_ONLY = "not available on a GPU: use --device cpu"
IS_SET = "ZERO_MPI_BITS=portable is set: remove it from the environment"
CONTRADICTIONS = (
    Rule("lora_alpha", lambda c: c.lora is None, NO_ADAPTER),
    Rule("lora_targets", lambda c: c.lora is None, NO_ADAPTER),
    Rule("lora_init", lambda c: c.lora is None, "add --lora RANK, with the rank of this adapter"),
    Rule("add_tokens", lambda c: c.init is None, "needs a model: add --init MODEL"),
    apart("ema", lambda c: c.offload != "none", "--offload {offload}"),
    Rule("optimizer", lambda c: c.optimizer != "adamw" and c.lora is not None, NOT_FULL),
    apart("optimizer", lambda c: c.optimizer != "adamw" and c.offload != "none", "--offload {offload}"),
    Rule("precision", lambda c: c.precision == "fp64" and not is_plain(c), FOR_FP64),
    apart(
        "qat", lambda c: c.lora is not None and c.precision != "fp32", "--lora and --precision {precision}"
    ),
    apart("qat", lambda c: None not in (c.lora, c.add_tokens), "--lora and --add-tokens"),
    apart("qat", lambda c: bool(c.freeze), "--freeze"),
    apart("qat", lambda c: c.optimizer != "adamw", "--optimizer {optimizer}"),
    apart("qat", lambda c: c.ema is not None, "--ema"),
    apart("qat", lambda c: c.device == "cuda", "--device cuda"),
    Rule("epochs", lambda c: c.steps is not None, "excludes --steps {steps}: remove one of them"),
    Rule("trace_steps", lambda c: c.trace is None, "needs a timeline: add --trace FILE"),
    Rule("min_lr", lambda c: c.min_lr is not None and c.min_lr > c.lr, "expected at most --lr {lr}"),
    Rule("decay_steps", lambda c: c.schedule != "wsd", "needs a decay phase: add --schedule wsd"),
    Rule(
        "decay_steps",
        lambda c: c.steps is not None and (c.decay_steps or 0) > max(0, c.steps - c.warmup),
        "expected at most --steps {steps} minus --warmup {warmup}",
    ),
    Rule("bits", lambda c: c.bits == NATIVE and portable.active, IS_SET),
    Rule("bits", lambda c: c.bits == PORTABLE and c.precision != "fp32", DIFFERS),
    Rule("bits", lambda c: c.bits == PORTABLE and c.reduction != "exact", EXACT_ONLY),
    Rule("bits", lambda c: c.bits == PORTABLE and c.device == "cuda", CPU_ONLY),
    Rule("loss", lambda c: c.loss != CROSS_ENTROPY and not c.data, "needs pairs: add --data FILE.jsonl"),
    apart("teacher", lambda c: c.loss != CROSS_ENTROPY, "--loss {loss}"),
    apart("teacher", lambda c: c.bits == PORTABLE, "--bits {bits}"),
    Rule("patience", lambda c: not c.holds_out, "--val-fraction 0 leaves no validation data"),
    Rule("patience", lambda c: c.eval_every == 0, "--eval-every 0 evaluates only at the end"),
)
NOT_OF_LOSS = "--loss {loss} has no such constant"
IDS = "the token files of --data are used unchanged"
IDLE = (
    Rule("preference_beta", lambda c, _: c.preference is None, NOT_OF_LOSS),
    Rule("label_smoothing", lambda c, _: c.loss != "dpo", NOT_OF_LOSS),
    Rule("simpo_gamma", lambda c, _: c.loss != "simpo", NOT_OF_LOSS),
    Rule("desirable_weight", lambda c, _: c.loss != "kto", NOT_OF_LOSS),
    Rule("undesirable_weight", lambda c, _: c.loss != "kto", NOT_OF_LOSS),
    Rule("teacher_weight", lambda c, _: c.teacher is None, "it needs --teacher FILE"),
    Rule("loss_on", lambda c, _: c.preference is not None, "--loss {loss} counts answers only"),
    Rule("min_lr", lambda c, _: c.schedule == "constant", "--schedule constant has no decay"),
    Rule("eval_every", lambda c, _: not c.holds_out, "--val-fraction 0 leaves no validation data"),
    Rule("tokenizer", lambda c, data: not data.is_text, IDS),
    Rule("bos", lambda c, data: c.bos == ALWAYS and (not data.is_text or data.are_ids), IDS),
    Rule("control_tokens", lambda c, data: not data.is_text or data.are_ids, IDS),
)


def is_plain(c: Config) -> bool:
    """Return whether these settings allow training in float64."""
    settings = [c.offload, c.lora, c.ema, c.optimizer, c.qat]
    return c.device != "cuda" and settings == ["none", None, None, "adamw", None]


def without_effect(config: Config, data: DataKind) -> Iterator[str]:
    for name, condition, reason in IDLE:
        if is_given(config, name) and condition(config, data):
            yield f"{written(config, name)} has no effect: {reason.format_map(vars(config))}"


def is_given(config: Config, name: str) -> bool:
    return getattr(config, name) not in (FIELDS[name].default, [])


def written(config: Config, name: str) -> str:
    """Return a flag with its value, as on a command line."""
    return f"{spelled(name)} {shown(getattr(config, name))}"


# --------------------------------------------------------------------- checks that need the size of the data


def in_steps(config: Config, windows: int) -> Config:
    """Return the configuration with --epochs converted to --steps. `windows`: number of training windows.

    Records, checkpoints and OUT/config.toml contain this number of steps. The run reads each window at least
    `epochs` times, or about as often in a short mixture, whose shares are rounded; its last step may begin
    another epoch. Raises UsageError for flags that do not fit the number of steps.
    """
    if config.epochs is None:
        return replace(config, **STEPS) if config.steps is None else config
    run_config = replace(config, steps=-(-config.epochs * windows // config.batch_size), epochs=None)
    try:
        check(run_config)
    except UsageError as error:
        raise UsageError(f"{error} (--epochs {config.epochs} are {run_config.steps} steps)") from None
    return run_config


def cautions(config: Config, epochs: float) -> Iterator[str]:
    """Yield warnings about the length of a run, which reads the data `epochs` times."""
    if config.steps <= 2 * config.warmup > 2:
        yield (
            f"--warmup {config.warmup} takes half of --steps {config.steps} or more, at rates below --lr "
            f"{config.lr:g}; try --warmup {ANY['warmup']}"
        )
    if epochs > MANY_EPOCHS:
        yield f"--steps {config.steps} reads the data {epochs:.1f} times; try --epochs 3, or add data"


def remarks(config: Config, data: DataKind) -> Iterator[str]:
    """Yield the notes about its configuration that a run prints when it starts."""
    if config.removed:
        yield f"--config: removed settings have no effect: {', '.join(config.removed)}"
    if config.init is not None and config.lora is None and config.lr == FURTHER["lr"]:
        yield f"--lr {config.lr:g}: the default for pretrained weights (--init)"
    if config.init is not None and not config.data:
        yield Caution(f"--init without --data: training on {named(config.data)}; use --data for other text")
    yield from map(Caution, without_effect(config, data))
    for variable in environment.crowded():
        count = plural(environment.cores(), "core")
        yield Caution(f"{variable}: this rank has {count}; more threads only compete for them")


def threads_within(threads: int | None) -> int | None:
    """Return `threads` if this rank has that many cores. Raise UsageError if it has fewer."""
    cores = environment.cores()
    if threads is not None and threads > cores:
        raise UsageError(
            f"--threads {threads}: this rank has {plural(cores, 'core')}: use fewer threads or auto, or bind "
            f"each rank to more cores: {environment.binding(threads)}"
        )
    return threads
