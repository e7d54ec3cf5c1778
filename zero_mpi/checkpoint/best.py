"""The best evaluation of a run, as its checkpoints remember it: a run that goes on compares with it.

A run without `--patience` keeps no account, and its checkpoints have none of these keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zero_mpi.files.gguf_keys import GGUFKeys

LOSS, STEP, SINCE = (f"training.best_{name}" for name in ("val_loss", "iteration", "evaluations_since"))


@dataclass(frozen=True)
class Best:
    """The lowest held-out loss so far.

    loss    nats a token; infinite as long as there is none
    step    after which it was found; 0: there is none
    since   evaluations after that one
    """

    loss: float = math.inf
    step: int = 0
    since: int = 0

    def after(self, step: int, loss: float) -> Best:
        """What it is with the evaluation after `step`; a loss that is no number is never better."""
        return Best(loss, step) if loss < self.loss else replace(self, since=self.since + 1)

    def is_of(self, step: int) -> bool:
        """Whether it was found after that step."""
        return 0 < step == self.step

    def is_used_up(self, patience: int | None) -> bool:
        """Whether so many evaluations in a row were no better; None: any number may be."""
        return patience is not None and self.since >= patience

    def keys(self) -> dict[str, Any]:
        """The keys of a checkpoint that say it; none where nothing was evaluated."""
        loss = {LOSS: np.float64(self.loss)} if self.step else {}
        return {} if self == Best() else {**loss, STEP: np.uint64(self.step), SINCE: np.uint64(self.since)}


def read_best(keys: GGUFKeys) -> Best:
    """What the keys of a checkpoint say; raises FileError for what cannot be."""
    loss = keys.number(LOSS)
    return Best(math.inf if loss is None else loss, keys.whole(STEP) or 0, keys.whole(SINCE) or 0)
