"""Flags that contradict others, or that others leave without effect: two tables.

A flag is refused if it asks for something that would never happen. A flag that merely changes nothing is
noted in one line at the start: files of settings hold more than a run needs. A flag counts as given if its
value is not the default, because OUT/config.toml of a run gives all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from zero_mpi.data.control_tokens import ALWAYS
from zero_mpi.environment import portable
from zero_mpi.environment.portable import NATIVE, PORTABLE
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown

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
            "--lora and --precision {precision}": lambda c: c.lora is not None and c.precision != "fp32",
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
