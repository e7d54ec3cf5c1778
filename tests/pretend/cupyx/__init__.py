"""Subset of cupyx that the package uses: pinned memory, which is ordinary memory on the simulated device."""

from typing import Any

import numpy as np


def empty_pinned(shape: Any, dtype: Any = float, order: str = "C") -> np.ndarray:
    return np.empty(shape, dtype)
