"""Limits of each setting by itself: types, least and largest values, durations."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TypeVar

from zero_mpi.cli.parser import nearest, refuse_empty
from zero_mpi.config import conflicts
from zero_mpi.config.settings import FIELDS, Config, spelled, step_range
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.sharding.precision import precision_named

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
    conflicts.refuse(config)
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
