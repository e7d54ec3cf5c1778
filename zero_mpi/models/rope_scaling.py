"""Scaling of rotary positions beyond the context of a model's first training, as described by GGUF keys.

`linear` divides all frequencies by a factor (Chen et al., 2023). `yarn` keeps high frequencies, divides low
ones, interpolates along a ramp between them, and multiplies q and k by a magnitude that grows with the
factor's logarithm (Peng et al., "YaRN", 2023). Llama 3 has its own divisors in a tensor instead.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from zero_mpi.errors import UsageError
from zero_mpi.models.model_config import ModelKeys, Read
from zero_mpi.ops.elementary import log

ROPE_FREQS = "rope_freqs.weight"
NONE, LINEAR, YARN = "none", "linear", "yarn"
TYPE, FACTOR, ORIGINAL = (f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length"))
OLD_FACTOR = "rope.scale_linear"
# A frequency is high from FAST rotations within the original context on, and low up to SLOW rotations.
FAST, SLOW = 32.0, 1.0
# Keys of YaRN's other numbers, and the only supported value of each.
FIXED = {
    "rope.scaling.yarn_beta_fast": FAST,
    "rope.scaling.yarn_beta_slow": SLOW,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


@dataclass(frozen=True)
class RopeScaling:
    """Kind of scaling, `linear` or `yarn`; its factor; and for yarn, the context before scaling."""

    kind: str
    factor: float
    original: int = 0

    @classmethod
    def from_gguf(cls, keys: ModelKeys) -> Self | None:
        """Return the scaling in a file's keys, None if there is none; raise UsageError for other kinds."""
        for name, only in FIXED.items():
            keys.require(name, only)
        kind = keys.text(TYPE) or LINEAR  # llama.cpp's default
        factor = keys.number(FACTOR, 0) or keys.number(OLD_FACTOR, 0) or 1.0
        if kind == NONE or (kind == LINEAR and factor == 1):
            return None
        if kind not in (LINEAR, YARN):
            keys.refuse([TYPE])
        if kind == LINEAR:
            return cls(kind, factor)
        base = keys.number("rope.freq_base", 10000.0)
        if factor < 1 or base <= 1:
            raise UsageError(
                f"the GGUF keys {keys.arch}.rope.*: yarn takes a factor of at least 1 and a base above 1, "
                f"found {factor:g} and {base:g}"
            )
        return cls(kind, factor, keys.size(ORIGINAL, keys.size("context_length")))

    def metadata(self) -> dict[str, Any]:
        """Return the keys, without the prefix."""
        keys = {TYPE: self.kind, FACTOR: np.float32(self.factor)}
        if self.kind == LINEAR:
            return keys
        return keys | {ORIGINAL: np.uint32(self.original)}

    def divisors(self, width: int, base: float) -> tuple[float, ...]:
        """Return the divisors of the width / 2 frequencies of a head."""
        pairs = np.arange(width // 2)
        if self.kind == LINEAR:
            return (self.factor,) * len(pairs)
        low, high = self._ramp(width, base)
        quick = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
        return tuple((1 / (quick + (1 - quick) / self.factor)).tolist())

    def _ramp(self, width: int, base: float) -> tuple[float, float]:
        """Return the last pair with a high frequency, and the first with a low one: the ramp's ends."""
        places = [
            width * log(self.original / (turns * 2 * math.pi)) / (2 * log(base)) for turns in (FAST, SLOW)
        ]
        return max(0.0, math.floor(places[0])), min(width - 1.0, math.ceil(places[1]))

    @property
    def magnitude(self) -> float:
        """Factor by which queries and keys are multiplied when they are rotated."""
        return 1.0 + 0.1 * log(self.factor) if self.kind == YARN else 1.0


def read_factors(
    tensors: Collection[str], read: Read | None, count: int, name: str = ROPE_FREQS
) -> tuple[float, ...]:
    """Return the `count` values of a tensor; raise UsageError unless they can divide frequencies."""

    def check(shape: tuple[int, ...]) -> None:
        if shape != (count,):
            raise UsageError(f"{name} has shape {shape}, expected ({count},): one a pair of a head")

    if read is None:
        raise UsageError(f"{name} is part of the configuration, but no reader for it was given")
    if isinstance(tensors, Mapping):
        check(tensors[name])  # before the tensor is read: a shape from a file may be of any size
    values = read(name)
    check(values.shape)
    if not (np.isfinite(values) & (values > 0)).all():
        raise UsageError(f"{name} divides frequencies: expected finite numbers above 0, found others")
    return tuple(values.tolist())
